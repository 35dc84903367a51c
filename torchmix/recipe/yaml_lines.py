"""Recipe text -> plain values, with the line of every key.

In: YAML text. Out: plain values, and the line of every path of keys ("sources.web.max_epochs"), so that any later fault
can be placed.

Must hold: keys are text, so a source may be named `no` or `2024`; a duplicate key is an error; what aliases repeat is
bounded. Cost: one pass over the YAML nodes.
"""

from __future__ import annotations

from typing import Any

import yaml

from torchmix.errors import RecipeError, key_path

NATIVE_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Parser of libyaml, where PyYAML has it: ten times as fast, 5 ms for 306 sources instead of 50."""
MERGE_TAG = "tag:yaml.org,2002:merge"
TEXT_TAG = "tag:yaml.org,2002:str"
MOST_REPEATED = 16_000_000
"""Characters of paths and values that aliases make again, in all: nested aliases of ten lines would make any number."""
MOST_PATH = 200
"""Characters of a path in that error."""
PLAIN_TAGS = {"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}


def parse_yaml(text: str) -> tuple[Any, dict[str, int]]:
    """Parse one YAML document; duplicate keys are errors.

    Args:
        text: YAML 1.1 as PyYAML's SafeLoader reads it; anchors and merge keys (`<<`) work.

    Returns:
        The plain value (dict, list, str, int, float, bool, None, date), and the line, from 1, of each key path.

    Raises:
        RecipeError: Not YAML, a key twice, a tag that would make an object, nesting without end, or
            aliases that repeat without bound.
    """
    try:
        try:
            return _parse(NATIVE_LOADER if _is_shallow(text) else yaml.SafeLoader, text)
        except yaml.YAMLError:  # the other parser words the error, in the same way everywhere
            return _parse(yaml.SafeLoader, text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise RecipeError(f"not valid YAML: {error.problem or error}", line=mark.line + 1 if mark else 0) from error
    except yaml.YAMLError as error:
        raise RecipeError(f"not valid YAML: {error}") from error
    except RecursionError as error:
        raise RecipeError("nests too deeply, or an alias refers to itself") from error


def _parse(kind: Any, text: str) -> tuple[Any, dict[str, int]]:
    loader = kind(text)
    try:
        node = loader.get_single_node()
        values = _Values(loader)
        return (None if node is None else values.plain(node, "")), values.lines
    finally:
        loader.dispose()


def _is_shallow(text: str) -> bool:
    """Whether the text certainly does not nest deeply enough for libyaml, which has no limit, to exhaust the stack."""
    # Every other level needs an indent of its own, so k levels need k * k / 2 characters.
    return len(text) < 2_000_000 and sum(map(text.count, "[{?-")) < 4_000


class _Values:
    """The values of one text, as they are made of its nodes."""

    def __init__(self, loader: yaml.SafeLoader) -> None:
        self.lines: dict[str, int] = {}
        """Line of every path."""
        self._loader = loader
        self._seen: set[int] = set()
        self._merged: set[int] = set()
        self._merging: set[int] = set()
        self._repeated = 0

    def plain(self, node: yaml.Node, where: str) -> Any:
        """The plain value of a node; notes the line of every path below it."""
        line = node.start_mark.line + 1
        self.lines.setdefault(where, line)
        if id(node) in self._seen:
            length = len(node.value) if isinstance(node, yaml.ScalarNode) else 0
            self._repeat(1 + len(where) + length, node, where)
        self._seen.add(id(node))
        if not isinstance(node, yaml.ScalarNode) and node.tag not in PLAIN_TAGS:
            raise RecipeError(f"the tag {node.tag!r} has no place in a recipe; remove it", where, line)
        if isinstance(node, yaml.SequenceNode):
            return [self.plain(child, f"{where}[{i}]") for i, child in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            self._merge(node, where)
            mapping: dict[str, Any] = {}
            for key, child in node.value:
                name = _key_text(key, where)
                path = key_path(where, name)
                self.lines[path] = key.start_mark.line + 1
                mapping[name] = self.plain(child, path)
            return mapping
        if node.tag == TEXT_TAG:
            return node.value  # as it would be constructed
        try:
            return self._loader.construct_object(node, deep=True)
        except ValueError as error:  # text in the form of a date or number, such as 2024-13-45
            raise RecipeError(f"{node.value!r}: {error}; quote it if it is text", where, line) from error

    def _merge(self, node: yaml.MappingNode, where: str) -> None:
        """Put the keys of `<<` before a mapping's own, once; PyYAML's way has no bound."""
        line = node.start_mark.line + 1
        if id(node) in self._merging:
            raise RecipeError("an alias refers to the mapping that it is merged into; remove it", where, line)
        if id(node) in self._merged:
            return
        self._merging.add(id(node))
        _check_duplicates(node, where)
        merged, own = [], []
        for key, child in node.value:
            if key.tag != MERGE_TAG:
                own.append((key, child))
                continue
            for part in reversed(child.value) if isinstance(child, yaml.SequenceNode) else [child]:
                if not isinstance(part, yaml.MappingNode):
                    raise RecipeError("<< takes a mapping, or a list of mappings", where, key.start_mark.line + 1)
                self._merge(part, where)
                self._repeat(len(part.value), part, where)
                merged += part.value
        node.value = merged + own
        self._merging.remove(id(node))
        self._merged.add(id(node))

    def _repeat(self, num: int, node: yaml.Node, where: str) -> None:
        """Count what an alias makes again."""
        self._repeated += num
        if self._repeated > MOST_REPEATED:
            raise RecipeError(
                f"aliases repeat more than {MOST_REPEATED:,} characters of key paths and values, the last ones those "
                "of this line; write fewer aliases, or less behind an anchor",
                where[:MOST_PATH],
                node.start_mark.line + 1,
            )


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


def line_of(where: str, lines: dict[str, int]) -> int:
    """Line of a key path, or of the nearest enclosing one that is in the text; 0 if there is none, as for a default.

    The whole text encloses every path, and does not count.
    """
    path = where
    while path and path not in lines:
        path = path[: max(path.rfind("."), path.rfind("["), 0)]
    return lines.get(path, 0) if path or not where else 0
