"""Do all ranks of a job mean the same job?

In: what each rank was given, as short texts by name, and the job's store. Out: nothing, or an error on every rank that
differs from rank 0. Must hold: it is asked before groups are made, since ranks that mean different groups wait for each
other without a word. Cost: one key in the store, read once by every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from torchmix.errors import RecipeError

_num_asked = 0
"""Loaders this process has asked for; equal on all ranks."""


def agree(
    tell: Callable[[str, str], object], ask: Callable[[str], bytes], *, rank: int, facts: Mapping[str, str]
) -> None:
    """Compare what this rank was given with rank 0. A collective: all ranks call it, in the same order.

    Args:
        tell: Writes a value under a key of the job's store (torch's `Store.set`).
        ask: Reads one, and waits until it is there (`Store.get`).
        rank: Global rank.
        facts: Name -> value, as a message may show them; the names are the same on all ranks of one torchmix.

    Raises:
        RecipeError: This rank differs from rank 0; names what, with both values.
    """
    global _num_asked
    _num_asked += 1
    key = f"torchmix/agreement/{_num_asked}"
    if rank == 0:
        tell(key, msgspec.json.encode(dict(facts)).decode())
        return
    first = msgspec.json.decode(ask(key), type=dict[str, str])
    differences = [
        f"{name} {facts.get(name, 'missing')}, rank 0 {first.get(name, 'missing')}"
        for name in sorted({*facts, *first})
        if facts.get(name) != first.get(name)
    ]
    if differences:
        raise RecipeError(
            f"build_loader: rank {rank} was given other values than rank 0: {'; '.join(differences)}. Give all ranks "
            "the same"
        )
