"""Runs on hosts that share a bucket and no disk: steps, histories, views and deny-lists are those of a folder."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.catalog_hosts import ADDRESS, emptied_store
from tests.support.loaders import run_job
from tests.support.selections import write_rows
from tests.support.step_hashes import hashes_of_steps
from torchmix.catalog import in_store
from torchmix.catalog.in_store import CACHE_VARIABLE, catalog_folder
from torchmix.catalog.store import open_part
from torchmix.cli.main import main
from torchmix.errors import PlanDiverged, RecipeError, StateMismatch
from torchmix.indexing.scan import index
from torchmix.parallel.topology import Topology
from torchmix.planner.plans import plan
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of
from torchmix.service.main import LoaderStart, parts_with_catalog
from torchmix.service.scale.loads import SourceProfile, profile_of, read_profile, write_profile

STEPS = 4
RECIPE = """\
version: 1
seed: 3
batch: {samples: 8, length: 64}
sources:
  web: {path: "web/*.parquet", tokens: ids, id: url, properties: [lang, quality]}
  code: {path: code.parquet, tokens: ids}
  good: {from: web, where: quality > 0.5}
mixture: {web: 40%, good: 30%, code: 30%}
packing: {align_tokens: 1}
shuffle: {window_pages: 4}
deny: [deny.parquet]
hold_out: {validation: {web: 5%}}
"""
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    with emptied_store():
        yield Hosts(tmp_path, monkeypatch)


class Hosts:
    """One recipe with its catalog in a folder, and one with it in a store."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._monkeypatch = folder, monkeypatch
        write_rows(folder / "web" / "0.parquet", 0, 400)
        write_rows(folder / "code.parquet", 10_000, 200)
        pq.write_table(pa.table({"source": ["web", "code"], "row": [3, 8]}), folder / "deny.parquet")
        self.recipes = {"folder": "catalog", "store": ADDRESS}
        self.at("indexer").write(RECIPE)
        index(self.both[1])  # that of the folder is built by the first loader

    @property
    def both(self) -> list[Path]:
        """The recipes, that of the folder first."""
        return [self.folder / f"{name}.yaml" for name in self.recipes]

    def write(self, text: str) -> None:
        """Edit both recipes."""
        for path, catalog in zip(self.both, self.recipes.values(), strict=True):
            path.write_text(f"{text}catalog: {catalog}\n")

    def at(self, name: str) -> Hosts:
        """What follows happens on a host of this name."""
        self._monkeypatch.setenv(CACHE_VARIABLE, str(self.folder / "hosts" / name))
        return self

    def train(self, recipe: Path, state: Any = None, **options: Any) -> tuple[dict[int, str], Any]:
        """Hashes of some steps, and the state after them."""
        found: dict[int, str] = {}

        def program(loader: Any, _: Any) -> None:
            for _step, one in zip(range(STEPS), steps_of(loader), strict=False):
                found.update(one)

        [rank] = run_job(recipe, Topology(), state=state, program=program, **options)
        return found, rank.state


def steps_of(loader: Any) -> Iterator[dict[int, str]]:
    """Each step of a loader by itself."""
    held = []
    for microbatch in loader:
        held.append(microbatch)
        if microbatch.is_last_of_step:
            yield hashes_of_steps(held)
            held = []


def said(capsys: Capture, *words: object) -> Any:
    """What a command prints as JSON."""
    assert main([*map(str, words), "--json"]) in (0, 1), capsys.readouterr().err
    values = json.loads(capsys.readouterr().out)
    return {name: value for name, value in values.items() if name not in ("recipe", "planning_ms")}


@pytest.mark.slow
def test_a_run_goes_on_and_is_edited_and_traced_on_hosts_that_have_never_seen_it(hosts, capsys, tmp_path) -> None:
    runs = []
    for recipe in hosts.both:
        hosts.write(RECIPE)
        first, state = hosts.at("first").train(recipe)
        second, state = hosts.at("second").train(recipe, state)
        hosts.write(RECIPE.replace("good: 30%, code: 30%", "good: 10%, code: 50%"))
        with pytest.raises(StateMismatch) as refused:
            hosts.at("third").train(recipe, state)
        [word] = re.findall(r"accept_edit='([0-9a-f]{16})'", str(refused.value))
        third, state = hosts.train(recipe, state, accept_edit=word)
        runs.append({**first, **second, **third})
    assert runs[0] == runs[1] and len(runs[0]) == 3 * STEPS
    (tmp_path / "state").write_bytes(state["torchmix_state"])
    hosts.at("laptop")
    for words in (
        ["trace", "--row", "web:7", "--row", "code:9", "--state", tmp_path / "state"],
        ["plan", "--steps", 3 * STEPS, "--dp", 2],
        ["check", "--steps", 20],
        ["query", "SELECT lang, count(*) AS n FROM web GROUP BY lang ORDER BY lang"],
        ["show", "--step", 2 * STEPS + 1, "--state", tmp_path / "state"],
    ):
        near, far = (said(capsys, words[0], recipe, *words[1:]) for recipe in hosts.both)
        assert near == far and near, words
    near, far = ([one.order_digest for one in plan(recipe, steps=STEPS)] for recipe in hosts.both)
    assert near == far and len(near) == STEPS


@pytest.mark.slow
def test_earlier_rows_of_a_run_are_there_after_index_runs_that_remove(hosts, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setattr(in_store, "LEFT_S", -1.0)
    recipe = hosts.both[1]
    _, state = hosts.at("first").train(recipe)
    (tmp_path / "state").write_bytes(state["torchmix_state"])
    looked = ["trace", recipe, "--row", "web:7", "--state", tmp_path / "state"]
    before = said(capsys, *looked)
    for number in (1, 2, 3):
        write_rows(hosts.folder / "web" / f"{number}.parquet", number * 1000, 50)
        index(hosts.at("indexer").both[1], force=True)
    hosts.at("later")
    with pytest.raises(StateMismatch) as refused:
        hosts.train(recipe, state)
    [word] = re.findall(r"accept_edit='([0-9a-f]{16})'", str(refused.value))
    _, state = hosts.train(recipe, state, accept_edit=word)
    (tmp_path / "state").write_bytes(state["torchmix_state"])
    after = said(capsys, *looked)
    assert [one for one in after["pieces"] if one["step"] < STEPS] == before["pieces"]


def test_who_may_not_write_trains_and_is_warned(hosts, monkeypatch, caplog) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError("no")

    import fsspec

    near, _ = hosts.train(hosts.both[0])
    monkeypatch.setattr(fsspec.filesystem("memory"), "open", refused, raising=False)
    far, _ = hosts.at("guest").train(hosts.both[1])
    assert far == near and "the history of this run is not kept (cannot write" in caplog.text


def test_a_profile_is_measured_on_one_host_and_used_on_another(hosts) -> None:
    whole = load_recipe(hosts.both[1])
    part = part_of(whole, "train")
    one = SourceProfile(
        tokens=1000,
        busy_ns=1,
        cpu_ns=2,
        read_bytes=3,
        decoded_bytes=4,
        sent_bytes=5,
        window_bytes=6,
        state_bytes=7,
        pages=8,
    )
    folder = catalog_folder(hosts.folder, ADDRESS)
    catalog = open_part(folder, part)
    profile = profile_of(catalog, whole.seed, dict.fromkeys(catalog.sources, one))
    assert write_profile(folder, profile) == f"{ADDRESS}/profile.json"
    start = LoaderStart(
        parts={"train": part}, base=str(hosts.folder), catalog_folder=ADDRESS, cache_bytes=1 << 20, bind=""
    )
    hosts.at("loader")
    assert read_profile(start.fetched_catalog(), open_part(start.fetched_catalog(), part), whole.seed) == profile
    assert str(start.fetched_catalog()).startswith(str(hosts.folder / "hosts" / "loader"))


@pytest.mark.slow
def test_hosts_that_have_opened_other_catalogs_do_not_train(hosts, monkeypatch) -> None:
    recipe = hosts.both[1]
    fetch = in_store.refresh

    def refresh(folder: Path) -> None:
        fetch(folder)
        monkeypatch.setattr(in_store, "refresh", fetch)
        write_rows(hosts.folder / "web" / "1.parquet", 1000, 300)
        index(hosts.at("indexer").both[1])  # the first leader has what was published before
        hosts.at("second")

    monkeypatch.setattr(in_store, "refresh", refresh)
    hosts.at("first")
    has = r"rank \d has [0-9a-f]{16}"
    with pytest.raises(PlanDiverged, match=rf"differ: {has}, {has} \(good, web with other rows\)\. Give all"):
        run_job(recipe, Topology(dp=2), steps=2)


@pytest.mark.slow
def test_a_loader_of_another_host_finds_the_catalog_that_a_run_began_with(hosts) -> None:
    recipe = hosts.both[1]
    part = part_of(load_recipe(recipe), "train")
    hosts.at("first")
    run_job(recipe, Topology(), steps=1, keep=False)
    before = open_part(catalog_folder(hosts.folder, ADDRESS), part)
    write_rows(hosts.folder / "web" / "1.parquet", 1000, 300)
    index(hosts.at("indexer").both[1])
    hosts.at("loader")
    start = LoaderStart(
        parts={"train": part}, base=str(hosts.folder), catalog_folder=ADDRESS, cache_bytes=1 << 20, bind=""
    )
    found, present = (
        parts_with_catalog(start.parts, start.fetched_catalog(), hosts.folder, wanted)["train"].catalog
        for wanted in (before.fingerprint, "")
    )
    assert found.fingerprint == before.fingerprint != present.fingerprint
    assert found.sources["web"].num_documents == before.sources["web"].num_documents
    assert str(found.directory).startswith(str(hosts.folder / "hosts" / "loader"))


def test_kept_ids_are_refused_beside_it(hosts) -> None:
    (hosts.folder / "texts.yaml").write_text(
        "version: 1\nseed: 1\nbatch: {samples: 2, length: 64}\nsources: {a: {path: a.jsonl, text: t, tokenizer: bytes, "
        f"keep: tokens}}}}\nmixture: {{a: 1}}\ncatalog: {ADDRESS}\n"
    )
    with pytest.raises(RecipeError, match=r"sources\.a\.keep: ids are kept in a folder, and the catalog is memory://"):
        load_recipe(hosts.folder / "texts.yaml")
