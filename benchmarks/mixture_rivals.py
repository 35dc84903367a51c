"""How far a run is from its shares after n documents, beside other libraries that are installed.

    python benchmarks/mixture_rivals.py [--quick]

306 sources with shares as 1/n. *Error* is half the sum over the sources of how far the part of the tokens of each is
from its share, after n documents; *unseen* are sources that have given nothing. Documents vary about the mean of their
source, which is the same for all (`equal`), or from 200 to 8,000 tokens (`mixed`). Each library chooses the source of
each document with its own code: Hugging Face `interleave_datasets` with `probabilities`, Grain `MapDataset.mix` with
weights, LitData's iterator of combined datasets, and Megatron's blending indices, whose samples all have the length of
a sample, so that a document stands for one there. What is not installed is left out. `benchmarks/mixtures.py` has the
rules of these libraries without them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent))
from mixtures import SOURCES, error_of, make_sizes, means, ours

SHARES = 1 / np.arange(1, SOURCES + 1)
SHARES /= SHARES.sum()


def of_datasets(count: int) -> NDArray[np.int64]:
    from datasets import IterableDataset, interleave_datasets

    def endless(source: int) -> Iterator[dict[str, int]]:
        while True:
            yield {"source": source}

    each = [IterableDataset.from_generator(endless, gen_kwargs={"source": s}) for s in range(SOURCES)]
    mixed = interleave_datasets(each, probabilities=SHARES.tolist(), seed=3)
    return np.fromiter((row["source"] for row in islice(mixed, count)), np.int64, count)


def of_grain(count: int) -> NDArray[np.int64]:
    import grain

    each = [grain.MapDataset.source([s]).repeat() for s in range(SOURCES)]
    mixed = grain.MapDataset.mix(each, SHARES.tolist())
    return np.fromiter((mixed[i] for i in range(count)), np.int64, count)


def of_litdata(count: int) -> NDArray[np.int64]:
    from litdata.streaming.combined import _CombinedDatasetIterator

    class Endless:
        """A dataset of one number."""

        def __init__(self, source: int) -> None:
            self.source = source

        def __iter__(self) -> Iterator[int]:
            while True:
                yield self.source

    mixed: Any = _CombinedDatasetIterator(
        [Endless(s) for s in range(SOURCES)],
        seed=3,
        weights=SHARES.tolist(),
        use_streaming_dataloader=False,
        num_samples_yielded=None,
        batch_size=1,
        batching_method="stratified",
    )
    return np.fromiter(islice(mixed, count), np.int64, count)


def of_megatron(count: int) -> NDArray[np.int64]:
    from megatron.core.datasets import helpers

    chosen, row = np.zeros(count, np.int16), np.zeros(count, np.int64)
    helpers.build_blending_indices(chosen, row, SHARES, SOURCES, count, False)
    return chosen.astype(np.int64)


RIVALS: dict[str, tuple[str, Callable[[int], NDArray[np.int64]]]] = {
    "Hugging Face": ("datasets", of_datasets),
    "LitData": ("litdata", of_litdata),
    "Grain": ("grain", of_grain),
    "Megatron": ("megatron-core", of_megatron),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small numbers, to see that it runs")
    counts = [1000] if parser.parse_args().quick else [1000, 10_000, 100_000]
    chosen: dict[str, SimpleNamespace] = {}
    for name, (package, choose) in RIVALS.items():
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            print(f"{package} is not installed")
            continue
        chosen[name] = SimpleNamespace(of=choose(max(counts)), title=f"{package} {version}")
    print(
        "lengths | documents | torchmix: error | unseen",
        *(f"{each.title}: error | unseen" for each in chosen.values()),
        sep=" | ",
    )
    for lengths in ("equal", "mixed"):
        found = [ours(counts, mixed=lengths == "mixed")]
        of_source = [make_sizes(mean, s).tokens for s, mean in enumerate(means(lengths == "mixed"))]
        for name, each in chosen.items():
            rng = np.random.default_rng(3)
            tokens = np.ones(len(each.of))
            for s in range(SOURCES if name != "Megatron" else 0):
                mine = np.flatnonzero(each.of == s)
                tokens[mine] = rng.choice(of_source[s], len(mine))
            found.append([error_of(np.bincount(each.of[:n], tokens[:n], SOURCES), SHARES) for n in counts])
        for n, *results in zip(counts, *found, strict=True):
            cells = " | ".join(f"{error:.4f} | {unseen}" for error, unseen in results)
            print(f"{lengths} | {n:,} | {cells}", flush=True)


if __name__ == "__main__":
    main()
