"""The Ray cluster that a command or a run uses.

In: an address. Out: the module `ray`, connected. Must hold: what travels as an argument is text and numbers. Ray itself
sends classes and functions with cloudpickle; those of this package are sent by their names, so each node of the cluster
needs the same torchmix installed, and whoever may connect to the cluster may run anything there. Cost: seconds to
connect.
"""

from __future__ import annotations

import re
import socket
from typing import Any

from torchmix.errors import OptionError

ANSWER_S = 10.0
_HOST_PORT = re.compile(r"[\w.-]+:\d+")


def connected(address: str) -> Any:
    """The module `ray`, connected to a cluster.

    Args:
        address: As `ray.init` takes it: `auto` for the cluster of this machine or of RAY_ADDRESS, or `HOST:PORT`.

    Raises:
        OptionError: ray is not installed, or there is no cluster.
    """
    try:
        import ray
    except ImportError as error:
        raise OptionError("loaders on Ray need the package ray: pip install 'torchmix[ray]'") from error
    if not ray.is_initialized():
        try:
            if _HOST_PORT.fullmatch(address):  # ray itself tries for minutes
                host, _, port = address.rpartition(":")
                socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
            ray.init(address=address, log_to_driver=False, logging_level="WARNING", namespace="torchmix")
        except (OSError, ValueError, RuntimeError) as error:
            raise OptionError(f"there is no Ray cluster at {address!r}: {error}; run ray start first") from error
    return ray
