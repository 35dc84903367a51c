"""How many loaders a run may have, and what is known of their work, from what the user says.

In: the recipe's `loaders`, what a cluster has, a catalog with or without its profile. Out: what the autoscaler's rule
takes. Must hold: a number of loaders needs no profile; `auto` and `autoscale` do. Cost: a partition.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from torchmix.catalog.open_part import open_part
from torchmix.catalog.store import Catalog
from torchmix.errors import CatalogMissing
from torchmix.recipe.loader_structs import Autoscale
from torchmix.recipe.parts import Part
from torchmix.service.scale.loads import ComingLoads
from torchmix.service.scale.partition import LoaderBudget, partition
from torchmix.service.scale.profile import CostProfile, SourceProfile, profile_of, read_profile
from torchmix.service.scale.rule import ScaleBounds

FIRST_STEPS = 100
"""Whose load decides how many loaders `auto` is."""
_EVEN_TOKENS = 1000


def coming_loads(part: Part, folder: Path, *, is_profile_needed: bool = True) -> ComingLoads:
    """What the steps of a part cost.

    Args:
        part: That of training.
        folder: The catalog's.
        is_profile_needed: Whether each token of every source must not count alike where there is no profile.

    Raises:
        CatalogMissing, CatalogStale: There is no profile, or it is of another catalog.
    """
    catalog = open_part(folder, part)
    try:
        return ComingLoads(part, catalog, read_profile(folder, catalog, part.seed))
    except CatalogMissing:
        if is_profile_needed:
            raise
    return ComingLoads(part, catalog, _even_profile(catalog, part.seed))


def bounds_of(
    processes: int | Literal["auto"], autoscale: Autoscale | None, coming: ComingLoads, budget: LoaderBudget
) -> ScaleBounds:
    """How many loaders there may be: as `autoscale` says, else one number.

    Raises:
        OptionError: The budget does not suffice.
    """
    if autoscale is not None:
        return ScaleBounds(least=autoscale.min, most=autoscale.max, budget=budget)
    count = len(partition(coming.mean(0, FIRST_STEPS), budget).loaders) if processes == "auto" else processes
    return ScaleBounds(least=count, most=count, budget=budget)


def budget_of_cluster(cpu: int | None, memory_bytes: int | None, resources: Mapping[str, float]) -> LoaderBudget:
    """What loaders on a Ray cluster may take: what the recipe says, or else all of the cluster.

    Args:
        cpu, memory_bytes: The recipe's, if it says so.
        resources: The cluster's, as Ray names them: `CPU`, and `memory` in bytes.
    """
    return LoaderBudget(
        cpu=cpu or max(1, int(resources.get("CPU", 1))),
        memory_bytes=memory_bytes or int(resources.get("memory", 1 << 62)),
    )


def _even_profile(catalog: Catalog, seed: int) -> CostProfile:
    """A profile by which a token of every source costs the same, and memory is no matter."""
    one = SourceProfile(
        tokens=_EVEN_TOKENS,
        busy_ns=_EVEN_TOKENS,
        cpu_ns=0,
        read_bytes=0,
        decoded_bytes=0,
        sent_bytes=0,
        window_bytes=0,
        state_bytes=0,
        pages=1,
    )
    return profile_of(catalog, seed, dict.fromkeys(catalog.sources, one))
