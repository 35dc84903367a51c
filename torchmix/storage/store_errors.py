"""What may go wrong with a store, and whether it passes.

In: an attempt, and what is attempted. Out: its result, or `SourceUnreadable` that says what failed, how often it was
tried, and what to do. Must hold: what cannot pass, as a missing object or refused credentials, is not tried again; all
else is, since stores have many names for a busy server. Cost: none where nothing fails.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from typing import TypeVar

from torchmix.errors import SourceUnreadable, TorchmixError
from torchmix.storage.stores import credentials_of

logger = logging.getLogger(__name__)

STORE_WAITS_S = (0.1, 0.5, 2.0, 5.0)
"""Waits before further attempts: throttling and restarts take seconds, and the store's client has tried already."""

MOST_CHARACTERS = 400
"""Most characters of a store's own words in a message."""

_LASTING_ERRORS = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
    TypeError,
    ValueError,
)
_LASTING = re.compile(r"AWS Error (ACCESS_DENIED|NO_SUCH_\w+|RESOURCE_NOT_FOUND|INVALID_ACCESS_KEY_ID|SIGNATURE_\w+)")
_REFUSED = re.compile(r"ACCESS_DENIED|INVALID_ACCESS_KEY_ID|SIGNATURE_|PERMISSION_DENIED|UNAUTHENTICATED")
_STATUS = re.compile(r"HTTP status (\d{3})|\bhttp[ =]?(\d{3})\b", re.IGNORECASE)
_PASSING_STATUS = (408, 425, 429)
_REQUEST_ID = re.compile(r"\s*\(Request ID: [^)]*\)")

Result = TypeVar("Result")


def try_again(attempt: Callable[[], Result], what: str, uri: str, where: str = "") -> Result:
    """What an attempt gives, tried again while it fails in a way that may pass.

    Args:
        attempt: What is tried; errors of this package are raised as they are.
        what: Begins messages: what is attempted.
        uri: Of what.
        where: Source and URI; empty where nobody knows the source.

    Raises:
        SourceUnreadable: It failed for good, or too often.
    """
    for number, wait_s in enumerate((*STORE_WAITS_S, None), 1):
        try:
            return attempt()
        except (TorchmixError, MemoryError):
            raise
        except Exception as error:  # packages of stores raise errors of their own
            if wait_s is None or not may_pass(error):
                raise SourceUnreadable(f"{what}: {text_of(error)}{_remedy(error, uri, number)}", where) from error
            logger.warning("%s: %s: %s; trying again in %s s", where or uri, what, text_of(error), wait_s)
            time.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")


def may_pass(error: Exception) -> bool:
    """Whether another attempt may do better."""
    if isinstance(error, _LASTING_ERRORS):
        return False
    status = _status_of(error)
    if status is not None:
        return not 400 <= status < 500 or status in _PASSING_STATUS
    return not (_LASTING.search(str(error)) or _REFUSED.search(str(error)))


def text_of(error: Exception) -> str:
    """An error on one line."""
    if isinstance(error, FileNotFoundError):
        return "there is no such object"
    text = _REQUEST_ID.sub("", " ".join(str(error).split())).rstrip(".:; ") or type(error).__name__
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} ..."


def is_refused(error: Exception) -> bool:
    """Whether the store refuses the credentials."""
    return isinstance(error, PermissionError) or _status_of(error) in (401, 403) or bool(_REFUSED.search(str(error)))


def _status_of(error: Exception) -> int | None:
    """The HTTP status that a store answered with, where the error tells."""
    for holder in (getattr(error, "response", None), error):
        status = getattr(holder, "status_code", None) or getattr(holder, "status", None)
        if isinstance(status, int):
            return status
    found = _STATUS.search(str(error))
    return int(found[1] or found[2]) if found is not None else None


def _remedy(error: Exception, uri: str, attempts: int) -> str:
    if isinstance(error, FileNotFoundError):
        return "; it was deleted or moved, or its name is another: put it back, or run torchmix index"
    if is_refused(error):
        return f"; the store refuses these credentials, which are looked for in {credentials_of(uri)}"
    times = f", {attempts} times" if attempts > 1 else ""
    return f"{times}; check the store and the connection to it, then start again from the last state"
