from __future__ import annotations

import logging
import time
from collections.abc import Callable

import pytest

from torchmix.errors import SourceChanged, SourceUnreadable
from torchmix.storage.store_file import STORE_WAITS_S, try_again


class StatusError(Exception):
    """An error of a package, with the status that a server answered with."""

    def __init__(self, status: int) -> None:
        super().__init__(f"answered {status}")
        self.status = status


PASSING = [
    OSError("AWS Error NETWORK_CONNECTION during GetObject operation: curlCode: 7, Could not connect to server"),
    OSError("When reading: AWS Error SLOW_DOWN during GetObject operation: Please reduce your request rate"),
    OSError("AWS Error UNKNOWN (HTTP status 503) during HeadObject operation: No response body."),
    OSError("AWS Error INTERNAL_FAILURE during GetObject operation: Failed to flush response stream"),
    TimeoutError("timed out"),
    StatusError(500),
    StatusError(429),
]
LASTING = [
    (FileNotFoundError("Path does not exist 'b/a'"), "there is no such object; it was deleted or moved"),
    (OSError("AWS Error ACCESS_DENIED during HeadObject operation"), "refuses these credentials.*AWS_PROFILE"),
    (OSError("AWS Error NO_SUCH_BUCKET during ListObjectsV2 operation (Request ID: xyz)"), "ListObjectsV2 operation; "),
    (OSError("AWS Error UNKNOWN (HTTP status 400) during HeadObject operation"), "status 400"),
    (PermissionError("no"), "refuses these credentials"),
    (StatusError(403), "refuses these credentials"),
    (StatusError(404), "answered 404"),
    (ValueError("Invalid HF URI 'hf://datasets/o'"), "Invalid HF URI"),
]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    return waits


def failing(error: Exception, times: int) -> Callable[[], str]:
    left = [error] * times

    def attempt() -> str:
        if left:
            raise left.pop()
        return "content"

    return attempt


@pytest.mark.parametrize("error", PASSING, ids=str)
def test_what_may_pass_is_tried_again(waits, error: Exception, caplog) -> None:
    assert try_again(failing(error, 3), "source 'web': cannot read", "s3://b/a") == "content"
    assert waits == list(STORE_WAITS_S[:3])
    assert caplog.text.count("source 'web': cannot read: ") == 3


@pytest.mark.parametrize(("error", "says"), LASTING, ids=str)
def test_what_cannot_pass_is_told_at_once(waits, error: Exception, says: str) -> None:
    with pytest.raises(SourceUnreadable, match=f"source 'web': cannot read: .*{says}") as caught:
        try_again(failing(error, 1), "source 'web': cannot read", "s3://b/a")
    assert not waits and "Request ID" not in str(caught.value)


def test_what_stays_is_told_with_the_number_of_attempts(waits) -> None:
    with pytest.raises(SourceUnreadable, match="cannot read: timed out, 5 times; check the store") as caught:
        try_again(failing(TimeoutError("timed out"), 9), "cannot read", "s3://b/a")
    assert waits == list(STORE_WAITS_S) and isinstance(caught.value.__cause__, TimeoutError)


@pytest.mark.parametrize("error", [SourceChanged("another"), MemoryError()])
def test_errors_that_are_none_of_the_stores_are_not_altered(waits, error: Exception, caplog) -> None:
    caplog.set_level(logging.WARNING)
    with pytest.raises(type(error)):
        try_again(failing(error, 1), "cannot read", "s3://b/a")
    assert not waits and not caplog.text
