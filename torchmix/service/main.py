"""What runs in a loader process."""

from __future__ import annotations

import logging
import resource
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import NoReturn

import msgspec

from torchmix.boards.board import figures_text, own_board, shown_every_second
from torchmix.boards.socket_folders import PREFIX, remove_left_folder
from torchmix.catalog.in_store import fetch_catalog
from torchmix.catalog.manifest import Manifest, kept_manifests
from torchmix.catalog.settings import settings_of
from torchmix.catalog.store import Catalog, open_manifest, open_part, views_of
from torchmix.errors import CatalogError, HistoryMissing, OptionError, TorchmixError
from torchmix.parallel.children import ProcessBeat, onlooking, run_process
from torchmix.parallel.wire import ErrorForm
from torchmix.reader.items import item_columns, unit_catalog
from torchmix.recipe.parts import Part
from torchmix.recipe.sources import flows, maps_of, masked_sources, overflow_of
from torchmix.recipe.structs import Packing, Source
from torchmix.service.keys import KeyPair, ServerKeys, server_keys
from torchmix.service.served import PartToServe, ServedCatalogs
from torchmix.service.server import LoaderServer

# --- The figures of a loader for Prometheus: one page, on this machine alone.
#
# Nobody beyond this machine reaches it; a scrape takes nothing from the loader but the time to write some forty lines.

PRESENT = ("cache_bytes", "cache_pages", "open_document_bytes", "files_open", "decode_amplification", "clients")
"""Figures that also fall; the others are counters. Names that begin with `waiting` are, too."""


def metrics_text(figures: Mapping[str, int | float]) -> str:
    """Figures as lines, each metric with its type; names begin with `torchmix_loader_`."""
    return figures_text(figures, prefix="torchmix_loader_", is_counted=_is_counted)


def _is_counted(name: str) -> bool:
    return name not in PRESENT and not name.startswith("waiting")


class MetricsPage:
    """A server of the page; `run` in a thread, `close` from another."""

    def __init__(self, port: int, figures: Callable[[], Mapping[str, int | float]]) -> None:
        """Listen.

        Args:
            port: On 127.0.0.1; 0: any free one.
            figures: What is shown, as it is at each scrape.

        Raises:
            OptionError: The port is taken.
        """

        class Page(BaseHTTPRequestHandler):
            """One scrape."""

            timeout = 5.0

            def scrape(self) -> None:
                """Answer."""
                is_known = self.path == "/metrics"
                body = metrics_text(figures()).encode() if is_known else b"the page is /metrics\n"
                self.send_response(200 if is_known else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = scrape  # noqa: N815  # the name that the server asks for

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        try:
            self._server = HTTPServer(("127.0.0.1", port), Page)
        except OSError as error:
            raise OptionError(f"--metrics {port}: {error.strerror}; name a free port") from error
        self.port = self._server.server_port

    def run(self) -> None:
        """Answer until `close`."""
        with onlooking():
            self._server.serve_forever(poll_interval=0.5)

    def close(self) -> None:
        """End `run`."""
        self._server.shutdown()
        self._server.server_close()


# --- The last warnings of a process, kept for whoever asks what it said before it was lost.
#
# At most `MOST_LINES` lines of `MOST_CHARACTERS`, whatever is logged; a line may be read by another thread at any
# time. Cost: of a warning, its text.

MOST_LINES = 5
MOST_CHARACTERS = 300


class LastWords(logging.Handler):
    """Keeps the last warnings and errors."""

    def __init__(self) -> None:
        """Nothing has been said yet."""
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
        self._lines: deque[str] = deque(maxlen=MOST_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self._lines.append(self.format(record).strip().partition("\n")[0][:MOST_CHARACTERS])

    def lines(self) -> tuple[str, ...]:
        """The last lines, oldest first."""
        return tuple(self._lines)


@contextmanager
def last_words() -> Iterator[LastWords]:
    """Keep what this package warns of inside."""
    words, package = LastWords(), logging.getLogger("torchmix")
    if logging.lastResort is not None and not package.hasHandlers():
        package.addHandler(logging.lastResort)  # which is left out where there is any other one
    package.addHandler(words)
    try:
        yield words
    finally:
        package.removeHandler(words)


# --- What runs in a loader process.
#
# It ends when the starter does, says so, or is killed; nothing is left behind. Cost: the imports of a reader, some 60
# MB, and that of the reader.

OTHER_FILES = 1024
"""Open files that a loader keeps for what it reads, for connections that end and for itself."""
_LENGTH_BYTES = 8


class LoaderStart(msgspec.Struct, frozen=True, kw_only=True):
    """What a loader is told first."""

    parts: dict[str, Part]
    """What of a recipe is served, by the name of the part."""
    base: str
    """The folder that paths of files are relative to: the recipe's."""
    catalog_folder: str
    """Where the catalog lies; or its address in a store."""
    cache_bytes: int
    """Decoded pages kept."""
    bind: str
    """Where it listens."""
    keys: str = ""
    """The folder of keys; empty: without."""
    near: str = ""
    """A socket, as `ipc:///path`, where processes of this user on this machine need no keys; empty: none."""
    own: KeyPair | None = None
    """Its keys where they lie in no folder."""
    allowed: tuple[str, ...] = ()
    """With `own`: the public keys of its clients."""
    cpu: int = 0
    """Processors that its threads may use; 0: all."""
    ignored_signals: tuple[int, ...] = ()
    """Signals that do not end it, beside SIGINT."""
    metrics_port: int = 0
    """On loopback; 0: none."""

    def fetched_catalog(self) -> Path:
        """The folder of the catalog on this host, as it is published now."""
        return fetch_catalog(Path(self.base), self.catalog_folder)


class LoaderStarted(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """What a loader answers; after it come beats."""

    endpoint: str = ""
    error: ErrorForm | None = None


LoaderSays = LoaderStarted | ProcessBeat
_decode_start = msgspec.msgpack.Decoder(LoaderStart).decode
decode_said = msgspec.msgpack.Decoder(LoaderSays).decode


def framed(message: msgspec.Struct) -> bytes:
    """A message behind its length."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


def unframed(buffer: bytearray) -> bytes | None:
    """Take the first message out of what has come; None while it is not whole."""
    stop = _LENGTH_BYTES + int.from_bytes(buffer[:_LENGTH_BYTES], "little")
    if len(buffer) < max(stop, _LENGTH_BYTES):
        return None
    found = bytes(buffer[_LENGTH_BYTES:stop])
    del buffer[:stop]
    return found


def main(descriptor: int, ignored: Collection[int], cpu: int) -> NoReturn:
    """See `run_process`, whose arguments these are."""
    run_process(run_loader, descriptor, ignored, cpu=cpu)


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
                end.sendall(framed(LoaderStarted(error=ErrorForm.of(error))))
            return 1
        with suppress(ValueError):  # a thread of a test
            signal.signal(signal.SIGTERM, lambda *_: server.stop())
        try:
            end.sendall(framed(LoaderStarted(endpoint=server.endpoint)))
        except OSError:
            return 0
        end.setblocking(False)

        def beat(now: ProcessBeat) -> None:
            with suppress(OSError):  # who has started it is stopped, or gone
                end.send(framed(now))

        own_board.open("loader", facts={"endpoint": server.endpoint})
        with shown_every_second(own_board, "serving", server.figures):
            server.run(stop_when_readable=end.fileno(), beat=beat)
    return 0


def parts_with_catalog(
    parts: Mapping[str, Part], catalog_folder: Path, directory: Path, fingerprint: str = ""
) -> dict[str, PartToServe]:
    """Parts of a recipe as they are published now, or one as a run before had it.

    A loader may start, or start again, beside a job whose catalog was indexed again since.

    Args:
        parts: By name.
        catalog_folder: Where the catalog lies.
        directory: The recipe's folder.
        fingerprint: Of the catalog that is wanted; empty: any.

    Raises:
        CatalogMissing, CatalogStale: A part is not indexed as it is in the recipe, and no run before has had it so.
    """
    fault: CatalogError | None = None
    present: dict[str, PartToServe] = {}
    try:
        present = parts_to_serve(parts, partial(open_part, catalog_folder), directory)
    except CatalogError as error:  # indexed for another recipe, as one that comes next
        fault = error
    if fault is None and (not fingerprint or _has(present, fingerprint)):
        return present
    with suppress(HistoryMissing):
        for manifest in kept_manifests(catalog_folder):
            for name, part in parts.items():
                with suppress(CatalogError):
                    kept = parts_to_serve({name: part}, partial(_opened, catalog_folder, manifest), directory)
                    if not fingerprint or _has(kept, fingerprint):
                        return kept
    if fault is not None:
        raise fault
    return present


def _opened(catalog_folder: Path, manifest: Manifest, part: Part) -> Catalog:
    """A part by a manifest that was kept; errors as `open_part`."""
    return open_manifest(catalog_folder, settings_of(part.sources, part.shuffle), manifest, views_of(part))


def _has(parts: Mapping[str, PartToServe], fingerprint: str) -> bool:
    return any(one.catalog.fingerprint == fingerprint for one in parts.values())


def parts_to_serve(
    parts: Mapping[str, Part], open_catalog: Callable[[Part], Catalog], directory: Path
) -> dict[str, PartToServe]:
    """Parts of a recipe in a folder, with their catalogs, and the items of each that has some; errors as those of
    `open_catalog`.
    """
    found = {
        name: PartToServe(
            catalog=open_catalog(part),
            masked=masked_sources(part.sources),
            seed=part.seed,
            is_cut=part.packing.method == "concat" or any(_is_cut(part.packing, one) for one in part.sources.values()),
            maps=maps_of(part.sources),
        )
        for name, part in parts.items()
    }
    for name, served in list(found.items()):
        if any(source.items for source in served.catalog.sources.values()):
            found[f"items of {name}"] = PartToServe(catalog=item_columns(served.catalog), is_cut=False)
            found[f"units of {name}"] = PartToServe(
                catalog=unit_catalog(served.catalog, directory),
                masked=_with_items(served),
                seed=served.seed,
                is_cut=False,
                decodes=served.catalog,
            )
    return found


def _is_cut(packing: Packing, source: Source) -> bool:
    """Whether documents of a source come in pieces."""
    return flows(source) or overflow_of(source, packing) == "split"


def _open(start: LoaderStart, stack: ExitStack) -> LoaderServer:
    def parts_with(fingerprint: str = "") -> dict[str, PartToServe]:
        return parts_with_catalog(start.parts, start.fetched_catalog(), Path(start.base), fingerprint)

    served = ServedCatalogs(parts_with(), Path(start.base), cache_bytes=start.cache_bytes, parts_with=parts_with)
    stack.callback(served.close)
    server = LoaderServer(
        served,
        bind=start.bind,
        keys=_keys(start),
        near=start.near,
        words=stack.enter_context(last_words()).lines,
        most_clients=clients_within(raised_file_limit()),
    )
    stack.callback(remove_sockets, start)
    if start.metrics_port:
        page = MetricsPage(start.metrics_port, server.figures)
        stack.callback(page.close)
        threading.Thread(target=page.run, name="torchmix-metrics", daemon=True).start()
    return server


def remove_sockets(start: LoaderStart) -> None:
    """Remove the paths that a loader listened at, and their folder where the process that holds it has gone."""
    for endpoint in (start.bind, start.near):
        if endpoint.startswith("ipc://"):
            path = Path(endpoint.removeprefix("ipc://"))
            path.unlink(missing_ok=True)
            if path.parent.name.startswith(PREFIX):
                remove_left_folder(path.parent)


def raised_file_limit() -> int:
    """How many files this process may have open, which from now on are as many as the system lets it have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = 1 << 20
    if soft < hard:
        with suppress(OSError, ValueError):  # forbidden in this container
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            return hard
    return soft


def clients_within(files: int) -> int:
    """Clients that a loader may serve: each has a connection, which is an open file. What it reads has files, too."""
    return max(1, files - min(OTHER_FILES, files // 2))


def _with_items(part: PartToServe) -> frozenset[str]:
    """Sources with items whose bad rows are masked."""
    return frozenset(name for name in part.masked if part.catalog.sources[name].items)


def _keys(start: LoaderStart) -> ServerKeys | None:
    if start.own is not None:
        allowed = frozenset(start.allowed)
        return ServerKeys(own=start.own, allowed=lambda: allowed)
    return server_keys(Path(start.keys)) if start.keys else None


def receive(end: socket.socket) -> bytes:
    """The first message.

    Raises:
        EOFError: The other side has gone.
    """
    found = bytearray()
    while (message := unframed(found)) is None:
        part = end.recv(1 << 16)
        if not part:
            raise EOFError("the other side has gone")
        found += part
    return message
