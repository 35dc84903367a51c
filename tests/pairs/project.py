"""A row of the matrix as a project: files, recipe and catalog, and what must come of them by the rules alone.

In: a row. Out: `Project`. Must hold: which rows a stream has, what its documents are and which share it is to have are
worked out here from the files and the rules of the documentation; of torchmix only the command that indexes is called.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from dataclasses import dataclass, field
from fractions import Fraction
from math import isqrt
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from tests.pairs import policies
from tests.pairs.columns import Row
from tests.pairs.documents import (
    FILL,
    FIXED,
    TEMPLATE,
    TOKENS,
    document_of,
    keys_of_source,
    kinds_of_items,
    rule_of,
    write_tokenizer,
)
from tests.pairs.shelf import FOLDERS, RESET, ROWS, SUFFIX, files_of, rows_of, write_file
from tests.support.book_cells import fit
from tests.support.book_order import bound, named_key, split_bounds
from tests.support.image_sources import RULES
from tests.support.oracle import Document
from tests.support.sounds import SOUND
from tests.support.videos import VIDEO

LENGTH, LENGTHS = 48, {"chats": 128, "images": 128, "interleaved": 128, "image_chats": 320}
"""So that no document of the latter kinds is cut."""
SAMPLES = 16
SEED = 11
TEXT_RESET = ord("~")
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "resample": 2,
    "min_pixels": RULES["dynamic"]["min_pixels"],
    "max_pixels": RULES["dynamic"]["max_pixels"],
}
"""As a model's folder has the rule `dynamic`."""
MODEL = {"layers": 4, "hidden": 64, "ffn": 256, "heads": 4}
SIZES = {"document": "tokens", "image": "patches", "sound": SOUND.sizes, "video": VIDEO.sizes}
"""What the items of a module are measured in."""
Rows = dict[str, dict[str, set[int]]]
"""Stream -> source -> rows."""


@dataclass
class Project:
    """Everything that a row is run with, and judged by."""

    folder: Path
    row: Row
    recipe: dict[str, Any]
    loaders: dict[str, Any]
    more: int = 0
    """Files that were added to `main`."""
    denied: dict[str, set[int]] = field(default_factory=dict)
    weights: int = 0
    """Which of the weights below the recipe starts with."""

    has_extra: bool = False
    """Whether it has the source `extra`, which an edit adds."""
    _documents: dict[tuple[str, int], list[Document]] = field(default_factory=dict)
    _altered: dict[tuple[int, int], Document] = field(default_factory=dict)
    """Of `main`, by row and epoch."""

    @property
    def path(self) -> Path:
        """The recipe."""
        return self.folder / "recipe.yaml"

    @property
    def length(self) -> int:
        """Tokens of a sample at the start."""
        return LENGTHS.get(self.row["rows"], LENGTH) * (2 if self.row["image_rule"] == "anyres" else 1)

    @property
    def part(self) -> str:
        """The part that is read."""
        return "validation" if self.row["life"] == "validation" else "train"

    def raw(self, source: str) -> list[dict[str, Any]]:
        """What the rows of a source hold."""
        name = {"v": "held", "t": "held", "w": "side", "extra": "held"}.get(source, source)
        if name != "main":
            return rows_of(name, "ids", False)
        kind, has_long, items = self.row["rows"], _has_long(self.row), kinds_of_items(self.row)
        found = rows_of(name, kind, has_long, False, items)
        assert self.more <= 1
        return [*found, *rows_of(name, kind, has_long, True, items)] if self.more else found

    def documents(self, source: str) -> list[Document]:
        """Of each row of a source."""
        key = (source, self.more)
        if key not in self._documents:
            self._documents[key] = self._made(source)
        return self._documents[key]

    def document(self, source: str, row: int, epoch: int) -> Document:
        """A row of a source as it is in an epoch."""
        if source != "main" or self.row["augment"] == "none":
            return self.documents(source)[row]
        if (row, epoch) not in self._altered:
            self._altered[row, epoch] = self._made_one(row, epoch)
        return self._altered[row, epoch]

    def _made_one(self, row: int, epoch: int) -> Document:
        def key(kind: str, number: int) -> int:
            return named_key(SEED, "augment", "main", kind, row, number, epoch)

        return document_of(self.raw("main")[row], self.row["rows"], self.row, key)

    def _made(self, source: str) -> list[Document]:
        if source == "main":
            return [document_of(one, self.row["rows"], self.row) for one in self.raw(source)]
        return [Document(one["ids"], [True] * len(one["ids"]), {}) for one in self.raw(source)]

    def file_of(self, source: str, number: int) -> tuple[str, int]:
        """The path below the shared folder, and the row there."""
        if source != "main":
            return f"0.{'jsonl' if source == 'more' else 'parquet'}", number
        suffix = "bin" if self.row["format"] == "megatron" else SUFFIX[self.row["format"]]
        if number >= 2 * ROWS:
            return f"b/1.{suffix}", number - 2 * ROWS
        return f"{FOLDERS[number // ROWS]}/0.{suffix}", number % ROWS

    def counted(self, source: str, *, at_longest: bool = False) -> list[int]:
        """How many tokens of each row count, with the first samples, or with the longest ones."""
        used = self._used(source)
        grows = at_longest and self.row["samples"] == "lengths"
        length = self.length * (2 if grows else 1)
        counts = []
        for number, document in enumerate(self.documents(source)):
            tokens = len(document.ids) if number in used and number not in self.denied.get(source, ()) else 0
            overflow, longest = self.rule(source, length)
            if overflow == "truncate":
                tokens = min(tokens, longest)
            if overflow == "drop" and tokens > longest:
                tokens = 0
            counts.append(tokens)
        return counts

    def rule(self, source: str, length: int) -> tuple[str, int]:
        """What happens to documents that are too long for samples of so many tokens, and the longest others."""
        own = self.row["own_overflow"]
        if source != "main" or own == "none":
            return self.row["overflow"], length
        return own, self.most_of_main if own in ("split", "truncate") else length

    @property
    def most_of_main(self) -> int:
        """`max_length` of the main source, where it has one."""
        return self.length // 32 * 16

    def _used(self, source: str) -> set[int]:
        count = len(self.raw(source))
        first, second = self.fractions(source)
        return set(range(bound(first, count), bound(second, count)))

    def fractions(self, source: str) -> tuple[Fraction, Fraction]:
        """The part of the rows of a source that is used."""
        if self.row["parts"] == "split" and source not in ("v", "w", "t"):
            return split_bounds((6, 3, 1), 1 if self.part == "validation" else 0)
        if self.row["documents"] == "given" and source == "main":
            return Fraction(1, 10), Fraction(9, 10)
        return Fraction(0), Fraction(1)

    def _hash(self, source: str, number: int) -> Fraction:
        one = self.recipe["sources"][source]
        text = self.raw(source)[number]["id"]
        if "id" not in one:
            text = "{}:{}".format(*self.file_of(source, number))
        return Fraction(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big"), 2**64)

    def rows(self) -> Rows:
        """The rows that each stream has. Some may count no tokens."""
        sets = self._row_sets()
        if self.part == "validation" and self.row["parts"] == "own":
            return {"v": {"v": set(range(len(self.raw("v"))))}, "w": {"w": set(range(len(self.raw("w"))))}}
        found: Rows = {}
        for name, value in self._leaves_of(self._tree(self.weights)).items():
            for member in value:
                for source, rows in sets[member].items():
                    found.setdefault(name, {}).setdefault(source, set()).update(rows)
        if self.row["parts"] == "hold_out":
            for of_stream in found.values():
                for source in list(of_stream):
                    of_stream[source] = {r for r in of_stream[source] if self._is_of_part(source, r)}
                    if not of_stream[source]:
                        del of_stream[source]
            found = {name: of_stream for name, of_stream in found.items() if of_stream}
        return found

    def _is_of_part(self, source: str, number: int) -> bool:
        if source not in ("main", "side"):
            return self.part == "train"
        hash = self._hash(source, number)
        return hash < Fraction(3, 10) if self.part == "validation" else Fraction(3, 10) <= hash < Fraction(19, 20)

    def _leaves_of(self, tree: dict[str, Any]) -> dict[str, list[str]]:
        """Streams of a tree, and the row sets of each."""
        found: dict[str, list[str]] = {}
        for name, value in tree.items():
            if not isinstance(value, dict):
                found[name] = [name]
            elif "flat" in value:
                found[name] = [
                    one for part in value["flat"] for one in (part["flat"] if isinstance(part, dict) else [part])
                ]
            elif "cells" in value:
                for base in value["cells"]["of"]:
                    for language in value["cells"]["shares"]["lang"]:
                        found[f"{name}/{base}/{language}"] = [f"{name}/{base}/{language}"]
            elif isinstance(value["children"], list):
                found |= {child: [child] for child in value["children"]}
            else:
                found |= self._leaves_of(value["children"])
        return found

    def _row_sets(self) -> dict[str, dict[str, set[int]]]:
        """Rows of sources, children, selections and cells, after what narrower ones keep."""
        all_rows = {name: set(range(len(self.raw(name)))) for name in self.recipe["sources"] if name != "picked"}
        names = sorted({one for members in self._leaves_of(self._tree(self.weights)).values() for one in members})
        found: dict[str, tuple[str, set[int]]] = {}
        for name in names:
            source, _, child = name.partition("/")
            if name in all_rows:
                found[name] = name, all_rows[name]
            elif name == "picked":
                found[name] = "main", {r for r in all_rows["main"] if self._is_picked(r)}
            elif source == "talk":
                base, _, language = child.partition("/")
                found[name] = base, {r for r in all_rows[base] if self._language(base, r) == language}
            elif self.row["split_by"] == "dir":
                found[name] = "main", {r for r in all_rows["main"] if self.file_of("main", r)[0][0] == child}
            else:
                key = "score" if self._has_score() else "tokens"
                values = {
                    r: self._tokens(r) if key == "tokens" else self.raw("main")[r]["score"] for r in all_rows["main"]
                }
                ranked = sorted(values, key=lambda r: (values[r], r))
                place = int(child[1:])
                found[name] = "main", set(ranked[len(ranked) * (place - 1) // 2 : len(ranked) * place // 2])
        order = sorted(found, key=lambda name: (len(found[name][1]), name in all_rows, name))
        free = {"picked"} if self.row["selection"] == "allow" else set[str]()
        left: dict[str, dict[str, set[int]]] = {}
        for at, name in enumerate(order):
            source, rows = found[name]
            for other in order[:at]:
                if found[other][0] == source and not {name, other} & free:
                    rows = rows - found[other][1]
            left[name] = {source: rows}
        return left

    def _tokens(self, number: int) -> int:
        return len(self.documents("main")[number].ids)

    def _has_score(self) -> bool:
        return self.row["names"] != "none" and self.row["format"] not in ("megatron", "webdataset")

    def _least(self) -> int:
        """A selection by tokens has rows with more than these, about half of them."""
        counts = sorted(len(document.ids) for document in self.documents("main")[: 2 * ROWS])
        return counts[len(counts) // 2]

    def _language(self, source: str, number: int) -> str:
        if source == "main" and self.row["names"] == "path":
            return self.file_of("main", number)[0][0]
        return str(self.raw(source)[number]["lang"])

    def _is_picked(self, number: int) -> bool:
        if self.row["names"] == "none":
            return self._tokens(number) > self._least()
        return self._language("main", number) == ("b" if self.row["names"] == "path" else "en")

    def _tree(self, version: int) -> dict[str, Any]:
        """The mixture with ratios; `version` 1 has other shares."""
        children = {"none": ["main"], "dir": ["main/a", "main/b"], "quantiles": ["main/q1", "main/q2"]}
        base = children[self.row["split_by"]]
        if self.row["selection"] != "none":  # of two children, the selection has what is not in the first one
            base = [*base[:1], "picked"]
        weights = {name: 3 + (5 * i + 4 * version) % 7 for i, name in enumerate([*base, "side", "more"])}
        extra = {"extra": 4} if self.has_extra else {}
        kind = self.row["mixture"]
        if kind in ("percent", "ratio"):
            return {**weights, **extra}
        first, others = base[0], {name: weights[name] for name in base[1:]}
        if kind == "groups":
            return {
                "g": {"share": 6 + version, "children": {name: weights[name] for name in base}},
                "h": {"share": 5, "children": {name: weights[name] for name in ("side", "more")}},
                **extra,
            }
        if kind in ("flat", "inner_flat"):
            flat: list[Any] = [first, "more"] if kind == "flat" else ["more", {"flat": [first]}]
            return {
                "f": {"share": 6 if kind == "flat" else 6.5, "flat": flat, **self._bounds()},
                **others,
                "side": 4 + version,
                **extra,
            }
        if kind == "proportional":
            return {
                "g": {"share": 6 + version, "proportional": self._exponent(), "children": [*base, "more"]},
                "side": 5,
                **extra,
            }
        of = ["side"]
        shares = {"lang": {"de": 2 + version, "en": 5}}
        return {
            **{name: weights[name] for name in [*base, "more"]},
            "talk": {"share": 5, "cells": {"of": of, "shares": shares}},
            **extra,
        }

    def _bounds(self) -> dict[str, Any]:
        if self.row["bounds"] == "none":
            return {}
        return {
            "max_epochs": 1 if self.row["bounds"] == "renormalise" else 60,
            "on_exhausted": self.row["bounds"],
        }

    def shares_tree(self, version: int) -> dict[str, Any]:
        """The mixture as `book_shares` takes it: children with ratios, streams as leaves."""

        def of(tree: dict[str, Any]) -> dict[str, Any]:
            found: dict[str, Any] = {}
            for name, value in tree.items():
                if not isinstance(value, dict) or "flat" in value:
                    found[name] = value["share"] if isinstance(value, dict) else value
                elif "cells" in value:
                    found[name] = {"share": value["share"], "children": self._cells(value["cells"])}
                elif isinstance(value["children"], list):
                    sizes = {child: self._power(child) for child in value["children"]}
                    found[name] = {"share": value["share"], "children": sizes}
                else:
                    found[name] = {"share": value["share"], "children": of(value["children"])}
            return found

        if self.part == "validation" and self.row["parts"] == "own":
            return {"v": 2, "w": 1}
        tree = of(self._tree(version))
        if self.row["parts"] == "hold_out" and self.part == "validation":
            tree = _only(tree, set(self.rows()))
        return tree

    def _power(self, child: str) -> Fraction:
        [(source, rows)] = self._row_sets()[child].items()
        if self.row["parts"] == "hold_out":
            rows = {r for r in rows if self._is_of_part(source, r)}
        size = self._size(source, rows)
        return Fraction(size) if self._exponent() == 1 else Fraction(isqrt(size << 128), 2**64)

    def _exponent(self) -> str | float | int:
        if self.row["unit"] == "documents":
            return "1/2"
        return 1 if self.row["bounds"] != "none" else 0.5

    def _size(self, source: str, rows: set[int]) -> int:
        counts = [len(document.ids) for document in self.documents(source)]
        return sum(min(counts[r], 1) if self.row["unit"] == "documents" else counts[r] for r in rows)

    def _cells(self, cells: dict[str, Any]) -> dict[str, Fraction]:
        tokens: dict[tuple[str, ...], int] = {}
        sets = self._row_sets()
        for base in cells["of"]:
            for language in cells["shares"]["lang"]:
                rows = sets[f"talk/{base}/{language}"][base]
                if self.row["parts"] == "hold_out":
                    rows = {r for r in rows if self._is_of_part(base, r)}
                tokens[language,] = self._size(base, rows)
        total = sum(cells["shares"]["lang"].values())
        wanted = [{name: Fraction(share, total) for name, share in cells["shares"]["lang"].items()}]
        found = fit(tokens, wanted)
        return {f"talk/side/{place[0]}": Fraction(p, 2**96) for place, p in found.items()}

    def write(self) -> Path:
        """The recipe, as the row says."""
        self.recipe = _recipe(self)
        self.path.write_text(yaml.safe_dump(self.recipe, sort_keys=False))
        return self.path

    def add_file(self) -> None:
        """One more file of `main`."""
        self.more += 1
        row = self.row
        rows = rows_of("main", row["rows"], _has_long(row), True, kinds_of_items(row))
        write_file(self.folder, "main/b/1", row["format"], row["rows"], rows, row["image_place"], kinds_of_items(row))

    def deny(self, name: str, source: str, numbers: set[int]) -> None:
        """A deny-list of some rows of a source."""
        self.denied.setdefault(source, set()).update(numbers)
        listed = sorted(numbers)
        table: Any = {"source": [source] * len(listed), "row": listed}
        if self.row["deny"] == "ids":
            table = {"id": [self.raw(source)[r]["id"] for r in listed]}
        pq.write_table(pa.table(table), self.folder / name)


def make_project(folder: Path, row: Row) -> Project:
    """Files and recipe of a row; not indexed."""
    files = files_of(row["format"], row["rows"], _has_long(row), row["image_place"], kinds_of_items(row))
    shutil.copytree(files, folder, dirs_exist_ok=True)
    if row["tokenizer"] == "file":
        write_tokenizer(folder / "tokenizer.json")
    if row["chat"] == "jinja":
        (folder / "template.jinja").write_text(TEMPLATE)
    if _has_processor(row):
        (folder / "model").mkdir()
        (folder / "model" / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    if row["schedule"] == "file":
        (folder / "later").mkdir()
    project = Project(folder=folder, row=row, recipe={}, loaders={})
    if row["deny"] != "none":
        draw = random.Random(5)
        source = "side" if row["deny"] == "ids" else "main"
        project.deny("deny.parquet", source, set(draw.sample(range(len(project.raw(source))), 9)))
    project.write()
    return project


def _packing_of_main(project: Project) -> dict[str, Any]:
    row, own = project.row, {}
    if row["cut"] == "given":
        own["method"] = "concat"
    if row["own_overflow"] != "none":
        own["overflow"] = row["own_overflow"]
    if row["own_overflow"] in ("split", "truncate"):
        own["max_length"] = project.most_of_main
    return {"packing": own} if own else {}


def _has_processor(row: Row) -> bool:
    """Whether the options of images are those of a model's folder."""
    has_images = "image" in kinds_of_items(row)
    return has_images and (row["image_rule"], row["image_more"]) == ("dynamic", "given")


def _has_long(row: Row) -> bool:
    has_no_error = "error" not in (row["overflow"], row["own_overflow"])
    return has_no_error and row["image_rule"] == "none" and row["rows"] in ("ids", "text")


def _only(tree: dict[str, Any], names: set[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            if children := _only(value["children"], names):
                found[name] = {**value, "children": children}
        elif name in names:
            found[name] = value
    return found


def _source_main(project: Project) -> dict[str, Any]:
    row, format, kind = project.row, project.row["format"], project.row["rows"]
    suffix = "idx" if format == "megatron" else SUFFIX[format]
    source: dict[str, Any] = {"path": f"main/*/*.{suffix}", **keys_of_source(kind, format, row)}
    if row["say_format"] == "given":
        source |= {"path": [f"main/a/*.{suffix}", f"main/b/*.{suffix}"], "format": format}
    for one in kinds_of_items(row) if row["image_rule"] != "none" else ():
        if one == "image":
            source["images"] = _items_of_main(row, one)
        else:
            source.setdefault("items", {})[one] = _items_of_main(row, one)
    if row["reset_id"] == "given":
        source["reset_id"] = RESET if kind == "ids" else TEXT_RESET
    source |= _packing_of_main(project)
    if row["documents"] == "given":
        source["documents"] = ["10%", "90%"]
    if project._has_score():
        source["id"] = "id"
    if row["names"] == "list":
        source["properties"] = ["lang", "score"]
    elif row["names"] == "path":
        source["properties"] = {"lang": {"path": "main/(.)/"}}
        if project._has_score():
            source["properties"]["score"] = "score"
    if row["split_by"] == "dir":
        source["split_by"] = "dir"
    elif row["split_by"] == "quantiles":
        source["split_by"] = {"column": "score" if project._has_score() else "tokens", "quantiles": 2}
    if row["mixture"] not in ("flat", "inner_flat"):
        source |= project._bounds()
    if row["bad_rows"] != "error":
        source["bad_rows"] = "mask"
    if row["bad_rows"] == "mask_max":
        source["max_bad"] = "5%"
    return source


def _items_of_main(row: Row, kind: str) -> dict[str, Any]:
    """What the recipe says of the items of a kind."""
    format, place, by_name = row["format"], row["image_place"], row["tokenizer"] == "file"
    inside = "json." if format == "webdataset" else ""
    words: dict[str, Any] = {"column": inside + kind, **_rule_of_items(row, kind), "token": TOKENS[kind][by_name]}
    if format == "webdataset" and place != "folder":
        words["column"] = f"*.{kind}"
    if place == "folder" or (place == "place" and format == "jsonl"):
        words["folder"] = "pictures"
    if place == "place":
        words["place"] = inside + "places"
    if row["image_ids"] == "given":
        words |= {"before": "<before>", "after": "<after>"} if by_name else {"before": 301, "after": 302}
    if row["image_more"] != "none":
        words |= {"most_items": 3, "most_item_tokens": 200, **_more_of_items(row, kind)}
    if row["augment"] == "given":
        words["augment"] = "tests.pairs.row_maps:shifted"
    if kind == "image" and _has_processor(row):
        words = {"processor": "model"} | {key: words[key] for key in words if key not in RULES["dynamic"]}
    return words


def _rule_of_items(row: Row, kind: str) -> dict[str, Any]:
    """What says how large an item is."""
    if kind == "image":
        fill = {"fill": list(FILL)} if rule_of(row) == "pad" else {}
        return RULES.get(rule_of(row)) or {"patch": 4, "merge": 2, "fixed": FIXED[rule_of(row)], **fill}
    return dict({"sound": SOUND, "video": VIDEO}[kind].words)


def _more_of_items(row: Row, kind: str) -> dict[str, Any]:
    """Other options, which the index or a tower of the model needs."""
    if kind == "sound":
        return {"most_seconds": 60, "channel": 0}
    levels = {"mean": [0.5, 0.5, 0.5], "deviation": [0.2, 0.3, 0.4]}
    if kind == "video":
        return {"most_seconds": 60, "most_pixels": 1_000_000, **levels}
    if row["image_more"] == "tensor":
        tower = {} if row["image_rule"] == "dynamic" else {"tower": "pictures"}
        return {"resize": "tensor", **levels, **tower}
    more = {"marker": "<image>", "alpha": "drop", "most_pixels": 1_000_000}
    return more | ({} if _has_processor(row) else {"filter": "bilinear", **levels})


def _recipe(project: Project) -> dict[str, Any]:
    row = project.row
    sources: dict[str, Any] = {
        "main": _source_main(project),
        "side": {"path": "side/*.parquet", "tokens": "ids", "id": "id", "properties": ["lang"]},
        "more": {"path": "more/*.jsonl", "tokens": "ids"},
    }
    if project.has_extra:
        sources["extra"] = {"path": "held/*.parquet", "tokens": "ids"}
    if row["selection"] != "none":
        where = {"none": f"tokens > {project._least()}", "list": "lang = 'en'", "path": "lang = 'b'"}[row["names"]]
        sources["picked"] = {"from": "main", "where": where}
        sources["picked"] |= {"overlap": "allow"} if row["selection"] == "allow" else {}
        if row["selection"] == "bounded":
            sources["picked"] |= {"max_epochs": 2, "on_exhausted": "renormalise"}
    samples: Any = SAMPLES
    if row["samples"] == "ramp":
        samples = [{"from_step": 0, "samples": 16}, {"from_step": 2, "samples": 24}]
    elif row["samples"] == "lengths":
        longer = {"from_step": 2, "samples": 8, "length": 2 * project.length}
        samples = [{"from_step": 0, "samples": 16}, longer, {"from_step": 4, "samples": 16, "length": project.length}]
    recipe: dict[str, Any] = {
        "version": 1,
        "seed": SEED,
        "batch": {"samples": samples, "length": project.length},
        "sources": sources,
        "mixture": _shown(project, project._tree(project.weights)),
        "packing": {
            "method": row["method"],
            "overflow": row["overflow"],
            "boundaries": row["boundaries"],
            "reset_loss": row["reset_loss"],
            "align_tokens": int(row["align"]),
        },
        "balance": _balance(row),
        "shuffle": {"method": row["shuffle"]},
    }
    if row["positions"] != "none":
        recipe["packing"]["positions"] = row["positions"]
    if row["window"] == "small":
        recipe["shuffle"] |= {"window_pages": 3, "window_bytes": 1 << 16 if row["shuffle"] == "row" else "64KiB"}
    if row["unit"] == "documents":
        recipe["unit"] = "documents"
    recipe |= _over_the_run(project)
    if row["parts"] == "split":
        recipe["split"] = [6, 3, 1]
    elif row["parts"] == "hold_out":
        recipe["hold_out"] = {"validation": {"main": "30%", "side": "30%"}, "test": {"main": "5%", "side": "5%"}}
    elif row["parts"] == "own":
        held = {"path": "held/*.parquet", "tokens": "ids"}
        side = {"path": "side/*.parquet", "tokens": "ids"}
        recipe["validation"] = {"sources": {"v": held, "w": side}, "mixture": {"v": 2, "w": 1}}
        recipe["test"] = {"sources": {"t": held}, "mixture": {"t": "100%"}}
    if row["deny"] != "none" or project.denied:
        recipe["deny"] = sorted(path.name for path in project.folder.glob("deny*.parquet"))
    if row["module"] != "none":
        recipe["modules"] = {name: _module(row, kind) for name, kind in modules_of(row).items()}
    if row["catalog"] == "given":
        recipe["catalog"] = "index/here"
    elif row["catalog"] == "store":
        recipe["catalog"] = f"local://{project.folder}/store/catalog"  # a store of fsspec's that all processes see
    if row["cache"] != "default":
        recipe["read"] = {"cache": {"text": "64MiB", "number": 1 << 25}[row["cache"]]}
    if row["vocab_size"] == "given":
        recipe["vocab_size"] = 512
    if row["starve"] == "allow":
        recipe["starve"] = "allow"
    if row["per_token_loss"] == "require":
        recipe["per_token_loss"] = "require"
    recipe["loaders"] = _loaders(row)
    return recipe


def _shown(project: Project, tree: dict[str, Any]) -> dict[str, Any]:
    """A tree as the recipe has it: shares as text, or ratios, with a float among them."""
    if project.row["mixture"] == "ratio":
        return {name: float(value) if name == "side" else value for name, value in tree.items()}
    if project.row["mixture"] not in ("percent", "flat"):
        return tree
    shares = {name: value["share"] if isinstance(value, dict) else value for name, value in tree.items()}
    texts = {name: f"{share}/{sum(shares.values())}" for name, share in shares.items()}
    return {
        name: {**tree[name], "share": texts[name]} if isinstance(tree[name], dict) else texts[name] for name in tree
    }


def _over_the_run(project: Project) -> dict[str, Any]:
    """The schedule, and the policy."""
    row, found = project.row, dict[str, Any]()
    kind, after = row["schedule"], _shown(project, project._tree(1 - project.weights))
    capacity = SAMPLES * project.length
    if kind == "set":
        path, share = set_change(project)
        found["schedule"] = [{"from": "2 steps", "set": {path: f"{share.numerator}/{share.denominator}"}}]
    elif kind == "mixture":
        found["schedule"] = [
            {"from": f"{capacity + 100} tokens", "to": f"{3 * capacity + 50} tokens", "mixture": after}
        ]
    elif kind == "file":
        (project.folder / "later" / "shares.yaml").write_text(yaml.safe_dump({"mixture": after}))
        found["schedule"] = [{"from": "2 steps", "to": "4 steps", "file": "later/shares.yaml"}]
    elif kind == "epoch":
        found["schedule"] = [
            {"from": {"epochs": 1, "of": epoch_stream(project)}, "to": f"{capacity} tokens", "mixture": after}
        ]
    if row["dynamic"] != "none":
        options: dict[str, Any] = {
            "file": {"path": "wanted.yaml"},
            "own": {"turn": 3},
            "odm": {},
            "ado": {"ignore_steps": 1, "start_step": 5},
            "of_step": {},
        }[row["dynamic"]]
        own = {"own": "tests.pairs.policies:Turning", "of_step": "tests.pairs.policies:of_step"}
        policy = own.get(row["dynamic"], row["dynamic"])
        found["dynamic"] = {"policy": policy, "every": "2 steps", "lag": "2 steps", "options": options}
        if row["dynamic"] in ("file", "ado"):
            found["dynamic"] |= {"within": ["0.25x", "3x"], "on_error": "stop", "decisions": "./log"}
        if row["dynamic"] == "own":
            found["dynamic"] |= {"on_missing": "constant"}
        if row["mixture"] == "groups":
            found["dynamic"]["at"] = "h"
        names = ["side", "more"] if row["mixture"] == "groups" else [*project._tree(0)]
        policies.children[:] = names
        if row["dynamic"] == "file":
            wanted = {name: 1 + i for i, name in enumerate(names)}
            (project.folder / "wanted.yaml").write_text(yaml.safe_dump(wanted))
    return found


def set_change(project: Project) -> tuple[str, Fraction]:
    """The path of a change that sets one share, and the share."""
    tree = project._tree(project.weights)
    if "h" in tree:
        return "h.side", Fraction(1, 5)
    return ("side" if "side" in tree else "more"), Fraction(2, 5)


def epoch_stream(project: Project) -> str:
    """The stream at whose epoch the shares change."""
    return next(iter(project._leaves_of(project._tree(project.weights))))


def _balance(row: Row) -> dict[str, Any]:
    method = "tests.support.strategies:in_turn" if row["balance"] == "own" else row["balance"]
    found: dict[str, Any] = {"method": method, "level": row["level"], "objective": row["objective"]}
    found["microbatches"] = row["microbatches"]
    found |= {"group_size": 2} if row["group_size"] == "given" else {}
    if row["cost"] in ("model", "experts"):
        found["model"] = dict(MODEL)
    if row["cost"] == "experts":
        found["model"] |= {"experts_per_token": 2, "kv_heads": 2, "vocab": 0 if row["vocab_size"] == "none" else 512}
    elif row["cost"] == "fitted":
        found["cost"] = {"per_token": 3, "per_pair": 2}
    if row["strategy"] == "given":
        unit = row["module"]
        if unit == "image":
            unit = "all" if row["item_kind"] == "all" else kinds_of_items(row)[0]
        found["strategy"] = f"tests.pairs.policies:{unit}_{row['module_sources']}"
    if row["broadcast_at"] != "none":
        found["broadcast_at"] = row["broadcast_at"]
    if row["method"] == "whole":  # a rank alone holds the longest document, whatever the layout
        length = LENGTHS.get(row["rows"], LENGTH)
        found["context"] = {"rank_tokens": 2 * length if row["samples"] == "lengths" else length}
        if row["align"] == "16":
            found["context"] |= {"sizes": [1, 2, 4], "align": 2, "per_exchanged": 0, "per_microbatch": 9}
            found["context"]["microbatches_of"] = 2
    return found


def modules_of(row: Row) -> dict[str, str]:
    """Names of the recipe's modules, and what each computes."""
    if row["module"] != "image":
        return {"vision": row["module"]}
    first, *others = kinds_of_items(row)
    return {"vision": first} | {kind: kind for kind in others}


def _module(row: Row, kind: str) -> dict[str, Any]:
    method = "tests.support.strategies:in_turn" if row["module_method"] == "own" else row["module_method"]
    found: dict[str, Any] = {"items": kind, "axis": row["module_axis"], "method": method}
    found |= {"scope": row["module_scope"], "sizes": SIZES[kind]}
    found |= {"group_size": 1} if row["module_group"] == "given" else {}
    found |= {"sources": ["main"]} if row["module_sources"] == "given" else {}
    found |= {"near_text": "50%" if row["near_text"] == "given" else "always"} if row["near_text"] != "none" else {}
    found |= {"decode_at": row["decode_at"]} if row["decode_at"] != "none" else {}
    if row["encoder"] != "none":
        found["model"] = {"layers": 2, "hidden": 8, "ffn": 16, "heads": 2}
    if row["encoder"] == "swiglu":
        found["model"] |= {"mlp": "swiglu", "kv_heads": 1, "window": 16, "full_layers": [1], "out": 8}
        found["model"] |= {"patch": 4, "merge": 2} if kind == "image" else {}
    if row["cap"] == "given":
        found["cap"] = "1GiB" if row["encoder"] == "gelu" else 1 << 30
    return found


def _loaders(row: Row) -> dict[str, Any]:
    words = row["mode"].split("_") if row["mode"].startswith("node_") else row["mode"]
    found: dict[str, Any] = {"where": words}
    if row["processes"] != "1":
        found["processes"] = 2 if row["processes"] == "2" else "auto"
    found |= {"spares": 1} if row["spares"] == "1" else {}
    found |= {"cpu": 2} if row["cpu"] == "given" else {}
    if row["memory"] != "none":
        found["memory"] = "8GiB" if row["memory"] == "text" else 8 << 30
    found |= {"autoscale": {"min": 1, "max": 2}} if row["autoscale"] == "given" else {}
    if row["transform_at"] != "none":
        found["transform_at"] = (
            {"main": "worker", "side": "loader"} if row["transform_at"] == "of_sources" else row["transform_at"]
        )
    if row["mode"] in ("remote", "node_remote"):
        found["endpoints"] = ["endpoints"] if row["spares"] == "1" else "endpoints"
    found |= {"keys": "keys"} if row["keys"] == "given" else {}
    found |= {"address": "auto"} if row["address"] == "given" else {}
    return found
