"""Plain values -> Structs.

In: plain values, from YAML or `msgspec.to_builtins`. Out: the Struct of a given type. This file checks shape and type,
so that a typo never becomes a default; `checks.py` checks what the values mean.

Must hold: an error names the path of keys, and the nearest valid name where there is one. Costs microseconds per key.
"""

from __future__ import annotations

import difflib
import functools
import types
from collections.abc import Iterable
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from torchmix.errors import RecipeError, key_path

_TYPE_WORDS = {str: "text", int: "a whole number", float: "a number", type(None): "nothing"}
_LIST_WORDS = {str: "texts", int: "numbers"}


def build(kind: Any, value: Any, where: str = "") -> Any:
    """Build a value of the type `kind` from plain values.

    Args:
        kind: A msgspec Struct, `dict[str, X]`, a Literal, a scalar or tuple type, or a union of these.
        value: What YAML or `msgspec.to_builtins` gave.
        where: The path of keys of `value`, for errors.

    Raises:
        RecipeError: Unknown or missing key, wrong type, or a word that is not among the valid ones.
    """
    choices = get_args(kind) if get_origin(kind) in (types.UnionType, Union) else (kind,)
    if value is None and type(None) in choices:
        return None
    has_other = any(_is_plain(choice) for choice in choices)
    for choice in choices:
        if _is_mapping(choice) and has_other and not isinstance(value, dict):
            continue
        if _is_struct(choice):
            return _build_struct(choice, value, where)
        item = get_args(choice)[0] if get_origin(choice) is tuple else None
        is_built = item is not None and (_may_be_struct(item) or get_origin(item) is Literal)
        if is_built and isinstance(value, list | tuple):
            return tuple(build(item, one, f"{where}[{i}]") for i, one in enumerate(value))
        if get_origin(choice) is dict:
            of_values = get_args(choice)[1]
            return {
                name: build(of_values, item, key_path(where, name)) for name, item in _mapping(value, where).items()
            }
        if get_origin(choice) is Literal:
            words = get_args(choice)
            if not isinstance(value, str) and len(choices) > 1:
                continue
            if not isinstance(value, str) or value not in words:
                raise RecipeError(f"{_shown(value)} is not one of {listed(words)}{nearest(value, words)}", where)
            return value
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        expected = " or ".join(map(_type_words, choices))
        raise RecipeError(f"expected {expected}, got {_shown(value)}", where) from error


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _may_be_struct(kind: Any) -> bool:
    return any(map(_is_struct, get_args(kind) or (kind,)))


def _is_mapping(kind: Any) -> bool:
    return _is_struct(kind) or get_origin(kind) is dict


def _is_plain(kind: Any) -> bool:
    """Whether a type is neither a mapping nor None, so that a plain value may be meant for it."""
    return not _is_mapping(kind) and kind is not type(None)


def _type_words(kind: Any) -> str:
    """The expected type, in the user's words."""
    if _is_struct(kind):
        return f"a mapping with the keys {listed(_fields(kind))}"
    if get_origin(kind) is dict:
        return "a mapping of name: value"
    if get_origin(kind) is Literal:
        return listed(get_args(kind))
    if get_origin(kind) is not tuple:
        return _TYPE_WORDS[kind]
    item, *others = get_args(kind)
    if _is_struct(item):
        return f"a list of mappings with the keys {listed(item.__struct_fields__)}"
    words = _LIST_WORDS[(get_args(item) or (item,))[0]]
    return f"a list of {words}" if others == [Ellipsis] else f"a list of {1 + len(others)} {words}"


def _build_struct(kind: type[msgspec.Struct], value: Any, where: str) -> msgspec.Struct:
    fields = _fields(kind)
    mapping = _mapping(value, where, expected=fields)
    for name in mapping:
        if name not in fields:
            hint = nearest(name, fields)
            raise RecipeError(f"unknown key{hint}; valid here: {listed(fields, len(fields))}", key_path(where, name))
    for name, field in fields.items():
        if field.required and name not in mapping:
            raise RecipeError("the key is required and missing", key_path(where, name))
    return kind(
        **{fields[key].name: build(fields[key].type, item, key_path(where, key)) for key, item in mapping.items()}
    )


@functools.cache
def _fields(kind: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    """Fields by the names that a file uses; evaluates annotations, which takes 0.3 ms for a source."""
    return {field.encode_name: field for field in msgspec.structs.fields(kind)}


def _mapping(value: Any, where: str, expected: Iterable[str] = ()) -> dict[str, Any]:
    if not isinstance(value, dict):
        keys = f" with the keys {listed(expected)}" if expected else " of name: value"
        raise RecipeError(f"expected a mapping{keys}, got {_shown(value)}", where)
    for name in value:
        if not isinstance(name, str):
            raise RecipeError(f"the key {name!r} is {type(name).__name__}, expected text", where)
    return value


def nearest(name: object, valid: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the valid name most like `name`, or nothing where none is like it."""
    close = difflib.get_close_matches(str(name), list(valid), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def listed(names: Iterable[str], most: int = 20) -> str:
    """Names for a message: at most the first `most`, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _shown(value: object) -> str:
    """A value for a message, in the user's words, cut where it is long."""
    text = repr(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return {type(None): "nothing", str: f"text {text}", int: f"number {text}"}.get(type(value), text)
