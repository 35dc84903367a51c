from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
from msgspec.structs import replace

from tests.support.pieces import name_hashes, pieces_of
from torchmix.parallel.place_tree import Layout
from torchmix.planner.balance import Placement, in_hash_order
from torchmix.planner.pack import Packed, Pieces
from torchmix.planner.plan import START_DIGEST, name_hash, order_digest, plan_digest

NAMES = ("code", "web")


def packed_example() -> Packed:
    pieces = replace(
        pieces_of([5, 9, 4], drawn_step=3),
        source=np.array([1, 0, 1]),
        epoch=np.array([0, 2, 1]),
        start=np.array([0, 7, 0]),
    )
    return Packed(
        pieces=pieces,
        sample=np.array([0, 0, 2]),
        slot=np.array([0, 1, 0]),
        sample_offset=np.array([0, 8, 0]),
        pool=Pieces.empty(),
    )


def test_the_order_digest_is_a_hash_of_seven_integers_a_piece():
    name_of = [int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True) for name in NAMES]
    table = struct.pack(
        "<21q",
        *(0, 0, name_of[1], 0, 0, 0, 5),
        *(0, 1, name_of[0], 2, 1, 7, 9),
        *(2, 0, name_of[1], 1, 2, 0, 4),
    )
    expected = hashlib.sha256(START_DIGEST + struct.pack("<q", 11) + table).digest()[:8]
    assert order_digest(START_DIGEST, 11, packed_example(), name_hashes(NAMES, packed_example().pieces)) == expected


def test_digests_are_the_ones_that_were_frozen():
    assert START_DIGEST.hex() == "122834840c31393f"
    assert [f"{name_hash(name, name):016x}" for name in NAMES] == ["caff532e8ad09456", "b9422febf6575e4b"]
    digest = order_digest(START_DIGEST, 0, packed_example(), name_hashes(NAMES, packed_example().pieces))
    assert digest.hex() == "0613a742151976fd"
    placement = in_hash_order(8, Layout(dp=2, micro_batch_size=2))
    assert plan_digest(digest, placement, Layout(dp=2, micro_batch_size=2)).hex() == "f7db971800d374f0"


@pytest.mark.parametrize("column", ["epoch", "row", "start", "tokens"])
def test_the_order_digest_sees_every_number_of_every_piece(column):
    packed, names = packed_example(), name_hashes(NAMES, packed_example().pieces)
    digests = {order_digest(START_DIGEST, 0, packed, names)}
    for piece in range(3):
        for change in (1, -1, 1 << 40):
            values = getattr(packed.pieces, column).copy()
            values[piece] += change
            changed = replace(packed, pieces=replace(packed.pieces, **{column: values}))
            digests.add(order_digest(START_DIGEST, 0, changed, names))
    assert len(digests) == 10


def test_the_order_digest_sees_samples_slots_sources_the_step_and_all_steps_before():
    packed, names = packed_example(), name_hashes(NAMES, packed_example().pieces)
    other_source = replace(packed.pieces, source=np.array([1, 1, 1]))
    order = np.array([1, 0, 2])
    digests = [
        order_digest(START_DIGEST, 0, packed, names),
        order_digest(START_DIGEST, 0, replace(packed, sample=np.array([0, 0, 1])), names),
        order_digest(START_DIGEST, 0, replace(packed, slot=np.array([1, 0, 0])), names),
        order_digest(START_DIGEST, 0, replace(packed, pieces=other_source), name_hashes(NAMES, other_source)),
        order_digest(START_DIGEST, 0, replace(packed, pieces=packed.pieces.take(order)), names[order]),
        order_digest(START_DIGEST, 1, packed, names),
        order_digest(bytes(8), 0, packed, names),
    ]
    assert len(set(digests)) == len(digests)


def test_the_order_digest_knows_sources_by_name_and_nothing_of_pool_and_age():
    packed = packed_example()
    digest = order_digest(START_DIGEST, 0, packed, name_hashes(NAMES, packed_example().pieces))
    # One more source sorts between the two: indices move, names do not.
    moved = replace(packed, pieces=replace(packed.pieces, source=np.array([2, 0, 2])))
    assert order_digest(START_DIGEST, 0, moved, name_hashes(("code", "peps", "web"), moved.pieces)) == digest
    assert order_digest(START_DIGEST, 0, packed, name_hashes(("code", "wet"), packed.pieces)) != digest
    aged = replace(packed, pieces=replace(packed.pieces, drawn_step=np.array([1, 2, 3])), pool=pieces_of([3]))
    assert order_digest(START_DIGEST, 0, aged, name_hashes(NAMES, packed_example().pieces)) == digest


def test_the_plan_digest_sees_the_order_and_every_place_and_the_layout():
    placement = in_hash_order(8, Layout(dp=2, micro_batch_size=2))
    digests = [
        plan_digest(START_DIGEST, placement, Layout(dp=2, micro_batch_size=2)),
        plan_digest(bytes(8), placement, Layout(dp=2, micro_batch_size=2)),
        plan_digest(START_DIGEST, placement, Layout(dp=4, micro_batch_size=2)),
        plan_digest(START_DIGEST, placement, Layout(dp=2, micro_batch_size=4)),
        plan_digest(START_DIGEST, placement, Layout(dp=4, micro_batch_size=1)),
    ]
    for column in ("dp_rank_of_sample", "microbatch_of_sample", "slot_of_sample"):
        for sample in (0, 7):
            values = getattr(placement, column).copy()
            values[sample] += 1
            digests.append(
                plan_digest(START_DIGEST, replace(placement, **{column: values}), Layout(dp=2, micro_batch_size=2))
            )
    assert len(set(digests)) == len(digests)


def test_digests_do_not_depend_on_how_arrays_lie_in_memory():
    packed, names = packed_example(), name_hashes(NAMES, packed_example().pieces)
    strided = {
        each: np.repeat(getattr(packed.pieces, each), 2)[::2] for each in ("source", "epoch", "row", "start", "tokens")
    }
    narrow = replace(packed, pieces=replace(packed.pieces, **strided), sample=packed.sample.astype(np.int32))
    assert order_digest(START_DIGEST, 0, narrow, names) == order_digest(START_DIGEST, 0, packed, names)
    placement = in_hash_order(8, Layout(dp=2, micro_batch_size=2))
    narrow_placement = Placement(
        dp_rank_of_sample=placement.dp_rank_of_sample.astype(np.int32),
        microbatch_of_sample=np.repeat(placement.microbatch_of_sample, 2)[::2],
        slot_of_sample=placement.slot_of_sample,
    )
    one, other = (
        plan_digest(START_DIGEST, each, Layout(dp=2, micro_batch_size=2)) for each in (placement, narrow_placement)
    )
    assert one == other
