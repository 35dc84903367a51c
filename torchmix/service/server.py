"""A loader's side of the wire: one socket, one thread that reads, and bounds on all that clients may make it hold.

It answers pings while it reads; a client that asks for more than its window, or whose replies nobody takes, is told
that the loader is busy, and no other client notices; what is no message is dropped and counted; a connection that sends
more than a window of which no message comes is ended. Nothing listens over TCP without CURVE and a list of the clients'
keys. Cost: some 50 microseconds a request, and the memory of the reader and of a window for each client.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import zmq
import zmq.utils.z85

from torchmix.errors import OptionError, WireError
from torchmix.parallel.children import OwnPulse, ProcessBeat
from torchmix.service.connections import OPTIONS, Connections
from torchmix.service.endpoints import check_ipc, check_keys
from torchmix.service.keys import KeyPair, ServerKeys
from torchmix.service.messages import (
    MOST_REASON,
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
    checksum_in,
    decode_of_client,
    encode,
    one_line,
    pages_of,
    pieces_of,
    planned_bytes,
)
from torchmix.service.served import Asker, ReadingThread, ServedCatalogs, Work

logger = logging.getLogger(__name__)

OWED_BYTES = 256 << 20
"""Planned bytes of requests whose replies have not left, of all clients together; beyond it each client gets one reply
after the other."""
SILENT_CLIENT_S = 120.0
"""A client that has said nothing for so long says hello again."""
KNOWN_S = 1.0
"""Between two looks whether the key of a message is still a client's."""
UNKNOWN_S = 0.1
"""Between two looks for new keys while unknown ones come."""
_ZAP = "inproc://zeromq.zap.01"
_DOMAIN = b"torchmix"
_ZMQ_THREADS = "ZMQbg"
"""What libzmq calls its threads, which carry messages, also to and from a loader that is stuck."""
_LOOK_S = 0.1


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
        owed_bytes: int = OWED_BYTES,
        words: Callable[[], tuple[str, ...]] = tuple,
        most_clients: int = 4096,
    ) -> None:
        """Bind.

        Args:
            served: What it reads; the caller closes it after `run`.
            bind: `ipc:///path` in a folder of this user alone, or `tcp://address:port`; with port 0 the system chooses.
            keys: Its pair and its clients' public keys; may be left out with `ipc://` only.
            near: `ipc:///path`, where processes of this user on this machine need no keys; empty: nowhere.
            window_bytes: Planned bytes that a client may have asked for and not got. Twice as many are accepted, since
                a client may have got what is not known here to have left.
            owed_bytes: Planned bytes of all requests whose replies have not left, but for one of each client.
            words: Its last warnings.
            most_clients: Clients that it serves at a time.

        Raises:
            OptionError: It is TCP, and there are no keys; or it is in use, or none.
        """
        check_keys(bind, has_keys=keys is not None)
        for each in (bind, near):
            check_ipc(each)
        self._served, self._window_bytes, self._most_owed = served, window_bytes, owed_bytes
        self._allowed, self._words, self._most_clients = keys, words, most_clients
        self._known_keys: frozenset[str] = frozenset()
        self._looked_s = -KNOWN_S
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
        self._clients: dict[bytes, Asker] = {}
        self._owed_bytes = 0
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
        pulse = OwnPulse(beat, carriers=_ZMQ_THREADS)
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
            "connections_ended": self._connections.num_cut,
            "owed_bytes": self._owed_bytes,
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
            what, _, _ = str(error).partition(" (addr=")
            raise OptionError(
                f"cannot listen at {bind}: {what}; name an address of this machine and a free port, or port 0 for any"
            ) from error
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
        is_known = domain == _DOMAIN and self._is_known(key)
        if not is_known:
            self._counts["denied"] += 1
            logger.warning("a client with the unknown public key %s was turned away", key)
        answer = [b"200", b"OK", key.encode()] if is_known else [b"400", b"unknown key", b""]
        self._zap.send_multipart([*frames[:cut], b"1.0", number, *answer, b""])

    def _is_known(self, key: str) -> bool:
        """Whether a public key is a client's, or was a moment ago."""
        assert self._allowed is not None
        if time.monotonic() - self._looked_s >= (KNOWN_S if key in self._known_keys else UNKNOWN_S):
            self._known_keys, self._looked_s = self._allowed.allowed(), time.monotonic()
        return key in self._known_keys

    def _is_let_in(self, sender: bytes, frame: Any) -> bool:
        """Whether who sent a frame may still ask: its key may have been removed since it came."""
        try:
            key = str(frame.get("User-Id"))
        except zmq.ZMQError:  # it came in without one, where none is needed
            return True
        if self._is_known(key):
            return True
        if (client := self._clients.pop(sender, None)) is not None:
            self._forget(client)
            self._counts["denied"] += 1
            logger.warning("a client is turned away: its public key %s was removed", key)
            self._send(sender, encode(LoaderRefusal(reason=f"the public key {key} was removed from the loader's keys")))
        return False

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
                if not self._is_let_in(sender.bytes, frames[0]):
                    continue
            try:
                message, arrays = decode_of_client([frame.buffer for frame in frames])
                self._answer(sender.bytes, message, arrays, checksum_in(frames[0].buffer))
            except WireError as error:
                self._counts["bad_messages"] += 1
                logger.debug("dropped what is no message: %s", error)

    def _answer(self, sender: bytes, message: FromClient, arrays: Arrays, checksum: int) -> None:
        client = self._clients.get(sender)
        if client is not None:
            client.heard_s = time.monotonic()
        if isinstance(message, LoaderHello):
            self._greet(sender, message)
        elif client is None:
            self._send(sender, encode(LoaderRefusal(reason="say hello first", is_unknown=True)))
        elif isinstance(message, LoaderPing):
            pong = LoaderPong(
                number=message.number,
                owed=client.num_owed,
                waiting=self._reading.num_waiting,
                at_hand_s=self._reading.at_hand_s,
                figures=self.figures(),
                words=self._words(),
            )
            self._send(sender, encode(pong))
        elif isinstance(message, PieceRequest):
            self._accept(client, message, arrays, checksum)
        else:
            self._look_ahead(client, message, arrays)

    def _greet(self, sender: bytes, hello: LoaderHello) -> None:
        now = time.monotonic()
        for one in [one for one in self._clients.values() if now - one.heard_s > SILENT_CLIENT_S]:
            self._forget(self._clients.pop(one.sender))
        reason = self._served.refusal(hello)
        if not reason and sender not in self._clients and len(self._clients) >= self._most_clients:
            reason = f"this loader serves {len(self._clients)} clients, all that its open files allow; raise ulimit -n"
        if reason:
            self._counts["refused"] += 1
            logger.warning("client %s is refused: %s", one_line(hello.client), one_line(reason, MOST_REASON))
            self._send(sender, encode(LoaderRefusal(reason=reason[:4096])))
            return
        # Who says hello again owes no less for it.
        self._clients.setdefault(sender, Asker(sender, hello.catalog, now)).catalog = hello.catalog
        self._send(sender, encode(LoaderWelcome(loader=self._name, window_bytes=self._window_bytes)))

    def _accept(self, client: Asker, message: PieceRequest, arrays: Arrays, checksum: int) -> None:
        tokens = pieces_of(arrays).tokens
        num_bytes = planned_bytes(len(tokens), int(tokens.sum()))
        for one in self._clients.values() if self._owed_bytes + num_bytes > self._most_owed else [client]:
            self._settle(one)
        is_full = client.owed_bytes + num_bytes > 2 * self._window_bytes
        if is_full or (client.owed_bytes and self._owed_bytes + num_bytes > self._most_owed):
            self._counts["busy"] += 1
            self._send(client.sender, encode(BusyReply(number=message.number)))
            return
        self._counts["accepted"] += 1
        client.owed_bytes += num_bytes
        self._owed_bytes += num_bytes
        client.num_owed += 1
        self._reading.add(
            Work(
                asker=client,
                catalog=client.catalog,
                number=message.number,
                checksum=checksum,
                arrays=arrays,
                num_bytes=num_bytes,
                until_s=time.monotonic() + message.patience_ms / 1000,
            )
        )

    def _forget(self, client: Asker) -> None:
        """Owe nothing to a client that is known no more."""
        while client.leaving:
            self._owe_less(client, client.leaving.popleft()[1])

    def _settle(self, client: Asker) -> None:
        """Owe a client no more what has left."""
        while client.leaving and client.leaving[0][0].done:
            self._owe_less(client, client.leaving.popleft()[1])

    def _owe_less(self, client: Asker, num_bytes: int) -> None:
        client.owed_bytes -= num_bytes
        self._owed_bytes -= num_bytes

    def _look_ahead(self, client: Asker, message: PagesAhead, arrays: Arrays) -> None:
        pages = pages_of(arrays)
        self._served.check_pages(client.catalog, message.source, pages)
        num_clients = sum(one.catalog == client.catalog for one in self._clients.values()) if message.is_over else 0
        self._reading.add(
            Work(
                asker=client,
                catalog=client.catalog,
                source=message.source,
                pages=pages.copy(),
                num_clients=num_clients,
            )
        )

    def _send(self, sender: bytes, frames: tuple[bytes, memoryview]) -> Any:
        """Send a message; what tells whether it has left, None where nobody takes it."""
        try:
            tracker = self._socket.send_multipart([sender, *frames], zmq.NOBLOCK, copy=False, track=True)
            self._bytes_sent += len(frames[1])
            return tracker
        except zmq.ZMQError:
            # It has gone, or takes nothing: it asks again if it comes back.
            self._counts["dropped"] += 1
            return None

    def _send_done(self) -> None:
        while self._reading.done:
            work, frames = self._reading.done.popleft()
            client, tracker = work.asker, None
            client.num_owed -= 1
            if frames is not None and self._clients.get(client.sender) is client:
                self._counts["replies"] += 1
                tracker = self._send(client.sender, frames)
            if tracker is None:
                self._owe_less(client, work.num_bytes)
            else:
                client.leaving.append((tracker, work.num_bytes))


def new_pair() -> KeyPair:
    """A new pair of CURVE keys."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public=public.decode(), secret=secret.decode())
