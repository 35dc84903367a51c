"""Where a node's loaders listen, so that the other nodes of the job reach them.

In: the address of the job's store. Out: this machine's address on the way there. Must hold: nothing is sent; what the
user says in TORCHMIX_ADDRESS comes first. Cost: a question to the resolver.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from torchmix.errors import OptionError

ADDRESS_VARIABLE = "TORCHMIX_ADDRESS"
LOOPBACK = "127.0.0.1"
_ANY = ("0.0.0.0", "::", "*")


def own_address(store: tuple[str, int] | None) -> str:
    """An address of this machine: that of TORCHMIX_ADDRESS, else the one that reaches the job's store.

    Args:
        store: Host and port of the store; None where the job has none that is reached over a network.

    Raises:
        OptionError: TORCHMIX_ADDRESS means every address of the machine, or there is no way to the store.
    """
    said = os.environ.get(ADDRESS_VARIABLE, "").strip().strip("[]")
    if said in _ANY:
        raise OptionError(
            f"{ADDRESS_VARIABLE}={said}: other nodes connect to this address; name one of this machine, or an interface"
        )
    if said:
        return said
    if store is None:
        return LOOPBACK
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(*store, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)  # chooses the way, and sends nothing
            found: str = probe.getsockname()[0]
    except OSError as error:
        raise OptionError(
            f"no address of this machine is on the way to the job's store at {store[0]}:{store[1]} ({error}); name one "
            f"in {ADDRESS_VARIABLE}"
        ) from error
    return found


def bind_of(address: str) -> str:
    """The endpoint at an address, or at an interface, whose port the system chooses."""
    return f"tcp://[{address}]:0" if ":" in address else f"tcp://{address}:0"


def network_name() -> str:
    """Equal for processes that reach each other over loopback: those of one machine and one network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/net').readlink()}"
    except OSError:  # not Linux
        return socket.gethostname()
