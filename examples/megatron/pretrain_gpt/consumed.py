"""Which samples a run has consumed, by step; compared with the plan.

In: the records of all ranks (`record.py`), and the recipe. Out: for each step the samples, as hashes of their token ids
and of their labels, and a list of what is wrong; empty if the run consumed what torchmix plans, at any layout.

The plan is asked from torchmix alone, in a process without Megatron and without ranks. Slices of context-parallel
ranks are put together again with `positions_of_rank` of `attention.py`, which torchmix does not use.

Must hold, for a whole run:

- tensor-parallel ranks have taken the same, and so have all chunks of a pipeline the same number of microbatches;
- each microbatch has its tokens on the first stage, labels and mask on the last, boundaries on all or on none;
- tokens and labels of one microbatch are those of one planned microbatch's samples, in the same order;
- every step's samples are those of the plan, each as often, whoever had them.

Cost: seconds for some steps of a tiny run.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from attention import positions_of_rank

Line = dict[str, Any]
Samples = list[str]
"""Hashes of samples, in the order of a microbatch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Consumed:
    """What the steps of a run consumed."""

    samples_of_step: dict[int, Samples]
    """Sorted hashes of all samples, tokens and labels together."""
    problems: list[str]


def planned_samples(recipe: Any, steps: int | None, *, part: str = "train", **options: Any) -> dict[int, Samples]:
    """What torchmix plans for the first steps.

    Args:
        recipe: A recipe's file, or a recipe.
        steps: How many; None for as many as there are.
        part: `train`, `validation` or `test`.
        options: More of `build_loader`.

    Returns:
        Step -> sorted hashes of its samples.
    """
    import torchmix

    with torchmix.build_loader(recipe, part=part, loaders="in_process", max_steps=steps, **options) as loader:
        return samples_of(loader)


def samples_of(loader: Any) -> dict[int, Samples]:
    """Sorted hashes of the samples of each step that a loader gives."""
    samples_of_step: dict[int, Samples] = defaultdict(list)
    for microbatch in loader:
        fields = (microbatch.tokens, microbatch.labels, microbatch.loss_mask)
        values = [field.flatten().int().tolist() for field in fields if field is not None]
        samples_of_step[microbatch.step].append(hash_of(values[0]) + hash_of(values[1] + values[2]))
    return {step: sorted(samples) for step, samples in samples_of_step.items()}


def planned_edit(recipe: Any, edited: Any, *, edit_at: int, steps: int) -> dict[int, Samples]:
    """What torchmix gives from the step on at which another recipe is loaded in the middle of a run.

    Args:
        recipe: The recipe's file.
        edited: The file of the edited one.
        edit_at: The first step of the edited recipe.
        steps: The step to end before.

    Returns:
        Step -> sorted hashes of its samples.
    """
    import torchmix

    with torchmix.build_loader(recipe, loaders="in_process", max_steps=edit_at) as loader:
        for _ in loader:
            pass
        state = loader.state_dict()
    with torchmix.build_loader(edited, loaders="in_process", max_steps=steps) as loader:
        try:
            loader.load_state_dict(state)
        except torchmix.StateError as error:
            word = str(error).split("accept_edit='")[1].split("'")[0]
            loader.load_state_dict(state, accept_edit=word)
        return samples_of(loader)


def read_records(folder: Path) -> list[Line]:
    """The lines of all ranks, in the order of ranks and time."""
    files = sorted(folder.glob("rank-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def consumed(lines: Iterable[Line], *, cp: int, pp: int, chunks: int, length: int) -> Consumed:
    """Put the slices of all ranks together.

    Args:
        lines: The lines of all ranks, each with a step.
        cp: Context-parallel ranks.
        pp: Pipeline stages.
        chunks: Model chunks of a stage.
        length: Tokens of a sample.
    """
    problems: list[str] = []
    taken: dict[tuple[int, int, int, int], dict[tuple[int, int], list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        taken[line["step"], line["dp"], line["pp"], line["chunk"]][line["cp"], line["tp"]].append(line)

    samples_of_step: dict[int, Samples] = defaultdict(list)
    for step, dp in sorted({key[:2] for key in taken}):
        where = f"step {step}, replica {dp}"
        first, last = taken[step, dp, 0, 0], taken[step, dp, pp - 1, chunks - 1]
        tokens = list(_whole(first, ("tokens",), cp=cp, length=length, problems=problems, where=where))
        labels = list(_whole(last, ("labels", "mask"), cp=cp, length=length, problems=problems, where=where))
        counts = {len(each) for key, ranks in taken.items() if key[:2] == (step, dp) for each in ranks.values()}
        if len(counts) != 1 or len(tokens) != len(labels):
            problems.append(f"{where}: chunks have taken {sorted(counts)} microbatches")
        packed = {
            line["boundaries"] is not None
            for key, ranks in taken.items()
            if key[:2] == (step, dp)
            for each in ranks.values()
            for line in each
        }
        if len(packed) != 1:
            problems.append(f"{where}: some chunks have boundaries, some have none")
        for of_tokens, of_labels in zip(tokens, labels, strict=False):
            samples_of_step[step] += [a + b for a, b in zip(of_tokens, of_labels, strict=True)]
    ordered = {step: sorted(samples) for step, samples in samples_of_step.items()}
    return Consumed(samples_of_step=ordered, problems=problems)


def _whole(
    ranks: dict[tuple[int, int], list[Line]],
    names: Sequence[str],
    *,
    cp: int,
    length: int,
    problems: list[str],
    where: str,
) -> Iterator[Samples]:
    """Hashes of the samples of each microbatch of one chunk, its CP slices put together.

    `ranks` holds the lines of each (cp, tp), in the order in which they were taken.
    """
    of_rank = {place: [[line[name] for name in names] for line in lines] for place, lines in ranks.items()}
    for (cp_rank, tp_rank), values in of_rank.items():
        if values != of_rank.get((cp_rank, 0)):
            problems.append(f"{where}: tensor-parallel rank {tp_rank} took other {names[0]} than rank 0")
    slices = [ranks.get((rank, 0), []) for rank in range(cp)]
    for lines in zip(*slices, strict=False):
        if any(line[name] is None for line in lines for name in names):
            problems.append(f"{where}: no {' and '.join(names)} where they are needed")
            return
        tokens = sum(len(line[names[0]]) for line in lines)
        boundaries = lines[0]["boundaries"] or list(range(0, tokens + 1, length))
        fields = [in_order([line[name] for line in lines], boundaries) for name in names]
        rows = range(0, tokens, length)
        yield [hash_of([value for field in fields for value in field[row : row + length]]) for row in rows]


def in_order(slices: Sequence[list[int]], boundaries: list[int]) -> list[int]:
    """The whole row of a microbatch from the slices of its CP ranks."""
    if len(slices) == 1:
        return slices[0]
    cut = torch.tensor(boundaries, dtype=torch.int64)
    places = torch.cat([positions_of_rank(cut, cp_size=len(slices), cp_rank=rank) for rank in range(len(slices))])
    values = torch.tensor([value for each in slices for value in each])
    whole = torch.empty_like(values)
    whole[places] = values
    return whole.tolist()


def hash_of(values: Sequence[int]) -> str:
    """12 hex digits of a list of integers."""
    return hashlib.sha256(",".join(map(str, values)).encode()).hexdigest()[:12]


def difference(expected: dict[int, Samples], found: dict[int, Samples]) -> list[str]:
    """What a run consumed otherwise, a line for each step that differs."""
    lines = []
    for step, samples in expected.items():
        have = found.get(step)
        if have is None:
            lines.append(f"step {step}: consumed nothing")
        elif have != samples:
            missing = Counter(samples) - Counter(have)
            extra = Counter(have) - Counter(samples)
            lines.append(
                f"step {step}: {missing.total()} of {len(samples)} planned samples missing, {extra.total()} others"
            )
    return lines
