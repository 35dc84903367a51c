"""A run that asks loaders, in virtual time: how long it waits follows from the work alone, on any machine.

Plan, blocks, notes, the rule, decisions, registrations, the client's routes and its requests are those of a real run.
Loaders, their start, the trainer and the clock are not: a loader answers one request after the other and takes for each
what the profile says of its tokens, and once for each page that it meets first; one that is started listens after
`START_S`; a loader that ends drops what it owes. The client takes a block when the trainer needs it, and asks for the
next one then, as it does with one block ahead.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.support.scaled_jobs import decisions_of_log
from torchmix.catalog.store import Catalog, open_part
from torchmix.constructor.arrays import StepMemory
from torchmix.constructor.build import pieces_of_block
from torchmix.planner.planner import open_planner
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of
from torchmix.service.client import Said
from torchmix.service.endpoints import Endpoints, Registry
from torchmix.service.fleet import LoaderFleet
from torchmix.service.fleet_reader import FleetReader
from torchmix.service.members import FleetMembers
from torchmix.service.messages import (
    WINDOW_BYTES,
    FromClient,
    LoaderHello,
    LoaderPing,
    LoaderPong,
    LoaderWelcome,
    PieceReply,
    PieceRequest,
)
from torchmix.service.scale.loads import ComingLoads, CostProfile, bounds_of, read_profile
from torchmix.service.scale.partition import LoaderBudget
from torchmix.service.scale.rule import ProgressLog
from torchmix.service.scale.scaling import ScaledLoaders
from torchmix.steps.blocks import Consumer, plan_blocks
from torchmix.steps.replica_steps import noted

START_S = 2.0
"""From a decision until the loaders that it starts listen."""
FOLLOW_S = 0.5
ROAD_S = 0.001
"""From the sending of a message until it is there."""
_NOTHING: Mapping[str, NDArray[Any]] = {}


class Time:
    """The clock, and what happens when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._number = count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._lock = threading.Lock()  # loaders are started by threads

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Have something happen."""
        with self._lock:
            heapq.heappush(self._due, (when, next(self._number), what))

    def pass_to(self, when: float, until: Callable[[], bool] = lambda: False) -> None:
        """Let happen what is due by then, or until something has."""
        while not until() and self._due and self._due[0][0] <= when:
            self.now, _, what = heapq.heappop(self._due)
            what()
        if not until():
            self.now = max(self.now, when)


class VirtualLoader:
    """Answers one request after the other."""

    def __init__(self, time: Time, cost_s: Callable[[VirtualLoader, Mapping[str, NDArray[Any]]], float]) -> None:
        self._time, self._cost_s = time, cost_s
        self.pages: set[tuple[int, int]] = set()
        self.num_owed, self.most_owed, self.has_ended = 0, 0, False
        self.done_s = 0.0
        """Work that it was asked for."""
        self.lost_s = 0.0
        """Work that it was asked for and has not given."""
        self._free_s = 0.0

    def ask(self, message: PieceRequest, arrays: Mapping[str, NDArray[Any]], tell: Callable[..., None]) -> None:
        """Do a request after those before it."""
        cost_s = self._cost_s(self, arrays)
        self._free_s = max(self._free_s, self._time.now) + cost_s
        self.num_owed += 1
        self.most_owed = max(self.most_owed, self.num_owed)
        lengths = arrays["tokens"].astype(np.int32)
        reply = {"ids": np.zeros(int(lengths.sum()), np.int32), "ids.lengths": lengths}

        def done() -> None:
            self.num_owed -= 1
            if self.has_ended:
                self.lost_s += cost_s  # its client asks others for it
            else:
                tell(PieceReply(number=message.number, request=message.number, forms=()), reply)

        self._time.at(self._free_s, done)


class VirtualLinks:
    """Connections to loaders, as a client has them."""

    def __init__(self, time: Time, loaders: Mapping[str, VirtualLoader]) -> None:
        self._time, self._loaders = time, loaders
        self._heard: list[Said] = []
        self._open: set[str] = set()

    def open(self, endpoint: str) -> None:
        """Begin to connect."""
        self._open.add(endpoint)
        self._tell(endpoint, None, news="connected")

    def shut(self, endpoint: str) -> None:
        """End a connection."""
        self._open.discard(endpoint)

    def send(self, endpoint: str, message: FromClient, arrays: Mapping[str, NDArray[Any]] | None = None) -> int | None:
        """Send a message; the number of a request stands for its checksum."""
        loader = self._loaders[endpoint]
        if loader.has_ended:
            return None
        if isinstance(message, LoaderHello):
            self._tell(endpoint, LoaderWelcome(loader=endpoint, window_bytes=WINDOW_BYTES))
        elif isinstance(message, LoaderPing):
            pong = {"owed": loader.num_owed, "waiting": loader.num_owed, "at_hand_s": 0.0, "figures": {}, "words": ()}
            self._tell(endpoint, LoaderPong(number=message.number, **pong))
        elif isinstance(message, PieceRequest):
            loader.ask(message, arrays or {}, lambda *reply: self._tell(endpoint, *reply))
            return message.number
        return 0

    def end(self, endpoint: str) -> None:
        """A loader ends."""
        self._loaders[endpoint].has_ended = True
        self._tell(endpoint, None, news="gone")

    def wait(self, timeout_s: float) -> list[Said]:
        """What has come, within a time."""
        self._time.pass_to(self._time.now + timeout_s, lambda: bool(self._heard))
        heard, self._heard = [one for one in self._heard if one.endpoint in self._open], []
        return heard

    def close(self) -> None:
        """Nothing."""

    def _tell(
        self, endpoint: str, message: Any, arrays: Mapping[str, NDArray[Any]] = _NOTHING, news: Any = None
    ) -> None:
        said = Said(endpoint, news, message, dict(arrays), "")
        self._time.at(self._time.now + ROAD_S, lambda: self._heard.append(said))


class VirtualSeats:
    """Loaders under their numbers; each that is started listens after a while."""

    def __init__(self, time: Time, registry: Registry, run: VirtualLoaders) -> None:
        self._time, self._registry, self._run = time, registry, run
        self._endpoints: dict[int, str] = {}
        self.delay_s = 0.0
        """Until the loaders that were started now listen: what follows is done then."""

    def start(self, number: int, sources: Mapping[str, int], memory_bytes: int, cache_part: int) -> None:
        """See `LoaderSeats`."""
        endpoint = self._run.add(number)
        self._endpoints[number] = endpoint
        self.delay_s = START_S if self._time.now else 0.0
        self._later(lambda: self._registry.put(endpoint, sources))

    def give(self, number: int, sources: Mapping[str, int]) -> None:
        """See `LoaderSeats`."""
        self._later(lambda: self._registry.put(self._endpoints[number], sources))

    def leave(self, number: int) -> None:
        """See `LoaderSeats`."""
        self._later(lambda: self._registry.remove(self._endpoints[number]))

    def is_asked(self, number: int) -> bool:
        """See `LoaderSeats`."""
        return self._run.loaders[self._endpoints[number]].num_owed > 0

    def stop(self, number: int) -> None:
        """See `LoaderSeats`."""
        self._run.links.end(self._endpoints.pop(number))

    def look(self) -> None:
        """See `LoaderSeats`."""

    def _later(self, what: Callable[[], None]) -> None:
        if self.delay_s:
            self._time.at(self._time.now + self.delay_s, what)
        else:
            what()


class VirtualLoaders:
    """All that were ever started."""

    def __init__(self, time: Time, cost_s: Callable[[VirtualLoader, Mapping[str, NDArray[Any]]], float]) -> None:
        self.loaders: dict[str, VirtualLoader] = {}
        self.links = VirtualLinks(time, self.loaders)
        self._time, self._cost_s = time, cost_s
        self._lock = threading.Lock()

    def add(self, number: int) -> str:
        """One more of a number; its endpoint, which does not depend on the threads that start loaders."""
        with self._lock:
            before = sum(endpoint.startswith(f"ipc:///virtual/{number}/") for endpoint in self.loaders)
            endpoint = f"ipc:///virtual/{number}/{before}"
            self.loaders[endpoint] = VirtualLoader(self._time, self._cost_s)
            return endpoint


class VirtualRun(NamedTuple):
    """What a run was like."""

    wait_s: float
    """The trainer's, in all steps but those of the first block."""
    work_s: float
    """Of all loaders together."""
    lost_s: float
    """Of that, what loaders have not given because they ended."""
    decisions: list[tuple[int, str, int]]
    """First step, reason and number of loaders."""
    requests: Mapping[str, int | float]
    """Counts of the client."""


def virtual_run(
    recipe: Path, folder: Path, *, loaders: int | str, steps: int, compute_s: float, page_s: float = 0.0
) -> VirtualRun:
    """A run of a recipe, alone on its machine.

    Args:
        recipe: With a catalog and a profile; `loaders.autoscale` says how many there may be.
        folder: Where loaders register; empty.
        loaders: A number; or `auto`, or `autoscale`.
        steps: Of the run.
        compute_s: Of the trainer, a step.
        page_s: What a page costs a loader that meets it first.
    """
    read = load_recipe(recipe)
    part, scale = part_of(read, "train"), read.loaders.autoscale
    catalog = open_part(recipe.parent / "catalog", part)
    profile = read_profile(recipe.parent / "catalog", catalog, part.seed)
    coming, time = ComingLoads(part, catalog, profile), Time()
    run = VirtualLoaders(time, cost_of(catalog, profile, page_s))
    seats = VirtualSeats(time, Registry(folder), run)
    assert scale is not None
    budget = LoaderBudget(cpu=scale.max, memory_bytes=1 << 40)
    number: Any = "auto" if isinstance(loaders, str) else loaders
    bounds = bounds_of(number, scale if loaders == "autoscale" else None, coming, budget)
    follows = ScaledLoaders(
        seats,
        lambda start, stop, note: coming.mean(start, stop, note.gone, note.decided),
        bounds,
        folder,
        clock=lambda: time.now,
    )

    def look() -> None:
        seats.delay_s = 0.0
        follows.look()
        time.at(time.now + FOLLOW_S + seats.delay_s, look)

    if loaders == "autoscale":  # else the first loaders stay
        time.at(FOLLOW_S, look)
    reader = virtual_reader(catalog, folder, run, time)
    planner = open_planner(part, catalog)
    one = {0: Consumer(0, StepMemory())}
    blocks = noted(plan_blocks(planner, planner.start(), steps), ProgressLog((str(folder),)), lambda _: one)
    wait_s = free_s = 0.0
    for block in blocks:
        reader.read(pieces_of_block([step.plan for step in block], [0]).wanted(part.batch.length))
        came_s = time.now
        wait_s += max(0.0, came_s - free_s) if block[0].plan.step else 0.0
        taken_s = max(came_s, free_s)
        free_s = taken_s + compute_s * len(block)
        time.pass_to(taken_s)
    stats = reader.stats()
    time.pass_to(time.now + 300.0)  # what is under way ends
    return VirtualRun(
        wait_s=wait_s,
        work_s=sum(each.done_s for each in run.loaders.values()),
        lost_s=sum(each.lost_s for each in run.loaders.values()),
        decisions=[(one["step"], one["reason"], len(one["loaders"])) for one in decisions_of_log(folder)],
        requests={name: value for name, value in stats.items() if name.startswith("total_loader")},
    )


def virtual_reader(catalog: Catalog, folder: Path, run: VirtualLoaders, time: Time) -> FleetReader:
    """What asks the loaders that are registered in a folder."""
    hello = LoaderHello(client="virtual", catalog=catalog.fingerprint, transforms=b"")
    members = FleetMembers(Endpoints(folders=(folder,)), run.links, hello, clock=lambda: time.now)
    return FleetReader(catalog, LoaderFleet(members))


def cost_of(
    catalog: Catalog, profile: CostProfile, page_s: float
) -> Callable[[VirtualLoader, Mapping[str, NDArray[Any]]], float]:
    """What a request costs a loader: its tokens, and the pages that it has not met before."""
    names = list(catalog.sources)
    price_s = np.array([profile.sources[name].busy_ns / profile.sources[name].tokens / 1e9 for name in names])

    def cost_s(loader: VirtualLoader, arrays: Mapping[str, NDArray[Any]]) -> float:
        source, rows = arrays["source"], arrays["row"]
        pages = set()
        for s in np.unique(source).tolist():
            table = catalog.sources[names[s]].pages
            pages |= {(s, page) for page in np.unique(table.page_of_rows(rows[source == s])).tolist()}
        new = pages - loader.pages
        loader.pages |= new
        loader.done_s += (one := float((price_s[source] * arrays["tokens"]).sum()) + page_s * len(new))
        return one

    return cost_s
