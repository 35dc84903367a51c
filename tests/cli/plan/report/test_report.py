"""`torchmix plan --report`: one page whose numbers are the plan's, that asks for nothing outside of itself."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.support.catalogs import open_catalog
from tests.support.projects import make_indexed_project
from torchmix.cli.main import main
from torchmix.cli.plan.report import MOST_STREAMS, colors_of, mixture
from torchmix.parallel.place_tree import Layout
from torchmix.planner.balance import in_hash_order
from torchmix.planner.graph.drawing import drawing_of, states_of
from torchmix.planner.graph.strategy import backbone_cost
from torchmix.planner.plan import StepPlan
from torchmix.planner.planner import Planner, open_planner
from torchmix.planner.simulation import ASSUMPTIONS, ORDERS, bins_of
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of

pytest.importorskip("matplotlib")
STEPS = 5
NAME = "w<e&b$"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    path = make_indexed_project(folder, ("  web: {path", f"  '{NAME}': {{path"), ("{web: 79%", f"{{'{NAME}': 79%"))
    path.write_text(path.read_text() + f"modules: {{query: {{sources: ['{NAME}'], axis: WORLD}}}}\n")
    return path


@pytest.fixture(scope="module")
def page(recipe: Path) -> str:
    path = recipe.parent / "out.html"
    words = ("--simulate", "--steps", str(STEPS), "--dp", "4", "--tp", "2", "--report", str(path), "--quiet")
    assert main(["plan", str(recipe), *words]) == 0
    return path.read_text(encoding="utf-8")


def values_in(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="values">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    values: dict[str, Any] = json.loads(found[1])
    return values


def plans(recipe: Path) -> Iterator[tuple[Planner, StepPlan]]:
    loaded = load_recipe(recipe)
    planner = open_planner(part_of(loaded, "train"), open_catalog(loaded, recipe.parent), Layout(dp=4, tp=2))
    cursor = planner.start()
    for _ in range(STEPS):
        plan, cursor = planner.step(cursor)
        yield planner, plan


@pytest.mark.slow
def test_the_numbers_of_the_page_are_those_of_the_plan(recipe: Path, page: str) -> None:
    values = values_in(page)
    shown, found = values["shown"], list(plans(recipe))
    assert shown["steps"] == [plan.step for _, plan in found]
    assert shown["delivered_tokens"] == [plan.delivered_tokens.tolist() for _, plan in found]
    assert shown["balance_ratio"] == [plan.balance.ratio for _, plan in found]
    assert shown["hash_order_ratio"] == [plan.balance.hash_order_ratio for _, plan in found]
    assert shown["fill"] == [plan.fill for _, plan in found]
    assert values["plan"]["order_digest"] == found[-1][1].order_digest.hex()
    step = shown["shown_step"]
    planner, plan = found[step["step"]]
    gains = [one.balance.hash_order_cost / one.balance.cost for _, one in found]
    assert gains[step["step"]] == max(gains)
    cost = backbone_cost(planner.part).of_samples(plan.pieces.tokens, plan.sample, num_samples=16, length=256)
    assert step["plan"] == bins_of(cost, plan.placement, plan.layout).tolist()
    assert step["hash_order"] == bins_of(cost, in_hash_order(16, plan.layout), plan.layout).tolist()
    module, items = step["modules"]["query"], plan.item_modules["query"]
    assert np.array(module["plan"]).shape == (4, 2)
    assert np.array(module["plan"]).max() == items.balance.cost
    assert np.array(module["hash_order"]).max() == items.balance.hash_order_cost
    assert np.array(module["plan"]).sum() == items.cost_of_item.sum()
    lengths = shown["documents_by_length"]
    begun = [plan.pieces.document_tokens[plan.pieces.start == 0] for _, plan in found]
    expected = np.bincount(np.log2(np.concatenate(begun)).astype(int), minlength=32)
    assert np.array(list(lengths["documents"].values())).sum(axis=0).tolist() == expected.tolist()


def test_the_page_refers_to_nothing_outside_and_runs_nothing(page: str) -> None:
    class References(HTMLParser):
        found: list[tuple[str, str]] = []  # noqa: RUF012

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            for name, value in attrs:
                is_link = name.endswith(("src", "href", "action", "data", "srcset")) or name.startswith("on")
                if is_link and not (value or "").startswith(("#", "data:image/png;base64,")):
                    self.found.append((tag, f"{name}={value}"))
            if tag == "script" and ("type", "application/json") not in attrs:
                self.found.append((tag, "runs"))
            if tag in ("iframe", "link", "object", "embed", "base"):
                self.found.append((tag, ""))

    parser = References()
    parser.feed(page)
    assert parser.found == []
    assert not re.search(r"@import|url\((?!#)", page)


def test_every_chart_is_whole_and_says_its_names(page: str) -> None:
    charts = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    assert len(charts) == 7  # times, two heat maps, ratios, mixture, lengths, the drawn microbatch
    texts = ["".join(chart.itertext()) for chart in charts]
    assert "this plan" in texts[0] and "data-parallel rank" in texts[1] and "consumer in the replica" in texts[2]
    assert NAME in texts[4] and NAME in texts[5] and "bin: a rank's microbatch" in texts[6]
    step = values_in(page)["shown"]["shown_step"]
    grid = np.array(step["plan"])
    assert (
        f"this plan: the slowest sum to {grid.max(axis=0).sum() / grid.shape[1] / grid.mean():.3f} x the mean"
        in texts[1]
    )
    assert NAME not in page.split("<script")[0], "text of the recipe's is escaped"


def test_a_source_has_one_color_in_charts_and_drawing(page: str) -> None:
    shown = values_in(page)["shown"]
    colors = colors_of(shown["streams"], shown["delivered_tokens"])
    drawn = dict(re.findall(r'stroke="(#\w{6})"/><text[^>]*>([a-z]+)</text>', page[page.index("How pieces come") :]))
    assert drawn
    assert {name: color for color, name in drawn.items()}.items() <= colors.items()


def test_the_drawing_counts_the_pieces_of_a_source_in_a_sample(recipe: Path) -> None:
    plan = next(plans(recipe))[1]
    states = states_of(plan)
    groups = {
        f"{np.count_nonzero(which):,} of {source} in sample {sample}: {states['tokens'][which].sum():,} tokens"
        for sample in np.unique(states["sample"][states["bin"] == 1])
        for source in plan.sources
        if np.count_nonzero(which := (states["sample"] == sample) & (states["source"] == source))
    }
    most = len(groups)
    assert most < np.count_nonzero(states["bin"] == 1)
    chart = ElementTree.fromstring(drawing_of(plan, 1, most_pieces=most))
    titles = {node.text for node in chart.iter() if node.tag.endswith("title")}
    assert {text for text in titles if text and " in sample " in text} == groups
    assert "by source and sample; drawn are those of 4 of 4 ranks" in "".join(chart.itertext())
    assert "drawn are those of 1 of 4 ranks" in drawing_of(plan, 1, most_pieces=1)


def test_predicted_times_stand_with_all_that_is_assumed(page: str) -> None:
    found = values_in(page)["plan"]["simulation"]
    for name, ways in found["orders"].items():
        row = re.search(rf"<td>{name}</td>(.*?)</tr>", page)
        assert row is not None
        cells = re.findall(r"<td>([^<]*)</td>", row[1])
        assert cells[1::2] == [f"{ways[kind]['over_ideal']:.3f}" for kind in ("at_end", "each_microbatch")]
    assert list(found["orders"]) == list(ORDERS)
    for line in ASSUMPTIONS:
        assert f"<li>{line}</li>" in page.replace("&#x27;", "'").replace("&quot;", '"')


def test_without_a_simulation_there_are_no_times(recipe: Path, tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.html"
    assert main(["plan", str(recipe), "--steps", "1", "--quiet", "--report", str(path)]) == 2
    assert not path.parent.exists(), "a folder that may be mistyped is not made"
    path.parent.mkdir()
    assert main(["plan", str(recipe), "--steps", "1", "--quiet", "--report", str(path)]) == 0
    assert [each.name for each in path.parent.iterdir()] == ["out.html"]
    text = path.read_text(encoding="utf-8")
    assert "Predicted" not in text and "simulation" not in values_in(text)["plan"]
    assert len(re.findall("<svg", text)) == 6


@pytest.mark.slow
def test_the_same_plan_gives_the_same_page(recipe: Path, tmp_path: Path) -> None:
    pages = []
    for name in ("a.html", "b.html"):
        assert main(["plan", str(recipe), "--steps", "2", "--quiet", "--report", str(tmp_path / name)]) == 0
        pages.append(re.sub(r'<script type="application/json".*', "", (tmp_path / name).read_text(encoding="utf-8")))
    assert pages[0] == pages[1]  # but for the times that planning took


def test_many_streams_and_steps_are_summed(tmp_path: Path) -> None:

    streams = [f"s{number:02}" for number in range(30)]
    tokens = np.random.default_rng(1).integers(1, 100, (1000, 30))
    svg = mixture(list(range(1000)), streams, tokens.tolist(), colors_of(streams, tokens.tolist()))
    assert f"{30 - MOST_STREAMS + 1} others" in svg and len(svg) < 300_000


def test_a_missing_package_is_named(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plan", str(recipe), "--steps", "1", "--report", str(tmp_path / "out.html")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
