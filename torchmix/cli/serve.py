"""`torchmix serve`: loaders of a recipe, for the trainers of a job or of several.

One that ends by itself is started again; nothing is left behind. Cost: a reader each; they share the recipe's
`read.cache`.
"""

from __future__ import annotations

import argparse
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, cast

import msgspec

from torchmix.boards.board import own_board
from torchmix.boards.socket_folders import socket_folder
from torchmix.cli.run import budget_of
from torchmix.cli.terminal import ExitCode, add_recipe, at_least, print_json
from torchmix.errors import LoaderLost, OptionError
from torchmix.recipe.amounts import parse_bytes
from torchmix.recipe.load import recipe_and_directory
from torchmix.recipe.parts import has_part, part_of
from torchmix.recipe.sources import PARTS
from torchmix.recipe.structs import Autoscale, Recipe
from torchmix.service.endpoints import Registry, check_keys
from torchmix.service.keys import server_keys
from torchmix.service.main import LoaderStart
from torchmix.service.pool import LoaderPool, starts_of
from torchmix.service.ray.seats import RaySeats, check_bind, connected
from torchmix.service.scale.loads import (
    FIRST_STEPS,
    ComingLoads,
    bounds_of,
    budget_of_cluster,
    coming_loads,
    shared_cache,
)
from torchmix.service.scale.partition import partition
from torchmix.service.scale.rule import ScaleBounds
from torchmix.service.scale.scaling import LocalSeats, ScaledLoaders
from torchmix.storage.stores import place_of

FOLLOW_S = 0.5
HELP = "run loaders that trainers ask for their documents"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this verb beside those of all verbs."""
    add_recipe(parser)
    parser.add_argument(
        "--bind",
        metavar="ENDPOINT",
        help="tcp://ADDRESS:PORT of the first one, with --keys; port 0: any free ports (default: sockets that this "
        "user alone reaches; with --ray the address of each node)",
    )
    parser.add_argument(
        "--processes",
        type=_number_or_auto,
        metavar="N",
        help="loaders, at ports that count up (default 1); auto: as many as the profile asks for, with their sources",
    )
    parser.add_argument(
        "--ray",
        nargs="?",
        const="auto",
        metavar="ADDRESS",
        help="run the loaders as actors of this Ray cluster (auto: of this machine, or of RAY_ADDRESS)",
    )
    parser.add_argument("--keys", type=Path, metavar="DIR", help="keys, which torchmix keys made")
    parser.add_argument("--register", type=Path, metavar="DIR", help="a shared folder where trainers find the loaders")
    parser.add_argument(
        "--metrics",
        type=at_least(0),
        default=0,
        metavar="PORT",
        help="figures for Prometheus, from this port on from this one on",
    )


def _number_or_auto(text: str) -> int | str:
    return text if text == "auto" else at_least(1)(text)


def run(arguments: argparse.Namespace) -> ExitCode:
    """Serve until a signal.

    Raises:
        OptionError: An address is TCP's, and there are no keys; or it is taken.
        TorchmixError: The recipe or the catalog is wrong.
    """
    bind = arguments.bind or ""
    if bind and not bind.startswith("tcp://"):
        raise OptionError(f"--bind {bind}: write tcp://ADDRESS:PORT")
    if bind:
        check_keys(bind, has_keys=arguments.keys is not None)
    elif arguments.keys is not None and arguments.ray is None:
        raise OptionError("--keys goes with --bind tcp://ADDRESS:PORT: sockets of this user alone have no keys")
    recipe, folder = recipe_and_directory("serve", arguments.recipe, None)
    if arguments.keys is not None:
        server_keys(arguments.keys)  # before anything is started
    start = LoaderStart(
        parts={name: part_of(recipe, name) for name in PARTS if has_part(recipe, name)},
        base=str(folder),
        catalog_folder=place_of(folder, recipe.catalog),
        cache_bytes=parse_bytes(recipe.read.cache, where="read.cache"),
        bind=bind,
        keys="" if arguments.keys is None else str(arguments.keys.absolute()),
        metrics_port=arguments.metrics,
    )
    is_over = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: is_over.set())
    own_board.open("serve", run=f"serve {Path(arguments.recipe).absolute()}")
    sockets = ExitStack()
    try:
        if not bind and arguments.ray is None:
            start = msgspec.structs.replace(start, bind=f"ipc://{sockets.enter_context(socket_folder())}")
        scale = _scale(arguments, recipe)
        if arguments.ray is not None:
            _serve_on_ray(arguments, recipe, start, is_over)
        elif scale is not None:
            _serve_scaled(arguments, recipe, start, scale, is_over)
        else:
            _serve_fixed(arguments, recipe, start, is_over)
    except LoaderLost:
        if not is_over.is_set():
            raise
        if arguments.json:
            print_json({"endpoints": []})
        else:
            print("ended by SIGTERM before the loaders listened", flush=True)
    finally:
        sockets.close()
        signal.signal(signal.SIGTERM, before)
    return ExitCode.OK


def _serve_fixed(arguments: argparse.Namespace, recipe: Recipe, start: LoaderStart, is_over: threading.Event) -> None:
    """Serve with one number of loaders."""
    processes = _processes(arguments, recipe)
    sources: list[dict[str, int] | None]
    if processes == "auto":
        _folder(arguments, "--processes auto" if arguments.processes else "loaders.processes: auto")
        found = partition(_coming(start).mean(0, FIRST_STEPS), budget_of(recipe))
        caches = shared_cache(start.cache_bytes, [place.page_bytes for place in found.loaders])
        starts = [
            msgspec.structs.replace(one, cache_bytes=cache)
            for one, cache in zip(starts_of(start, len(caches)), caches, strict=True)
        ]
        sources = [dict(place.parts) for place in found.loaders]
    else:
        starts = starts_of(start, processes)
        sources = [None] * processes
    with ExitStack() as stack:
        registry = None if arguments.register is None else Registry(arguments.register.absolute())
        pool = LoaderPool(starts, is_over=is_over)
        stack.callback(pool.close)
        if registry is not None:
            stack.callback(registry.close)
            for endpoint, parts in zip(pool.endpoints, sources, strict=True):
                registry.put(endpoint, parts)
        _tell(arguments, pool.endpoints)
        while not is_over.wait(1.0):
            if registry is not None:
                registry.look()


def _processes(arguments: argparse.Namespace, recipe: Recipe) -> int | Literal["auto"]:
    """How many loaders there are: by the command line, else by the recipe."""
    if arguments.processes is not None:
        return cast("int | Literal['auto']", arguments.processes)
    return recipe.loaders.processes if recipe.loaders.asked in ("ray", "remote") else 1


def _scale(arguments: argparse.Namespace, recipe: Recipe) -> Autoscale | None:
    """The recipe's bounds on their number, where this command is to follow them; loaders of a job are its own."""
    return None if arguments.processes is not None or recipe.loaders.asked == "job" else recipe.loaders.autoscale


def _serve_scaled(
    arguments: argparse.Namespace, recipe: Recipe, start: LoaderStart, scale: Autoscale, is_over: threading.Event
) -> None:
    """Serve with as many loaders as the run is going to need."""
    registry = Registry(_folder(arguments, "loaders.autoscale"))
    coming = _coming(start)
    bounds = bounds_of("auto", scale, coming, budget_of(recipe))
    _follow(arguments, LocalSeats(start, registry, is_over), bounds, coming, is_over)


def _serve_on_ray(arguments: argparse.Namespace, recipe: Recipe, start: LoaderStart, is_over: threading.Event) -> None:
    """Serve with actors of a Ray cluster: as many as `autoscale`, `--processes` or the profile say."""
    folder = _folder(arguments, "--ray")
    check_bind(start.bind, has_keys=bool(start.keys))
    scale = _scale(arguments, recipe)
    processes = _processes(arguments, recipe)
    is_counted = scale is None and processes != "auto"
    ray = connected(arguments.ray)
    coming = coming_loads(start.parts["train"], start.fetched_catalog(), is_profile_needed=not is_counted)
    signal.signal(signal.SIGTERM, lambda *_: is_over.set())  # ray has put its own handler there
    memory = recipe.loaders.memory
    memory_bytes = None if memory is None else parse_bytes(memory, where="loaders.memory")
    budget = budget_of_cluster(recipe.loaders.cpu, memory_bytes, ray.cluster_resources())
    bounds = bounds_of(processes, scale, coming, budget)
    _follow(arguments, RaySeats(ray, start, Registry(folder)), bounds, coming, is_over)


def _follow(
    arguments: argparse.Namespace,
    seats: LocalSeats | RaySeats,
    bounds: ScaleBounds,
    coming: ComingLoads,
    is_over: threading.Event,
) -> None:
    """Have loaders follow a run until a signal."""
    loaders = ScaledLoaders(
        seats,
        lambda begin, stop, note: coming.mean(begin, stop, note.gone, note.decided),
        bounds,
        arguments.register.absolute(),
        clock=time.monotonic,
    )
    try:
        _tell(arguments, seats.endpoints)
        while not is_over.wait(FOLLOW_S):
            loaders.look()
    finally:
        loaders.close()


def _coming(start: LoaderStart) -> ComingLoads:
    """What the steps of training cost, by the profile of its catalog."""
    return coming_loads(start.parts["train"], start.fetched_catalog())


def _folder(arguments: argparse.Namespace, what: str) -> Path:
    """Where the loaders are registered."""
    if arguments.register is None:
        raise OptionError(f"{what} needs --register DIR: it tells clients which loader has which sources")
    return Path(arguments.register).absolute()


def _tell(arguments: argparse.Namespace, endpoints: Sequence[str]) -> None:
    if arguments.json:
        print_json({"endpoints": list(endpoints)})
    else:
        print(f"{len(endpoints)} loaders listen at {', '.join(endpoints)}", flush=True)
