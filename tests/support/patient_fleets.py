"""Clients of loaders that give nobody up, for tests that ask which loader does what: nobody does a slow one's work.

`patient_path` writes a folder for PYTHONPATH, by which workers of nodes that are started have such clients.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from tests.support.deadlines import LONG_S
from tests.support.forks import ROOT

SITE = """
import sys

if any("worker.main" in word for word in sys.orig_argv):
    from tests.support.patient_fleets import be_patient

    be_patient()
"""
"""Runs as an interpreter starts."""


def be_patient() -> None:
    """From now on in this process."""
    from torchmix.service import fleet, open_fleet
    from torchmix.service.members import FleetPatience

    fleet.SLOW_S = LONG_S
    open_fleet.FleetPatience = partial(FleetPatience, silence_s=LONG_S, join_s=LONG_S)  # type: ignore[misc, assignment]


def patient_path(folder: Path) -> str:
    """Write the site into a new folder; what PYTHONPATH is to be."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SITE)
    return os.pathsep.join(filter(None, [str(folder), str(ROOT), os.environ.get("PYTHONPATH")]))
