"""What random recipes plan and hand out, as one JSON: two commits that should behave alike are compared by it.

    python -m tests.trials.step_dump --seed 1 --count 40 --out after.json
    python -m tests.trials.step_dump --seed 1 --count 40 --out after.json --same-as before.json

In: a seed and a number of recipes. Out: for each recipe a digest of its planned pieces, of its plans' placement, and of
every tensor that every rank is handed. Must hold: it uses the package by its public names and files alone, so the same
script runs at both commits; digests of the product itself are left out, since a change of version alters them. A run
goes on where it stopped. Cost: about two seconds a recipe.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import torchmix
from tests.support.arrow_files import write_arrow
from tests.support.files import make_text_file, make_tokens_file, random_texts, random_tokens
from tests.support.indexed_datasets import write_dataset
from tests.support.json_lines import json_lines, write_lines
from torchmix.parallel.fan_out import local_world

FIELDS = ("tokens", "labels", "loss_mask", "position_ids", "source_index", "cu_seqlens", "cu_seqlens_padded")
LAYOUTS = ({}, {"dp": 2}, {"tp": 2, "dp": 2}, {"cp": 2, "dp": 2}, {"pp": 2, "dp": 2}, {"tp": 2, "pp": 2}, {"dp": 4})
PLANNED = ("step", "sample", "slot", "sample_offset", "source", "row", "epoch", "start", "tokens", "drawn_step")
PLACED = ("step", "sample", "dp_rank", "microbatch")


def write_recipe(folder: Path, draw: random.Random) -> tuple[Path, dict[str, int], list[str]]:
    """Random files of every format, a random recipe over them, a layout, and the recipe's parts."""
    seed = draw.randrange(2**31)
    sources: dict[str, str] = {}
    kinds = draw.sample(["list", "text", "arrow", "stream", "lines", "gzip", "megatron"], draw.randint(2, 4))
    for number, kind in enumerate(kinds):
        name, rows = f"{kind}{number}", draw.randint(60, 400)
        ids = random_tokens(seed + number, rows, mean_tokens=draw.choice([9, 40, 150]))
        texts = random_texts(seed + number, rows, mean_words=draw.choice([3, 12]))
        choices = {
            "codec": draw.choice(["none", "snappy", "zstd"]),
            "page_bytes": draw.choice([300, 2000]),
            "page_version": draw.choice(["1.0", "2.0"]),
            "dictionary": draw.random() < 0.5,
        }
        if kind == "list":
            make_tokens_file(folder / f"{name}.parquet", ids, **choices)
            sources[name] = f"{{path: {name}.parquet, tokens: input_ids}}"
        elif kind == "text":
            make_text_file(folder / f"{name}.parquet", texts, **choices)
            sources[name] = f"{{path: {name}.parquet, text: text, tokenizer: bytes}}"
        elif kind in ("arrow", "stream"):
            table = pa.table({"v": pa.array(ids, pa.list_(pa.int32()))})
            write_arrow(folder / f"{name}.arrow", table, stream=kind == "stream", batch_rows=70)
            sources[name] = f"{{path: {name}.arrow, tokens: v}}"
        elif kind in ("lines", "gzip"):
            suffix = ".jsonl" if kind == "lines" else ".jsonl.gz"
            path = folder / f"{name}{suffix}"
            write_lines(path, json_lines(texts, "v", seed), mean_bytes=3000, at_lines=True, seed=seed)
            sources[name] = f"{{path: {path.name}, text: v, tokenizer: bytes}}"
        else:
            write_dataset(folder / name, [np.asarray(row, np.uint16) for row in ids], dtype="uint16")
            sources[name] = f"{{path: {name}.bin}}"
    weights = [draw.randint(1, 9) for _ in sources]
    shares = [weight * 100 // sum(weights) for weight in weights]
    shares[0] += 100 - sum(shares)
    mixture = ", ".join(f"{name}: {share}%" for name, share in zip(sources, shares, strict=True))
    layout = draw.choice(LAYOUTS)
    length, samples = draw.choice([64, 96]), draw.choice([8, 16])
    ramp = f"[{{from_step: 0, samples: {samples}}}, {{from_step: 2, samples: {2 * samples}}}]"
    method, boundaries = draw.choice(["best_fit", "concat"]), draw.choice(["document", "none"])
    split = draw.random() < 0.3
    text = f"""
version: 1
seed: {draw.randrange(2**40)}
batch: {{samples: {draw.choice([str(samples), ramp])}, length: {length}}}
sources:
{chr(10).join(f"  {name}: {source}" for name, source in sources.items())}
mixture: {{{mixture}}}
packing: {{method: {method}, overflow: {draw.choice(["split", "truncate"])}, boundaries: {boundaries}, align_tokens: 8}}
balance: {{method: rows, model: {{layers: 4, hidden: 64, ffn: 256, heads: 4}}}}
shuffle: {{method: {draw.choice(["page", "row", "none"])}}}
{"split: [80, 20]" if split else ""}
"""
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path, dict(layout), ["train", "validation"] if split else ["train"]


def digest_of_tensors(recipe: Path, layout: dict[str, int], part: str) -> str:
    """16 hex digits over every field of every microbatch of every rank, for three steps."""
    sizes = {axis: layout.get(axis, 1) for axis in ("tp", "cp", "pp")}
    world = int(np.prod([*sizes.values(), layout.get("dp", 1)]))
    topology = torchmix.Topology.from_world(world_size=world, rank=0, **sizes)
    ends = local_world(topology) if world > 1 else [None]
    digests = [""] * world

    def consume(rank: int) -> None:
        digest = hashlib.sha256()
        options: dict[str, Any] = {"loaders": "in_process", "max_steps": 3, "part": part}
        with torchmix.build_loader(recipe, topology=topology.with_rank(rank), fan_out=ends[rank], **options) as loader:
            for microbatch in loader:
                numbers = (microbatch.step, microbatch.index, microbatch.num_tokens_global, microbatch.max_seqlen)
                digest.update(repr(numbers).encode())
                for name in FIELDS:
                    value = getattr(microbatch, name)
                    digest.update(name.encode() if value is None else value.numpy().tobytes())
                    digest.update(repr(None if value is None else (value.dtype, tuple(value.shape))).encode())
        digests[rank] = digest.hexdigest()

    threads = [threading.Thread(target=consume, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]


def digests_of_plan(recipe: Path, layout: dict[str, int], part: str) -> tuple[str, str]:
    """16 hex digits over the pieces of six steps, and over their placement."""
    out = recipe.parent / f"plan-{part}"
    command = ["plan", str(recipe), "--steps", "6", "--out", str(out), "--part", part]
    command += ["--dp", str(layout.get("dp", 1))]
    call = "import sys; from torchmix.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", call, *command], capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):  # 1: a validation part that ends
        return done.stderr[-200:], ""
    table = pq.read_table(out / "pieces.parquet")
    return tuple(_digest_of_table(table.select(list(names))) for names in (PLANNED, PLACED))  # type: ignore[return-value]


def _digest_of_table(table: pa.Table) -> str:
    return hashlib.sha256(json.dumps(table.to_pydict(), sort_keys=True).encode()).hexdigest()[:16]


def dump(seed: int, number: int) -> dict[str, Any]:
    """The digests of recipe `number` of a seed."""
    with tempfile.TemporaryDirectory() as folder:
        draw = random.Random(f"{seed} {number}")
        recipe, layout, parts = write_recipe(Path(folder), draw)
        call = "import sys; from torchmix.cli.main import main; sys.exit(main(sys.argv[1:]))"
        subprocess.run([sys.executable, "-c", call, "index", str(recipe)], capture_output=True, check=True)
        found: dict[str, Any] = {}
        for part in parts:
            pieces, placement = digests_of_plan(recipe, layout, part)
            found[part] = [pieces, placement, digest_of_tensors(recipe, layout, part)]
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--same-as", type=Path, help="a JSON of another commit; exit code 1 where a digest differs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = json.loads(options.out.read_text()) if options.out.exists() else {}
    for number in range(options.count):
        key = f"{options.seed}/{number}"
        if key not in found:
            found[key] = dump(options.seed, number)
            options.out.write_text(json.dumps(found, indent=1))
    if options.same_as is None:
        return 0
    other = json.loads(options.same_as.read_text())
    differing = [key for key in found if found[key] != other.get(key)]
    print(json.dumps({"compared": len(found), "differing": differing}))
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
