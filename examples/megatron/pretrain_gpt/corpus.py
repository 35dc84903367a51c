"""A tiny corpus and its recipes, made on the fly: a Megatron dataset (.bin/.idx) and two Parquet sources.

In: a folder. Out: `notes.bin` and `notes.idx`, written as Megatron's `preprocess_data.py` writes them; `code.parquet`
with text, `web.parquet` and `more.parquet` with lists of token ids; `dense.yaml` and `thd.yaml`, the recipes of the
matrix; and variants of them for single checks (a ramp, other shares, a source more, a policy).

Must hold: the same files each time, byte for byte, so that digests of two runs can be compared. Lengths are skewed, as
real ones are: a few documents are longer than a sample, many are far shorter. Ids are below `VOCABULARY`.

`dense`: documents are concatenated and cut, attention runs over the whole sample (`boundaries: none`), as in
Megatron's own pre-training. `thd`: documents are packed whole, and attention stops at their ends.

    python corpus.py /tmp/corpus

Cost: a second, 1 MB.
"""

from __future__ import annotations

import random
import struct
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

VOCABULARY = 257
"""Bytes, and the end of a document."""
END_OF_DOCUMENT = 256
LENGTH = 64
"""Tokens of a sample."""
SAMPLES = 8
"""Samples of a global batch."""
DOCUMENTS = 400
RANK_TOKENS = 3 * LENGTH // 4
"""Of bins: most tokens of a rank in a microbatch."""

PACKING = {
    "dense": "{method: concat, boundaries: none}",
    "thd": "{method: best_fit, overflow: split, boundaries: document, align_tokens: 8}",
}
RECIPE = """\
version: 1
seed: 1234
batch: {{samples: {samples}, length: {length}}}
sources:
  notes: {{path: notes, format: megatron}}
  code:  {{path: code.parquet, text: text, tokenizer: bytes}}
  web:   {{path: web.parquet, tokens: input_ids}}
mixture: {{notes: {notes}, code: 30%, web: {web}}}
split: [90, 8, 2]
packing: {packing}
balance: {{method: rows, model: {{layers: 4, hidden: 64, ffn: 256, heads: 4}}}}
"""
ADO = "policy: ado, options: {ignore_steps: 2, start_step: 9, refit_steps: 10, every: 1}, every: 5 steps, lag: 4 steps"
"""Constants of a run of 50 steps; the paper's are of thousands."""
RAMP = "[{from_step: 0, samples: 4}, {from_step: 2, samples: 8}]"


def documents(name: str) -> list[list[int]]:
    """Token ids of a source's documents, each with its end."""
    random_of_source = random.Random(f"torchmix example {name}")
    lengths = [1 + min(150, int(random_of_source.lognormvariate(2.8, 1.0))) for _ in range(DOCUMENTS)]
    return [[random_of_source.randrange(32, 127) for _ in range(length)] + [END_OF_DOCUMENT] for length in lengths]


def write_corpus(folder: Path) -> None:
    """Write all sources and recipes into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_megatron(folder / "notes", documents("notes"))
    text = [bytes(document[:-1]).decode("ascii") for document in documents("code")]
    pq.write_table(pa.table({"text": text}), folder / "code.parquet", row_group_size=50)
    for name in ("web", "more"):
        tokens = pa.array(documents(name), pa.list_(pa.int32()))
        pq.write_table(pa.table({"input_ids": tokens}), folder / f"{name}.parquet", row_group_size=50)
    for name, rank_tokens in (("thd-runs", RANK_TOKENS), ("thd-runs-alone", LENGTH)):
        (folder / f"{name}.yaml").write_text(with_runs(rank_tokens=rank_tokens), encoding="utf-8")
    for name in PACKING:
        (folder / f"{name}.yaml").write_text(recipe(name), encoding="utf-8")
        (folder / f"{name}-ramp.yaml").write_text(recipe(name, samples=RAMP), encoding="utf-8")
        (folder / f"{name}-other.yaml").write_text(recipe(name, notes="30%", web="40%"), encoding="utf-8")
        (folder / f"{name}-edited.yaml").write_text(edited(name), encoding="utf-8")
        log = f"decisions: ./decisions-{name}"
        (folder / f"{name}-ado.yaml").write_text(recipe(name) + f"dynamic: {{{ADO}, {log}}}\n", encoding="utf-8")


def edited(packing: str) -> str:
    """A recipe's text with a source more."""
    text = recipe(packing, notes="20%", web="20%").replace("code: 30%", "code: 30%, more: 30%")
    return text.replace("  web: ", "  more:  {path: more.parquet, tokens: input_ids}\n  web: ")


def with_runs(*, rank_tokens: int) -> str:
    """A recipe's text whose documents are over several ranks."""
    lines = [line for line in recipe("thd").splitlines() if not line.startswith(("packing:", "balance:"))]
    context = f"context: {{rank_tokens: {rank_tokens}, per_exchanged: 60}}"
    lines += ["packing: {method: whole}", f"balance: {{{context}, cost: {{per_token: 100, per_pair: 1}}}}", ""]
    return "\n".join(lines)


def recipe(packing: str, *, samples: int | str = SAMPLES, notes: str = "50%", web: str = "20%") -> str:
    """A recipe's text."""
    return RECIPE.format(samples=samples, length=LENGTH, notes=notes, web=web, packing=PACKING[packing])


def write_megatron(prefix: Path, token_lists: list[list[int]]) -> None:
    """Write a dataset in Megatron's format, with ids of 16 bits.

    Source: Megatron-LM `core/datasets/indexed_dataset.py`, `_IndexWriter`.
    """
    lengths = [len(tokens) for tokens in token_lists]
    offsets = [0]
    for length in lengths[:-1]:
        offsets.append(offsets[-1] + 2 * length)
    count = len(lengths)
    prefix.with_suffix(".bin").write_bytes(b"".join(struct.pack(f"<{len(ids)}H", *ids) for ids in token_lists))
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, 8, count, count + 1)
        + struct.pack(f"<{count}i", *lengths)
        + struct.pack(f"<{count}q", *offsets)
        + struct.pack(f"<{count + 1}q", *range(count + 1))
    )


if __name__ == "__main__":
    write_corpus(Path(sys.argv[1]))
    print(f"corpus and recipes are in {sys.argv[1]}")
