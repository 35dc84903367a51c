"""`torchmix trace`: in which steps a document was, or will be; and every document of a step."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchmix.array_types import Int64Array
from torchmix.catalog.manifest import read_manifest
from torchmix.cli.run import add_decisions, add_state, open_recipe, run_fold, state_of
from torchmix.cli.terminal import (
    ExitCode,
    add_explain,
    add_part,
    add_recipe,
    at_least,
    check_folder,
    count_text,
    print_json,
    print_table,
    progress_bar,
    readable,
)
from torchmix.errors import HistoryMissing, OptionError, TorchmixError
from torchmix.lineage import (
    MOST_NAMED,
    DocumentNames,
    appearances,
    deny_list,
    documents_of_step,
    never_drawn,
    rows_by_source,
    write_table,
)
from torchmix.recipe.build import listed
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.steps.edits import row_facts, state_for
from torchmix.steps.history import RunFold, Segment, kept_with_state
from torchmix.steps.state import LoaderState, read_state

# --- The documents that a command names: rows, ids, or a file with a list of both.
#
# A word that names nothing is an error. Cost: a look at the kept ids, where ids are given.


def add_documents(parser: argparse.ArgumentParser) -> None:
    """Declare --row, --id and --list."""
    group = parser.add_argument_group("which documents; may be given together")
    group.add_argument("--row", action="append", default=[], metavar="SOURCE:R", help="a row, as web:1234; again")
    group.add_argument("--id", action="append", default=[], metavar="ID", help="what the id column names; again")
    group.add_argument("--list", type=Path, metavar="FILE", help="a text file with a row or an id in each line")


def has_documents(arguments: argparse.Namespace) -> bool:
    """Whether documents are named."""
    return bool(arguments.row or arguments.id or arguments.list is not None)


def documents_asked(
    arguments: argparse.Namespace, names: DocumentNames, sources: Sequence[str]
) -> list[tuple[str, int]]:
    """Source and row of each.

    Raises:
        OptionError: A word names no document, or the file cannot be read.
    """
    words, ids = list(arguments.row), list(arguments.id)
    if arguments.list is not None:
        for line in _lines(arguments.list):
            name, _, number = line.rpartition(":")
            (words if name in sources and number.isdigit() else ids).append(line)
    rows = [names.row(word) for word in words]
    return rows + (names.rows_of_ids(ids) if ids else [])


def _lines(path: Path) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--list {path}: {getattr(error, 'strerror', error)}") from error
    found = [line for line in lines if line]
    if not found:
        raise OptionError(f"--list {path}: it names no document; write a row as web:1234, or an id, in each line")
    return found


# --- `torchmix trace`: in which steps a document was, or will be; and every document of a step.
#
# The steps are those that a run was given, since the same planner makes them; the order of a state's run is compared
# with the state's digest. Cost: planning of all steps from 0 on, since the order is a fold; no data is read.

HELP = "say in which steps a document is, or which documents are in a step"
MOST_LINES = 40
"""Pieces that are printed; a file has all."""
COLUMNS = {
    "document": "source and row; torchmix show --source NAME --row R shows it",
    "step": "the step that has it",
    "when": "whether the state's run has consumed the step",
    "sample": "sample of the global batch",
    "stream": "the stream that gave it",
    "epoch": "how often the stream had been gone through before",
    "tokens": "which tokens of the document, half-open",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this verb beside those of all verbs."""
    add_recipe(parser)
    add_documents(parser)
    parser.add_argument("--step", type=at_least(0), metavar="N", help="all documents of this step instead")
    add_state(parser, "the steps that its run has had")
    parser.add_argument(
        "--runs",
        type=Path,
        metavar="DIR",
        help="a folder with a state of each run, on this catalog: which runs had them",
    )
    parser.add_argument(
        "--steps", type=at_least(1), metavar="N", help="look at the steps before this one (default the state's)"
    )
    parser.add_argument("--start", type=at_least(0), default=0, metavar="S", help="first step to look at (default 0)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write what was found as Parquet")
    parser.add_argument("--deny-from", type=Path, metavar="FILE", help="write these documents as a deny-list (Parquet)")
    add_part(parser)
    add_decisions(parser)
    add_explain(parser)


def run(arguments: argparse.Namespace) -> ExitCode:
    """Trace, and print or write what was found.

    Raises:
        OptionError: Nothing is asked, or what is asked is not there.
        StateError: `--state` is no state of this recipe, or the history of its run is not whole.
        TorchmixError: The recipe is wrong or not indexed, or a step cannot be planned.
    """
    if has_documents(arguments) == (arguments.step is not None):
        raise OptionError("name documents with --row, --id or --list, or a step with --step")
    if arguments.runs is not None:
        return _trace_runs(arguments)
    for flag, path in (("--out", arguments.out), ("--deny-from", arguments.deny_from)):
        if path is not None:
            check_folder(flag, path)
    _, directory, part, catalog = open_recipe(arguments.recipe, arguments.part)
    state = state_of(arguments, part, catalog)
    steps = _steps(arguments, state)
    fold, sources = None, dict(catalog.sources)
    if steps is not None:
        fold = run_fold(arguments, part, catalog, directory=directory, state=state, first=steps.start)
        for segment in fold.segments:  # also what an edit has removed; rows of files that were added come last
            sources = {**segment.catalog.sources, **sources}
    names = DocumentNames(sources, catalog.directory, read_manifest(catalog.directory).properties)
    wanted = rows_by_source(documents_asked(arguments, names, list(sources)))
    values: dict[str, Any] = {"recipe": str(arguments.recipe), "part": arguments.part}
    table, files, never = None, [], dict[str, list[tuple[str, int]]]()
    if fold is not None and steps is not None:
        table = _found(arguments, fold, names, wanted, steps, state)
        values |= {"start": steps.start, "stop": steps.stop, "edits": list(fold.edits), "pieces": table.to_pylist()}
        if arguments.step is None:
            given = set(zip(table["source"].to_pylist(), table["row"].to_pylist(), strict=True))
            for reason, rows in never_drawn(part, catalog, wanted).items():
                if left := [row for row in rows if row not in given]:  # else an earlier recipe of the run has drawn it
                    never[reason] = left
            values["never"] = [
                {"source": name, "row": row, "reason": reason} for reason, rows in never.items() for name, row in rows
            ]
        else:
            wanted = rows_by_source(list(zip(table["source"].to_pylist(), table["row"].to_pylist(), strict=True)))
        if arguments.out is not None:
            write_table(arguments.out, table)
            files.append(str(arguments.out))
    if arguments.deny_from is not None:
        write_table(arguments.deny_from, deny_list(wanted))
        files.append(str(arguments.deny_from))
    if arguments.json:
        print_json({**values, "files": files})
        return ExitCode.OK
    if table is not None and steps is not None:
        _print(table, wanted, arguments, steps, state)
        for reason, rows in never.items():
            names_of_rows = listed([readable(f"{name}:{row}") for name, row in rows], MOST_NAMED)
            print(f"never drawn, since {reason}: {names_of_rows}")
    if files:
        print(f"wrote {' and '.join(files)}")
    return ExitCode.OK


class _TracedRun(NamedTuple):
    """A run whose state lies in the folder of `--runs`."""

    name: str
    """The path of the state below that folder."""
    fold: RunFold
    steps: range
    """Those that it has had, as far as they are asked."""
    end: int
    """The step of the state."""


def _trace_runs(arguments: argparse.Namespace) -> ExitCode:
    """Which runs had the documents, by the recipes that they had, and in which steps."""
    others = ("state", "step", "accept_edit", "decisions", "deny_from")
    if given := [name for name in others if getattr(arguments, name) is not None]:
        raise OptionError(
            f"--runs looks at whole runs, each by its state; it goes without --{given[0].replace('_', '-')}"
        )
    if arguments.part != "train":
        raise OptionError("--runs looks at runs, which train; it goes without --part")
    _, directory, part, catalog = open_recipe(arguments.recipe, arguments.part)
    runs = [
        _run_of(path, arguments, Segment(part=part, catalog=catalog), directory) for path in _states(arguments.runs)
    ]
    sources = dict(catalog.sources)
    for run in runs:
        for segment in run.fold.segments:  # as of a lone run: rows of files that were added come last
            sources = {**segment.catalog.sources, **sources}
    names = DocumentNames(sources, catalog.directory, read_manifest(catalog.directory).properties)
    wanted = rows_by_source(documents_asked(arguments, names, list(sources)))
    tables = []
    total = sum(run.end - run.fold.cursor.step for run in runs)
    with progress_bar(total, unit="step", title="planning", silent=arguments.json or arguments.quiet) as bar:
        for run in runs:
            with _naming_state(arguments.runs / run.name):
                while run.fold.cursor.step < run.steps.start:
                    run.fold.pack()
                    bar.update()
                table = appearances(run.fold, wanted, run.steps.stop, on_step=bar.update)
                run.fold.skip_to(run.end)  # the digest of the state is compared
            tables.append(table.add_column(0, "run", pa.array([run.name] * len(table), pa.string())))
    table = pa.concat_tables(tables)
    if arguments.out is not None:
        write_table(arguments.out, table)
    if arguments.json:
        steps = {run.name: {"start": run.steps.start, "stop": run.steps.stop} for run in runs}
        files = [] if arguments.out is None else [str(arguments.out)]
        print_json({"recipe": str(arguments.recipe), "runs": steps, "pieces": table.to_pylist(), "files": files})
        return ExitCode.OK
    _print_runs(table, wanted, arguments, runs)
    return ExitCode.OK


def _states(folder: Path) -> list[Path]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    if not paths:
        raise OptionError(f"--runs {folder}: there is no file; write bytes of a state of each run below it")
    return paths


@contextmanager
def _naming_state(path: Path) -> Iterator[None]:
    """Have errors name the state that they are of."""
    try:
        yield
    except TorchmixError as error:
        error.args = (f"{path}: {error.args[0]}", *error.args[1:])
        raise


def _run_of(path: Path, arguments: argparse.Namespace, present: Segment, directory: Path) -> _TracedRun:
    """The run of a state, by the recipe at hand, or by that which the history of the catalog has of it."""
    with _naming_state(path):
        state = read_state(path.read_bytes())
        if state.recipe != recipe_fingerprint(present.part) or state.catalog != present.catalog.fingerprint:
            kept = kept_with_state(present.catalog.directory, state)
            if kept is None:
                raise HistoryMissing(
                    f"no run of its recipe {state.recipe} was kept in {present.catalog.directory / 'history'}; bring "
                    "that history here, or name the recipe of this run"
                )
            present = kept
        part, catalog = present.part, present.catalog
        state = state_for(state, part, rows=row_facts(part, catalog), from_step_start=True)
        fold = run_fold(arguments, part, catalog, directory=directory, state=state)
    stop = state.step if arguments.steps is None else min(arguments.steps, state.step)
    name = path.relative_to(arguments.runs).as_posix()
    return _TracedRun(name, fold, range(min(arguments.start, stop), stop), state.step)


def _print_runs(
    table: pa.Table, wanted: dict[str, Int64Array], arguments: argparse.Namespace, runs: Sequence[_TracedRun]
) -> None:
    columns = {("run" if name == "when" else name): what for name, what in COLUMNS.items()} | {
        "run": "its state's file"
    }
    rows = _rows(table, lambda piece: readable(piece["run"]))
    if rows:
        print_table(columns, rows, explain=arguments.explain)
        print()
    if len(table) > len(rows):
        print(f"{count_text(len(table) - len(rows))} more lines with --out or --json")
    num_documents = sum(len(of_source) for of_source in wanted.values())
    for run in runs:
        mine = table.filter(pc.equal(table["run"], run.name))
        found = len(set(zip(mine["source"].to_pylist(), mine["row"].to_pylist(), strict=True)))
        what = (
            f"the steps {count_text(run.steps.start)} to {count_text(run.steps.stop - 1)}" if run.steps else "no step"
        )
        print(f"{readable(run.name)}: {found} of {num_documents} documents, in {what}")
    if arguments.out is not None:
        print(f"wrote {arguments.out}")


def _steps(arguments: argparse.Namespace, state: LoaderState | None) -> range | None:
    """The steps to look at; None where documents are only to be listed."""
    if arguments.step is not None:
        return range(arguments.step, arguments.step + 1)
    stop = arguments.steps if arguments.steps is not None else None if state is None else state.step
    if stop is not None:
        if arguments.start >= stop:
            raise OptionError(
                f"there are no steps from --start {arguments.start} on before step {stop}; give --steps N"
            )
        return range(arguments.start, stop)
    if arguments.out is not None:
        raise OptionError("--out writes what was found in steps; give --state, --steps or --step, too")
    if arguments.deny_from is None:
        raise OptionError("give --state FILE, for the steps that a run has had, or --steps N")
    return None


def _found(
    arguments: argparse.Namespace,
    fold: RunFold,
    names: DocumentNames,
    wanted: dict[str, Int64Array],
    steps: range,
    state: LoaderState | None,
) -> pa.Table:
    """What the steps have; all of the state's steps are planned, so that its digest is compared."""
    end = max(steps.stop, 0 if state is None else state.step)
    silent = arguments.json or arguments.quiet
    with progress_bar(end - fold.cursor.step, unit="step", title="planning", silent=silent) as bar:

        def skip_to(step: int) -> None:
            while fold.cursor.step < step:
                fold.pack()
                bar.update()
            fold.skip_to(step)

        skip_to(steps.start)
        if arguments.step is not None:
            table = documents_of_step(fold, names)
        else:
            table = appearances(fold, wanted, steps.stop, on_step=bar.update)
        skip_to(end)
    return table


def _rows(table: pa.Table, of_run: Callable[[dict[str, Any]], str]) -> list[tuple[str, ...]]:
    """The lines of a table; `of_run` gives the third column, what a piece is to its run."""
    return [
        (
            readable(f"{piece['source']}:{piece['row']}"),
            count_text(piece["step"]),
            of_run(piece),
            str(piece["sample"]),
            piece["stream"],
            str(piece["epoch"]),
            f"{count_text(piece['start'])} to {count_text(piece['stop'])}",
        )
        for piece in table.slice(0, MOST_LINES).to_pylist()
    ]


def _print(
    table: pa.Table, wanted: dict[str, Any], arguments: argparse.Namespace, steps: range, state: LoaderState | None
) -> None:
    rows = _rows(table, lambda piece: "" if state is None else "was" if piece["step"] < state.step else "will be")
    if rows:
        print_table(COLUMNS, rows, explain=arguments.explain)
    num_documents = sum(len(of_source) for of_source in wanted.values())
    more = f"; {count_text(len(table) - len(rows))} more lines with --out or --json" if len(table) > len(rows) else ""
    if arguments.step is not None:
        print(
            f"\nstep {arguments.step}: {count_text(num_documents)} documents in {count_text(len(table))} pieces{more}"
        )
        return
    found = len(set(zip(table["source"].to_pylist(), table["row"].to_pylist(), strict=True)))
    num_steps = len(np.unique(table["step"].to_numpy()))
    print(
        f"{chr(10) if rows else ''}{found} of {num_documents} documents are in {num_steps} of the steps "
        f"{count_text(steps.start)} to {count_text(steps.stop - 1)}{more}"
    )
