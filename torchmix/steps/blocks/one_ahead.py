"""The next item is made while the present one is used.

In: an iterator, of which making an item waits for others. Out: its items, in order; what it fails with comes in the
place of its item. Must hold: at most one item is made beyond the one in use; the iterator runs in one thread, and is
closed only when that thread rests. Cost: a thread, and two changes of threads for each item.
"""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

Item = TypeVar("Item")


def one_ahead(items: Generator[Item, None, None]) -> Generator[Item, None, None]:
    """The same items; closing waits for the one at hand."""
    with ThreadPoolExecutor(1, "torchmix-ask") as thread:
        coming = thread.submit(next, items, None)
        try:
            while (item := coming.result()) is not None:
                coming = thread.submit(next, items, None)
                yield item
        finally:
            wait([coming])
            items.close()
