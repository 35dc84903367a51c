"""The page of a package index: no link of the README leads nowhere there."""

from __future__ import annotations

import re
import runpy
from typing import Any

import pytest

from tests.support.processes import ROOT

LINKS = re.compile(r"(!?)\[([^\[\]]*)\]\(([^)\s]+)\)")


def metadata(monkeypatch: pytest.MonkeyPatch, repository: str) -> dict[str, Any]:
    """What setup.py tells setuptools."""
    told: dict[str, Any] = {}
    monkeypatch.setattr("setuptools.setup", lambda **words: told.update(words))
    monkeypatch.setenv("TORCHMIX_REPOSITORY", repository)
    runpy.run_path(str(ROOT / "setup.py"))
    return told


def test_without_a_repository_links_to_files_are_text(monkeypatch: pytest.MonkeyPatch) -> None:
    told = metadata(monkeypatch, "")
    page = told["long_description"]
    assert all(target.startswith(("https://", "#")) for *_, target in LINKS.findall(page))
    assert "after four changed lines." in page and "docs/pictures" not in page, "links are their text, pictures go"
    assert told["project_urls"] == {}


def test_with_a_repository_links_lead_to_files_of_the_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    told = metadata(monkeypatch, "https://example.org/us/torchmix/")
    found = LINKS.findall(told["long_description"])
    assert all(target.startswith(("https://", "#")) for *_, target in found)
    at = f"https://example.org/us/torchmix/blob/v{told['version']}/"
    files = [target.removeprefix(at).partition("#")[0] for *_, target in found if target.startswith(at)]
    assert len(files) > 20 and all((ROOT / file).exists() for file in files)
    assert any(sign and "/raw/" in target and target.endswith("road.svg") for sign, _, target in found)
    assert told["project_urls"]["Issues"] == "https://example.org/us/torchmix/issues"
