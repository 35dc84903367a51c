"""TCP ports of the loopback interface for programs that must be told a number, such as the store of a job's ranks.

In: nothing. Out: a port that nobody listens on, and that nobody else gets before some thousands of others were given.
The system gives ports of its own range to whoever binds port 0, and to each connection that goes out: a port of that
range which was free a moment ago may be taken before its program binds it. So these come from below that range, one
after another, by a counter that all test processes of this user share; a program that can bind port 0 itself does so.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path

NUM_PORTS = 12_000
"""They come round again after as many."""
COUNTER = Path(tempfile.gettempdir()) / f"torchmix-test-ports-{os.getuid()}"
SYSTEMS_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
USUAL_LOW = 32_768


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free, and is nobody else's."""
    ports = given_ports()
    descriptor = os.open(COUNTER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # closing the file unlocks it
        given = int(file.read() or 0)
        for number in range(given, given + len(ports)):
            port = ports[number % len(ports)]
            if _is_free(port):
                file.seek(0)
                file.write(str(number + 1))
                file.truncate()
                return port
    raise AssertionError(f"none of {ports} is free")


def given_ports() -> range:
    """Those below the ports that the system gives."""
    low = int(SYSTEMS_RANGE.read_text().split()[0]) if SYSTEMS_RANGE.exists() else USUAL_LOW
    return range(max(low - NUM_PORTS, 1024), low)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
