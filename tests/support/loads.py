"""Loads of sources, and the parts of a partition, for tests of loaders."""

from __future__ import annotations

import random

from torchmix.service.scale.partition import LoaderBudget, SourceLoad

GIB = 1 << 30
PLENTY = LoaderBudget(cpu=1 << 12, memory_bytes=1 << 50)


def load_of(name: str, cost: int, *, state: int = 1 << 20, window: int = 8 << 20, most_loaders: int = 64) -> SourceLoad:
    """A source."""
    return SourceLoad(name=name, cost=cost, state_bytes=state, window_bytes=window, most_loaders=most_loaders)


def random_loads(seed: int, *, most_loaders: int | None = None) -> list[SourceLoad]:
    """1 to 60 sources whose costs span five powers of ten; some may be shared by few loaders only."""
    chance = random.Random(seed)
    return [
        load_of(
            f"source-{number}",
            int(10 ** chance.uniform(4, 9)),
            state=int(10 ** chance.uniform(5, 8)),
            window=int(10 ** chance.uniform(5, 9)),
            most_loaders=most_loaders or chance.choice([1, 1, 2, 5, 64, 4096]),
        )
        for number in range(chance.randint(1, 60))
    ]
