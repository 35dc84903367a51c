"""What a release is made of: a workflow that publishes nothing, and the notes of a tag."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import torchmix
from tests.support.processes import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def script_of_docs(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_workflows_run_targets_that_exist_and_publish_nothing() -> None:
    assert WORKFLOWS
    for path in WORKFLOWS:
        text = path.read_text(encoding="utf-8")
        workflow = yaml.load(text, Loader=yaml.BaseLoader)  # YAML 1.1 reads `on` as a boolean
        assert workflow["on"] == {"push": {"tags": ["v*"]}} and workflow["permissions"] == {"contents": "read"}
        assert not re.search(r"twine|pypi-publish|\bsecrets\.|id-token|deploy-pages|gh release", text)
        steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
        assert {step["uses"].partition("@")[0] for step in steps if "uses" in step} <= {
            "actions/checkout",
            "actions/setup-python",
            "actions/upload-artifact",
        }
        targets = re.findall(r"^make (\w+)", "\n".join(step.get("run", "") for step in steps), re.MULTILINE)
        assert {"dist", "notes", "pages"} <= set(targets)
        for target in targets:
            command = ["make", target, "--dry-run", "TAG=v0"]
            assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0, target


def test_the_notes_of_a_tag_are_the_changelogs_and_another_tag_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    notes = script_of_docs("release_notes").release_notes(f"v{torchmix.__version__}")
    assert notes.startswith(f"# torchmix {torchmix.__version__}\n") and "nothing has run\non GPUs" in notes
    assert "\n## " not in notes and "### Begin" in notes
    wrong = subprocess.run([sys.executable, ROOT / "docs" / "release_notes.py", "v9.9.9"], check=False)
    assert wrong.returncode == 1 and "v9.9.9 is not v" in capfd.readouterr().err


def test_the_site_of_a_tag_stands_beside_earlier_ones_and_the_first_page_leads_to_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    versions, tag = script_of_docs("site_versions"), f"v{torchmix.__version__}"
    site, pages = tmp_path / "site", tmp_path / "pages"
    for folder, text in ((site, "new"), (pages / "v0.0.9", "old"), (pages / tag, "of a build before")):
        folder.mkdir(parents=True)
        (folder / "index.html").write_text(text)
    (pages / tag / "gone.html").touch()
    versions.add_version(tag, site, pages, ["v0.0.9", "v0.0.10", f"{tag}rc1", "nightly"])
    menu = json.loads((pages / "versions.json").read_text())
    assert [one["version"] for one in menu] == [tag, f"{tag}rc1", "v0.0.10", "v0.0.9"]
    assert [one["aliases"] for one in menu] == [["latest"], [], [], []]
    assert (pages / "v0.0.9" / "index.html").read_text() == "old" and (pages / tag / "index.html").read_text() == "new"
    assert not (pages / tag / "gone.html").exists() and f"url={tag}/index.html" in (pages / "index.html").read_text()
    versions.add_version(tag, site, pages, ["v99.0"])
    assert "url=v99.0/index.html" in (pages / "index.html").read_text(), "an older one that is built again"
    with pytest.raises(ValueError, match=r"v9.9.9 is not v"):
        versions.add_version("v9.9.9", site, pages, [])
    with pytest.raises(ValueError, match="has no site"):
        versions.add_version(tag, tmp_path, pages, [])
