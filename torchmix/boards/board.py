"""What a process shows of itself: to others of its user a page of memory, to monitoring programs its figures."""

from __future__ import annotations

import mmap
import os
import re
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from torchmix.parallel.children import onlooking
from torchmix.parallel.liveness.evidence import RankIdentity, identity_of_process

# --- What a process shows of itself: a page of memory that other processes of its user can read.
#
# Cost: some 20 microseconds a write, 64 KiB of memory and a descriptor a process. Elsewhere than on Linux nothing is
# shown.

NAME = "torchmix-board"
"""The name that the memory has in /proc/PID/fd."""
BOARD_BYTES = 1 << 16
SHOW_S = 0.5
"""Between two writes of figures."""
MOST_EVENTS = 16
_PREFIX = struct.Struct("<II")
"""Bytes of the text, and its crc32."""

Figures = Mapping[str, str | int | float]


class BoardEvent(msgspec.Struct, frozen=True, array_like=True):
    """Something that happened once."""

    at_s: float
    """Seconds since 1970."""
    text: str


class BoardText(msgspec.Struct, frozen=True, kw_only=True):
    """What is on a board."""

    kind: str
    """`trainer`, `node worker`, `loader`, or `serve`."""
    pid: int
    started: str
    """The kernel's start time of the process, which a later one with the same pid does not have."""
    parent_pid: int
    parent_started: str
    run: str
    """Equal for processes of a job; empty where the parent says it."""
    since_s: float
    """Seconds of `time.monotonic`, which is one for all processes of a machine, and which nobody sets."""
    shown_s: float
    """When this was written, likewise."""
    facts: dict[str, str | int | float]
    """What is known of the process, as its rank."""
    figures: dict[str, dict[str, str | int | float]]
    """By part of the recipe, or by what the process does."""
    events: list[BoardEvent]


encode_board = msgspec.msgpack.Encoder().encode
decode_board = msgspec.msgpack.Decoder(BoardText).decode


class Board:
    """This process' board."""

    def __init__(self) -> None:
        """Show nothing before `open`."""
        self._memory: mmap.mmap | None = None
        self._descriptor: int | None = None
        self._lock = threading.Lock()
        self._process = 0
        self._kind = self._run = ""
        self._facts: dict[str, str | int | float] = {}
        self._figures: dict[str, dict[str, str | int | float]] = {}
        self._events: deque[BoardEvent] = deque(maxlen=MOST_EVENTS)
        self._since_s = 0.0
        self._shown_s: dict[str, float] = {}
        self._own = self._parent = RankIdentity(host="", pid=0, started="", pid_space="")

    def open(self, kind: str, *, run: str = "", facts: Figures | None = None) -> None:
        """Show what the process is; a second call adds facts, or names another run if nothing of the first is shown."""
        with self._lock:
            if run and run != self._run and not self._figures:
                self._kind, self._run, self._facts = kind, run, {}
            self._facts |= facts or {}
            if self._memory is None or self._process != os.getpid():
                self._kind, self._run, self._process = kind, run, os.getpid()
                self._figures, self._since_s = {}, time.monotonic()
                self._events.clear()
                try:
                    self._descriptor = os.memfd_create(NAME)
                except (AttributeError, OSError):  # not this system, forbidden, or too many open files
                    return
                os.ftruncate(self._descriptor, BOARD_BYTES)
                self._memory = mmap.mmap(self._descriptor, BOARD_BYTES)  # the descriptor stays open: others come by it
                self._own, self._parent = identity_of_process(self._process), identity_of_process(os.getppid())
            self._write()

    def show(self, name: str, figures: Callable[[], Figures], *, is_now: bool = False) -> None:
        """Show figures under a name; they are asked for only if it is time to write again, or `is_now`."""
        if self._memory is None or self._process != os.getpid():
            return
        now_s = time.monotonic()
        if not is_now and now_s - self._shown_s.get(name, 0.0) < SHOW_S:
            return
        found = dict(figures())
        with self._lock:
            self._shown_s[name] = now_s
            self._figures[name] = found
            self._write()

    def withdraw(self, name: str) -> None:
        """Show no figures under this name any more."""
        with self._lock:
            self._shown_s.pop(name, None)
            if self._figures.pop(name, None) is not None:
                self._write()

    def note(self, text: str) -> None:
        """Show an event."""
        with self._lock:
            self._events.append(BoardEvent(time.time(), text))
            self._write()

    def _write(self) -> None:
        if self._memory is None or self._process != os.getpid():
            return
        content = encode_board(
            BoardText(
                kind=self._kind,
                pid=self._own.pid,
                started=self._own.started,
                parent_pid=self._parent.pid,
                parent_started=self._parent.started,
                run=self._run,
                since_s=self._since_s,
                shown_s=time.monotonic(),
                facts=self._facts,
                figures=self._figures,
                events=list(self._events),
            )
        )
        if len(content) <= BOARD_BYTES - _PREFIX.size:
            self._memory[: _PREFIX.size + len(content)] = _PREFIX.pack(len(content), zlib.crc32(content)) + content


@contextmanager
def shown_every_second(board: Board, name: str, figures: Callable[[], Figures]) -> Iterator[None]:
    """Show figures while a block runs, from a thread of its own."""
    is_over = threading.Event()

    def show() -> None:
        with onlooking():
            while True:
                board.show(name, figures, is_now=True)
                if is_over.wait(1.0):
                    return

    thread = threading.Thread(target=show, name="torchmix-board", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        board.withdraw(name)


def text_in(content: bytes) -> BoardText | None:
    """What stands in the memory of a board; None while it is written, and where it is none."""
    if len(content) < _PREFIX.size:
        return None
    num_bytes, checksum = _PREFIX.unpack_from(content)
    text = content[_PREFIX.size : _PREFIX.size + num_bytes]
    if len(text) != num_bytes or zlib.crc32(text) != checksum:
        return None
    try:
        return decode_board(text)
    except msgspec.MsgspecError:
        return None


own_board = Board()
"""The board of this process."""


# --- The figures of `loader.stats()` and of shared loaders, in the forms that monitoring programs read.
#
# The output has every number of the dict, and nothing else. Cost: microseconds.

COUNTED = ("total_", "bytes_", "pages_", "cache_hits", "cache_misses")
"""Prefixes of the figures that only grow during the life of the reading process."""
LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


def flat_stats(stats: Mapping[str, Any], prefix: str = "torchmix/") -> dict[str, float]:
    """Numbers by name: `torchmix/fill`, and `torchmix/tokens_of_source/web` for each source.

    Args:
        stats: From `loader.stats()`.
        prefix: Start of every name.
    """
    flat: dict[str, float] = {}
    for name, value in stats.items():
        if isinstance(value, Mapping):
            flat |= flat_stats(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            flat[prefix + name] = value
    return flat


def prometheus_text(stats: Mapping[str, Any], labels: Mapping[str, object] | None = None) -> str:
    """Numbers in Prometheus' text format, version 0.0.4.

    Names begin with `torchmix_`. Names of seconds end with `_seconds`, and names of counters with `_total`. A dict
    becomes one metric with a label: `torchmix_tokens{source="web"}`.

    Args:
        stats: From `loader.stats()`.
        labels: Labels of every number, such as {"rank": 0, "job": "pretrain"}.

    Returns:
        Lines, each with a newline, for a scrape, a push gateway, or the textfile collector of node_exporter.

    Raises:
        ValueError: Prometheus does not accept the name of a label.

    Source: https://prometheus.io/docs/instrumenting/exposition_formats/
    """
    for label in labels or {}:
        if not LABEL.fullmatch(label):
            raise ValueError(f"label {label!r}: Prometheus takes letters, digits and underscores, no digit first")
    return figures_text(stats, prefix="torchmix_", is_counted=lambda name: name.startswith(COUNTED), labels=labels)


def figures_text(
    figures: Mapping[str, Any],
    *,
    prefix: str,
    is_counted: Callable[[str], bool],
    labels: Mapping[str, object] | None = None,
) -> str:
    """As `prometheus_text`.

    Args:
        figures: By name; other values than numbers and dicts of numbers are left out.
        prefix: Begins each metric.
        is_counted: Whether a figure of a name only grows.
        labels: The labels of each number.
    """
    fixed = {name: str(value) for name, value in (labels or {}).items()}
    lines: list[str] = []
    for name, value in figures.items():
        if isinstance(value, Mapping):
            metric, _, label = name.partition("_of_")
            numbers = {key: number for key, number in value.items() if isinstance(number, int | float)}
            labelled = [({**fixed, label or "name": key}, number) for key, number in numbers.items()]
            lines += _metric(prefix + _name(metric, is_counted(metric)), labelled)
        elif isinstance(value, int | float):
            lines += _metric(prefix + _name(name, is_counted(name)), [(fixed, value)])
    return "".join(f"{line}\n" for line in lines)


def _name(figure: str, is_counted: bool) -> str:
    name = figure.removeprefix("total_")
    if name.endswith("_s"):
        name = name.removesuffix("_s") + "_seconds"
    return f"{name}_total" if is_counted else name


def _metric(name: str, numbers: list[tuple[dict[str, str], float]]) -> list[str]:
    kind = "counter" if name.endswith("_total") else "gauge"
    lines = [f"# TYPE {name} {kind}"] if numbers else []
    for labels, number in numbers:
        inside = ",".join(f'{label}="{_escaped(value)}"' for label, value in labels.items())
        lines.append(f"{name}{f'{{{inside}}}' if inside else ''} {number!r}")
    return lines


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
