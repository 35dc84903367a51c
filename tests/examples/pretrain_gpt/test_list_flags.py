"""Megatron's flags about data: all are judged, what the page says of them is so, and a new flag is an error."""

from __future__ import annotations

import ast
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.example import PRETRAIN_GPT, example_module
from tests.support.fake_megatron import default_args, installed
from torchmix.errors import RecipeError
from torchmix.megatron_adapter.batch_sizes import check_batch_sizes
from torchmix.megatron_adapter.flags import SCRIPT_FLAGS, check_refusals, fate_of_flag, refused_flags, without_effect
from torchmix.recipe.structs import Batch, Recipe, Source

list_flags = example_module("list_flags", PRETRAIN_GPT)
DOCS = Path(__file__).parents[3] / "docs"
RECORD = json.loads((DOCS / "megatron_flags.json").read_text(encoding="utf-8"))
RECIPE = Recipe(
    version=1,
    seed=5,
    batch=Batch(samples=8, length=64),
    sources={"web": Source(path="web.parquet", tokens="input_ids")},
    mixture={"web": "100%"},
)
BY_OTHER_MEANS = {
    "--batch-size": "Megatron itself refuses it",
    "--tensor-parallel-num-weight-shards": "refused where ranks are counted, see places.py",
    "--decrease-batch-size-if-needed": "refused with the sizes, see batch_sizes.py",
    "--cuda-graph-impl": "refused under another name",
    "--cuda-graph-scope": "refused under another name",
    "--overlap-moe-expert-parallel-comm": "depends on the recipe",
}
FLAG_OF_FIELD = {
    "random_seed": "--seed",
    "sequence_length": "--seq-length",
    "blend": "--data-path",
    "blend_per_split": "--train-data-path",
    "path_to_cache": "--data-cache-path",
    "mmap_bin_files": "--no-mmap-bin-files",
    "mock": "--mock-data",
    "tokenizer": "--tokenizer-type",
    "fast_cache_load": "--dataloader-fast-cache-load",
    "defer_npy_index_mmap": "--dataloader-defer-npy-index-mmap",
    "create_attention_mask": "--no-create-attention-mask-in-dataloader",
    "sequences_per_dataset": "--per-dataset-sequences-path",
    "inter_document_masking": "--dataloader-inter-document-masking",
}
"""Fields of Megatron's data set whose flag has another name."""
NO_FLAG = {
    "split_matrix",  # of split
    "drop_last_partial_validation_sequence",
    "add_extra_token_to_sequence",
    "token_dtype_code",
    "data_parallel_size",
    "sequence_parallel_size",
}
"""Fields that no flag sets."""


def test_every_flag_of_every_version_is_judged_once() -> None:
    assert set(RECORD["about data"]) == set(fate_of_flag())
    assert not set(RECORD["about data"]) & set(RECORD["not about data"])
    assert all(RECORD["about data"].values()), "each is a flag of some version"


def test_the_page_is_made_of_the_record() -> None:
    assert (DOCS / "megatron_flags.md").read_text(encoding="utf-8") == list_flags.page_of(RECORD), "run list_flags.py"


def test_all_that_is_refused_is_on_the_page_as_refused() -> None:
    fates = fate_of_flag()
    of_scripts = {flag for group in SCRIPT_FLAGS for flag in group.flags.split()}
    for flag in set(refused_flags()) - of_scripts:
        assert fates[flag].fate == "refused", flag


@pytest.mark.parametrize("flag", [flag for flag, group in fate_of_flag().items() if group.fate == "refused"])
def test_what_the_page_says_to_be_refused_is(flag: str) -> None:
    if flag in BY_OTHER_MEANS:
        return
    with pytest.raises(RecipeError, match=f"{flag}: "):
        check_refusals(default_args(**{flag[2:].replace("-", "_"): "other"}), RECIPE, cp=1, pp=1)


def test_what_has_no_effect_is_no_error() -> None:
    given = {flag[2:].replace("-", "_"): 1 for flag, group in fate_of_flag().items() if group.fate == "no effect"}
    args = default_args(**given)
    with installed(args, core=True):
        check_refusals(args, RECIPE, cp=1, pp=1)
        check_batch_sizes(args, RECIPE.batch)


def test_what_has_no_effect_is_found_on_the_command_line() -> None:
    given = ["--split", "9,1,0", "--seq-length", "8", "--fim-pad-token=p", "--split=1", "--data-recipe", "num-workers"]
    assert without_effect(given) == ["--split", "--fim-pad-token"]
    named = ["--allow-ambiguous-pad-tokens", "--no-mmap-bin-files", "--object-storage-cache-path"]
    named += ["--mid-level-dataset-surplus", "--dataloader-fast-cache-load", "--sample-rate", "--fim-pad-token"]
    assert without_effect(named) == named


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("blended_megatron_dataset_config.py", "BlendedMegatronDatasetConfig"),
        ("gpt_dataset.py", "GPTDatasetConfig"),
    ],
)
def test_every_field_of_the_pinned_cores_data_set_is_judged(file: str, name: str) -> None:
    package = find_spec("megatron")
    if package is None or package.submodule_search_locations is None:
        pytest.skip("megatron-core is not installed")
    text = Path(next(iter(package.submodule_search_locations)), "core", "datasets", file).read_text(encoding="utf-8")
    (config,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name)
    fields = [each.target.id for each in config.body if isinstance(each, ast.AnnAssign)]  # type: ignore[union-attr]
    assert fields
    for field in fields:
        if field not in NO_FLAG:
            assert FLAG_OF_FIELD.get(field, f"--{field.replace('_', '-')}") in fate_of_flag(), field


def checkout_with(folder: Path, *flags: str) -> Path:
    """A checkout whose parser has these flags."""
    package = folder / "megatron" / "training"
    package.mkdir(parents=True)
    (folder / "megatron" / "__init__.py").touch()
    (package / "__init__.py").touch()
    added = "".join(f"    parser.add_argument({flag!r})\n" for flag in flags)
    (package / "arguments.py").write_text(f"def add_megatron_arguments(parser):\n{added}    return parser\n")
    return folder


def run_script(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> int:
    monkeypatch.setattr(sys, "argv", ["list_flags.py", *map(str, arguments)])
    code: int = list_flags.main()
    return code


@pytest.mark.slow
def test_a_flag_that_nobody_has_judged_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = checkout_with(tmp_path / "known", "--seed", "--swiglu")
    assert run_script(monkeypatch, f"0.16={known}") == 0
    assert capsys.readouterr().out == "0.16: 2 flags, all judged\n"
    monkeypatch.setattr(list_flags, "flags_of_checkout", lambda folder: ["--seed", "--data-shuffle-twice"])
    assert run_script(monkeypatch, tmp_path / "newer") == 1
    assert capsys.readouterr().err == "--data-shuffle-twice: nobody has said whether it is about data\n"


def test_the_page_is_not_written_of_versions_that_lack_a_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "megatron_flags.json").write_text(json.dumps({"not about data": ["--swiglu"]}))
    monkeypatch.setattr(list_flags, "flags_of_checkout", lambda folder: ["--seed", "--swiglu"])
    assert run_script(monkeypatch, tmp_path / "few", "--docs", tmp_path, "--write") == 1
    assert "--data-path: no version has it" in capsys.readouterr().err
    assert not (tmp_path / "megatron_flags.md").exists()


def test_the_record_and_the_page_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "megatron_flags.json").write_text(json.dumps({"not about data": ["--swiglu", "--gone"]}))
    flags = [*fate_of_flag(), "--swiglu"]
    versions = {"old": flags, "new": [flag for flag in flags if flag != "--split"]}
    monkeypatch.setattr(list_flags, "flags_of_checkout", lambda folder: versions[folder.name])
    assert run_script(monkeypatch, "old", "new", "--docs", tmp_path, "--write") == 0
    record = json.loads((tmp_path / "megatron_flags.json").read_text())
    assert record["not about data"] == ["--swiglu"]
    assert (record["about data"]["--split"], record["about data"]["--seed"]) == (["old"], ["old", "new"])
    page = (tmp_path / "megatron_flags.md").read_text()
    assert "| `--split` | old | no effect | `split` of the recipe |" in page
    assert "| `--seed` | all | model | " in page
