"""Training and validation side by side in one real job: both orders, one pulse, one cache, and one end for both."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.support.loaders import run_job, write_job
from tests.support.node_rank import hash_of
from tests.support.processes import Child, Processes, wait_until
from tests.support.read_counts import ReadCounts, write_reading
from torchmix.parallel.topology import Topology
from torchmix.stateful.open import build_loader

pytestmark = pytest.mark.system
DEADLINE_S = 120.0
WORLD_SIZE = 4


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ramp = "[{from_step: 0, samples: 4}, {from_step: 2, samples: 8}]"
    return write_job(tmp_path_factory.mktemp("job"), samples=ramp, extra="split: [60, 40]")


def start(processes: Processes, job: Path, *, steps: int, victim: int) -> list[Child]:
    arguments = (str(job), "2", str(steps), str(victim))
    return processes.start_ranks("-m", "tests.support.two_loaders_rank", *arguments, world_size=WORLD_SIZE)


def digests(child: Child, part: str) -> list[str]:
    return [line.split()[-1] for line in child.stdout().splitlines() if line.startswith(f"{part} ")]


def test_both_follow_their_orders_over_one_pulse(job: Path, tmp_path: Path) -> None:
    parts = ("train", "validation")
    expected = {part: run_job(job, Topology(), steps=5, keep=False, part=part)[0].digests for part in parts}
    with Processes(tmp_path) as processes:
        for child in start(processes, job, steps=4, victim=-1):
            assert child.wait(deadline_s=DEADLINE_S) == 0, processes.report()
            assert digests(child, "train") == expected["train"]
            assert digests(child, "validation") == expected["validation"][:4]
            assert "watching 1" in child.stdout()
            assert "lost" not in child.stderr(), processes.report()


@pytest.mark.parametrize("victim", [0, 3], ids=["leader", "peer"])
def test_a_failure_in_one_ends_the_ranks_that_wait_in_the_other(job: Path, tmp_path: Path, victim: int) -> None:
    with Processes(tmp_path) as processes:
        ranks = start(processes, job, steps=100, victim=victim)
        wait_until(
            lambda: all(rank.returncode is not None for rank in ranks),
            deadline_s=DEADLINE_S,
            what=lambda: f"end of all ranks\n{processes.report()}",
        )
        for rank, child in enumerate(ranks):
            assert child.returncode != 0, processes.report()
            if rank != victim:
                assert f"torchmix: rank {victim} lost: rank {victim} (host " in child.stderr(), processes.report()
                assert "failed: ValueError: a mistake in the evaluation" in child.stderr(), processes.report()


CACHE_KIB = 320
"""Of two windows of each part, and less than the data."""


def tensors_of_both(recipe: Path, loaders: str) -> dict[str, str]:
    """A hash of all tensors of each part, both read once to their ends, a step of each in turn."""
    parts = ("train", "validation")
    options = {"loaders": loaders, "topology": Topology(), "one_pass": True}
    found = {part: hashlib.sha256() for part in parts}
    with (
        build_loader(recipe, part="train", **options) as train,
        build_loader(recipe, part="validation", **options) as v,
    ):
        streams = {"train": iter(train), "validation": iter(v)}
        while streams:
            for part in [*streams]:
                for microbatch in streams[part]:
                    hash_of(microbatch, found[part])
                    if microbatch.is_last_of_step:
                        break
                else:
                    del streams[part]
    return {part: found[part].hexdigest() for part in parts}


def test_both_share_the_cache_of_one_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = write_reading(tmp_path)
    recipe.write_text(recipe.read_text().replace("cache: 160KiB", f"cache: {CACHE_KIB}KiB") + "split: [60, 40]\n")
    alone = tensors_of_both(recipe, "in_process")
    counts = ReadCounts(tmp_path / "hook", monkeypatch)
    assert tensors_of_both(recipe, "node") == alone
    assert 1.0 <= counts.amplification(recipe) < 1.9  # two caches of their own would decode each page twice
    kept = counts.kept
    assert len({one.process for one in kept}) == 1
    assert all(one.room_bytes == one.cache_bytes <= CACHE_KIB << 10 for one in kept)
    assert max(one.room_bytes for one in kept) > CACHE_KIB << 9
    assert sum(one.num_in_use == 2 for one in kept) > len(kept) / 2
