"""1F1B: against its closed form, against a second simulation, and its rules."""

from __future__ import annotations

import numpy as np
import pytest

from torchmix.planner.simulation import BACKWARD, pipeline_time, schedule_1f1b


@pytest.mark.parametrize("stages", [1, 2, 5, 8])
@pytest.mark.parametrize("count", [1, 3, 8, 16])
def test_equal_microbatches_take_the_closed_form(stages: int, count: int) -> None:
    forward = np.full((2, count), 6.0)
    expected = (count + stages - 1) * (1 + BACKWARD) * 6.0 / stages
    np.testing.assert_allclose(pipeline_time(forward, stages), expected)


def test_without_a_pipeline_the_order_does_not_matter() -> None:
    forward = np.array([[1.0, 5.0, 2.0]])
    np.testing.assert_allclose(pipeline_time(forward, 1), 24.0)
    np.testing.assert_allclose(pipeline_time(forward[:, ::-1], 1), 24.0)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_every_pass_comes_once_and_after_what_it_needs(stages: int, count: int) -> None:
    passes = schedule_1f1b(stages, count)
    assert len(set(passes)) == len(passes) == 2 * stages * count
    place = {one: number for number, one in enumerate(passes)}
    for stage, microbatch, is_backward in passes:
        here = place[stage, microbatch, is_backward]
        if is_backward:
            assert place[stage, microbatch, False] < here
            assert stage == stages - 1 or place[stage + 1, microbatch, True] < here
        elif stage:
            assert place[stage - 1, microbatch, False] < here


def test_at_most_as_many_forward_passes_are_open_as_stages_follow() -> None:
    for stages in (1, 3, 8):
        of_stage = [[one for one in schedule_1f1b(stages, 12) if one[0] == stage] for stage in range(stages)]
        for stage, passes in enumerate(of_stage):
            open_passes = np.cumsum([-1 if is_backward else 1 for _, _, is_backward in passes])
            assert open_passes.max() == min(stages - stage, 12)


def test_times_equal_those_of_a_simulation_by_events() -> None:
    random = np.random.default_rng(3)
    forward = random.lognormal(0, 1, (3, 9))
    for stages in (2, 4, 7):
        expected = [_by_events(costs.tolist(), stages) for costs in forward]
        np.testing.assert_allclose(pipeline_time(forward, stages), expected)


def test_small_microbatches_at_both_ends_beat_a_random_order() -> None:
    random = np.random.default_rng(5)
    costs = np.sort(random.lognormal(0, 1, 16))
    unimodal = np.concatenate([costs[::2], costs[1::2][::-1]])
    shuffled = np.stack([random.permutation(costs) for _ in range(50)])
    assert pipeline_time(unimodal[None], 8)[0] < np.median(pipeline_time(shuffled, 8))


def _by_events(costs: list[float], stages: int) -> float:
    """The same schedule, each pass as soon as it may begin, by repeated relaxation of start times."""
    count = len(costs)
    ends: dict[tuple[int, int, bool], float] = {}
    queues = []
    for stage in range(stages):
        ahead = min(stages - stage - 1, count)
        queue = [(stage, j, False) for j in range(ahead)]
        for j in range(count):
            queue += [(stage, j + ahead, False)] if j + ahead < count else []
            queue.append((stage, j, True))
        queues.append(queue)
    for _ in range(4 * stages * count):
        before = dict(ends)
        for queue in queues:
            free = 0.0
            for stage, j, is_backward in queue:
                needs = (stage, j, False) if stage == stages - 1 else (stage + 1, j, True)
                needs = needs if is_backward else (stage - 1, j, False)
                ready = ends.get(needs, 0.0)
                free = ends[stage, j, is_backward] = max(free, ready) + costs[j] / stages * (2 if is_backward else 1)
        if ends == before:
            break
    return max(ends.values())
