"""`torchmix trace`: in which steps a document was, or will be; and every document of a step.

In: a recipe with its catalog, documents or a step, and a state of the run if there is one. Out: a table; with `--out`
and `--deny-from` Parquet files. Must hold: the steps are those that a run was given, since the same planner makes them;
the order of a state's run is compared with the state's digest. Cost: planning of all steps from 0 on, since the order
is a fold; no data is read.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from torchmix.catalog.manifest import read_manifest
from torchmix.catalog.open_part import open_part
from torchmix.cli.decisions import add_decisions, decisions_of
from torchmix.cli.show.readable import readable
from torchmix.cli.terminal import (
    ExitCode,
    add_explain,
    add_part,
    at_least,
    count_text,
    print_json,
    print_table,
    progress_bar,
)
from torchmix.cli.trace.asked import add_documents, documents_asked, has_documents
from torchmix.errors import OptionError, StateMismatch
from torchmix.lineage.appearances import appearances, documents_of_step
from torchmix.lineage.deny_list import deny_list, write_whole
from torchmix.lineage.documents import DocumentNames, rows_by_source
from torchmix.recipe.load import load_recipe, recipe_directory
from torchmix.recipe.parts import part_of
from torchmix.steps.history.run_fold import RunFold, Segment
from torchmix.steps.state import LoaderState, decode_state

HELP = "say in which steps a document is, or which documents are in a step"
MOST_LINES = 40
"""Documents of a step that are printed; a file has all."""
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
    """Declare the arguments of this verb beside RECIPE and --json."""
    add_documents(parser)
    parser.add_argument("--step", type=at_least(0), metavar="N", help="all documents of this step instead")
    parser.add_argument("--state", type=Path, metavar="FILE", help="bytes of a state: the steps that its run has had")
    parser.add_argument(
        "--steps", type=at_least(1), metavar="N", help="steps to look at, from 0 on (default the state's)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write what was found as Parquet")
    parser.add_argument("--deny-from", type=Path, metavar="FILE", help="write these documents as a deny-list (Parquet)")
    add_part(parser)
    add_decisions(parser)
    add_explain(parser)


def run(arguments: argparse.Namespace) -> ExitCode:
    """Trace, and print or write what was found.

    Raises:
        OptionError: Nothing is asked, or what is asked is not there.
        StateError: `--state` is no state of this recipe, or its run had other steps.
        TorchmixError: The recipe is wrong or not indexed, or a step cannot be planned.
    """
    if has_documents(arguments) == (arguments.step is not None):
        raise OptionError("name documents with --row, --id or --list, or a step with --step")
    recipe = load_recipe(arguments.recipe)
    part = part_of(recipe, arguments.part)
    folder = recipe_directory(arguments.recipe) / recipe.catalog
    catalog = open_part(folder, part)
    names = DocumentNames(catalog, folder, read_manifest(folder).properties)
    state = None if arguments.state is None else decode_state(arguments.state.read_bytes(), recipe=part)
    wanted = rows_by_source(documents_asked(arguments, names, list(catalog.sources)))
    values: dict[str, Any] = {"recipe": str(arguments.recipe), "part": arguments.part}
    table: pa.Table | None = None
    if arguments.step is not None or arguments.steps is not None or state is not None:
        fold = RunFold([Segment(part=part, catalog=catalog)], decisions=decisions_of(arguments, part))
        stop = _stop(arguments, state)
        silent = arguments.json or arguments.quiet
        with progress_bar(stop, unit="step", title="planning", silent=silent) as bar:
            if arguments.step is not None:
                _skip_to(fold, arguments.step, state, bar.update)
                table = documents_of_step(fold, names)
            else:
                tables = []
                if state is not None and state.step <= stop:
                    tables.append(appearances(fold, wanted, state.step, on_step=bar.update))
                    _check_digest(fold, state)
                tables.append(appearances(fold, wanted, stop, on_step=bar.update))
                table = pa.concat_tables(tables)
        values |= {"stop": stop, "pieces": table.to_pylist()}
    elif arguments.deny_from is None:
        raise OptionError("give --state FILE, for the steps that a run has had, or --steps N")
    if arguments.step is not None:
        assert table is not None
        wanted = rows_by_source(list(zip(table["source"].to_pylist(), table["row"].to_pylist(), strict=True)))
    files = []
    if arguments.out is not None:
        if table is None:
            raise OptionError("--out writes what was found in steps; give --state, --steps or --step, too")
        write_whole(arguments.out, table)
        files.append(str(arguments.out))
    if arguments.deny_from is not None:
        write_whole(arguments.deny_from, deny_list(wanted))
        files.append(str(arguments.deny_from))
    if arguments.json:
        print_json({**values, "files": files})
        return ExitCode.OK
    if table is not None:
        _print(table, wanted, arguments, state)
    if files:
        print(f"wrote {' and '.join(files)}")
    return ExitCode.OK


def _stop(arguments: argparse.Namespace, state: LoaderState | None) -> int:
    """The step to end before."""
    if arguments.step is not None:
        return int(arguments.step) + 1
    if arguments.steps is not None:
        return int(arguments.steps)
    assert state is not None, "the caller has looked"
    return state.step


def _skip_to(fold: RunFold, step: int, state: LoaderState | None, on_step: Any) -> None:
    while fold.cursor.step < step:
        fold.pack()
        on_step()
        if state is not None and fold.cursor.step == state.step:
            _check_digest(fold, state)


def _check_digest(fold: RunFold, state: LoaderState) -> None:
    """Raise where a state's run had other steps than the fold."""
    if state.order_digest and state.order_digest != fold.cursor.order_digest:
        raise StateMismatch(
            f"the run of the state had other steps before step {state.step} (digest {state.order_digest.hex()}) than "
            f"this recipe alone gives (digest {fold.cursor.order_digest.hex()})"
        )


def _print(table: pa.Table, wanted: dict[str, Any], arguments: argparse.Namespace, state: LoaderState | None) -> None:
    pieces = table.slice(0, MOST_LINES if arguments.step is not None else len(table)).to_pylist()
    rows = [
        (
            readable(f"{piece['source']}:{piece['row']}"),
            count_text(piece["step"]),
            "" if state is None else "was" if piece["step"] < state.step else "will be",
            str(piece["sample"]),
            piece["stream"],
            str(piece["epoch"]),
            f"{count_text(piece['start'])} to {count_text(piece['stop'])}",
        )
        for piece in pieces
    ]
    if rows:
        print_table(COLUMNS, rows, explain=arguments.explain)
    num_documents = sum(len(of_source) for of_source in wanted.values())
    if arguments.step is not None:
        more = f"; {len(table) - len(rows)} more lines with --out or --json" if len(table) > len(rows) else ""
        print(
            f"\nstep {arguments.step}: {count_text(num_documents)} documents in {count_text(len(table))} pieces{more}"
        )
        return
    found = len(set(zip(table["source"].to_pylist(), table["row"].to_pylist(), strict=True)))
    steps = len(np.unique(table["step"].to_numpy()))
    stop = _stop(arguments, state)
    print(
        f"{chr(10) if rows else ''}{found} of {num_documents} documents are in {steps} of the steps 0 to "
        f"{count_text(stop - 1)}"
    )
