"""The fingerprint of a recipe: which recipes give the same order.

It changes exactly when the order of documents may change. Paths, balance, the cache, and the order of keys or sources
do not change it.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from torchmix.recipe.amounts import parse_bytes
from torchmix.recipe.changes import SHAPES, Stage, dynamic_of, parse_shares, stages_of_part, tree_of_part
from torchmix.recipe.items import items_of, order_of_items
from torchmix.recipe.parts import Part, part_of
from torchmix.recipe.ramp import length_of, stages_of
from torchmix.recipe.sources import format_of, fractions_of, order_of_layout, overflow_of, tokenizer_kind
from torchmix.recipe.streams import row_sets_of
from torchmix.recipe.structs import Batch, Packing, RampStage, Recipe, Shuffle, Source
from torchmix.recipe.tree import Node, walk

KEY_BYTES = 4
"""Bytes of a key's digest: enough to find the key that differs, once the fingerprint does."""
NUM_GENERAL = 6
"""Keys that every recipe has beside its sources."""
SOMETIMES = ("unit", "dynamic", "selections")
"""Keys that only some recipes have, in their order."""
ORDER_FORMAT = 1
"""Version of the hashed content."""


def recipe_fingerprint(recipe: Recipe | Part) -> str:
    """Fingerprint of everything in a checked recipe or a part that alters the order of documents, and of nothing else.

    Covers seed, batch with its ramp, packing method, overflow, alignment (not with `concat`), exact shares, shuffle,
    and the column, tokenizer, format, packing and used rows of each source. The fingerprint of a recipe with several
    parts is that of `train`. It leaves out `max_epochs` and `on_exhausted`: they decide nothing before the end of a
    source, that end is a decision logged in the loader's state, and a run that stopped there must be able to continue
    with more epochs. Equal sizes and shares written differently are equal. Only the kind of a tokenizer counts; its
    content, and the ids around documents, are in the catalog's fingerprint.

    Returns:
        16 hex digits: the head of the SHA-256 of sorted, compact ASCII JSON (`docs/formats.md`).
    """
    return digest_of(_order(recipe if isinstance(recipe, Part) else part_of(recipe, "train")))


def digest_of(content: object) -> str:
    """16 hex digits: the head of the SHA-256 of compact ASCII JSON with sorted keys."""
    return hashlib.sha256(_compact(content).encode("ascii")).hexdigest()[:16]


def recipe_keys(part: Part) -> dict[str, str]:
    """What the fingerprint covers, as compact JSON by the keys of a recipe, to say which of them differs.

    Seed, batch, packing, shuffle, mixture and schedule, then `sources.NAME` by name.
    """
    order = _order(part)
    values = {name: order[name] for name in ("seed", "batch", "packing", "shuffle")}
    values["mixture"] = [order["shares"], order.get("tree"), *([order["flats"]] if "flats" in order else [])]
    values["schedule"] = order.get("schedule")
    if "unit" in order:
        values["unit"] = order["unit"]
    if "dynamic" in order:
        values["dynamic"] = order["dynamic"]
    if "selections" in order:
        values["selections"] = order["selections"]
    values |= {f"sources.{name}": order["sources"][name] for name in sorted(part.sources)}
    return {name: _compact(value) for name, value in values.items()}


def key_digests(keys: Mapping[str, str]) -> bytes:
    """Four bytes of each of `recipe_keys`, in their order, for a state to keep."""
    return b"".join(map(_key_digest, keys.values()))


def adds_stages(digests: bytes, batch: Batch, step: int) -> bool:
    """Whether a batch is that of another recipe with some stages more, all of which begin at a step or later.

    Args:
        digests: `key_digests` of the other recipe.
        batch: The batch of the recipe in use.
        step: The first step that the recipe in use holds for.
    """
    other = digests[KEY_BYTES : 2 * KEY_BYTES]  # the second key of every recipe
    stages = stages_of(batch)
    return any(
        stages[num].from_step >= step and _key_digest(_compact(_batch(batch, stages[:num]))) == other
        for num in range(1, len(stages))
    )


def differing_keys(
    keys: Mapping[str, str], digests: bytes, names: Sequence[str], *, is_dynamic: bool = False
) -> list[str]:
    """The keys of a recipe that are others than those of which a state keeps the digests.

    Args:
        keys: `recipe_keys` of the recipe in use.
        digests: `key_digests` of the other one; maybe of no recipe at all.
        names: Its sources by sorted name, as far as they are known.
        is_dynamic: Whether it has a policy.
    """
    there = [digests[at : at + KEY_BYTES] for at in range(0, len(digests), KEY_BYTES)]
    general = [name for name in keys if not name.startswith("sources.")]
    if names and 0 <= len(there) - len(names) - NUM_GENERAL <= len(SOMETIMES):
        return _differing(keys, there, names, is_dynamic)
    of_sources = [name for name in keys if name.startswith("sources.")]
    if len(there) < len(general):
        return []
    differing = [name for name, digest in zip(general, there, strict=False) if _key_digest(keys[name]) != digest]
    before = [f"sources.{name}" for name in names] or of_sources
    rest = there[len(general) :]
    if len(before) != len(rest):
        return [*differing, "sources"]
    kept = dict(zip(before, rest, strict=True))
    return differing + [
        name for name in sorted({*before, *of_sources}) if name not in keys or _key_digest(keys[name]) != kept.get(name)
    ]


def _differing(keys: Mapping[str, str], there: Sequence[bytes], names: Sequence[str], is_dynamic: bool) -> list[str]:
    """As `differing_keys`, where keys that only some recipes have may have come or gone."""
    more = _sometimes(there[NUM_GENERAL : len(there) - len(names)], is_dynamic=is_dynamic)
    always = [name for name in keys if not name.startswith("sources.") and name not in SOMETIMES]
    before = dict(zip([*always, *more, *(f"sources.{name}" for name in names)], there, strict=True))
    every = dict.fromkeys([*always, *SOMETIMES, *before, *keys])
    now = {name: _key_digest(value) for name, value in keys.items()}
    general = [name for name in every if not name.startswith("sources.")]
    of_sources = sorted(name for name in every if name.startswith("sources."))
    return [name for name in (*general, *of_sources) if before.get(name) != now.get(name)]


def _sometimes(digests: Sequence[bytes], *, is_dynamic: bool) -> list[str]:
    """Which of the keys that only some recipes have these digests are of, in their order."""
    found = [name for name, is_there in (("unit", _DOCUMENTS in digests[:1]), ("dynamic", is_dynamic)) if is_there]
    return [*found, "selections"][: len(digests)] if len(digests) <= len(found) + 1 else [*SOMETIMES][-len(digests) :]


def _key_digest(value: str) -> bytes:
    return hashlib.sha256(value.encode("ascii")).digest()[:KEY_BYTES]


def _compact(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


_DOCUMENTS = _key_digest(_compact("documents"))
"""The only value of `unit` that is a key of its own."""


_known: deque[tuple[Part, dict[str, Any]]] = deque(maxlen=8)
"""What was made for the parts that were asked for last: adding up the shares of hundreds of sources takes some 20 ms,
and opening a loader or loading a state asks for it several times."""


def _order(part: Part) -> dict[str, Any]:
    """All that decides the order; made once for each part, which nobody alters."""
    for known, order in tuple(_known):
        if known is part:
            return order
    order = _made_order(part)
    _known.append((part, order))
    return order


def _made_order(part: Part) -> dict[str, Any]:
    order: dict[str, Any] = {
        "format": ORDER_FORMAT,
        "seed": part.seed,
        "batch": _batch(part.batch, stages_of(part.batch)),
        "packing": [
            part.packing.method,
            part.packing.overflow,
            part.packing.align_tokens if part.packing.method == "best_fit" else 1,
        ],
        "shares": {name: str(share) for name, share in parse_shares(part).items()},
        "shuffle": _shuffle(part.shuffle),
        "sources": {name: _source(source, part.packing) for name, source in part.sources.items()},
    }
    selections = {name: one.source for name, one in row_sets_of(part).items() if one.source != name}
    if selections:  # which rows they have is in the catalog's fingerprint
        order["selections"] = selections
    flats = {stream.name: list(stream.members) for stream in part.streams.values() if stream.is_flat}
    if flats:
        order["flats"] = flats
    if part.counts_documents:
        order["unit"] = "documents"
    tree = tree_of_part(part)
    if any(node.children for _, node in walk(tree)):
        order["tree"] = _tree(tree)
    if part.schedule:
        order["schedule"] = [_stage(stage) for stage in stages_of_part(part)]
    if part.dynamic is not None:  # which shares it decided is in the log, whose digest the state has
        dynamic = dynamic_of(part)
        assert dynamic is not None
        order["dynamic"] = [list(dynamic.path), dynamic.every_steps, dynamic.lag_steps]
    return order


def _batch(batch: Batch, stages: Sequence[RampStage]) -> list[Any]:
    return [[_batch_stage(batch, stage) for stage in stages], batch.length]


def _batch_stage(batch: Batch, stage: RampStage) -> list[int]:
    """First step and samples of a stage; and its length, where that is another than the recipe's first."""
    length = length_of(batch, stage)
    return [stage.from_step, stage.samples, *([] if length == batch.length else [length])]


def _stage(stage: Stage) -> list[Any]:
    """Where a stage begins and its shares are reached, its tree, and the shape of its ramp, where that is no line."""
    shape = [] if stage.shape == SHAPES[0] else [stage.shape]
    return [*_place(stage), _tree(stage.tree), *shape]


def _place(stage: Stage) -> list[Any]:
    """Where a stage begins, and where its shares are reached."""
    if stage.epoch is None:
        return [stage.start_token, stage.stop_token]
    return [[stage.epoch.of, stage.epoch.epochs], [stage.ramp_steps, stage.ramp_tokens]]


def _tree(node: Node) -> list[Any]:
    """Children of a group, each with its share of the group and its own children; then the power of sizes, if any.

    Cells have no shares here; behind them stand those of each property's values.
    """
    total = sum((child.weight for child in node.children), Fraction(0))
    children: list[Any] = []
    for child in node.children:
        children.append([child.name, str(child.weight / total), *([_tree(child)] if child.children else [])])
    if node.grid is not None:
        of_property = zip(node.grid.properties, node.grid.shares, strict=True)
        children.append({name: {value: str(share) for value, share in shares.items()} for name, shares in of_property})
    return children if node.exponent is None else [*children, str(node.exponent)]


def _source(source: Source, packing: Packing) -> list[Any]:
    """Columns, kind of tokenizer, format, and the rows used; what of its packing is not as the recipe's."""
    kind = None if source.tokenizer is None else tokenizer_kind(source.tokenizer)
    bounds = [str(bound) for bound in fractions_of(source)]
    mapped: list[Any] = [] if source.map is None else [source.map]
    items = order_of_items(items_of(source))
    if source.fim is not None:
        fim = source.fim
        of_ids = [value for value in (fim.eod, fim.split, fim.fragment_rate) if value is not None]
        mapped.append({"fim": [fim.rate, fim.spm, fim.by, *of_ids]})
    if packed := _packing_of_source(source, packing):
        mapped.append({"packing": packed})
    return [source.text, source.tokens, kind, format_of(source), bounds, *mapped, *items, *order_of_layout(source)]


def _packing_of_source(source: Source, packing: Packing) -> dict[str, int | str]:
    """What of a source's packing is not as the recipe's."""
    found: dict[str, int | str] = {}
    if source.packing.method is not None:
        found["method"] = source.packing.method
    if overflow_of(source, packing) != packing.overflow:
        found["overflow"] = overflow_of(source, packing)
    if source.packing.max_length is not None:  # also one that no sample reaches: a later stage may have longer ones
        found["max_length"] = source.packing.max_length
    return found


def _shuffle(shuffle: Shuffle) -> list[int | str]:
    if shuffle.method != "page":
        return [shuffle.method]
    window_bytes = parse_bytes(shuffle.window_bytes, where="shuffle.window_bytes")
    return [shuffle.method, shuffle.window_pages, window_bytes]
