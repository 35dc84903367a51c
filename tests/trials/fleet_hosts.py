"""Jobs over hosts with a network, processes and a name of their own, against an oracle that does not know torchmix.

    python -m tests.trials.fleet_hosts --seed 1 --count 15 --out hosts.json

In: a seed and a number of cases. Out: for each case its loaders, and the requests of one client. Must hold: the tensors
of every rank are what the oracle makes of the plan and the whole files, over sources of five formats; nothing is left
on a host. The 15 cases are {job of 2 and of 4 hosts, remote of 2} x five layouts of four ranks, in an order of the
seed; with remote, the trainers' two hosts have the recipe, the catalog and a key, and no data. Ranks of a host see
its network and not each other's processes, as in containers, so each starts loaders. A run goes on where it stopped.
Cost: about half a minute a case.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.stateful.test_oracle import LAYOUTS
from tests.support import oracle
from tests.support.arrow_files import among_others, write_arrow
from tests.support.deadlines import LONG_S
from tests.support.files import make_text_file, make_tokens_file, random_texts, random_tokens
from tests.support.hosts import Host, hosts
from tests.support.indexed_datasets import random_sequences, write_dataset
from tests.support.json_lines import json_lines, write_lines
from tests.support.loaders import FIELDS
from tests.support.node_jobs import DEADLINE_S, STEPS
from tests.support.processes import COMMAND_LINE, Processes, wait_until
from tests.support.trial import continued, trial_parser
from tests.system.test_hosts import start
from torchmix.cli.main import main as command
from torchmix.parallel.topology import Topology
from torchmix.service.keys import write_keys
from torchmix.service.server import new_pair

PORT = 7700
LENGTH = 96
KINDS = ("job of 2", "job of 4", "remote of 2")
SIZES = {"dp2": {"dp": 2}, **{name: sizes for name, sizes in LAYOUTS.items() if sizes}}
CASES = tuple((kind, layout) for kind, layout in product(KINDS, SIZES) if layout != "dp2")
Documents = list[list[int]]


def _lists(folder: Path, seed: int) -> tuple[str, Documents]:
    for number in range(2):
        documents = random_tokens(seed + number, 150, mean_tokens=60, vocabulary=50_000)
        make_tokens_file(folder / f"{number}.parquet", documents, codec="zstd")
    return "path: '*.parquet', tokens: input_ids", oracle.read_token_documents([*folder.glob("*.parquet")], "input_ids")


def _text(folder: Path, seed: int) -> tuple[str, Documents]:
    make_text_file(folder / "0.parquet", random_texts(seed, 300))
    return "path: 0.parquet, text: text, tokenizer: bytes", oracle.read_text_documents([folder / "0.parquet"], "text")


def _lines(folder: Path, seed: int) -> tuple[str, Documents]:
    write_lines(folder / "0.jsonl.gz", json_lines(random_texts(seed, 300), "text", seed), mean_bytes=3000)
    return "path: 0.jsonl.gz, text: text, tokenizer: bytes", oracle.read_line_documents([folder / "0.jsonl.gz"], "text")


def _arrow(folder: Path, seed: int) -> tuple[str, Documents]:
    table = among_others(pa.array(random_tokens(seed, 250), pa.list_(pa.int64())), seed, "ids")
    write_arrow(folder / "0.arrow", table, stream=True, codec="lz4", batch_rows=20)
    return "path: 0.arrow, tokens: ids", oracle.read_arrow_documents([folder / "0.arrow"], "ids")


def _bin(folder: Path, seed: int) -> tuple[str, Documents]:
    write_dataset(folder / "0", random_sequences(seed, 200, mean_tokens=80, dtype="uint16"), dtype="uint16")
    return "path: 0.idx", oracle.read_indexed_documents([folder / "0.bin"])


FORMATS: dict[str, Callable[[Path, int], tuple[str, Documents]]] = {
    "token lists": _lists,
    "text": _text,
    "JSON lines": _lines,
    "Arrow": _arrow,
    ".bin": _bin,
}


class Hosts:
    """The data of a seed, indexed once."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self.recipe = folder, folder / "data" / "recipe.yaml"
        sources, self._documents = [], {}
        for number, make in enumerate(FORMATS.values()):
            place = folder / "data" / f"s{number}"
            place.mkdir(parents=True)
            text, self._documents[place.name] = make(place, seed)
            first, quote, rest = text.removeprefix("path: ").partition("'")
            path = f"'{place.name}/{rest}" if quote and not first else f"{place.name}/{first}{quote}{rest}"
            sources.append(f"  {place.name}: {{path: {path}}}\n")
        self.recipe.write_text(
            f"version: 1\nseed: {seed}\nbatch: {{samples: 8, length: {LENGTH}}}\nsources:\n{''.join(sources)}"
            f"mixture: {{{', '.join(f'{name}: 20%' for name in self._documents)}}}\n"
            "packing: {method: best_fit, align_tokens: 8}\nshuffle: {window_pages: 3, window_bytes: 64KiB}\n"
        )
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            assert command(["index", "--quiet", str(self.recipe)]) == 0

    def expected(self, layout: str) -> list[str]:
        """A hash of the tensors of each rank."""
        job = oracle.Job(
            length=LENGTH,
            boundaries="document",
            method="best_fit",
            align_tokens=8,
            micro_batch_size=1,
            **SIZES[layout],
        )
        plan = Path(tempfile.mkdtemp(dir=self._folder))
        words = ["--steps", str(STEPS), "--dp", str(job.dp), "--micro-batch-size", "1", "--out", str(plan)]
        with redirect_stdout(StringIO()):
            assert command(["plan", str(self.recipe), *words]) == 0
        return [
            _hash(of_rank) for of_rank in oracle.expected_microbatches(plan / "pieces.parquet", self._documents, job)
        ]

    def one(self, kind: str, layout: str) -> dict[str, Any]:
        """Run one case."""
        where, _, count = kind.partition(" of ")
        place = Path(tempfile.mkdtemp(dir=self._folder))
        topology = Topology(**SIZES[layout])
        with hosts(int(count) if where == "job" else 2 + int(count)) as places, Processes(place) as processes:
            if where == "job":
                ranks = start(processes, places, self.recipe, topology)
            else:
                keys = place / "keys"
                write_keys(keys, new_pair, num_clients=1)
                for host in places[2:]:
                    self._serve(processes, host, keys)
                trainers = place / "trainers"
                shutil.copytree(self.recipe.parent / "catalog", trainers / "catalog")
                shutil.copy(self.recipe, trainers)
                [*_, first, last] = [host.address.rpartition(".") for host in places]
                endpoints = f"tcp://{first[0]}.[{first[2]}-{last[2]}]:{PORT}"
                words = f"remote,endpoints={endpoints},keys={keys}"
                ranks = start(processes, places[:2], trainers / "recipe.yaml", topology, LOADERS=words)
            processes.wait_all(ranks, deadline_s=DEADLINE_S)
            for rank in ranks:
                wait_until(lambda rank=rank: not rank.session, deadline_s=DEADLINE_S, what="end of all on a host")
            found = [json.loads(rank.stdout().splitlines()[-1]) for rank in ranks]
        assert [rank["hash"] for rank in found] == self.expected(layout), f"{kind}, {layout}"
        assert not any(rank["left"] for rank in found)
        asked = max(rank.get("total_loader_requests", 0) for rank in found)
        known = max(rank.get("loaders_known", 0) for rank in found)
        assert asked and known == (2 if where == "remote" else 2 * topology.world_size), (kind, layout, asked, known)
        return {"kind": kind, "layout": layout, "loaders": known, "requests": asked}

    def _serve(self, processes: Processes, host: Host, keys: Path) -> None:
        words = ("serve", str(self.recipe), "--bind", f"tcp://{host.address}:{PORT}", "--keys", str(keys))
        child = processes.start(host.command(sys.executable, *COMMAND_LINE, *words), name=f"serve-{host.name}")
        child.wait_for_line("listen at", deadline_s=LONG_S)


def _hash(microbatches: list[dict[str, Any]]) -> str:
    """As `node_rank` makes it."""
    found = hashlib.sha256()
    for one in microbatches:
        for name in FIELDS:
            found.update(name.encode() if one[name] is None else one[name].tobytes())
    return found.hexdigest()


def main() -> None:
    """Run the cases that are not in the file yet."""
    asked = trial_parser(__doc__, count=len(CASES)).parse_args()
    cases = list(CASES)
    random.Random(asked.seed).shuffle(cases)
    with tempfile.TemporaryDirectory() as folder:
        several = Hosts(Path(folder), asked.seed)
        continued(asked, lambda _, number: several.one(*cases[number]), most=len(cases))


if __name__ == "__main__":
    main()
