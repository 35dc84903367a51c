"""The fingerprint of a recipe: which recipes give the same order.

In: a checked recipe. Out: 16 hex digits. Must hold: it changes exactly when the order of documents may: not with paths,
balance or the cache, nor with the order of keys or sources.
"""

from __future__ import annotations

import hashlib
import json

from torchmix.recipe.byte_sizes import parse_bytes
from torchmix.recipe.shares import parse_shares
from torchmix.recipe.structs import RECIPE_VERSION, Recipe


def recipe_fingerprint(recipe: Recipe) -> str:
    """Fingerprint of all in a checked recipe that alters the order of documents, and of nothing else.

    Covers seed, batch, packing method, overflow, alignment (not with `concat`), exact shares, shuffle, and of each
    source its column and tokenizer. Not `max_epochs` and `on_exhausted`: up to a source's end they decide nothing,
    its end is a decision logged in the loader's state, and a run that stopped there must be able to go on with more
    epochs. Equal sizes and shares written differently are equal.

    Returns:
        16 hex digits: the head of the SHA-256 of sorted, compact ASCII JSON (`docs/formats.md`).
    """
    order = {
        "format": RECIPE_VERSION,
        "seed": recipe.seed,
        "batch": [recipe.batch.samples, recipe.batch.length],
        "packing": [
            recipe.packing.method,
            recipe.packing.overflow,
            recipe.packing.align_tokens if recipe.packing.method == "best_fit" else 1,
        ],
        "shares": {name: str(share) for name, share in parse_shares(recipe).items()},
        "shuffle": [
            recipe.shuffle.window_pages,
            parse_bytes(recipe.shuffle.window_bytes, where="shuffle.window_bytes"),
        ],
        "sources": {name: [source.text, source.tokens, source.tokenizer] for name, source in recipe.sources.items()},
    }
    text = json.dumps(order, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]
