"""Recipe text -> plain values -> Structs, with the place of every fault.

In: YAML text. Out: plain values with the line of every key path, then the Struct of a given type. What
the values mean is checked in `recipe.py`; here only shape and type, so that a typo never becomes a default.

Must hold: an error names the path of keys ("sources.web.max_epochs"), and the nearest valid name where there
is one. Keys are taken as text, so a source may be named `no` or `2024`. Costs one pass over the YAML nodes.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterable
from fractions import Fraction
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
import yaml

from torchmix.errors import RecipeError

MERGE_TAG = "tag:yaml.org,2002:merge"
PLAIN_TAGS = {"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}

_TYPE_WORDS = {str: "text", int: "a whole number", tuple: "a list of texts", type(None): "nothing"}


def parse_yaml(text: str) -> tuple[Any, dict[str, int]]:
    """Parse one YAML document; duplicate keys are errors.

    Args:
        text: YAML 1.1 as PyYAML's SafeLoader reads it; anchors and merge keys (`<<`) work.

    Returns:
        The plain value (dict, list, str, int, float, bool, None, date), and the line, from 1, of each key path.

    Raises:
        RecipeError: Not YAML, a key twice, a tag that would make an object, or nesting without end.
    """
    lines: dict[str, int] = {}
    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            value = None if node is None else _plain(loader, node, "", lines, set())
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise RecipeError(f"not valid YAML: {error.problem or error}", line=mark.line + 1 if mark else 0) from error
    except yaml.YAMLError as error:
        raise RecipeError(f"not valid YAML: {error}") from error
    except RecursionError as error:
        raise RecipeError("nests too deeply, or an alias refers to itself") from error
    return value, lines


def _plain(loader: yaml.SafeLoader, node: yaml.Node, where: str, lines: dict[str, int], seen: set[int]) -> Any:
    """The plain value of a node; notes the line of every path below it, and which mappings were seen."""
    lines.setdefault(where, node.start_mark.line + 1)
    if not isinstance(node, yaml.ScalarNode) and node.tag not in PLAIN_TAGS:
        raise RecipeError(f"the tag {node.tag!r} has no place in a recipe; remove it", where, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(loader, child, f"{where}[{i}]", lines, seen) for i, child in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        if id(node) not in seen:  # flattening leaves both merged and own keys in an aliased node
            _check_duplicates(node, where)
            loader.flatten_mapping(node)
            seen.add(id(node))
        mapping: dict[str, Any] = {}
        for key, child in node.value:
            name = _key_text(key, where)
            lines[key_path(where, name)] = key.start_mark.line + 1
            mapping[name] = _plain(loader, child, key_path(where, name), lines, seen)
        return mapping
    try:
        return loader.construct_object(node, deep=True)
    except ValueError as error:  # a date or number that only looks like one: 2024-13-45
        raise RecipeError(
            f"{node.value!r}: {error}; quote it if it is text", where, node.start_mark.line + 1
        ) from error


def _check_duplicates(node: yaml.MappingNode, where: str) -> None:
    line_of_key: dict[str, int] = {}
    for key, _ in node.value:
        if key.tag == MERGE_TAG:
            continue
        name, line = _key_text(key, where), key.start_mark.line + 1
        if name in line_of_key:
            message = f"the key stands twice, first in line {line_of_key[name]}; remove or rename one"
            raise RecipeError(message, key_path(where, name), line)
        line_of_key[name] = line


def _key_text(key: yaml.Node, where: str) -> str:
    if not isinstance(key, yaml.ScalarNode):
        raise RecipeError("a key is a list or a mapping; keys are text", where, key.start_mark.line + 1)
    return str(key.value)


def build(kind: Any, value: Any, where: str = "") -> Any:
    """Build a value of the type `kind` from plain values.

    Args:
        kind: A msgspec Struct, `dict[str, X]`, a Literal, a scalar or tuple type, or one of these or None.
        value: What YAML or `msgspec.to_builtins` gave.
        where: The path of keys of `value`, for errors.

    Raises:
        RecipeError: Unknown or missing key, wrong type, or a word that is not among the valid ones.
    """
    choices = get_args(kind) if get_origin(kind) in (types.UnionType, Union) else (kind,)
    if value is None and type(None) in choices:
        return None
    for choice in choices:
        if isinstance(choice, type) and issubclass(choice, msgspec.Struct):
            return _build_struct(choice, value, where)
        if get_origin(choice) is dict:
            of_values = get_args(choice)[1]
            return {
                name: build(of_values, item, key_path(where, name)) for name, item in _mapping(value, where).items()
            }
        if get_origin(choice) is Literal:
            words = get_args(choice)
            if not isinstance(value, str) or value not in words:
                raise RecipeError(f"{_shown(value)} is not one of {_listed(words)}{nearest(value, words)}", where)
            return value
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        expected = " or ".join(_TYPE_WORDS[get_origin(choice) or choice] for choice in choices)
        raise RecipeError(f"expected {expected}, got {_shown(value)}", where) from error


def _build_struct(kind: type[msgspec.Struct], value: Any, where: str) -> msgspec.Struct:
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    mapping = _mapping(value, where, expected=fields)
    for name in mapping:
        if name not in fields:
            hint = nearest(name, fields)
            raise RecipeError(f"unknown key{hint}; valid here: {_listed(fields)}", key_path(where, name))
    for name, field in fields.items():
        if field.required and name not in mapping:
            raise RecipeError("the key is required and missing", key_path(where, name))
    return kind(**{name: build(fields[name].type, item, key_path(where, name)) for name, item in mapping.items()})


def _mapping(value: Any, where: str, expected: Iterable[str] = ()) -> dict[str, Any]:
    if not isinstance(value, dict):
        keys = f" with the keys {_listed(expected)}" if expected else " of name: value"
        raise RecipeError(f"expected a mapping{keys}, got {_shown(value)}", where)
    for name in value:
        if not isinstance(name, str):
            raise RecipeError(f"the key {name!r} is {type(name).__name__}, expected text", where)
    return value


def key_path(where: str, name: str) -> str:
    """The dotted path of the key `name` below `where`."""
    return f"{where}.{name}" if where else name


def line_of(where: str, lines: dict[str, int]) -> int:
    """Line of a key path, or of the nearest enclosing one that is in the text; 0 if there is none."""
    while where and where not in lines:
        where = where[: max(where.rfind("."), where.rfind("["), 0)]
    return lines.get(where, 0)


def nearest(name: object, valid: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the valid name most like `name`, or nothing where none is like it."""
    close = difflib.get_close_matches(str(name), list(valid), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def parse_percent(text: str, where: str) -> Fraction:
    """Exact value of a percentage above 0, as `70%`, `0.001%` or `1e-3%`.

    Raises:
        RecipeError: Not a percentage, or not above 0.
    """
    match = re.fullmatch(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*%", text.strip(), re.ASCII)
    if match is None:
        raise RecipeError(f"{text!r} is not a percentage, as 70%, 0.001% or 1e-3%", where)
    share = Fraction(match[1]) / 100
    if share <= 0:
        raise RecipeError(f"the share {text} is not above 0; remove the source instead", where)
    return share


def percent_text(share: Fraction) -> str:
    """A share as an exact percentage; it must be a sum of decimals, as all parsed percentages are."""
    digits = 0
    while (scaled := share * 10 ** (digits + 2)).denominator != 1:
        digits += 1
    whole, rest = divmod(scaled.numerator, 10**digits)
    return f"{whole}.{rest:0{digits}}%" if digits else f"{whole}%"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _shown(value: object) -> str:
    """A value for a message, in the user's words, cut where it is long."""
    text = repr(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return {type(None): "nothing", str: f"text {text}", int: f"number {text}"}.get(type(value), text)
