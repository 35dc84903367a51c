"""The command line: `torchmix check | index | plan | query | show RECIPE`, and verbs with arguments of their own.

An error that torchmix raises on purpose is one clear message on stderr, without a traceback; any other is a bug and
keeps its traceback. Logging is set up here and nowhere else. Costs the import of pyarrow, not of torch.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from torchmix import __version__
from torchmix.cli import (
    calibrate,
    check,
    diff,
    doctor,
    index,
    keys,
    profile,
    properties,
    query,
    reframe,
    serve,
    show,
    top,
    trace,
    tune,
)
from torchmix.cli.init import command as init
from torchmix.cli.plan import command as plan
from torchmix.cli.report import command as report
from torchmix.cli.terminal import ExitCode, add_output, print_json
from torchmix.errors import OptionError, RecipeError, TopologyError, TorchmixError
from torchmix.recipe.build import nearest

VERBS = (
    ("init", init),
    ("check", check),
    ("index", index),
    ("properties", properties),
    ("query", query),
    ("plan", plan),
    ("profile", profile),
    ("show", show),
    ("trace", trace),
    ("report", report),
    ("diff", diff),
    ("serve", serve),
    ("keys", keys),
    ("top", top),
    ("doctor", doctor),
    ("calibrate", calibrate),
    ("tune", tune),
    ("reframe", reframe),
)
EXIT_CODES = "exit codes: 0 ok, 1 findings, 2 usage or recipe, 3 data"
FIRST_VERBS = """\
begin with:
  torchmix init FILE...       or, for a small example: torchmix init --demo .
  torchmix index recipe.yaml
  torchmix check recipe.yaml --steps 100
  torchmix plan recipe.yaml --steps 100 --dp 8
`torchmix VERB --help` has the options of a verb.

"""


def main(words: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        words: The arguments, without the program's name; None for those of this process.

    Returns:
        The exit code.
    """
    words = sys.argv[1:] if words is None else words
    if words and not words[0].startswith("-") and words[0] not in dict(VERBS):
        near = nearest(words[0], dict(VERBS))
        print(f"torchmix: there is no verb {words[0]!r}{near}; torchmix --help lists them", file=sys.stderr)
        return int(ExitCode.USAGE)
    try:
        parser = command_parser()
        arguments, unknown = parser.parse_known_args(words)
    except SystemExit as done:  # argparse has printed help, version or what is wrong
        return int(done.code or 0)
    if unknown:
        return _refuse(unknown[0], next(word for word in words if word in dict(VERBS)), parser)
    level = logging.INFO if arguments.verbose else logging.ERROR if arguments.quiet else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(message)s")
    try:
        return int(arguments.run(arguments))
    except TorchmixError as error:
        return _report(error, arguments)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has seen enough; its end must not fail at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.OK)
    except OSError as error:  # a full disk, a folder that may not be written
        what = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        print(f"torchmix: {what}", file=sys.stderr)
        return int(ExitCode.DATA)


def command_parser() -> argparse.ArgumentParser:
    """The parser of all verbs."""
    parser = argparse.ArgumentParser(
        prog="torchmix",
        description="The data plane of a training run.",
        epilog=FIRST_VERBS + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"torchmix {__version__}")
    parser.add_argument(
        "--print-completion",
        action=_PrintCompletion,
        choices=("bash", "zsh", "tcsh"),
        help="print a script that completes torchmix in this shell, and end",
    )
    verbs = parser.add_subparsers(required=True, title="verbs", metavar="VERB")
    for name, verb in VERBS:
        one = verbs.add_parser(
            name,
            help=verb.HELP,
            description=f"{verb.HELP[0].upper()}{verb.HELP[1:]}.",
            epilog=EXIT_CODES,
            allow_abbrev=False,  # `--step 5` would be taken as `--steps 5`
        )
        add_output(one)
        verb.add_arguments(one)
        one.set_defaults(run=verb.run)
    return parser


def _refuse(word: str, verb: str, parser: argparse.ArgumentParser) -> int:
    """Say that a verb has no such option, or no further argument; the exit code."""
    name = word.partition("=")[0]
    what = f"there is no argument {word!r} to take" if not word.startswith("-") else f"there is no option {name!r}"
    own = next(one for one in _parsers(parser) if one.prog == f"{parser.prog} {verb}")
    near = nearest(name, [option for action in own._actions for option in action.option_strings])
    print(f"torchmix {verb}: {what}{near}; torchmix {verb} --help lists them", file=sys.stderr)
    return int(ExitCode.USAGE)


class _PrintCompletion(argparse.Action):
    """Prints what a shell sources; the package shtab writes it from the parser."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, option: str | None = None
    ) -> None:
        try:
            import shtab
        except ImportError:
            parser.error("--print-completion needs the package shtab: pip install shtab")
        for one in _parsers(parser):
            for action in one._actions:
                if action.type is Path:
                    action.complete = shtab.FILE  # type: ignore[attr-defined]  # what shtab reads
        print(shtab.complete(parser, str(values)))
        parser.exit()


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser, and those of its verbs."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from _parsers(one)


def _report(error: TorchmixError, arguments: argparse.Namespace) -> int:
    """Say what went wrong; the exit code that tells whose turn it is."""
    code = ExitCode.USAGE if isinstance(error, RecipeError | OptionError | TopologyError) else ExitCode.DATA
    place = ""
    if isinstance(error, RecipeError) and (error.where or error.line):
        file = error.file or getattr(arguments, "recipe", "")  # found later, when the recipe is used
        place = f"{file}: " if file else ""
    print(f"torchmix: {place}{error}", file=sys.stderr)
    if arguments.json:
        fault: dict[str, str | int] = {"kind": type(error).__name__, "message": str(error)}
        if isinstance(error, RecipeError):
            fault |= {"where": error.where, "line": error.line, "file": error.file}
        print_json({"error": fault, "exit_code": int(code)})
    return int(code)
