"""The client's side of the wire: a connection to each loader, and what comes over them.

Cost: a socket and its monitor for each loader; connections are made and remade in ZeroMQ's own thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import zmq
from numpy.typing import NDArray

from torchmix.errors import WireError
from torchmix.service.connections import OPTIONS
from torchmix.service.endpoints import is_own_socket
from torchmix.service.keys import ClientKeys
from torchmix.service.messages import (
    MOST_BODY_BYTES,
    MOST_HEADER_BYTES,
    Arrays,
    FromClient,
    FromLoader,
    checksum_in,
    decode_of_loader,
    encode,
)

News = Literal["connected", "gone", "denied", "damaged"]
"""What became of a connection: it is there; it has ended; the keys of one side are wrong; what came is no message."""


class Said(NamedTuple):
    """Something that has come over the connection to a loader."""

    endpoint: str
    news: News | None
    """None where a message came."""
    message: FromLoader | None
    arrays: Arrays
    reason: str
    """Why it is `denied` or `damaged`."""


class LoaderLinks:
    """Connections to loaders."""

    def __init__(self, keys: ClientKeys | None = None) -> None:
        """Nothing is connected yet; without keys only loaders of this machine answer."""
        self._keys = keys
        self._context: Any = zmq.Context()
        self._poller = zmq.Poller()
        self._socket_of: dict[str, Any] = {}
        self._monitor_of: dict[str, Any] = {}

    def open(self, endpoint: str) -> None:
        """Begin to connect; news follow."""
        link = self._context.socket(zmq.DEALER)
        for option, value in (
            *OPTIONS,
            (zmq.SNDHWM, 1000),
            (zmq.MAXMSGSIZE, MOST_BODY_BYTES + MOST_HEADER_BYTES),
            (zmq.CONNECT_TIMEOUT, 5000),
            (zmq.RECONNECT_IVL, 100),
            (zmq.RECONNECT_IVL_MAX, 2000),
            (zmq.IMMEDIATE, 1),
        ):
            link.setsockopt(option, value)
        if "[" in endpoint:
            link.setsockopt(zmq.IPV6, 1)
        near = "" if self._keys is None else self._keys.near_now().get(endpoint, "")
        if not is_own_socket(near):
            near = ""
        if self._keys is not None and not near:
            link.setsockopt_string(zmq.CURVE_SERVERKEY, self._keys.server_at(endpoint))
            link.setsockopt_string(zmq.CURVE_PUBLICKEY, self._keys.own.public)
            link.setsockopt_string(zmq.CURVE_SECRETKEY, self._keys.own.secret)
        events = (
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        )
        monitor = link.get_monitor_socket(events)
        monitor.setsockopt(zmq.LINGER, 0)
        self._socket_of[endpoint], self._monitor_of[endpoint] = link, monitor
        self._poller.register(link, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        link.connect(near or endpoint)

    def shut(self, endpoint: str) -> None:
        """End a connection."""
        link, monitor = self._socket_of.pop(endpoint), self._monitor_of.pop(endpoint)
        self._poller.unregister(link)
        self._poller.unregister(monitor)
        link.disable_monitor()
        monitor.close(0)
        link.close(0)

    def send(self, endpoint: str, message: FromClient, arrays: Mapping[str, NDArray[Any]] | None = None) -> int | None:
        """Send a message, with its arrays.

        Returns:
            The checksum of its frames; None where the connection did not take it. It may end before the loader has it.
        """
        frames = encode(message, arrays)
        try:
            self._socket_of[endpoint].send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return None
        return checksum_in(frames[0])

    def wait(self, timeout_s: float) -> list[Said]:
        """What has come by now, or comes within `timeout_s`: what a connection brought, before news of its end."""
        ready = {each for each, _ in self._poller.poll(int(max(0.0, timeout_s) * 1000))}
        said: list[Said] = []
        for endpoint, link in self._socket_of.items():
            if link in ready or self._monitor_of[endpoint] in ready:
                said += self._messages(endpoint, link)
        for endpoint, monitor in self._monitor_of.items():
            if monitor in ready:
                said += self._news(endpoint, monitor)
        return said

    def close(self) -> None:
        """End all connections; may be called again."""
        for endpoint in list(self._socket_of):
            self.shut(endpoint)
        self._context.term()

    def _messages(self, endpoint: str, link: Any) -> list[Said]:
        said: list[Said] = []
        while True:
            try:
                frames = link.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return said
            try:
                message, arrays = decode_of_loader([frame.buffer for frame in frames])
                said.append(Said(endpoint, None, message, arrays, ""))
            except WireError as error:
                said.append(Said(endpoint, "damaged", None, {}, str(error)))

    def _news(self, endpoint: str, monitor: Any) -> list[Said]:
        said: list[Said] = []
        while True:
            try:
                content = monitor.recv_multipart(zmq.NOBLOCK)[0]
            except zmq.Again:
                return said
            event = int(np.frombuffer(content, "<u2", 1)[0])
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                said.append(Said(endpoint, "connected", None, {}, ""))
            elif event == zmq.EVENT_DISCONNECTED:
                said.append(Said(endpoint, "gone", None, {}, ""))
            else:
                said.append(Said(endpoint, "denied", None, {}, self._denial(event)))

    def _denial(self, event: int) -> str:
        if self._keys is None:
            return "the loader wants keys: give the recipe loaders.keys"
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return f"the loader does not know the public key {self._keys.own.public}: it is in no client-K.public there"
        return "the handshake failed: server.public here is not of server.secret there, or the loader has no keys"
