"""A process that reads one shuffled window of a file: `python -m tests.support.store_window PLACE CATALOG`.

The file has column `input_ids`; it is indexed first, if it was not. Prints JSON: how many pages the window has, their
bytes, and a hash of its rows.
"""

from __future__ import annotations

import hashlib
import json
import sys

import numpy as np

import torchmix

WINDOW_PAGES = 16


def main(place: str, catalog: str) -> None:
    with torchmix.open_pages(place, tokens="input_ids", catalog=catalog, window_pages=WINDOW_PAGES) as pages:
        rows = pages.permuted_order(seed=1)[0]
        found = pages.read_rows(rows)
        table = pages._source.pages
        numbers = np.unique(table.page_of_rows(np.asarray(rows)))
        needed = int(table.place(numbers).num_bytes.sum())
        digest = hashlib.sha256(found.values.to_numpy().astype(np.int64).tobytes()).hexdigest()
        print(json.dumps({"pages": len(numbers), "needed": needed, "hash": digest}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
