"""`torchmix plan RECIPE --loaders`, and `torchmix profile RECIPE --source`."""

from __future__ import annotations

import json

import msgspec
import pytest

from tests.support.projects import make_indexed_project
from tests.support.scaled_jobs import price, write_scaled_job
from torchmix.catalog.store import open_part
from torchmix.cli.main import main
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of
from torchmix.service.scale.loads import profile_of, write_profile
from torchmix.service.scale.partition import LOADER_BYTES


@pytest.fixture
def project(tmp_path):
    path = make_indexed_project(tmp_path)
    catalog = open_part(tmp_path / "catalog", part_of(load_recipe(path), "train"))
    profile = profile_of(catalog, 5, {"code": price(4000), "tiny": price(100), "web": price(1000)})
    write_profile(tmp_path / "catalog", profile)
    return path


def test_the_partition_is_shown_as_tables(project, capsys):
    assert main(["plan", str(project), "--loaders", "--cpu", "5", "--memory", "8GiB", "--explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    columns = ["source", "cost", "part", "cluster", "workers", "loaders", "state", "windows", "transform", "road"]
    assert lines[0].split() == columns
    assert [line.split()[0] for line in lines[1:4]] == ["code", "web", "tiny"]
    assert lines[1].split()[1:3] == ["3.277", "ms"]
    assert "4 loaders, 2" in lines[-1] and "of 5 processors and 8.0 GiB, less 1 processor(s)" in lines[-1]


def test_with_json_it_is_an_object(project, capsys):
    assert main(["plan", str(project), "--loaders", "--processes", "2", "--cpu", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["loaders"]) == 2 and found["slowest_over_mean"] <= 1.2
    assert all(one["memory_bytes"] > LOADER_BYTES for one in found["loaders"]), "with its process"
    for source in found["sources"]:
        placed = {
            str(k): one["parts"][source["name"]]
            for k, one in enumerate(found["loaders"])
            if source["name"] in one["parts"]
        }
        assert source["loaders"] == placed and placed


def test_where_rows_are_transformed_is_shown(project, capsys):
    catalog = open_part(project.parent / "catalog", part_of(load_recipe(project), "train"))
    prices = {"code": 4000, "tiny": 100, "web": 1000}
    sources = {
        name: msgspec.structs.replace(price(ns), read_bytes=1000, sent_bytes=4000) for name, ns in prices.items()
    }
    write_profile(project.parent / "catalog", profile_of(catalog, 5, sources))

    def places(nodes: int, transform_at: str) -> dict[str, str]:
        recipe = project.with_name("placed.yaml")
        recipe.write_text(f"{project.read_text()}\nloaders: {{where: job, cpu: 5, transform_at: {transform_at}}}\n")
        assert main(["plan", str(recipe), "--loaders", "--nodes", str(nodes), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["sources"]
        assert all(one["road_bytes"]["loader"] > one["road_bytes"]["worker"] for one in found if nodes == 1)
        return {one["name"]: one["transform_at"] for one in found}

    assert places(1, "auto") == {"code": "loader", "tiny": "worker", "web": "loader"}, "more than a loader's work"
    assert set(places(64, "auto").values()) == {"loader"}
    assert places(64, "{tiny: worker}")["tiny"] == "worker"
    assert set(places(1, "loader").values()) == {"loader"}


@pytest.mark.parametrize("where", ["ray", "job"])
def test_so_many_are_shown_as_the_recipe_says(project, capsys, where):
    recipe = project.with_name("counted.yaml")
    recipe.write_text(f"{project.read_text()}\nloaders: {{where: {where}, cpu: 8, processes: 3}}\n")
    assert main(["plan", str(recipe), "--loaders", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["loaders"]) == 3
    assert main(["plan", str(recipe), "--loaders"]) == 0
    assert ("each of them reads from all sources" in capsys.readouterr().out) == (where == "job")
    assert main(["plan", str(recipe), "--loaders", "--processes", "2", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["loaders"]) == 2
    assert main(["plan", str(recipe), "--loaders", "--cpu", "2"]) == 2
    assert "3 loader(s) need a processor each" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--cpu", "2", "--processes", "2"], 2, "2 loader(s) need a processor each beside 1 of the node worker"),
        (["--cpu", "8", "--memory", "120MiB"], 2, "give loaders.memory more"),
        (["--part", "validation"], 2, "loaders are sized by training"),
    ],
)
def test_what_cannot_be_is_said(project, capsys, words, code, says):
    assert main(["plan", str(project), "--loaders", *words]) == code
    assert says in capsys.readouterr().err


def test_with_autoscale_the_coming_decisions_are_shown(tmp_path, capsys):
    recipe = write_scaled_job(tmp_path, least=1, most=4, module="remote_map_of_plan")
    assert main(["plan", str(recipe), "--loaders", "--steps", "300", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["decisions"]
    assert [found[0], found[-1]["reason"], found[-1]["loaders"]] == [
        {"step": 0, "reason": "begin", "loaders": 4},
        "fewer",
        1,
    ]
    assert max(one["loaders"] for one in found) == 4
    assert main(["plan", str(recipe), "--loaders", "--steps", "300"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == [str(found[-1]["step"]), "fewer", "1"]


def test_a_profile_is_asked_for_by_name(tmp_path, capsys):
    path = make_indexed_project(tmp_path)
    assert main(["plan", str(path), "--loaders"]) == 3
    assert "run torchmix profile" in capsys.readouterr().err


def test_one_source_is_measured_in_this_process_and_nothing_is_written(tmp_path, capsys):
    path = make_indexed_project(tmp_path)
    assert main(["profile", str(path), "--source", "web", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["name"] == "web" and found["tokens"] > 0 and found["busy_ns"] > 0
    assert not (tmp_path / "catalog" / "profile.json").exists()
    assert main(["profile", str(path), "--source", "wep"]) == 2
    assert "did you mean 'web'" in capsys.readouterr().err
