from __future__ import annotations

import gc
import socket
from typing import get_args

import pytest

from tests.support.every_key import REFUSED, kinds_of, not_shown, recipes_with_every_key
from torchmix import errors
from torchmix.errors import CorruptPage, RankLost, RecipeError, TorchmixError
from torchmix.parallel.place_tree import Layout
from torchmix.parallel.wire import ErrorForm
from torchmix.recipe.load import check_recipe
from torchmix.recipe.parts import Part, has_part, part_of
from torchmix.recipe.sources import PARTS
from torchmix.recipe.structs import Recipe
from torchmix.service.main import LoaderStart
from torchmix.steps.replica_steps import StreamSettings
from torchmix.steps.worker.messages import (
    AddMember,
    BlockRequest,
    Channel,
    FailedReply,
    InWorker,
    KeeperReply,
    ProcessBeat,
    Reply,
    Start,
    decode_reply,
    decode_request,
    decode_start,
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
    ours = CorruptPage("x")
    ours.__cause__ = KeyError("of a function of the user's")
    for error in (ZeroDivisionError("by 0"), ours):
        cause = through(error).__cause__
        assert isinstance(cause, InWorker)
        assert "in the worker process" in str(cause) and "test_messages.py" in str(cause)
    assert through(CorruptPage("x")).__cause__ is None, "its message says all"


def test_any_other_error_is_named_and_nothing_is_looked_up_for_it() -> None:
    class TorchmixErrors(Exception):
        pass

    assert str(through(ZeroDivisionError("by 0"))) == "ZeroDivisionError: by 0"
    assert type(through(TorchmixErrors(object()))) is RuntimeError
    # A name of the module that is no error of torchmix.
    assert type(ErrorForm(kind="annotations", text="x", arguments=()).error()) is RuntimeError


def test_a_request_travels() -> None:
    assert decode_request(encode(BlockRequest(released=[3, 1]))) == BlockRequest(released=[3, 1])


def parts_of(recipe: Recipe) -> list[Part]:
    parts = [part_of(recipe, name) for name in PARTS if has_part(recipe, name)]
    return [*parts, part_of(recipe, "train", one_pass=True)]


def start_of(part: Part) -> Start:
    settings = StreamSettings(part=part, base="/b", catalog_folder="/c", cache_bytes=1, replica=0, layout=Layout())
    return Start(settings=settings, state=b"s", consumer=0, replica_of={0: 0})


def test_a_part_of_a_recipe_with_any_key_travels() -> None:
    recipes = recipes_with_every_key()
    assert not_shown(Recipe, recipes) == set(REFUSED), "a recipe above needs a value for these, other than the default"
    parts = [part for recipe in recipes for part in parts_of(recipe)]
    assert not_shown(Part, parts) <= set(REFUSED) | {("Batch", "samples", "IntType")}
    for start in map(start_of, parts):
        assert decode_start(encode(start)) == start


@pytest.mark.parametrize(
    "message", [LoaderStart, Start, BlockRequest, *get_args(Reply), *get_args(KeeperReply), ProcessBeat, AddMember]
)
def test_messages_have_no_type_that_cannot_be_encoded(message: type) -> None:
    assert not {one for one in kinds_of(message) if one[2] in ("CustomType", "AnyType", "SetType")}


@pytest.mark.parametrize("ratio", [1e-17, 1e-30])
def test_what_is_held_out_travels_whatever_the_ratios_of_the_others_are(ratio: float) -> None:
    sources = {name: {"path": f"{name}.parquet", "tokens": "ids"} for name in ("a", "b", "c")}
    recipe = check_recipe(
        {
            "version": 1,
            "seed": 3,
            "batch": {"samples": 8, "length": 64},
            "sources": sources,
            "mixture": {"a": 1000, "b": ratio, "c": 1},
            "hold_out": {"validation": {"a": "1%", "b": "1%"}},
        }
    )
    start = start_of(part_of(recipe, "validation"))
    assert decode_start(encode(start)) == start


def test_a_channel_that_a_collector_finds_gives_its_socket_back_first() -> None:
    """Or its socket would warn that nobody has closed it, where a cycle holds both."""
    ours, theirs = socket.socketpair()
    with theirs:
        cycle: list[object] = [ours, Channel(ours)]  # the socket is the older object, and met first
        cycle.append(cycle)
        del ours, cycle
        gc.collect()
        assert theirs.recv(1) == b""
