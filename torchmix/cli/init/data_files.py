"""Files, folders, globs and URIs of a command line -> the sources that they seem to be.

In: words, as a user gives them or a shell expands them. Out: groups of files, each with a name, and what was left out.
Must hold: files are of one group if they lie in one folder, are of one format, and their names differ in numbers alone,
as the shards of one data set do; nothing is opened. Cost: one listing of each folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from glob import escape, has_magic
from pathlib import Path, PurePosixPath

import msgspec

from torchmix.errors import SourceUnreadable
from torchmix.recipe.source.format import DEFAULT_FORMAT, FORMATS, converted_csv
from torchmix.storage.find_files import find_files
from torchmix.storage.find_objects import objects_below
from torchmix.storage.stores import is_uri

MANY_USES = (".json", ".json.gz", ".json.zst", ".bin")
"""In a folder these are often something else; they are taken where they are named, and .bin where its .idx is."""
OF_NUMBERS = re.compile(r"\d+|of|[a-z]?\d{3,}|(?=[a-f]*\d)[0-9a-f]{8,}|snappy|zstd|gzip|lz4|brotli", re.IGNORECASE)
"""A word of a file's name that only tells shards apart, or how they are compressed: 00001, of, c000, a hash."""
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
SAYS_NOTHING = {"", "data", "part", "file", "files", "shard", "chunk", "train", "training", "output", "text", "default"}
PART_OF_WORD = dict.fromkeys(("validation", "valid", "val", "dev"), "validation") | {"test": "test"}
PREPROCESSED = "_text_document"
"""What Megatron's tools/preprocess_data.py adds to most names."""


class FileGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Files that seem to be one source."""

    name: str
    """What they are called; another group may be called the same."""
    part: str
    """`train`, or `validation` or `test` where their names say so."""
    format: str
    files: tuple[str, ...]
    """Absolute paths or URIs, sorted."""
    pattern: str | None
    """A glob that matches these and no others; None if there is no simple one."""


def find_groups(words: Sequence[str]) -> tuple[list[FileGroup], list[str]]:
    """The groups of all files that are named, and the files in named folders that are no data.

    Raises:
        SourceUnreadable: A word leads to no file, with the names that come nearest.
    """
    found: dict[str, None] = {}
    left_out: list[str] = []
    for word in words:
        files, others = _files_of(word)
        found.update(dict.fromkeys(files))
        left_out += others
    by_key: dict[tuple[str, str, str], list[str]] = {}
    for file in sorted(found):
        folder, name = os.path.split(file)
        by_key.setdefault((folder, format_of_name(name), _stem(name)), []).append(file)
    for folder, format, stem in sorted(by_key):  # web0, web1: digits at the end of a word, if there are several
        short = (folder, format, stem.rstrip("0123456789"))
        alike = [key for key in by_key if (*key[:2], key[2].rstrip("0123456789")) == short]
        if len(alike) > 1:
            by_key[short] = sorted(file for key in alike for file in by_key.pop(key))
    groups = [
        FileGroup(
            name=_name(folder, stem),
            part=_part(folder, stem),
            format=format,
            files=tuple(files),
            pattern=_pattern(files, words),
        )
        for (folder, format, stem), files in sorted(by_key.items())
    ]
    return groups, sorted(set(left_out) - set(found))


def format_of_name(name: str) -> str:
    """The format that a file's name tells; what has no known end is taken for Parquet."""
    return next((format for format, held in FORMATS.items() if name.lower().endswith(held.suffixes)), DEFAULT_FORMAT)


def _suffixes() -> list[str]:
    return [suffix for format in FORMATS.values() for suffix in format.suffixes]


def _files_of(word: str) -> tuple[list[str], list[str]]:
    """Files that a word names, and those of a folder that it names which are no data."""
    if is_uri(word):
        below = objects_below(word)
    else:
        path = Path(word).expanduser()
        below = _files_below(path) if path.is_dir() else None
        word = str(path)
    if below is not None:
        files = [file for file in below if _is_data(file, below)]
        if not files:
            shown = ", ".join(sorted(PurePosixPath(file).name for file in below)[:5])
            tables = [file for file in below if file.lower().endswith((".csv", ".tsv"))]
            several = str(PurePosixPath(tables[0]).with_name(f"*{PurePosixPath(tables[0]).suffix}")) if tables else ""
            hint = f". CSV is not read; DuckDB makes Parquet of it: {converted_csv(several)}" if tables else ""
            raise SourceUnreadable(
                f"{word}: the folder holds no data files ({shown or 'it is empty'}); data files end in "
                f"{', '.join(_suffixes())}{hint}"
            )
        known = set(files) | {file.removesuffix(".bin") + ".idx" for file in files}
        return files, [file for file in below if file not in known]
    try:
        matches = find_files(word, [word], Path.cwd())
    except SourceUnreadable as error:
        raise SourceUnreadable(str(error).removeprefix(f"source {word!r}: ")) from None
    files = [file if is_uri(file) else os.path.normpath(Path.cwd() / file) for file in matches]
    return [file.removesuffix(".idx") + ".bin" if file.endswith(".idx") else file for file in files], []


def _files_below(folder: Path) -> list[str]:
    """All files below a folder whose names, and those of their folders, do not begin with a dot."""
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [os.path.abspath(os.path.join(place, name)) for name in names if not name.startswith(".")]  # noqa: PTH100, PTH118
    return sorted(found)


def _is_data(file: str, others: Iterable[str]) -> bool:
    name = file.lower()
    if name.endswith(".bin"):
        return file.removesuffix(".bin") + ".idx" in others
    return not name.endswith((*MANY_USES, ".idx")) and name.endswith(tuple(_suffixes()))


def _stem(name: str) -> str:
    """A file's name without its format and what only tells shards apart."""
    ends = sorted(_suffixes(), key=len, reverse=True)
    stem = next((name[: -len(end)] for end in ends if name.lower().endswith(end)), name).removesuffix(PREPROCESSED)
    kept = re.split(r"([-_.]+)", UUID.sub("0", stem))
    words = [(word, kept[i - 1] if i else "") for i, word in enumerate(kept) if i % 2 == 0]
    words = [(word, before) for word, before in words if not OF_NUMBERS.fullmatch(word)]
    return "".join(before * bool(i) + word for i, (word, before) in enumerate(words)).strip("-_.")


def _name(folder: str, stem: str) -> str:
    """The stem, or where it says nothing the nearest folder's name that says something."""
    for name in (stem, *reversed(PurePosixPath(folder.replace(os.sep, "/")).parts)):
        if name.lower() not in SAYS_NOTHING | PART_OF_WORD.keys() and name.strip("/:."):
            return name
    return stem or "data"


def _part(folder: str, stem: str) -> str:
    for word in (stem.lower(), PurePosixPath(folder).name.lower()):
        if word in PART_OF_WORD:
            return PART_OF_WORD[word]
    return "train"


def _pattern(files: Sequence[str], words: Sequence[str]) -> str | None:
    """A glob for files of one folder, if it matches nothing else."""
    if len(files) == 1:
        return None
    folder = os.path.dirname(files[0])  # noqa: PTH120 - a URI may be no path
    names = [os.path.basename(file) for file in files]  # noqa: PTH119
    begin = _shared_begin(names)
    end = _shared_begin([name[len(begin) :][::-1] for name in names])[::-1]
    guesses = [word for word in words if has_magic(word) and is_uri(word)]
    guesses.append(f"{folder}/{escape(begin)}*{escape(end)}")
    for guess in guesses:
        try:
            matches = find_files("", [guess], Path.cwd())
        except SourceUnreadable:
            continue
        if sorted(matches) == list(files):
            return guess
    return None


def _shared_begin(texts: Sequence[str]) -> str:
    """What all texts begin with."""
    first, last = min(texts), max(texts)
    differs = (i for i, (one, other) in enumerate(zip(first, last, strict=False)) if one != other)
    return first[: next(differs, min(len(first), len(last)))]
