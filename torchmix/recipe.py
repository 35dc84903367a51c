"""What the user writes: the recipe, as values.

In: a YAML file, or the same Structs built in Python. Out: a checked `Recipe`, its exact shares, and the
fingerprint of what decides the order. A recipe is a value: frozen, compared by content, free of paths other than
the ones the user wrote, which are relative to the recipe's folder (`recipe_directory`).

Must hold: a `Recipe` that `load_recipe` or `check_recipe` returned has no fault that can be seen without opening
data. The fingerprint changes exactly when the order of documents may: not with paths, balance or the cache, nor
with the order of keys or sources. Costs microseconds per source.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import msgspec

from torchmix.errors import RecipeError
from torchmix.recipe_file import build, line_of, nearest, parse_percent, parse_yaml, percent_text

RECIPE_VERSION = 1
MAX_BATCH_TOKENS = 2**30
"""The draw keeps exact debts in int64: share (32 bits) x asked tokens must stay below 2**63."""
MAX_NAME_BYTES = 200
"""A source's name is also the name of a folder in the catalog."""

BYTES_OF_UNIT = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BYTES_OF_UNIT |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class Batch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The size of a global batch; its capacity is samples x length tokens, at most 2**30."""

    samples: int
    """Samples of a global batch, over all ranks; at least 1."""
    length: int
    """Tokens of a sample, padding included; at least 2."""


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One named collection of documents: which files, which column, how often."""

    path: str | tuple[str, ...]
    """A file or a glob, or several; relative to the recipe's directory."""
    text: str | None = None
    """Name of a string column, tokenised by `tokenizer`. Exactly one of `text` and `tokens`."""
    tokens: str | None = None
    """Name of a list-of-integers column, used as it is."""
    tokenizer: Literal["bytes"] | None = None
    """How text becomes ids. `bytes`: UTF-8 bytes are 0 to 255, 256 ends each document. Needed by `text` only."""
    max_epochs: int | None = None
    """Passes over the source after which it is exhausted, at least 1; None for no bound."""
    on_exhausted: Literal["error", "renormalise"] = "error"
    """After `max_epochs`: stop with SourceExhausted, or give its share to the other sources."""


class Packing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How documents become samples of fixed length."""

    method: Literal["concat", "best_fit"] = "best_fit"
    """`concat` cuts the stream every `length` tokens; `best_fit` keeps documents whole where they fit."""
    overflow: Literal["split", "truncate", "drop", "error"] = "split"
    """What becomes of a document longer than a sample; applied before the draw."""
    boundaries: Literal["document", "none"] = "document"
    """What the model sees of document ends: `document` resets positions and attention there, `none` does not."""
    align_tokens: int = 8
    """Pieces are padded to a multiple of this many tokens; 2 x cp or a multiple of it lets CP slice each document.
    Divides `length`. `concat` pads nothing and ignores it."""


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dimensions of the transformer, from which the cost of a sample follows."""

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
    vocab: int = 0
    """Ids of the vocabulary; 0 leaves the output layer out of the cost."""


class Balance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which rank and microbatch a sample goes to; never which samples there are."""

    method: Literal["rows", "none"] = "none"
    """`rows` gives all ranks like work in every microbatch and needs `model`; `none` keeps hash order."""
    model: Model | None = None
    """Dimensions for the cost of a sample."""


class Shuffle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far a row may travel: the rows of a window of permuted pages are shuffled together."""

    window_pages: int = 256
    """Most pages of a window, at least 1."""
    window_bytes: str | int = "64MiB"
    """Most decoded bytes of a window: text such as 64MiB or 100MB, or a number of bytes."""


class Read(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How bytes are read; no part of the order."""

    cache: str | int = "1GiB"
    """Decoded pages kept, of all sources together, in each process that reads: text such as 1GiB, or bytes."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides what is trained on, in which order."""

    version: int
    """Version of the recipe's format: 1."""
    seed: int
    """Seeds every permutation and hash; in [0, 2**63)."""
    batch: Batch
    """The size of a step."""
    sources: dict[str, Source]
    """Sources by name. A name is identity: renaming a source makes it another one. Their order means nothing."""
    mixture: dict[str, str]
    """Share of trained tokens of each source, as text: `70%`, `0.001%`, `1e-3%`. The sum is 100 %."""
    catalog: str = "./catalog"
    """Folder of the index, relative to the recipe's directory."""
    packing: Packing = Packing()
    """Documents to samples."""
    balance: Balance = Balance()
    """Samples to ranks."""
    shuffle: Shuffle = Shuffle()
    """Order inside a source; fixed when the source is indexed."""
    read: Read = Read()
    """Memory for reading."""


def load_recipe(path: str | Path) -> Recipe:
    """Read and check a recipe.

    Args:
        path: A YAML file in UTF-8. Paths in it are relative to `recipe_directory(path)`.

    Raises:
        RecipeError: The file cannot be read, or any fault in it, with its line and path of keys.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', error)}") from error
    plain, lines = parse_yaml(text)
    try:
        return _recipe_of_plain(plain)
    except RecipeError as error:
        raise RecipeError(error.message, error.where, line_of(error.where, lines)) from None


def recipe_directory(path: str | Path) -> Path:
    """The folder that the paths of a recipe are relative to: the one its file lies in, made absolute."""
    return Path(path).absolute().parent


def check_recipe(recipe: Recipe) -> Recipe:
    """Check a recipe built in Python as strictly as one from a file; Structs do not check their arguments.

    Returns:
        The same recipe, rebuilt from checked values (a `pathlib.Path` becomes text).

    Raises:
        RecipeError: Any fault, with its path of keys.
    """
    try:
        plain = msgspec.to_builtins(recipe, enc_hook=os.fspath)
    except (TypeError, ValueError, RecursionError) as error:
        raise RecipeError(f"the recipe holds a value that no recipe can hold: {error}") from error
    return _recipe_of_plain(plain)


def _recipe_of_plain(plain: Any) -> Recipe:
    if isinstance(plain, dict):
        version = plain.get("version", RECIPE_VERSION)
        if type(version) is int and version != RECIPE_VERSION:
            raise RecipeError(f"recipe version {version}; this torchmix reads version {RECIPE_VERSION}", "version")
        mixture = plain.get("mixture")
        for name, share in mixture.items() if isinstance(mixture, dict) else ():
            if type(share) in (int, float):  # the likeliest slip: 0.7 or 70 could both be meant
                raise RecipeError(
                    f"{share} is a number, a share is text with a percent sign, as 70%", f"mixture.{name}"
                )
    recipe: Recipe = build(Recipe, plain)
    _check_numbers(recipe)
    for name, source in recipe.sources.items():
        _check_source(name, source)
    parse_shares(recipe)
    parse_bytes(recipe.shuffle.window_bytes, where="shuffle.window_bytes")
    parse_bytes(recipe.read.cache, where="read.cache")
    return recipe


def _check_numbers(recipe: Recipe) -> None:
    batch, packing, balance, model = recipe.batch, recipe.packing, recipe.balance, recipe.balance.model
    _check_range(recipe.seed, "seed", 0, 2**63 - 1)
    _check_range(batch.samples, "batch.samples", 1)
    _check_range(batch.length, "batch.length", 2)
    capacity = batch.samples * batch.length
    if capacity > MAX_BATCH_TOKENS:
        raise RecipeError(f"{batch.samples} x {batch.length} = {capacity} tokens, at most {MAX_BATCH_TOKENS}", "batch")
    _check_range(packing.align_tokens, "packing.align_tokens", 1)
    if packing.method == "best_fit" and batch.length % packing.align_tokens:
        message = f"{packing.align_tokens} does not divide batch.length {batch.length}; choose a divisor of it"
        raise RecipeError(message, "packing.align_tokens")
    if balance.method == "rows" and model is None:
        message = "method rows needs the model's dimensions: model: {layers: , hidden: , ffn: , heads: }"
        raise RecipeError(message, "balance.model")
    if model is not None:
        for name in ("layers", "hidden", "ffn", "heads"):
            _check_range(getattr(model, name), f"balance.model.{name}", 1)
        _check_range(model.vocab, "balance.model.vocab", 0)
        if model.kv_heads is not None:
            _check_range(model.kv_heads, "balance.model.kv_heads", 1)
            if model.heads % model.kv_heads:
                raise RecipeError(f"{model.kv_heads} does not divide heads {model.heads}", "balance.model.kv_heads")
    _check_range(recipe.shuffle.window_pages, "shuffle.window_pages", 1)
    if not recipe.catalog:
        raise RecipeError("is empty; name a folder", "catalog")


def _check_range(value: int, where: str, lowest: int, highest: int | None = None) -> None:
    if value < lowest or (highest is not None and value > highest):
        bounds = f"at least {lowest}" if highest is None else f"in [{lowest}, {highest}]"
        raise RecipeError(f"{value} is out of range; it must be {bounds}", where)


def _check_source(name: str, source: Source) -> None:
    where = f"sources.{name}"
    if not name.strip() or name != name.strip() or not name.isprintable() or "/" in name or name.startswith("."):
        message = f"the name {name!r} is not usable: printable text without '/', leading '.' or outer spaces"
        raise RecipeError(message, where)
    if len(name.encode()) > MAX_NAME_BYTES:
        raise RecipeError(f"the name has {len(name.encode())} bytes, at most {MAX_NAME_BYTES}", where)
    paths = (source.path,) if isinstance(source.path, str) else source.path
    if not paths or not all(paths) or any("\0" in path for path in paths):
        raise RecipeError("is empty; name a file or a glob", f"{where}.path")
    if (source.text is None) == (source.tokens is None):
        both = "both are given" if source.text is not None else "neither is given"
        raise RecipeError(f"exactly one of text and tokens names the column; {both}", where)
    if not (source.text or source.tokens):
        key = "tokens" if source.text is None else "text"
        raise RecipeError("is empty; name a column", f"{where}.{key}")
    if source.text is not None and source.tokenizer is None:
        raise RecipeError("a text column needs a tokenizer; write tokenizer: bytes", f"{where}.tokenizer")
    if source.tokens is not None and source.tokenizer is not None:
        message = "a column of tokens is used as it is; remove tokenizer, or name the column by text"
        raise RecipeError(message, f"{where}.tokenizer")
    if source.max_epochs is not None:
        _check_range(source.max_epochs, f"{where}.max_epochs", 1)


def parse_shares(recipe: Recipe) -> dict[str, Fraction]:
    """Exact share of trained tokens of each source.

    Returns:
        Name -> share in (0, 1], in the order of names; the sum is 1.

    Raises:
        RecipeError: A share that is no positive percentage, a sum other than 100 %, or names that differ
            from those of `sources`.
    """
    if not recipe.sources:
        raise RecipeError("names no source", "sources")
    for name in recipe.mixture:
        if name not in recipe.sources:
            raise RecipeError(f"there is no such source{nearest(name, recipe.sources)}", f"mixture.{name}")
    shares: dict[str, Fraction] = {}
    for name in sorted(recipe.sources):
        if name not in recipe.mixture:
            message = f"the source {name!r} has no share; give it one, or remove the source"
            raise RecipeError(message, f"mixture.{name}")
        shares[name] = parse_percent(recipe.mixture[name], f"mixture.{name}")
    total = sum(shares.values(), Fraction(0))
    if total != 1:
        gap = "missing" if total < 1 else "too much"
        message = f"the shares sum to {percent_text(total)}, not 100%; {percent_text(abs(1 - total))} is {gap}"
        raise RecipeError(message, "mixture")
    return shares


def parse_bytes(size: str | int, *, where: str) -> int:
    """Number of bytes of a size.

    Args:
        size: `64MiB`, `1GiB`, `512KiB` (powers of 1024), `100MB` (powers of 1000), `1.5GiB`, or plain bytes.
        where: Path of keys of the value, for the error.

    Raises:
        RecipeError: Not a size, not a whole number of bytes, or less than 1 byte.
    """
    match = re.fullmatch(r"(\d+(?:\.\d{1,9})?)\s*([A-Za-z]*)", str(size).strip(), re.ASCII)
    unit = {name.lower(): name for name in BYTES_OF_UNIT}.get(match[2].lower()) if match else None
    if match is None or unit is None or len(match[1]) > 30:
        raise RecipeError(f"{size!r} is not a size, as 64MiB, 1GiB, 100MB or a number of bytes", where)
    num_bytes = Fraction(match[1]) * BYTES_OF_UNIT[unit]
    if num_bytes.denominator != 1 or not 1 <= num_bytes < 2**63:
        raise RecipeError(f"{size!r} is not a whole number of bytes from 1 to 2**63 - 1", where)
    return int(num_bytes)


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
