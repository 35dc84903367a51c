"""The example of plain torch: attention inside documents, and steps that do not depend on the number of ranks."""

from __future__ import annotations

import re
import signal
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import torchmix
from tests.support.deadlines import LONG_S
from tests.support.example import EXAMPLE, example_module, odd_batch_of_prose
from tests.support.files import make_text_file, random_texts
from tests.support.forks import TRAINING
from tests.support.ports import free_port
from tests.support.processes import Processes, wait_until

FOLDER = EXAMPLE.parent / "ddp"
attention = example_module("document_attention", FOLDER)

CU_SEQLENS = torch.tensor([0, 5, 5, 24, 32, 33, 64], dtype=torch.int32)
STEPS = 4


def queries_keys_values(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(64, 2, 8, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def test_attention_is_that_of_each_document_alone() -> None:
    q, k, v = queries_keys_values(1)
    found = attention.one_by_one(q, k, v, CU_SEQLENS)
    for start, stop in pairwise(CU_SEQLENS.tolist()):
        scores = torch.einsum("qhd,khd->hqk", q[start:stop], k[start:stop]) / 8**0.5
        scores = scores.masked_fill(torch.ones(stop - start, stop - start).triu(1).bool(), float("-inf"))
        expected = torch.einsum("hqk,khd->qhd", functional.softmax(scores, -1), v[start:stop])
        torch.testing.assert_close(found[start:stop], expected)


def test_no_document_learns_from_another() -> None:
    q, k, v = queries_keys_values(2)
    attention.one_by_one(q, k, v, CU_SEQLENS)[5:24].sum().backward()
    for tensor in (k, v):
        assert tensor.grad is not None
        is_touched = tensor.grad.abs().sum((1, 2)) > 0
        assert is_touched[5:23].all() and not is_touched[:5].any() and not is_touched[24:].any()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, of flex_attention that is not compiled
def test_flex_attention_gives_the_same() -> None:
    with torch.no_grad():
        q, k, v = (tensor.detach() for tensor in queries_keys_values(3))
        found = attention.flex(q, k, v, attention.mask_of_documents(CU_SEQLENS, 64))
        torch.testing.assert_close(found, attention.one_by_one(q, k, v, CU_SEQLENS))


def run(job: Path, *words: str, world_size: int) -> list[tuple[int, float, float, str]]:
    """Steps of a run as rank 0 prints them: number, loss, norm of the gradient, digest."""
    folder = job / f"run-{len(list(job.iterdir()))}"
    folder.mkdir()
    with Processes(folder) as processes:
        arguments = (str(FOLDER / "train_ddp.py"), str(job / "recipe.yaml"), *words)
        ranks = processes.start_ranks(*arguments, world_size=world_size, after=TRAINING)
        for rank in ranks:
            assert rank.wait(deadline_s=180) == 0, rank.report()
        printed = ranks[0].stdout()
    lines = re.findall(r"step (\d+) loss (\S+) norm (\S+) wait \S+ s digest (\w+)", printed)
    return [(int(step), float(loss), float(norm), digest) for step, loss, norm, digest in lines]


def assert_same(some: list[tuple[int, float, float, str]], others: list[tuple[int, float, float, str]]) -> None:
    assert [(step, digest) for step, _, _, digest in some] == [(step, digest) for step, _, _, digest in others]
    for (_, loss, norm, _), (_, other_loss, other_norm, _) in zip(some, others, strict=True):
        assert loss == pytest.approx(other_loss, abs=1e-4)
        assert norm == pytest.approx(other_norm, abs=1e-4)


@pytest.mark.system
def test_two_ranks_learn_what_one_does_also_after_a_resume(tmp_path: Path) -> None:
    make_text_file(tmp_path / "prose.parquet", random_texts(1, 300))
    (tmp_path / "recipe.yaml").write_text(
        "{version: 1, seed: 1, batch: {samples: 8, length: 64}, mixture: {prose: 100%}, "
        "sources: {prose: {path: prose.parquet, text: text, tokenizer: bytes}}}",
        encoding="utf-8",
    )
    whole = run(tmp_path, "--steps", str(STEPS), world_size=1)
    assert [step for step, *_ in whole] == list(range(STEPS))
    saved = ("--save", str(tmp_path / "checkpoint"))
    figures = tmp_path / "figures"
    figures.mkdir()
    first = run(tmp_path, "--steps", "2", *saved, "--prometheus", str(figures), world_size=2)
    assert_same(first, whole[:2])
    assert sorted(path.name for path in figures.iterdir()) == ["torchmix-0.prom", "torchmix-1.prom"]
    assert 'torchmix_step{rank="1"} 1' in (figures / "torchmix-1.prom").read_text(encoding="utf-8")
    assert_same(run(tmp_path, "--steps", str(STEPS), *saved, world_size=1), whole[2:])


@pytest.mark.system
def test_ranks_are_killed_and_join_and_each_step_is_that_of_the_plan(tmp_path: Path) -> None:
    recipe = odd_batch_of_prose(tmp_path)
    program, port = str(FOLDER / "train_elastic.py"), str(free_port())
    words = (program, str(recipe), "--store", f"127.0.0.1:{port}", "--founders", "3", "--steps", "100000")
    with Processes(tmp_path) as processes:
        processes.fork_python(program, "--serve", port, after=TRAINING, name="store")
        ranks = [processes.fork_python(*words, after=TRAINING, name=f"rank-{number}") for number in range(3)]

        def printed() -> str:
            return "".join(rank.stdout() for rank in ranks)

        def await_ranks(count: int, *, behind: int) -> None:
            wait_until(lambda: f"ranks {count} digest" in printed()[behind:], deadline_s=LONG_S, what=processes.report)

        await_ranks(3, behind=0)
        first = next(rank for rank in ranks if "step 0 loss" in rank.stdout())
        first.send_signal(signal.SIGKILL)  # rank 0
        await_ranks(2, behind=0)
        ranks.append(processes.fork_python(*words, after=TRAINING, name="rank-3"))
        wait_until(
            lambda: "ranks 3 digest" in printed().split("ranks 2 digest")[-1], deadline_s=LONG_S, what=processes.report
        )
        lines = re.findall(r"step (\d+) loss \S+ ranks (\d) digest (\w{16})\n", printed())
    last = max(int(step) for step, *_ in lines)
    digests = [plan.order_digest.hex() for plan in torchmix.plan(recipe, steps=last + 1)]
    assert all(digest == digests[int(step)] for step, _, digest in lines)
    missing = {*range(last)} - {int(step) for step, *_ in lines}
    assert len(missing) <= 1, "rank 0 may have died between a step and its line"
