from __future__ import annotations

import pytest

from torchmix import errors
from torchmix.errors import CorruptPage, RankLost, RecipeError, TorchmixError
from torchmix.parallel.error_form import ErrorForm
from torchmix.steps.worker.messages import (
    FailedReply,
    InWorker,
    StepRequest,
    decode_reply,
    decode_request,
    encode,
    error_of,
    failed_reply,
)


def through(error: Exception) -> Exception:
    """The error as the leader raises it."""
    try:
        raise error
    except Exception as raised:
        reply = decode_reply(encode(failed_reply(raised)))
    assert isinstance(reply, FailedReply)
    return error_of(reply)


OWN = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TorchmixError)]


@pytest.mark.parametrize("kind", OWN, ids=lambda kind: kind.__name__)
def test_an_error_keeps_its_class_and_its_text(kind: type[TorchmixError]) -> None:
    found = through(kind("source 'web': page 7 does not decode"))
    assert type(found) is kind
    assert str(found) == "source 'web': page 7 does not decode"


def test_an_error_keeps_its_facts() -> None:
    found = through(RecipeError("no such key", "sources.web", 3))
    assert isinstance(found, RecipeError)
    assert (found.message, found.where, found.line) == ("no such key", "sources.web", 3)
    lost = through(RankLost("rank 3 is gone", rank=3))
    assert isinstance(lost, RankLost) and lost.rank == 3


def test_where_it_happened_is_told_as_the_cause() -> None:
    cause = through(CorruptPage("x")).__cause__
    assert isinstance(cause, InWorker)
    assert "in the worker process" in str(cause) and "test_messages.py" in str(cause)


def test_any_other_error_is_named_and_nothing_is_looked_up_for_it() -> None:
    class TorchmixErrors(Exception):
        pass

    assert str(through(ZeroDivisionError("by 0"))) == "ZeroDivisionError: by 0"
    assert type(through(TorchmixErrors(object()))) is RuntimeError
    # A name of the module that is no error of torchmix.
    assert type(ErrorForm(kind="annotations", text="x", arguments=()).error()) is RuntimeError


def test_a_request_travels() -> None:
    assert decode_request(encode(StepRequest(released=[3, 1]))) == StepRequest(released=[3, 1])
