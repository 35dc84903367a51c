from __future__ import annotations

import logging
import os
import resource
import threading

import pytest

from tests.support.deadlines import LONG_S
from tests.support.processes import wait_until
from torchmix.catalog.publish import catalog_lock
from torchmix.errors import CatalogError


def test_a_second_holder_waits_with_a_message_that_names_the_first(tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="torchmix")
    order: list[str] = []

    def second() -> None:
        with catalog_lock(tmp_path / "catalog"):
            order.append("second")

    with catalog_lock(tmp_path / "catalog"):
        waiting = threading.Thread(target=second)
        waiting.start()
        wait_until(lambda: "waiting" in caplog.text, deadline_s=20, what="the message of the waiting thread")
        order.append("first")
    waiting.join(LONG_S)
    assert order == ["first", "second"]
    assert f"waiting for process {os.getpid()} on " in caplog.text and str(tmp_path / "catalog") in caplog.text


def test_the_lock_is_given_back_after_an_error_and_nobody_is_told_to_wait(tmp_path, caplog):
    with pytest.raises(RuntimeError), catalog_lock(tmp_path):
        raise RuntimeError
    with catalog_lock(tmp_path):
        pass
    assert caplog.text == ""


def test_a_folder_that_cannot_be_made_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(CatalogError, match=r"cannot write the catalog folder .*file/catalog"),
        catalog_lock(tmp_path / "file" / "catalog"),
    ):
        pass


def test_a_full_disk_leaves_the_lock_without_a_name(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with catalog_lock(tmp_path):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
