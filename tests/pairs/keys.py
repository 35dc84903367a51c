"""The keys of a recipe and the kinds of their values, from its Structs; and which of them a recipe has.

In: nothing, or a checked recipe. Out: (key, kind) pairs, as ("Packing.method", "pad"). Must hold: a field that is
added to a Struct is in `kinds` at once. Kinds are the words of a Literal, the types of a union, and none.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from torchmix.recipe.structs import Recipe

Kind = tuple[str, str]
_FOLDER = "is replaced by what the folder says; tests of models' folders have it"
_SIZES = "is a rule of sizes, or a limit; tests of rules, of folders and of headers have it"
NOT_HERE: dict[Kind, str] = {
    ("Anyres.canvases", "none"): "the canvases of LLaVA-NeXT have 336 pixels a tile: more tokens than a sample here",
    ("Change.file", "text"): "is read into `mixture` with the recipe; the column `schedule` has it",
    ("Chat.tools", "text"): "rows of a template name no tools; tests of templates do",
    ("Chat.variables", "mapping"): "rows of a template have no variables; tests of templates do",
    ("Group.share", "none"): "children that share by sizes are names here",
    ("Anyres.most_tiles", "number"): _SIZES,
    ("Images.processor", "text"): _FOLDER,
}
"""What no row has, and why."""


@cache
def kinds() -> frozenset[Kind]:
    """Every key of a recipe with every kind of value that it may have."""
    found: set[Kind] = set()
    seen: set[type] = set()
    waiting: list[type] = [Recipe]
    while waiting:
        struct = waiting.pop()
        if struct in seen:
            continue
        seen.add(struct)
        info = inspect.type_info(struct)
        assert isinstance(info, inspect.StructType)
        for field in info.fields:
            for kind, inner in _kinds_of(field.type):
                found.add((f"{struct.__name__}.{field.name}", kind))
                waiting += inner
    return frozenset(found)


def _kinds_of(kind: inspect.Type) -> Iterator[tuple[str, list[type]]]:
    match kind:
        case inspect.UnionType():
            for one in kind.types:
                yield from _kinds_of(one)
        case inspect.LiteralType():
            for word in kind.values:
                yield str(word), []
        case inspect.NoneType():
            yield "none", []
        case inspect.StructType():
            yield "mapping", [kind.cls]
        case inspect.DictType():
            yield "mapping", _inside(kind.value_type)
        case inspect.VarTupleType():
            yield "list", _inside(kind.item_type)
        case inspect.TupleType():
            yield "list", []
        case inspect.AnyType():
            pass  # its keys are in no Struct
        case inspect.BoolType():
            yield from (("true", []), ("false", []))
        case _:
            yield {inspect.StrType: "text", inspect.IntType: "number", inspect.FloatType: "fraction"}[type(kind)], []


def _inside(kind: inspect.Type) -> list[type]:
    return [inner for _, inners in _kinds_of(kind) for inner in inners]


def kinds_in(value: Any) -> Iterator[Kind]:
    """The keys of a checked recipe, with the kind of value that each has."""
    if isinstance(value, msgspec.Struct):
        for field in msgspec.structs.fields(value):
            one = getattr(value, field.name)
            name = f"{type(value).__name__}.{field.name}"
            literals = {word for key, word in kinds() if key == name}
            yield name, one if isinstance(one, str) and one in literals else _kind_of(one)
            yield from kinds_in(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from kinds_in(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from kinds_in(one)


def _kind_of(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, msgspec.Struct | dict):
        return "mapping"
    if isinstance(value, list | tuple):
        return "list"
    return {str: "text", int: "number", float: "fraction", bool: str(value).lower()}[type(value)]
