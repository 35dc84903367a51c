"""`torchmix diff`: what an edit of a recipe does to a run, and the word that accepts it.

In: two recipes, and a state if there is one. Out: for each source and selection its share before and after, from the
step of the state on; keys that may not change. Must hold: the word is the one that a loader asks for. Cost: none; no
data and no catalog are opened.
"""

from __future__ import annotations

import argparse
from fractions import Fraction
from pathlib import Path

from torchmix.cli.terminal import ExitCode, add_explain, print_json, print_table
from torchmix.mixture.shares.integers import SHARE_ONE
from torchmix.planner.shares_of_step import SharesOfStep
from torchmix.recipe.fingerprint import key_digests, recipe_fingerprint, recipe_keys
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import Part, part_of
from torchmix.steps.edits import Identity, edit_of
from torchmix.steps.state import decode_state

HELP = "show what an edit of a recipe changes, from which step, and the word that accepts it"
DIGITS = 4
COLUMNS = {
    "stream": "a source, selection or flat of either recipe",
    "before": "its share of the tokens of that step, by the old recipe",
    "after": "the same by the new one",
    "what": "whether it is added, removed or changed",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this verb beside --json."""
    parser.add_argument("old", type=Path, metavar="OLD", help="the recipe of the run")
    parser.add_argument("new", type=Path, metavar="NEW", help="the edited recipe")
    add_explain(parser)
    parser.add_argument("--state", type=Path, metavar="FILE", help="bytes of a state of the run; without it, of step 0")


def run(arguments: argparse.Namespace) -> ExitCode:
    """Compare and print; 1 if the edit cannot be accepted.

    Raises:
        RecipeError: One of the recipes is wrong.
        StateError: The state is none, or is not of the old recipe.
    """
    old, new = part_of(load_recipe(arguments.old), "train"), part_of(load_recipe(arguments.new), "train")
    step = 0 if arguments.state is None else decode_state(arguments.state.read_bytes(), recipe=old).step
    before, after = _shares(old, step), _shares(new, step)
    identity = Identity(
        recipe=recipe_fingerprint(old), digests=key_digests(recipe_keys(old)), sources=sorted(old.sources)
    )
    is_same = recipe_fingerprint(old) == recipe_fingerprint(new)
    edit = None if is_same else edit_of(identity, fingerprint=recipe_fingerprint(new), keys=recipe_keys(new))
    rows: list[dict[str, object]] = [
        {"stream": name, "before": before.get(name), "after": after.get(name), "what": _what(name, before, after)}
        for name in sorted({*before, *after})
    ]
    refused = list(edit.refused) if edit is not None else []
    word = edit.word if edit is not None and not refused else None
    if arguments.json:
        print_json({"step": step, "streams": rows, "refused": refused, "accept_edit": word})
    else:
        _print(rows, step=step, refused=refused, word=word, is_same=is_same, explain=arguments.explain)
    return ExitCode.FINDINGS if refused else ExitCode.OK


def _print(
    rows: list[dict[str, object]], *, step: int, refused: list[str], word: str | None, is_same: bool, explain: bool
) -> None:
    cells = [[str(row["stream"]), _percent(row["before"]), _percent(row["after"]), str(row["what"])] for row in rows]
    print(f"from step {step} on")
    print()
    print_table(COLUMNS, cells, explain=explain)
    print()
    if is_same:
        print("both recipes give the same order: nothing has to be accepted")
    elif refused:
        print(f"not an edit of a run, since these keys differ: {', '.join(refused)}; restore them, or start a new run")
    else:
        print(f"accept it with load_state_dict(state, accept_edit={word!r}), or --data-accept-edit {word}")


def _shares(part: Part, step: int) -> dict[str, float]:
    """Share of each stream at a step; of groups that share by sizes as if all sizes were equal."""
    shares = SharesOfStep(part, dict.fromkeys(part.streams, 1)).at(step, frozenset())
    assert shares is not None, "no stream has run out"
    return {name: float(Fraction(int(n), SHARE_ONE)) for name, n in zip(sorted(part.streams), shares, strict=True)}


def _what(name: str, before: dict[str, float], after: dict[str, float]) -> str:
    if name not in before:
        return "added"
    if name not in after:
        return "removed"
    return "" if before[name] == after[name] else "changed"


def _percent(share: object) -> str:
    return f"{100 * share:.{DIGITS}g} %" if isinstance(share, float) else "-"
