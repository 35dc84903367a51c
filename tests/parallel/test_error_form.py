from __future__ import annotations

import msgspec
import pytest

from torchmix.errors import RankLost, RecipeError
from torchmix.parallel.wire import MOST_TEXT, MOST_TRACEBACK, ErrorForm


def through(form: ErrorForm) -> ErrorForm:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(form), type=ErrorForm)


def test_an_error_travels_with_its_facts() -> None:
    found = through(ErrorForm.of(RankLost("rank 3 is gone", rank=3))).error()
    assert isinstance(found, RankLost) and found.rank == 3
    found = through(ErrorForm.of(RecipeError("no such key", "sources.web", 3))).error()
    assert isinstance(found, RecipeError) and found.where == "sources.web"


@pytest.mark.parametrize("text", ["x" * (1 << 20), "\ud800 half a surrogate"])
def test_any_text_is_made_to_fit(text: str) -> None:
    try:
        raise ValueError(text, True, 1 << 70, *range(100))
    except ValueError as raised:
        form = through(ErrorForm.of(raised, with_traceback=True))
    assert len(form.text) <= MOST_TEXT and 0 < len(form.traceback) <= MOST_TRACEBACK
    assert type(form.error()) is RuntimeError


@pytest.mark.parametrize("kind", ["annotations", "TYPE_CHECKING", "object", "__builtins__", "no_such_name"])
def test_only_errors_of_torchmix_are_looked_up(kind: str) -> None:
    assert type(ErrorForm(kind=kind, text="x", arguments=()).error()) is RuntimeError


@pytest.mark.parametrize(
    "plain", [[], ["", "x", []], ["A", "x" * (MOST_TEXT + 1), []], ["A", "x", [[1]]], {"kind": "A"}]
)
def test_what_is_damaged_or_too_long_is_refused(plain: object) -> None:
    with pytest.raises(msgspec.DecodeError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(plain), type=ErrorForm)
