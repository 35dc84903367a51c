"""The examples for trainers of others: torchtitan, Lightning, Hugging Face's Trainer, accelerate, VeOmni.

Each trains on two ranks by that package's own trainer, and saves; then weights of the recipe are edited, and it goes on
at another number of ranks. What it trained on is the plan's before the checkpoint and after it. Replicas of torchft are
killed and return. `make test-examples` has the packages, in their newest releases; VeOmni, which needs an older
transformers, is in a folder of its own there.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import torchmix
from tests.support.deadlines import LONG_S
from tests.support.example import EXAMPLE, example_module
from tests.support.files import make_text_file, random_texts
from tests.support.oracle import read_text_documents
from tests.support.ports import free_port
from tests.support.processes import Child, Processes, wait_until
from tests.support.trainer_rank import lightning_model, lightning_trainer
from torchmix.cli.main import main as run_command

pytestmark = pytest.mark.filterwarnings("ignore")  # the packages' own
LENGTH, SAMPLES = 32, 4
PROGRAMS = {
    "torchtitan": ["tests.support.titan_rank"],
    "lightning": ["tests.support.trainer_rank", "lightning"],
    "transformers": ["tests.support.trainer_rank", "huggingface"],
    "accelerate": ["tests.support.trainer_rank", "accelerate"],
    "veomni": ["tests.support.veomni_rank"],
    "swift": ["tests.support.swift_rank"],
}
FOLDERS = {name: Path(sys.prefix, name) for name in ("veomni", "swift")}
"""Where packages are that do not go with the others."""
RANKS = {"veomni": (4, 2)}
"""Before and after the checkpoint, where not 2 and 1: VeOmni shards a model over several, and goes on at fewer."""
EXAMPLES = (
    "accelerate/train.py",
    "huggingface/trainer.py",
    "lightning/data_module.py",
    "ms_swift/pretrain.py",
    "torchft/train_replicas.py",
    "torchtitan/dataloader.py",
    "veomni/dataloader.py",
)


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    for seed, name in enumerate(("prose", "verse")):
        make_text_file(tmp_path / f"{name}.parquet", random_texts(seed, 100))
    return write_recipe(tmp_path, prose=75, verse=25)


def write_recipe(folder: Path, **shares: int) -> str:
    path = folder / "recipe.yaml"
    sources = {name: f"{{path: {name}.parquet, text: text, tokenizer: bytes}}" for name in shares}
    path.write_text(
        f"{{version: 1, seed: 1, batch: {{samples: {SAMPLES}, length: {LENGTH}}}, loaders: {{where: in_process}}, "
        f"mixture: {{{', '.join(f'{name}: {share}%' for name, share in shares.items())}}}, "
        f"sources: {{{', '.join(f'{name}: {text}' for name, text in sources.items())}}}}}",
        encoding="utf-8",
    )
    return str(path)


def planned_samples(recipe: str, *words: str) -> list[list[list[int]]]:
    """The samples of two steps of `torchmix plan`, sorted: its pieces, cut out of the files by the oracle."""
    folder = Path(recipe).parent
    shutil.rmtree(folder / "plan", ignore_errors=True)
    assert run_command(["plan", recipe, "--steps", "2", "--out", str(folder / "plan"), *words]) == 0
    pieces = pq.read_table(folder / "plan" / "pieces.parquet").to_pylist()
    documents = {name: read_text_documents([folder / f"{name}.parquet"], "text") for name in ("prose", "verse")}
    samples: dict[int, dict[int, list[int]]] = {}
    for piece in pieces:
        sample = samples.setdefault(piece["step"], {}).setdefault(piece["sample"], [0] * LENGTH)
        at, start, count = piece["sample_offset"], piece["start"], piece["tokens"]
        sample[at : at + count] = documents[piece["source"]][piece["row"]][start : start + count]
    return [sorted(of_step.values()) for _, of_step in sorted(samples.items())]


def samples_by_step(microbatches: list[list[torch.Tensor]]) -> list[list[list[int]]]:
    """The samples of each step, sorted, from the microbatches of each rank."""
    ranks = [torch.cat([each.reshape(-1, LENGTH) for each in seen]) for seen in microbatches]
    own = SAMPLES // len(ranks)
    steps = range(len(ranks[0]) // own)
    assert all(len(rank) == own * len(steps) for rank in ranks)
    return [sorted(torch.cat([rank[step * own : (step + 1) * own] for rank in ranks]).tolist()) for step in steps]


def test_they_are_small() -> None:
    for name in EXAMPLES:
        assert len((EXAMPLE.parent / name).read_text(encoding="utf-8").splitlines()) <= 80, name


@pytest.mark.system
@pytest.mark.parametrize("package", PROGRAMS)
def test_a_run_goes_on_at_another_number_of_ranks_with_an_edited_recipe_and_the_tokens_of_the_plan(
    package: str, recipe: str, tmp_path: Path
) -> None:
    environment = {}
    if package not in FOLDERS:
        pytest.importorskip(package, reason=f"{package} is not installed")
    elif FOLDERS[package].is_dir():
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(FOLDERS[package]), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
    else:
        pytest.skip(f"{package} is not installed")
    folder = tmp_path / "checkpoints"
    folder.mkdir()

    def train(*, ranks: int, size: int, steps: int, start: int, code: str = "") -> list[list[torch.Tensor]]:
        module, *words = PROGRAMS[package]
        out = tmp_path / f"seen-{start}"
        words += [recipe, str(folder), str(size), str(steps), str(start), str(out), code]
        with Processes(folder) as processes:
            children = processes.start_ranks("-m", module, *words, world_size=ranks, after=(), environment=environment)
            processes.wait_all(children, deadline_s=300)
        return [torch.load(f"{out}-{rank}") for rank in range(ranks)]

    torchmix.index(recipe)
    planned = planned_samples(recipe)
    ranks, ranks_after = RANKS.get(package, (2, 1))
    before = train(ranks=ranks, size=1, steps=2, start=0)
    assert samples_by_step(before) == planned
    assert [len(seen) for seen in before] == [8 // ranks] * ranks, (
        "each rank had its part, in microbatches of one sample"
    )

    with torchmix.build_loader(recipe, micro_batch_size=SAMPLES, max_steps=2) as loader:
        assert len(list(loader)) == 2
        state = loader.state_dict()
    (tmp_path / "state").write_bytes(state["torchmix_state"])
    write_recipe(tmp_path, prose=25, verse=75)
    with torchmix.build_loader(recipe) as loader, pytest.raises(torchmix.StateMismatch) as refused:
        loader.load_state_dict(state)
    [code] = re.findall(r"accept_edit='(\w+)'", str(refused.value))
    planned = planned_samples(recipe, "--state", str(tmp_path / "state"), "--accept-edit", code)
    assert samples_by_step(train(ranks=ranks_after, size=2, steps=4, start=2, code=code)) == planned


@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed")
def test_torchtitans_dataloader_says_which_numbers_differ(recipe: str) -> None:
    config = example_module("dataloader", EXAMPLE.parent / "torchtitan").TorchmixDataLoader.Config(recipe=recipe)
    with pytest.raises(ValueError, match=f"batch.length {LENGTH} is not training.seq_len 64"):
        config.build(dp_world_size=1, dp_rank=0, seq_len=64, local_batch_size=2)


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")
def test_lightning_ends_with_its_loader_and_is_told_other_steps(recipe: str, tmp_path: Path) -> None:
    module = example_module("data_module", EXAMPLE.parent / "lightning")

    class Data(module.TorchmixData):  # type: ignore[misc,name-defined]
        entered = 0

        def __iter__(self) -> Iterator[Any]:
            self.entered += 1
            return super().__iter__()  # type: ignore[no-any-return]

    def fit(accumulated: int) -> list[torch.Tensor]:
        model, data = lightning_model(module), Data(recipe, micro_batch_size=2, max_steps=3)
        trainer = lightning_trainer(
            devices=1, max_steps=1000, max_epochs=20, accumulate_grad_batches=accumulated, default_root_dir=tmp_path
        )
        trainer.fit(model, data)
        assert data.entered < 10, "an epoch of nothing is the last one"
        seen: list[torch.Tensor] = model.toy.seen
        return seen

    assert len(fit(2)) == 6, "three steps of two microbatches"
    with pytest.raises(ValueError, match="accumulate_grad_batches is 1: 2 are a step"):
        fit(1)


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

        def start(number: int, name: str) -> list[Child]:
            environment = {
                "TORCHFT_LIGHTHOUSE": lighthouse.address(),
                "REPLICA_ID": f"r{number}",
                "OMP_NUM_THREADS": "1",
                "TORCHFT_TIMEOUT_SEC": str(int(LONG_S)),  # else a rank that waits for a processor ends its replica
                "TORCHFT_QUORUM_TIMEOUT_SEC": str(int(LONG_S)),
                "TORCHFT_CONNECT_TIMEOUT_SEC": str(int(LONG_S)),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free_port()),
            }
            words = (program, recipe, "100000")
            return [
                processes.start_python(*words, name=f"{name}.{rank}", environment={**environment, "RANK": str(rank)})
                for rank in range(2)
            ]

        def await_step(child: Child, words: str) -> None:
            wait_until(lambda: words in child.stdout(), deadline_s=LONG_S, what=processes.report)

        replicas = [start(number, f"r{number}") for number in range(3)]
        await_step(replicas[0][0], "replicas 3")
        for rank in replicas[2]:
            rank.send_signal(signal.SIGKILL)
        await_step(replicas[0][1], "replicas 2")
        back = start(2, "r2-again")
        for rank in back:
            await_step(rank, "replicas 3")
        printed = [child.stdout() for ranks in (*replicas, back) for child in ranks]
    lighthouse.shutdown()
    lines = [re.findall(r"step (\d+) loss (\S+) replicas (\d) digest (\w{16})\n", text) for text in printed]
    last = max(int(step) for of_one in lines for step, *_ in of_one)
    digests = [plan.order_digest.hex() for plan in torchmix.plan(recipe, steps=last + 1)]
    losses: dict[int, float] = {}
    for of_one in lines:
        steps = [int(step) for step, *_ in of_one]
        assert steps == sorted({*steps}), "no rank commits a step twice"
        for step, loss, _, digest in of_one:
            assert digest == digests[int(step)]
            assert float(loss) == pytest.approx(losses.setdefault(int(step), float(loss)), abs=1e-4)
    assert sorted(losses) == list(range(last + 1))
    assert int(lines[-1][0][0]) > 1, "the one that returned has caught up, and repeats nothing"
