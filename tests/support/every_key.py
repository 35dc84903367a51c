"""Recipes that together use every key with each kind of value, and what of their Structs given values leave out.

In: nothing. Out: checked recipes; and the fields and kinds of values that given values do not show. Must hold: what
there is to show comes from the Structs by `msgspec.inspect`, so that a new field is missing until a recipe has it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import inspect

from torchmix.recipe.load import check_recipe
from torchmix.recipe.structs import Recipe

REFUSED = {
    ("Change", "file", "StrType"): "the mixture of the file stands in its place",
    ("Images", "processor", "StrType"): "what the folder of the model says stands in its place",
    ("Source", "items", "DictType"): "a kind that code of the user's adds; tests/modalities has one",
}
"""What no checked recipe has, and why."""

_IMAGES = {"column": "image", "token": 7, "before": 8, "after": "<end>", "place": None, "folder": "pictures"}
_MODEL = {"layers": 4, "hidden": 64, "ffn": 256, "heads": 4, "kv_heads": 2}

_LARGE: dict[str, Any] = {
    "version": 1,
    "seed": 3,
    "unit": "documents",
    "batch": {"samples": [{"from_step": 0, "samples": 8}, {"from_step": 4, "samples": 8, "length": 128}], "length": 64},
    "sources": {
        "web": {
            "path": ["web/a/*.parquet", "web/b/*.parquet"],
            "format": "parquet",
            "tokens": "ids",
            "loss_mask": "mask",
            "id": "url",
            "properties": ["lang", "quality"],
            "split_by": "dir",
            "reset_id": 2,
            "documents": ["0%", "96.9%"],
            "max_epochs": 3,
            "on_exhausted": "renormalise",
            "bad_rows": "mask",
            "max_bad": "1%",
        },
        "grades": {
            "path": "grades.parquet",
            "text": "text",
            "tokenizer": "tokenizer.json",
            "begin_id": 1,
            "end_id": "</s>",
            "map": "tests.support.maps:shout",
            "keep": "tokens",
            "properties": {"lang": "language", "year": {"path": "(\\d+)"}, "quality": "score"},
            "split_by": {"column": "quality", "quantiles": 4},
        },
        "chats": {
            "path": "chats.parquet",
            "messages": "turns",
            "tokenizer": "tokenizer.json",
            "begin_id": "<s>",
            "end_id": 2,
            "properties": ["lang"],
            "chat": {
                "turns": {"user": {"before": "u", "after": "v"}, "assistant": {"after": "w"}},
                "separator": "x",
                "loss": ["assistant", "user"],
            },
        },
        "talk": {
            "path": "talk.parquet",
            "messages": "turns",
            "tokenizer": "tokenizer.json",
            "chat": {"template": "model/tokenizer_config.json", "tools": "tools.json", "variables": {"thinks": False}},
        },
        "pictures": {
            "path": "pictures.jsonl",
            "interleaved": "parts",
            "tokenizer": "tokenizer.json",
            "images": {**_IMAGES, "place": "places", "min_pixels": 784, "max_pixels": 7840, "alpha": "drop"},
        },
        "tiles": {
            "path": "tiles.parquet",
            "text": "text",
            "tokenizer": "tokenizer.json",
            "images": {
                **_IMAGES,
                "token": "<image>",
                "before": "<begin>",
                "after": 9,
                "marker": "<here>",
                "patch": 16,
                "merge": 1,
                "tiles": {"size": 64, "min": 2, "max": 6},
                "most_pixels": 1_000_000,
            },
        },
        "canvas": {
            "path": "canvas.parquet",
            "text": "text",
            "tokenizer": "tokenizer.json",
            "images": {
                "column": "image",
                "token": 7,
                "anyres": {"size": 28, "canvases": ["28x56", "56x28"], "most_tiles": 9},
                "most_items": 4,
                "most_item_tokens": 500,
                "augment": "tests.support.maps:same",
                "mean": [0.5, 0.5, 0.5],
                "deviation": [0.5, 0.5, 0.5],
                "tower": "pictures",
            },
        },
        "sized": {
            "path": "sized.parquet",
            "text": "text",
            "tokenizer": "tokenizer.json",
            "images": {
                "column": "image",
                "token": 7,
                "size": "tests.support.maps:size",
                "resize": "tensor",
                "filter": "bilinear",
                "fill": [0, 127, 255],
                "frames": 2,
            },
        },
        "filled": {
            "path": "filled.parquet",
            "text": "text",
            "tokenizer": "tokenizer.json",
            "fim": {"rate": 0.25, "spm": 0.75, "ids": ["<pre>", 7, "<suf>"], "by": "character"},
        },
        "files": {
            "path": "files.parquet",
            "tokens": "ids",
            "packing": {"method": "concat", "overflow": "drop", "max_length": 64},
            "fim": {"rate": 0.25, "ids": [7, 8, 9], "eod": 0, "split": 1, "fragment_rate": 0.5},
        },
        "fixed": {
            "path": "fixed.parquet",
            "text": "text",
            "tokenizer": "tokenizer.json",
            "images": {
                "column": "image",
                "token": 7,
                "fixed": {"height": 56, "width": 28, "fit": "crop", "shortest": 60},
            },
        },
        "german": {
            "from": "web",
            "where": "lang = 'de'",
            "overlap": "allow",
            "max_epochs": 2,
            "on_exhausted": "renormalise",
        },
    },
    "mixture": {
        "text": {"share": "50%", "children": {"web": "1/4", "german": "1/4", "web/b": "50%"}},
        "some": {
            "share": "20%",
            "flat": ["chats", {"flat": ["talk", {"flat": ["tiles"]}]}],
            "max_epochs": 4,
            "on_exhausted": "renormalise",
        },
        "rest": {"share": "10%", "proportional": 0.5, "children": ["canvas", "sized", "fixed", "filled", "files"]},
        "two": {"share": "10%", "proportional": "1/2", "children": ["pictures"]},
        "grid": {
            "share": "10%",
            "cells": {"of": ["grades"], "shares": {"lang": {"de": 1, "en": 2.5}, "year": {"1": "50%", "2": "50%"}}},
        },
    },
    "schedule": [
        {"from": "10 steps", "to": "20 steps", "shape": "cosine", "set": {"text.web": "1/8", "some": "25%"}},
        {"from": {"epochs": 1, "of": "german"}, "to": "9 steps", "set": {"text.web": "1/8"}},
        {"from": "60 steps", "mixture": {"web": 1, "german": 2.5}},
    ],
    "hold_out": {"validation": {"web": "5%", "chats": "0.3%"}, "test": {"web": "2%"}},
    "deny": ["denied.parquet"],
    "catalog": "./other",
    "packing": {
        "overflow": "truncate",
        "boundaries": "none",
        "positions": "document",
        "reset_loss": "keep",
        "align_tokens": 16,
    },
    "balance": {
        "method": "lpt",
        "level": "bucket",
        "objective": "max",
        "microbatches": "keep",
        "group_size": 2,
        "model": {**_MODEL, "vocab": 4096, "experts_per_token": 2},
        "cost": {"per_token": 3, "per_pair": 5},
        "broadcast_at": "TP",
    },
    "modules": {
        "vision": {
            "items": "image",
            "sources": ["pictures", "tiles"],
            "sizes": "images",
            "axis": "CP",
            "method": "lpt",
            "scope": "microbatch",
            "group_size": 2,
            "cap": "4GiB",
            "near_text": "5%",
            "decode_at": "worker",
            "model": {
                **_MODEL,
                "mlp": "swiglu",
                "patch": 14,
                "window": 112,
                "full_layers": [1, 3],
                "merge": 2,
                "out": 64,
            },
        },
    },
    "shuffle": {"method": "row", "window_pages": 3, "window_bytes": "64KiB"},
    "read": {"cache": "64MiB"},
    "loaders": {
        "spares": 1,
        "cpu": 2,
        "memory": "1GiB",
        "where": "remote",
        "endpoints": ["tcp://a:1"],
        "keys": "./k",
        "autoscale": {"min": 1, "max": 3},
        "transform_at": "auto",
    },
    "vocab_size": 4096,
    "starve": "allow",
    "per_token_loss": "require",
}
_TOKENS = {"path": "x.parquet", "tokens": "ids"}
_SMALL: dict[str, Any] = {
    "version": 1,
    "seed": 3,
    "batch": {"samples": 8, "length": 64},
    "sources": {"web": _TOKENS},
    "mixture": {"web": 1},
}
_OTHERS: list[dict[str, Any]] = [
    {**_SMALL, "split": [8, 1.5, 0.5], "loaders": {"where": "ray", "address": "a:1", "processes": "auto", "memory": 9}},
    {
        **_SMALL,
        "validation": {
            "sources": {"held": {**_TOKENS, "properties": ["a"]}, "some": {"from": "held", "where": "a > 1"}},
            "mixture": {"some": 0.5, "more": {"share": 1.5, "children": {"held": 1.5}}},
        },
        "test": {
            "sources": {"last": _TOKENS},
            "mixture": {"all": {"share": 1, "proportional": 1, "children": ["last"]}},
        },
        "packing": {"method": "concat"},
        "modules": {"m": {"method": "zigzag", "cap": 99, "model": _MODEL}},
        "balance": {"strategy": "tests.support.strategies:by_number"},
        "shuffle": {"window_bytes": 99_999},
        "read": {"cache": 99_999},
        "loaders": {"where": "job", "processes": 2, "transform_at": {"web": "worker"}},
    },
    {
        **_SMALL,
        "sources": {"web": _TOKENS, "more": _TOKENS},
        "mixture": {"text": {"share": 1, "children": {"web": 1, "more": 2}}},
        "dynamic": {
            "policy": "odm",
            "at": "text",
            "every": "20 steps",
            "lag": "8 steps",
            "within": ["0.25x", "3x"],
            "on_error": "stop",
            "on_missing": "constant",
            "decisions": "./log",
            "options": {"a": 1, "b": 0.5, "c": "x"},
        },
    },
    {
        **_SMALL,
        "packing": {"method": "whole"},
        "balance": {
            "cost": {"per_token": 3, "per_pair": 5},
            "context": {
                "rank_tokens": 32,
                "sizes": [1, 2, 4],
                "align": 2,
                "per_exchanged": 1,
                "per_microbatch": 7,
                "microbatches_of": 2,
            },
        },
    },
    {**_SMALL, "loaders": {"where": ["node", "remote"], "endpoints": "e"}},
]


def recipes_with_every_key() -> list[Recipe]:
    """Checked recipes; each key of a recipe is in one of them with a value that is not its default."""
    return [check_recipe(plain) for plain in (_LARGE, *_OTHERS)]


def not_shown(kind: Any, values: Iterable[Any]) -> set[tuple[str, str, str]]:
    """What values of a type leave out.

    Args:
        kind: Their type, a Struct.
        values: Some of it.

    Returns:
        (Struct, field, kind of value) for each field that has its default in all of them, and for each kind of value of
        a union that no field with this union has in any.
    """
    shown: set[tuple[str, str, str]] = set()
    for value in values:
        _show(inspect.type_info(kind), value, shown)
    return kinds_of(kind) - shown


def kinds_of(kind: Any) -> set[tuple[str, str, str]]:
    """(Struct, field, kind of value) of a Struct and all below it."""
    found: set[tuple[str, str, str]] = set()
    _collect(inspect.type_info(kind), found, set())
    return found


def _collect(kind: inspect.Type, found: set[tuple[str, str, str]], seen: set[type]) -> None:
    """Every field below a type, with each kind of value that it may have."""
    if isinstance(kind, inspect.StructType | inspect.DataclassType):
        if kind.cls in seen:
            return
        seen.add(kind.cls)
        for field in kind.fields:
            for one in _choices(field.type):
                found.add((kind.cls.__name__, field.name, type(one).__name__))
                _collect(one, found, seen)
        return
    for below in _below(kind):
        for one in _choices(below):
            _collect(one, found, seen)


def _choices(kind: inspect.Type) -> list[inspect.Type]:
    """The kinds of values of a type; whether there is none is no kind."""
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return [one for one in kinds if not isinstance(one, inspect.NoneType)]


def _below(kind: inspect.Type) -> list[inspect.Type]:
    if isinstance(kind, inspect.DictType):
        return [kind.key_type, kind.value_type]
    if isinstance(kind, inspect.VarTupleType | inspect.ListType):
        return [kind.item_type]
    return list(kind.item_types) if isinstance(kind, inspect.TupleType) else []


def _show(kind: inspect.Type, value: Any, shown: set[tuple[str, str, str]]) -> None:
    """Note the fields of a value that do not have their defaults."""
    if isinstance(kind, inspect.StructType | inspect.DataclassType):
        for field in kind.fields:
            given = getattr(value, field.name)
            default = field.default_factory() if field.default_factory is not inspect.NODEFAULT else field.default
            if given is not None and given != default:
                one = _choice(field.type, given)
                shown.add((kind.cls.__name__, field.name, type(one).__name__))
                _show(one, given, shown)
    elif isinstance(value, dict):
        for name, item in value.items():
            _show(_choice(kind.key_type, name), name, shown)
            _show(_choice(kind.value_type, item), item, shown)
    elif isinstance(value, tuple):
        kinds = kind.item_types if isinstance(kind, inspect.TupleType) else [kind.item_type] * len(value)
        for item_kind, item in zip(kinds, value, strict=True):
            _show(_choice(item_kind, item), item, shown)


def _choice(kind: inspect.Type, value: Any) -> inspect.Type:
    """The kind of a value in a union."""
    python = {
        inspect.IntType: int,
        inspect.StrType: str,
        inspect.FloatType: float,
        inspect.BoolType: bool,
        inspect.LiteralType: str,
        inspect.DictType: dict,
        inspect.BytesType: bytes,
    }
    for one in _choices(kind):
        wanted = getattr(one, "cls", None) or python.get(type(one), tuple)
        if type(value) is wanted:
            return one
    raise AssertionError(f"{value!r} is none of {kind}")
