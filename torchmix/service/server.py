"""A loader's side of the wire: one socket, one thread that reads, and bounds on all that clients may make it hold.

In: messages of clients. Out: replies. Must hold: it answers pings while it reads; a client that asks for more than its
window, or whose replies nobody takes, is told that the loader is busy, and no other client notices; what is no message
is dropped and counted; a connection that sends more than a window of which no message comes is ended. Nothing listens
beyond this machine without CURVE and a list of the clients' keys. Cost: some 50 microseconds a request, and the memory
of the reader and of a window for each client.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import zmq
import zmq.utils.z85

from torchmix.errors import OptionError, WireError
from torchmix.parallel.children.judge import ProcessBeat
from torchmix.parallel.children.pulse import OwnPulse
from torchmix.service.connections import OPTIONS, Connections
from torchmix.service.endpoints import check_ipc, is_beyond_this_machine
from torchmix.service.keys import KeyPair, ServerKeys
from torchmix.service.messages import (
    MOST_REQUEST_BYTES,
    WINDOW_BYTES,
    Arrays,
    BusyReply,
    FromClient,
    LoaderHello,
    LoaderPing,
    LoaderPong,
    LoaderRefusal,
    LoaderWelcome,
    PagesAhead,
    PieceRequest,
    decode_of_client,
    encode,
    pieces_of,
    planned_bytes,
)
from torchmix.service.reading import ReadingThread, Work
from torchmix.service.served import ServedCatalogs

logger = logging.getLogger(__name__)

WAITING_BYTES = 256 << 20
"""Planned bytes of requests that wait to be read, of all clients together."""
SILENT_CLIENT_S = 120.0
"""A client that has said nothing for so long says hello again."""
_ZAP = "inproc://zeromq.zap.01"
_DOMAIN = b"torchmix"
_LOOK_S = 0.1


class _Client(msgspec.Struct, eq=False):
    catalog: str
    heard_s: float
    accepted_bytes: int = 0
    settled_bytes: int = 0
    num_owed: int = 0


class LoaderServer:
    """A loader; `run` in one thread, `stop` from any."""

    def __init__(
        self,
        served: ServedCatalogs,
        *,
        bind: str,
        keys: ServerKeys | None = None,
        near: str = "",
        window_bytes: int = WINDOW_BYTES,
        waiting_bytes: int = WAITING_BYTES,
        words: Callable[[], tuple[str, ...]] = tuple,
        most_clients: int = 4096,
    ) -> None:
        """Bind.

        Args:
            served: What it reads; the caller closes it after `run`.
            bind: `ipc:///path` in a folder of this user alone, or `tcp://address:port`; with port 0 the system chooses.
            keys: Its pair and its clients' public keys; may be left out on this machine only.
            near: `ipc:///path`, where processes of this user on this machine need no keys; empty: nowhere.
            window_bytes: Planned bytes that a client may have asked for and not got.
            waiting_bytes: Planned bytes of all requests that wait.
            words: Its last warnings.
            most_clients: Clients that it serves at a time.

        Raises:
            OptionError: The address is reached from other machines, and there are no keys; or it is in use, or none.
        """
        if is_beyond_this_machine(bind) and keys is None:
            raise OptionError(
                f"{bind} is reached from other machines: loaders listen there only with keys. Make some with "
                "torchmix keys DIR --clients N, and pass --keys DIR; or bind to 127.0.0.1"
            )
        for each in (bind, near):
            check_ipc(each)
        self._served, self._window_bytes, self._most_waiting = served, window_bytes, waiting_bytes
        self._allowed, self._words, self._most_clients = keys, words, most_clients
        self._known_keys: frozenset[str] = frozenset()
        self._context = zmq.Context()
        self._socket: Any = None
        self._zap: Any = None
        self._connections: Any = None
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        try:
            self._bind(bind, keys, near)
        except BaseException:
            self._close_sockets()
            raise
        self._clients: dict[bytes, _Client] = {}
        self._reading = ReadingThread(served, self._poke)
        self._is_stopping = False
        self.num_turns = 0  # times that it woke up
        self._counts = dict.fromkeys(("accepted", "replies", "busy", "refused", "dropped", "bad_messages", "denied"), 0)
        self._bytes_sent = 0
        self._name = f"{socket.gethostname()}:{os.getpid()}"

    def stop(self) -> None:
        """End `run` soon; may be called in a signal handler."""
        self._is_stopping = True
        self._poke()

    def run(
        self, *, stop_when_readable: int | None = None, beat: Callable[[ProcessBeat], None] = lambda _: None
    ) -> None:
        """Answer clients until `stop`.

        Args:
            stop_when_readable: A descriptor whose end, or any byte of which, stops it too: the parent's pipe.
            beat: Called once a second.
        """
        self._reading.start()
        poller = zmq.Poller()
        for one in (self._socket, self._connections.events, self._woken.fileno(), self._zap, stop_when_readable):
            if one is not None:
                poller.register(one, zmq.POLLIN)  # of a socket of Python the number comes back
        parent = os.getppid()
        pulse = OwnPulse(beat)
        try:
            while not self._is_stopping:
                self.num_turns += 1
                pulse.look(
                    is_asked=self._reading.is_asked,
                    num_signs=self._reading.num_taken,
                    threads=(self._reading.thread_number,),
                )
                ready = {each for each, _ in poller.poll(int(_LOOK_S * 1000))}
                if stop_when_readable in ready or os.getppid() != parent:
                    break
                if self._woken.fileno() in ready:
                    self._woken.recv(4096)
                if self._zap in ready:
                    self._let_in()
                if self._connections.events in ready:
                    self._connections.take()
                self._connections.look()
                self._send_done()
                if self._socket in ready:
                    self._receive_all()
        finally:
            self._is_stopping = True
            self._reading.stop()
            self._close_sockets()

    def figures(self) -> dict[str, int | float]:
        """Counts since it started, and present values."""
        return {
            **self._reading.figures,
            **{f"requests_{name}": count for name, count in self._counts.items()},
            "requests_failed": self._reading.num_failures,
            "requests_late": self._reading.num_late,
            "bytes_sent": self._bytes_sent,
            "clients": len(self._clients),
            "waiting_bytes": self._reading.waiting_bytes,
        }

    def _bind(self, bind: str, keys: ServerKeys | None, near: str) -> None:
        if keys is not None:
            # Without a ZAP handler CURVE lets in whoever knows the server's public key.
            self._zap = self._context.socket(zmq.ROUTER)
            self._zap.setsockopt(zmq.LINGER, 0)
            self._zap.bind(_ZAP)
        self._socket = self._context.socket(zmq.ROUTER)
        self._connections = Connections(self._socket)
        for option, value in (
            *OPTIONS,
            (zmq.SNDHWM, 256),
            (zmq.MAXMSGSIZE, MOST_REQUEST_BYTES),
            (zmq.HANDSHAKE_IVL, 5000),
            (zmq.ROUTER_MANDATORY, 1),
        ):
            self._socket.setsockopt(option, value)
        if "[" in bind:
            self._socket.setsockopt(zmq.IPV6, 1)
        if near:  # what is set from here on holds for the next bind alone
            self._socket.bind(near)
        if keys is not None:
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
            self._socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.own.secret)
            self._socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        try:
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            raise OptionError(f"cannot listen at {bind}: {error}") from error
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """Where it listens, with the port that the system has chosen."""

    def _close_sockets(self) -> None:
        if self._connections is not None:
            self._connections.close()
        for each in (self._socket, self._zap):
            if each is not None:
                each.close(0)
        self._context.term()
        self._wake.close()
        self._woken.close()

    def _let_in(self) -> None:
        """Answer a question of ZeroMQ's handshake: may this key come in? (RFC 27)"""
        frames = self._zap.recv_multipart()
        try:
            cut = frames.index(b"") + 1
            _, number, domain, _, _, mechanism, *credentials = frames[cut:]
        except ValueError:
            return
        key = zmq.utils.z85.encode(credentials[0]).decode() if mechanism == b"CURVE" else ""
        assert self._allowed is not None
        if key not in self._known_keys:
            try:
                self._known_keys = self._allowed.allowed()
            except OptionError as error:
                logger.warning("keys of clients cannot be read: %s", error)
        is_known = domain == _DOMAIN and key in self._known_keys
        if not is_known:
            self._counts["denied"] += 1
            logger.warning("a client with the unknown public key %s was turned away", key)
        answer = [b"200", b"OK", key.encode()] if is_known else [b"400", b"unknown key", b""]
        self._zap.send_multipart([*frames[:cut], b"1.0", number, *answer, b""])

    def _poke(self) -> None:
        with suppress(OSError):  # it is awake, or gone
            self._wake.send(b"x")

    def _receive_all(self) -> None:
        for _ in range(256):  # then look at all else
            try:
                sender, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if frames:
                self._connections.hear(frames)
            try:
                message, arrays = decode_of_client([frame.buffer for frame in frames])
                self._answer(sender.bytes, message, arrays)
            except WireError as error:
                self._counts["bad_messages"] += 1
                logger.debug("dropped what is no message: %s", error)

    def _answer(self, sender: bytes, message: FromClient, arrays: Arrays) -> None:
        client, now = self._clients.get(sender), time.monotonic()
        if client is not None:
            client.heard_s = now
            if not isinstance(message, LoaderHello):
                client.settled_bytes = max(client.settled_bytes, min(message.settled_bytes, client.accepted_bytes))
        if isinstance(message, LoaderHello):
            self._greet(sender, message)
        elif isinstance(message, LoaderPing):
            pong = LoaderPong(
                number=message.number,
                owed=0 if client is None else client.num_owed,
                waiting=self._reading.num_waiting,
                at_hand_s=self._reading.at_hand_s,
                figures=self.figures(),
                words=self._words(),
            )
            self._send(sender, encode(pong))
        elif client is None:
            self._send(sender, encode(LoaderRefusal(reason="say hello first", is_unknown=True)))
        elif isinstance(message, PieceRequest):
            self._accept(sender, client, message, arrays)
        else:
            self._look_ahead(client, message, arrays)

    def _greet(self, sender: bytes, hello: LoaderHello) -> None:
        now = time.monotonic()
        for one in [one for one, client in self._clients.items() if now - client.heard_s > SILENT_CLIENT_S]:
            del self._clients[one]
        reason = self._served.refusal(hello)
        if not reason and len(self._clients) >= self._most_clients:
            reason = f"this loader serves {len(self._clients)} clients, all that its open files allow; raise ulimit -n"
        if reason:
            self._counts["refused"] += 1
            logger.warning("client %s is refused: %s", hello.client, reason)
            self._send(sender, encode(LoaderRefusal(reason=reason[:4096])))
            return
        self._clients[sender] = _Client(catalog=hello.catalog, heard_s=now)
        self._send(sender, encode(LoaderWelcome(loader=self._name, window_bytes=self._window_bytes)))

    def _accept(self, sender: bytes, client: _Client, message: PieceRequest, arrays: Arrays) -> None:
        tokens = pieces_of(arrays).tokens
        num_bytes = planned_bytes(len(tokens), int(tokens.sum()))
        is_full = client.accepted_bytes - client.settled_bytes + num_bytes > self._window_bytes
        if is_full or self._reading.waiting_bytes + num_bytes > self._most_waiting:
            self._counts["busy"] += 1
            self._send(sender, encode(BusyReply(number=message.number)))
            return
        self._counts["accepted"] += 1
        client.accepted_bytes += num_bytes
        client.num_owed += 1
        work = Work(catalog=client.catalog, sender=sender, number=message.number, arrays=arrays, num_bytes=num_bytes)
        work.until_s = time.monotonic() + message.patience_ms / 1000
        self._reading.add(work)

    def _look_ahead(self, client: _Client, message: PagesAhead, arrays: Arrays) -> None:
        pages = arrays.get("page")
        if pages is None or pages.ndim != 1 or pages.dtype.name != "int64":
            raise WireError("progress without pages")
        num_clients = sum(one.catalog == client.catalog for one in self._clients.values()) if message.is_over else 0
        step = len(pages) if message.is_over else self._served.pages_at_once(client.catalog, message.source)
        parts = (pages[start : start + step].copy() for start in range(0, len(pages), max(1, step)))
        self._reading.add(
            *(
                Work(catalog=client.catalog, source=message.source, pages=part, num_clients=num_clients)
                for part in parts
            )
        )

    def _send(self, sender: bytes, frames: tuple[bytes, memoryview]) -> None:
        try:
            self._socket.send_multipart([sender, *frames], zmq.NOBLOCK, copy=False)
            self._bytes_sent += len(frames[1])
        except zmq.ZMQError:
            # It has gone, or takes nothing: it asks again if it comes back.
            self._counts["dropped"] += 1

    def _send_done(self) -> None:
        while self._reading.done:
            sender, frames = self._reading.done.popleft()
            if frames is not None:
                self._counts["replies"] += 1
                self._send(sender, frames)
            if (client := self._clients.get(sender)) is not None:
                client.num_owed = max(0, client.num_owed - 1)


def new_pair() -> KeyPair:
    """A new pair of CURVE keys."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public=public.decode(), secret=secret.decode())
