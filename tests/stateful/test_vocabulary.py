"""What ids a model has is compared with the data when a loader is built, and of a .bin while it is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.indexed_datasets import write_dataset
from tests.support.loaders import write_job
from torchmix.errors import OptionError, RecipeError, SourceUnreadable
from torchmix.parallel.topology import Topology
from torchmix.stateful.open import build_loader

BIN = """\
version: 1
seed: 3
batch: {samples: 4, length: 32}
sources: {web: {path: web.idx}}
mixture: {web: 100%}
"""


@pytest.mark.parametrize(
    ("extra", "padded", "fault"),
    [
        ("vocab_size: 257", None, "holds the token [0-9]+, but vocab_size is 257"),
        ("", 128, "holds the token [0-9]+, but the model's padded vocabulary has 128"),
        ("vocab_size: 70000", 65536, "^vocab_size: 70000 ids, but the model's padded vocabulary has 65536"),
        ("vocab_size: 200", 65536, r"tokenizer: bytes has ids up to 256, but vocab_size is 200"),
    ],
)
def test_data_of_another_vocabulary_are_refused_at_the_start(
    tmp_path: Path, extra: str, padded: int | None, fault: str
) -> None:
    job = write_job(tmp_path, extra=extra)
    with pytest.raises(RecipeError, match=fault):
        build_loader(job, topology=Topology(), loaders="in_process", padded_vocab_size=padded)


def test_data_of_the_model_are_read(tmp_path: Path) -> None:
    job = write_job(tmp_path, extra="vocab_size: 60000")
    with build_loader(job, topology=Topology(), loaders="in_process", padded_vocab_size=60032) as loader:
        assert next(iter(loader)).step == 0


@pytest.mark.parametrize("padded", [0, True, 2.5])
def test_a_padded_size_is_a_number(tmp_path: Path, padded: object) -> None:
    with pytest.raises(OptionError, match="padded_vocab_size="):
        build_loader(write_job(tmp_path), topology=Topology(), loaders="in_process", padded_vocab_size=padded)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("loaders", ["in_process", "node"])
@pytest.mark.parametrize(("extra", "padded"), [("vocab_size: 300\n", None), ("", 300)])
def test_a_bin_is_looked_at_as_it_is_read(tmp_path: Path, loaders: str, extra: str, padded: int | None) -> None:
    documents = [[i, i + 1, i + 2] for i in range(200)]
    documents[150][1] = 300
    write_dataset(tmp_path / "web", documents)
    (tmp_path / "recipe.yaml").write_text(BIN + extra)
    options = {"topology": Topology(), "loaders": loaders, "padded_vocab_size": padded}
    with (
        build_loader(tmp_path / "recipe.yaml", **options) as loader,
        pytest.raises(SourceUnreadable, match=r"web.bin: row 150 holds the token 300 at place 1, but .* 300"),
    ):
        for _, microbatch in zip(range(40), loader, strict=False):
            assert microbatch.tokens is not None and microbatch.tokens.max() < 300
    write_dataset(tmp_path / "web", [[min(token, 299) for token in document] for document in documents])
    (tmp_path / "recipe.yaml").write_text(BIN + extra + "catalog: second\n")
    with build_loader(tmp_path / "recipe.yaml", **options) as loader:
        for _, microbatch in zip(range(40), loader, strict=False):
            assert microbatch.tokens is not None
