"""The files of all rows: one source `main` in each format and kind of rows, and two plain ones beside it.

In: a format, a kind of rows, whether some documents are longer than a sample. Out: a folder with the files, made once
in a session, and what their rows hold. What a row's tokens are is worked out in `documents.py`, not here.
"""

from __future__ import annotations

import io
import json
import random
import re
from functools import cache
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from tests.support.arrow_files import write_arrow
from tests.support.indexed_datasets import write_dataset
from tests.support.sounds import FORMS as SOUND_FORMS
from tests.support.sounds import drawn_samples, sound_of
from tests.support.tar_shards import write_shard
from tests.support.templates import made_once
from tests.support.videos import FORMS as VIDEO_FORMS
from tests.support.videos import drawn_frames, video_of

FORMATS = ("parquet", "jsonl", "arrow", "megatron", "webdataset")
FOLDERS = ("a", "b")
"""Below `main/`: a file of ROWS rows in each."""
ROWS = 40
ITEMS = ("image", "sound", "video")
MARKERS = {"image": "<image>", "sound": "<audio>", "video": "<video>"}
"""Of items in a text, and their types in a list; by kind."""
RESET = 7
"""An id, and a letter that no text has, after which documents restart."""
SPLIT = 245
"""An id between the files of a document."""
SUFFIX = {"parquet": "parquet", "jsonl": "jsonl", "arrow": "arrow", "webdataset": "tar"}
SCHEMA = pa.schema(
    [
        ("text", pa.string()),
        ("ids", pa.list_(pa.int32())),
        ("loss", pa.list_(pa.int8())),
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("parts", pa.list_(pa.string())),
        *((kind, pa.list_(pa.binary())) for kind in ITEMS),
        ("id", pa.string()),
        ("lang", pa.string()),
        ("score", pa.int64()),
    ]
)
Row = dict[str, Any]


@cache
def rows_of(
    source: str, kind: str, has_long: bool, more: bool = False, items: tuple[str, ...] = ("image",)
) -> list[Row]:
    """What the rows of a source hold; `more`: those of a file that is added to it later; `items`: of which kinds."""
    draw = random.Random(f"{source} {kind} {has_long} {more}")
    count = 20 if more else {"main": 2 * ROWS, "side": 90, "more": 60}.get(source, 30)
    return [_row(draw, kind, f"{source}{'+' if more else ''}{i}", has_long, i, items) for i in range(count)]


def _row(draw: random.Random, kind: str, name: str, has_long: bool, i: int, items: tuple[str, ...]) -> Row:
    lengths = (1, 34) if draw.random() > 0.06 or not has_long else (70, 150)
    tokens = draw.randint(*lengths)
    ids = [draw.choice((draw.randint(8, 240), RESET)) if draw.random() < 0.2 else draw.randint(8, 240)]
    ids += [RESET if draw.random() < 0.04 else draw.randint(8, 240) for _ in range(tokens - 1)]
    ids = [SPLIT if token % 16 == 5 else token for token in ids]
    text = "".join(draw.choice("abcdef g~") for _ in range(tokens))
    row: Row = {
        "text": text,
        "ids": ids,
        "loss": [draw.choice((1, 1, 0, -100)) for _ in ids],
        "messages": None,
        "parts": None,
        "items": [],
        "id": name,
        "lang": draw.choice(("de", "en", "en", "fr")),
        "score": draw.randint(0, 99),
    }
    if kind == "chats":
        words = [text[:3] or "x", text[3:18], text[18:]]
        roles = ("system", "user", "assistant") if i % 4 == 0 else ("user", "assistant")
        row["messages"] = [{"role": role, "content": word} for role, word in zip(roles, words, strict=False)]
        if i % 11 == 5:
            row["messages"] = []
    if kind in ("images", "interleaved", "image_chats"):
        count = (0, 1, 1, 2)[i % 4]
        kinds = items * count
        if len(items) > 1:  # one row in sixteen has all of them, and some have two of a kind
            kinds = tuple(draw.sample(items, 3) if i % 16 == 3 else draw.choices(items, k=count))
        count = len(kinds)
        row["items"] = [(one, _image(draw) if one == "image" else draw.choice(some_of(one))) for one in kinds]
        words = [text[: 2 + k] if k < 2 else text[:9] for k in range(count + 1)]
        marked = [MARKERS[one] if one == "image" or i % 5 or len(items) == 1 else "" for one in kinds]
        if kind == "images":
            row["text"] = "".join(map(add, words, [*marked, ""])) if i % 3 or not count else text[:12]
        elif kind == "image_chats":
            row["messages"] = _shown(row, words, [*marked, ""] if i % 3 else [""] * len(words), i)
        else:
            row["parts"] = [words[0]]
            for word in words[1:]:
                row["parts"] += [None, word]
    return row


def _shown(row: Row, words: list[str], marked: list[str], i: int) -> list[dict[str, str]]:
    """Messages with markers in what is asked, and in what is answered; the answer has an item in one row of four."""
    said = list(map(add, words, marked))
    roles = ("system", "user", "assistant") if i % 5 == 0 else ("user", "assistant")
    answer = said.pop() if i % 4 == 3 and len(said) > 1 else ""
    contents = [row["text"][:3] or "x", "".join(said), answer + row["text"][9:]]
    return [{"role": role, "content": one} for role, one in zip(roles, contents[-len(roles) :], strict=True)]


def _image(draw: random.Random) -> bytes:
    width, height = draw.randint(6, 44), draw.randint(6, 44)
    pixels = np.frombuffer(draw.randbytes(width * height * 3), np.uint8).reshape(height, width, 3)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@cache
def some_of(items: str) -> list[bytes]:
    """A few sounds or videos, of at most half a second: 10 tokens, or 16 in one grid."""
    draw = np.random.default_rng(4)
    if items == "sound":
        lengths = (900, 1700, 3000, 6400)
        return [sound_of(drawn_samples(draw, n, 16_000), 16_000, SOUND_FORMS[k]) for k, n in enumerate(lengths)]
    sizes = ((20, 24), (32, 16), (44, 40))
    return [video_of(drawn_frames(draw, 4 + k, *size), VIDEO_FORMS[k]) for k, size in enumerate(sizes)]


@made_once
def files_of(folder: Path, format: str, kind: str, has_long: bool, place: str, items: tuple[str, ...]) -> None:
    """The files of `main`, and of the plain sources; `place`: how items lie, see `columns.py`."""
    rows = rows_of("main", kind, has_long, False, items)
    for number, name in enumerate(FOLDERS):
        write_file(folder, f"main/{name}/0", format, kind, rows[number * ROWS : (number + 1) * ROWS], place, items)
    for name in ("side", "more", "held"):
        plain = rows_of(name, "ids", False)
        write_file(folder, f"{name}/0", "jsonl" if name == "more" else "parquet", "ids", plain, "bytes")


def write_file(
    folder: Path, name: str, format: str, kind: str, rows: list[Row], place: str, items: tuple[str, ...] = ("image",)
) -> None:
    """One file of rows, of a name without its suffix."""
    path = folder / f"{name}.{SUFFIX.get(format, '')}"
    path.parent.mkdir(parents=True, exist_ok=True)
    if format == "megatron":
        write_dataset(folder / name, [row["ids"] for row in rows], dtype="uint16")
        return
    is_list, has_paths = kind == "interleaved", place == "folder"
    if format in ("parquet", "arrow"):
        schema = SCHEMA
        for one in ITEMS if has_paths else ():
            schema = schema.set(schema.get_field_index(one), pa.field(one, pa.list_(pa.string())))
        if is_list and len(items) > 1:
            schema = schema.set(schema.get_field_index("parts"), pa.field("parts", pa.string()))
        written = [row | _columns(folder, row, has_paths=has_paths) for row in rows]
        if is_list and len(items) > 1:  # structs hold no lists of parts
            written = [one | {"parts": json.dumps(_typed(one))} for one in written]
        elif is_list:
            written = [one | _beside(one) for one in written]
        table = pa.Table.from_pylist(written, schema=schema)
        if format == "arrow":
            write_arrow(path, table, batch_rows=7)
        else:
            pq.write_table(table, path, data_page_size=512, write_batch_size=4, row_group_size=32)
        return
    samples = []
    for i, row in enumerate(rows):
        one = {key: value for key, value in row.items() if key != "items"}
        if is_list:
            one |= _placed(row) if place == "place" else {"parts": _typed(row)}
        if kind == "image_chats" and i % 2:  # contents of one column are all texts, or all lists
            one |= {"messages": [message | {"content": _parts_of(message["content"])} for message in row["messages"]]}
        if has_paths or (format == "jsonl" and place == "place" and is_list):
            one |= _columns(folder, row, has_paths=True)
        members = {"json": json.dumps(one).encode()}
        if not has_paths:
            members |= {f"{k}.{of}": content for k, (of, content) in enumerate(row["items"])}
        samples.append((f"d/{i:03}", members))
    if format == "jsonl":
        path.write_text("\n".join(members["json"].decode() for _, members in samples) + "\n")
        return
    write_shard(path, samples)


def _columns(folder: Path, row: Row, *, has_paths: bool) -> Row:
    """The items of a row by kind: bytes, or paths of files that are written."""
    found: Row = {one: [] for one in ITEMS}
    for k, (one, content) in enumerate(row["items"]):
        name = f"{row['id']}-{k}.dat"
        if has_paths:
            (folder / "pictures").mkdir(exist_ok=True)
            (folder / "pictures" / name).write_bytes(content)
        found[one].append(name if has_paths else content)
    return found


def _typed(row: Row) -> list[Row]:
    """The parts of a row, each with its type."""
    types = (MARKERS[one][1:-1] for one, _ in row["items"])
    return [{"type": next(types)} if part is None else {"type": "text", "text": part} for part in row["parts"]]


def _parts_of(content: str) -> list[Row]:
    """A content as a list of parts, each with its type."""
    types = {marker: marker[1:-1] for marker in MARKERS.values()}
    parts = [part for part in re.split("(" + "|".join(types) + ")", content) if part]
    return [{"type": types[part]} if part in types else {"type": "text", "text": part} for part in parts]


def _beside(row: Row) -> Row:
    """The items of a row in lists as long as its parts."""
    found: Row = {}
    for one in {of for of, _ in row["items"]}:
        held = iter(row[one])
        found[one] = [None if part is not None else next(held) for part in row["parts"]]
    return found


def _placed(row: Row) -> Row:
    """The texts of an interleaved row alone, and before which of them each image stands."""
    texts, places = [""], list[int]()
    for part in row["parts"]:
        if part is None:
            places.append(len(texts))
            texts.append("")
        else:
            texts[-1] += part
    return {"parts": texts, "places": places}
