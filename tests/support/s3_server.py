"""A real S3 server on the loopback interface, and a proxy before it that counts, delays and fails requests.

In: a folder for the server's output. Out: `S3Server`, with buckets and objects that a test puts and deletes; `Proxy`,
whose address goes to the program under test. Both end with their `with` block. The server is moto's, in a process of
its own.
"""

from __future__ import annotations

import http.client
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.support.ports import free_port
from tests.support.processes import Processes, wait_until

HOST = "127.0.0.1"
DROP = "drop"
"""What `Proxy.fail` returns to end a connection without an answer."""
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class S3Server:
    """A running server."""

    port: int

    def put(self, key: str, content: bytes) -> None:
        """Write an object; `key` begins with its bucket."""
        status = self._ask("PUT", key, content)
        assert status == 200, f"{key}: {status}"

    def put_folder(self, folder: Path, root: str) -> None:
        """Write all files of a folder below `root`, which begins with a bucket."""
        self._ask("PUT", root.split("/")[0])
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(f"{root}/{path.relative_to(folder).as_posix()}", path.read_bytes())

    def delete(self, key: str) -> None:
        """Delete an object."""
        assert self._ask("DELETE", key) == 204

    def _ask(self, method: str, key: str, content: bytes = b"") -> int:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=30)
        try:
            connection.request(method, f"/{key}", content, {"Authorization": "AWS key:unchecked"})
            return connection.getresponse().status
        finally:
            connection.close()


@contextmanager
def s3_server(directory: Path) -> Iterator[S3Server]:
    """Start a server; `directory` receives its output."""
    with Processes(directory) as processes:
        port = free_port()
        child = processes.start_python("-m", "moto.server", "-H", HOST, "-p", str(port), name="moto")

        def answers() -> bool:
            assert child.returncode is None, child.report()
            with suppress(OSError), socket.create_connection((HOST, port), timeout=1):
                return True
            return False

        wait_until(answers, deadline_s=60, what="the S3 server")
        yield S3Server(port=port)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A request that a client made."""

    method: str
    key: str
    first_byte: int
    """The range of the request begins here; -1 if it has none."""
    num_bytes: int


@dataclass(kw_only=True, slots=True)
class Proxy:
    """Stands before a server."""

    server: S3Server
    delay_s: float = 0.0
    """How long each request waits."""
    fail: Callable[[Asked], int | str | None] = lambda asked: None
    """The status to answer a request with, or DROP; None passes it on."""
    asked: list[Asked] = field(default_factory=list)
    """Requests since it was emptied."""
    port: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def environment(self) -> dict[str, str]:
        """What makes a program speak to this proxy."""
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://{HOST}:{self.port}"}

    def ranges(self) -> list[Asked]:
        """Requests for ranges of objects."""
        with self.lock:
            return [one for one in self.asked if one.method == "GET" and one.first_byte >= 0]


@contextmanager
def proxy(server: S3Server) -> Iterator[Proxy]:
    """Start a proxy, in threads of this process."""
    state = Proxy(server=server)
    handler = type("_Handler", (_Handler,), {"state": state})
    listener = ThreadingHTTPServer((HOST, 0), handler)
    listener.daemon_threads = True
    state.port = listener.server_address[1]
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield state
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # headers and body together
    state: Proxy

    def handle_expect_100(self) -> bool:
        """Answer at once: a client that writes waits for it."""
        done = super().handle_expect_100()
        self.wfile.flush()
        return done

    def _pass_on(self) -> None:
        content = self._body()
        span = re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        first, last = (int(span[1]), int(span[2])) if span is not None else (-1, -1)
        key = self.path.lstrip("/").split("?")[0]
        asked = Asked(
            method=self.command, key=key, first_byte=first, num_bytes=last - first + 1 if span is not None else 0
        )
        with self.state.lock:
            self.state.asked.append(asked)
            failure = self.state.fail(asked)
        time.sleep(self.state.delay_s)
        if failure == DROP:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if failure is not None:
            self._answer(int(failure), [], b"")
            return
        connection = http.client.HTTPConnection(HOST, self.state.server.port, timeout=60)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _OF_THE_WAY}
            connection.request(self.command, self.path, content, headers)
            answer = connection.getresponse()
            body = answer.read()
            length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(body))
            answered = [pair for pair in answer.getheaders() if pair[0].lower() not in _OWN_HEADERS]
            self._answer(answer.status, [*answered, ("Content-Length", length or "0")], body)
        finally:
            connection.close()

    def _body(self) -> bytes:
        """What the client sends, by its length or in chunks."""
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        with suppress(ConnectionError):  # who asked may be gone
            self.send_response_only(status)
            for name, value in headers or [("Content-Length", str(len(body)))]:
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
            self.wfile.flush()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Nothing is written to the test's output."""


_OF_THE_WAY = ("transfer-encoding", "expect", "content-length")
"""What concerns the way from the client alone."""
_OWN_HEADERS = ("content-length", "transfer-encoding", "connection", "date", "server")
