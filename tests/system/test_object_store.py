"""A real S3 server on loopback: every format gives the same stream from it as from local files, and failures are named.

The programs under test are processes of their own: nothing of Amazon's client runs where tests run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.files import make_text_file, make_tokens_file, random_texts, random_tokens
from tests.support.formats import format_world
from tests.support.indexed_datasets import random_sequences, write_dataset
from tests.support.loaders import run_job
from tests.support.memory_store import in_store
from tests.support.processes import COMMAND_LINE, Child, Processes
from tests.support.recipes import make_recipe
from tests.support.s3_server import DROP, Asked, Proxy, S3Server, proxy, s3_server
from tests.support.store_fleet import hash_all
from torchmix.catalog.in_store import CACHE_VARIABLE
from torchmix.parallel.topology import Topology
from torchmix.reader.open_files import GAP_BYTES
from torchmix.recipe.structs import Recipe

pytestmark = pytest.mark.system

ROOT = "bucket/corpus"
STEPS = 8
DEADLINE_S = 180


class Corpus:
    """Files of all formats on a disk and in a store, and the recipes of both."""

    def __init__(self, folder: Path, server: S3Server) -> None:
        data = folder / "data"
        data.mkdir()
        world = format_world(data, 1, length=512)
        server.put_folder(data, ROOT)
        self.near = write(in_store(world.recipe, str(data), "catalog"), folder / "near" / "recipe.yaml")
        self.far = write(in_store(world.recipe, f"s3://{ROOT}", "catalog"), folder / "far" / "recipe.yaml")
        self.data = data
        self.recipe = world.recipe


def write(recipe: Recipe, path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(msgspec.json.encode(recipe))  # JSON is YAML
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, server: S3Server) -> Corpus:
    """Indexed from the store; local files are indexed where they are first read."""
    made = Corpus(tmp_path_factory.mktemp("corpus"), server)
    with proxy(server) as store, Processes(made.near.parent) as processes:
        indexed = torchmix(processes, store, "index", made.far)
        assert indexed.returncode == 0, indexed.report()
        assert len({one.key for one in store.ranges()}) == 14
    return made


@pytest.fixture
def store(server: S3Server) -> Iterator[Proxy]:
    with proxy(server) as running:
        yield running


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path) as running:
        yield running


def torchmix(processes: Processes, store: Proxy, *arguments: object, cache: Path | None = None) -> Child:
    """The command line in a process that speaks to the store; `cache` has copies of catalogs."""
    environment = store.environment if cache is None else {**store.environment, CACHE_VARIABLE: str(cache)}
    child = processes.fork_python("-W", "error", *COMMAND_LINE, *map(str, arguments), environment=environment)
    child.wait(deadline_s=DEADLINE_S)
    return child


def train(processes: Processes, store: Proxy, recipe: Path, *, steps: int = STEPS, **more: Any) -> Child:
    """A process that trains, see store_loader.py; `alone` in an interpreter that has imported nothing before."""
    first, last = more.get("first", "-"), more.get("last", "-")
    loaders = more.get("loaders", "in_process")
    arguments = ("-W", "error", "-m", "tests.support.store_loader", recipe, first, steps, last, loaders)
    start = processes.start_python if more.get("alone") else processes.fork_python
    cache = {CACHE_VARIABLE: str(more["cache"])} if "cache" in more else {}
    return start(*map(str, arguments), environment={**store.environment, **cache})


def result_of(child: Child) -> dict[str, Any]:
    assert child.wait(deadline_s=DEADLINE_S) == 0, child.report()
    found: dict[str, Any] = json.loads(child.stdout().splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def near(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What training from local files gives."""
    with Processes(tmp_path_factory.mktemp("near")) as processes:
        return result_of(train(processes, Proxy(server=S3Server(port=0)), corpus.near))


def test_all_formats_give_the_stream_of_local_files_and_resume(corpus, near, store, processes, tmp_path) -> None:
    far = result_of(train(processes, store, corpus.far, alone=True))
    result_of(train(processes, store, corpus.far, steps=3, last=tmp_path / "state"))
    second = result_of(train(processes, store, corpus.far, steps=STEPS - 3, first=tmp_path / "state", loaders="node"))
    assert far["digests"] == near["digests"] and len(set(far["digests"])) == STEPS
    assert far["hashes"] == near["hashes"] and len(set(far["hashes"])) == STEPS
    assert second["hashes"] == near["hashes"][3:]

    checked = torchmix(processes, store, "check", corpus.far, "--steps", STEPS)
    assert checked.returncode in (0, 1) and "data:" not in checked.stdout(), checked.report()
    shown = [
        torchmix(processes, store, "show", recipe, "--source", "lines", "--rows", "0:3", "--json").stdout()
        for recipe in (corpus.far, corpus.near)
    ]
    far_rows, near_rows = (json.loads(text)["rows"] for text in shown)
    assert [row["text"] for row in far_rows] == [row["text"] for row in near_rows]
    assert f"s3://{ROOT}/lines/0.jsonl" in shown[0]


def test_hosts_without_a_shared_disk_have_the_catalog_from_the_store(corpus, near, store, processes, tmp_path) -> None:
    recipe = in_store(corpus.recipe, f"s3://{ROOT}", "s3://bucket/runs/7/catalog")
    path = write(recipe, tmp_path / "run" / "recipe.yaml")
    indexed = torchmix(processes, store, "index", path, cache=tmp_path / "indexer")
    assert indexed.returncode == 0, indexed.report()
    store.asked.clear()
    first = result_of(train(processes, store, path, steps=3, last=tmp_path / "state", cache=tmp_path / "first"))
    got = Counter(one.key for one in store.ranges() if one.key.startswith("bucket/runs/7/catalog/arrays/"))
    assert got and set(got.values()) == {1}
    # The state's host has put the history of the run there.
    assert any(one.method == "POST" and "/history/" in one.key for one in store.asked)
    rest = {"steps": STEPS - 3, "first": tmp_path / "state", "loaders": "node", "cache": tmp_path / "second"}
    second = result_of(train(processes, store, path, **rest))
    assert [*first["hashes"], *second["hashes"]] == near["hashes"]


def test_a_dataset_of_megatron_gives_the_stream_of_local_files(server, store, processes, tmp_path) -> None:
    for number in range(2):
        sequences = random_sequences(number, 2000, mean_tokens=200)
        write_dataset(tmp_path / "data" / f"web{number}", sequences)
    server.put_folder(tmp_path / "data", "datasets")
    keys = {"path": "*.idx", "format": "megatron", "tokens": None}
    recipe = make_recipe({"web": "100%"}, sources={"web": keys}, length=512)
    results = []
    for name, root in (("near", str(tmp_path / "data")), ("far", "s3://datasets")):
        results.append(
            result_of(train(processes, store, write(in_store(recipe, root, "catalog"), tmp_path / name / "r.yaml")))
        )
    assert results[0]["hashes"] == results[1]["hashes"] and len(set(results[1]["hashes"])) == STEPS
    assert {asked.key for asked in store.ranges()} == {
        f"datasets/web{i}.{half}" for i in (0, 1) for half in ("bin", "idx")
    }


def read_window(processes: Processes, store: Proxy, place: object, catalog: Path) -> tuple[dict[str, Any], list[Asked]]:
    """What a process read of a file, see store_window.py, and the ranges that it asked the store for."""
    store.asked.clear()
    arguments = ("-W", "error", "-m", "tests.support.store_window", str(place), str(catalog))
    found = result_of(processes.fork_python(*arguments, environment=store.environment))
    return found, store.ranges()


def test_a_window_is_a_few_requests_and_hardly_more_bytes_than_its_pages(server, store, processes, tmp_path) -> None:
    documents = random_tokens(3, 60_000, mean_tokens=40)
    path = make_tokens_file(tmp_path / "data" / "a.parquet", documents, page_bytes=16 << 10, row_group_rows=20_000)
    server.put_folder(path.parent, "windows")
    near, _ = read_window(processes, store, path, tmp_path / "near")
    scan, scanned = read_window(processes, store, "s3://windows/a.parquet", tmp_path / "far")
    far, asked = read_window(processes, store, "s3://windows/a.parquet", tmp_path / "far")
    assert scan == far == near and far["pages"] == 16
    file_bytes = path.stat().st_size
    assert asked[0].first_byte + asked[0].num_bytes == file_bytes  # the footer, by which it is known
    pages = asked[1:]
    assert len(pages) < far["pages"]
    assert far["needed"] <= sum(one.num_bytes for one in pages) <= far["needed"] + GAP_BYTES * far["pages"]
    assert len(set(pages)) == len(pages)
    # Indexing goes once over the column, by large blocks.
    of_scan = scanned[: len(scanned) - len(asked)]
    assert sum(one.num_bytes for one in of_scan) < 1.2 * file_bytes + (1 << 20) and len(of_scan) < 20


def test_failures_that_pass_do_not_end_a_run(corpus, near, store, processes) -> None:
    failures = (503, 500, DROP, 500)  # more than the client tries by itself
    num_asked: Counter[tuple[str, int]] = Counter()

    def fail(asked: Asked) -> int | str | None:
        num_asked[asked.key, asked.first_byte] += 1
        return dict(enumerate(failures, 1)).get(num_asked[asked.key, asked.first_byte])

    store.fail = fail
    far = result_of(train(processes, store, corpus.far, steps=1))
    assert far["hashes"] == near["hashes"][:1]
    assert min(num_asked.values()) > len(failures)


def test_a_failure_that_stays_is_named(corpus, store, processes) -> None:
    store.fail = lambda asked: 503 if asked.method == "GET" and asked.first_byte > 0 else None
    child = torchmix(processes, store, "show", corpus.far, "--source", "parquet", "--rows", "0:3")
    assert child.returncode == 3
    last = child.stderr().strip().splitlines()[-1]
    assert "cannot read bytes [" in last and f"s3://{ROOT}/parquet/0.parquet" in last, child.report()
    assert "5 times; check the store and the connection" in last
    assert "trying again in 0.1 s" in child.stderr()


def test_objects_that_are_replaced_or_deleted_are_named(server, store, processes, tmp_path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    world = format_world(folder, 2, num_documents=60, length=256)
    server.put_folder(folder, ROOT + "2")
    recipe = write(in_store(world.recipe, f"s3://{ROOT}2", "catalog"), tmp_path / "run" / "recipe.yaml")
    assert torchmix(processes, store, "index", recipe).returncode == 0
    other = make_text_file(tmp_path / "other.parquet", random_texts(9, 50), column="v").read_bytes()
    server.put(f"{ROOT}2/parquet/0.parquet", other)
    server.delete(f"{ROOT}2/zstd/1.json.zst")
    for name, row, says in (
        (
            "parquet",
            0,
            f"source 'parquet': s3://{ROOT}2/parquet/0.parquet: it has {len(other)} bytes; it was indexed with",
        ),
        ("zstd", 100, f"source 'zstd': s3://{ROOT}2/zstd/1.json.zst: cannot be opened: there is no such object"),
    ):
        child = torchmix(processes, store, "show", recipe, "--source", name, "--row", row)
        assert child.returncode == 3 and says in child.stderr(), child.report()
    checked = torchmix(processes, store, "check", recipe, "--steps", STEPS)
    assert checked.returncode == 3 and "1 file(s) removed - s3://" in checked.stdout(), checked.report()
    assert "1 file(s) changed - s3://" in checked.stdout(), checked.report()


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (
            f"s3://{ROOT}/parquet/0.parqet",
            "is missing; nearest to '0.parqet' in s3://bucket/corpus/parquet: '0.parquet'",
        ),
        (f"s3://{ROOT}/parkuet/*.parquet", "matches no object; nearest to 'parkuet' in s3://bucket/corpus: 'parquet'"),
        (f"s3://{ROOT}/parquet", "is a folder; name its files, as 's3://bucket/corpus/parquet/*.parquet'"),
        ("s3://bukket/corpus/*.parquet", "there is no s3://bukket, or it is not shown to these credentials"),
        ("zzz://bucket/a.parquet", "no store is known by zzz://; read are s3://, gs://, hf://"),
    ],
)
def test_a_uri_that_leads_nowhere_is_told_with_what_is_there(corpus, store, processes, tmp_path, path, says) -> None:
    wrong = msgspec.structs.replace(corpus.recipe.sources["parquet"], path=path, format="parquet")
    recipe = msgspec.structs.replace(corpus.recipe, sources={**corpus.recipe.sources, "parquet": wrong})
    child = torchmix(processes, store, "index", write(recipe, corpus.data / f"wrong-{abs(hash(path))}.yaml"))
    assert child.returncode == 3 and says in child.stderr(), child.report()


def test_refused_credentials_are_told_at_once_with_where_they_are_looked_for(corpus, store, processes) -> None:
    store.fail = lambda asked: 403
    child = torchmix(processes, store, "check", corpus.far, "--steps", STEPS)
    assert child.returncode == 3, child.report()
    assert "refuses these credentials, which are looked for in AWS_ACCESS_KEY_ID" in child.stdout()
    assert "trying again" not in child.stderr()


def test_loaders_of_four_nodes_ask_a_store_hardly_more_often_than_one_reader(
    server, store, processes, tmp_path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    # Pages are further apart than what one request takes together, and a window holds more than a block of steps.
    # Each loader asks once more what the file is.
    make_tokens_file(data / "0.parquet", random_tokens(1, 4800, mean_tokens=800), page_bytes=80_000)
    server.put_folder(data, "fleet/data")
    recipe = make_recipe({"web": "100%"}, sources={"web": {"path": "*.parquet"}}, length=2048)
    recipe = msgspec.structs.replace(recipe, shuffle=msgspec.structs.replace(recipe.shuffle, window_pages=32))
    far = write(in_store(recipe, "s3://fleet/data", "catalog"), tmp_path / "far" / "recipe.yaml")
    near = write(in_store(recipe, str(data), "catalog"), tmp_path / "near" / "recipe.yaml")
    indexed = torchmix(processes, store, "index", far)
    assert indexed.returncode == 0, indexed.report()

    def asked(place: str, dp: int) -> tuple[int, list[str]]:
        """Ranges that were asked for, and a hash of each rank's tensors."""
        before = len(store.ranges())
        words = ("-W", "error", "-m", "tests.support.store_fleet", str(far), place, str(dp))
        found = result_of(processes.fork_python(*words, environment=store.environment))
        return len(store.ranges()) - before, found

    (alone, _), (fleet, given) = asked("in_process", 1), asked("job of 4", 8)
    assert given == [rank.result for rank in run_job(near, Topology(dp=8), program=hash_all, one_pass=True)]
    assert 20 < alone <= fleet <= 1.25 * alone, (alone, fleet)
