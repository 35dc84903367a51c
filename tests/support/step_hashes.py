"""What a loader gives, as a hash of all tensors of each whole step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

from tests.support.node_rank import hash_of
from torchmix.constructor.fields import Microbatch


def hashes_of_steps(
    microbatches: Iterable[Microbatch], *, after: Callable[[Microbatch], None] = lambda _: None
) -> dict[int, str]:
    """By step; `after` is called with each microbatch."""
    steps: dict[int, str] = {}
    found = hashlib.sha256()
    for microbatch in microbatches:
        hash_of(microbatch, found)
        if microbatch.is_last_of_step:
            steps[microbatch.step] = found.hexdigest()
            found = hashlib.sha256()
        after(microbatch)
    return steps
