"""Every verb of the command line and every option, as a page that is made of the parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from torchmix.cli.main import EXIT_CODES, VERBS, command_parser

HEAD = """# Command line

Every verb and every option, as `torchmix VERB --help` prints them. [The guide](guide.md) has the verbs in the order in
which a person meets them.
"""


def commands_page() -> str:
    """The page, in Markdown."""
    verbs = next(action for action in command_parser()._actions if isinstance(action, argparse._SubParsersAction))
    parts = [HEAD]
    for name, verb in VERBS:
        parts.append(f"## torchmix {name}\n\n{verb.HELP[0].upper()}{verb.HELP[1:]}.\n")
        parts.append("\n".join(_lines(verbs.choices[name])) + "\n")
    parts.append(f"## Exit codes\n\n{EXIT_CODES.partition(': ')[2]}\n")
    return "\n".join(parts)


def _lines(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The table of a parser's arguments, and those of verbs below it."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for action in below:
        for name, one in action.choices.items():
            yield f"### {parser.prog} {name}"
            yield ""
            yield from _lines(one)
            yield ""
    if below:
        return
    yield "| argument | what |"
    yield "|---|---|"
    formatter = argparse.HelpFormatter(parser.prog)
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
            continue
        words = action.option_strings or [str(action.metavar or "|".join(action.choices or ()) or action.dest)]
        value = "" if not action.option_strings or action.nargs == 0 else " " + _value(action, formatter)
        named = ", ".join(f"`{word}{value}`".replace("|", "\\|") for word in words)
        help_text = formatter._expand_help(action) if action.help else ""
        told = " ".join(help_text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
        yield f"| {named} | {told} |"


def _value(action: argparse.Action, formatter: argparse.HelpFormatter) -> str:
    """What stands behind an option."""
    return formatter._format_args(action, formatter._get_default_metavar_for_optional(action))
