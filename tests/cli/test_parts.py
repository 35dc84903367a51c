"""Parts and ramps on the command line: planned alone, checked together, indexed at once."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.catalogs import open_catalog
from tests.support.command_line import values_of
from tests.support.projects import make_project
from torchmix.cli.main import main
from torchmix.errors import PlanError
from torchmix.parallel.topology import Topology
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of
from torchmix.stateful.open import build_loader

SPLIT = ("balance:", "split: [60, 40]\nbalance:")
HELD = """\
validation:
  sources: {held: {path: code.parquet, text: text, tokenizer: bytes, documents: [50%, 100%]}}
  mixture: {held: 100%}
balance:"""
OWN = ("balance:", HELD)
RAMP = ("samples: 16", "samples: [{from_step: 0, samples: 4}, {from_step: 3, samples: 8}]")


def test_a_part_is_planned_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_project(tmp_path, SPLIT)
    assert main(["index", str(recipe)]) == 0
    values = {
        part: values_of(capsys, "plan", str(recipe), "--steps", "3", "--part", part) for part in ("train", "validation")
    }
    epochs = {part: [one["epoch_tokens"] for one in each["sources"]] for part, each in values.items()}
    catalog = open_catalog(load_recipe(recipe), tmp_path)
    whole = [source.num_tokens for source in catalog.sources.values()]
    assert [train + rest for train, rest in zip(*epochs.values(), strict=True)] == whole
    assert values["train"]["order_digest"] != values["validation"]["order_digest"]
    assert values["train"]["catalog_fingerprint"] == values["validation"]["catalog_fingerprint"]
    assert main(["plan", str(recipe), "--steps", "3", "--part", "validation"]) == 0
    assert "steps 0 to 2 of validation of " in capsys.readouterr().out


def test_a_state_of_a_pass_is_one_of_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_project(tmp_path)
    assert main(["index", str(recipe)]) == 0
    for name, one_pass in (("pass", True), ("run", False)):
        with build_loader(recipe, topology=Topology(), loaders="in_process", one_pass=one_pass, start_step=1) as loader:
            (tmp_path / name).write_bytes(loader.state_dict()["torchmix_state"])
    plan, of_run = ("plan", str(recipe), "--steps", "2"), ("--state", str(tmp_path / "run"))
    of_pass = ("--state", str(tmp_path / "pass"))
    assert main([*plan, *of_run]) == main([*plan, "--one-pass", *of_pass]) == 0
    capsys.readouterr()
    other = tmp_path / "other.yaml"
    other.write_text(recipe.read_text().replace("seed: ", "seed: 1"))  # an edit that no state goes on with
    for words in ([*plan, *of_pass], ["diff", str(recipe), str(other), *of_pass]):
        assert main(words) == 3
        assert "go on with one_pass=True (`torchmix plan --one-pass`)" in capsys.readouterr().err
    assert main([*plan, "--one-pass", *of_run]) == 3
    assert "is of a run, " in capsys.readouterr().err


def test_one_pass_is_planned_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_project(tmp_path, SPLIT)
    assert main(["index", str(recipe)]) == 0
    out = tmp_path / "plan"
    words = ("plan", str(recipe), "--part", "validation", "--one-pass", "--out", str(out))
    values = values_of(capsys, *words)
    assert values["has_ended"] is True
    table = pq.read_table(out / "pieces.parquet")
    documents = set(zip(table["source"].to_pylist(), table["row"].to_pylist(), strict=True))
    catalog = open_catalog(load_recipe(recipe), tmp_path)
    rows = {name: source.num_documents for name, source in catalog.sources.items()}
    assert {name: sum(each == name for each, _ in documents) for name in rows} == {
        name: int((catalog.sources[name].sizes.tokens[round(0.6 * count) :] > 0).sum()) for name, count in rows.items()
    }
    assert main(list(words)) == 0
    assert f"one pass: after step {values['num_steps'] - 1} every document" in capsys.readouterr().out
    short = values_of(capsys, *words[:5], "--steps", "2")
    assert (short["has_ended"], short["num_steps"]) == (False, 2)
    assert main(["plan", str(recipe)]) == 2
    assert "give --steps N, or --one-pass" in capsys.readouterr().err


def test_index_builds_the_catalog_of_all_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_project(tmp_path, OWN)
    values = values_of(capsys, "index", str(path))
    assert [one["name"] for one in values["sources"]] == ["code", "held", "tiny", "web"]
    recipe = load_recipe(path)
    assert values["catalog_fingerprint"] == open_catalog(recipe, tmp_path).fingerprint
    assert list(open_catalog(part_of(recipe, "validation"), tmp_path).sources) == ["held"]


def test_check_looks_at_the_files_of_all_parts_and_forecasts_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_project(tmp_path, OWN)
    assert main(["index", str(recipe)]) == 0
    train = values_of(capsys, "check", str(recipe), "--steps", "5")
    assert [one["name"] for one in train["sources"]] == ["code", "tiny", "web"]
    held = values_of(capsys, "check", str(recipe), "--steps", "5", "--part", "validation")
    assert [one["name"] for one in held["sources"]] == ["held"]
    gone = recipe.read_text().replace("held: {path: code.parquet", "held: {path: gone.parquet")
    recipe.write_text(gone)
    values = values_of(capsys, "check", str(recipe), "--steps", "5", code=3)
    assert "validation.sources.held.path" in [one["where"] for one in values["findings"]]
    assert [one["name"] for one in values["sources"]] == ["code", "tiny", "web"], "training is forecast all the same"


def test_check_finds_a_part_that_would_give_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_project(tmp_path, ("balance:", "split: [999, 1]\nbalance:"))
    assert main(["index", str(recipe)]) == 0
    values = values_of(capsys, "check", str(recipe), "--steps", "5", code=1)
    [finding] = [one for one in values["findings"] if one["level"] == "finding"]
    assert finding["where"] == "validation"
    small = ["none of the 300 rows of source 'code' lies in its 99.9% to 100%", "none of the 6 rows of source 'tiny'"]
    assert finding["message"].startswith(f"{small[0]}; {small[1]}"), "its part stands in `where` alone"
    values = values_of(capsys, "check", str(recipe), "--steps", "5", "--part", "validation", code=1)
    [finding] = [one for one in values["findings"] if one["level"] == "finding"]
    assert finding["message"].startswith(f"validation: {small[0]}") and values["sources"] == []
    with pytest.raises(PlanError, match=small[0]):
        build_loader(recipe, topology=Topology(), part="validation")


def test_a_ramp_is_shown_by_its_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_project(tmp_path, RAMP)
    assert main(["index", str(recipe)]) == 0
    capsys.readouterr()
    out = tmp_path / "plan"
    assert main(["plan", str(recipe), "--steps", "5", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert ": 4 to 8 samples x 256 tokens, dp 1" in text
    assert "of 1,024 to 2,048 tokens a step" in text
    steps = pq.read_table(out / "steps.parquet").to_pylist()
    assert [one["capacity_tokens"] for one in steps[::3]] == [1024, 1024, 1024, 2048, 2048]
    assert main(["plan", str(recipe), "--start", "3", "--steps", "2"]) == 0
    assert ": 8 samples x 256 tokens" in capsys.readouterr().out
    values = values_of(capsys, "check", str(recipe), "--steps", "40")
    assert values["capacity_tokens"] == (3 * 1024 + 37 * 2048) // 40
