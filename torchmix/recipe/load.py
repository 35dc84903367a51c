"""Text or Structs -> a checked recipe."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from torchmix.errors import OptionError, RecipeError, key_path
from torchmix.recipe.amounts import parse_bytes
from torchmix.recipe.build import build
from torchmix.recipe.checks import check_values
from torchmix.recipe.items import with_processors
from torchmix.recipe.loaders import check_loaders
from torchmix.recipe.sources import PARTS
from torchmix.recipe.structs import RECIPE_VERSION, Recipe

# --- Recipe text -> plain values, with the line of every key.
#
# Keys are text, so a source may be named `no` or `2024`; a duplicate key is an error, a second `<<` too, since which of
# two wins differs among releases of PyYAML; what aliases repeat is bounded.
# Cost: one pass over the YAML nodes.

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
        text: YAML 1.1 as PyYAML's SafeLoader reads it; anchors and merge keys (`<<`, one in a mapping) work.

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
    line_of_key: dict[tuple[bool, str], int] = {}
    for key, _ in node.value:
        merges = key.tag == MERGE_TAG  # a quoted "<<" is a name
        name, line = _key_text(key, where), key.start_mark.line + 1
        if (merges, name) in line_of_key:
            mend = "merge a list, <<: [*a, *b], in which the first wins" if merges else "remove or rename one"
            message = f"the key stands twice, first in line {line_of_key[merges, name]}; {mend}"
            raise RecipeError(message, key_path(where, name), line)
        line_of_key[merges, name] = line


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


# --- A recipe from a file, from text or from Structs.
#
# All three are checked in the same way; every fault is an error that names its path of keys, and its line in a file.

Struct = TypeVar("Struct", bound=msgspec.Struct)
_SELECTIONS = re.compile(r"^((?:validation\.|test\.)?)selections(\.|$)")
"""Where a selection stands among a recipe's Structs; a person finds it among the sources."""
_PLACE_OF_RUN = re.compile(r"^schedule\[\d+\]\.(from|to)$")


def load_recipe(path: str | Path) -> Recipe:
    """Read and check a recipe.

    Args:
        path: A YAML file in UTF-8. Paths in it are relative to `recipe_directory(path)`.

    Raises:
        RecipeError: The file cannot be read, or any fault in it, with its path, its line and the path of keys.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', error)}") from error
    lines: dict[str, int] = {}
    try:
        plain, lines = parse_yaml(text)
        return _recipe_of_plain(_with_mixtures_of_files(plain, recipe_directory(path)), recipe_directory(path))
    except RecipeError as error:
        line = error.line or line_of(error.where, lines)
        raise RecipeError(error.message, error.where, line, str(path)) from None


def recipe_directory(path: str | Path) -> Path:
    """The absolute folder of the recipe's file; paths in the recipe are relative to it."""
    return Path(path).absolute().parent


def recipe_and_directory(
    call: str, recipe: str | Path | Recipe | Mapping[str, Any], directory: str | Path | None
) -> tuple[Recipe, Path]:
    """A checked recipe, and the absolute folder that its paths are relative to, from what a user gives a call.

    Args:
        call: Name of the call, for errors.
        recipe: A YAML file, a `Recipe`, or a mapping with the keys of a file.
        directory: The folder; by default that of the file, or the current one.

    Raises:
        OptionError: `recipe` is none of these.
        RecipeError: As `load_recipe` and `check_recipe`.
    """
    if isinstance(recipe, Recipe | Mapping):
        return check_recipe(recipe, directory), Path(directory or ".").absolute()
    if not isinstance(recipe, str | os.PathLike):
        raise OptionError(f"{call}: recipe={recipe!r} must be the path of a YAML file, a torchmix.Recipe, or a mapping")
    return load_recipe(recipe), recipe_directory(recipe) if directory is None else Path(directory).absolute()


def check_recipe(recipe: Recipe | Mapping[str, Any], directory: str | Path | None = None) -> Recipe:
    """Check a recipe built in Python as strictly as one from a file; Structs do not check their arguments.

    Args:
        recipe: A `Recipe`, or a mapping with the keys of a file.
        directory: The folder that models' folders of a mapping are relative to; by default the current one.

    Returns:
        The same recipe, rebuilt from checked values (a `pathlib.Path` becomes text).

    Raises:
        RecipeError: Any fault, with its path of keys.
    """
    plain = _plain(dict(recipe) if isinstance(recipe, Mapping) else recipe)
    return _recipe_of_plain(plain, Path(directory or ".").absolute() if isinstance(recipe, Mapping) else None)


def check_types(struct: Struct, where: str) -> Struct:
    """A Struct of a recipe, rebuilt from values of the right types; `checks.py` checks what the values mean.

    Args:
        struct: As it was built in Python.
        where: The path of keys at which it would stand in a recipe.

    Raises:
        RecipeError: A value of another type, with its path of keys.
    """
    built: Struct = build(type(struct), _plain(struct), where)
    return built


def _plain(value: Any) -> Any:
    try:
        return msgspec.to_builtins(value, enc_hook=os.fspath)
    except (TypeError, ValueError, RecursionError) as error:
        raise RecipeError(f"the recipe holds a value that no recipe can hold: {error}") from error


msgspec.json.Decoder(Recipe)
"""msgspec learns of a type when it first meets it, and two threads that do so at once may crash the process: so it does
at the import, here and wherever a decoder is made beside a function."""


def _recipe_of_plain(plain: Any, directory: Path | None = None) -> Recipe:
    """A checked recipe; `directory`: what the folders of models are relative to, None: there are none."""
    if isinstance(plain, dict):
        version = plain.get("version", RECIPE_VERSION)
        if type(version) is int and version != RECIPE_VERSION:
            message = f"the recipe has version {version}, this torchmix reads version {RECIPE_VERSION}"
            raise RecipeError(message, "version")
        plain = _with_selections_apart(plain)
        if directory is not None:
            plain = _with_processors_of_files(plain, directory)
    try:
        recipe = msgspec.convert(plain, Recipe)  # faster than `build`, which runs on a fault and words the error
    except msgspec.ValidationError:
        try:
            recipe = build(Recipe, plain)
        except RecipeError as error:
            where = _SELECTIONS.sub(r"\1sources\2", error.where)
            raise RecipeError(_said_of_place(error.message, where), where, error.line) from None
    check_values(recipe)
    parse_bytes(recipe.read.cache, where="read.cache")
    check_loaders(recipe.loaders)
    try:
        msgspec.msgpack.encode(recipe)  # as the message does that takes a part of it to a worker
    except OverflowError:
        place = _place_of_large_number(plain, "") or ""
        raise RecipeError("a whole number of more than 64 bits, which no key takes", place) from None
    return recipe


def _place_of_large_number(plain: Any, where: str) -> str | None:
    """The path of keys of a number that has more than 64 bits; None where there is none."""
    if isinstance(plain, int):
        return None if -(1 << 63) <= plain < 1 << 64 else where
    below = plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, list | tuple) else ()
    places = (
        _place_of_large_number(value, f"{where}[{name}]" if isinstance(name, int) else key_path(where, name))
        for name, value in below
    )
    return next(filter(None, places), None)


def _said_of_place(message: str, where: str) -> str:
    """A message about the type of a place of the run, with what can stand there."""
    given = message.partition(", got ")[2]
    match = _PLACE_OF_RUN.search(where)
    if match is None or not given:
        return message
    if match[1] == "to":
        no_epoch = "; no epoch, since where it ends would follow from the ramp" if given.startswith("{") else ""
        return f"expected 5000 steps or 12T tokens, where the ramp ends, or nothing{no_epoch}; got {given}"
    return f"expected 5000 steps, 12T tokens, or an epoch as {{epochs: 2, of: NAME}}; got {given}"


def _with_selections_apart(plain: dict[str, Any]) -> dict[str, Any]:
    """A recipe's plain values, with the sources that have `from` as selections; likewise in validation and test."""
    parts = {part: plain[part] for part in PARTS[1:] if isinstance(plain.get(part), dict)}
    apart = {**plain, **{part: _with_selections_apart(content) for part, content in parts.items()}}
    sources = plain.get("sources")
    if not isinstance(sources, dict):
        return apart
    found = {name: one for name, one in sources.items() if isinstance(one, dict) and "from" in one}
    if found:
        apart["sources"] = {name: one for name, one in sources.items() if name not in found}
        before = apart.get("selections")
        apart["selections"] = {**(before if isinstance(before, dict) else {}), **found}
    return apart


def _with_mixtures_of_files(plain: Any, directory: Path) -> Any:
    """A recipe's plain values, with the mixtures from files that its schedule names."""
    schedule = plain.get("schedule") if isinstance(plain, dict) else None
    if not isinstance(schedule, list):
        return plain
    changes = []
    for number, change in enumerate(schedule):
        if isinstance(change, dict) and isinstance(change.get("file"), str) and "mixture" not in change:
            where = f"schedule[{number}].file"
            change = {**change, "mixture": _mixture_of_file(directory / change["file"], where)}
            del change["file"]
        changes.append(change)
    return {**plain, "schedule": changes}


def _with_processors_of_files(plain: dict[str, Any], directory: Path, where: str = "") -> dict[str, Any]:
    """A recipe's plain values, with what the folders of models say of items; likewise in validation and test."""
    found = dict(plain)
    for part in PARTS[1:]:
        if isinstance(plain.get(part), dict):
            found[part] = _with_processors_of_files(plain[part], directory, f"{part}.")
    if isinstance(plain.get("sources"), dict):
        found["sources"] = {
            name: with_processors(source, directory, key_path(f"{where}sources", name))
            if isinstance(source, dict)
            else source
            for name, source in plain["sources"].items()
        }
    return found


def _mixture_of_file(path: Path, where: str) -> Any:
    try:
        plain, _ = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', error)}", where) from error
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}", where) from None
    if not isinstance(plain, dict) or "mixture" not in plain:
        raise RecipeError(f"{str(path)!r} has no `mixture`", where)
    return plain["mixture"]
