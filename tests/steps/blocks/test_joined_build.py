"""Steps of a block that are built at once: their arrays, how often anything is built, and errors in their place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from tests.support.files import make_tokens_file, random_tokens
from tests.support.loaders import write_job
from tests.support.plans import random_plan, values_of
from torchmix.constructor.arrays import FIELDS
from torchmix.constructor.build import ReplicaPieces, build, join_pieces, pieces_of_replica
from torchmix.errors import CorruptPage
from torchmix.parallel.topology import Topology
from torchmix.reader.protocol import Tokens
from torchmix.recipe.structs import Packing
from torchmix.stateful.open import build_loader
from torchmix.steps import replica_steps
from torchmix.steps.blocks import ReplicaBlock

LENGTH = 48
PACKINGS = (
    Packing(method="best_fit", boundaries="document", align_tokens=4),
    Packing(method="best_fit", boundaries="none", align_tokens=1),
    Packing(method="concat"),
)


def block_of(packing: Packing, *, num_steps: int = 5, bad_step: int | None = None) -> tuple[ReplicaBlock, list, list]:
    """A block, and what each of its steps is built from alone."""
    align_tokens = 1 if packing.method == "concat" else packing.align_tokens
    alone: list[tuple[ReplicaPieces, Tokens]] = []
    for step in range(num_steps):
        plan, documents = random_plan(
            step, is_packed=packing.method != "concat", align_tokens=align_tokens, length=LENGTH
        )
        pieces = replace(pieces_of_replica(plan, 0), step=step, num_tokens_global=100 + step)
        values, successors = values_of(pieces, documents, length=LENGTH)
        if step == bad_step:
            values = values.copy()
            values[pieces.places(LENGTH)[0]] = -1
        alone.append((pieces, Tokens(values=values, successors=successors)))
    joined = join_pieces([pieces for pieces, _ in alone])
    tokens = Tokens(
        values=np.concatenate([tokens.values for _, tokens in alone]),
        successors=np.concatenate([tokens.successors for _, tokens in alone]),
    )
    built: list[int] = []

    def make(pieces: ReplicaPieces, tokens: Tokens):  # type: ignore[no-untyped-def]
        built.append(pieces.num_samples)
        return build(pieces, tokens.values, tokens.successors, length=LENGTH, packing=packing, masked=("masked",))

    block = ReplicaBlock([pieces for pieces, _ in alone], joined, tokens, LENGTH)
    return block, [make, built], alone


@pytest.mark.parametrize("packing", PACKINGS)
def test_each_step_is_as_if_it_had_been_built_alone(packing: Packing) -> None:
    block, [make, built], alone = block_of(packing)
    found = [block.build(step, 0, make, is_joint=True) for step in range(5)]
    assert len(built) == 1, "one build for all steps"
    for step, (one, (pieces, tokens)) in enumerate(zip(found, alone, strict=True)):
        wanted = make(pieces, tokens)
        assert (one.step, one.num_tokens_global, one.num_masked_tokens) == (step, 100 + step, 0)
        assert tuple(one.fields) == FIELDS
        for name in FIELDS:
            assert one.fields[name].dtype == wanted.fields[name].dtype
            np.testing.assert_array_equal(one.fields[name], wanted.fields[name], err_msg=name)
    block.build(0, 1, make, is_joint=True)
    assert len(built) == 1 + 5 + 1, "another consumer has memory of its own"


def test_a_step_that_cannot_be_built_fails_in_its_place() -> None:
    block, [make, _], _ = block_of(PACKINGS[0], bad_step=3)
    for step in (0, 1, 2, 4):
        assert block.build(step, 0, make, is_joint=True).step == step
    with pytest.raises(CorruptPage, match="token ids are 0 to"):
        block.build(3, 0, make, is_joint=True)


def test_steps_whose_tokens_may_be_masked_are_built_one_by_one() -> None:
    block, [make, built], alone = block_of(PACKINGS[0])
    for step in range(5):
        block.build(step, 0, make, is_joint=False)
    assert built == [pieces.num_samples for pieces, _ in alone]


def test_small_steps_of_a_loader_are_built_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, builds = write_job(tmp_path), [0]

    def counted(*args, **kwargs):  # type: ignore[no-untyped-def]
        builds[0] += 1
        return build(*args, **kwargs)

    monkeypatch.setattr(replica_steps, "build", counted)
    with build_loader(recipe, topology=Topology(), loaders="in_process", max_steps=63) as loader:
        assert sum(microbatch.is_last_of_step for microbatch in loader) == 63
    assert builds[0] == 6, "blocks of 1, 2, 4, 8, 16 and 32 steps"


def test_a_change_of_the_batch_ends_a_block(tmp_path: Path) -> None:
    make_tokens_file(tmp_path / "web.parquet", random_tokens(3, 400, mean_tokens=40))
    (tmp_path / "recipe.yaml").write_text(
        "version: 1\nseed: 5\nsources: {web: {path: web.parquet, tokens: input_ids}}\nmixture: {web: 1}\n"
        "batch:\n  length: 32\n  samples: [{from_step: 0, samples: 4}, {from_step: 5, samples: 8}]\n"
    )
    with build_loader(tmp_path / "recipe.yaml", topology=Topology(), loaders="in_process", max_steps=9) as loader:
        counts = [microbatch.index + 1 for microbatch in loader if microbatch.is_last_of_step]
    assert counts == [4] * 5 + [8] * 4
