"""Several hosts on one machine: namespaces of networks, processes and host names, joined by a link.

In: a number of hosts. Out: for each an address and the words that run a program there. Must hold: what was made is
removed; where namespaces may not be made, the test is skipped with a word.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

from tests.support.deadlines import LONG_S
from tests.support.processes import Child, Processes

PORT = 29511
"""The port of the job's store; nobody else is in the namespace."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One host."""

    name: str
    address: str
    interface: str
    namespace: str

    def command(self, *words: str) -> list[str]:
        """The words that run a program there; it ends with whoever runs them."""
        inside = f'hostname {self.name} && exec "$@"'
        space = ["unshare", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"]
        return ["ip", "netns", "exec", self.namespace, *space, "sh", "-c", inside, "sh", *words]


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Hosts on one switch."""
    if not all(map(shutil.which, ("ip", "unshare", "sh", "hostname"))):
        pytest.skip("hosts on one machine need the programs ip, unshare and hostname")
    name = f"tmx{os.getpid()}"
    switch = f"{name}s"
    with ExitStack() as stack:
        _namespace(switch, stack)
        _run("ip", "-n", switch, "link", "add", "sw", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "sw", "up")
        found = []
        for number in range(count):
            host = Host(
                name=f"host{number}", address=f"10.231.7.{number + 1}", interface="eth7", namespace=f"{name}h{number}"
            )
            _namespace(host.namespace, stack)
            port = f"p{number}"
            _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "eth7", "netns", host.namespace)
            _run("ip", "-n", switch, "link", "set", port, "master", "sw", "up")
            _run("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth7")
            _run("ip", "-n", host.namespace, "link", "set", "eth7", "up")
            _run("ip", "-n", host.namespace, "link", "set", "lo", "up")
            found.append(host)
        yield found


def start_on(
    processes: Processes, places: Sequence[Host], world: int, module: str, *words: str, **environment: str
) -> list[Child]:
    """Start ranks in order over hosts, as torchrun would, each a module with some words."""
    each = world // len(places)
    return [
        processes.start(
            places[rank // each].command(sys.executable, "-m", module, *words),
            name=f"rank-{rank}",
            environment={
                "MASTER_ADDR": places[0].address,
                "MASTER_PORT": str(PORT),
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_RANK": str(rank % each),
                "LOCAL_WORLD_SIZE": str(each),
                "GLOO_SOCKET_IFNAME": places[0].interface,
                **environment,
            },
        )
        for rank in range(world)
    ]


def _namespace(name: str, stack: ExitStack) -> None:
    _run("ip", "netns", "add", name)
    stack.callback(_run, "ip", "netns", "delete", name)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=LONG_S, check=False)
    if done.returncode:
        pytest.skip(f"hosts on one machine cannot be made here: {' '.join(words)}: {done.stderr.strip()}")
