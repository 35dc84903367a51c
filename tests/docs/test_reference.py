"""The reference: every public name of the package has a place in it, with a docstring."""

from __future__ import annotations

import inspect
import re
from importlib import import_module

from tests.support.processes import ROOT

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
            value = import_module(".".join(parts[:cut]))
            for part in parts[cut:]:
                value = getattr(value, part)


def test_nothing_is_in_the_reference_twice() -> None:
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md"))
    shown = re.findall(r"^::: ([\w.]+)", pages, re.MULTILINE)
    assert sorted(shown) == sorted(set(shown))


def _is_module(name: str) -> bool:
    try:
        import_module(name)
    except ImportError:
        return False
    return True
