"""The fingerprint: equal recipes have equal ones, and only they."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.support.recipe_text import TEXT, edited, load_text, small_recipe
from tests.support.recipes import make_recipe
from torchmix.recipe import fingerprint
from torchmix.recipe.fingerprint import differing_keys, key_digests, recipe_fingerprint, recipe_keys
from torchmix.recipe.parts import part_of
from torchmix.recipe.structs import Packing, PackingOfSource, Recipe, Source


def test_the_fingerprint_is_frozen(tmp_path: Path) -> None:
    assert recipe_fingerprint(load_text(tmp_path, TEXT)) == "4afbbafc4349e483"


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


# Keys that say the default, or nothing of the order; then those that alter it.
SAID_DEFAULTS = [
    ("seed: 1234", "seed: 1234\nper_token_loss: require"),
    ("seed: 1234", "seed: 1234\nvocab_size: 50257"),
    ("samples: 64", "samples: [{from_step: 0, samples: 64}, {from_step: 5, samples: 64}]"),
    ("max_epochs: 4", "documents: [0%, 100%]"),
    ("max_epochs: 4", "format: parquet"),
    ("catalog: ./index", "validation: {sources: {v: {path: a.bin}}, mixture: {v: 100%}}"),
    ("catalog: ./index", "split: [7]"),
    ("window_pages: 256", "method: page, window_pages: 256"),
]
RARER_KEYS = [
    ("samples: 64", "samples: [{from_step: 0, samples: 64}, {from_step: 5, samples: 128}]"),
    ("samples: 64", "samples: [{from_step: 0, samples: 64}, {from_step: 6, samples: 128}]"),
    ("max_epochs: 4", "documents: [0%, 50%]"),
    ("max_epochs: 4", "documents: [50%, 100%]"),
    ("catalog: ./index", "split: [9, 1]"),
    ("    tokens: input_ids\n", "    format: megatron\n"),
    ("window_pages: 256", "method: row"),
    ("window_pages: 256", "method: none"),
    ("tokenizer: bytes", "tokenizer: t.json"),
    ("tokenizer: bytes", "tokenizer: tiktoken:gpt2"),
]


@pytest.mark.parametrize(("old", "new"), SAID_DEFAULTS)
def test_a_recipe_that_says_a_default_has_the_same_fingerprint(tmp_path: Path, old: str, new: str) -> None:
    changed = load_text(tmp_path, edited(old, new))
    assert recipe_fingerprint(changed) == recipe_fingerprint(load_text(tmp_path, TEXT))


def test_a_rarer_key_that_alters_the_order_is_covered(tmp_path: Path) -> None:
    texts = [edited(old, new) for old, new in RARER_KEYS]
    prints = {recipe_fingerprint(load_text(tmp_path, text)) for text in (TEXT, *texts)}
    assert len(prints) == 1 + len(texts)


def test_how_a_megatron_source_is_named_does_not_matter(tmp_path: Path) -> None:
    def text(source: str) -> str:
        return f"version: 1\nseed: 1\nbatch: {{samples: 1, length: 8}}\nsources: {{a: {source}}}\nmixture: {{a: 100%}}"

    by_name = recipe_fingerprint(load_text(tmp_path, text("{path: web.bin}")))
    assert by_name == recipe_fingerprint(load_text(tmp_path, text("{path: web, format: megatron}")))


def test_of_a_vocabulary_only_its_kind_counts(tmp_path: Path) -> None:
    """What is in it is in the catalog's fingerprint; where it lies is nobody's business."""

    def fingerprint(*edits: tuple[str, str]) -> str:
        text = TEXT
        for old, new in edits:
            text = text.replace(old, new)
        return recipe_fingerprint(load_text(tmp_path, text))

    by_file = fingerprint(("tokenizer: bytes", "tokenizer: t.json"))
    assert by_file == fingerprint(("tokenizer: bytes", "tokenizer: /elsewhere/u.json\n    end_id: 7"))
    assert by_file != fingerprint(("tokenizer: bytes", "tokenizer: tiktoken:gpt2"))


def test_windows_of_pages_count_only_where_pages_are_shuffled(tmp_path: Path) -> None:
    prints = set()
    for pages in (7, 256):
        text = edited("window_pages: 256", f"method: row, window_pages: {pages}")
        prints.add(recipe_fingerprint(load_text(tmp_path, text)))
    assert len(prints) == 1


def test_a_map_is_another_order_and_none_leaves_it_as_it_was() -> None:
    prints = {
        words: recipe_fingerprint(
            small_recipe(sources={"a": Source(path="a", tokens="i", map=words), "b": Source(path="b", tokens="i")})
        )
        for words in (None, "mine:f", "mine:g")
    }
    assert len(set(prints.values())) == 3


def test_a_source_that_is_cut_is_another_order_and_its_key_says_so() -> None:
    whole, cut = (
        small_recipe(sources={"a": Source(path="a", tokens="i", packing=packing), "b": Source(path="b", tokens="i")})
        for packing in (PackingOfSource(), PackingOfSource(method="concat"))
    )
    assert recipe_fingerprint(whole) != recipe_fingerprint(cut)
    keys, others = (recipe_keys(part_of(each, "train")) for each in (whole, cut))
    assert [name for name in keys if keys[name] != others[name]] == ["sources.a"]


def test_a_part_is_looked_through_once_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    made = fingerprint._made_order
    monkeypatch.setattr(fingerprint, "_made_order", lambda part: looks.append(part.seed) or made(part))
    recipe = make_recipe({"a": "30%", "b": "70%"})
    parts = [part_of(msgspec.structs.replace(recipe, seed=seed), "train") for seed in range(10)]
    first = [recipe_fingerprint(part) for part in parts[:2]]
    assert [recipe_fingerprint(part) for part in parts[:2]] == first and len({*first}) == 2
    assert fingerprint.recipe_keys(parts[1])["seed"] == "1"
    assert looks == [0, 1]
    for part in parts:
        recipe_fingerprint(part)
    assert len(fingerprint._known) == 8
    assert recipe_fingerprint(parts[0]) == first[0]


def test_keys_that_only_some_recipes_have_are_told_apart_when_they_come_and_go() -> None:
    plain = part_of(make_recipe({"a": "50%", "b": "50%"}), "train")
    counted = part_of(msgspec.structs.replace(make_recipe({"a": "50%", "b": "50%"}), unit="documents"), "train")
    names = sorted(plain.sources)
    before = key_digests(recipe_keys(plain))
    assert differing_keys(recipe_keys(counted), before, names) == ["unit"]
    assert differing_keys(recipe_keys(plain), key_digests(recipe_keys(counted)), names) == ["unit"]
    # Keys with any other value, as a policy and selections have: "dynamic" is known by who has a log.
    more = {**recipe_keys(plain), "dynamic": '"ado"', "selections": '{"c":"a"}'}
    ordered = {
        name: more[name] for name in (*list(more)[:6], "dynamic", "selections", *(f"sources.{n}" for n in names))
    }
    both = key_digests(ordered)
    assert differing_keys(ordered, both, names, is_dynamic=True) == []
    assert differing_keys(recipe_keys(plain), both, names, is_dynamic=True) == ["dynamic", "selections"]
    for gone, is_dynamic in (("dynamic", False), ("selections", True)):
        one = {name: value for name, value in ordered.items() if name != gone}
        assert differing_keys(ordered, key_digests(one), names, is_dynamic=is_dynamic) == [gone]
        [other] = {"dynamic", "selections"} - {gone}
        assert differing_keys(recipe_keys(plain), key_digests(one), names, is_dynamic=is_dynamic) == [other]
