"""`torchmix diff`: what an edit of a recipe does to a run, and the code that accepts it.

Figures are those of the planner, by the road that a loader takes, and what cannot be planned is said to be unknown; the
code is the one that a loader asks for, of this state. Cost: planning of up to 1000 steps by each recipe; no data are
read.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from torchmix.catalog.in_store import fetch_catalog
from torchmix.catalog.store import Catalog, open_part
from torchmix.cli.run import add_simulated_steps, add_state, forecast_of_run
from torchmix.cli.terminal import (
    ExitCode,
    add_explain,
    count_text,
    percent_text,
    print_json,
    print_table,
    progress_bar,
)
from torchmix.errors import CatalogError, HistoryMissing, PlanError, StateMismatch
from torchmix.planner.forecast import SIMULATED_STEPS, Forecast
from torchmix.recipe.changes import parse_shares, tree_of_part
from torchmix.recipe.fingerprint import key_digests, recipe_fingerprint, recipe_keys
from torchmix.recipe.load import load_recipe, recipe_directory
from torchmix.recipe.parts import Part, part_of
from torchmix.recipe.structs import EpochPlace, Recipe
from torchmix.recipe.tree import Node
from torchmix.steps.edits import (
    Edit,
    Identity,
    RowFacts,
    changed_rows,
    edit_of,
    row_facts,
    row_facts_of_state,
    state_for,
)
from torchmix.steps.history import kept_with_state
from torchmix.steps.state import LoaderState, check_pass, read_state, step_start

HELP = "show what an edit of a recipe changes in the next steps of a run, and the code that accepts it"
COLUMNS = {
    "stream": "a source, selection or flat of either recipe",
    "before": "the share that the old recipe asks of it, mean over these steps; 0 once it has run out; ?: not known",
    "after": "the same by the new recipe",
    "out before": "the first step that asks for more than its max_epochs, by the old recipe; ~: estimated; -: none",
    "out after": "the same by the new recipe",
    "what": "whether it is added or removed, another share is asked of it, or it has other rows than before",
}
SAME = 1e-9
"""Mean shares that differ by less are equal."""
BOUNDS = ("max_epochs", "on_exhausted")
"""Keys that decide where a stream ends, and no order before that."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this verb beside --json."""
    parser.add_argument("old", type=Path, metavar="OLD", help="the recipe of the run")
    parser.add_argument("new", type=Path, metavar="NEW", help="the edited recipe")
    add_explain(parser)
    add_state(parser, "where the edit begins; without it, at step 0", accepts_edit=False)
    add_simulated_steps(parser, "steps to compare")


def run(arguments: argparse.Namespace) -> ExitCode:
    """Compare and print; 1 if the edit cannot be accepted.

    Raises:
        RecipeError: One of the recipes is wrong.
        StateError: The state is none, or is not of the old recipe; or the edit takes away rows that it may not.
        CatalogError: There is a state, and no catalog of the new recipe.
        PlanError: There is a state, and the new recipe cannot be planned.
    """
    old, new = (_side(path) for path in (arguments.old, arguments.new))
    state = None if arguments.state is None else _state_of(arguments.state, old)
    total, silent = 2 * min(arguments.steps, SIMULATED_STEPS), arguments.json or arguments.quiet
    with progress_bar(total, unit="step", title="planning", silent=silent) as bar:
        if state is None:
            found = _from_start(old, new, arguments.steps, bar.update)
        else:
            found = _from_state(old, new, state, arguments.steps, bar.update)
    if arguments.json:
        print_json(_values(found, arguments.steps))
    else:
        _print(found, arguments)
    return ExitCode.FINDINGS if found.edit.refused else ExitCode.OK


class _Side(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One of the recipes, and what a run gets by it."""

    path: Path
    recipe: Recipe
    part: Part
    result: Forecast | None = None
    """None: not known."""
    why: str = ""
    """Why it is not."""

    @property
    def folder(self) -> Path:
        """The catalog's."""
        return fetch_catalog(recipe_directory(self.path), self.recipe.catalog)


def _side(path: Path) -> _Side:
    recipe = load_recipe(path)
    return _Side(path=path, recipe=recipe, part=part_of(recipe, "train"))


class _Comparison(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What an edit changes."""

    step: int
    old: _Side
    new: _Side
    edit: Edit
    changed: list[str]
    """Keys of the recipe."""
    are_rows_known: bool
    """Whether the rows of both were compared, or no key that differs can change them."""

    @property
    def is_same(self) -> bool | None:
        """Whether both give the same order; None: it depends on rows that are not known."""
        if recipe_fingerprint(self.old.part) != recipe_fingerprint(self.new.part) or self.edit.rows:
            return False
        return True if self.are_rows_known else None

    @property
    def code(self) -> str | None:
        """The code that accepts the edit; None where there is none, or the rows are not known that it depends on."""
        return None if self.edit.refused or self.is_same or not self.are_rows_known else self.edit.code


def _from_start(old: _Side, new: _Side, num_steps: int, progress: Callable[[], object]) -> _Comparison:
    """Compare from step 0 on, by the catalog as it is, which may have the rows of one of them alone."""
    sides, facts = [], list[RowFacts | None]()
    for side in (old, new):
        try:
            catalog = open_part(side.folder, side.part)
            result = forecast_of_run(side.part, catalog, num_steps, progress=progress)
        except (CatalogError, PlanError) as error:
            sides.append(replace(side, why=str(error)))
            facts.append(None)
        else:
            sides.append(replace(side, result=result))
            facts.append(row_facts(side.part, catalog))
    rows = changed_rows(*facts)
    edit = edit_of(_identity(old.part), new.part, step=0, rows=rows)
    changed = list(_changes(old, new))
    are_known = None not in facts or not any(map(_may_change_rows, changed))
    return _Comparison(step=0, old=sides[0], new=sides[1], edit=edit, changed=changed, are_rows_known=are_known)


def _from_state(
    old: _Side, new: _Side, state: LoaderState, num_steps: int, progress: Callable[[], object]
) -> _Comparison:
    """Compare from a state of the old recipe on."""
    catalog = open_part(new.folder, new.part)
    facts = row_facts(new.part, catalog)
    rows = changed_rows(row_facts_of_state(state), facts)
    edit = edit_of(_identity(old.part), new.part, step=state.step, rows=rows)
    if edit.refused:
        new = replace(new, why="no state of the old recipe resumes with it")
    else:
        is_edit = bool(rows) or recipe_fingerprint(old.part) != recipe_fingerprint(new.part)
        accepted = state_for(state, new.part, rows=facts, accept_edit=edit.code if is_edit else None)
        new = replace(new, result=forecast_of_run(new.part, catalog, num_steps, state=accepted, progress=progress))
    try:
        before = _catalog_before(old, state)
        old = replace(old, result=forecast_of_run(old.part, before, num_steps, state=state, progress=progress))
    except (CatalogError, HistoryMissing, PlanError) as error:
        old = replace(old, why=str(error))
    changed = [*_changes(old, new), *(f"rows of {name}" for name in edit.rows if name)]
    if "" in edit.rows and "deny" not in changed:
        changed.append("the content of deny-lists")
    return _Comparison(step=state.step, old=old, new=new, edit=edit, changed=changed, are_rows_known=True)


def _state_of(file: Path, old: _Side) -> LoaderState:
    """The state at the start of its step."""
    state = step_start(read_state(file.read_bytes()))
    if state.recipe != recipe_fingerprint(old.part):
        raise StateMismatch(
            f"{old.path} is not the recipe of the run: {file} was saved with recipe {state.recipe}, this is "
            f"{recipe_fingerprint(old.part)}; give the recipe as it was at step {state.step} first, then the edited one"
        )
    check_pass(state, old.part)
    return state


def _catalog_before(old: _Side, state: LoaderState) -> Catalog:
    """The catalog with the rows of a state: as it is, or as the history of the run kept it.

    Raises:
        CatalogError: There is none.
        HistoryMissing: The history does not have it, or is damaged.
    """
    fault = "other files, selections or deny-lists"
    try:
        catalog = open_part(old.folder, old.part)
        if not changed_rows(row_facts_of_state(state), row_facts(old.part, catalog)):
            return catalog
    except CatalogError as error:
        fault = str(error)
    kept = kept_with_state(old.folder, state)
    if kept is None:
        raise HistoryMissing(
            f"the catalog has other rows than the run had ({fault}), and no history of the run says which"
        )
    return kept.catalog


def _identity(part: Part) -> Identity:
    return Identity(
        recipe=recipe_fingerprint(part),
        digests=key_digests(recipe_keys(part)),
        sources=sorted(part.sources),
        is_dynamic=part.dynamic is not None,
    )


def _changes(old: _Side, new: _Side) -> Iterator[str]:
    """Keys that differ and decide which documents come, and how often; each as a person finds it in the recipe."""
    before, after = recipe_keys(old.part), recipe_keys(new.part)
    for key in ("seed", "batch", "packing", "shuffle", "unit"):
        if before.get(key) != after.get(key):
            yield key
    if before["mixture"] != after["mixture"]:
        yield from _mixture_changes(old.part, new.part)
    if before["schedule"] != after["schedule"] and old.part.schedule != new.part.schedule:
        yield "schedule"  # else it leads to other shares since the mixture changed
    for key in ("dynamic", "split", "hold_out"):
        if getattr(old.recipe, key) != getattr(new.recipe, key):
            yield key
    for kind in ("sources", "selections"):  # in a file both stand under `sources`
        was, now = getattr(old.recipe, kind), getattr(new.recipe, kind)
        for name in sorted({*was, *now}):
            if name not in was or name not in now:
                yield f"sources.{name} {'added' if name in now else 'removed'}"
            elif type(was[name]) is type(now[name]):
                for one in msgspec.structs.fields(was[name]):
                    if getattr(was[name], one.name) != getattr(now[name], one.name):
                        yield f"sources.{name}.{one.encode_name}"
    for name in sorted(old.part.streams.keys() & new.part.streams.keys()):
        if old.part.streams[name].is_flat:
            was, now = (side.part.streams[name] for side in (old, new))
            yield from (f"{key} of {name}" for key in BOUNDS if getattr(was, key) != getattr(now, key))
    if sorted(old.part.deny) != sorted(new.part.deny):
        yield "deny"


def _mixture_changes(old: Part, new: Part) -> Iterator[str]:
    """What of the mixture differs, for the streams that both have."""
    common = old.streams.keys() & new.streams.keys()
    if _shape(tree_of_part(old), common) != _shape(tree_of_part(new), common):
        yield "groups"
    elif parse_shares(old) != parse_shares(new) or old.streams.keys() == new.streams.keys():
        yield "shares"
    for name in sorted(common):
        if old.streams[name].members != new.streams[name].members:
            yield f"members of {name}"


def _may_change_rows(key: str) -> bool:
    is_of_rows = key.startswith(("sources.", "members of ")) or key in ("split", "hold_out", "deny")
    return is_of_rows and not key.endswith(BOUNDS)


def _shape(node: Node, names: AbstractSet[str]) -> list[object]:
    """Groups with the streams in them, without shares."""
    found: list[object] = []
    for child in node.children:
        if child.children:
            inside = _shape(child, names)
            found += [[child.name, inside]] if inside else []
        elif child.name in names:
            found.append(child.name)
    return found


def _rows(found: _Comparison) -> list[dict[str, Any]]:
    """What is asked of each stream of either recipe; None: not known, or not there."""
    rows = []
    for name in sorted({*found.old.part.streams, *found.new.part.streams}):
        before, after = (
            next((one for one in side.result.sources if one.name == name), None) if side.result is not None else None
            for side in (found.old, found.new)
        )
        if name not in found.old.part.streams:
            what = ["added"]
        elif name not in found.new.part.streams:
            what = ["removed"]
        else:
            is_other = before is not None and after is not None and abs(before.asked_share - after.asked_share) > SAME
            what = [*(["changed"] if is_other else []), *(["other rows"] if name in found.edit.rows else [])]
        rows.append(
            {
                "stream": name,
                "before": None if before is None else before.asked_share,
                "after": None if after is None else after.asked_share,
                "runs_out_before": None if before is None else before.runs_out_step,
                "runs_out_after": None if after is None else after.runs_out_step,
                "what": ", ".join(what),
            }
        )
    return rows


def _values(found: _Comparison, num_steps: int) -> dict[str, Any]:
    sides = {"before": found.old, "after": found.new}
    return {
        "step": found.step,
        "num_steps": num_steps,
        "changed": found.changed,
        "streams": _rows(found),
        "schedule": {
            when: None
            if side.result is None
            else [None if one is None else {"start": one.start, "stop": one.stop} for one in side.result.stages]
            for when, side in sides.items()
        },
        "stop_step": {when: None if side.result is None else side.result.stop_step for when, side in sides.items()},
        "not_planned": {when: side.why for when, side in sides.items() if side.result is None},
        "refused": list(found.edit.refused),
        "deny_lists_changed": "" in found.edit.rows,
        "is_same_order": found.is_same,
        "accept_edit": found.code,
    }


def _print(found: _Comparison, arguments: argparse.Namespace) -> None:
    print(f"{count_text(arguments.steps)} steps from step {found.step} on")
    print(f"changed: {'; '.join(found.changed) or 'nothing that decides which documents come'}\n")
    rows = [
        (
            row["stream"],
            _share_text(row["before"], row["stream"], found.old),
            _share_text(row["after"], row["stream"], found.new),
            _step_text(row["runs_out_before"], found.old),
            _step_text(row["runs_out_after"], found.new),
            row["what"],
        )
        for row in _rows(found)
    ]
    columns = [*COLUMNS]
    if all(row[3] == row[4] == "-" for row in rows):
        columns = [name for name in columns if not name.startswith("out ")]
    places = [[*COLUMNS].index(name) for name in columns]
    shown = [[row[place] for place in places] for row in rows]
    print_table({name: COLUMNS[name] for name in columns}, shown, explain=arguments.explain)
    print()
    for line in _notes(found, arguments):
        print(line)


def _notes(found: _Comparison, arguments: argparse.Namespace) -> Iterator[str]:
    """What the table does not say, and what to do."""
    for side in (found.old, found.new):
        if side.result is None:
            yield f"{side.path}: not planned: {side.why}"
        elif side.result.stop_step is not None:
            yield f"{side.path}: the run stops before step {count_text(side.result.stop_step)}, for want of data"
    yield from _stage_lines(found)
    edit = found.edit
    if "" in edit.rows:
        yield "deny-lists changed: documents that they name now are not given, whatever has been drawn of them"
    if any(edit.rows):
        yield "other rows: what the present epoch has not given shares one permutation from the next window on"
    if edit.refused:
        keys = ", ".join(edit.refused)
        yield f"not an edit of a run, since these keys differ: {keys}; restore them, or start a new run"
    elif found.is_same:
        without = "" if arguments.state else "; with --state FILE the rows of its run are compared, too"
        yield f"both recipes give the same order: nothing has to be accepted{without}"
    elif found.code is None:
        yield "which rows change is not known without a state: --state FILE, of the run, has the code that accepts it"
    else:
        if arguments.state is not None:
            words = f"{found.new.path} --state {arguments.state} --accept-edit {found.code} --steps {arguments.steps}"
            yield f"plan it with torchmix plan {words}"
        yield f"accept it with load_state_dict(state, accept_edit={found.code!r}), or --data-accept-edit {found.code}"


def _stage_lines(found: _Comparison) -> Iterator[str]:
    """Where each change of the schedule stands, and what of a begun ramp remains."""
    texts = [_stage_texts(side) for side in (found.old, found.new)]
    for number in range(max(map(len, texts))):
        before, after = (of_side[number] if number < len(of_side) else "not there" for of_side in texts)
        yield f"schedule[{number}]: {before if before == after else f'before: {before}; after: {after}'}"


def _stage_texts(side: _Side) -> list[str]:
    if side.result is None:
        return ["not known"] * len(side.part.schedule)
    texts = []
    for change, stage in zip(side.part.schedule, side.result.stages, strict=True):
        if stage is None:
            texts.append(f"does not begin before step {count_text(side.result.start + side.result.num_steps)}")
            continue
        step, num_steps = side.result.start, stage.stop - stage.start
        first, last = count_text(stage.start), count_text(stage.stop - 1)
        if stage.stop <= step and stage.start < step:
            texts.append(f"holds since step {count_text(stage.stop)}")
        elif stage.start < step:
            texts.append(f"a ramp from step {first} to {last}; {stage.stop - step} of its {num_steps} steps remain")
        else:
            is_exact = not isinstance(change.start, EpochPlace) or side.result.is_exact(stage.start)
            ramp = f", a ramp of {count_text(num_steps)} steps" if num_steps else ""
            texts.append(f"begins in {'' if is_exact else 'about '}step {first}{ramp}")
    return texts


def _share_text(share: float | None, name: str, side: _Side) -> str:
    if share is None:
        return "?" if side.result is None and name in side.part.streams else "-"
    return percent_text(share)


def _step_text(step: int | None, side: _Side) -> str:
    if step is None or side.result is None:
        return "-"
    return count_text(step) if side.result.is_exact(step) else f"~{count_text(step)}"
