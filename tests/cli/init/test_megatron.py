from __future__ import annotations

import json
import re
import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from tests.support.indexed_datasets import random_sequences, write_dataset
from tests.support.memory_store import memory_store
from tests.support.templates import made_once
from torchmix.cli.main import main
from torchmix.recipe.changes import parse_shares
from torchmix.recipe.load import load_recipe
from torchmix.recipe.structs import RampStage

SIZES = ["--seq-length", "64", "--global-batch-size", "8"]
LONG = ["--seq-length", "99999", "--global-batch-size", "1"]
PREFIXES = ["p/web_text_document", "p/code_text_document", "p/en/wiki_text_document", "p/de/wiki_text_document", "p/on"]


@made_once
def five_datasets(folder: Path) -> None:
    for number, prefix in enumerate(PREFIXES):
        write_dataset(folder / prefix, random_sequences(number, 1000 + 100 * number, mean_tokens=30))


@pytest.fixture(autouse=True)
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(five_datasets(), tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def init(*words: str, code: int = 0) -> Any:
    assert main(["init", *words]) == code
    return load_recipe("recipe.yaml") if code == 0 else None


def paths_in(recipe: Any) -> dict[str, str]:
    return {name: source.path for name, source in recipe.sources.items()}


def test_a_blend_becomes_a_recipe_that_indexes_and_passes_check(capsys):
    recipe = init("--from-megatron", "0.3 p/web_text_document 0.7 p/code_text_document", *SIZES)
    assert paths_in(recipe) == {"web": "p/web_text_document", "code": "p/code_text_document"}
    assert {source.format for source in recipe.sources.values()} == {"megatron"}
    assert (recipe.mixture, recipe.seed) == ({"web": "30%", "code": "70%"}, 1234)
    assert (recipe.batch.samples, recipe.batch.length, recipe.split) == (8, 64, (969, 30, 1))
    assert (recipe.packing.method, recipe.packing.boundaries) == ("concat", "none")
    assert "recipe.yaml is written; next: torchmix index recipe.yaml" in capsys.readouterr().out
    assert main(["index", "recipe.yaml"]) == 0
    assert main(["check", "recipe.yaml", "--steps", "50"]) == 0
    assert main(["plan", "recipe.yaml", "--steps", "3"]) == 0


def test_flags_are_taken_as_they_stand_in_a_launch_script():
    recipe = init(
        *("--data-path", "1", "p/web_text_document", "2", "p/on", "--split", "90,5,5", "--seed", "7"),
        *("--seq-length", "64", "--global-batch-size", "32", "--rampup-batch-size", "8", "8", "100"),
        *("--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss"),
    )
    assert parse_shares(recipe)["web"] == Fraction("0.33333333333333333")
    assert (recipe.split, recipe.seed, recipe.packing.boundaries) == ((90, 5, 5), 7, "document")
    assert recipe.batch.samples == tuple(
        RampStage(from_step=step, samples=samples) for step, samples in [(0, 8), (5, 16), (7, 24), (9, 32)]
    )


def test_a_schedule_of_sizes_stands_for_the_batch():
    words = ["--data-path", "p/on", "--seq-length", "64", "--step-batch-size-schedule", "0:8 1K:16"]
    assert init(*words).batch.samples == (RampStage(from_step=0, samples=8), RampStage(from_step=2, samples=16))
    assert main(["init", *words, "--global-batch-size", "16", "--force"]) == 2


def test_a_dataset_without_a_document_in_a_part_is_warned_of(tmp_path, capsys):
    write_dataset(tmp_path / "p" / "small", random_sequences(9, 20, mean_tokens=30))
    words = ["--data-path", "1", "p/web_text_document", "1", "p/small", *SIZES]
    init(*words)
    printed = capsys.readouterr().out
    assert "warning: test: none of the 20 rows of source 'small' lies in its 99.9% to 100%. To mend it" in printed
    assert "warning: validation" not in printed, "its last row"
    init(*words, "--split", "90,5,5", "--force", "--json")
    assert json.loads(capsys.readouterr().out)["warnings"] == []
    init(*words, "--split", "995,4,1", "--force", "--json")
    warnings = json.loads(capsys.readouterr().out)["warnings"]
    assert [warning.split(":")[0] for warning in warnings] == ["validation", "test"]


def test_prefixes_without_weights_have_the_shares_of_their_sizes_and_one_pass():
    recipe = init("--data-path", "p/web_text_document", "p/on", "p/code_text_document", "--split", "50,25,25", *SIZES)
    samples = {}
    for name, number in (("web", 0), ("on", 4), ("code", 1)):
        sequences = random_sequences(number, 1000 + 100 * number, mean_tokens=30)
        samples[name] = (sum(map(len, sequences[: len(sequences) // 2])) - 1) // 64
    for name, share in parse_shares(recipe).items():
        assert abs(share - Fraction(samples[name], sum(samples.values()))) <= Fraction(1, 10**17)
    assert {(source.max_epochs, source.on_exhausted) for source in recipe.sources.values()} == {(1, "renormalise")}


def test_one_prefix_is_all_of_it_and_repeats():
    recipe = init("--data-path", "p/on", "--split", "1", *SIZES)
    assert (recipe.mixture, recipe.split, recipe.sources["on"].max_epochs) == ({"on": "100%"}, (1,), None)


def test_names_are_unique_and_repeated_prefixes_are_one_source():
    blend = "1 p/en/wiki_text_document 2 p/de/wiki_text_document 3 p/on 4 ./p/en/wiki_text_document"
    recipe = init("--from-megatron", blend, *SIZES)
    assert recipe.mixture == {"en-wiki": "50%", "de-wiki": "20%", "on": "30%"}
    assert "stands 2 times in the blend; its weights are added up" in Path("recipe.yaml").read_text()


def test_prefixes_that_share_a_folder_are_a_group_whose_sources_keep_their_shares():
    blend = "1 p/web_text_document 2 p/code_text_document 7 p/en/wiki_text_document"
    recipe = init("--from-megatron", blend, *SIZES)
    text = Path("recipe.yaml").read_text()
    assert set(recipe.mixture) == {"p", "wiki"} and recipe.mixture["wiki"] == "70%"
    assert "    share: 30%" in text and "      code: 2/3" in text
    parts = {"web": 1, "code": 2, "wiki": 7}
    assert parse_shares(recipe) == {name: Fraction(part, 10) for name, part in parts.items()}
    assert main(["index", "recipe.yaml"]) == 0 and main(["plan", "recipe.yaml", "--steps", "3"]) == 0
    init("--data-path", *blend.split()[1::2], "--force", *SIZES)
    assert "share:" not in Path("recipe.yaml").read_text(), "a source that ends would give to its group first"


@pytest.mark.parametrize("prefix", ["yes", "3", "a: b", "#x", "wéb [1]*", "quo'te\"d", "-x", "{y}", "x  # z"])
def test_any_name_of_a_file_is_written_and_read_back(prefix, tmp_path):
    write_dataset(tmp_path / "odd" / prefix, random_sequences(9, 50))
    recipe = init("--data-path", "1", f"odd/{prefix}", *SIZES)
    assert paths_in(recipe) == {prefix: f"odd/{prefix}"}
    assert main(["index", "recipe.yaml"]) == 0


def test_parts_with_blends_of_their_own(tmp_path, capsys):
    recipe = init(
        *("--train-data-path", "1", "p/web_text_document", "3", "p/on"),
        *("--valid-data-path", "p/web_text_document", "--test-data-path", "p/code_text_document"),
        *SIZES,
    )
    assert (recipe.mixture, recipe.split) == ({"web": "25%", "on": "75%"}, None)
    assert recipe.validation.mixture == {"web-validation": "100%"}
    assert recipe.test.sources["code-test"].path == "p/code_text_document"
    (tmp_path / "split.json").write_text(
        json.dumps({"train": "p/on", "valid": ["2", "p/web_text_document"], "test": None})
    )
    recipe = init("--per-split-data-args-path", "split.json", *SIZES, "--force", "--json")
    assert (recipe.mixture, recipe.validation.mixture, recipe.test) == (
        {"on": "100%"},
        {"web-validation": "100%"},
        None,
    )
    assert main(["index", "recipe.yaml"]) == main(["check", "recipe.yaml", "--steps", "50"]) == 0


def test_a_file_of_words_and_a_recipe_elsewhere(tmp_path):
    (tmp_path / "args").write_text(f"0.5 p/on 0.5 {tmp_path}/p/web_text_document")
    (tmp_path / "run").mkdir()
    assert main(["init", "--data-args-path", "args", *SIZES, "--out", "run/recipe.yaml"]) == 0
    assert paths_in(load_recipe("run/recipe.yaml")) == {"on": "../p/on", "web": f"{tmp_path}/p/web_text_document"}
    assert main(["index", "run/recipe.yaml"]) == 0


def test_nothing_is_overwritten_without_force(capsys):
    Path("recipe.yaml").write_text("mine")
    assert main(["init", "--data-path", "p/on", *SIZES]) == 2
    assert "recipe.yaml exists; name another file with --out, or overwrite it with --force" in capsys.readouterr().err
    assert Path("recipe.yaml").read_text() == "mine"
    init("--data-path", "p/on", *SIZES, "--force")


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ([*SIZES], 2, "init needs to be told where data is.*--from-megatron"),
        (["--data-path", "p/on", "--data-args-path", "x", *SIZES], 2, "--from-megatron and --from-megatron-file"),
        (["--data-path", "p/on", "--seq-length", "64"], 2, "--global-batch-size is missing"),
        (["--data-path", "p/no", *SIZES], 3, "there is no dataset 'p/no.bin' with 'p/no.idx' .*'on.bin'"),
        (["--data-path", "p/on.bin", *SIZES], 2, "p/on.bin: Megatron takes prefixes"),
        (["--data-path", "memory://bucket/on", *SIZES], 3, "'memory://bucket/on.idx' is missing"),
        (["--data-path", "p/on", "--split", "0,1", *SIZES], 2, "--split '0,1': one to three weights"),
        (["--data-path", "p/on", "--split", "a.", *SIZES], 2, "--split 'a.'"),
        (["--train-data-path", "p/on", "--split", "1,1", *SIZES], 2, "--split cuts one blend"),
        (["--valid-data-path", "p/on", *SIZES], 2, "there is nothing to train on"),
        (["--data-path", "p/on", "p/en/wiki_text_document", *LONG], 3, "p/on has less than one sample of 99999 tokens"),
        (["--data-path", "0", "p/on", *SIZES], 2, "the weight 0 of p/on must be above 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_moved_is_named_and_nothing_is_written(words, code, says, capsys):
    init(*words, code=code)
    assert re.search(says, capsys.readouterr().err)
    assert not list(Path().glob("recipe*"))


def test_weights_of_0_are_left_out_and_said(capsys):
    init("--data-path", "0", "p/on", "1", "p/en/wiki_text_document", *SIZES, "--json")
    values = json.loads(capsys.readouterr().out)
    said = "p/on has weight 0 and is left out; Megatron fails on a weight of 0"
    assert values["warnings"] == [said] and f"# {said}" in Path("recipe.yaml").read_text()
    assert [one["path"] for one in values["sources"]] == ["p/en/wiki_text_document"]


def test_datasets_in_stores_are_named_as_they_are():
    with memory_store(Path("p"), "bucket"):
        init("--data-path", "memory://bucket/on", "memory://bucket/en/wiki_text_document", *SIZES)
        init("--data-path", "p/on", "p/en/wiki_text_document", *SIZES, "--out", "near.yaml")
    far, near = load_recipe("recipe.yaml"), load_recipe("near.yaml")
    assert [source.path for source in far.sources.values()] == [
        "memory://bucket/on",
        "memory://bucket/en/wiki_text_document",
    ]
    assert far.mixture == near.mixture
