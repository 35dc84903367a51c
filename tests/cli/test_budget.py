"""What loaders may take: what the recipe says, or the machine, or the cluster."""

from __future__ import annotations

import msgspec

from tests.support.recipes import make_recipe
from torchmix.cli.run import budget_of
from torchmix.recipe.structs import Loaders
from torchmix.service.scale.loads import budget_of_cluster
from torchmix.steps.memory_budget import loader_budget

GIB = 1 << 30
BATCH = make_recipe({"web": "100%"}).batch


def recipe_of(**loaders):
    """A recipe with these loaders."""
    return msgspec.structs.replace(make_recipe({"web": "100%"}), loaders=Loaders(**loaders))


def test_the_node_worker_has_its_share_where_it_is_on_the_same_machines():
    shared = budget_of(recipe_of(cpu=8, memory="16GiB"))
    assert (shared.cpu, shared.node_cpu, shared.memory_bytes, shared.most_processes) == (8, 1, 16 * GIB, 7)
    assert shared.node_bytes > 0
    apart = budget_of(recipe_of(cpu=8, memory="16GiB", where="remote", endpoints="e"))
    assert (apart.node_cpu, apart.node_bytes, apart.most_processes) == (0, 0, 8)


def test_flags_come_before_the_recipe_and_the_machine_after_it():
    found = budget_of(recipe_of(cpu=8, memory="16GiB"), cpu=3, memory="2GiB")
    assert (found.cpu, found.memory_bytes) == (3, 2 * GIB)
    here = budget_of(recipe_of())
    assert here.cpu >= 1 and here.memory_bytes > 0


def test_machines_of_a_job_have_a_node_worker_each():
    one, four = (loader_budget(Loaders(where="job", cpu=8, memory="16GiB"), BATCH, nodes=n) for n in (1, 4))
    assert (four.cpu, four.node_cpu) == (4 * one.cpu, 4) and four.node_bytes == 4 * one.node_bytes


def test_a_cluster_gives_what_the_recipe_does_not_say():
    resources = {"CPU": 12.0, "memory": 5.0 * GIB}
    assert budget_of_cluster(None, None, resources).cpu == 12
    assert budget_of_cluster(None, None, resources).memory_bytes == 5 * GIB
    said = budget_of_cluster(4, GIB, resources)
    assert (said.cpu, said.memory_bytes, said.node_cpu) == (4, GIB, 0)
