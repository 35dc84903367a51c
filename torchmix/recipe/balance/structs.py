"""Balance and modules, as values of a recipe.

In: what the user writes under `balance` and `modules`. Out: Structs. Must hold: none of it changes which pieces are in
which sample. Cost: none.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dimensions of the transformer; the cost of a sample follows from them."""

    layers: int
    """Transformer layers, at least 1."""
    hidden: int
    """Width of the residual stream."""
    ffn: int
    """Width inside the feed-forward block."""
    heads: int
    """Attention heads."""
    kv_heads: int | None = None
    """Key and value heads, a divisor of `heads`; None for as many as `heads`."""
    vocab: int | None = None
    """Size of the vocabulary; None: the recipe's `vocab_size`, if it has one. 0 leaves the output layer out of the
    cost."""
    experts_per_token: int | None = None
    """Experts that compute each token, each of width `ffn`; None: the feed-forward block is dense."""


class FittedCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cost of a sample as it was measured; `torchmix calibrate` fits it to timings."""

    per_token: int
    """Cost of each token of a sample, padding included."""
    per_pair: int
    """Cost of the square of the tokens of each piece."""


class Balance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which rank and microbatch a sample goes to; never which samples there are."""

    method: str = "none"
    """`rows` gives all ranks similar work in every microbatch and needs `model`; `none` keeps hash order. Also `lpt`,
    `karmarkar_karp`, `zigzag`, or `module:function`."""
    level: Literal["both", "bucket", "bin"] = "both"
    """What may change: rank and microbatch of a sample, its rank alone (`bucket`), or its microbatch alone (`bin`)."""
    objective: Literal["rows", "max", "rank", "pipeline"] = "rows"
    """What a placement is judged by; one that is worse than hash order is not used."""
    microbatches: Literal["unimodal", "descending", "keep"] = "unimodal"
    """The order of microbatches: small ones at both ends, costly ones first, or as the method gives them."""
    group_size: int | None = None
    """Neighbouring ranks that balance among themselves, at least 1; None: all ranks do."""
    model: Model | None = None
    """Dimensions for the cost of a sample."""
    cost: FittedCost | None = None
    """The cost as it was measured, instead of what follows from `model`."""
    strategy: str | None = None
    """`module:function` of a strategy, which decides instead of these keys; importable wherever steps are planned."""
    broadcast_at: Literal["TP"] | None = None
    """`TP`: only the first TP rank gets tokens and labels, and the trainer sends them to the others."""


class EncoderModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dimensions of the transformer that a module runs; the cost and the memory of an item follow from them."""

    layers: int
    """Transformer layers, at least 1."""
    hidden: int
    """Width of the residual stream."""
    ffn: int
    """Width inside the feed-forward block."""
    heads: int
    """Attention heads."""
    kv_heads: int | None = None
    """Key and value heads, a divisor of `heads`; None for as many as `heads`."""
    mlp: Literal["gelu", "swiglu"] = "gelu"
    """Two matrices in the feed-forward block, or three."""
    patch: int | None = None
    """Pixels of the side of a unit that is a patch of an image, at least 1; None: units are no patches."""
    window: int | None = None
    """What attends together in most layers: the side of a window in pixels, with `patch`, else a number of units. None:
    all units of an item attend together in all layers."""
    full_layers: tuple[int, ...] = ()
    """Layers, from 0, in which all units of an item attend together although there is a window."""
    merge: int = 1
    """Units side by side that become one row of the output, at least 1: merge x merge units a row."""
    out: int | None = None
    """Width of the output after the merge, the hidden size of the backbone; None: there is no merging block."""


class Module(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the model beside the backbone, with a grid of consumers of its own."""

    items: Literal["document", "image"] = "document"
    """What it computes: pieces of documents, or images in documents."""
    sources: tuple[str, ...] | None = None
    """Sources whose items it computes; None: all that have such items."""
    sizes: str = "tokens"
    """The size column of the catalog that the cost is a function of."""
    axis: Literal["DP", "CP", "WORLD"] = "WORLD"
    """Who computes: each replica, each replica's slice of the sequence, or each rank of the job by itself."""
    method: str = "lpt"
    """How items are shared out: a method of balance, or `module:function`."""
    scope: Literal["step", "microbatch"] = "step"
    """Whether all items of a step are computed together, or those of each microbatch of the backbone."""
    group_size: int | None = None
    """Neighbouring consumers that share items among themselves, at least 1; None: all do."""
    cap: str | int | None = None
    """Most bytes of activations of one consumer at a time, text such as 4GiB or a number; needs `model`."""
    near_text: str | None = None
    """With `lpt`, how much costlier the costliest consumer may be so that items are computed in the replica that trains
    on their text: a percentage. None: where items go does not depend on their text."""
    decode_at: Literal["loader", "worker", "rank"] | None = None
    """Who decodes images: shared loaders, whoever makes the steps, or the process of the rank that encodes them. None:
    where fewer bytes travel."""
    model: EncoderModel | None = None
    """Dimensions for the cost of an item; None: the cost is the size."""
