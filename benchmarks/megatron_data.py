"""Corpora in Megatron's .bin/.idx files, and what both contestants are told of them.

In: a folder, a number of sources, a token type. Out: the files, written by Megatron's own `IndexedDatasetBuilder`; the
same shares as a recipe for torchmix and as a blend for Megatron. Documents have log-normal lengths, mean 800, and end
with an end-of-document id. Shares fall as 1/n over the sources, but 2 % of the sources (one at least) have 1e-4 each;
sizes fall slower than shares, so the first sources repeat and the last ones are hardly used. Every random choice is
keyed by the source's name. Must hold: the same arguments write the same files. Cost: about 0.03 s per million tokens.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MEAN_TOKENS = 800
VOCABULARY = {"u16": 50_257, "i32": 128_256}
"""Ids of GPT-2 and of Llama 3, which Megatron stores as uint16 and as int32."""
EOD = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """The sources of one run."""

    folder: Path
    names: list[str]
    shares: list[float]
    """Of the trained tokens; the sum is 1."""
    dtype: str
    num_tokens: int

    @property
    def prefixes(self) -> list[str]:
        """Megatron's path prefixes, one for each source."""
        return [str(self.folder / name) for name in self.names]

    @property
    def vocabulary(self) -> int:
        """Ids there are."""
        return VOCABULARY[self.dtype]


def shares_of(num_sources: int) -> list[float]:
    """1/n, with 2 % of the sources at 1e-4; rounded to multiples of 1e-8 that sum to 1."""
    num_tiny = max(1, round(0.02 * num_sources))
    falling = 1.0 / np.arange(1, num_sources - num_tiny + 1)
    units = np.round(falling / falling.sum() * (1 - 1e-4 * num_tiny) * 1e8).astype(np.int64)
    units[0] += 10**8 - 10**4 * num_tiny - units.sum()
    return [*(units / 1e8).tolist(), *[1e-4] * num_tiny]


def write_corpus(
    folder: Path, num_sources: int, *, dtype: str, num_tokens: int, mean_tokens: int = MEAN_TOKENS
) -> Corpus:
    """Write all sources, or open those written before with the same arguments."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    names = [f"source-{i:03d}" for i in range(num_sources)]
    corpus = Corpus(folder=folder, names=names, shares=shares_of(num_sources), dtype=dtype, num_tokens=num_tokens)
    asked = {"sources": num_sources, "dtype": dtype, "tokens": num_tokens, "mean": mean_tokens}
    done = folder / "corpus.json"
    if done.exists():
        assert json.loads(done.read_text()) == asked, f"{done} holds another corpus than {asked}"
        return corpus
    folder.mkdir(parents=True, exist_ok=True)
    size_share = np.sqrt(corpus.shares) / np.sqrt(corpus.shares).sum()
    numpy_type = np.uint16 if dtype == "u16" else np.int32
    for name, share in zip(names, size_share, strict=True):
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        count = max(20, round(share * num_tokens / mean_tokens))
        lengths = np.clip(rng.lognormal(np.log(mean_tokens) - 0.5, 1.0, count), 8, 65_536).astype(np.int64)
        ids = rng.integers(1, VOCABULARY[dtype], int(lengths.sum()), dtype=numpy_type)
        ends = np.cumsum(lengths)
        ids[ends - 1] = EOD
        builder = IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=numpy_type)
        for start, end in zip((ends - lengths).tolist(), ends.tolist(), strict=True):
            builder.add_document(ids[start:end], [end - start])
        builder.finalize(str(folder / f"{name}.idx"))
    done.write_text(json.dumps(asked))
    return corpus


def write_recipe(corpus: Corpus, *, samples: int, length: int, packing: str = "document") -> Path:
    """A recipe beside the files.

    `packing` is `document` for best fit with the documents' boundaries, or `stream` for what Megatron does by default:
    documents laid end to end and cut, no boundaries.
    """
    method, boundaries = ("best_fit", "document") if packing == "document" else ("concat", "none")
    lines = [
        "version: 1",
        "seed: 1",
        f"batch: {{samples: {samples}, length: {length}}}",
        f"packing: {{method: {method}, boundaries: {boundaries}}}",
        "sources:",
        *(f"  {name}: {{path: {name}, format: megatron}}" for name in corpus.names),
        "mixture:",
        *(f"  {name}: {share * 100:.6f}%" for name, share in zip(corpus.names, corpus.shares, strict=True)),
    ]
    path = corpus.folder / f"{packing}-{samples}x{length}.yaml"
    path.write_text("\n".join(lines) + "\n")
    return path


def drop_page_cache(folder: Path) -> None:
    """Ask the kernel to forget the files' pages, so that a cold start reads them from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)  # pages that are not on the disk yet cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
