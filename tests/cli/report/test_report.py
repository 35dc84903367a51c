"""`torchmix report`: its figures are those of the run, and clicks lead from a jump of the loss to rows to take out."""

from __future__ import annotations

import json
import re
import shutil
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from tests.support.browser import CHROMIUM, Browser
from tests.support.image_sources import make_rows, write_source
from tests.support.plans_by_hand import reversed_plans
from tests.support.projects import make_indexed_project
from tests.support.reported_runs import EDITED_AT, SLOW, SPIKE, STEPS, TEXT, Ledger, loss_of, write_run
from torchmix.cli.main import command_parser, main
from torchmix.cli.report import command
from torchmix.cli.report.log import read_logs
from torchmix.cli.report.page import PageServer
from torchmix.cli.report.steps import rows_of_plan, spikes
from torchmix.errors import OptionError
from torchmix.parallel.topology import Topology

WORDS = ("recipe.yaml", "--state", "state.bin", "--log", "log.jsonl", "--micro-batch-size", "4")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no browser is installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def ledger(folder: Path) -> Ledger:
    return write_run(folder)


@pytest.fixture
def page(folder: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    assert main(["report", *WORDS, "--quiet"]) == 0
    return folder / "report.html"


def values_of(page: str) -> dict[str, Any]:
    [text] = re.findall(r'id="values">(.*?)</script>', page, re.DOTALL)
    values: dict[str, Any] = json.loads(text)
    return values


@pytest.mark.system
def test_every_figure_is_the_ledgers(page: Path, ledger: Ledger) -> None:
    text = page.read_text(encoding="utf-8")
    values = values_of(text)
    assert values["first"] == 0 and len(values["given"]) == len(ledger.tokens) == STEPS
    for step, delivered in ledger.tokens.items():
        given = dict(zip(values["streams"], values["given"][step], strict=True))
        assert {name: tokens for name, tokens in given.items() if tokens} == {n: t for n, t in delivered.items() if t}
        assert sum(values["asked"][step]) == pytest.approx(1)
    code = values["streams"].index("code")
    assert [values["asked"][step][code] for step in (7, 8, 14, 20)] == pytest.approx([0.3, 0.4, 0.4, 0.1])
    assert [one["step"] for one in values["edits"]] == list(EDITED_AT) and values["edits"][0]["keys"] == ["mixture"]
    assert [one["step"] for one in values["decisions"]] == [5, 9, 13, 17, 21, 25]
    counts = [ledger.workers_lost[step] for step in range(EDITED_AT[0])]
    rises = [(step, count - before) for step, (before, count) in enumerate(zip([0, *counts], counts, strict=False))]
    assert counts[-1] > 0, "step 5 waits for the decision behind step 3, so the worker that was killed has not made it"
    assert values["faults"] == [
        {"step": step, "text": f"rank 0: {rise} worker(s) lost and replaced"} for step, rise in rises if rise
    ]
    assert values["spikes"] == [SPIKE]
    for name in ("prose", "web"):  # what the policy was told
        for step, loss in values["losses"][name]:
            assert loss == pytest.approx(loss_of(name, step), abs=1e-6)
    assert max(values["waits"]["1"], key=lambda point: point[1]) == [SLOW, 0.5]
    assert set(values["details"]) == set(map(str, range(STEPS)))
    assert "http://" not in text.replace("http://www.w3.org/", "") and "https://" not in text


@pytest.mark.system
def test_texts_stand_as_text_and_rows_of_a_step_are_those_of_show(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    details = values_of(page.read_text(encoding="utf-8"))["details"]
    told = details[str(SPIKE)]["html"]
    assert "&lt;/script&gt;&lt;b&gt;bold" in told and TEXT not in told
    capsys.readouterr()
    assert main(["show", *WORDS[:3], *WORDS[5:], "--step", str(SPIKE), "--json"]) == 0
    samples = json.loads(capsys.readouterr().out)["samples"]
    shown = [f"{piece['source']}:{piece['row']}" for sample in samples for piece in sample["pieces"]]
    assert re.findall(r'data-row="([^"]+)"', told) == shown
    assert main(["show", *WORDS[:3], *WORDS[5:], "--step", "3", "--json"]) == 0
    samples = json.loads(capsys.readouterr().out)["samples"]
    wanted = [
        [sample["sample"], sample["dp_rank"], sample["microbatch"], piece["source"], piece["row"], piece["start"]]
        for sample in samples
        for piece in sample["pieces"]
    ]
    assert [piece[:6] for piece in details["3"]["pieces"]] == wanted


@needs_browser
@pytest.mark.system
def test_clicks_lead_from_a_jump_of_the_loss_to_a_tried_edit(
    page: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Browser() as browser:
        browser.look(1100)
        browser.open(page.as_uri())
        assert browser.value("document.getElementById('step-name').textContent") == f"Step {SPIKE}"
        assert browser.value("document.querySelectorAll('svg.chart').length") == 3
        x = browser.value("across(3)") / 960
        browser.click_at("#losses svg", x)
        browser.wait("document.getElementById('step-name').textContent === 'Step 3'")
        first = browser.value("run.details[3].pieces[0]")
        assert (
            browser.value("document.querySelector('#step-samples td').textContent").strip() == f"{first[3]}:{first[4]}"
        )
        browser.value("[...document.querySelectorAll('#events button')].find(b => b.textContent === 'step 5').click()")
        browser.wait("document.getElementById('step-name').textContent === 'Step 5'")
        browser.value(f"show({SPIKE})")
        assert "<b>bold</b>" in browser.value("document.getElementById('step-samples').textContent")
        assert browser.value("document.querySelectorAll('#step-samples b').length") == 0
        rows = browser.value(
            "[...document.querySelectorAll('p.of[data-row^=web]')].slice(0, 2).map(e => e.dataset.row)"
        )
        for row in rows:
            browser.click(f'input[data-mark="{row}"]')
        marked = "".join(f"{row}\n" for row in rows)
        browser.wait(f"document.getElementById('marked').value === {json.dumps(marked)}")
        assert not browser.value("document.getElementById('marked-section').hidden")
        browser.click("#step-after")
        browser.wait(f"document.getElementById('step-name').textContent === 'Step {SPIKE + 1}'")
        assert browser.value("document.getElementById('marked').value").count("\n") == 2, "marks stay"
        commands = browser.value("document.querySelector('#marked-section pre').textContent").splitlines()
        assert browser.errors() == [] and browser.requests() in ([page.as_uri()], [f"{page.as_uri()}#step-{SPIKE}"])
        browser.look(390)
        browser.wait("document.documentElement.clientWidth === 390")
        assert browser.value("document.documentElement.scrollWidth") <= 390
    copy = shutil.copytree(folder, tmp_path / "copy")  # an edit that is indexed leaves the catalog to itself
    monkeypatch.chdir(copy)
    (copy / "marked.txt").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    follow(commands, copy, capsys)


def follow(commands: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Do what the page says, from its marked rows to a plan of the edit."""
    code = ""
    for line in commands:
        words = line.partition("   #")[0].replace("STATE", "state.bin").replace("CODE", code).split()
        if words[0] == "cp":
            recipe = (folder / words[1]).read_text(encoding="utf-8")
            (folder / words[2]).write_text(recipe.replace("d.parquet", "deny.parquet"), encoding="utf-8")
            continue
        capsys.readouterr()
        assert main(words[1:]) == 0, line
        printed = capsys.readouterr().out
        code = code or next(iter(re.findall(r"\b[0-9a-f]{16}\b", printed if words[1] == "diff" else "")), "")
    assert code and "digest" in printed


@pytest.mark.system
def test_a_page_that_is_served_needs_the_token_and_reads_any_step(folder: Path, page: Path) -> None:
    arguments = command_parser().parse_args(["report", *WORDS, "--serve", "127.0.0.1:0"])
    with serving(arguments) as url:
        address, _, token = url.partition("?token=")
        assert len(token) >= 30
        for path in ("", "?token=", "?token=wrong", f"step?n=3&token={token[:-1]}", "live"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(address + path)
            with refused.value:
                assert refused.value.code == 403 and b"<script" not in refused.value.read()
        text = urllib.request.urlopen(url).read().decode()
        assert values_of(text)["details"] == {} and token not in text
        told = json.load(urllib.request.urlopen(f"{address}step?n=3&token={token}"))["html"]
        assert "sample 0: dp rank 0" in told
        with pytest.raises(urllib.error.HTTPError) as missing:
            urllib.request.urlopen(f"{address}step?n={STEPS}&token={token}")
        with missing.value:
            assert missing.value.code == 404
        assert json.load(urllib.request.urlopen(f"{address}live?token={token}")) == {"processes": [], "events": []}


@contextmanager
def serving(arguments: Any) -> Iterator[str]:
    """The verb, until the block ends; the address that it prints."""
    servers: list[PageServer] = []
    started = threading.Event()

    class Kept(PageServer):
        def run(self) -> None:
            servers.append(self)
            started.set()
            super().run()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "PageServer", Kept)
        thread = threading.Thread(target=command.run, args=(arguments,))
        thread.start()
        try:
            assert started.wait(60)
            yield servers[0].url
        finally:
            servers[0].close()
            thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("address", ["0.0.0.0:8000", "192.0.2.1:80", "8000", "127.0.0.1:x", "127.0.0.1:70000", ":80"])
def test_other_machines_are_not_served(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "recipe.yaml", "--serve", address]) == 2
    assert "127.0.0.1:" in capsys.readouterr().err


def test_losses_of_tensorboard_are_read_and_megatron_counts_from_one(tmp_path: Path) -> None:
    for name, tags, first in (("own", [], 0), ("megatron", ["lm loss"], 1)):
        folder = tmp_path / name
        folder.mkdir()
        records = b"".join(
            record(event(step + first, tag, value))
            for step, value in ((0, 4.5), (1, 4.25))
            for tag in (*tags, "loss/web", "torchmix/data_wait_s")
        )
        (folder / "events.out.tfevents.1").write_bytes(records + b"\x09cut off")
        log = read_logs([folder])
        assert log.losses == {"web": {0: 4.5, 1: 4.25}} and log.waits == {"0": {0: 4.5, 1: 4.25}}
        assert log.last_step == 1


def record(data: bytes) -> bytes:
    """A record of a TFRecord file; the checksums are not looked at."""
    return struct.pack("<Q", len(data)) + bytes(4) + data + bytes(4)


def event(step: int, tag: str, value: float) -> bytes:
    """An Event with one scalar."""
    scalar = b"\x0a" + bytes([len(tag)]) + tag.encode() + b"\x15" + struct.pack("<f", value)
    summary = b"\x0a" + bytes([len(scalar)]) + scalar
    return b"\x09" + struct.pack("<d", 1.0) + b"\x10" + bytes([step]) + b"\x2a" + bytes([len(summary)]) + summary


def test_a_log_that_is_none_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\nno json\n')
    with pytest.raises(OptionError, match=r"log.jsonl: line 2 is no JSON object"):
        read_logs([path])
    with pytest.raises(OptionError, match="no event file"):
        read_logs([tmp_path])
    with pytest.raises(OptionError, match="No such file"):
        read_logs([tmp_path / "none.jsonl"])


def test_a_jump_is_seen_in_noise_and_a_slow_rise_is_none() -> None:
    noisy = {step: 3.0 + 0.05 * ((step * 7) % 5) for step in range(60)}
    assert spikes({"a": noisy, "b": {step: 4 - step / 60 for step in range(60)}}, most=3) == []
    jump = {**noisy, 30: 5.0, 45: 4.0}
    assert spikes({"a": jump}, most=3) == [30, 45] and spikes({"a": jump}, most=1) == [30]
    assert spikes({}, most=3) == []


@pytest.mark.system
def test_steps_that_are_not_known_are_asked_for(folder: Path, page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "recipe.yaml", "--state", "state.bin", "--texts", str(STEPS)]) == 2
    assert f"the page has the steps 0 to {STEPS - 1}" in capsys.readouterr().err
    assert main(["report", "recipe.yaml", "--state", "state.bin", "--start", str(STEPS)]) == 2
    assert "give --state FILE, --log FILE or --steps N" in capsys.readouterr().err


@pytest.mark.system
def test_a_state_says_which_steps_and_its_recipe_lies_beside_it(
    folder: Path, page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    of_run = values_of(page.read_text(encoding="utf-8"))
    words = ["--log", str(folder / "log.jsonl"), "--micro-batch-size", "4", "--out", str(tmp_path / "state.html")]
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(folder / "state.bin"), *words, "--quiet"]) == 0
    of_state = values_of((tmp_path / "state.html").read_text(encoding="utf-8"))
    assert of_state.pop("command").startswith(f"{folder}/state.bin --steps {STEPS} --recipe {folder}/recipe.yaml --log")
    same = {key: value for key, value in of_run.items() if key not in ("command", "recipe")}
    assert {key: value for key, value in of_state.items() if key != "recipe"} == same
    words = [str(folder), "--steps", "10", "--out", str(tmp_path / "run.html"), "--quiet"]
    assert main(["report", *words]) == 0, "the folder of a run"
    of_some = values_of((tmp_path / "run.html").read_text(encoding="utf-8"))
    assert of_some["given"] == of_run["given"][:10] and of_some["edits"] == of_run["edits"][:1]
    assert main(["report", str(folder / "state.bin"), "--state", "other.bin"]) == 2
    assert "leave one of them out" in capsys.readouterr().err
    alone = shutil.copy(folder / "state.bin", tmp_path / "alone.bin")
    assert main(["report", str(alone)]) == 2 and "name it with --recipe" in capsys.readouterr().err


def test_the_page_of_a_plan_has_its_steps_as_they_were_placed_and_the_images_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_source(tmp_path, "pictures", "parquet", [make_rows(3, 60, most_side=40)], "dynamic")
    recipe = {
        "version": 1,
        "seed": 1,
        "batch": {"samples": 8, "length": 128},
        "sources": {"pictures": source},
        "mixture": {"pictures": "100%"},
        "modules": {"vision": {"items": "image", "sizes": "patches"}},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    of_plan = ("plan", "recipe.yaml", "--start", "2", "--steps", "3", "--dp", "2", "--micro-batch-size", "2")
    for words in (("index", "recipe.yaml"), (*of_plan, "--out", "plan"), ("report", "plan", "--texts", "3")):
        assert main([*words, "--quiet"]) == 0
    values = values_of((tmp_path / "report.html").read_text(encoding="utf-8"))
    steps = pq.read_table(tmp_path / "plan" / "steps.parquet").to_pydict()
    assert [values["first"] + number for number in range(3)] == steps["step"] == [2, 3, 4]
    assert values["digests"] == steps["order_digest"]
    assert [given for [given] in values["given"]] == steps["delivered_tokens"]
    pieces = pq.read_table(tmp_path / "plan" / "pieces.parquet").to_pydict()
    wanted = [
        [pieces[name][at] for name in ("sample", "dp_rank", "microbatch", "source", "row", "start", "tokens")]
        for at, step in enumerate(pieces["step"])
        if step == 2
    ]
    assert [piece[:7] for piece in values["details"]["2"]["pieces"]] == wanted
    rows = make_rows(3, 60, most_side=40)
    html = values["details"]["3"]["html"]
    shown = sum(bool(rows[pieces["row"][at]].images) for at, step in enumerate(pieces["step"]) if step == 3)
    assert html.count("<figure ") == shown > 0 and html.count('<img src="data:image/') == 2 * shown, "and what is made"
    capsys.readouterr()
    for words, said in (
        (("--steps", "9"), "ends before step 5"),
        (("--dp", "4"), "placed for 2"),
        (("--accept-edit", "x"), "are known"),
        (("--state", "s"), "leave one of them out"),
    ):
        assert main(["report", "plan", *words]) == 2 and said in capsys.readouterr().err
    recipe["seed"] = 2
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    assert main(["index", "recipe.yaml", "--quiet"]) == 0
    assert main(["report", "plan"]) == 2 and "that it was made from with --recipe" in capsys.readouterr().err


def test_the_page_of_a_plan_by_hand_shows_its_own_pieces_and_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_indexed_project(tmp_path)
    folder, plans = reversed_plans(recipe, Topology(dp=4))
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(folder), "--quiet"]) == 0
    values = values_of((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert values["digests"] == [plan.order_digest.hex() for plan in plans]
    for plan in plans[:-1]:
        assert values["details"][str(plan.step)]["pieces"] == rows_of_plan(plan)
