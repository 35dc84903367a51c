"""Fan-out in one process: a thread per rank, through the same code and bytes as between processes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tests.support.worlds import run_ranks
from torchmix.errors import CorruptPage, PlanDiverged, RankLost, TooManyBadRows, TopologyError, WireError
from torchmix.parallel.agreement import MOST_COMPARED, Given, Masked, ToCompare
from torchmix.parallel.fan_out import OWN, FanOut, RoleBatch, local_world, open_fan_out
from torchmix.parallel.groups import open_local_groups
from torchmix.parallel.place_tree import ClientPlaceTree, Role
from torchmix.parallel.topology import Topology
from torchmix.parallel.wire import DTYPES

LAYOUTS = [
    Topology(),
    Topology(dp=3),
    Topology(tp=2, dp=2),
    Topology(cp=2, dp=2),
    Topology(pp=2, dp=2),
    Topology(tp=2, cp=2, pp=3, dp=2),
]
NUM_STEPS = 3


def share_for(replica: int, role: Role, step: int) -> RoleBatch:
    """A share whose every value tells whom it is for."""
    stage = ("only", "first", "middle", "last").index(role.stage)
    key = 1000 * step + 100 * replica + 10 * stage + role.cp_rank
    tensors = {"cu_seqlens": torch.arange(step + 1, dtype=torch.int32) * key}
    if role.is_first_stage:
        tensors["tokens"] = torch.full((2, 4), key)
    if role.is_last_stage:
        tensors["loss_mask"] = torch.full((2, 4), float(key), dtype=torch.float32)
    return RoleBatch(header=f"{key}".encode(), tensors=tensors)


def told(step: int, order: bytes, plan: bytes, first_microbatch: int = 0) -> list[ToCompare]:
    """A step to compare."""
    return [ToCompare(step=step, order_digest=order, plan_digest=plan, first_microbatch=first_microbatch)]


def assert_equal(found: RoleBatch, expected: RoleBatch) -> None:
    assert found.header == expected.header
    assert list(found.tensors) == list(expected.tensors)
    for name, tensor in expected.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)


@pytest.mark.parametrize("topology", LAYOUTS, ids=str)
def test_each_rank_receives_its_roles_share_of_its_replica(topology: Topology) -> None:
    ends = local_world(topology)
    tree = ClientPlaceTree.from_topology(topology)

    def program(rank: int) -> int:
        end, view = ends[rank], tree.with_rank(rank)
        if view.is_leader:
            for step in range(NUM_STEPS):
                end.send({role: share_for(view.replica, role, step) for role in end.roles_to_send})
            end.send_end()
            return NUM_STEPS
        received = 0
        while (share := end.receive()) is not None:
            assert_equal(share, share_for(view.replica, view.role, received))
            received += 1
        return received

    assert run_ranks(range(topology.world_size), program) == [NUM_STEPS] * topology.world_size


def test_only_roles_with_peers_are_sent() -> None:
    tree = ClientPlaceTree.from_topology(Topology(cp=2))
    leader, peer = (FanOut(tree.with_rank(rank), None) for rank in (0, 1))
    assert leader.roles_to_send == (Role(stage="only", cp_rank=1),)
    assert peer.roles_to_send == ()
    assert FanOut(ClientPlaceTree.from_topology(Topology()), None).roles_to_send == ()


def test_a_role_of_the_leader_with_peers_is_sent() -> None:
    tree = ClientPlaceTree.from_topology(Topology(tp=2))
    assert FanOut(tree, None).roles_to_send == (Role(stage="only", cp_rank=0),)


def exchange(share: RoleBatch) -> RoleBatch:
    leader, peer = local_world(Topology(tp=2))
    role = leader.roles_to_send[0]
    received = run_ranks([lambda: leader.send({role: share}), peer.receive], lambda program: program())[1]
    assert received is not None
    return received


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (2, 3, 4)], ids=str)
def test_every_dtype_and_shape_travels_bit_for_bit(name: str, shape: tuple[int, ...]) -> None:
    values = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(3)).to(getattr(torch, name))
    assert_equal(exchange(RoleBatch(header=b"", tensors={"a": values})), RoleBatch(header=b"", tensors={"a": values}))


def test_a_tensor_that_is_not_contiguous_travels() -> None:
    values = torch.arange(12).view(3, 4).t()
    assert_equal(exchange(RoleBatch(header=b"h", tensors={"a": values})), RoleBatch(header=b"h", tensors={"a": values}))


def test_received_tensors_are_views_of_one_aligned_buffer() -> None:
    share = RoleBatch(header=b"odd", tensors={"a": torch.arange(5), "b": torch.ones(3, dtype=torch.float32)})
    received = exchange(share)
    storages = {tensor.untyped_storage().data_ptr() for tensor in received.tensors.values()}
    assert len(storages) == 1
    assert all(tensor.data_ptr() % 64 == 0 for tensor in received.tensors.values())


def test_what_was_received_survives_the_next_exchange() -> None:
    leader, peer = local_world(Topology(tp=2))
    role = leader.roles_to_send[0]

    def send() -> None:
        for step in (1, 2):
            leader.send({role: share_for(0, role, step)})

    _, received = run_ranks([send, lambda: [peer.receive(), peer.receive()]], lambda program: program())
    for step, share in zip((1, 2), received, strict=True):
        assert_equal(share, share_for(0, role, step))


def test_a_rank_gets_what_is_for_it_alone() -> None:
    ends = local_world(Topology(tp=3))
    role = ends[0].roles_to_send[0]
    own = {rank: {"a": torch.full((2 * rank,), rank)} for rank in (1, 2)}

    def send() -> None:
        ends[0].send({role: RoleBatch(header=b"h", tensors={"b": torch.arange(3)}, own=own)})
        ends[0].send({role: RoleBatch(header=b"h", tensors={"b": torch.arange(4)})})
        ends[0].send_end()

    def receive(rank: int) -> None:
        first, second = ends[rank].receive(), ends[rank].receive()
        assert first is not None and second is not None and ends[rank].receive() is None
        assert list(first.tensors) == ["b"] and list(first.own) == [rank] and not second.own
        assert torch.equal(first.own[rank]["a"], own[rank]["a"]) and len(second.tensors["b"]) == 4

    run_ranks([send, lambda: receive(1), lambda: receive(2)], lambda program: program())


@pytest.mark.parametrize("sizes", [torch.zeros(2, 2, dtype=torch.int64), torch.ones(3, 2, dtype=torch.int64), None])
def test_wrong_sizes_for_single_ranks_are_refused(sizes: torch.Tensor | None) -> None:
    told = torch.tensor([[0, 0], [9, 1 << 60]]) if sizes is None else sizes
    with pytest.raises(WireError, match=r"announces .* sizes of arrays for single ranks"):
        exchange(RoleBatch(header=b"", tensors={OWN: told}))


def test_a_closing_peer_takes_what_is_under_way() -> None:
    leader, peer = local_world(Topology(tp=2))
    role = leader.roles_to_send[0]

    def send() -> None:
        for step in range(5):
            leader.send({role: share_for(0, role, step)})
        leader.send_end()

    assert run_ranks([send, peer.drain], lambda program: program()) == [None, 5]


def test_leaders_with_equal_plans_agree() -> None:
    ends = [end for end in local_world(Topology(tp=2, dp=3)) if end.roles_to_send]
    assert len(ends) == 3
    digests = (bytes.fromhex("ffffffffffffffff"), bytes.fromhex("0123456789abcdef"))
    for found in run_ranks(ends, lambda end: [end.compare(told(step, *digests)) for step in range(3)]):
        assert [(masked.num_tokens, masked.bad_tokens) for [masked] in found] == [(0, None)] * 3


@pytest.mark.parametrize("changed", [(8, b"a" * 8, b"b" * 8), (7, b"\xff" * 8, b"b" * 8), (7, b"a" * 8, b"d" * 8)])
def test_diverged_plans_name_step_ranks_and_both_values(changed: tuple[int, bytes, bytes]) -> None:
    same = (7, b"a" * 8, b"b" * 8)
    ends = [end for end in local_world(Topology(tp=2, dp=2)) if end.roles_to_send]

    def compare(end: FanOut, plan: tuple[int, bytes, bytes]) -> str:
        with pytest.raises(PlanDiverged) as caught:
            end.compare(told(*plan))
        return str(caught.value)

    for text in run_ranks(list(zip(ends, (same, changed), strict=True)), lambda pair: compare(*pair)):
        for rank, (step, order, plan) in ((0, same), (2, changed)):
            assert f"rank {rank} step {step}, order digest {order.hex()}, plan digest {plan.hex()}" in text


def test_diverged_plans_say_what_they_were_planned_by_also_beside_a_leader_that_has_ended() -> None:
    ends = local_world(Topology(dp=4))
    rows = {"a": (1, 1), "b": (2, 1 << 63), "c": (3, 4)}
    given = [
        Given(
            recipe="r", catalog=catalog, denied=denied, streams=tuple(rows), rows=tuple(one[k] for one in rows.values())
        )
        for k, (catalog, denied) in enumerate((("c" * 16, ""), ("e", "d")))
    ]

    def program(rank: int) -> str:
        text = ""
        if rank < 3:
            digest = b"b" if rank == 1 else b"a"
            text = met(lambda: ends[rank].compare(told(3, digest * 8, b"p" * 8), lambda: given[rank == 1]))
        ends[rank].send_end()
        return text

    first, second, third, _ = run_ranks(range(4), program)
    what = "their catalogs differ: rank {0} has {1}, rank {2} has {3} (b, c with other rows); "
    what += "their deny-lists differ: rank {0} has {4}, rank {2} has {5}"
    assert what.format(0, "c" * 16, 1, "e", "none", "d") in first
    assert what.format(1, "e", 0, "c" * 16, "d", "none") in second
    assert what.format(2, "c" * 16, 1, "e", "none", "d") in third
    assert "recipes" not in first and "alike" not in first


def test_a_single_leader_has_nobody_to_compare_with() -> None:
    open_fan_out(ClientPlaceTree.from_topology(Topology())).compare(told(0, bytes(8), bytes(8)))


def test_a_leader_that_ends_early_lets_the_others_go_on_until_they_end() -> None:
    ends = local_world(Topology(dp=3))

    def run(end: FanOut, num_steps: int) -> int:
        for step in range(num_steps):
            end.compare(told(step, bytes([step] * 8), bytes(8)))
        end.send_end()
        return num_steps

    assert run_ranks(list(zip(ends, (0, 2, 5), strict=True)), lambda pair: run(*pair)) == [0, 2, 5]


def met(program: Callable[[], object]) -> str:
    with pytest.raises((PlanDiverged, RankLost)) as caught:
        program()
    return str(caught.value)


def test_the_failure_of_one_leader_is_met_by_all_ranks_at_the_same_step_and_leaves_the_exchange_at_rest() -> None:
    tree = ClientPlaceTree.from_topology(Topology(tp=2, dp=2))

    def program(rank: int, end: FanOut) -> list[str]:
        texts = []
        for _ in range(2):  # a stream after a failure works as the first did
            if rank == 2:
                end.compare(told(0, b"a" * 8, b"b" * 8))
                end.send({role: share_for(1, role, 0) for role in end.roles_to_send})
                end.send_failure(CorruptPage("page 7 does not decode"))
            elif rank == 0:
                end.compare(told(0, b"a" * 8, b"b" * 8))
                end.send({role: share_for(0, role, 0) for role in end.roles_to_send})
                texts.append(met(lambda: end.compare(told(1, b"c" * 8, b"d" * 8))))
            else:
                assert_equal(end.receive(), share_for(tree.with_rank(rank).replica, tree.role, 0))
                texts.append(met(end.receive))
        return texts

    leader, its_peer, failed, other_peer = run_ranks(
        list(enumerate(local_world(Topology(tp=2, dp=2)))), lambda pair: program(*pair)
    )
    assert leader == ["rank 2, a leader as this rank, failed at step 1: see its own error"] * 2
    assert its_peer == [f"rank 0, which leads this rank, failed: RankLost: {leader[0]}"] * 2
    assert other_peer == ["rank 2, which leads this rank, failed: CorruptPage: page 7 does not decode"] * 2
    assert failed == []


def test_a_leader_that_ends_does_not_wait_for_one_that_failed() -> None:
    ends = local_world(Topology(dp=3))
    programs = [
        ends[0].send_end,
        lambda: met(lambda: ends[1].compare(told(0, bytes(8), bytes(8)))),
        lambda: ends[2].send_failure(ValueError("x")),
    ]
    assert run_ranks(programs, lambda program: program())[1].startswith("rank 2, a leader as this rank, failed")


def test_diverged_plans_are_told_to_the_peers() -> None:
    ends = local_world(Topology(tp=2, dp=2))
    programs = [
        lambda: met(lambda: ends[0].compare(told(3, b"a" * 8, b"b" * 8))),
        lambda: met(ends[1].receive),
        lambda: met(lambda: ends[2].compare(told(3, b"a" * 8, b"b" * 8, 2))),
        lambda: met(ends[3].receive),
    ]
    texts = run_ranks(programs, lambda program: program())
    assert all("leaders planned differently" in text for text in texts)
    assert all("recipes, catalogs, deny-lists, logs of decisions are alike" in text for text in texts)
    assert all("from microbatch 0" in text and "from microbatch 2" in text for text in texts)


def test_a_stream_may_follow_another() -> None:
    leader, peer = local_world(Topology(tp=2))
    role = leader.roles_to_send[0]

    def send() -> None:
        for step in (1, 2):
            leader.send({role: share_for(0, role, step)})
            leader.send_end()

    def receive() -> list[bool]:
        return [peer.receive() is not None for _ in range(4)]

    assert run_ranks([send, receive], lambda program: program())[1] == [True, False, True, False]


def test_a_peer_of_another_place_tree_refuses_the_exchange() -> None:
    tree = ClientPlaceTree.from_topology(Topology(tp=2))
    other = ClientPlaceTree.from_topology(Topology(tp=2, rank=1), roles={1: Role(stage="last", cp_rank=0)})
    groups = open_local_groups(tree)
    leader, confused = FanOut(tree, groups[0]), FanOut(other, groups[1])
    leader.send({role: share_for(0, role, 0) for role in leader.roles_to_send})
    with pytest.raises(WireError, match="stage is 0, this rank waits for 3"):
        confused.receive()


def test_a_silent_leader_is_named_at_the_local_timeout() -> None:
    peer = local_world(Topology(tp=2), timeout_s=0.05)[1]
    with pytest.raises(RankLost, match="rank 0 sent nothing to rank 1") as caught:
        peer.receive()
    assert caught.value.rank == 0


def test_several_ranks_need_an_initialised_job() -> None:
    with pytest.raises(
        TopologyError, match=r"4 ranks, but torch.distributed is not initialised in rank 0; call .*init_process_group"
    ):
        open_fan_out(ClientPlaceTree.from_topology(Topology(dp=4)))


def test_a_payload_that_shrinks_and_grows_reuses_its_buffer() -> None:
    leader, peer = local_world(Topology(tp=2))
    role = leader.roles_to_send[0]
    sizes = [100, 10, 300, 299, 1]
    shares = [RoleBatch(header=b"", tensors={"a": torch.arange(size)}) for size in sizes]

    def send() -> list[int]:
        addresses = []
        for share in shares:
            leader.send({role: share})
            addresses.append(leader._buffer_of_role[role].ctypes.data)
        return addresses

    addresses, received = run_ranks([send, lambda: [peer.receive() for _ in sizes]], lambda program: program())
    for share, expected in zip(received, shares, strict=True):
        assert_equal(share, expected)
    assert addresses[0] == addresses[1]
    assert addresses[2] == addresses[3] == addresses[4]
    assert np.unique(addresses).size == 2


def test_what_leaders_masked_is_summed_also_while_one_of_them_ends() -> None:
    ends = local_world(Topology(dp=3))
    bad = {0: np.array([5, 0]), 1: None}

    def run(rank: int) -> list[tuple[int, list[int] | None]]:
        found = []
        for step in range(3) if rank < 2 else ():
            mine = Masked(num_tokens=10 * rank + step, bad_tokens=bad[rank] if step == 1 else None)
            [masked] = ends[rank].compare(
                [replace(one, masked=mine) for one in told(step, bytes([step] * 8), bytes(8))]
            )
            found.append((masked.num_tokens, None if masked.bad_tokens is None else masked.bad_tokens.tolist()))
        ends[rank].send_end()
        return found

    first, second, ended = run_ranks(range(3), run)
    assert first == second == [(10, None), (12, [5, 0]), (14, None)] and ended == []


def test_leaders_with_unequal_numbers_of_steps_at_hand_compare_each_step_once() -> None:
    ends, num_steps = local_world(Topology(dp=3)), 40
    blocks = {0: [1, 2, 4, 8, 16, 9], 1: [20, 20], 2: [5, 5, 5, 5, 17, 3]}
    bad = {7: 0, 8: 2, 30: 1}
    """Which leader could not read something of a step."""

    def run(rank: int) -> tuple[list[tuple[int, list[int] | None]], list[int]]:
        steps = [
            ToCompare(
                step=step,
                order_digest=bytes([step] * 8),
                plan_digest=bytes(8),
                masked=Masked(
                    num_tokens=100 * rank + step, bad_tokens=np.array([step, rank]) if bad.get(step) == rank else None
                ),
            )
            for step in range(num_steps)
        ]
        found, counts, begin = [], [], 0
        for count in blocks[rank]:
            stop = begin + count
            while begin < stop:
                masked = ends[rank].compare(steps[begin : min(stop, begin + MOST_COMPARED)])
                counts.append(len(masked))
                found += [
                    (one.num_tokens, None if one.bad_tokens is None else one.bad_tokens.tolist()) for one in masked
                ]
                begin += len(masked)
        ends[rank].send_end()
        return found, counts

    expected = [(300 + 3 * step, [step, bad[step]] if step in bad else None) for step in range(num_steps)]
    alike = run_ranks(range(3), run)
    assert [found for found, _ in alike] == [expected] * 3
    assert alike[0][1] == alike[1][1] == alike[2][1], "all leaders go on from the same step"
    assert len(alike[0][1]) < num_steps // 2 and max(alike[0][1]) > 8


def test_steps_before_one_that_differs_are_given() -> None:
    ends = local_world(Topology(dp=2))

    def run(rank: int) -> tuple[int, str]:
        steps = [one for step in range(5) for one in told(step, bytes([rank if step == 3 else 9] * 8), bytes(8))]
        count = len(ends[rank].compare(steps))
        return count, met(lambda: ends[rank].compare(steps[count:]))

    for count, text in run_ranks(range(2), run):
        assert count == 3 and "rank 0 step 3" in text


def test_peers_meet_the_error_that_all_leaders_meet() -> None:
    leader, peer = local_world(Topology(tp=2))

    def receive() -> str:
        with pytest.raises(TooManyBadRows) as caught:
            peer.receive()
        return str(caught.value)

    told, met_there = run_ranks([lambda: leader.tell_peers(TooManyBadRows("web: 5, 6")), receive], lambda f: f())
    assert told is None and met_there == "web: 5, 6"
