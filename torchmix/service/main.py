"""What runs in a loader process.

In: a socket to whoever has started it, which says what is served and where. Out: the endpoint over that socket, or why
there is none; then answers to clients. Must hold: it ends when the starter does, says so, or is killed; nothing is left
behind. Cost: the imports of a reader, some 60 MB, and that of the reader.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Collection
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NoReturn

import msgspec

from torchmix.catalog.open_part import open_part
from torchmix.errors import TorchmixError
from torchmix.parallel.error_form import ErrorForm
from torchmix.recipe.parts import Part
from torchmix.recipe.source.bad_rows import masked_sources
from torchmix.recipe.source.row_map import maps_of
from torchmix.service.endpoints import register
from torchmix.service.keys import server_keys
from torchmix.service.metrics import MetricsPage
from torchmix.service.served import PartToServe, ServedCatalogs
from torchmix.service.server import LoaderServer

_LENGTH_BYTES = 8
MOST_START_BYTES = 1 << 28


class LoaderStart(msgspec.Struct, frozen=True, kw_only=True):
    """What a loader is told first."""

    parts: dict[str, Part]
    """What of a recipe is served, by the name of the part."""
    base: str
    """The folder that paths of files are relative to: the recipe's."""
    catalog_folder: str
    """Where the catalog lies."""
    cache_bytes: int
    """Decoded pages kept."""
    bind: str
    """Where it listens."""
    keys: str = ""
    """The folder of keys; empty: without."""
    register: str = ""
    """The folder that it registers in; empty: nowhere."""
    metrics_port: int = 0
    """On loopback; 0: none."""


class LoaderStarted(msgspec.Struct, frozen=True, kw_only=True):
    """What a loader answers."""

    endpoint: str = ""
    error: ErrorForm | None = None


_decode_start = msgspec.msgpack.Decoder(LoaderStart).decode
decode_started = msgspec.msgpack.Decoder(LoaderStarted).decode


def send(end: socket.socket, message: LoaderStart | LoaderStarted) -> None:
    """Send a message behind its length."""
    body = msgspec.msgpack.encode(message)
    end.sendall(len(body).to_bytes(_LENGTH_BYTES, "little") + body)


def receive(end: socket.socket) -> bytes:
    """The bytes of a message.

    Raises:
        EOFError: The other side has gone.
    """
    length = int.from_bytes(_exactly(end, _LENGTH_BYTES), "little")
    if length > MOST_START_BYTES:
        raise EOFError("no message")
    return _exactly(end, length)


def main(descriptor: int, ignored: Collection[int]) -> NoReturn:
    """All that the process does.

    Args:
        descriptor: Its end of a pair of sockets.
        ignored: Signals that do not end it.
    """
    code = 1
    try:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        with socket.socket(fileno=descriptor) as end:
            code = run_loader(end)
    except BaseException:  # the edge of a process
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # whoever read it has gone
                stream.flush()
        # As a worker ends: threads of libraries that nobody waits for would abort the interpreter's teardown.
        os._exit(code)


def run_loader(end: socket.socket) -> int:
    """Serve until the other end goes; the exit code."""
    try:
        start = _decode_start(receive(end))
    except EOFError:
        return 0
    with ExitStack() as stack:
        try:
            server = _open(start, stack)
        except (TorchmixError, OSError) as error:
            with suppress(OSError):
                send(end, LoaderStarted(error=ErrorForm.of(error)))
            return 1
        with suppress(ValueError):  # a thread of a test
            signal.signal(signal.SIGTERM, lambda *_: server.stop())
        try:
            send(end, LoaderStarted(endpoint=server.endpoint))
        except OSError:
            return 0
        server.run(stop_when_readable=end.fileno())
    return 0


def _open(start: LoaderStart, stack: ExitStack) -> LoaderServer:
    parts = {
        name: PartToServe(
            catalog=open_part(Path(start.catalog_folder), part),
            masked=masked_sources(part.sources),
            seed=part.seed,
            maps=maps_of(part.sources),
        )
        for name, part in start.parts.items()
    }
    served = ServedCatalogs(parts, Path(start.base), cache_bytes=start.cache_bytes)
    stack.callback(served.close)
    keys = server_keys(Path(start.keys)) if start.keys else None
    server = LoaderServer(served, bind=start.bind, keys=keys)
    if start.bind.startswith("ipc://"):
        stack.callback(Path(start.bind.removeprefix("ipc://")).unlink, missing_ok=True)
    if start.metrics_port:
        page = MetricsPage(start.metrics_port, server.figures)
        stack.callback(page.close)
        threading.Thread(target=page.run, name="torchmix-metrics", daemon=True).start()
    if start.register:
        path = register(Path(start.register), server.endpoint)
        stack.callback(path.unlink, missing_ok=True)
    return server


def _exactly(end: socket.socket, num_bytes: int) -> bytes:
    found = bytearray()
    while len(found) < num_bytes:
        try:
            part = end.recv(num_bytes - len(found))
        except OSError:
            part = b""
        if not part:
            raise EOFError("the other side has gone")
        found += part
    return bytes(found)
