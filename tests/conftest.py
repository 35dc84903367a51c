"""For all tests: what is imported by then is not looked through by each garbage collection to come; what they have
started for each other ends with them; no test hangs for ever, and none copies a catalog into the user's cache.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import shutil
import tempfile
import threading
from pathlib import Path

import pytest

from tests.support.deadlines import pytest_configure, pytest_runtest_protocol  # noqa: F401  # hooks
from tests.support.forks import close_fork_servers
from tests.support.threads import EARLIER

COPIES = tempfile.mkdtemp(prefix="torchmix-copies-")
os.environ["TORCHMIX_CACHE"] = COPIES


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Each process of a whole run imports a share of the modules first: what it has compiled, the others then read."""
    number, count = (os.environ.get(f"PYTEST_XDIST_WORKER{word}", "") for word in ("", "_COUNT"))
    if not number or session.config.args_source is pytest.Config.ArgsSource.ARGS:
        return
    for path in sorted(Path(__file__).parent.rglob("test_*.py"))[int(number[2:]) :: int(count)]:
        name = ".".join(path.relative_to(session.config.rootpath).with_suffix("").parts)
        with contextlib.suppress(Exception, pytest.skip.Exception):  # told when it is collected
            importlib.import_module(name)


def pytest_collection_finish() -> None:
    """After all modules of tests, and with them torch and pyarrow, are imported."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup() -> None:
    """Before the fixtures of a test."""
    EARLIER.clear()
    EARLIER.update(threading.enumerate())


def pytest_sessionfinish() -> None:
    """After all tests."""
    close_fork_servers()
    shutil.rmtree(COPIES, ignore_errors=True)
