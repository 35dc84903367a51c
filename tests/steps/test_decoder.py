"""Which build decodes images: it is in the state, and a resume with another one says so."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import torchmix
from tests.support.image_sources import make_rows, write_source
from torchmix.modalities.images.decode import decoder_id
from torchmix.modalities.table import decoder_of
from torchmix.recipe.load import check_recipe
from torchmix.recipe.parts import part_of
from torchmix.recipe.structs import Recipe
from torchmix.stateful.arguments import _facts
from torchmix.steps import replica_steps
from torchmix.steps.module_items import tell_other_decoder
from torchmix.steps.state import read_state


def recipe_of(folder: Path, *, with_images: bool) -> Recipe:
    source = write_source(folder, "pairs", "parquet", [make_rows(1, 30)], "dynamic")
    extra: dict[str, Any] = {"modules": {"vision": {"items": "image", "sizes": "patches"}}}
    if not with_images:
        source.pop("images")
        extra = {}
    return check_recipe(
        {
            "version": 1,
            "seed": 1,
            "batch": {"samples": 2, "length": 256},
            "sources": {"pairs": source},
            "mixture": {"pairs": 1},
            **extra,
        }
    )


def take(recipe: Recipe, folder: Path, state: dict[str, Any] | None = None) -> dict[str, Any]:
    """Some steps, and the state after them."""
    topology = torchmix.Topology.single()
    with torchmix.build_loader(
        recipe, directory=folder, topology=topology, loaders="in_process", max_steps=4
    ) as loader:
        if state is not None:
            loader.load_state_dict(state)
        for number, _ in enumerate(loader):
            if number == 2:
                return loader.state_dict()
    raise AssertionError("fewer steps than were asked")


def test_a_resume_with_another_decoder_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = recipe_of(tmp_path, with_images=True)
    state = take(recipe, tmp_path)
    assert read_state(state["torchmix_state"]).decoder == decoder_id()
    with caplog.at_level(logging.WARNING):
        take(recipe, tmp_path, state)
        assert "decoded images" not in caplog.text
        monkeypatch.setattr(replica_steps, "decoder_of", lambda sources, directory: "pillow 99")
        other = take(recipe, tmp_path, state)
    assert f"decoded images with {decoder_id()}, and here it is pillow 99" in caplog.text
    assert read_state(other["torchmix_state"]).decoder == "pillow 99"


@pytest.mark.parametrize("times", [25, 1000])
def test_a_state_loads_however_many_libraries_decode(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures, sounds and videos with functions that alter them take 206 characters with the releases of 2026."""
    recipe, said = recipe_of(tmp_path, with_images=True), ",".join(f"library{number} 1.2" for number in range(times))
    monkeypatch.setattr("torchmix.modalities.table.build_of", lambda kinds: said)
    state = take(recipe, tmp_path, take(recipe, tmp_path))
    decoder = read_state(state["torchmix_state"]).decoder
    assert decoder == said if times == 25 else len(decoder) == 4096 and decoder[:4000] == said[:4000]
    monkeypatch.setattr("torchmix.modalities.table.build_of", lambda kinds: f"{said} newer")
    assert decoder_of(recipe.sources, tmp_path) != decoder


def test_a_run_without_images_has_no_decoder(tmp_path: Path) -> None:
    state = take(recipe_of(tmp_path, with_images=False), tmp_path)
    assert read_state(state["torchmix_state"]).decoder == "" and b"decoder" not in state["torchmix_state"]


def test_ranks_must_have_one_decoder(tmp_path: Path) -> None:
    tree = torchmix.ClientPlaceTree.from_topology(torchmix.Topology.single())
    parts = [part_of(recipe_of(tmp_path, with_images=one), "train") for one in (True, False)]
    facts = [_facts(part, tree, tmp_path)["decoder"] for part in parts]
    assert facts == [decoder_id(), "no items"]


@pytest.mark.parametrize(
    "kind, what", [("image", "pixels of JPEG"), ("sound", "features of sounds"), ("video", "pixels of frames")]
)
def test_what_may_differ_is_said_of_each_kind(kind: str, what: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tell_other_decoder(SimpleNamespace(decoder="one 1", edited_from=""), "another 99", [kind])  # type: ignore[arg-type]
    assert f"another 99: {what}" in caplog.text and f"decoded {kind}s with" in caplog.text


def test_builds_that_are_the_same_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    before: Any = SimpleNamespace(decoder="pillow 1;soxr 2;augment aa", edited_from="")
    told = [
        ("pillow 1;soxr 2;augment bb", "augment aa"),
        ("pillow 1;soxr 3;augment aa", "soxr 2"),
        ("pillow 1;soxr 2", ""),
    ]
    for here, was in told:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            tell_other_decoder(before, here, ["image", "sound"])
        assert "pillow" not in caplog.text and f"with {was or 'augment aa'}, and here it is" in caplog.text
        assert ("pixels of JPEG" in caplog.text) is ("soxr" in was) is ("install that build" in caplog.text)


def test_kinds_and_functions_that_an_edit_takes_out_or_adds_are_no_other_builds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before: Any = SimpleNamespace(decoder="pillow 1,webp 3;soxr 2;augment aa", edited_from="0" * 16)
    with caplog.at_level(logging.WARNING):
        tell_other_decoder(before, "libav 7;pillow 1,webp 3;augment bb", ["image", "video"])
        assert not caplog.text
        tell_other_decoder(before, "pillow 1,webp 4;augment bb", ["image"])
    assert "with pillow 1,webp 3, and here it is pillow 1,webp 4: pixels of JPEG" in caplog.text
