"""Loading: a file and Structs are checked alike, and give the same recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.recipe_text import TEXT, edited, load_text, small_recipe
from torchmix.errors import RecipeError
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.load import check_recipe, load_recipe, recipe_directory
from torchmix.recipe.structs import Balance, Batch, Model, Packing, Read, Recipe, Shuffle, Source


def test_the_whole_recipe_loads_as_the_same_structs_written_in_python(tmp_path: Path) -> None:
    expected = Recipe(
        version=1,
        seed=1234,
        batch=Batch(samples=64, length=1024),
        catalog="./index",
        sources={
            "peps": Source(path="../corpus/peps.parquet", text="body", tokenizer="bytes"),
            "web": Source(
                path=("data/web/*.parquet", "data/more.parquet"),
                tokens="input_ids",
                max_epochs=4,
                on_exhausted="renormalise",
            ),
        },
        mixture={"web": "70%", "peps": "30%"},
        packing=Packing(method="best_fit", overflow="split", boundaries="document", align_tokens=8),
        balance=Balance(method="rows", model=Model(layers=32, hidden=4096, ffn=11008, heads=32, kv_heads=8)),
        shuffle=Shuffle(window_pages=256, window_bytes="64MiB"),
        read=Read(cache="1GiB"),
    )
    loaded = load_text(tmp_path, TEXT)
    assert loaded == expected
    assert check_recipe(loaded) == expected


def test_defaults_fill_a_recipe_of_five_keys(tmp_path: Path) -> None:
    text = "version: 1\nseed: 0\nbatch: {samples: 1, length: 8}\nsources: {a: {path: a, tokens: t}}\nmixture: {a: 100%}"
    recipe = load_text(tmp_path, text)
    assert recipe.packing == Packing(method="best_fit", overflow="split", boundaries="document", align_tokens=8)
    assert recipe.balance == Balance(method="none")
    assert (recipe.catalog, recipe.shuffle.window_pages, recipe.read.cache) == ("./catalog", 256, "1GiB")


@pytest.mark.parametrize("name", ["", "a/b", " a", "a ", ".hidden", "a\tb", "\x00", "é" * 101])
def test_unusable_source_names_are_refused(name: str) -> None:
    with pytest.raises(RecipeError, match="the name"):
        check_recipe(small_recipe(sources={name: Source(path="a", tokens="t")}, mixture={name: "100%"}))


def test_words_that_yaml_reads_as_other_types_can_be_names(tmp_path: Path) -> None:
    text = edited("peps:\n", "no:\n").replace("peps: 30%", "no: 29%, 2024: 1%")
    text = text.replace("sources:\n", "sources:\n  2024: {path: a, tokens: t}\n")
    assert sorted(load_text(tmp_path, text).sources) == ["2024", "no", "web"]


@pytest.mark.parametrize("content", [None, b"\xff\xfe\xfa"])
def test_an_unreadable_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "gone.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RecipeError, match=r"gone\.yaml"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"seed": "7"}, "seed"),
        ({"batch": Batch(samples="4", length=64)}, "batch.samples"),  # type: ignore[arg-type]
        ({"batch": None}, "batch"),
        ({"mixture": {"a": 0.25, "b": "75%"}}, "mixture.a"),
        ({"mixture": {"a": "100%", 3: "0%"}}, "mixture"),
        ({"sources": {}, "mixture": {}}, "sources"),
        ({"sources": [Source(path="a", tokens="t")]}, "sources"),
        ({"packing": Packing(method="worst_fit")}, "packing.method"),  # type: ignore[arg-type]
        ({"catalog": object()}, ""),
        ({"version": 3}, "version"),
    ],
)
def test_a_recipe_built_in_python_is_checked_as_strictly(changes: dict[str, object], where: str) -> None:
    with pytest.raises(RecipeError) as caught:
        check_recipe(small_recipe(**changes))
    assert (caught.value.where, caught.value.line) == (where, 0), str(caught.value)


def test_a_path_object_becomes_text() -> None:
    source = Source(path=Path("data") / "a.parquet", tokens="ids")  # type: ignore[arg-type]
    checked = check_recipe(small_recipe(sources={"a": source}, mixture={"a": "100%"}))
    assert checked.sources["a"].path == "data/a.parquet"


def test_concat_ignores_alignment() -> None:
    check_recipe(small_recipe(packing=Packing(method="concat", align_tokens=7)))


def test_paths_are_relative_to_the_folder_of_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert recipe_directory("sub/recipe.yaml") == tmp_path / "sub"


@pytest.mark.parametrize(
    ("key", "value", "where"),
    [
        ("balance", {"group_size": 1 << 64}, "balance.group_size"),
        ("schedule", [{"from": {"epochs": 1 << 70, "of": "web"}, "set": {"web": "50%"}}], "schedule[0].from.epochs"),
    ],
)
def test_a_number_that_no_message_to_a_worker_holds_is_named(key: str, value: object, where: str) -> None:
    sources = {name: {"path": f"{name}.parquet", "tokens": "ids"} for name in ("web", "more")}
    plain = {"version": 1, "seed": 3, "batch": {"samples": 8, "length": 64}, "sources": sources, key: value}
    with pytest.raises(RecipeError, match="more than 64 bits") as caught:
        check_recipe({**plain, "mixture": {"web": 1, "more": 2}})
    assert caught.value.where == where


def test_sources_of_validation_are_packed_by_the_same_rule() -> None:
    source = {"path": "a.parquet", "tokens": "ids"}
    cut = {"sources": {"b": {**source, "packing": {"method": "concat"}}}, "mixture": {"b": "100%"}}
    told = {"version": 1, "seed": 1, "batch": {"samples": 2, "length": 64}, "sources": {"a": source}}
    told |= {"mixture": {"a": "100%"}, "validation": cut}
    check_recipe(told)
    with pytest.raises(RecipeError, match=r"fills what whole documents leave, and packing\.method is pad") as found:
        check_recipe({**told, "packing": {"method": "pad"}})
    assert found.value.where == "validation.sources.b.packing.method"


ONE = {"path": "a.parquet", "tokens": "ids"}


@pytest.mark.parametrize(
    ("own", "keys", "where", "message"),
    [
        ({"max_length": 0}, {}, "sources.a.packing.max_length", "at least 1"),
        ({"max_length": 20}, {}, "sources.a.packing.max_length", "align_tokens 8.*write 16 or 24"),
        ({"max_length": 5}, {}, "sources.a.packing.max_length", "write 8$"),
        ({"max_length": 96}, {}, "sources.a.packing.max_length", "no multiple of batch.length 64.*write 64 or 128"),
        ({"max_length": 16}, {"packing": {"method": "concat"}}, "sources.a.packing.max_length", "where samples end"),
        ({"max_length": 16, "method": "concat"}, {}, "sources.a.packing.max_length", "where samples end"),
        (
            {"overflow": "split"},
            {"packing": {"method": "pad", "overflow": "drop"}, "unit": "documents"},
            "sources.a.packing.overflow",
            "draws them as a whole",
        ),
        ({"overflow": "drop"}, {"mixture": {"f": {"share": 1, "flat": ["a", "b"]}}}, "sources.a.packing", "one order"),
        ({"overflow": "cut"}, {}, "sources.a.packing.overflow", "split, truncate, drop, error"),
    ],
)
def test_a_rule_of_a_source_that_cannot_hold_is_named(own: Any, keys: Any, where: str, message: str) -> None:
    told = {"version": 1, "seed": 1, "batch": {"samples": 2, "length": 64}, "sources": {"a": ONE, "b": ONE}}
    told |= {"mixture": {"a": 1, "b": 1}, **keys}
    check_recipe(told)
    with pytest.raises(RecipeError, match=message) as found:
        check_recipe({**told, "sources": {"a": {**ONE, "packing": own}, "b": ONE}})
    assert found.value.where == where


def test_a_rule_of_a_source_is_in_the_fingerprint_where_it_is_another_than_the_recipe_s() -> None:
    told = {"version": 1, "seed": 1, "batch": {"samples": 2, "length": 64}, "mixture": {"a": "100%"}}

    def fingerprint(own: dict[str, Any]) -> str:
        return recipe_fingerprint(check_recipe({**told, "sources": {"a": {**ONE, "packing": own}}}))

    assert fingerprint({"overflow": "split"}) == fingerprint({})
    others = ({}, {"overflow": "drop"}, {"max_length": 32}, {"max_length": 64}, {"method": "concat"})
    assert len({fingerprint(own) for own in others}) == len(others)
