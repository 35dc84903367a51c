"""The recipe: every fault is found and placed, equal recipes have equal fingerprints, and only they."""

from __future__ import annotations

import pickle
from fractions import Fraction
from pathlib import Path

import msgspec
import pytest

from torchmix.errors import RecipeError
from torchmix.recipe.byte_sizes import parse_bytes
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.load import check_recipe, load_recipe, recipe_directory
from torchmix.recipe.shares import parse_shares
from torchmix.recipe.structs import Balance, Batch, Model, Packing, Read, Recipe, Shuffle, Source

TEXT = """\
version: 1
seed: 1234
batch: {samples: 64, length: 1024}
catalog: ./index
sources:
  peps:
    path: ../corpus/peps.parquet
    text: body
    tokenizer: bytes
  web:
    path: [data/web/*.parquet, data/more.parquet]
    tokens: input_ids
    max_epochs: 4
    on_exhausted: renormalise
mixture: {web: 70%, peps: 30%}
packing: {method: best_fit, overflow: split, boundaries: document, align_tokens: 8}
balance: {method: rows, model: {layers: 32, hidden: 4096, ffn: 11008, heads: 32, kv_heads: 8}}
shuffle: {window_pages: 256, window_bytes: 64MiB}
read: {cache: 1GiB}
"""


def load_text(folder: Path, text: str) -> Recipe:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return load_recipe(path)


def edited(old: str, new: str) -> str:
    assert TEXT.count(old) == 1, f"{old!r} does not stand once in the text"
    return TEXT.replace(old, new)


def small_recipe(**changes: object) -> Recipe:
    fields: dict[str, object] = {
        "version": 1,
        "seed": 0,
        "batch": Batch(samples=4, length=64),
        "sources": {"a": Source(path="a.parquet", tokens="ids"), "b": Source(path="b.parquet", tokens="ids")},
        "mixture": {"a": "25%", "b": "75%"},
    }
    return Recipe(**(fields | changes))  # type: ignore[arg-type]


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


# Each case: what is replaced in TEXT, by what, and the line, path of keys and words of the error.
FAULTS = [
    # keys
    ("max_epochs: 4", "max_epoch: 4", 13, "sources.web.max_epoch", "did you mean 'max_epochs'?"),
    ("mixture: {", "mixtures: {", 15, "mixtures", "did you mean 'mixture'?"),
    ("hidden: 4096", "hiden: 4096", 17, "balance.model.hiden", "did you mean 'hidden'?"),
    ("seed: 1234", "zzzz: 1234", 2, "zzzz", "valid here: version, seed, batch, sources"),
    ("    text: body", "    text: body\n    text: title", 9, "sources.peps.text", "twice, first in line 8"),
    ("web: 70%, ", "web: 60%, web: 10%, ", 15, "mixture.web", "twice"),
    ("seed: 1234\n", "", 1, "seed", "required and missing"),
    ("samples: 64, ", "", 3, "batch.samples", "required and missing"),
    ("catalog: ./index", "? [a, b]\n: 1", 4, "", "keys are text"),
    # types
    ("length: 1024", "length: long", 3, "batch.length", "expected a whole number, got text 'long'"),
    ("length: 1024", "length: 1024.0", 3, "batch.length", "expected a whole number, got 1024.0"),
    ("seed: 1234", "seed: true", 2, "seed", "expected a whole number, got True"),
    ("max_epochs: 4", "max_epochs: 2024-01-31", 13, "sources.web.max_epochs", "whole number or nothing"),
    ("max_epochs: 4", "max_epochs: 2024-13-45", 13, "sources.web.max_epochs", "month must be in 1..12"),
    ("data/more.parquet]", "7]", 11, "sources.web.path", "text or a list of texts"),
    ("read: {cache: 1GiB}", "read:", 19, "read", "expected a mapping with the keys cache, got nothing"),
    ("shuffle: {window_pages: 256, window_bytes: 64MiB}", "shuffle: [256]", 18, "shuffle", "got [256]"),
    ("mixture: {web: 70%, peps: 30%}", "mixture: 70%", 15, "mixture", "of name: value"),
    ("method: rows", "method: row", 17, "balance.method", "one of rows, none (did you mean 'rows'?)"),
    ("overflow: split", "overflow: splitt", 16, "packing.overflow", "did you mean 'split'?"),
    ("boundaries: document", "boundaries: no", 16, "packing.boundaries", "False is not one of document, none"),
    ("tokenizer: bytes", "tokenizer: gpt2", 9, "sources.peps.tokenizer", "'gpt2' is not one of bytes"),
    ("renormalise", "renormalize", 14, "sources.web.on_exhausted", "did you mean 'renormalise'?"),
    # numbers
    ("version: 1", "version: 2", 1, "version", "this torchmix reads version 1"),
    ("version: 1", "version: one", 1, "version", "expected a whole number"),
    ("seed: 1234", "seed: -1", 2, "seed", "-1 is out of range"),
    ("seed: 1234", f"seed: {2**63}", 2, "seed", "out of range"),
    ("samples: 64", "samples: 0", 3, "batch.samples", "at least 1"),
    ("length: 1024", "length: 1", 3, "batch.length", "at least 2"),
    ("samples: 64", f"samples: {2**21}", 3, "batch", "at most 1073741824"),
    ("max_epochs: 4", "max_epochs: 0", 13, "sources.web.max_epochs", "at least 1"),
    ("align_tokens: 8", "align_tokens: 0", 16, "packing.align_tokens", "at least 1"),
    ("align_tokens: 8", "align_tokens: 48", 16, "packing.align_tokens", "48 does not divide batch.length 1024"),
    ("layers: 32", "layers: 0", 17, "balance.model.layers", "at least 1"),
    ("kv_heads: 8", "kv_heads: 5", 17, "balance.model.kv_heads", "5 does not divide heads 32"),
    ("kv_heads: 8", "vocab: -1", 17, "balance.model.vocab", "at least 0"),
    ("window_pages: 256", "window_pages: 0", 18, "shuffle.window_pages", "at least 1"),
    ("window_bytes: 64MiB", "window_bytes: 64 Mbit", 18, "shuffle.window_bytes", "'64 Mbit' is not a size"),
    ("cache: 1GiB", "cache: -5", 19, "read.cache", "-5 is not a size"),
    # sources
    (", model: {layers: 32, hidden: 4096, ffn: 11008, heads: 32, kv_heads: 8}", "", 17, "balance.model", "needs"),
    ("    tokens: input_ids\n", "", 10, "sources.web", "exactly one of text and tokens names the column; neither"),
    ("    text: body", "    text: body\n    tokens: ids", 6, "sources.peps", "both are given"),
    ("    tokenizer: bytes\n", "", 6, "sources.peps.tokenizer", "needs a tokenizer"),
    ("    max_epochs: 4", "    tokenizer: bytes", 13, "sources.web.tokenizer", "remove tokenizer"),
    ("text: body", 'text: ""', 8, "sources.peps.text", "name a column"),
    ("path: ../corpus/peps.parquet", 'path: ""', 7, "sources.peps.path", "name a file or a glob"),
    ("[data/web/*.parquet, data/more.parquet]", "[]", 11, "sources.web.path", "name a file or a glob"),
    ("catalog: ./index", 'catalog: ""', 4, "catalog", "name a folder"),
    # shares
    ("web: 70%", "web: 0.7", 15, "mixture.web", "percent sign"),
    ("web: 70%", "web: 70", 15, "mixture.web", "percent sign"),
    ("web: 70%", "web: '70'", 15, "mixture.web", "'70' is not a percentage"),
    ("web: 70%", "web: nan%", 15, "mixture.web", "not a percentage"),
    ("web: 70%", "web: 1e99999%", 15, "mixture.web", "not a percentage"),
    ("web: 70%", "web: [70%]", 15, "mixture.web", "expected text"),
    ("web: 70%", "web: 0%", 15, "mixture.web", "not above 0"),
    ("web: 70%", "web: -1%", 15, "mixture.web", "not above 0"),
    ("web: 70%", "web: 69.9%", 15, "mixture", "sum to 99.9%, not 100%; 0.1% is missing"),
    ("web: 70%", "web: 70.001%", 15, "mixture", "sum to 100.001%, not 100%; 0.001% is too much"),
    ("{web: 70%", "{webb: 70%", 15, "mixture.webb", "did you mean 'web'?"),
    ("{web: 70%, peps: 30%}", "{peps: 100%}", 15, "mixture.web", "the source 'web' has no share"),
    # YAML
    ("read: {cache: 1GiB}", "read: {cache: [1GiB}", 19, "", "not valid YAML"),
    ("read: {cache: 1GiB}", "---\nread: {cache: 1GiB}", 19, "", "not valid YAML"),
    ("read: {cache: 1GiB}", "read: {cache: *nowhere}", 19, "", "nowhere"),
    ("read: {cache: 1GiB}", "read: &loop {cache: *loop}", 0, "", "alias refers to itself"),
    ("read: {cache: 1GiB}", "read: !!python/object:os.system {}", 19, "read", "has no place in a recipe"),
    ("cache: 1GiB", "cache: !!python/name:os.system x", 19, "", "could not determine a constructor"),
]


@pytest.mark.parametrize(("old", "new", "line", "where", "words"), FAULTS, ids=[f"{f[3]}-{f[1]}" for f in FAULTS])
def test_a_fault_is_named_with_its_line_and_path_of_keys(
    tmp_path: Path, old: str, new: str, line: int, where: str, words: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        load_text(tmp_path, edited(old, new))
    error = caught.value
    assert (error.line, error.where) == (line, where), str(error)
    assert words in error.message
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


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


def test_shares_are_exact_and_ordered_by_name() -> None:
    names = ("tiny", "big", "Mid")
    sources = {name: Source(path="x", tokens="t") for name in names}
    mixture = {"tiny": "1e-3%", "big": "66.666 %", "Mid": "33.333%"}
    shares = parse_shares(small_recipe(sources=sources, mixture=mixture))
    assert shares == {"Mid": Fraction(33333, 10**5), "big": Fraction(66666, 10**5), "tiny": Fraction(1, 10**5)}
    assert list(shares) == ["Mid", "big", "tiny"]


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        ("64MiB", 64 * 2**20),
        ("1GiB", 2**30),
        ("512KiB", 512 * 2**10),
        ("100MB", 10**8),
        ("2TB", 2 * 10**12),
        ("1.5 GiB", 3 * 2**29),
        ("64mib", 64 * 2**20),
        ("17", 17),
        ("17B", 17),
        (123456, 123456),
    ],
)
def test_sizes_parse_to_bytes(size: str | int, num_bytes: int) -> None:
    assert parse_bytes(size, where="read.cache") == num_bytes


@pytest.mark.parametrize("size", ["", "0", "MiB", "1.5B", "-1", "1e3", "1 PiB", "9" * 40, "99999999TiB", "\u0661GiB"])
def test_what_is_no_size_is_refused(size: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_bytes(size, where="read.cache")
    assert caught.value.where == "read.cache"


def test_the_fingerprint_is_frozen(tmp_path: Path) -> None:
    assert recipe_fingerprint(load_text(tmp_path, TEXT)) == "b185e9478b745b35"


def test_the_fingerprint_ignores_order_of_keys_and_of_sources(tmp_path: Path) -> None:
    recipe = load_text(tmp_path, TEXT)
    plain = msgspec.to_builtins(recipe)
    turned = {key: plain[key] for key in reversed(list(plain))}
    turned["sources"] = {name: recipe.sources[name] for name in reversed(list(recipe.sources))}
    turned["mixture"] = dict(reversed(list(recipe.mixture.items())))
    assert recipe_fingerprint(msgspec.convert(turned, Recipe, from_attributes=True)) == recipe_fingerprint(recipe)


# What is replaced in TEXT, by what; the first group leaves the order of documents as it is, the second does not.
SAME_ORDER = [
    ("catalog: ./index", "catalog: /elsewhere"),
    ("path: ../corpus/peps.parquet", "path: /mnt/peps.parquet"),
    ("method: rows", "method: none"),
    ("hidden: 4096", "hidden: 8192"),
    ("boundaries: document", "boundaries: none"),
    ("cache: 1GiB", "cache: 2GiB"),
    ("64MiB", "65536KiB"),
    ("64MiB", str(64 * 2**20)),
    ("web: 70%", "web: 7e1%"),
    ("max_epochs: 4", "max_epochs: 5"),
    ("on_exhausted: renormalise", "on_exhausted: error"),
]
OTHER_ORDER = [
    ("seed: 1234", "seed: 1235"),
    ("samples: 64", "samples: 65"),
    ("length: 1024", "length: 2048"),
    ("text: body", "text: title"),
    ("tokens: input_ids", "tokens: ids"),
    ("{web: 70%, peps: 30%}", "{web: 71%, peps: 29%}"),
    ("method: best_fit", "method: concat"),
    ("overflow: split", "overflow: drop"),
    ("align_tokens: 8", "align_tokens: 16"),
    ("window_pages: 256", "window_pages: 255"),
    ("64MiB", "32MiB"),
]


@pytest.mark.parametrize(("old", "new"), SAME_ORDER)
def test_the_fingerprint_ignores_what_leaves_the_order_alone(tmp_path: Path, old: str, new: str) -> None:
    changed = load_text(tmp_path, edited(old, new))
    assert recipe_fingerprint(changed) == recipe_fingerprint(load_text(tmp_path, TEXT))


@pytest.mark.parametrize(("old", "new"), OTHER_ORDER)
def test_the_fingerprint_covers_what_alters_the_order(tmp_path: Path, old: str, new: str) -> None:
    changed = load_text(tmp_path, edited(old, new))
    assert recipe_fingerprint(changed) != recipe_fingerprint(load_text(tmp_path, TEXT))


def test_the_fingerprint_ignores_alignment_where_nothing_is_aligned() -> None:
    by_align = {
        recipe_fingerprint(small_recipe(packing=Packing(method="concat", align_tokens=align))) for align in (1, 8, 16)
    }
    assert len(by_align) == 1


def test_paths_are_relative_to_the_folder_of_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert recipe_directory("sub/recipe.yaml") == tmp_path / "sub"
