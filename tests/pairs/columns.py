"""The columns of the matrix, the values of each, and which of them cannot stand together.

In: nothing. Out: `COLUMNS`, and `BLOCKS`, each a set of values of two or more columns that is refused or that says two
things of one. Must hold: `test_pairs.py` looks up every field of the recipe's Structs, by `msgspec.inspect`, in what
the rows of the matrix write; a block that has `refused` is refused in these words, in a job of its own. The first value
of a column is what stands where nothing else is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

from tests.pairs.shelf import FORMATS

COLUMNS: dict[str, tuple[str, ...]] = {
    "mode": ("in_process", "node", "job", "remote", "node_remote", "ray", "node_job"),
    "layout": ("one", "dp", "tp", "cp", "pp", "leaders", "uneven"),
    "life": (
        "first",
        "resume",
        "edit",
        "mid_step",
        "replay",
        "reshard",
        "elastic",
        "one_pass",
        "validation",
        "by_hand",
    ),
    "edit": ("none", "shares", "file", "source", "deny"),
    "format": FORMATS,
    "rows": ("ids", "text", "chats", "images", "interleaved", "image_chats"),
    # one source
    "tokenizer": ("none", "bytes", "file"),
    "ends": ("none", "id", "name"),
    "map": ("none", "given"),
    "keep": ("none", "tokens"),
    "fim": ("none", "given", "files"),
    "loss_mask": ("none", "given"),
    "chat": ("none", "plain", "chatml", "llama3", "turns", "jinja"),
    "item_kind": ("image", "other", "all"),
    "image_rule": ("none", "dynamic", "tiles", "anyres", "own"),
    "image_place": ("none", "bytes", "folder", "place"),
    "image_ids": ("none", "given"),
    "image_more": ("none", "given", "tensor"),
    "augment": ("none", "given"),
    "reset_id": ("none", "given"),
    "documents": ("none", "given"),
    "names": ("none", "list", "path"),
    "split_by": ("none", "dir", "quantiles"),
    "bounds": ("none", "error", "renormalise"),
    "bad_rows": ("error", "mask", "mask_max"),
    "say_format": ("none", "given"),
    "selection": ("none", "exclude", "allow", "bounded"),
    # the mixture, over the run
    "mixture": ("percent", "ratio", "groups", "flat", "inner_flat", "proportional", "cells"),
    "unit": ("tokens", "documents"),
    "schedule": ("none", "set", "mixture", "file", "epoch"),
    "dynamic": ("none", "file", "own", "odm", "ado", "of_step"),
    "parts": ("none", "split", "hold_out", "own"),
    "deny": ("none", "rows", "ids"),
    # samples
    "method": ("best_fit", "concat", "pad", "whole"),
    "cut": ("none", "given"),
    "overflow": ("split", "truncate", "drop", "error"),
    "own_overflow": ("none", "split", "truncate", "drop", "error"),
    "boundaries": ("document", "none"),
    "positions": ("none", "document", "sample"),
    "reset_loss": ("mask", "keep"),
    "align": ("8", "16"),
    "samples": ("number", "ramp", "lengths"),
    "shuffle": ("page", "row", "none"),
    "window": ("small", "default"),
    # ranks
    "replicas": ("joined", "apart"),
    "balance": ("none", "rows", "lpt", "karmarkar_karp", "zigzag", "own"),
    "level": ("both", "bucket", "bin"),
    "objective": ("rows", "max", "rank", "pipeline"),
    "microbatches": ("unimodal", "descending", "keep"),
    "group_size": ("none", "given"),
    "cost": ("model", "fitted", "experts", "none"),
    "strategy": ("none", "given"),
    "broadcast_at": ("none", "TP", "CP", "PP"),
    "micro_batch": ("1", "2"),
    "module": ("none", "document", "image"),
    "module_axis": ("WORLD", "CP", "DP"),
    "module_method": ("lpt", "karmarkar_karp", "zigzag", "none", "own"),
    "module_scope": ("step", "microbatch"),
    "module_group": ("none", "given"),
    "module_sources": ("none", "given"),
    "near_text": ("none", "given", "always"),
    "decode_at": ("none", "loader", "worker", "rank"),
    "encoder": ("none", "gelu", "swiglu"),
    "cap": ("none", "given"),
    # processes, and the rest
    "processes": ("1", "2", "auto"),
    "spares": ("0", "1"),
    "cpu": ("none", "given"),
    "memory": ("none", "text", "number"),
    "autoscale": ("none", "given"),
    "transform_at": ("none", "auto", "loader", "worker", "of_sources"),
    "keys": ("none", "given"),
    "address": ("none", "given"),
    "cache": ("default", "text", "number"),
    "catalog": ("default", "given", "store"),
    "vocab_size": ("none", "given"),
    "starve": ("error", "allow"),
    "per_token_loss": ("warn", "require"),
    "look_ahead": ("2", "1"),
}
Row = dict[str, str]
DEFAULTS: Row = {name: values[0] for name, values in COLUMNS.items()}


@dataclass(frozen=True)
class Block:
    """Values that do not stand together."""

    of: Mapping[str, tuple[str, ...]]
    """Columns and values: any of these of each."""
    why: str
    """For a reader of the page."""
    refused: str = ""
    """What the error says, as a regular expression; empty: the values say two things of one, and no recipe has both."""
    using: Mapping[str, str] | None = None
    """Values of other columns with which a job is refused for this reason and for no other."""

    def holds(self, row: Row) -> bool:
        """Whether a row has it."""
        return all(row.get(name) in values for name, values in self.of.items())

    @property
    def pair(self) -> bool:
        """Whether it concerns two columns alone."""
        return len(self.of) == 2


def _not(column: str, *values: str) -> tuple[str, ...]:
    return tuple(value for value in COLUMNS[column] if value not in values)


IMAGES = ("images", "interleaved", "image_chats")
CHATS = ("chats", "image_chats")
SHARED = ("job", "remote", "ray")
BLOCKS: tuple[Block, ...] = (
    *(
        Block({"replicas": ("apart",), column: values}, f"groups that are apart do not hear {why}", refused, using)
        for column, values, why, refused, using in (
            ("bad_rows", _not("bad_rows", "error"), "what others could not read", "mask bad rows", {}),
            ("module", _not("module", "none"), "rows of others' items", "rows of modules vision travel", {}),
            ("method", ("whole",), "others, which would share a document", "ranks of several replicas share", {}),
        )
    ),
    Block(
        {"replicas": ("apart",), "reset_id": ("given",), "reset_loss": ("mask",)},
        "groups that are apart do not hear how many of these ids others have",
        "has no loss, and replicas",
        {"rows": "ids"},
    ),
    Block(
        {"replicas": ("apart",), "dynamic": _not("dynamic", "none"), "life": _not("life", "validation")},
        "groups that are apart do not hear losses of others",
        "the recipe has a policy, and replicas",
    ),
    Block({"life": ("edit",), "edit": ("none",)}, "an edit changes something"),
    Block({"life": _not("life", "edit"), "edit": _not("edit", "none")}, "nothing is edited"),
    Block(
        {"edit": ("file",), "documents": ("given",)},
        "rows are cut by their number, and files that come move the cut",
        "rows would move between",
        {"life": "edit"},
    ),
    Block(
        {"edit": ("file",), "parts": ("split",)},
        "rows are cut by their number, and files that come move the cut",
        "rows would move between",
        {"life": "edit"},
    ),
    Block(
        {"edit": ("source",), "dynamic": _not("dynamic", "none"), "mixture": _not("mixture", "groups")},
        "a policy has learned of other children",
        "what it has learned is of other children|the log is of another recipe",
        {"life": "edit"},
    ),
    Block(
        {"format": ("megatron",), "rows": _not("rows", "ids")},
        "Megatron's files hold ids and have no columns",
        "hold tokens and have no columns",
    ),
    Block(
        {"rows": ("ids",), "tokenizer": _not("tokenizer", "none")},
        "ids are used as they are",
        "a column of tokens is used as it is",
        {"tokenizer": "bytes"},
    ),
    Block({"rows": _not("rows", "ids"), "tokenizer": ("none",)}, "texts need a tokenizer", "needs a tokenizer"),
    Block(
        {"ends": _not("ends", "none"), "tokenizer": ("bytes",)},
        "`bytes` ends each document with 256",
        "bytes has no ids of a vocabulary",
        {"rows": "text"},
    ),
    Block(
        {"ends": _not("ends", "none"), "tokenizer": ("none",)},
        "ids are used as they are",
        "a column of tokens is used as it is",
    ),
    Block({"map": ("given",), "format": ("megatron",)}, "Megatron's files have no columns", "have no columns"),
    Block(
        {"map": ("given",), "loss_mask": ("given",)},
        "a mask says which ids of a column have loss, and a map makes others",
        "without a map",
    ),
    Block({"keep": ("tokens",), "rows": ("ids",)}, "lists of ids are ids already", "nothing to keep"),
    Block(
        {"keep": ("tokens",), "catalog": ("store",)},
        "ids are kept in a folder, and a catalog in a store has copies",
        "ids are kept in a folder, and the catalog is",
        {"rows": "text", "tokenizer": "bytes"},
    ),
    Block(
        {"loss_mask": ("given",), "rows": _not("rows", "ids")},
        "a mask of loss is beside a column of ids",
        "says which ids of a column of tokens have loss",
    ),
    Block({"loss_mask": ("given",), "format": ("megatron",)}, "Megatron's files have no columns", "have no columns"),
    Block({"chat": _not("chat", "none"), "rows": _not("rows", *CHATS)}, "templates are of messages", "is of messages"),
    Block(
        {"chat": ("jinja",), "tokenizer": ("bytes",)},
        "a model's template has the tokens of its vocabulary",
        "needs a tokenizer.json",
        {"rows": "chats"},
    ),
    Block(
        {"fim": _not("fim", "none"), "rows": _not("rows", "text", "ids")},
        "a text is cut, or ids, and nothing that stands in it",
        "is of a column of texts alone",
    ),
    Block(
        {"fim": ("files",), "rows": ("text",)},
        "files of a document are told apart by an id",
        "is of ids, and this source has texts",
        {"tokenizer": "bytes"},
    ),
    Block(
        {"fim": _not("fim", "none"), "loss_mask": ("given",)},
        "a mask says which ids of a column have loss, and others come between",
        "without a map, a mask",
        {"rows": "ids"},
    ),
    Block(
        {"fim": _not("fim", "none"), "map": ("given",)},
        "a map can cut its rows by itself",
        "without a map",
        {"rows": "text", "tokenizer": "bytes"},
    ),
    Block(
        {"chat": ("llama3",), "tokenizer": ("bytes",), "overflow": ("error",)},
        "its turns as text are longer than a sample here",
    ),
    Block({"item_kind": ("other", "all"), "rows": _not("rows", *IMAGES)}, "there are no items"),
    Block({"item_kind": ("other",), "image_rule": _not("image_rule", "none", "dynamic")}, "rules are of images"),
    Block({"image_rule": _not("image_rule", "none"), "rows": _not("rows", *IMAGES)}, "there are no images"),
    Block({"image_rule": ("none",), "rows": IMAGES}, "images have one rule of sizes"),
    Block({"image_rule": _not("image_rule", "none"), "image_place": ("none",)}, "there are no images"),
    Block({"image_rule": ("none",), "image_place": _not("image_place", "none")}, "there are no images"),
    Block({"image_rule": ("none",), "image_ids": ("given",)}, "there are no images"),
    Block({"image_rule": ("none",), "image_more": _not("image_more", "none")}, "there are no images"),
    Block({"item_kind": ("other",), "image_more": ("tensor",)}, "pictures alone are resized as tensors"),
    Block({"image_rule": ("none",), "augment": ("given",)}, "there are no images"),
    Block(
        {"image_place": ("place",), "rows": ("images", "image_chats")},
        "places are numbers of the texts of `interleaved`",
        "is of the lists of texts of interleaved",
        {"image_rule": "dynamic", "format": "jsonl", "tokenizer": "bytes"},
    ),
    Block(
        {"image_place": ("place",), "format": ("parquet", "arrow")},
        "lists of these formats have nulls in their places",
        "is read of JSON lines and WebDataset alone",
        {"image_rule": "dynamic", "rows": "interleaved", "tokenizer": "bytes"},
    ),
    Block(
        {"image_place": ("place",), "item_kind": ("all",)},
        "places are numbers, and say no kind",
        "is of rows with items of one kind",
        {"image_rule": "dynamic", "rows": "interleaved", "format": "webdataset", "tokenizer": "bytes"},
    ),
    Block({"image_place": ("bytes",), "format": ("jsonl",)}, "JSON has no bytes"),
    Block(
        {"method": ("concat",), "rows": IMAGES},
        "images stay whole",
        "images must stay whole",
        {"image_rule": "dynamic", "image_place": "bytes", "tokenizer": "bytes"},
    ),
    Block(
        {"cut": ("given",), "rows": IMAGES},
        "images stay whole",
        "items must stay whole",
        {"image_rule": "dynamic", "image_place": "bytes", "tokenizer": "bytes"},
    ),
    Block(
        {"own_overflow": _not("own_overflow", "none"), "mixture": ("flat", "inner_flat")},
        "a flat has one order, and one rule for what is too long",
        "is the same for all; give them one overflow and max_length",
    ),
    Block(
        {"own_overflow": ("split",), "cut": ("given",)},
        "its documents are cut where samples end",
        "concat cuts documents where samples end",
        {"method": "best_fit"},
    ),
    Block(
        {"own_overflow": ("split",), "method": ("concat",)},
        "documents are cut where samples end",
        "concat cuts documents where samples end",
    ),
    Block(
        {"unit": ("documents",), "method": ("pad",), "own_overflow": ("split",)},
        "pad gives each piece a sample",
        "draws them as a whole",
        {"overflow": "truncate"},
    ),
    Block(
        {"cut": ("given",), "method": ("concat", "pad", "whole")},
        "documents flow into what best fit leaves",
        "fills what whole documents leave",
    ),
    Block(
        {"names": ("list",), "format": ("megatron",)},
        "Megatron's files have no columns; a path has properties",
        "no columns|have no column",
    ),
    Block(
        {"format": ("webdataset",), "rows": ("ids",)}, "members of a shard hold texts and images", "members hold texts"
    ),
    Block(
        {"format": ("webdataset",), "names": ("list",)},
        "members of a shard are no columns; a path has properties",
        "members of a shard are no columns",
        {"rows": "text", "tokenizer": "bytes"},
    ),
    Block(
        {
            "dynamic": _not("dynamic", "none"),
            "selection": _not("selection", "none"),
            "mixture": _not("mixture", "groups", "proportional"),
        },
        "losses are of sources, and two of the children have rows of one",
        "a policy needs children with sources of their own",
    ),
    Block(
        {
            "dynamic": _not("dynamic", "none"),
            "split_by": _not("split_by", "none"),
            "mixture": _not("mixture", "groups", "proportional"),
        },
        "losses are of sources, and two of the children have rows of one",
        "a policy needs children with sources of their own",
    ),
    Block(
        {"documents": ("given",), "parts": ("split",)},
        "`split` cuts the rows of all sources",
        "remove documents, or split",
    ),
    Block({"life": ("validation",), "parts": ("none",)}, "there is no such part", "validation"),
    Block(
        {"dynamic": _not("dynamic", "none"), "schedule": ("epoch",)},
        "bounds of a share must be known before the run",
        "changes begin at steps or tokens",
    ),
    Block(
        {"dynamic": _not("dynamic", "none"), "life": ("replay", "by_hand")},
        "a policy's log is replayed by `decisions`",
        "replay gives steps of a recipe without a policy",
    ),
    Block(
        {"dynamic": _not("dynamic", "none"), "life": ("reshard",)},
        "a policy's groups are of one layout",
        "the recipe has a policy, whose groups are of this layout",
    ),
    Block({"parts": ("split",), "split_by": ("dir",), "life": ("validation",)}, "validation has no row of one folder"),
    Block(
        {"unit": ("documents",), "method": ("pad",), "overflow": ("split",)},
        "pad gives each piece a sample",
        "draws them as a whole",
    ),
    Block(
        {"layout": ("cp",), "reset_id": ("given",), "method": ("best_fit", "pad"), "boundaries": ("document",)},
        "documents are sliced, and where they end inside a row is not planned",
        "reset_id",
    ),
    Block(
        {"reset_id": ("given",), "boundaries": ("none",), "positions": ("none", "sample"), "reset_loss": ("keep",)},
        "nothing resets at it",
        "nothing resets at it",
    ),
    Block(
        {"method": ("whole",), "reset_id": ("given",)},
        "documents are sliced over ranks, and where they end inside a row is not planned",
        "whole slices each document over ranks",
        {"rows": "ids"},
    ),
    Block(
        {"method": ("whole",), "rows": IMAGES},
        "images are placed beside samples of one length",
        "whole slices each document over ranks",
        {"image_rule": "dynamic", "image_place": "bytes", "tokenizer": "bytes"},
    ),
    Block(
        {"method": ("whole",), "module": _not("module", "none")},
        "modules are placed beside samples of one length",
        "modules are placed beside samples of one length",
        {"module": "document"},
    ),
    Block(
        {"method": ("whole",), "broadcast_at": ("CP",)},
        "ranks that share a document change with each microbatch",
        "in each microbatch other ranks share a document",
    ),
    Block(
        {"module": _not("module", "none"), "broadcast_at": ("CP",)},
        "rows of a module go to the rank that embeds them",
        "rows of a module go to the CP rank",
        {"module": "document"},
    ),
    Block(
        {"life": ("by_hand",), "module": _not("module", "none")},
        "files of plans have no items",
        "items are not among the files",
        {"module": "document"},
    ),
    Block(
        {"method": ("whole",), "boundaries": ("none",)},
        "each document is a sample",
        "whole gives each document a sample of its own",
    ),
    Block(
        {"method": ("whole",), "positions": ("sample",)},
        "each document is a sample",
        "whole gives each document a sample of its own",
    ),
    *(
        Block(
            {"method": ("whole",), column: _not(column, COLUMNS[column][0])},
            "runs of ranks are a placement of their own",
            "places samples of one length",
        )
        for column in ("balance", "level", "objective", "microbatches", "group_size")
    ),
    Block(
        {"method": ("whole",), "cost": ("none",)},
        "runs of ranks need a cost",
        "needs the model's dimensions",
    ),
    Block({"method": ("whole",), "micro_batch": ("2",)}, "a microbatch is a bin", "with packing.method: whole"),
    Block({"balance": ("rows",), "cost": ("none",)}, "`rows` needs a cost", "needs the model's dimensions"),
    Block({"module": ("image",), "rows": _not("rows", *IMAGES)}, "there are no images"),
    *(
        Block({"module": ("none",), column: _not(column, COLUMNS[column][0])}, "there is no module")
        for column in (
            "module_axis",
            "module_method",
            "module_scope",
            "module_group",
            "module_sources",
            "near_text",
            "decode_at",
            "encoder",
            "cap",
        )
    ),
    Block({"strategy": ("given",), "module_axis": _not("module_axis", "WORLD")}, "the strategy decides who computes"),
    Block({"strategy": ("given",), "module_scope": ("microbatch",)}, "the strategy decides what is computed together"),
    Block(
        {"module": ("document",), "decode_at": _not("decode_at", "none")}, "documents are not decoded", "is of images"
    ),
    Block(
        {"near_text": _not("near_text", "none"), "module_method": _not("module_method", "lpt")},
        "`near_text` bends `lpt`",
        "is of the method lpt",
    ),
    Block(
        {"near_text": ("always",), "cap": ("given",)},
        "items stay with their text whatever they take",
        "items stay with their text",
    ),
    Block(
        {"cap": ("given",), "encoder": ("none",)},
        "bytes of an item follow from the module's model",
        "needs the module's model",
    ),
    Block(
        {"module_scope": ("microbatch",), "layout": ("pp", "leaders")},
        "stages would wait for each other's items",
        "pipeline",
    ),
    Block(
        {"decode_at": ("rank",), "module_axis": ("CP", "DP")},
        "several ranks would decode an image",
        "each would decode it",
        {"module": "image", "rows": "images", "image_rule": "dynamic", "image_place": "bytes", "tokenizer": "bytes"},
    ),
    Block({"spares": ("1",), "mode": ("in_process",)}, "nothing waits to replace a thread", "have spares"),
    Block({"cpu": ("given",), "mode": ("in_process",)}, "the threads of a trainer are not bounded", "have cpu"),
    Block(
        {"autoscale": ("given",), "mode": ("in_process", "node")},
        "there are no shared loaders",
        "have autoscale",
    ),
    Block(
        {"mode": ("remote",), "image_place": ("folder",), "decode_at": ("worker", "rank")},
        "a trainer beside remote loaders opens no data file",
        "open no data file",
        {"module": "image", "rows": "images", "image_rule": "dynamic", "tokenizer": "bytes"},
    ),
    Block(
        {
            "mode": ("remote",),
            "image_place": ("place",),
            "format": ("jsonl",),
            "decode_at": ("worker", "rank"),
        },
        "a trainer beside remote loaders opens no data file",
        "open no data file",
        {"module": "image", "rows": "interleaved", "image_rule": "dynamic", "tokenizer": "bytes"},
    ),
    *(
        Block(
            {"mode": ("remote",), "image_place": (place,), "module": ("none", "document"), **more},
            "without a module of images the worker looks at the images of a row",
            "open no data file",
            {"rows": rows, "image_rule": "dynamic", "tokenizer": "bytes"},
        )
        for place, rows, more in (("folder", "images", {}), ("place", "interleaved", {"format": ("jsonl",)}))
    ),
    Block(
        {"processes": _not("processes", "1"), "mode": ("in_process", "node")},
        "there are no shared loaders",
        "have processes",
    ),
    Block(
        {"transform_at": _not("transform_at", "none"), "mode": ("in_process", "node")},
        "there are no shared loaders",
        "have transform_at",
    ),
    Block(
        {"keys": ("given",), "mode": _not("mode", "remote", "node_remote")},
        "keys are of loaders that `serve` runs",
        "have keys",
    ),
    Block({"address": ("given",), "mode": _not("mode", "ray")}, "the address is a Ray cluster's", "have address"),
    Block(
        {"autoscale": ("given",), "processes": ("2",)},
        "a number, or bounds on it",
        "contradict each other",
        {"mode": "ray"},
    ),
)


def is_valid(row: Row) -> bool:
    """Whether nothing stands in a row that does not stand together."""
    return not any(block.holds(row) for block in BLOCKS)


def all_pairs() -> list[tuple[tuple[str, str], tuple[str, str]]]:
    """Every pair of values of two columns."""
    return [
        ((one, value), (other, second))
        for one, other in combinations(COLUMNS, 2)
        for value, second in product(COLUMNS[one], COLUMNS[other])
    ]


def pairs_of(row: Row, columns: Sequence[str] = tuple(COLUMNS)) -> list[tuple[tuple[str, str], tuple[str, str]]]:
    """The pairs that a row has."""
    return [((one, row[one]), (other, row[other])) for one, other in combinations(columns, 2)]
