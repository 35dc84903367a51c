"""Plain values -> Structs."""

from __future__ import annotations

import difflib
import functools
import operator
import types
from collections.abc import Iterable, Sequence
from typing import Any, Literal, SupportsIndex, TypeVar, Union, get_args, get_origin

import msgspec

from torchmix.errors import OptionError, RecipeError, key_path

# --- Values of a recipe, by the types of its Structs.
#
# An error names the path of keys, and the nearest valid name where there is one. Costs microseconds per key.

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


def check_ranges(values: Any, where: str, **ranges: tuple[float, float]) -> None:
    """Check that numbers of a Struct, by their keys, lie in closed ranges; None is not checked.

    Raises:
        RecipeError: Names the first one that does not.
    """
    for key, (least, most) in ranges.items():
        value = getattr(values, key)
        if value is not None and not least <= value <= most:
            raise RecipeError(f"{value} is out of range; it must be in [{least}, {most}]", f"{where}.{key}")


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


# --- Arguments of calls, checked in one way.
#
# A wrong value is an OptionError that names call, argument, value and what is allowed; a NumPy integer is a number, a
# bool is not. Cost: under a microsecond.

Word = TypeVar("Word", bound=str)


def whole_number(call: str, name: str, value: SupportsIndex, lowest: int, highest: int | None = None) -> int:
    """An argument that must be a whole number from `lowest` to `highest`, both included.

    Raises:
        OptionError: It is not.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:  # 2.7, "3"
        number = None
    if number is None or number < lowest or (highest is not None and number > highest):
        allowed = (
            f"a whole number of at least {lowest}"
            if highest is None
            else f"a whole number in {_range(lowest, highest)}"
        )
        raise OptionError(f"{call}: {name}={value!r} must be {allowed}")
    return number


def one_of(call: str, name: str, value: Any, words: Sequence[Word]) -> Word:
    """An argument that must be one of some words.

    Raises:
        OptionError: It is not; suggests the nearest.
    """
    for word in words:
        if isinstance(value, str) and value == word:
            return word
    raise OptionError(f"{call}: {name}={value!r} is not one of {', '.join(words)}{nearest(value, words)}")


def true_or_false(call: str, name: str, value: Any) -> bool:
    """An argument that must be True or False.

    Raises:
        OptionError: It is not.
    """
    if not isinstance(value, bool):
        raise OptionError(f"{call}: {name}={value!r} must be True or False")
    return value


def _range(lowest: int, highest: int) -> str:
    return f"[{lowest}, 2**63)" if highest == 2**63 - 1 else f"[{lowest}, {highest}]"
