"""Flats in a recipe: what they are made of, and what is wrong with one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.recipe_text import load_text
from torchmix.errors import RecipeError
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.parts import Part, part_of
from torchmix.recipe.structs import Recipe

NAMES = ("web", "code", "pubmed", "peps")


def recipe_of(folder: Path, mixture: str, *, more: str = "", bounds: str = "") -> Recipe:
    sources = "".join(f"  {name}: {{path: {name}.parquet, tokens: ids}}\n" for name in NAMES)
    sources = sources.replace("peps.parquet,", f"peps.parquet, {bounds}")
    sources += "  german: {from: web, where: lang = 'de'}\n"
    head = "version: 1\nseed: 1\nbatch: {samples: 4, length: 64}\nsources:\n"
    return load_text(folder, f"{head}{sources}mixture: {mixture}\n{more}")


def test_a_flat_is_one_stream_over_its_members(tmp_path: Path) -> None:
    mixture = "{text: {share: 80%, children: {web: 9, small: {share: 1, flat: [pubmed, german, peps]}}}, code: 20%}"
    streams = part_of(recipe_of(tmp_path, mixture), "train").streams
    assert list(streams) == ["code", "small", "web"]
    assert streams["small"].members == ("german", "peps", "pubmed") and streams["small"].is_flat
    assert streams["small"].sources == ("peps", "pubmed", "web")
    assert not streams["web"].is_flat and streams["web"].is_source


def test_a_source_may_be_in_a_flat_and_have_a_share_of_its_own(tmp_path: Path) -> None:
    mixture = "{web: 1, code: 1, german: 1, all: {share: 2, flat: [peps, pubmed, code], max_epochs: 2}}"
    streams = part_of(recipe_of(tmp_path, mixture), "train").streams
    assert list(streams) == ["all", "code", "german", "web"]
    assert (streams["all"].max_epochs, streams["all"].on_exhausted) == (2, "error")


def test_the_fingerprint_covers_members_in_any_order_and_no_bound(tmp_path: Path) -> None:
    def fingerprint(flat: str) -> str:
        rest = "".join(f"{name}: 1, " for name in NAMES if name not in flat)
        return recipe_fingerprint(recipe_of(tmp_path, f"{{{rest}german: 1, a: {{share: 1, {flat}}}}}"))

    first = fingerprint("flat: [peps, code]")
    assert first == fingerprint("flat: [code, peps], max_epochs: 3, on_exhausted: renormalise")
    assert first != fingerprint("flat: [peps, pubmed]")
    assert first != fingerprint("proportional: 0, children: [peps, code]")


def test_a_flat_inside_a_flat_is_its_members(tmp_path: Path) -> None:
    def part(flat: str, name: str) -> Part:
        mixture = f"{{web: 1, code: 1, all: {{share: 2, flat: {flat}}}}}"
        return part_of(recipe_of(tmp_path, mixture, more="hold_out: {validation: {pubmed: 10%, peps: 5%}}\n"), name)

    for name, members in (("train", ("german", "peps", "pubmed")), ("validation", ("peps", "pubmed"))):
        bare, nested = part("[german, peps, pubmed]", name), part("[{flat: [pubmed, {flat: [peps]}]}, german]", name)
        assert nested.streams == bare.streams and nested.streams["all"].members == members
        assert recipe_fingerprint(nested) == recipe_fingerprint(bare)


def test_a_split_has_the_flat_in_each_part(tmp_path: Path) -> None:
    mixture = "{web: 1, german: 1, code: 1, all: {share: 2, flat: [peps, pubmed], max_epochs: 2}}"
    held = part_of(recipe_of(tmp_path, mixture, more="split: [9, 1]\n"), "validation")
    assert held.streams["all"].is_flat and held.streams["all"].max_epochs is None


@pytest.mark.parametrize(
    ("flat", "where", "words"),
    [
        ("flat: [peps, pubmet]", "mixture.all.flat[1]", "no source 'pubmet' .did you mean 'pubmed'"),
        ("flat: [peps, pubmed, peps]", "mixture.all.flat[2]", "stands there twice"),
        ("flat: []", "mixture.all.flat", "names no source"),
        ("flat: [pubmed, peps], children: {code: 1}", "mixture.all.children", "a flat has no such key"),
        ("flat: [pubmed, peps], proportional: 1", "mixture.all.proportional", "a flat has no such key"),
        ("flat: [pubmed, peps], max_epochs: 0", "mixture.all.max_epochs", "at least 1"),
        ("flat: [pubmed, {flat: [peps, {flat: [pubmed]}]}]", "mixture.all.flat[1].flat[1].flat[0]", "there twice"),
        ("flat: [pubmed, {flat: [peps], max_epochs: 2}]", "mixture.all.flat[1].max_epochs", "unknown key"),
        ("flat: [pubmed, {flat: [peps], share: 1}]", "mixture.all.flat[1].share", "unknown key"),
        ("flat: [pubmed, {flat: []}, peps]", "mixture.all.flat[1].flat", "names no source"),
        ("flat: [pubmed, {children: [peps]}]", "mixture.all.flat[1].children", "unknown key"),
        ("flat: [pubmed, 3]", "mixture.all.flat[1]", "expected text or a mapping with the keys flat"),
        ("children: {pubmed: 1, peps: 1}, max_epochs: 2", "mixture.all.max_epochs", "sources, selections and flats"),
    ],
)
def test_what_is_wrong_is_named_by_its_path(tmp_path: Path, flat: str, where: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words) as caught:
        recipe_of(tmp_path, f"{{web: 1, german: 1, code: 1, all: {{share: 1, {flat}}}}}")
    assert caught.value.where == where


def test_a_bound_on_a_member_belongs_on_the_flat(tmp_path: Path) -> None:
    mixture = "{web: 1, german: 1, code: 1, all: {share: 1, flat: [pubmed, peps]}}"
    with pytest.raises(RecipeError, match=r"'peps' has max_epochs 3.*write max_epochs beside `flat`") as caught:
        recipe_of(tmp_path, mixture, bounds="max_epochs: 3,")
    assert caught.value.where == "mixture.all.flat[1]"
    own = mixture.replace("code: 1,", "code: 1, peps: 1,")
    assert part_of(recipe_of(tmp_path, own, bounds="max_epochs: 3,"), "train").streams["peps"].max_epochs == 3


@pytest.mark.parametrize("name", ["web", "a/b"])
def test_a_flat_has_a_name_of_its_own(tmp_path: Path, name: str) -> None:
    with pytest.raises(RecipeError, match="cannot name a flat"):
        recipe_of(tmp_path, f"{{german: 1, code: 1, {name}: {{share: 1, flat: [pubmed, peps]}}}}")
