"""Text with the user's tokenizer, read in a worker process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.loaders import run_job, same_microbatches, write_job
from tests.support.vocabularies import END, make_tokenizer
from torchmix.errors import CatalogStale
from torchmix.indexing.scan import index_recipe
from torchmix.parallel.topology import Topology
from torchmix.recipe.load import load_recipe
from torchmix.stateful.open import build_loader

pytestmark = pytest.mark.system


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = write_job(tmp_path)
    make_tokenizer(tmp_path / "t.json")
    text = path.read_text()
    path.write_text(text.replace("tokenizer: bytes", f'tokenizer: t.json, end_id: "{END}"'))
    index_recipe(load_recipe(path), tmp_path)
    return path


def test_a_worker_gives_the_same_tensors(job: Path) -> None:
    whole = run_job(job, Topology(), microbatches=24)[0]
    first = run_job(job, Topology(), microbatches=11, loaders="node")[0]
    second = run_job(job, Topology(), microbatches=13, loaders="node", state=first.state)[0]
    assert same_microbatches(whole.microbatches, first.microbatches + second.microbatches)
    assert second.state == whole.state


def test_another_tokenizer_than_was_indexed_is_told_by_the_loader(job: Path) -> None:
    make_tokenizer(job.parent / "t.json", seed=5)
    with (
        build_loader(job, topology=Topology(), loaders="node") as loader,
        pytest.raises(CatalogStale, match=r"(?s)source 'prose'.*the tokenizer t\.json here has"),
    ):
        next(iter(loader))
