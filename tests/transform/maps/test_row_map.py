"""`module:function` of a recipe -> the function."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.maps import write_functions
from torchmix.errors import RecipeError
from torchmix.transform.maps import open_map

WHERE = "sources.web.map"


def test_a_function_is_found_in_the_recipes_folder_and_in_packages_there(tmp_path: Path) -> None:
    name = write_functions(tmp_path)
    opened = open_map(f"{name}:drawn", tmp_path, WHERE)
    assert (opened.words, opened.version, opened.is_random) == (f"{name}:drawn", "1", True)
    assert not open_map(f"{name}:shout", tmp_path, WHERE).is_random
    package = tmp_path / "own_package_of_test"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "clean.py").write_text(
        "def f(columns, **_): ...\nf.version = 'b'\nclass Kept:\n    f = staticmethod(f)\n"
    )
    assert open_map("own_package_of_test.clean:Kept.f", tmp_path, WHERE).version == "b"
    assert str(tmp_path) not in sys.path


@pytest.mark.parametrize(
    ("module", "words", "says"),
    [
        ("", "no_such_module_at_all:f", "cannot import 'no_such_module_at_all': .* looked for in the recipe's folder"),
        ("", "NAME:f", "has no 'f'"),
        ("f = 3", "NAME:f", "is no function"),
        ("def f(): ...", "NAME:f", r"has no version: write `f\.version = 1`"),
        ("def f(): ...\nf.version = True", "NAME:f", "has no version"),
        ("1 / 0", "NAME:f", "importing 'own_module_.*' fails: ZeroDivisionError"),
        ("import no_such_module_at_all", "NAME:f", "No module named 'no_such_module_at_all'"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, module: str, words: str, says: str) -> None:
    name = f"own_module_{abs(hash((module, words)))}"
    (tmp_path / f"{name}.py").write_text(module)
    with pytest.raises(RecipeError, match=says) as error:
        open_map(words.replace("NAME", name), tmp_path, WHERE)
    assert error.value.where == WHERE


def test_a_module_of_another_folder_with_the_same_name_is_not_taken_for_it(tmp_path: Path) -> None:
    name = write_functions(tmp_path)
    open_map(f"{name}:shout", tmp_path, WHERE)
    other = tmp_path / "other"
    other.mkdir()
    (other / f"{name}.py").write_text((tmp_path / f"{name}.py").read_text())
    with pytest.raises(RecipeError, match=r"another module .* is loaded already"):
        open_map(f"{name}:shout", other, WHERE)
