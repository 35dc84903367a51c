"""What the user writes: the recipe, as values.

In: YAML text, or the same Structs built in Python. Out: a checked `Recipe`. Owner's draft: loading, checking and the
fingerprint are being written; the field names below are fixed.
"""

from __future__ import annotations

from typing import Literal

import msgspec

RECIPE_VERSION = 1


class Batch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    samples: int
    """Samples of a global batch."""
    length: int
    """Tokens of a sample."""


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str | tuple[str, ...]
    """A file or a glob, or several; relative to the recipe's directory."""
    text: str | None = None
    """Name of a string column, tokenised by `tokenizer`. Exactly one of `text` and `tokens`."""
    tokens: str | None = None
    """Name of a list-of-integers column, used as it is."""
    tokenizer: Literal["bytes"] | None = None
    max_epochs: int | None = None
    on_exhausted: Literal["error", "renormalise"] = "error"


class Packing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    method: Literal["concat", "best_fit"] = "best_fit"
    overflow: Literal["split", "truncate", "drop", "error"] = "split"
    boundaries: Literal["document", "none"] = "document"
    align_tokens: int = 8


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int | None = None
    vocab: int = 0


class Balance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    method: Literal["rows", "none"] = "none"
    model: Model | None = None


class Shuffle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    window_pages: int = 256
    window_bytes: str = "64MiB"


class Read(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    cache: str = "1GiB"


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int
    seed: int
    batch: Batch
    sources: dict[str, Source]
    mixture: dict[str, str]
    catalog: str = "./catalog"
    packing: Packing = Packing()
    balance: Balance = Balance()
    shuffle: Shuffle = Shuffle()
    read: Read = Read()
