"""Real text as Parquet sources, from what any machine with Python has.

In: this interpreter's standard library and installed packages. Out: a folder of Parquet files, of six kinds:

    code        modules of the standard library         few, long, very uneven
    docstrings  their docstrings                        many, short
    packages    what installed packages say of          licences of 110 KB beside readmes of 100 bytes; two files
                themselves: metadata, licences, readmes
    messages    their error messages                    very short
    names       names of Unicode characters             very short, five thousand; as token ids, not as text
    zen         the Zen of Python                       tiny: twenty lines, so it is repeated many times

They are written with different codecs, page sizes, page versions, and with and without dictionaries and page indexes,
on purpose: sources in the wild are. Nothing is downloaded.

Must hold: the same interpreter and packages give the same rows in the same order. The folder appears whole, by a
rename; one that is there already is left as it is. Cost: about five seconds, 10 MB of text.

    python examples/megatron/make_corpus.py runs/corpus
"""

from __future__ import annotations

import ast
import codecs
import contextlib
import os
import shutil
import sys
import sysconfig
import unicodedata
import warnings
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

END_OF_DOCUMENT = 256
"""Ends a list of token ids; torchmix adds it to text itself."""
LONGEST_MODULE = 64 * 1024
"""Characters; longer modules are left out, since one alone would fill many steps of a small run."""
DOCUMENT_NAMES = ("metadata", "license", "licence", "copying", "notice", "readme", "authors", "changes")
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
LETTERS = ("LATIN ", "GREEK ", "CYRILLIC ", "ARABIC ", "DEVANAGARI ", "MATHEMATICAL ", "MUSICAL ", "BRAILLE ", "BOX ")


def main(directory: Path, library: Path | None = None) -> None:
    """Make the corpus, of another folder of modules than the standard library if one is given."""
    if directory.exists():
        print(f"corpus: {directory} is there already; remove it to make another")
        return
    aside = directory.with_name(f"{directory.name}.{os.getpid()}.writing")
    aside.mkdir(parents=True)
    try:
        write_corpus(aside, Path(sysconfig.get_paths()["stdlib"]) if library is None else library)
        aside.rename(directory)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    for path in sorted(directory.glob("*.parquet")):
        file = pq.ParquetFile(path)
        print(f"corpus: {path.name:22} {file.metadata.num_rows:6d} documents  {path.stat().st_size / 1e6:6.2f} MB")


def write_corpus(directory: Path, library: Path) -> None:
    """Write all files of the corpus into an existing folder."""
    modules, trees = zip(*parsed_modules(library), strict=True)
    packages = list(package_texts())
    half = len(packages) // 2

    short_modules = [module for module in modules if len(module) <= LONGEST_MODULE]
    write_text(directory / "code.parquet", short_modules, codec="zstd", page_kib=64, page_index=True)
    write_text(directory / "docstrings.parquet", docstrings(trees), codec="snappy", page_kib=16, dictionary=True)
    write_text(directory / "packages-0.parquet", packages[:half], codec="gzip", page_kib=64, version="2.0")
    write_text(directory / "packages-1.parquet", packages[half:], codec="lz4", page_kib=256, page_index=True)
    write_text(directory / "messages.parquet", messages(trees), codec="none", page_kib=4, version="2.0")
    write_text(directory / "zen.parquet", zen(), codec="none", page_kib=1, page_index=True)
    tokens = [[*name.encode(), END_OF_DOCUMENT] for name in character_names()]
    column = pa.array(tokens, pa.list_(pa.int32()))
    write(directory / "names.parquet", "tokens", column, codec="zstd", page_kib=32, page_index=True, dictionary=True)


def write_text(path: Path, texts: Iterable[str], **how: Any) -> None:
    """Write documents as one string column."""
    write(path, "text", pa.array(texts, pa.string()), **how)


def write(
    path: Path,
    name: str,
    column: pa.Array,
    *,
    codec: str,
    page_kib: int,
    page_index: bool = False,
    version: str = "1.0",
    dictionary: bool = False,
) -> None:
    """Write one column, with the given choices of the Parquet format."""
    pq.write_table(
        pa.table({name: column}),
        path,
        compression=codec,
        data_page_size=page_kib * 1024,
        data_page_version=version,
        write_batch_size=16,  # rows between two looks at the size of a page
        write_page_index=page_index,
        use_dictionary=dictionary,
    )


def parsed_modules(root: Path) -> Iterator[tuple[str, ast.Module]]:
    """Source and syntax tree of each module below a folder, by path."""
    for path in sorted(root.rglob("*.py")):
        source = readable(path) if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts) else None
        if source:
            with warnings.catch_warnings(), contextlib.suppress(SyntaxError, ValueError):  # it carries templates, too
                warnings.simplefilter("ignore")  # old modules have escapes that Python warns of
                yield source, ast.parse(source)


def docstrings(trees: Iterable[ast.Module]) -> Iterator[str]:
    """Docstrings of modules, classes and functions, in the order of the text."""
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield text


def messages(trees: Iterable[ast.Module]) -> Iterator[str]:
    """Literal messages of raised errors, each once; `{}` where a value is filled in."""
    seen: dict[str, None] = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                for argument in node.exc.args:
                    text = literal(argument)
                    if text.strip("{} "):
                        seen.setdefault(text)
    yield from seen


def literal(node: ast.expr) -> str:
    """Text of a string, an f-string or a string before `%`; empty for other expressions."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) or "{}" for part in node.values)
    return literal(node.left) if isinstance(node, ast.BinOp) else ""


def package_texts() -> Iterator[str]:
    """Metadata, licences, readmes and the like of installed packages, by name of package and path, each text once."""
    seen: set[str] = set()
    for package in sorted(metadata.distributions(), key=lambda package: str(package.metadata["Name"]).lower()):
        for file in sorted(package.files or (), key=str):
            if file.name.lower().startswith(DOCUMENT_NAMES) or file.suffix in (".rst", ".md", ".txt"):
                text = readable(Path(str(file.locate())))
                if text and text not in seen:
                    seen.add(text)
                    yield text


def readable(path: Path) -> str | None:
    """Text of a file; None if it is gone or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def character_names() -> Iterator[str]:
    """Names of the characters of some scripts, by code point."""
    for code in range(sys.maxunicode + 1):
        name = unicodedata.name(chr(code), "")
        if name.startswith(LETTERS):
            yield name


def zen() -> list[str]:
    """Lines of the Zen of Python; `import this` would print it."""
    source = Path(sysconfig.get_paths()["stdlib"], "this.py").read_text(encoding="utf-8")
    assignment = ast.parse(source).body[0]
    assert isinstance(assignment, ast.Assign)
    return [line for line in codecs.decode(literal(assignment.value), "rot13").splitlines() if line]


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/corpus"))
