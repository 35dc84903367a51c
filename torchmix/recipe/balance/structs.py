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


class Balance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which rank and microbatch a sample goes to; never which samples there are."""

    method: Literal["rows", "none"] = "none"
    """`rows` gives all ranks similar work in every microbatch and needs `model`; `none` keeps hash order."""
    model: Model | None = None
    """Dimensions for the cost of a sample."""


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
    cap: str | int | None = None
    """Most bytes of activations of one consumer at a time, text such as 4GiB or a number; needs `model`."""
    near_text: str | None = None
    """With `lpt`, how much costlier the costliest consumer may be so that items are computed in the replica that trains
    on their text: a percentage. None: where items go does not depend on their text."""
    model: EncoderModel | None = None
    """Dimensions for the cost of an item; None: the cost is the size."""
