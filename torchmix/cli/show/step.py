"""`torchmix show --step`: what one step gives to a model, sample by sample.

In: a recipe with its catalog, a step, and a state to plan from. Out: the samples of that step with their pieces. Must
hold: it is the step that training gets, since the same planner makes it and the same reader reads it. Cost: planning of
all steps from 0, or from the state, since the order is a fold; then the pages of the pieces that are shown.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from torchmix.catalog.store import Catalog
from torchmix.cli.layout import layout_of_arguments
from torchmix.cli.run.steps import run_fold, state_of
from torchmix.cli.show.documents import DocumentReader, place_of
from torchmix.cli.show.readable import excerpt, readable
from torchmix.cli.terminal import count_text, print_table, progress_bar
from torchmix.errors import OptionError, TopologyError
from torchmix.planner.plan import StepPlan
from torchmix.recipe.parts import Part
from torchmix.steps.history.run_fold import Segment

COLUMNS = {
    "source": "a source of the recipe, by its name",
    "file": "the file that the document lies in",
    "row": "its row, counted through all files of the source; torchmix show --source NAME --row R shows it whole",
    "epoch": "how often the source had been gone through before",
    "tokens": "which tokens of the document are this piece, half-open, of how many",
}


def plan_of_step(
    part: Part, catalog: Catalog, directory: Path, arguments: argparse.Namespace
) -> tuple[StepPlan, Segment]:
    """The step that the arguments name, and the recipe and the catalog that the run had at it.

    Raises:
        StateError: `--state` is no state of this recipe and catalog, or the step's recipe is not known.
        PlanError: The data ends before the step.
    """
    layout = layout_of_arguments(arguments, part)
    state = state_of(arguments, part, catalog)
    fold = run_fold(arguments, part, catalog, directory=directory, layout=layout, state=state, first=arguments.step)
    num_steps = arguments.step + 1 - fold.cursor.step
    with progress_bar(num_steps, unit="step", title="planning", silent=arguments.json or arguments.quiet) as bar:
        while fold.cursor.step < arguments.step:
            fold.pack()
            bar.update()
        plan, segment = fold.plan(), fold.segment
        if state is not None:
            fold.skip_to(state.step)  # whose digest tells whether these are the steps of its run
    return plan, segment


def samples_shown(
    plan: StepPlan,
    catalog: Catalog,
    directory: Path,
    arguments: argparse.Namespace,
    *,
    maps: Mapping[str, str],
    seed: int,
) -> Iterator[dict[str, Any]]:
    """Samples of a step, one by one, with their pieces.

    Raises:
        OptionError: There is no such sample.
        TopologyError: There is no such rank or microbatch.
    """
    placement, pieces = plan.placement, plan.pieces
    with DocumentReader(catalog, directory, tokenizer=arguments.tokenizer, maps=maps, seed=seed) as reader:
        for sample in numbers_of_samples(plan, arguments):
            shown: list[dict[str, Any]] = []
            for k in np.flatnonzero(plan.sample == sample).tolist():
                name, row = plan.sources[int(pieces.source[k])], int(pieces.row[k])
                start, tokens = int(pieces.start[k]), int(pieces.tokens[k])
                place, ids = (
                    place_of(catalog.sources[name], row),
                    reader.ids(name, row, start, tokens, epoch=int(pieces.epoch[k])),
                )
                text = reader.text(name, ids)
                shown.append(
                    {
                        "slot": int(plan.slot[k]),
                        "offset": int(plan.sample_offset[k]),
                        "stream": plan.streams[int(pieces.stream[k])],
                        "source": name,
                        "file": place.file,
                        "row": row,
                        "file_row": place.file_row,
                        "epoch": int(pieces.epoch[k]),
                        "start": start,
                        "tokens": tokens,
                        "document_tokens": int(pieces.document_tokens[k]),
                        "text": text,
                        "ids": ids.tolist() if text is None or arguments.tokens else None,
                    }
                )
            yield {
                "sample": sample,
                "dp_rank": int(placement.dp_rank_of_sample[sample]),
                "microbatch": int(placement.microbatch_of_sample[sample]),
                "tokens": sum(piece["tokens"] for piece in shown),
                "pieces": shown,
            }


def print_sample(sample: dict[str, Any], *, length: int, characters: int) -> None:
    """Print one sample: a line about it, and a table of its pieces with their first and last characters."""
    print(
        f"\nsample {sample['sample']}: dp rank {sample['dp_rank']}, microbatch {sample['microbatch']}, "
        f"{count_text(sample['tokens'])} of {count_text(length)} tokens"
    )
    rows = []
    for piece in sample["pieces"]:
        span = f"{count_text(piece['start'])} to {count_text(piece['start'] + piece['tokens'])}"
        rows.append(
            (
                piece["source"],
                readable(piece["file"]),
                count_text(piece["row"]),
                str(piece["epoch"]),
                f"{span} of {count_text(piece['document_tokens'])}",
            )
        )
    if rows:
        print_table(COLUMNS, rows, explain=False)
    for number, piece in enumerate(sample["pieces"]):
        if piece["text"] is not None:
            print(f"  {number}: {excerpt(piece['text'], characters)}")
        if piece["ids"] is not None:
            print(f"  {number}: {_ids_text(piece['ids'], characters // 6)}")


def _ids_text(ids: list[int], most: int) -> str:
    """Ids of the two ends, as text is cut."""
    if len(ids) <= 2 * most:
        return " ".join(map(str, ids))
    return " ".join([*map(str, ids[:most]), "...", *map(str, ids[len(ids) - most :])])


def numbers_of_samples(plan: StepPlan, arguments: argparse.Namespace) -> list[int]:
    """Numbers of the samples that the arguments name, ascending."""
    if arguments.sample is not None:
        if arguments.sample >= plan.num_samples:
            raise OptionError(
                f"--sample {arguments.sample}: step {plan.step} has {plan.num_samples} samples, from 0 on"
            )
        return [arguments.sample]
    chosen = np.ones(plan.num_samples, bool)
    for option, value, of_sample, count in (
        ("--dp-rank", arguments.dp_rank, plan.placement.dp_rank_of_sample, plan.layout.dp),
        ("--microbatch", arguments.microbatch, plan.placement.microbatch_of_sample, plan.num_microbatches),
    ):
        if value is not None:
            if value >= count:
                raise TopologyError(f"{option} {value}: there are {count}, from 0 on; see --dp and --micro-batch-size")
            chosen &= of_sample == value
    samples: list[int] = np.flatnonzero(chosen).tolist()
    return samples
