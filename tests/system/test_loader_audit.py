"""What loaders and their clients do not do: unpickle, open data where it is not theirs, import what a client names."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support.deadlines import LONG_S
from tests.support.loaders import write_job
from tests.support.maps import write_functions
from tests.support.processes import Child, Processes
from tests.system.test_remote import serve
from torchmix.indexing.scan import index_recipe
from torchmix.recipe.load import load_recipe

pytestmark = pytest.mark.system
STEPS = 6
HOOK = """
import os, sys

def note(event, arguments):
    if event == "pickle.find_class":
        what = f"pickle {arguments}"
    elif event == "open" and str(arguments[0]).endswith(".parquet"):
        what = f"data {arguments[0]}"
    elif event in ("open", "import") and "maps_of_test" in str(arguments[0]):
        what = f"function {arguments[0]}"
    else:
        return
    roles = {"service.main": "loader", "worker.main": "worker", "serve": "serve", "store_loader": "trainer"}
    role = next((role for word, role in roles.items() if any(word in one for one in sys.orig_argv)), "other")
    with open(os.environ["NOTED"], "a") as file:
        file.write(f"{role} {what}\\n")

sys.addaudithook(note)
"""
"""Runs as an interpreter starts."""


class Noted:
    """What all processes do that a test starts from now on, each by its role."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(HOOK)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))
        patch.setenv("NOTED", str(folder / "noted"))
        self._file = folder / "noted"

    def of(self, *kinds: str) -> set[tuple[str, str]]:
        """Roles of processes, and what of these kinds they did."""
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        found = [line.split(" ", 2) for line in lines]
        return {(role, kind) for role, kind, _ in found if kind in kinds}


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Noted:
    return Noted(tmp_path / "hook", monkeypatch)


def train(processes: Processes, recipe: Path, loaders: str) -> Child:
    child = processes.start_python("-m", "tests.support.store_loader", str(recipe), "-", str(STEPS), "-", loaders)
    child.wait(deadline_s=LONG_S)
    return child


def test_nobody_unpickles_and_only_loaders_open_data(tmp_path: Path, noted: Noted) -> None:
    recipe = write_job(tmp_path / "job")  # trainers could read the files: they are where the recipe says
    with Processes(tmp_path) as processes:
        serve(processes, recipe, "--register", str(tmp_path / "endpoints"))
        child = train(processes, recipe, f"remote,endpoints={tmp_path / 'endpoints'}")
        assert child.returncode == 0, child.report()
        assert noted.of("data") == {("loader", "data")}
        job = train(processes, recipe, "job,processes=2")
        assert job.returncode == 0, job.report()
    assert noted.of("data") == {("loader", "data")}
    assert noted.of("pickle") == set()
    first, second = (json.loads(one.stdout().splitlines()[-1]) for one in (child, job))
    assert first["hashes"] == second["hashes"] and len(first["hashes"]) == STEPS


def test_a_function_that_only_the_client_names_is_refused_and_never_imported_by_a_loader(
    tmp_path: Path, noted: Noted
) -> None:
    served, asked = write_job(tmp_path / "job"), write_job(tmp_path / "trainer")
    word = write_functions(asked.parent)
    plain = "prose: {path: prose.parquet, text: text, tokenizer: bytes}"
    assert plain in asked.read_text()
    asked.write_text(asked.read_text().replace(plain, f'{plain[:-1]}, map: "{word}:drawn"}}'))
    index_recipe(load_recipe(asked), asked.parent)
    for path in asked.parent.glob("*.parquet"):
        path.unlink()  # else it would read alone
    with Processes(tmp_path) as processes:
        serve(processes, served, "--register", str(tmp_path / "endpoints"))
        child = train(processes, asked, f"remote,endpoints={tmp_path / 'endpoints'}")
    assert child.returncode != 0
    assert "LoaderLost" in child.stderr() and "the client has catalog" in child.stderr()
    roles = {role for role, _ in noted.of("function")}
    assert "worker" in roles and not roles & {"loader", "serve"}
