"""What ranks have recorded, put together: equal to the plan at every layout, and not equal after any change to it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.example import PRETRAIN_GPT, example_module

consumed = example_module("consumed", PRETRAIN_GPT)
attention = example_module("attention")

LENGTH = 16
MICROBATCHES = 2
SAMPLES_OF_MICROBATCH = 2
Line = dict[str, Any]


def microbatch(*key: int) -> dict[str, list[int]]:
    """Made-up fields of one microbatch, from where it belongs."""
    numbers = random.Random(str(key))
    tokens = SAMPLES_OF_MICROBATCH * LENGTH
    return {name: [numbers.randrange(256) for _ in range(tokens)] for name in ("tokens", "labels", "mask")}


def samples(fields: dict[str, list[int]]) -> Iterator[str]:
    for row in range(0, len(fields["tokens"]), LENGTH):
        part = {name: values[row : row + LENGTH] for name, values in fields.items()}
        yield consumed.hash_of(part["tokens"]) + consumed.hash_of(part["labels"] + part["mask"])


def plan(*, dp: int, steps: int = 2) -> dict[int, list[str]]:
    places = [(replica, index) for replica in range(dp) for index in range(MICROBATCHES)]
    return {
        step: sorted(sample for place in places for sample in samples(microbatch(step, *place)))
        for step in range(steps)
    }


def lines(
    *, dp: int = 1, tp: int = 1, cp: int = 1, pp: int = 1, chunks: int = 1, packed: bool = False, steps: int = 2
) -> list[Line]:
    """What the ranks of a layout record of that plan."""
    boundaries = [0, 4, LENGTH, 2 * LENGTH] if packed else None
    cut = torch.tensor(boundaries or [0, LENGTH, 2 * LENGTH])
    made = []
    ranks = [(d, t, c, p) for d in range(dp) for t in range(tp) for c in range(cp) for p in range(pp)]
    for d, t, c, p in ranks:
        held = attention.positions_of_rank(cut, cp_size=cp, cp_rank=c) if cp > 1 else torch.arange(2 * LENGTH)
        for step in range(steps):
            for chunk in range(chunks):
                for index in range(MICROBATCHES):
                    fields = microbatch(step, d, index)
                    mine = {name: torch.tensor(values)[held].tolist() for name, values in fields.items()}
                    is_first, is_last = (p, chunk) == (0, 0), (p, chunk) == (pp - 1, chunks - 1)
                    place = {"step": step, "dp": d, "tp": t, "cp": c, "pp": p, "chunk": chunk}
                    made.append(
                        {
                            **place,
                            "tokens": mine["tokens"] if is_first else None,
                            "labels": mine["labels"] if is_last else None,
                            "mask": mine["mask"] if is_last else None,
                            "boundaries": boundaries,
                        }
                    )
    return made


def put_together(made: list[Line], *, cp: int = 1, pp: int = 1, chunks: int = 1) -> Any:
    return consumed.consumed(made, cp=cp, pp=pp, chunks=chunks, length=LENGTH)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "layout",
    [{}, {"dp": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2}, {"pp": 2, "chunks": 2}, {"tp": 2, "pp": 2}, {"cp": 2, "pp": 2}],
    ids=str,
)
def test_every_layout_comes_to_the_same(layout: dict[str, int], packed: bool) -> None:
    whole = {name: layout.get(name, 1) for name in ("cp", "pp", "chunks")}
    found = put_together(lines(**layout, packed=packed), **whole)
    assert found.problems == []
    assert found.samples_of_step == plan(dp=layout.get("dp", 1))


def test_slices_of_packed_documents_need_their_boundaries() -> None:
    found = put_together([{**line, "boundaries": None} for line in lines(cp=2, packed=True)], cp=2)
    assert consumed.difference(plan(dp=1), found.samples_of_step) != []


def test_a_single_other_token_is_found() -> None:
    made = lines(dp=2)
    made[3]["tokens"][5] += 1
    found = put_together(made)
    [text] = consumed.difference(plan(dp=2), found.samples_of_step)
    assert text == "step 1: 1 of 8 planned samples missing, 1 others"


def test_labels_of_another_microbatch_are_found() -> None:
    made = lines(pp=2)
    last = [line for line in made if line["pp"] == 1 and line["step"] == 0]
    last[0]["labels"], last[1]["labels"] = last[1]["labels"], last[0]["labels"]
    found = put_together(made, pp=2)
    assert consumed.difference(plan(dp=1), found.samples_of_step) != []


def test_a_tensor_parallel_rank_with_other_data_is_named() -> None:
    made = lines(tp=2)
    next(line for line in made if line["tp"] == 1 and line["step"] == 1)["tokens"][0] += 1
    assert put_together(made).problems == ["step 1, replica 0: tensor-parallel rank 1 took other tokens than rank 0"]


def test_a_chunk_that_took_fewer_is_named() -> None:
    made = lines(pp=2, chunks=2)
    made.remove(next(line for line in made if line["pp"] == 1 and line["chunk"] == 0))
    assert put_together(made, pp=2, chunks=2).problems == ["step 0, replica 0: chunks have taken [1, 2] microbatches"]


def test_boundaries_must_reach_all_chunks_or_none() -> None:
    made = lines(pp=2, packed=True)
    made[-1]["boundaries"] = None
    assert put_together(made, pp=2).problems == ["step 1, replica 0: some chunks have boundaries, some have none"]


def test_a_stage_without_what_it_needs_is_named() -> None:
    made = lines(pp=2)
    next(line for line in made if line["pp"] == 1)["mask"] = None
    assert "step 0, replica 0: no labels and mask where they are needed" in put_together(made, pp=2).problems


def test_a_step_that_was_not_taken_is_named() -> None:
    found = put_together(lines(steps=1))
    assert consumed.difference(plan(dp=1), found.samples_of_step) == ["step 1: consumed nothing"]
