"""The `loaders` of a recipe, and what stands in their place."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from torchmix.errors import OptionError, RecipeError
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.load import check_recipe
from torchmix.recipe.loaders import loaders_of
from torchmix.recipe.structs import Autoscale, Loaders

RECIPE: dict[str, Any] = {
    "version": 1,
    "seed": 3,
    "batch": {"samples": 8, "length": 64},
    "sources": {"web": {"path": "web.parquet", "tokens": "ids"}},
    "mixture": {"web": "100%"},
}


def test_a_recipe_without_the_key_reads_in_a_node_worker() -> None:
    assert check_recipe(RECIPE).loaders == Loaders(where="node", spares=0, cpu=None, memory=None)


def test_loaders_are_no_part_of_the_order() -> None:
    given = {"where": "remote", "spares": 2, "cpu": 3, "memory": "5GiB", "endpoints": "./e", "keys": "./k"}
    given["autoscale"] = {"min": 2, "max": 7}
    recipe = check_recipe({**RECIPE, "loaders": given})
    assert msgspec.to_builtins(recipe.loaders) == {
        **given,
        "processes": 1,
        "address": None,
        "transform_at": None,
    }
    assert recipe_fingerprint(recipe) == recipe_fingerprint(check_recipe(RECIPE))


@pytest.mark.parametrize(
    ("loaders", "match"),
    [
        (
            {"where": "nodes"},
            r"loaders\.where.*'nodes' is not one of in_process, node, job, ray, remote \(did you mean 'node'\?\)",
        ),
        ({"spare": 1}, r"loaders\.spare: .*did you mean 'spares'"),
        ({"spares": -1}, r"loaders\.spares: -1 is not in \[0, 16\]"),
        ({"spares": 17}, r"loaders\.spares: 17 is not in"),
        ({"cpu": 0}, r"loaders\.cpu: 0 is not in \[1, 4096\]"),
        ({"where": "remote"}, r"loaders: `remote` needs endpoints"),
        ({"where": ["node", "remote"]}, r"loaders: `remote` needs endpoints"),
        (
            {"where": ["remote", "node"]},
            r"where: \[remote, node\]: .* behind them reads nothing; write \[node, remote\]",
        ),
        (
            {"where": ["job", "ray"]},
            r"where: \[job, ray\]: only a node sees .*; write \[node, job\] or \[node, ray\]",
        ),
        ({"where": ["node", "job", "remote"]}, r"has one owner .* 2 kinds; write \[node, job\] or \[node, remote\]"),
        ({"where": ["node", "node", "job"]}, r"where: \[node, node, job\] names one of them twice"),
        ({"where": ["job"]}, r"where: \[job\] names 1 of those who read, .*: write `where: job`"),
        ({"where": []}, r"loaders\.where: \[\] names 0 of those who read"),
        ({"where": ["node", "in_process"]}, r"where\[1\]: text 'in_process' is not one of node, job, ray, remote"),
        ({"where": ["node", "job"], "keys": "./k"}, r"keys: only `where: remote` and .*, and this is `\[node, job\]`"),
        ({"where": ["node", "remot"]}, r"loaders\.where\[1\]: .*'remot' is not one of .*did you mean 'remote'"),
        ({"processes": 2}, r"loaders\.processes: only `where: job`, .* have processes, and this is `node`: remove it"),
        ({"where": "job", "processes": 0}, r"loaders\.processes: 0 is not in \[1, 256\], nor auto"),
        ({"where": "job", "processes": "many"}, r"loaders\.processes: text 'many' is not one of auto"),
        ({"where": "job", "processes": 1.5}, r"loaders\.processes: expected a whole number or auto, got 1\.5"),
        (
            {"where": "node", "address": "auto"},
            r"loaders\.address: only `where: ray` and .*have address, and this is `node`",
        ),
        ({"transform_at": "auto"}, r"loaders\.transform_at: only `where: job`, .*this is `node`"),
        ({"where": "job", "transform_at": "here"}, r"loaders\.transform_at: text 'here' is not one of auto, loader"),
        ({"where": "job", "transform_at": {"a": "rank"}}, r"loaders\.transform_at\.a: text 'rank' is not one of"),
        ({"where": "ray", "processes": 3, "autoscale": {"min": 1, "max": 2}}, r"3 processes and autoscale contradict"),
        ({"where": "job", "keys": "./k"}, r"loaders\.keys: only `where: remote` and .* have keys"),
        ({"endpoints": "tcp://a:1"}, r"loaders\.endpoints: only `where: remote` and .* have endpoints"),
        ({"keys": "./keys"}, r"loaders\.keys: only `where: remote` and .* have keys"),
        ({"where": "ray", "address": ""}, r"loaders\.address: is empty; write HOST:PORT"),
        ({"where": "node", "autoscale": {"min": 1, "max": 2}}, r"loaders\.autoscale: only `where: job`, .*: remove it"),
        ({"where": "in_process", "cpu": 2}, r"loaders\.cpu: only .*: the threads of a trainer are not bounded"),
        (
            {"where": "remote", "endpoints": "e", "processes": 3, "autoscale": {"min": 1, "max": 2}},
            r"3 processes and autoscale contradict",
        ),
        (
            {"where": "ray", "autoscale": {"min": 3, "max": 2}},
            r"loaders\.autoscale: min 3 and max 2: 1 <= min <= max <= 4096",
        ),
        ({"where": "ray", "autoscale": {"min": 3}}, r"loaders\.autoscale.*max"),
        ({"memory": "8 gigs"}, r"loaders\.memory: '8 gigs' is not a size"),
    ],
)
def test_wrong_values_are_named(loaders: dict[str, Any], match: str) -> None:
    with pytest.raises(RecipeError, match=match):
        check_recipe({**RECIPE, "loaders": loaders})


@pytest.mark.parametrize(
    "instead",
    [
        "job,spares=2",
        " where = job , spares = 2 ",
        {"where": "job", "spares": 2},
        Loaders(where="job", spares=2, memory="1GiB"),
    ],
)
def test_a_call_overrides_some_keys_and_leaves_the_others(instead: Any) -> None:
    found = loaders_of("build_loader", Loaders(memory="1GiB"), instead)
    assert found == Loaders(where="job", spares=2, memory="1GiB")


@pytest.mark.parametrize(
    "recipe", [Loaders(where="job", processes=3), Loaders(where="remote", endpoints="tcp://a:1", keys="./k")]
)
def test_a_call_that_names_another_where_drops_the_keys_of_the_recipe_s(recipe: Loaders) -> None:
    assert loaders_of("build_loader", recipe, "in_process") == Loaders(where="in_process")
    assert loaders_of("build_loader", recipe, {"cpu": 2}) == msgspec.structs.replace(recipe, cpu=2)


def test_a_node_that_reads_first_is_a_list_in_yaml_and_two_words_in_a_call() -> None:
    given = {"where": ["node", "remote"], "endpoints": "./e", "keys": "./k", "cpu": 2}
    recipe = check_recipe({**RECIPE, "loaders": given}).loaders
    assert recipe.where == ("node", "remote") and recipe.asked == "remote" and recipe.is_node_first
    assert loaders_of("build_loader", recipe, "cpu=3") == msgspec.structs.replace(recipe, cpu=3)
    assert loaders_of("build_loader", recipe, "remote") == msgspec.structs.replace(recipe, where="remote")
    assert loaders_of("build_loader", recipe, "node") == Loaders(cpu=2)
    served = Loaders(where="remote", endpoints="./e")
    assert loaders_of("build_loader", served, "node,remote,cpu=1").where == ("node", "remote")
    assert loaders_of("build_loader", served, "node,job,processes=2") == Loaders(where=("node", "job"), processes=2)


def test_a_call_leaves_the_bounds_of_scaling_to_modes_that_scale() -> None:
    scaled = Loaders(where="ray", autoscale=Autoscale(min=1, max=3), cpu=4)
    assert loaders_of("build_loader", scaled, "spares=1") == msgspec.structs.replace(scaled, spares=1)
    assert loaders_of("build_loader", scaled, "node,spares=1") == Loaders(spares=1, cpu=4)
    assert loaders_of("build_loader", scaled, "in_process") == Loaders(where="in_process")


def test_a_call_that_says_nothing_leaves_the_recipe_its_loaders() -> None:
    loaders = Loaders(where="node", cpu=2)
    assert loaders_of("build_loader", loaders, None) is loaders


@pytest.mark.parametrize(
    ("instead", "match"),
    [
        ("nod", r"build_loader: loaders='nod': .*did you mean 'node'"),
        ("node,spares=x", "spares: expected a whole number"),
        ("node,memories=3", "did you mean 'memory'"),
        ({"cpu": -3}, r"cpu: -3 is not in"),
        (1, "loaders=1: expected a word of `where`"),
    ],
)
def test_a_wrong_value_of_a_call_is_named(instead: Any, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        loaders_of("build_loader", Loaders(), instead)
