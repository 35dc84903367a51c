"""The trial of Megatron's layouts at a small count: which there are, and a run that is started again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trials.megatron_layouts import AT_ONCE, run_worlds, worlds

SEED = 4
"""Its first world is one rank with one layout."""


def test_every_layout_comes_once() -> None:
    names = [(boundaries, name) for boundaries, of_world in worlds(1) for name in of_world]
    assert len(set(names)) == len(names) == 2 * 49
    assert max(len(of_world) for _, of_world in worlds(1)) == AT_ONCE


@pytest.mark.system
def test_a_world_goes_on_where_it_stopped(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    first = run_worlds(SEED, 1, out)
    assert first == {"seed": SEED, "worlds": 1, "layouts": 1}
    assert run_worlds(SEED, 1, out) == first
