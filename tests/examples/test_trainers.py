"""The examples for trainers of others: torchtitan's dataloader, Lightning's DataModule, Hugging Face's Trainer.

Each trains on two ranks by that package's own trainer, saves, and goes on at one rank; what it trained on is the plan's
before the checkpoint and after it. Replicas of torchft are killed and return. `make test-examples` has the packages, in
their newest releases.
"""

from __future__ import annotations

import importlib.util
import re
import signal
from pathlib import Path

import pytest
import torch

import torchmix
from tests.support.deadlines import LONG_S
from tests.support.example import EXAMPLE, example_module
from tests.support.files import make_text_file, random_texts
from tests.support.processes import Child, Processes, wait_until

pytestmark = pytest.mark.filterwarnings("ignore")  # the packages' own
LENGTH, SAMPLES = 32, 4
PROGRAMS = {
    "torchtitan": ["tests.support.titan_rank"],
    "lightning": ["tests.support.trainer_rank", "lightning"],
    "transformers": ["tests.support.trainer_rank", "huggingface"],
}


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    make_text_file(tmp_path / "prose.parquet", random_texts(1, 100))
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"{{version: 1, seed: 1, batch: {{samples: {SAMPLES}, length: {LENGTH}}}, mixture: {{prose: 100%}}, "
        "loaders: {where: in_process}, sources: {prose: {path: prose.parquet, text: text, tokenizer: bytes}}}",
        encoding="utf-8",
    )
    return str(path)


def samples_by_step(microbatches: list[list[torch.Tensor]]) -> list[list[list[int]]]:
    """The samples of each step, sorted, from the microbatches of each rank."""
    ranks = [torch.cat([each.reshape(-1, LENGTH) for each in seen]) for seen in microbatches]
    own = SAMPLES // len(ranks)
    steps = range(len(ranks[0]) // own)
    assert all(len(rank) == own * len(steps) for rank in ranks)
    return [sorted(torch.cat([rank[step * own : (step + 1) * own] for rank in ranks]).tolist()) for step in steps]


def test_they_are_small() -> None:
    for name in (
        "torchtitan/dataloader.py",
        "lightning/data_module.py",
        "huggingface/trainer.py",
        "torchft/train_replicas.py",
    ):
        assert len((EXAMPLE.parent / name).read_text(encoding="utf-8").splitlines()) < 120, name


@pytest.mark.system
@pytest.mark.parametrize("package", PROGRAMS)
def test_a_run_of_two_ranks_goes_on_at_one_with_the_tokens_of_the_plan(
    package: str, recipe: str, tmp_path: Path
) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed")
    folder = tmp_path / "checkpoints"
    folder.mkdir()

    def train(*, ranks: int, size: int, steps: int, start: int) -> list[list[torch.Tensor]]:
        module, *words = PROGRAMS[package]
        out = tmp_path / f"seen-{start}"
        words += [recipe, str(folder), str(size), str(steps), str(start), str(out)]
        with Processes(folder) as processes:
            children = processes.start_ranks("-m", module, *words, world_size=ranks, after=())
            processes.wait_all(children, deadline_s=180)
        return [torch.load(f"{out}-{rank}") for rank in range(ranks)]

    with torchmix.build_loader(recipe, micro_batch_size=SAMPLES, max_steps=4) as loader:
        plan = samples_by_step([[microbatch.tokens for microbatch in loader]])
    before = train(ranks=2, size=1, steps=2, start=0)
    assert samples_by_step(before) == plan[:2]
    assert [len(seen) for seen in before] == [4, 4], "each rank had its own half, in two microbatches a step"
    assert samples_by_step(train(ranks=1, size=2, steps=4, start=2)) == plan[2:]


@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed")
def test_torchtitans_dataloader_says_which_numbers_differ(recipe: str) -> None:
    config = example_module("dataloader", EXAMPLE.parent / "torchtitan").TorchmixDataLoader.Config(recipe=recipe)
    with pytest.raises(ValueError, match=f"batch.length {LENGTH} is not training.seq_len 64"):
        config.build(dp_world_size=1, dp_rank=0, seq_len=64, local_batch_size=2)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_hugging_faces_loss_is_that_of_the_whole_step() -> None:
    module = example_module("trainer", EXAMPLE.parent / "huggingface")
    logits, labels = torch.randn(2, 5, 7), torch.tensor([[1, 2, -100, 3, 4], [-100, 6, 5, -100, 0]])
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(module.loss_of({"logits": logits}, labels, num_items_in_batch=torch.tensor(7)), expected)


@pytest.mark.system
def test_replicas_of_torchft_die_and_return_and_each_commits_the_steps_of_the_plan(recipe: str, tmp_path: Path) -> None:
    coordination = pytest.importorskip("torchft.coordination", reason="torchft is not installed")
    lighthouse = coordination.LighthouseServer(
        bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=10_000, quorum_tick_ms=50, heartbeat_timeout_ms=2000
    )
    program = str(EXAMPLE.parent / "torchft" / "train_replicas.py")
    folder = tmp_path / "replicas"
    folder.mkdir()
    with Processes(folder) as processes:

        def start(number: int, name: str) -> Child:
            environment = {
                "TORCHFT_LIGHTHOUSE": lighthouse.address(),
                "REPLICA_ID": f"r{number}",
                "OMP_NUM_THREADS": "1",
            }
            return processes.start_python(program, recipe, "100000", name=name, environment=environment)

        def await_step(child: Child, words: str) -> None:
            wait_until(lambda: words in child.stdout(), deadline_s=LONG_S, what=processes.report)

        replicas = [start(number, f"r{number}") for number in range(4)]
        await_step(replicas[0], "replicas 4")
        replicas[3].send_signal(signal.SIGKILL)
        await_step(replicas[0], "replicas 3")
        back = start(3, "r3-again")
        await_step(back, "replicas 4")
        printed = [child.stdout() for child in (*replicas, back)]
    lighthouse.shutdown()
    lines = [re.findall(r"step (\d+) loss (\S+) replicas (\d) digest (\w{16})\n", text) for text in printed]
    last = max(int(step) for of_one in lines for step, *_ in of_one)
    digests = [plan.order_digest.hex() for plan in torchmix.plan(recipe, steps=last + 1)]
    losses: dict[int, float] = {}
    for of_one in lines:
        steps = [int(step) for step, *_ in of_one]
        assert steps == sorted({*steps}), "no replica commits a step twice"
        for step, loss, _, digest in of_one:
            assert digest == digests[int(step)]
            assert float(loss) == pytest.approx(losses.setdefault(int(step), float(loss)), abs=1e-4)
    assert sorted(losses) == list(range(last + 1))
    assert int(lines[-1][0][0]) > 1, "the one that returned has caught up, and repeats nothing"
