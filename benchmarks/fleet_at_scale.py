"""Routing of shared loaders at up to 4,096 nodes: connections, requests, bytes, and how evenly pages are spread.

    python benchmarks/fleet_at_scale.py --out fleet.json

In: numbers of nodes. Out: for each a row of the table in docs/scale.md, as JSON. What is computed is pure: the owners
of pages by the routing that clients use, and counts that follow from it. No socket is opened and no byte is read, so it
says nothing of a network. Cost: seconds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from torchmix.service.messages import TARGET_BYTES
from torchmix.service.routing import SourceRoutes, loader_keys, owners, run_keys, source_keys
from torchmix.service.scale.partition import LoaderBudget, SourceLoad, partition

SOURCES = 306
"""As many as the paper has."""
LOADERS = 256
"""Loader processes of the job; as many at every size, as the work of a page does not grow with who asks."""
RANKS_OF_NODE = 8
SAMPLES_OF_NODE = 8
LENGTH = 8192
DOCUMENT_TOKENS = 1024
TOKEN_BYTES = 4
ROWS_OF_RUN = 256
"""Rows of a run of neighbouring pages, which has one owner."""
RUNS_OF_WINDOW = 64
"""Runs that a source's window has at least."""


def step_of(nodes: int, *, seed: int = 1) -> dict[str, float | int]:
    """Who asks whom for what in one step of a job of some nodes."""
    draw = np.random.default_rng(seed)
    keys = loader_keys([f"tcp://cpu-{number}:7700" for number in range(LOADERS)])
    names = source_keys([f"source-{number}" for number in range(SOURCES)])
    documents = nodes * SAMPLES_OF_NODE * LENGTH // DOCUMENT_TOKENS
    node = np.repeat(np.arange(nodes), documents // nodes)
    source = draw.integers(0, SOURCES, documents)
    # A window has twice the rows of a step, so that it is shuffled well, and a step draws rows from all of it.
    runs_of_window = max(RUNS_OF_WINDOW, 2 * documents // SOURCES // ROWS_OF_RUN)
    page = source * runs_of_window + draw.integers(0, runs_of_window, documents)
    pages, of_document = np.unique(page, return_inverse=True)
    hashes = run_keys(names[pages // runs_of_window], pages % runs_of_window)
    found: dict[str, float | int] = {
        "nodes": nodes,
        "loaders": LOADERS,
        "documents": documents,
        "connections_of_a_loader": nodes,
        "connections_of_a_loader_if_each_rank_asks": RANKS_OF_NODE * nodes,
        "pages_read_by_loaders": len(pages),
        "pages_read_if_each_node_reads": len(np.unique(node * (pages.max() + 1) + page)),
    }
    # Parts by the partition: sources of like cost, so each has as many loaders as there are for it.
    places = partition(
        [
            SourceLoad(name=f"source-{k}", cost=10**6, state_bytes=1, window_bytes=1, most_loaders=runs_of_window)
            for k in range(SOURCES)
        ],
        LoaderBudget(cpu=LOADERS, memory_bytes=1 << 62),
        processes=LOADERS,
    ).loaders
    parts = SourceRoutes([f"source-{k}" for k in range(SOURCES)], [place.parts for place in places]).parts
    assert parts is not None
    for what, of_source in (("over_all", None), ("by_partition", parts)):
        owner = np.concatenate(
            [
                owners(
                    hashes[start : start + 4096],
                    keys,
                    None if of_source is None else of_source[pages[start : start + 4096] // runs_of_window],
                )
                for start in range(0, len(pages), 4096)
            ]
        )[of_document]
        num_bytes = np.bincount(owner, minlength=LOADERS) * DOCUMENT_TOKENS * TOKEN_BYTES
        pairs, count = np.unique(node * LOADERS + owner, return_counts=True)
        files = len(np.unique(owner * SOURCES + source)) / LOADERS
        found |= {
            f"loaders_asked_by_a_node_{what}": len(pairs) / nodes,
            f"requests_{what}": int((-(-count * DOCUMENT_TOKENS * TOKEN_BYTES // TARGET_BYTES)).sum()),
            f"slowest_loader_over_mean_{what}": float(num_bytes.max() / num_bytes.mean()),
            f"sources_open_in_a_loader_{what}": files,
        }
    return found | {"bytes": documents * DOCUMENT_TOKENS * TOKEN_BYTES}


def main() -> None:
    """Compute all rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    for nodes in arguments.nodes:
        rows.append(step_of(nodes))
        print(json.dumps(rows[-1]), flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
