"""`torchmix show --source`: rows of a source, as training sees them.

In: a source and rows of it. Out: each row's place, text or ids. Must hold: order and numbers of rows are the catalog's.
Cost: one page at a time.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchmix.catalog.store import Catalog, SourceCatalog
from torchmix.cli.show.documents import DocumentReader, only, place_of
from torchmix.cli.show.readable import readable
from torchmix.cli.terminal import count_text
from torchmix.errors import OptionError
from torchmix.recipe.build import listed, nearest


def rows_shown(
    catalog: Catalog, directory: Path, arguments: argparse.Namespace, *, maps: Mapping[str, str], seed: int
) -> Iterator[dict[str, Any]]:
    """Rows that the arguments name, one by one: source, row, file, file_row, page, tokens, and text or ids.

    Raises:
        OptionError: There is no such source, row or page.
    """
    name = arguments.source
    if name not in catalog.sources:
        hint = f"{nearest(name, catalog.sources)}; sources are {listed(sorted(catalog.sources))}"
        raise OptionError(f"--source {name}: there is no such source{hint}")
    source = catalog.sources[name]
    start, stop = _range(source, arguments)
    with DocumentReader(only(catalog, name), directory, tokenizer=arguments.tokenizer, maps=maps, seed=seed) as reader:
        for row in range(start, stop):
            place, ids = place_of(source, row), reader.ids(name, row)
            text = reader.text(name, ids)
            yield {
                "source": name,
                "row": row,
                "file": place.file,
                "file_row": place.file_row,
                "page": place.page,
                "tokens": len(ids),
                "text": text,
                "ids": ids.tolist() if text is None or arguments.tokens else None,
            }


def print_row(row: dict[str, Any]) -> None:
    """Print one row: a line that says where it lies, then its text, its ids, or both."""
    print(
        f"--- {row['source']} row {count_text(row['row'])}: {readable(row['file'])} row {count_text(row['file_row'])}, "
        f"page {count_text(row['page'])}, {count_text(row['tokens'])} tokens"
    )
    if row["text"] is not None:
        print(readable(row["text"], keep="\n\t"))
    if row["ids"] is not None:
        print(" ".join(map(str, row["ids"])))


def _range(source: SourceCatalog, arguments: argparse.Namespace) -> tuple[int, int]:
    """Rows to show, as (start, stop)."""
    if arguments.page is not None:
        if arguments.page >= source.pages.num_pages:
            raise OptionError(f"--page {arguments.page}: source {source.name!r} has {source.pages.num_pages} pages")
        first_row = source.pages.first_row
        return int(first_row[arguments.page]), int(first_row[arguments.page + 1])
    start, stop = arguments.rows if arguments.rows is not None else (arguments.row, arguments.row + 1)
    if stop > source.num_documents:
        option = "--rows" if arguments.rows is not None else "--row"
        raise OptionError(f"{option}: source {source.name!r} has {source.num_documents} rows, from 0 on")
    return start, stop
