"""Bounds on the connections of a loader, where ZeroMQ has none: a peer that sends what no message comes of is cut off.

ZeroMQ never stops reading a connection, and what it holds for one is bounded all the same. Elsewhere than on Linux, and
over Unix sockets, which this user alone reaches, nothing is bounded. Cost: a system call for each 16 MiB that the
process grows, else one a second, and three for each connection then.

ZeroMQ 4.3.5 (`stream_engine_base.cpp`) stops reading a connection at RCVHWM. If the connection ends meanwhile, then a
heartbeat of its own, or a PING that the peer has sent, writes to it and aborts the process (`!_io_error`). So nothing
here has a RCVHWM, nor HEARTBEAT_IVL: loaders and clients have pings of their own, and the kernel finds hosts that are
gone. RCVHWM would not bound memory either: it counts whole messages, and one message may have any number of frames.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq

from torchmix.service.messages import WINDOW_BYTES

logger = logging.getLogger(__name__)

MOST_UNHEARD_BYTES = 2 * WINDOW_BYTES
"""Bytes that a connection may have sent, and that were not received as messages: all that a client may ask for, and as
much again for pages ahead and what the kernel holds."""
MOST_OF_ALL_BYTES = 8 * MOST_UNHEARD_BYTES
"""Such bytes that all connections together may have sent; beyond it those end that are furthest ahead."""
GROWN_BYTES = 16 << 20
LOOK_S = 1.0
OPTIONS: tuple[tuple[int, int], ...] = (
    (zmq.LINGER, 0),
    (zmq.RCVHWM, 0),
    (zmq.TCP_KEEPALIVE, 1),
    (zmq.TCP_KEEPALIVE_IDLE, 4),
    (zmq.TCP_KEEPALIVE_INTVL, 2),
    (zmq.TCP_KEEPALIVE_CNT, 3),
)
"""What every socket of a loader or a client has."""
_RECEIVED = struct.Struct("<Q")
_RECEIVED_AT = 128
"""`tcpi_bytes_received` in Linux' `struct tcp_info`."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_FRAME_BYTES = 64
"""What ZMTP and CURVE add to a frame, at most."""


class Connections:
    """The connections to a socket; used by its thread, and polled with it."""

    def __init__(self, link: Any) -> None:
        """`link`: the socket, which is not bound yet."""
        self.events: Any = link.get_monitor_socket(zmq.EVENT_ACCEPTED)
        """Readable when `take` is to be called."""
        self.events.setsockopt(zmq.LINGER, 0)
        self._link = link
        self._heard: dict[int, int] = {}
        """By descriptor: bytes of the messages that came over it."""
        self._looked_s, self._memory = time.monotonic(), 0
        self.num_cut = 0

    def take(self) -> None:
        """Note who has come."""
        with suppress(zmq.Again):
            while True:
                event, descriptor = struct.unpack("<HI", self.events.recv_multipart(zmq.NOBLOCK)[0])
                if event == zmq.EVENT_ACCEPTED:
                    self._heard[descriptor] = 0

    def hear(self, frames: list[Any]) -> None:
        """Note a message: its `zmq.Frame`s as they were received."""
        with suppress(zmq.ZMQError):
            descriptor = frames[0].get(zmq.SRCFD)
            heard = sum(map(len, frames)) + _FRAME_BYTES * len(frames)
            self._heard[descriptor] = self._heard.get(descriptor, 0) + heard

    def look(self) -> None:
        """End the connections that have sent too much of which nothing came; where it may be due."""
        now, memory = time.monotonic(), own_memory()
        if now - self._looked_s < LOOK_S and memory - self._memory < GROWN_BYTES:
            return
        self._looked_s, self._memory = now, memory
        unheard: list[tuple[int, int]] = []
        for descriptor, heard in list(self._heard.items()):
            try:
                received = _received(descriptor)
            except (OSError, AttributeError, struct.error):  # it has ended, is no TCP, or this is no Linux
                del self._heard[descriptor]
                continue
            # What frames add is bounded from above; nobody gets credit for it.
            self._heard[descriptor] = min(heard, received)
            unheard.append((max(0, received - heard), descriptor))
        total = sum(num_bytes for num_bytes, _ in unheard)
        for num_bytes, descriptor in sorted(unheard, reverse=True):
            if num_bytes <= MOST_UNHEARD_BYTES and total <= MOST_OF_ALL_BYTES:
                break
            total -= num_bytes
            self.num_cut += 1
            logger.warning("a client's connection is ended: it has sent %d bytes of which no message came", num_bytes)
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hear no more of it; before the socket is closed."""
        self._link.disable_monitor()
        self.events.close(0)


def _received(descriptor: int) -> int:
    """Bytes that the kernel has received of a TCP connection."""
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        content = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return int(_RECEIVED.unpack_from(content, _RECEIVED_AT)[0])


def own_memory() -> int:
    """Bytes of memory that this process alone has; 0 where the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
        return (resident - shared) * _PAGE_BYTES
    return 0
