"""A process that reads single rows of source `web` and asks the kernel how many bytes it read for each.

    python -m tests.support.read_rows RECIPE ROW ROW ...

Prints one line of JSON per row: `kernel_bytes`, `page_bytes`, `dict_bytes` and `tokens`. The file of the rows is opened
and checked, and all code imported, by one read of row 0, whose bytes are not counted. What the kernel counts (rchar of
/proc/self/io: bytes of read calls of any file) includes our reading of that very counter, which is measured and taken
off.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from tests.support.catalogs import open_catalog
from torchmix.reader.protocol import WantedPieces
from torchmix.reader.reader import Reader
from torchmix.recipe.load import load_recipe


def kernel_bytes() -> int:
    """Bytes that this process has read by system calls."""
    text = Path("/proc/self/io").read_text()
    return int(text.split("rchar:")[1].split()[0])


def main() -> None:
    """Read the rows, one by one, each with a reader's cache that keeps no page."""
    path, rows = Path(sys.argv[1]), [int(row) for row in sys.argv[2:]]
    catalog = open_catalog(load_recipe(path), path.parent)
    web = catalog.sources["web"]
    reader = Reader(catalog, path.parent, cache_bytes=0)
    for row in [0, *rows]:
        tokens = web.sizes.tokens[[row]].astype(np.int64)
        asked = WantedPieces.end_to_end(source=0, row=np.array([row]), epoch=0, start=0, tokens=tokens)
        kernel_bytes()
        first = kernel_bytes()
        own_bytes = kernel_bytes() - first
        before = kernel_bytes()
        values = reader.read(asked).values
        read = kernel_bytes() - before - own_bytes
        place = web.pages.place(web.pages.page_of_rows(asked.row))
        if row == 0:
            continue
        report = {
            "kernel_bytes": read,
            "page_bytes": int(place.num_bytes[0]),
            "dict_bytes": int(web.pages.companion_bytes[place.chunk[0]]),
            "tokens": values.tolist(),
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
