"""Steps and replicas that are built at once: their arrays, how often anything is built, and errors in their place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from tests.support.files import make_tokens_file, random_tokens
from tests.support.loaders import write_job
from tests.support.native import native_or_not
from tests.support.plans import random_plan, values_of
from torchmix.constructor.arrays import FIELDS, BlockArrays, StepMemory, copy_of_block
from torchmix.constructor.build import build, build_block, memory_of_block, pieces_of_block, pieces_of_replica
from torchmix.errors import CorruptPage
from torchmix.native.load import num_calls
from torchmix.parallel.topology import Topology
from torchmix.planner.plan import StepPlan
from torchmix.reader.piece_copy import fill_from, write_padding
from torchmix.reader.protocol import Filled, Tokens
from torchmix.recipe.structs import Packing
from torchmix.stateful.open import build_loader
from torchmix.steps import blocks

LENGTH = 48
PACKINGS = (
    Packing(method="best_fit", boundaries="document", align_tokens=4),
    Packing(method="best_fit", boundaries="none", align_tokens=1),
    Packing(method="concat"),
)
RESETS = np.array([7, -1, 9])


def plans_of(packing: Packing, count: int = 5) -> tuple[list[StepPlan], dict[tuple[int, int], list[int]]]:
    """Plans of steps for two replicas, and the documents of all of them."""
    align_tokens = 1 if packing.method == "concat" else packing.align_tokens
    plans, documents = [], dict[tuple[int, int], list[int]]()
    for step in range(count):
        plan, of_step = random_plan(
            step, is_packed=packing.method != "concat", align_tokens=align_tokens, length=LENGTH
        )
        # Rows are numbered over all steps.
        rows = plan.pieces.row + len(documents)
        documents |= {(source, row + len(documents)): ids for (source, row), ids in of_step.items()}
        plans.append(replace(plan, pieces=replace(plan.pieces, row=rows), num_tokens_global=100 + step))
    return plans, documents


def block_of(
    plans: Sequence[StepPlan],
    documents: dict[tuple[int, int], list[int]],
    replicas: Sequence[int],
    packing: Packing,
    **options: object,
) -> list[BlockArrays]:
    pieces = pieces_of_block(plans, replicas)
    wanted = pieces.wanted(LENGTH)
    outs = memory_of_block(pieces, [StepMemory() for _ in replicas], LENGTH)
    values = np.zeros(wanted.num_places, np.int64)
    successors = np.zeros(len(wanted), np.int64)
    columns = (wanted.source, wanted.row, wanted.start, wanted.tokens, wanted.places)
    for i, (source, row, start, tokens, place) in enumerate(zip(*(one.tolist() for one in columns), strict=True)):
        ids = [*documents[source, row], 98]
        values[place : place + tokens], successors[i] = ids[start : start + tokens], ids[start + tokens]
    write_padding(wanted, outs)
    blank = fill_from(wanted, Tokens(values=values, successors=successors), ~pieces.ends_document, outs)
    return build_block(pieces, outs, Filled(blank=blank), length=LENGTH, packing=packing, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("resets", [None, RESETS])
@pytest.mark.parametrize("packing", PACKINGS)
def test_each_step_of_each_replica_is_as_if_it_had_been_built_alone(
    packing: Packing, resets: np.ndarray | None
) -> None:
    plans, documents = plans_of(packing)
    rng = np.random.default_rng(1)
    for ids in documents.values():  # ids that end a document inside a row
        ids[:] = [int(rng.choice([7, 9])) if rng.random() < 0.1 else token for token in ids]
    for replicas in ([0], [1], [0, 1], [1, 0]):
        found = block_of(plans, documents, replicas, packing, reset_ids=resets)
        for replica, block in zip(replicas, found, strict=True):
            assert len(block) == 5 and block.num_microbatches == 3
            for number, plan in enumerate(plans):
                pieces = pieces_of_replica(plan, replica)
                values, successors = values_of(pieces, documents, length=LENGTH)
                alone = build(pieces, values, successors, length=LENGTH, packing=packing, reset_ids=resets)
                one = block.step(number)
                assert (one.step, one.num_tokens_global) == (number, 100 + number)
                assert one.num_masked_tokens == alone.num_masked_tokens
                assert tuple(one.fields) == FIELDS
                for name in FIELDS:
                    assert one.fields[name].dtype == alone.fields[name].dtype
                    np.testing.assert_array_equal(one.fields[name], alone.fields[name], err_msg=name)


def test_parts_and_copies_of_a_block_have_its_steps() -> None:
    [block] = block_of(*plans_of(PACKINGS[0]), [1], PACKINGS[0])
    copy = copy_of_block(block, StepMemory())
    for number in range(2, 4):
        part = block.part(2, 4)
        for name in FIELDS:
            np.testing.assert_array_equal(part.step(number - 2).fields[name], block.step(number).fields[name])
            np.testing.assert_array_equal(copy.step(number).fields[name], block.step(number).fields[name])
    assert not any(np.shares_memory(copy.fields[name], block.fields[name]) for name in FIELDS)


@pytest.mark.parametrize("native", [True, False])
def test_what_is_masked_is_counted_in_its_step_and_what_is_not_is_an_error(native: bool) -> None:
    plans, documents = plans_of(PACKINGS[0])
    pieces = plans[3].pieces
    first = int(np.flatnonzero(plans[3].placement.dp_rank_of_sample[plans[3].sample] == 1)[0])
    place = int(pieces.source[first]), int(pieces.row[first])
    documents[place][int(pieces.start[first])] = -1
    with native_or_not(native):
        blocks = block_of(plans, documents, [0, 1], PACKINGS[0], masked=("a", "b", "c"))
        with pytest.raises(CorruptPage, match=r"has -1 as token \d+ of its document"):
            block_of(plans, documents, [0, 1], PACKINGS[0], masked=("z",))
    found = [[facts.num_masked_tokens for facts in block.steps] for block in blocks]
    tokens = int(pieces.tokens[first])
    ends = int(pieces.start[first]) + tokens == int(pieces.document_tokens[first])
    assert found == [[0] * 5, [0, 0, 0, tokens - ends, 0]]
    bad = blocks[1].steps[3].bad_tokens
    assert bad is not None and bad.tolist() == [tokens * (source == place[0]) for source in range(3)]
    assert all(facts.bad_tokens is None for block in blocks for facts in block.steps if facts is not blocks[1].steps[3])


def test_small_steps_of_a_loader_are_read_and_built_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, builds = write_job(tmp_path), [0]

    def counted(*args, **kwargs):  # type: ignore[no-untyped-def]
        builds[0] += 1
        return build_block(*args, **kwargs)

    monkeypatch.setattr(blocks, "build_block", counted)
    with native_or_not(True):
        before = num_calls().get("tm_locate", 0)
        with build_loader(recipe, topology=Topology(), loaders="in_process", max_steps=63) as loader:
            assert sum(microbatch.is_last_of_step for microbatch in loader) == 63
        assert num_calls()["tm_locate"] == before + 6
    assert builds[0] == 6, "blocks of 1, 2, 4, 8, 16 and 32 steps"


def test_an_error_of_a_block_comes_once_in_the_place_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, sizes = write_job(tmp_path), list[int]()

    def fails(planned, *args, **kwargs):  # type: ignore[no-untyped-def]
        sizes.append(len(planned.steps))
        if sum(sizes) > 3:
            raise CorruptPage(f"call {len(sizes)}")
        return build_block(planned, *args, **kwargs)

    monkeypatch.setattr(blocks, "build_block", fails)
    with build_loader(recipe, topology=Topology(), loaders="in_process", max_steps=63) as loader:
        with pytest.raises(CorruptPage, match="call 4") as caught:
            list(loader)
        assert loader.state_dict() and loader.stats()["step"] == 2
    assert sizes == [1, 2, 4, 1]
    assert caught.value.__context__ is None, "and not as that of the whole block, too"


def test_a_change_of_the_batch_ends_a_block(tmp_path: Path) -> None:
    make_tokens_file(tmp_path / "web.parquet", random_tokens(3, 400, mean_tokens=40))
    (tmp_path / "recipe.yaml").write_text(
        "version: 1\nseed: 5\nsources: {web: {path: web.parquet, tokens: input_ids}}\nmixture: {web: 1}\n"
        "batch:\n  length: 32\n  samples: [{from_step: 0, samples: 4}, {from_step: 5, samples: 8}]\n"
    )
    with build_loader(tmp_path / "recipe.yaml", topology=Topology(), loaders="in_process", max_steps=9) as loader:
        counts = [microbatch.index + 1 for microbatch in loader if microbatch.is_last_of_step]
    assert counts == [4] * 5 + [8] * 4
