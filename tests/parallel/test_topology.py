"""Topology: Megatron's rank order, torchrun's environment, and errors that name the numbers."""

from __future__ import annotations

import itertools

import pytest
from msgspec.structs import replace

from torchmix.errors import TopologyError
from torchmix.parallel.topology import Coordinates, Order, Topology

SIZES = [sizes for sizes in itertools.product((1, 2, 3), repeat=4) if sizes.count(3) <= 1]

# From megatron.core.parallel_state.RankGenerator(tp=2, ep=1, dp=2, pp=2, cp=2, order="tp-cp-ep-dp-pp").get_ranks(...)
MEGATRON_GROUPS = {
    "tp": [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]],
    "cp": [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]],
    "dp": [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]],
    "pp": [[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]],
}


def groups_along(axis: str, topology: Topology) -> list[list[int]]:
    """Ranks that differ only in their coordinate on one axis, ordered as Megatron lists them."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(topology.world_size):
        place = topology.with_rank(rank).coordinates
        others = tuple(getattr(place, name) for name in ("pp", "dp", "cp", "tp") if name != axis)
        groups.setdefault(others, []).append(rank)
    return sorted(groups.values())


# And with order="tp-cp-ep-pp-dp", as --use-tp-pp-dp-mapping asks for.
MEGATRON_GROUPS_WITH_DP_SLOWEST = {
    **MEGATRON_GROUPS,
    "dp": [[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]],
    "pp": [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]],
}


@pytest.mark.parametrize("axis", ["tp", "cp", "dp", "pp"])
def test_groups_along_an_axis_are_megatrons(axis: str) -> None:
    topology = Topology(tp=2, cp=2, pp=2, dp=2)
    assert groups_along(axis, topology) == MEGATRON_GROUPS[axis]
    other = Topology(tp=2, cp=2, pp=2, dp=2, order="tp-cp-pp-dp")
    assert groups_along(axis, other) == MEGATRON_GROUPS_WITH_DP_SLOWEST[axis]


@pytest.mark.slow
def test_rank_order_is_that_of_an_installed_megatron() -> None:
    """One test for all sizes: the import takes longer than they do, once in each process that has one of them."""
    parallel_state = pytest.importorskip("megatron.core.parallel_state", reason="megatron-core is not installed")
    orders: tuple[Order, ...] = ("tp-cp-dp-pp", "tp-cp-pp-dp")
    for (tp, cp, pp, dp), order in itertools.product(SIZES, orders):
        generator = parallel_state.RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order.replace("cp-", "cp-ep-"))
        topology = Topology(tp=tp, cp=cp, pp=pp, dp=dp, order=order)
        for axis in ("tp", "cp", "dp", "pp"):
            wanted = sorted(sorted(group) for group in generator.get_ranks(axis))
            assert groups_along(axis, topology) == wanted, (topology, axis)
        replicas = {tuple(sorted(group)) for group in generator.get_ranks("tp-cp-pp")}
        found: dict[int, list[int]] = {}
        for rank in range(topology.world_size):
            found.setdefault(topology.with_rank(rank).replica, []).append(rank)
        assert {tuple(group) for group in found.values()} == replicas, topology


@pytest.mark.parametrize(("tp", "cp", "pp", "dp"), SIZES)
def test_rank_at_inverts_coordinates(tp: int, cp: int, pp: int, dp: int) -> None:
    topology = Topology(tp=tp, cp=cp, pp=pp, dp=dp)
    seen = set()
    for rank in range(topology.world_size):
        place = topology.with_rank(rank).coordinates
        assert topology.rank_at(tp=place.tp, cp=place.cp, pp=place.pp, dp=place.dp) == rank
        other = replace(topology, order="tp-cp-pp-dp", rank=rank)
        place = other.coordinates
        assert other.rank_at(tp=place.tp, cp=place.cp, pp=place.pp, dp=place.dp) == rank
        seen.add((place.tp, place.cp, place.pp, place.dp))
    assert seen == set(itertools.product(range(tp), range(cp), range(pp), range(dp)))


def test_single_is_one_leading_rank() -> None:
    topology = Topology.single()
    assert (topology.world_size, topology.rank, topology.is_leader) == (1, 0, True)
    assert topology.coordinates == Coordinates(tp=0, cp=0, pp=0, dp=0)


def test_one_rank_of_each_replica_leads() -> None:
    topology = Topology(tp=2, cp=2, pp=3, dp=4)
    leaders = [rank for rank in range(topology.world_size) if topology.with_rank(rank).is_leader]
    assert leaders == [0, 4, 8, 12]
    assert [topology.with_rank(rank).replica for rank in leaders] == [0, 1, 2, 3]


def test_torchrun_leaves_the_rest_to_data_parallelism() -> None:
    topology = Topology.from_torchrun(tp=2, cp=1, pp=2, environ={"RANK": "5", "WORLD_SIZE": "12"})
    assert topology == Topology(tp=2, cp=1, pp=2, dp=3, rank=5)


def test_without_torchrun_the_job_is_one_process() -> None:
    assert Topology.from_torchrun(environ={}) == Topology.single()


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert Topology.from_torchrun() == Topology(dp=2, rank=1)


def test_a_world_that_does_not_divide_names_all_numbers() -> None:
    with pytest.raises(
        TopologyError, match=r"world size 6 .* tp 2 \* cp 1 \* pp 2 = 4; start a multiple of 4"
    ) as caught:
        Topology.from_torchrun(tp=2, pp=2, environ={"RANK": "0", "WORLD_SIZE": "6"})
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE=None"),
        ({"WORLD_SIZE": "2"}, "RANK=None"),
        ({"RANK": "zero", "WORLD_SIZE": "2"}, "RANK='zero' is not an integer"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"rank 2 is not in \[0, 2\)"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "world size 0"),
    ],
)
def test_a_bad_environment_is_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        Topology.from_torchrun(environ=environ)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tp": 0}, "tp=0 is below 1"),
        ({"dp": -2}, "dp=-2 is below 1"),
        ({"cp": 2.0}, "cp=2.0 is not an integer"),
        ({"pp": True}, "pp=True is not an integer"),
        ({"dp": 2, "rank": -1}, r"rank -1 is not in \[0, 2\)"),
    ],
)
def test_a_bad_size_or_rank_is_named(values: dict[str, int], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        Topology(**values)


def test_a_coordinate_outside_its_axis_is_named() -> None:
    with pytest.raises(TopologyError, match="no rank at cp 2: the axis has 2 ranks, 0 to 1"):
        Topology(cp=2).rank_at(cp=2)


def test_an_order_of_axes_that_nobody_has_is_refused() -> None:
    with pytest.raises(TopologyError, match="order='dp-tp-cp-pp' is not one of tp-cp-dp-pp, tp-cp-pp-dp"):
        Topology(order="dp-tp-cp-pp")  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ["tp-cp-dp-pp", "tp-cp-pp-dp"])
def test_ranks_of_several_groups_have_their_own_places_in_them(order: Order) -> None:
    one = Topology(tp=2, cp=2, pp=2, dp=2, order=order)
    for number in range(3):
        for rank in range(one.world_size):
            among = one.with_rank(rank).among(number, 3)
            assert (among.rank, among.dp, among.world_size) == (16 * number + rank, 6, 48)
            at = one.coordinates_of(rank)
            assert among.coordinates == replace(at, dp=at.dp + 2 * number)
            assert among.coordinates_of(rank) == at, "every rank has the same places of all"
    for number in (3, -1, True):
        with pytest.raises(TopologyError, match=r"group number .* is not in \[0, 3\)"):
            one.among(number, 3)
