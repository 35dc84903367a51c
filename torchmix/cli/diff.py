"""`torchmix diff`: what an edit of a recipe does to a run, and the word that accepts it.

In: two recipes, and a state if there is one. Out: for each source and selection its share before and after, from the
step of the state on, and whether it has other rows; keys that may not change. Must hold: the word is the one that a
loader asks for, of this state. Cost: with a state the catalog is opened; no data are.
"""

from __future__ import annotations

import argparse
from fractions import Fraction
from pathlib import Path

from torchmix.catalog.open_part import open_part
from torchmix.cli.terminal import ExitCode, add_explain, print_json, print_table
from torchmix.errors import StateMismatch
from torchmix.mixture.shares.integers import SHARE_ONE
from torchmix.planner.shares_of_step import SharesOfStep
from torchmix.recipe.fingerprint import key_digests, recipe_fingerprint, recipe_keys
from torchmix.recipe.load import load_recipe, recipe_directory
from torchmix.recipe.parts import Part, part_of
from torchmix.steps.edits.word import Edit, Identity, changed_rows, edit_of, row_facts
from torchmix.steps.state import LoaderState, read_state

HELP = "show what an edit of a recipe changes, from which step, and the word that accepts it"
DIGITS = 4
COLUMNS = {
    "stream": "a source, selection or flat of either recipe",
    "before": "its share of the tokens of that step, by the old recipe",
    "after": "the same by the new one",
    "what": "whether it is added or removed, its share is changed, or it has other rows than the state knows",
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
        CatalogError: There is a state, and no catalog of the new recipe.
    """
    whole = load_recipe(arguments.new)
    old, new = part_of(load_recipe(arguments.old), "train"), part_of(whole, "train")
    state = None if arguments.state is None else _state_of(arguments.state, arguments.old, old)
    step, changed = 0 if state is None else state.step, list[list[str]]()
    if state is not None:
        catalog = open_part(recipe_directory(arguments.new) / whole.catalog, new)
        changed = changed_rows(state, row_facts(new, catalog))
    before, after = _shares(old, step), _shares(new, step)
    identity = Identity(
        recipe=recipe_fingerprint(old),
        digests=key_digests(recipe_keys(old)),
        sources=sorted(old.sources),
        is_dynamic=old.dynamic is not None,
    )
    is_same = recipe_fingerprint(old) == recipe_fingerprint(new) and not changed
    edit = edit_of(identity, new, step=step, rows=changed)
    rows: list[dict[str, object]] = [
        {
            "stream": name,
            "before": before.get(name),
            "after": after.get(name),
            "what": _what(name, before, after, has_other_rows=name in edit.rows),
        }
        for name in sorted({*before, *after})
    ]
    refused = list(edit.refused)
    word = edit.word if not is_same and not refused else None
    if arguments.json:
        denied = "" in edit.rows
        values = {"step": step, "streams": rows, "refused": refused, "deny_lists_changed": denied, "accept_edit": word}
        print_json(values)
    else:
        _print(rows, edit, step=step, word=word, is_same=is_same, explain=arguments.explain)
    return ExitCode.FINDINGS if refused else ExitCode.OK


def _state_of(file: Path, recipe: Path, old: Part) -> LoaderState:
    state = read_state(file.read_bytes())
    if state.recipe != recipe_fingerprint(old):
        raise StateMismatch(
            f"{recipe} is not the recipe of the run: {file} was saved with recipe {state.recipe}, this is "
            f"{recipe_fingerprint(old)}; give the recipe as it was at step {state.step} first, then the edited one"
        )
    return state


def _print(
    rows: list[dict[str, object]], edit: Edit, *, step: int, word: str | None, is_same: bool, explain: bool
) -> None:
    cells = [[str(row["stream"]), _percent(row["before"]), _percent(row["after"]), str(row["what"])] for row in rows]
    print(f"from step {step} on")
    print()
    print_table(COLUMNS, cells, explain=explain)
    print()
    if "" in edit.rows:
        print("deny-lists changed: documents that they name now are not given, whatever has been drawn of them")
    if any(edit.rows):
        print("other rows: what the present epoch has not given shares one permutation from the next window on")
    if is_same:
        print("both recipes give the same order: nothing has to be accepted")
    elif edit.refused:
        keys = ", ".join(edit.refused)
        print(f"not an edit of a run, since these keys differ: {keys}; restore them, or start a new run")
    else:
        print(f"accept it with load_state_dict(state, accept_edit={word!r}), or --data-accept-edit {word}")


def _shares(part: Part, step: int) -> dict[str, float]:
    """Share of each stream at a step; of groups that share by sizes as if all sizes were equal."""
    shares = SharesOfStep(part, dict.fromkeys(part.streams, 1)).at(step, frozenset())
    assert shares is not None, "no stream has run out"
    return {name: float(Fraction(int(n), SHARE_ONE)) for name, n in zip(sorted(part.streams), shares, strict=True)}


def _what(name: str, before: dict[str, float], after: dict[str, float], *, has_other_rows: bool) -> str:
    if name not in before:
        return "added"
    if name not in after:
        return "removed"
    share = [] if before[name] == after[name] else ["changed"]
    return ", ".join([*share, *(["other rows"] if has_other_rows else [])])


def _percent(share: object) -> str:
    return f"{100 * share:.{DIGITS}g} %" if isinstance(share, float) else "-"
