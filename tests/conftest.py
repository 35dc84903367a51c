"""For all tests: what is imported by then is not looked through by each garbage collection to come."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """After all modules of tests, and with them torch and pyarrow, are imported."""
    gc.collect()
    gc.freeze()
