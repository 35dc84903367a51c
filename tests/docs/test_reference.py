"""The reference: every public name of the package has a place in it, with a docstring."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.test_tables_render import faults_of
from tests.support.processes import ROOT
from torchmix.cli.main import VERBS, _parsers, command_parser

PUBLIC = ("torchmix", "torchmix.parallel", "torchmix.stateful", "torchmix.megatron_adapter")
WITHOUT_DOCSTRING = {"__version__"}


def test_every_public_name_is_in_the_reference() -> None:
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md"))
    shown = set(re.findall(r"^::: ([\w.]+)", pages, re.MULTILINE))
    missing = []
    for module in PUBLIC:
        for name in import_module(module).__all__:
            if name in WITHOUT_DOCSTRING:
                continue
            value = getattr(import_module(module), name)
            home = getattr(value, "__module__", module)
            if not {home, f"{home}.{name}"} & shown:
                missing.append(f"{module}.{name}: ::: {home}.{name}")
            elif not inspect.getdoc(value):
                missing.append(f"{module}.{name} has no docstring")
    assert not missing, "\n".join(missing)


def test_everything_in_the_reference_exists() -> None:
    for path in (ROOT / "docs" / "api").glob("*.md"):
        for target in re.findall(r"^::: ([\w.]+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            parts = target.split(".")
            cut = next(at for at in range(len(parts), 0, -1) if _is_module(".".join(parts[:at])))
            home = ".".join(parts[:cut])
            try:
                value = import_module(home)
            except ModuleNotFoundError as error:
                assert error.name is not None and not error.name.startswith("torchmix"), error
                source = (ROOT / Path(*parts[:cut])).with_suffix(".py").read_text(encoding="utf-8")
                assert re.search(rf"^(class|def) {parts[cut]}\b", source, re.MULTILINE), target
                continue  # what it is made for is not installed
            for part in parts[cut:]:
                value = getattr(value, part)


def test_nothing_is_in_the_reference_twice() -> None:
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md"))
    shown = re.findall(r"^::: ([\w.]+)", pages, re.MULTILINE)
    assert sorted(shown) == sorted(set(shown))


def test_the_page_of_the_command_line_has_every_verb_and_every_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    page = import_module("commands_page").commands_page()
    parts = dict(zip(re.findall(r"^## torchmix (\w+)$", page, re.MULTILINE), page.split("\n## ")[1:], strict=False))
    assert list(parts) == [name for name, _ in VERBS]
    for parser in _parsers(command_parser()):
        verb = parser.prog.split()[1:2]
        options = [word for action in parser._actions for word in action.option_strings if word not in ("-h", "--help")]
        missing = [word for word in options if verb and not re.search(rf"`{word}[ `]", parts[verb[0]])]
        assert not missing, f"{parser.prog}: {missing}"
    assert faults_of(page) == []


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False
