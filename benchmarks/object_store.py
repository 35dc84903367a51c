"""Reading from an S3 server with a latency, against local files and against one request at a time, in one run.

    python benchmarks/object_store.py [--tokens 16000000] [--latency-ms 20] [--rounds 2]

The server is a small one of this script, in a process of its own on the loopback interface, which gives ranges of files
after the latency: moto's, which the tests use, takes some 10 ms of a processor for each request, and would be what is
measured. Bandwidth is that of loopback, so what is shown is what latency costs. Streams, all of the same steps:

  local     from files
  store     from the server, as torchmix reads it: neighbours together, 16 requests at once, windows ahead
  loader    from a shared loader on this host that reads files, or the server: asked a step ahead
  one       from the server, each run of pages by a request of its own, one after the other, when it is due
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from synthetic import write_recipe, write_tokens

from torchmix.catalog.store import open_part
from torchmix.indexing.scan import index_recipe
from torchmix.parallel.place_tree import Layout
from torchmix.reader.source_pages import SourcePages
from torchmix.recipe.amounts import parse_bytes
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of
from torchmix.service.client import LoaderLinks
from torchmix.service.main import LoaderStart
from torchmix.service.messages import LoaderHello, LoaderPing, LoaderPong
from torchmix.service.open_fleet import FleetSettings
from torchmix.service.pool import LoaderPool
from torchmix.service.served import transforms_digest
from torchmix.stateful.stream import StepStream
from torchmix.steps.replica_steps import StreamOptions, StreamSettings

SAMPLES, LENGTH = 16, 8192
STEP_TOKENS = SAMPLES * LENGTH
ROADS = {
    "local": "local files",
    "store": "the server",
    "one": "the server, *one*",
    "loader, local": "a shared loader, local files",
    "loader, store": "a shared loader, the server",
}
"""What the table calls each."""


async def serve(folder: Path, latency_s: float) -> None:
    """Give ranges of `folder/BUCKET/KEY`, and at `/counts` how many and how many bytes."""
    counts = [0, 0]

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b"":
            method, path = head.split(b" ", 2)[:2]
            if path == b"/counts":
                body = f"{counts[0]} {counts[1]}".encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
                await writer.drain()
                continue
            await asyncio.sleep(latency_s)
            file = folder / path.decode().lstrip("/")
            span = re.search(rb"(?i)\r\nrange: *bytes=(\d+)-(\d+)", head)
            if not file.is_file():
                writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            elif method == b"HEAD" or span is None:
                size = file.stat().st_size
                writer.write(b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: %d\r\n\r\n' % size)
            else:
                start, stop = int(span[1]), int(span[2]) + 1
                with file.open("rb") as content:
                    body = os.pread(content.fileno(), stop - start, start)
                counts[0] += 1
                counts[1] += len(body)
                length = b"Content-Length: %d\r\n" % len(body)
                writer.write(b"HTTP/1.1 206 Partial Content\r\n" + length + b'ETag: "1"\r\n\r\n' + body)
            await writer.drain()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await talk(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


@contextmanager
def running_server(folder: Path, latency_ms: float) -> Iterator[str]:
    """The address of a server in a process of its own."""
    arguments = [sys.executable, __file__, "--serve", str(folder), "--latency-ms", str(latency_ms)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.terminate()


def counts_of(address: str) -> np.ndarray:
    """Requests for ranges so far, and their bytes."""
    with urllib.request.urlopen(f"{address}/counts") as answer:
        return np.array([int(word) for word in answer.read().split()])


@contextmanager
def running_loader(recipe_path: Path) -> Iterator[LoaderPool]:
    """A loader of the recipe, in a process of its own."""
    recipe = load_recipe(recipe_path)
    with tempfile.TemporaryDirectory() as name:
        start = LoaderStart(
            parts={"train": part_of(recipe, "train")},
            base=str(recipe_path.parent),
            catalog_folder=str(recipe_path.parent / recipe.catalog),
            cache_bytes=parse_bytes(recipe.read.cache, where="read.cache"),
            bind=f"ipc://{name}/loader",
        )
        pool = LoaderPool([start])
        try:
            yield pool
        finally:
            pool.close()


def figures_of(endpoint: str, recipe_path: Path) -> Mapping[str, int | float]:
    """What a loader of a recipe counts."""
    recipe = load_recipe(recipe_path)
    catalog = open_part(recipe_path.parent / recipe.catalog, part_of(recipe, "train"))
    hello = LoaderHello(
        client="benchmark", catalog=catalog.fingerprint, transforms=transforms_digest(catalog, recipe.seed)
    )
    links, deadline_s = LoaderLinks(), time.monotonic() + 60
    links.open(endpoint)
    try:
        while time.monotonic() < deadline_s:
            for said in links.wait(1.0):
                if said.news == "connected":
                    links.send(endpoint, hello)
                    links.send(endpoint, LoaderPing(number=0))
                elif isinstance(said.message, LoaderPong):
                    return said.message.figures
        raise TimeoutError(f"{endpoint} says nothing")
    finally:
        links.close()


def through_loader_s(recipe_path: Path, num_steps: int) -> tuple[list[float], float]:
    """Seconds of each step that a loader reads, and the share of pages that it had at hand when they were asked for."""
    with running_loader(recipe_path) as pool:
        seconds = stream_s(recipe_path, num_steps, FleetSettings(endpoints=pool.endpoints, lost_s=60.0))
        figures = figures_of(pool.endpoints[0], recipe_path)
    return seconds, figures["cache_hits"] / (figures["cache_hits"] + figures["cache_misses"])


def stream_s(recipe_path: Path, num_steps: int, fleet: FleetSettings | None = None) -> list[float]:
    """Seconds of each step, without any work between them; from a fleet, if there is one."""
    recipe = load_recipe(recipe_path)
    settings = StreamSettings(
        part=part_of(recipe, "train"),
        base=str(recipe_path.parent),
        catalog_folder=str(recipe_path.parent / recipe.catalog),
        cache_bytes=parse_bytes(recipe.read.cache, where="read.cache"),
        replica=0,
        layout=Layout(),
        options=StreamOptions(max_steps=num_steps),
        fleet=fleet,
    )
    stream = StepStream(settings)
    seconds, began = [], time.perf_counter()
    for _ in stream:
        now = time.perf_counter()
        seconds.append(now - began)
        began = now
    stream.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_000_000)
    parser.add_argument("--latency-ms", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--page-bytes", type=int, default=64 << 10)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        asyncio.run(serve(arguments.serve, arguments.latency_ms / 1e3))
        return
    os.environ |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "bucket"
        data.mkdir()
        for i in range(2):
            write_tokens(
                data / f"{i}.parquet", num_tokens=arguments.tokens // 2, page_bytes=arguments.page_bytes, seed=i
            )
        local = write_recipe(data, samples=SAMPLES, length=LENGTH, cache="64MiB", window_bytes="8MiB")
        far = folder / "far.yaml"
        far.write_text(local.read_text().replace('"*.parquet"', "[s3://bucket/0.parquet, s3://bucket/1.parquet]"))
        file_bytes = sum(path.stat().st_size for path in data.glob("*.parquet"))
        with running_server(folder, arguments.latency_ms) as address:
            os.environ["AWS_ENDPOINT_URL"] = address
            catalog = index_recipe(load_recipe(local), data)
            before = counts_of(address)
            index_recipe(load_recipe(far), folder)
            scan = counts_of(address) - before
            print(f"index: {scan[0]} requests, {scan[1] / file_bytes:.2f} of the files' {file_bytes / 2**20:.0f} MiB")
            num_steps = int(catalog.sources["tokens"].num_tokens * 0.9) // STEP_TOKENS
            compare(local, far, num_steps, address, file_bytes, arguments.rounds)


def compare(local: Path, far: Path, num_steps: int, address: str, file_bytes: int, rounds: int) -> None:
    """Stream from each, round by round, and print the best round of each."""
    best: dict[str, tuple[list[float], np.ndarray]] = {}
    at_hand: dict[str, float] = {}
    for _ in range(rounds):
        for which in ROADS:
            real = SourcePages.wanted
            if which == "one":
                SourcePages.wanted = lambda self, pages: []  # type: ignore[method-assign]
            before = counts_of(address)
            try:
                recipe = local if which.endswith("local") else far
                if which.startswith("loader"):
                    seconds, at_hand[which] = through_loader_s(recipe, num_steps)
                else:
                    seconds = stream_s(recipe, num_steps)
            finally:
                SourcePages.wanted = real  # type: ignore[method-assign]
            if which not in best or sum(seconds) < sum(best[which][0]):
                best[which] = (seconds, counts_of(address) - before)
    base_s = sum(best["local"][0])
    print(f"{num_steps} steps of {STEP_TOKENS} tokens; local: {num_steps * STEP_TOKENS / base_s / 1e6:.1f} Mtok/s")
    print(
        "\nread from | tokens per second over local files | p50 of a step over local's | p99 over p50 | "
        "requests per million tokens | bytes fetched over bytes of the files"
    )
    local_p50 = np.quantile(best["local"][0], 0.5)
    for which, (seconds, counts) in best.items():
        p50, p99 = np.quantile(seconds, [0.5, 0.99])
        print(
            f"{ROADS[which]} | {base_s / sum(seconds):.2f} | {p50 / local_p50:.1f} | {p99 / p50:.1f} | "
            f"{counts[0] / (num_steps * STEP_TOKENS / 1e6):.1f} | {counts[1] / file_bytes:.2f}"
        )
    kept_s = sum(best["loader, local"][0]) / sum(best["loader, store"][0])
    print(f"\nrate through a loader from the server over that from files: {kept_s:.2f}")
    print("pages at hand when they were asked for: " + ", ".join(f"{k} {v:.3f}" for k, v in at_hand.items()))


if __name__ == "__main__":
    main()
