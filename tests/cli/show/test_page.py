"""`torchmix show --html` and what `torchmix check` says of images."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from tests.support.chats import write_chats
from tests.support.image_sources import ImageRow, make_rows, write_source
from tests.support.scaled_jobs import price
from torchmix.catalog.store import open_part
from torchmix.cli.main import main
from torchmix.cli.plan.command import module_lines
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of
from torchmix.service.scale.loads import ItemProfile, profile_of, write_profile

Capture = pytest.CaptureFixture[str]


def write_recipe(folder: Path, *, length: int) -> dict[str, list[ImageRow]]:
    """A recipe over two sources, one with many more patches than the other."""
    rows: dict[str, list[ImageRow]] = {}
    sources: dict[str, Any] = {}
    for name, most_side in (("large", 90), ("small", 10)):
        rows[name] = [
            ImageRow(text=f"<b>&{name}-{i} {row.text}", images=row.images)
            for i, row in enumerate(make_rows(4, 60, most_side=most_side))
        ]
        sources[name] = write_source(folder, name, "parquet", [rows[name]], "dynamic")
    recipe = {
        "version": 1,
        "seed": 3,
        "batch": {"samples": 8, "length": length},
        "sources": sources,
        "mixture": {"large": "30%", "small": "70%"},
        "modules": {"vision": {"items": "image", "sizes": "patches"}},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return rows


def test_a_page_has_the_images_of_a_step(tmp_path: Path, capsys: Capture) -> None:
    rows = write_recipe(tmp_path, length=256)
    recipe, page = str(tmp_path / "recipe.yaml"), tmp_path / "step.html"
    assert main(["index", recipe, "--quiet"]) == 0
    assert main(["show", recipe, "--step", "1", "--dp", "2", "--html", str(page)]) == 0
    assert "wrote 8 samples of step 1" in capsys.readouterr().out
    content = page.read_text(encoding="utf-8")
    made = re.findall(r"<details><summary>what an encoder gets</summary>(.*?)</details>", content)
    for one in made:
        content = content.replace(one, "")
    images = [base64.b64decode(data) for data in re.findall(r'src="data:image/\w+;base64,([^"]*)"', content)]
    assert len(made) == len(images) and all("data:image/png" in one for one in made)
    known = {row.image for of_source in rows.values() for row in of_source}
    assert len(images) > 10 and set(images) <= known
    assert content.count("vision: consumer ") == len(images)
    assert main(["show", recipe, "--step", "1", "--dp", "2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["samples"]
    with_image = {(name, i) for name, of_source in rows.items() for i, row in enumerate(of_source) if row.image}
    pieces = [(piece["source"], piece["row"]) for sample in shown for piece in sample["pieces"]]
    assert len(images) == sum(piece in with_image for piece in pieces)
    assert "<b>" not in content and "&lt;b&gt;&amp;large-" in content


def test_check_names_the_source_that_the_encoder_works_for(tmp_path: Path, capsys: Capture) -> None:
    write_recipe(tmp_path, length=32)
    recipe = str(tmp_path / "recipe.yaml")
    assert main(["index", recipe, "--quiet"]) == 0
    capsys.readouterr()
    main(["check", recipe, "--steps", "3", "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    told = [finding["message"] for finding in findings if finding["where"] == "sources.large.images"]
    assert any("of the encoders' work, and its share of the tokens is 30%" in message for message in told), told
    assert any("lie across the end of a sample of 32 tokens" in message for message in told), told
    capsys.readouterr()
    page = str(tmp_path / "x.html")
    assert main(["show", recipe, "--step", "0", "--html", page, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"file": page, "step": 0, "samples": 8}
    part = part_of(load_recipe(tmp_path / "recipe.yaml"), "train")
    catalog = open_part(tmp_path / "catalog", part)
    items = ItemProfile(items=9, tokens=9, source_tokens=9, read_ns=0, decode_ns=9, file_bytes=9, unit_bytes=9)
    costs = {"large": price(1), "small": replace(price(1), items={"image": items})}
    costs["large"] = replace(price(1), items={"image": replace(items, decode_ns=900)})
    write_profile(tmp_path / "catalog", profile_of(catalog, part.seed, costs))
    capsys.readouterr()
    main(["check", recipe, "--steps", "3", "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    [told] = [finding for finding in findings if "the time that decoding takes" in finding["message"]]
    assert told["where"] == "sources.large.images" and "are 98% of the time" in told["message"]


def test_check_names_images_that_no_module_encodes(tmp_path: Path, capsys: Capture) -> None:
    write_recipe(tmp_path, length=256)
    recipe = tmp_path / "recipe.yaml"
    assert main(["index", str(recipe), "--quiet"]) == 0
    written = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    told = {}
    for sources in (None, ["large"]):
        written["modules"]["vision"]["sources"] = sources
        recipe.write_text(yaml.safe_dump(written), encoding="utf-8")
        capsys.readouterr()
        code = main(["check", str(recipe), "--steps", "3", "--json"])
        findings = json.loads(capsys.readouterr().out)["findings"]
        told[code] = [each["where"] for each in findings if "are encoded by no module: vision" in each["message"]]
    assert told == {0: [], 1: ["sources.small.images"]}


def test_check_and_plan_say_how_many_rows_travel_and_what_fell_back(tmp_path: Path, capsys: Capture) -> None:
    write_recipe(tmp_path, length=256)
    recipe, told = tmp_path / "recipe.yaml", {}
    assert main(["index", str(recipe), "--quiet"]) == 0
    written = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    for near in (None, "0%", "50%"):
        written["modules"]["vision"]["near_text"] = near
        recipe.write_text(yaml.safe_dump(written), encoding="utf-8")
        words = [str(recipe), "--steps", "6", "--dp", "8"]
        capsys.readouterr()
        assert main(["plan", *words, "--json"]) == 0
        planned = json.loads(capsys.readouterr().out)["modules"]["vision"]
        main(["check", *words, "--json"])
        checked = json.loads(capsys.readouterr().out)["modules"]["vision"]
        assert planned == checked and planned["num_steps"] == 6
        told[near] = planned
        away, rows = planned["rows_that_travel"], planned["rows"]
        assert planned["steps_left_text"] == planned["steps_in_hash_order"] == 0
        for verb in ("plan", "check"):
            main([verb, *words, "--quiet"])
            lines = capsys.readouterr().out
            assert f"traffic   vision: {away:,} of {rows:,} rows travel to another replica (" in lines
    assert told["50%"]["rows_that_travel"] < told["0%"]["rows_that_travel"] < told[None]["rows_that_travel"]
    fell_back = {**told["0%"], "steps_left_text": 2, "steps_in_hash_order": 1}
    assert module_lines({"vision": fell_back})[1].endswith("; left the text in 2 and took hash order in 1 of 6 steps")
    main(["check", str(recipe), "--steps", "6"])
    assert "traffic" not in capsys.readouterr().out, "one rank encodes all"


def test_what_has_no_loss_is_marked(tmp_path: Path, capsys: Capture) -> None:
    chats: Any = [[("user", f"what <b>{i}</b>"), ("assistant", f"this {i}")] for i in range(20)]
    recipe = {
        "version": 1,
        "seed": 3,
        "batch": {"samples": 4, "length": 128},
        "sources": {"chats": write_chats(tmp_path, "chats", "jsonl", [chats])},
        "mixture": {"chats": 1},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    assert main(["index", str(tmp_path / "recipe.yaml")]) == 0
    page = tmp_path / "step.html"
    assert main(["show", str(tmp_path / "recipe.yaml"), "--step", "0", "--html", str(page)]) == 0
    capsys.readouterr()
    shown = re.findall(r"<pre>(.*?)</pre>", page.read_text(), re.DOTALL)
    asked = re.compile(
        r'<span class="no-loss">User: what &lt;b&gt;(\d+)&lt;/b&gt;\nAssistant: </span>this (\d+)\n.*', re.DOTALL
    )
    found = [asked.fullmatch(text) for text in shown]
    assert len(found) > 4 and all(match is not None and match[1] == match[2] for match in found)
