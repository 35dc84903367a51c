"""How far a run is, and what it has decided: the notes that scaling follows.

In: on the side of the run, the cursor after each step; on the other, a folder. Out: lines of `progress.jsonl` in the
folder where loaders register; notes. Must hold: a run writes only where somebody follows it, and one process of it
does; a run that goes on from an earlier step takes back the notes after it. Cost: a line for each interval, and for
each decision of the run.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from torchmix.service.scale.rule import EVERY_STEPS, RunNote

logger = logging.getLogger(__name__)

PROGRESS_NAME = "progress.jsonl"


class ProgressLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the file."""

    step: int
    gone: list[str] = []
    decided: dict[str, int] = {}


_decode = msgspec.json.Decoder(ProgressLine).decode


class ProgressLog:
    """What a run tells of itself."""

    def __init__(self, folders: tuple[str, ...]) -> None:
        """Nothing is written; `folders`: where loaders register."""
        self._paths = [Path(folder) / PROGRESS_NAME for folder in folders]
        self._last: ProgressLine | None = None

    def note(self, step: int, gone: frozenset[str], decided: Mapping[str, int]) -> None:
        """Say that a step comes next; most calls write nothing."""
        line = ProgressLine(step=step, gone=sorted(gone), decided=dict(sorted(decided.items())))
        last, self._last = self._last, line
        is_same = last is not None and (last.gone, last.decided) == (line.gone, line.decided)
        if last is not None and is_same and last.step // EVERY_STEPS == step // EVERY_STEPS:
            return
        for path in self._paths:
            try:
                _append(path, line)
            except OSError as error:
                logger.warning("%s: %s; loaders are not scaled meanwhile", path, error.strerror)


def follow_progress(folder: Path) -> Path:
    """Begin to follow a run: empty the file, so that runs write into it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / PROGRESS_NAME
    path.write_bytes(b"")
    return path


def notes_of(path: Path) -> list[RunNote]:
    """The notes of the run that wrote last, by rising step."""
    notes: list[RunNote] = []
    try:
        lines = path.read_bytes().split(b"\n")[:-1]  # behind the last line end is nothing, or half a line
    except OSError:
        return notes
    for line in lines:
        try:
            found = _decode(line)
        except msgspec.MsgspecError:
            continue
        while notes and notes[-1].step >= found.step:
            notes.pop()
        notes.append(RunNote(step=found.step, gone=frozenset(found.gone), decided=found.decided))
    return notes


def _append(path: Path, line: ProgressLine) -> None:
    """Write a line in one call, where the file is there."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    except FileNotFoundError:
        return
    try:
        os.write(descriptor, msgspec.json.encode(line) + b"\n")
    finally:
        os.close(descriptor)
