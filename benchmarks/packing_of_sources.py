"""Padding of mixtures with long documents: best fit for all, and `method: concat` for sources of plain texts.

    python benchmarks/packing_of_sources.py [--steps 60]

Synthetic sizes, no files: lengths are log-normal, with the medians below. Half of the tokens come from texts, which may
be cut, and half from documents that stay whole. *padding* is the part of a batch without tokens, *cut* the part of the
texts no longer than a sample that lie in two or more, *pool* the largest pool in batches. With `concat` for all nothing
is padded, and whole documents are cut, too: the last column has the part of them.
"""

from __future__ import annotations

import argparse

import numpy as np

from torchmix.catalog.sizes import SourceSizes
from torchmix.planner.pack import Pieces
from torchmix.planner.planner import Planner
from torchmix.recipe.load import check_recipe
from torchmix.recipe.parts import part_of
from torchmix.recipe.structs import Batch, Packing, PackingOfSource, Recipe, Source

MEDIANS = {
    "web": (600, 1.0),
    "books": (30_000, 1.0),
    "chats": (800, 0.8),
    "reasoning": (0.55, 0.5),
    "agents": (0.9, 0.4),
}
"""Of tokens, or of a sample where they are below 1; and sigma."""
MIXTURES = (("web", "chats"), ("web", "reasoning"), ("books", "reasoning"), ("books", "agents"))
BATCHES = ((8, 4096), (64, 4096), (256, 8192))
DOCUMENTS = 100_000


def sizes_of(name: str, length: int) -> SourceSizes:
    median, sigma = MEDIANS[name]
    median = median if median > 1 else median * length
    rng = np.random.default_rng(sorted(MEDIANS).index(name))
    tokens = np.clip(rng.lognormal(np.log(median), sigma, DOCUMENTS), 8, 1 << 20).astype(np.int32)
    first_row = np.append(np.arange(0, DOCUMENTS, 100), DOCUMENTS)
    return SourceSizes(first_row_of_page=first_row, tokens=tokens, window_pages=64)


def measured(
    names: tuple[str, str], samples: int, length: int, way: str, steps: int
) -> tuple[float, float, float, float]:
    """Padding, texts cut, largest pool, whole documents cut."""
    texts = names[0]
    recipe = Recipe(
        version=1,
        seed=1,
        batch=Batch(samples=samples, length=length),
        sources={
            name: Source(
                path="none",
                tokens="ids",
                packing=PackingOfSource(method="concat" if way == "of sources" and name == texts else None),
            )
            for name in names
        },
        mixture=dict.fromkeys(names, "50%"),
        packing=Packing(method="concat" if way == "concat" else "best_fit"),
    )
    planner = Planner(part_of(check_recipe(recipe), "train"), {name: sizes_of(name, length) for name in names})
    cursor, padding, pool = planner.start(), 0, 0
    given: list[Pieces] = []
    for _ in range(steps):
        packed, _, _, cursor = planner.fold(cursor)
        padding += samples * length - int(packed.pieces.tokens.sum())
        pool = max(pool, int(packed.pool.tokens.sum()))
        given.append(packed.pieces)
    pieces = Pieces.concatenate(given)
    is_text = pieces.source == planner.sources.index(texts)
    capacity = samples * length
    return padding / (steps * capacity), cut(pieces, is_text, length), pool / capacity, cut(pieces, ~is_text, length)


def cut(pieces: Pieces, mine: np.ndarray, length: int) -> float:
    """The part of the documents no longer than a sample that is given in several pieces."""
    fits = mine & (pieces.document_tokens <= length)
    is_part = pieces.tokens < pieces.document_tokens
    documents = np.unique(np.stack([pieces.source, pieces.epoch, pieces.row, is_part])[:, fits], axis=1)
    return float(documents[3].mean()) if documents.size else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    print(
        "| texts, whole | G x length | padding of best fit | padding | texts cut | pool (best fit) | "
        "whole cut by concat |"
    )
    print("|---|---|---|---|---|---|---|")
    for names in MIXTURES:
        for samples, length in BATCHES:
            all_fit, ours, all_cut = (
                measured(names, samples, length, way, steps) for way in ("best_fit", "of sources", "concat")
            )
            assert ours[3] == 0.0, "whole documents stay whole"
            print(
                f"| {', '.join(names)} | {samples} x {length} | {all_fit[0]:.2%} | {ours[0]:.2%} | {ours[1]:.0%} | "
                f"{ours[2]:.3f} ({all_fit[2]:.3f}) | {all_cut[3]:.0%} |"
            )


if __name__ == "__main__":
    main()
