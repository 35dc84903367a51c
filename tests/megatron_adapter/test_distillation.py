"""Logits of a teacher: Megatron's hash of a dataset covers recipe, catalog, attention and placement."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.support.fake_megatron import default_args, installed, script_of
from tests.support.loaders import write_job
from torchmix import megatron_adapter as tmx
from torchmix.errors import CatalogError, RecipeError
from torchmix.megatron_adapter.checkpoint import LOGITS_FLAGS, identify_data
from torchmix.recipe.load import load_recipe


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Megatron's module, as far as its hash goes: with a recipe there is no blend, so all data are mock data."""
    module = ModuleType("megatron.training.distillation.utils_logits")

    def compute_dataset_hash(args: SimpleNamespace) -> str:
        text = json.dumps({"seed": args.seed, "blend": module._blend_identifiers(args)}, separators=(",", ":"))
        return hashlib.md5(text.encode()).hexdigest()

    module._blend_identifiers = lambda args: {"kind": "mock", "mock": True}  # type: ignore[attr-defined]
    module.compute_dataset_hash = compute_dataset_hash  # type: ignore[attr-defined]
    package = ModuleType("megatron.training.distillation")
    package.utils_logits = module  # type: ignore[attr-defined]
    with installed(default_args(), core=True):
        monkeypatch.setitem(sys.modules, package.__name__, package)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        yield module


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("job"), samples=8, length=64)


def hash_of(logits: ModuleType, recipe: Path, **changes: Any) -> str:
    result: str = logits.compute_dataset_hash(default_args(**{"data_recipe": str(recipe), "seed": 1234, **changes}))
    return result


@pytest.mark.parametrize("flag", LOGITS_FLAGS)
@pytest.mark.parametrize("joint", [" ", "="])
def test_get_batch_lets_the_hash_cover_the_recipe(
    flag: str, joint: str, logits: ModuleType, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = hash_of(logits, recipe)
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *f"{flag}{joint}/logits".split()])
    tmx.get_batch(script_of("0.20"))
    assert hash_of(logits, recipe) != before


def test_without_logits_nothing_of_megatron_changes(logits: ModuleType) -> None:
    before = logits._blend_identifiers
    identify_data(["--data-recipe", "r.yaml", "--logits-load-decode-threads", "2"])
    assert logits._blend_identifiers is before


def test_the_hash_changes_with_all_that_decides_who_gets_what(logits: ModuleType, recipe: Path) -> None:
    identify_data(["--logits-load-dir", "/logits"])
    text = recipe.read_text()
    moved = recipe.with_name("moved.yaml")
    moved.write_text(text.replace("tiny: {", "tiny: {max_epochs: 9, ") + "read: {cache: 64MiB}\n")
    assert moved.read_text().count("max_epochs") == 1
    assert hash_of(logits, recipe) == hash_of(logits, moved), "neither a cache nor an end that is far alters anything"
    texts = [
        text.replace("seed: ", "seed: 9"),
        text.replace("boundaries: document", "boundaries: none"),
        text.replace("layers: 4", "layers: 5"),
        text.replace("tiny: {", "tiny: {documents: [0%, 99%], "),
    ]
    hashes = [hash_of(logits, recipe)]
    for number, changed in enumerate(texts):
        assert changed != text
        other = recipe.with_name(f"other-{number}.yaml")
        other.write_text(changed)
        hashes.append(hash_of(logits, other))
    for name in ("data_parallel_size", "context_parallel_size", "micro_batch_size"):
        hashes.append(hash_of(logits, recipe, **{name: 2}))
    assert len(set(hashes)) == len(hashes)


def test_the_hash_changes_with_the_files(logits: ModuleType, tmp_path: Path) -> None:
    identify_data(["--logits-save-dir=/logits"])
    hashes = []
    for seed in (5, 6):  # the files are others, the recipe is the same
        (tmp_path / str(seed)).mkdir()
        path = write_job(tmp_path / str(seed), seed=seed, samples=8, length=64)
        path.write_text(re.sub("seed: [0-9]+", "seed: 5", path.read_text()))
        hashes.append(hash_of(logits, path))
    assert len(set(hashes)) == 2


def test_a_recipe_without_a_catalog_is_an_error_that_says_so(logits: ModuleType, tmp_path: Path) -> None:
    identify_data(["--logits-save-dir", "/logits"])
    path = write_job(tmp_path, samples=8, length=64)
    shutil.rmtree(tmp_path / load_recipe(path).catalog)
    with pytest.raises(CatalogError, match="torchmix index"):
        hash_of(logits, path)


def test_a_version_with_another_hash_is_refused(logits: ModuleType) -> None:
    del logits._blend_identifiers
    with pytest.raises(RecipeError, match="--logits-load-dir: this version of Megatron makes its hash"):
        identify_data(["--logits-load-dir", "/logits"])
