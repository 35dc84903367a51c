"""Loaders whose samples become longer, and shorter: every tensor, every layout, resumes across the borders."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.support.loaders import run_job, same_microbatches, write_job
from tests.support.staged_jobs import check_tensors, digests_over_resumes
from torchmix.cli.main import main
from torchmix.errors import RecipeError
from torchmix.parallel.topology import Topology
from torchmix.planner.plans import plan
from torchmix.recipe.load import load_recipe

STAGES = (
    "[{from_step: 0, samples: 8}, {from_step: 2, samples: 4, length: 128}, {from_step: 4, samples: 4, length: 512}, "
    "{from_step: 6, samples: 4, length: 128}, {from_step: 8, samples: 8, length: 64}]"
)
LENGTHS = [64] * 2 + [128] * 2 + [512] * 2 + [128] * 2 + [64]
SAMPLES = [8] * 2 + [4] * 6 + [8]
LAYOUTS = {"one": Topology(), "dp4": Topology(dp=4), "tp2dp2": Topology(tp=2, dp=2), "cp2dp2": Topology(cp=2, dp=2)}


@pytest.fixture(scope="module", params=["best_fit", "concat"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp(request.param), method=request.param, samples=STAGES)


@pytest.fixture(scope="module")
def digests(job: Path) -> list[str]:
    return run_job(job, Topology(), steps=len(LENGTHS), keep=False)[0].digests


@pytest.mark.parametrize("layout", ["cp2dp2", "tp2dp2"])
def test_every_tensor_of_every_rank_is_what_the_plan_says(job: Path, layout: str, tmp_path: Path) -> None:
    method = "concat" if "concat" in job.parent.name else "best_fit"
    check_tensors(job, LAYOUTS[layout], tmp_path, samples=SAMPLES, lengths=LENGTHS, method=method)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one", "tp2dp2"])  # the first of four legs, each at another layout
def test_a_resume_across_a_border_at_another_layout_continues_the_order(
    job: Path, digests: list[str], layout: str
) -> None:
    assert digests_over_resumes(job, LAYOUTS, layout, (3, 1, 2, 3)) == digests  # some stop at borders


def test_inside_a_step_of_longer_samples_the_same_layout_continues_bit_equal(job: Path) -> None:
    topology = LAYOUTS["cp2dp2"]
    whole = run_job(job, topology, microbatches=18)
    first = run_job(job, topology, microbatches=13)  # step 4 begins at 12
    rest = run_job(job, topology, microbatches=5, state=first[0].state)
    for rank in range(topology.world_size):
        assert same_microbatches(whole[rank].microbatches, first[rank].microbatches + rest[rank].microbatches)


def test_documents_are_cut_only_where_a_sample_of_their_step_ends(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job", samples=STAGES)
    longest = dict.fromkeys(LENGTHS, 0)
    spans: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    owed = np.zeros(3, np.int64)
    for step in plan(job, steps=9):
        owed += step.asked_tokens - step.drawn_tokens
        assert np.abs(owed).max() <= max(LENGTHS[: step.step + 1]) / 2, "half a sample, of the longest so far"
        names = ("source", "epoch", "row", "start", "tokens", "drawn_step", "document_tokens")
        for values in zip(*(getattr(step.pieces, name).tolist() for name in names), strict=True):
            piece = dict(zip(names, values, strict=True))
            length, stop = LENGTHS[piece["drawn_step"]], piece["start"] + piece["tokens"]
            longest[length] = max(longest[length], piece["tokens"])
            least = min(LENGTHS[piece["drawn_step"] : step.step + 1])  # of those while it waited
            assert piece["start"] % 64 == 0 and piece["start"] // length == (stop - 1) // length
            assert stop % least == 0 or stop == piece["document_tokens"]
            assert piece["tokens"] <= LENGTHS[step.step]
            spans.setdefault(values[:3], []).append((piece["start"], stop))
    assert longest[64] == 64 and longest[128] == 128 and longest[512] > 128
    for of_document in spans.values():
        of_document.sort()
        assert all(stop <= start for (_, stop), (start, _) in pairwise(of_document))


def test_check_counts_longer_samples_and_plan_shows_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path, samples=STAGES)
    assert main(["plan", str(job), "--steps", "9"]) == 0
    assert "samples x 64 to 512 tokens" in capsys.readouterr().out
    main(["check", str(job), "--steps", "9"])
    assert f"9 steps of {sum(a * b for a, b in zip(SAMPLES, LENGTHS, strict=True)) // 9:,} tokens" in (
        capsys.readouterr().out
    )
    assert main(["show", str(job), "--step", "5"]) == 0
    assert "4 samples x 512 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("stages", "where", "words"),
    [
        ("[{from_step: 0, samples: 8, length: 0}]", "batch.samples[0].length", "0 is no multiple of batch.length 64"),
        (
            "[{from_step: 0, samples: 8}, {from_step: 2, samples: 8, length: 32}]",
            "batch.samples[1].length",
            "32 is no multiple of batch.length 64, the length of the shortest samples",
        ),
        (
            "[{from_step: 0, samples: 8}, {from_step: 2, samples: 8, length: 96}]",
            "batch.samples[1].length",
            "no multiple of batch.length 64",
        ),
        (
            "[{from_step: 0, samples: 8}, {from_step: 2, samples: 1048576, length: 2048}]",
            "batch",
            "at most 1073741824",
        ),
    ],
)
def test_lengths_that_do_not_follow_each_other_are_refused(tmp_path: Path, stages: str, where: str, words: str) -> None:
    job = write_job(tmp_path)
    job.write_text(job.read_text().replace("samples: 8", f"samples: {stages}"))
    with pytest.raises(RecipeError, match=words) as caught:
        load_recipe(job)
    assert caught.value.where == where
