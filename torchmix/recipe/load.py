"""Text or Structs -> a checked recipe.

In: a YAML file, Structs built in Python, or the mapping that a file would hold. Out: a checked `Recipe`. Must hold: all
three are checked in the same way; every fault is an error that names its path of keys, and its line in a file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from torchmix.errors import OptionError, RecipeError, key_path
from torchmix.recipe.build import build
from torchmix.recipe.byte_sizes import parse_bytes
from torchmix.recipe.checks import check_values
from torchmix.recipe.loaders import check_loaders
from torchmix.recipe.source.documents import PARTS
from torchmix.recipe.structs import RECIPE_VERSION, Recipe
from torchmix.recipe.yaml_lines import line_of, parse_yaml

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
        return _recipe_of_plain(_with_mixtures_of_files(plain, recipe_directory(path)))
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
        return check_recipe(recipe), Path(directory or ".").absolute()
    if not isinstance(recipe, str | os.PathLike):
        raise OptionError(f"{call}: recipe={recipe!r} must be the path of a YAML file, a torchmix.Recipe, or a mapping")
    return load_recipe(recipe), recipe_directory(recipe) if directory is None else Path(directory).absolute()


def check_recipe(recipe: Recipe | Mapping[str, Any]) -> Recipe:
    """Check a recipe built in Python as strictly as one from a file; Structs do not check their arguments.

    Args:
        recipe: A `Recipe`, or a mapping with the keys of a file.

    Returns:
        The same recipe, rebuilt from checked values (a `pathlib.Path` becomes text).

    Raises:
        RecipeError: Any fault, with its path of keys.
    """
    return _recipe_of_plain(_plain(dict(recipe) if isinstance(recipe, Mapping) else recipe))


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


def _recipe_of_plain(plain: Any) -> Recipe:
    if isinstance(plain, dict):
        version = plain.get("version", RECIPE_VERSION)
        if type(version) is int and version != RECIPE_VERSION:
            message = f"the recipe has version {version}, this torchmix reads version {RECIPE_VERSION}"
            raise RecipeError(message, "version")
        plain = _with_selections_apart(plain)
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
