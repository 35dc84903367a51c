"""A process that trains from a recipe, and says what it got:
`python -m tests.support.store_loader RECIPE FIRST_STATE STEPS LAST_STATE LOADERS`.

FIRST_STATE is the file of a state to go on from, LAST_STATE one that is written; either may be `-`. Prints, as the last
line, JSON: of each step its digest and a hash of its tokens, and what the reader did.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torchmix


def main(recipe: str, first_state: str, steps: int, last_state: str, loaders: str) -> None:
    hashes, digests = [], []
    with torchmix.build_loader(recipe, topology=torchmix.Topology.single(), loaders=loaders) as loader:
        if first_state != "-":
            loader.load_state_dict({"torchmix_state": Path(first_state).read_bytes()})
        step_hash = hashlib.sha256()
        for microbatch in loader:
            for field in (microbatch.tokens, microbatch.labels, microbatch.source_index):
                step_hash.update(field.numpy().tobytes())
            if not microbatch.is_last_of_step:
                continue
            hashes.append(step_hash.hexdigest())
            digests.append(loader.order_digest)
            step_hash = hashlib.sha256()
            if len(hashes) == steps:
                break
        if last_state != "-":
            Path(last_state).write_bytes(loader.state_dict()["torchmix_state"])
        stats = {name: value for name, value in loader.stats().items() if isinstance(value, int | float)}
    print(json.dumps({"hashes": hashes, "digests": digests, "stats": stats}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5])
