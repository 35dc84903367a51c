"""The fingerprint of a recipe: which recipes give the same order.

In: a checked recipe. Out: 16 hex digits. Must hold: it changes exactly when the order of documents may: not with paths,
balance or the cache, nor with the order of keys or sources.
"""

from __future__ import annotations

import hashlib
import json
from fractions import Fraction
from typing import Any

from torchmix.recipe.byte_sizes import parse_bytes
from torchmix.recipe.documents import fractions_of
from torchmix.recipe.mixture.shares_of_part import parse_shares, stages_of_part, tree_of_part
from torchmix.recipe.mixture.tree import Node, walk
from torchmix.recipe.parts import Part, part_of
from torchmix.recipe.ramp import stages_of
from torchmix.recipe.source_format import format_of
from torchmix.recipe.structs import Recipe, Shuffle, Source
from torchmix.recipe.tokenizer_kind import tokenizer_kind

ORDER_FORMAT = 1
"""Version of what is hashed."""


def recipe_fingerprint(recipe: Recipe | Part) -> str:
    """Fingerprint of all in a checked recipe or a part that alters the order of documents, and of nothing else.

    Covers seed, batch with its ramp, packing method, overflow, alignment (not with `concat`), exact shares, shuffle,
    and of each source its column, tokenizer, format and used rows. Of a recipe with several parts it is that of
    `train`. Not `max_epochs` and `on_exhausted`: up to a source's end they decide nothing, its end is a decision logged
    in the loader's state, and a run that stopped there must be able to go on with more epochs. Equal sizes and shares
    written differently are equal. A tokenizer counts by its kind alone; its content, and the ids around documents, are
    in the catalog's fingerprint.

    Returns:
        16 hex digits: the head of the SHA-256 of sorted, compact ASCII JSON (`docs/formats.md`).
    """
    part = recipe if isinstance(recipe, Part) else part_of(recipe, "train")
    order: dict[str, Any] = {
        "format": ORDER_FORMAT,
        "seed": part.seed,
        "batch": [[[stage.from_step, stage.samples] for stage in stages_of(part.batch)], part.batch.length],
        "packing": [
            part.packing.method,
            part.packing.overflow,
            part.packing.align_tokens if part.packing.method == "best_fit" else 1,
        ],
        "shares": {name: str(share) for name, share in parse_shares(part).items()},
        "shuffle": _shuffle(part.shuffle),
        "sources": {name: _source(source) for name, source in part.sources.items()},
    }
    tree = tree_of_part(part)
    if any(node.children for _, node in walk(tree)):
        order["tree"] = _tree(tree)
    if part.schedule:
        order["schedule"] = [[stage.start_token, stage.stop_token, _tree(stage.tree)] for stage in stages_of_part(part)]
    text = json.dumps(order, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


def _tree(node: Node) -> list[Any]:
    """Children of a group, each with its share of the group, and theirs; after them a power of sizes, if it has one."""
    total = sum((child.weight for child in node.children), Fraction(0))
    children: list[Any] = []
    for child in node.children:
        children.append([child.name, str(child.weight / total), *([_tree(child)] if child.children else [])])
    return children if node.exponent is None else [*children, str(node.exponent)]


def _source(source: Source) -> list[Any]:
    """Columns, kind of tokenizer, format, and the rows used."""
    kind = None if source.tokenizer is None else tokenizer_kind(source.tokenizer)
    return [source.text, source.tokens, kind, format_of(source), [str(bound) for bound in fractions_of(source)]]


def _shuffle(shuffle: Shuffle) -> list[int | str]:
    if shuffle.method != "page":
        return [shuffle.method]
    window_bytes = parse_bytes(shuffle.window_bytes, where="shuffle.window_bytes")
    return [shuffle.method, shuffle.window_pages, window_bytes]
