"""Texts from a hundred bytes to a hundred thousand: modules of this interpreter's standard library, and docstrings.

    python examples/long_context/make_texts.py runs/texts

A few modules have most of the bytes, and most texts are short. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import ast
import sysconfig
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

LONGEST = 128 * 1024
"""Bytes; longer modules are left out."""


def texts(library: Path) -> tuple[list[str], list[str]]:
    """Modules, and docstrings in them."""
    modules, docstrings = [], []
    for path in sorted(library.glob("*.py")) + sorted(library.glob("[a-z]*/*.py")):
        if path.stat().st_size > LONGEST or "site-packages" in path.parts or "test" in path.parts:
            continue
        try:
            text = path.read_text(encoding="utf-8")
            nodes = list(ast.walk(ast.parse(text)))
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue
        modules.append(text)
        kinds = (ast.FunctionDef, ast.ClassDef, ast.Module)
        docstrings += [found for node in nodes if isinstance(node, kinds) and (found := ast.get_docstring(node))]
    return modules, docstrings


def write_texts(folder: Path, library: Path | None = None) -> None:
    """Write `modules.parquet` and `docstrings.parquet`, of another folder than the standard library if one is given."""
    folder.mkdir(parents=True, exist_ok=True)
    found = texts(Path(sysconfig.get_paths()["stdlib"]) if library is None else library)
    for name, rows in zip(("modules", "docstrings"), found, strict=True):
        pq.write_table(pa.table({"text": rows}), folder / f"{name}.parquet", data_page_size=64 << 10)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("folder", type=Path)
    write_texts(parser.parse_args().folder)


if __name__ == "__main__":
    main()
