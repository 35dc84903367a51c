"""What a trainer has logged: losses by source, waits of ranks, workers that were lost.

Two forms are read. Lines of JSON, each what `loader.stats()` gives beside a `rank`, and perhaps `losses` by source.
TensorBoard's event files, with the names that Megatron's adapter writes (`loss/web`) and those of
`torchmix.flat_stats`. Cost: one pass over each file.

Source: the record format of TFRecord files, and Event and Summary of tensorflow/core/util/event.proto and
tensorflow/core/framework/summary.proto.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from torchmix.errors import OptionError

LOSS = "loss/"
"""Begins the tags of losses by source."""
STATS = "torchmix/"
"""Begins the tags of `torchmix.flat_stats`."""
MEGATRONS_TAG = "lm loss"
"""A tag of files that Megatron wrote, which counts iterations from 1."""


class RunLog(msgspec.Struct, frozen=True, kw_only=True):
    """What was logged, by step. Later files and lines take the place of earlier ones of the same step."""

    losses: dict[str, dict[int, float]] = {}
    """Source -> step -> mean loss of a token."""
    waits: dict[str, dict[int, float]] = {}
    """Rank -> step -> seconds that it waited for data."""
    lost: dict[str, dict[int, int]] = {}
    """Rank -> step -> workers that were lost until then."""

    @property
    def last_step(self) -> int | None:
        """The last step that anything is known of."""
        steps = [step for one in (self.losses, self.waits, self.lost) for by_step in one.values() for step in by_step]
        return max(steps, default=None)

    def add(self, step: int, rank: str, figures: dict[str, Any]) -> None:
        """Take the figures of a step of a rank, as `loader.stats()` has them.

        Raises:
            ValueError: A loss is neither a mean nor a sum with its tokens.
        """
        for name, loss in (figures.get("losses") or {}).items():
            mean = loss
            if isinstance(loss, list | tuple) and len(loss) == 2:
                mean = loss[0] / loss[1] if loss[1] else None
            if mean is not None:
                self.losses.setdefault(str(name), {})[step] = float(mean)
        if "data_wait_s" in figures:
            self.waits.setdefault(rank, {})[step] = float(figures["data_wait_s"])
        if "workers_lost" in figures:
            self.lost.setdefault(rank, {})[step] = int(figures["workers_lost"])


def read_logs(paths: list[Path]) -> RunLog:
    """What files, or folders of event files, say.

    Raises:
        OptionError: There is no such file, or it is neither of the two forms.
    """
    log = RunLog(losses={}, waits={}, lost={})
    for path in paths:
        files = sorted(path.rglob("*tfevents*")) if path.is_dir() else [path]
        if not files:
            raise OptionError(f"--log {path}: this folder has no event file of TensorBoard's")
        for file in files:
            try:
                if "tfevents" in file.name:
                    _add_events(file, log, rank="0" if len(files) == 1 else file.parent.name or "0")
                else:
                    _add_lines(file, log)
            except OSError as error:
                raise OptionError(f"--log {file}: {error.strerror}") from error
    return log


def _add_lines(path: Path, log: RunLog) -> None:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                figures = json.loads(line)
                if "step" in figures:  # else a line from before the first step
                    log.add(int(figures["step"]), str(figures.get("rank", 0)), figures)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise OptionError(
                    f"--log {path}: line {number} is no JSON object of figures, as "
                    f'json.dumps({{"rank": rank, **loader.stats()}}) gives it: {error}'
                ) from error


# --- Event files of TensorBoard.


def _add_events(path: Path, log: RunLog, *, rank: str) -> None:
    scalars = list(scalars_of(path))
    first = int(any(tag == MEGATRONS_TAG for _, tag, _ in scalars))
    for step, tag, value in scalars:
        if tag.startswith(LOSS):
            log.add(step - first, rank, {"losses": {tag.removeprefix(LOSS): value}})
        elif tag.startswith(STATS):
            log.add(step - first, rank, {tag.removeprefix(STATS): value})


def scalars_of(path: Path) -> Iterator[tuple[int, str, float]]:
    """Step, tag and value of each scalar of an event file; a record that is cut off at its end is left out."""
    content = memoryview(path.read_bytes())
    at = 0
    while at + 12 <= len(content):
        (size,) = struct.unpack_from("<Q", content, at)
        record = content[at + 12 : at + 12 + size]
        at += 16 + size
        if len(record) < size or at > len(content):
            return
        step = 0
        summaries = []
        for field, value in _fields(record):
            if field == 2 and isinstance(value, int):
                step = value
            elif field == 5 and isinstance(value, memoryview):
                summaries.append(value)
        for summary in summaries:
            for field, value in _fields(summary):
                if field == 1 and isinstance(value, memoryview):
                    tag, number = _scalar(value)
                    if number is not None:
                        yield step, tag, number


def _scalar(value: memoryview) -> tuple[str, float | None]:
    """The tag of a value of a summary, and its number if it is one."""
    tag, number = "", None
    for field, part in _fields(value):
        if field == 1 and isinstance(part, memoryview):
            tag = bytes(part).decode("utf-8", "replace")
        elif field == 2 and isinstance(part, float):
            number = part
        elif field == 8 and isinstance(part, memoryview):  # a tensor of one float
            for inner, content in _fields(part):
                if inner in (4, 5) and isinstance(content, memoryview) and len(content) == 4:
                    (number,) = struct.unpack("<f", content)
                elif inner == 5 and isinstance(content, float):
                    number = content
    return tag, number


def _fields(message: memoryview) -> Iterator[tuple[int, int | float | memoryview]]:
    """Number and value of each field of a message of protocol buffers; what is cut off ends it."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
        elif kind == 1 and at + 8 <= len(message):
            yield key >> 3, message[at : at + 8]
            at += 8
        elif kind == 5 and at + 4 <= len(message):
            yield key >> 3, struct.unpack_from("<f", message, at)[0]
            at += 4
        elif kind == 2:
            size, at = _varint(message, at)
            yield key >> 3, message[at : at + size]
            at += size
        else:
            return


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message) and shift < 70:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if not byte & 128:
            break
    return value, at
