"""The loaders of a fleet, as one client sees them: which there are, which answer, which refuse.

A loader may come, go and come back at any time; that all are lost, or refuse, is one error that names each with its
last word. Cost: a look at the endpoints each second.

Time in which this process itself did not run counts for nobody's silence, and for nobody's slowness.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.boards.board import own_board
from torchmix.errors import LoaderLost
from torchmix.reader.protocol import StoppedWaiting
from torchmix.service.endpoints import Endpoints
from torchmix.service.messages import (
    MOST_REASON,
    WINDOW_BYTES,
    FromClient,
    LoaderHello,
    LoaderPong,
    LoaderRefusal,
    LoaderWelcome,
    one_line,
)
from torchmix.service.routing import SourceRoutes, loader_keys

if TYPE_CHECKING:
    from torchmix.service.client import Said

logger = logging.getLogger(__name__)

PING_S = 0.25
"""Between two pings of a loader that owes something."""
LOOK_S = 1.0
"""Between two looks for loaders that have come or gone."""
GREET_S = 0.25
"""So long a loader that has just come is waited for, before others are asked for what is to be its part."""
AGAIN_S = 5.0
"""After so long a connection to a loader that does not answer, or refuses, is made again."""
_PAUSE_S = 0.5
"""After so long without a turn, this process itself did not run."""

State = Literal["coming", "ready", "silent", "refused"]


class FleetPatience(msgspec.Struct, frozen=True, kw_only=True):
    """How long a client waits."""

    silence_s: float = 2.0
    """For any word of a loader that owes something."""
    join_s: float = 10.0
    """For all loaders that are known at the start; it continues earlier once all are there."""
    lost_s: float = 30.0
    """For any loader at all, before `LoaderLost`."""
    refused_s: float = 3.0
    """For any loader at all where all refuse: a handshake also fails where a loader ends meanwhile."""
    reply_s: float = 120.0
    """Sent along: after this a loader drops the request."""


class Links(Protocol):
    """`LoaderLinks`, as far as it is used here."""

    def open(self, endpoint: str) -> None:
        """Begin to connect."""
        ...

    def shut(self, endpoint: str) -> None:
        """End a connection."""
        ...

    def send(self, endpoint: str, message: FromClient, arrays: Mapping[str, NDArray[Any]] | None = None) -> int | None:
        """Send a message; the checksum of its frames, or None."""
        ...

    def wait(self, timeout_s: float) -> list[Said]:
        """What has come."""
        ...

    def close(self) -> None:
        """End all."""
        ...


class FleetMember(msgspec.Struct, eq=False):
    endpoint: str
    since_s: float
    """When it came to its state."""
    heard_s: float
    tried_s: float
    """When its connection was opened last."""
    state: State = "coming"
    reason: str = ""
    has_answered: bool = False
    window_bytes: int = WINDOW_BYTES
    in_flight: dict[int, float] = msgspec.field(default_factory=dict)
    """Number of each request that it owes, and when it was sent, as if this process had always run since."""
    in_flight_bytes: int = 0
    pinged_s: float = 0.0
    num_pings: int = 0
    replied_s: float = 0.0
    """When its last reply came."""
    byte_s: float = 0.0
    """Time that it takes for each byte that was planned: a moving mean, which rises fast and falls slowly."""
    figures: dict[str, int | float] = msgspec.field(default_factory=dict)
    words: tuple[str, ...] = ()
    """Its last warnings, as it said them last."""


class FleetMembers:
    """All loaders that are known; used by one thread."""

    def __init__(
        self,
        endpoints: Endpoints,
        links: Links,
        hello: LoaderHello,
        *,
        patience: FleetPatience | None = None,
        clock: Callable[[], float] = time.monotonic,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Begin to connect to all loaders that are known now.

        Args:
            endpoints: Where loaders are.
            links: Closed by `close`.
            hello: What the client is going to ask for.
            patience: How long it waits.
            clock: Seconds, of any zero.
            is_stopped: Asked at each turn; True ends the wait.
        """
        self._endpoints, self.links, self._hello = endpoints, links, hello
        self.patience, self.clock = patience or FleetPatience(), clock
        self._is_stopped = is_stopped
        self.all: dict[str, FleetMember] = {}
        self._known: Mapping[str, Mapping[str, int] | None] = {}
        """Endpoints and their parts of sources; a loader that is there no more may finish what it was asked for."""
        self._names: tuple[str, ...] = ()
        """Endpoints of ready loaders, sorted."""
        self._keys = loader_keys(())
        self._sources: tuple[str, ...] = ()
        self.routes = SourceRoutes((), ())
        """Which of `names` read which sources."""
        self._looked_s = self._turned_s = clock()
        self._none_since_s: float | None = clock()
        self.look()

    @property
    def names(self) -> tuple[str, ...]:
        """Endpoints of the loaders that answer now, sorted."""
        return self._names

    @property
    def keys(self) -> NDArray[np.uint64]:
        """[m] the hash of each of `names`."""
        return self._keys

    def name_sources(self, names: Sequence[str]) -> None:
        """Say which sources there are, so that each is asked of its loaders."""
        self._sources = tuple(names)
        self._route()

    def _route(self) -> None:
        self.routes = SourceRoutes(self._sources, [self._known[name] for name in self._names])

    def begin(self) -> None:
        """A call begins: until now nobody owed anything."""
        self._turned_s = now = self.clock()
        for one in self.all.values():
            one.heard_s = max(one.heard_s, now)

    def close(self) -> None:
        """End all connections; may be called again."""
        self.links.close()

    @property
    def is_greeting(self) -> bool:
        """Whether a loader has been found just now, and may still answer its first hello."""
        first = (one for one in self.all.values() if one.state == "coming" and not one.has_answered)
        return any(self.clock() - one.since_s < GREET_S for one in first)

    def join(self) -> None:
        """Wait until all known loaders answer, or for a while until some do.

        Raises:
            LoaderLost: None does, or those that do refuse.
        """
        began_s = self.clock()
        while not self._names or (
            any(one.state == "coming" for one in self.all.values()) and self.clock() - began_s < self.patience.join_s
        ):
            self.turn(PING_S)
            self.check_some_answer()

    def look(self) -> None:
        """Connect to loaders that have come, and end the connections to those that are there no more."""
        known, now = self._endpoints.now(), self.clock()
        for one in self.all.values():
            # Keys may have been mended; and ZeroMQ does not connect again where what came was no ZMTP.
            if one.state != "ready" and now - max(one.tried_s, one.since_s) > AGAIN_S:
                one.tried_s = now
                self.links.shut(one.endpoint)
                self.links.open(one.endpoint)
        for endpoint in sorted(known.keys() - self.all.keys()):
            self.all[endpoint] = FleetMember(endpoint, since_s=now, heard_s=now, tried_s=now)
            self.links.open(endpoint)
        for endpoint in sorted(self.all.keys() - known.keys()):
            if not self.all[endpoint].in_flight:
                self.links.shut(endpoint)
                del self.all[endpoint]
        has_moved = any(self._known.get(endpoint) != parts for endpoint, parts in known.items())
        self._looked_s, self._known = now, known
        self._count_ready()
        if has_moved:
            self._route()

    def _count_ready(self) -> None:
        ready = {one.endpoint for one in self.all.values() if one.state == "ready"}
        names = tuple(sorted(ready & self._known.keys()))
        if names != self._names:
            self._names, self._keys = names, loader_keys(names)
            self._route()
        if names:
            self._none_since_s = None
        elif self._none_since_s is None:
            self._none_since_s = self.clock()

    def turn(self, timeout_s: float) -> list[Said]:
        """Wait for news a while, and take note of those of loaders; the others are returned.

        Raises:
            StoppedWaiting: Nobody wants the replies any more.
        """
        if self._is_stopped():
            raise StoppedWaiting
        now = self.clock()
        if now - self._turned_s > _PAUSE_S:
            for one in self.all.values():
                one.heard_s += now - self._turned_s
                for number in one.in_flight:
                    one.in_flight[number] += now - self._turned_s
        if now - self._looked_s > LOOK_S:
            self.look()
        others = []
        for said in self.links.wait(timeout_s):
            if not self._note(said):
                others.append(said)
        self._turned_s = self.clock()
        return others

    def _note(self, said: Said) -> bool:
        """Whether it was news of a loader alone."""
        one = self.all[said.endpoint]
        if said.news == "connected":
            self.links.send(one.endpoint, self._hello)
            return True
        if said.news == "denied":
            # A handshake fails with a loader that ends meanwhile, too: one that has answered before may come back.
            self.set_state(one, "coming" if one.has_answered else "refused", said.reason)
            return True
        if said.news == "gone" and one.state != "refused":
            self.set_state(one, "coming", "the connection has ended")
        if said.news is not None:
            return False
        one.heard_s = self.clock()
        if isinstance(said.message, LoaderWelcome):
            one.window_bytes = said.message.window_bytes
            one.has_answered = True
            self.set_state(one, "ready")
        elif isinstance(said.message, LoaderRefusal):
            if said.message.is_unknown:
                self.links.send(one.endpoint, self._hello)
                return False
            self.set_state(one, "refused", one_line(said.message.reason, MOST_REASON))
            return True
        elif one.state == "silent":
            self.set_state(one, "ready")
        if isinstance(said.message, LoaderPong):
            one.figures, one.words = dict(said.message.figures), tuple(map(one_line, said.message.words))
        return isinstance(said.message, LoaderWelcome)

    def set_state(self, one: FleetMember, state: State, reason: str = "") -> None:
        """Note what became of a loader."""
        if one.state == state and one.reason == reason:
            return
        if state == "ready":
            logger.info("loader %s answers", one.endpoint)
        elif one.state == "ready" or state == "refused":
            logger.warning("loader %s: %s", one.endpoint, reason or state)
            own_board.note(f"loader {one.endpoint}: {reason or state}")
        one.state, one.reason, one.since_s = state, reason, self.clock()
        self._count_ready()

    def check_some_answer(self) -> None:
        """Raise where no loader answers, after a while; at once where all refuse."""
        if self._names:
            return
        now = self.clock()
        refused = [one for one in self.all.values() if one.state == "refused"]
        since_s = self._none_since_s if self._none_since_s is not None else now
        all_refuse = bool(refused) and len(refused) == len(self.all)
        if now - since_s < (self.patience.refused_s if all_refuse else self.patience.lost_s):
            return
        words = "".join(f"\n  {one.endpoint}: {line}" for one in self.all.values() for line in one.words)
        raise LoaderLost(
            f"{self.why_none()}. Start loaders with torchmix serve, or read in this process: loaders.where: in_process"
            + (f". What they logged last:{words}\n" if words else "")
        )

    @property
    def is_coming(self) -> bool:
        """Whether a loader that has never answered may still do so, by the patience of a start."""
        first = (one for one in self.all.values() if one.state == "coming" and not one.has_answered)
        return any(self.clock() - one.since_s < self.patience.join_s for one in first)

    def why_none(self) -> str:
        """That no loader answers, with what became of each."""
        now = self.clock()
        ages = [
            f"{one.endpoint}: {one.reason or one.state}, last heard of {now - one.heard_s:.1f} s ago"
            for one in self.all.values()
        ]
        return f"no loader answers at {self._endpoints}: {'; '.join(ages) or 'none is registered there'}"
