"""Selections, groups and deny-lists as rows of the tables that verbs print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from torchmix.catalog.manifest import Manifest, ViewEntry
from torchmix.catalog.store import Catalog, SourceCatalog, View
from torchmix.cli.terminal import count_text, percent_text, print_table
from torchmix.formats.table import row_of
from torchmix.recipe.changes import tree_of_part
from torchmix.recipe.parts import Part
from torchmix.recipe.streams import row_sets_of
from torchmix.recipe.structs import Recipe
from torchmix.recipe.tree import streams_of, walk

# --- What deny-lists take out of sources.
#
# A source that loses none is left out.


def denied_of_part(catalog: Catalog) -> list[dict[str, Any]]:
    """What is taken out of each source of a part."""
    return [_values(name, len(one.rows), one.num_tokens) for name, one in sorted(catalog.denied.items())]


def denied_of_recipe(manifest: Manifest, recipe: Recipe) -> list[dict[str, Any]]:
    """What is taken out of each source of a recipe that was just indexed; a catalog may hold those of others, too."""
    found = [(name, one) for name, one in sorted(manifest.denied.items()) if recipe.deny and name in recipe.sources]
    return [_values(name, one.num_documents, one.num_tokens) for name, one in found if one.num_documents]


def print_denied(values: Sequence[dict[str, Any]]) -> None:
    """A line for each source."""
    for one in values:
        count = one["num_documents"]
        documents = "1 document" if count == 1 else f"{count_text(count)} documents"
        print(f"deny takes out of {one['source']}: {documents} of {count_text(one['num_tokens'])} tokens")


def _values(source: str, num_documents: int, num_tokens: int) -> dict[str, Any]:
    return {"source": source, "num_documents": num_documents, "num_tokens": num_tokens}


# --- Groups of a mixture -> rows of a table: what the sources of each have together.
#
# A group's figures are the sums over its sources.

GROUP_COLUMNS = {
    "group": "a group of the mixture, by the names on its path",
    "share": "the share of all tokens that its sources have together",
    "given": "their share of the tokens that are given",
    "tokens": "tokens that they give",
    "sources": "how many there are",
}


def group_values(part: Part, shares: Mapping[str, float], delivered: Mapping[str, int]) -> list[dict[str, Any]]:
    """Share and tokens of each group of the mixture at the start.

    Args:
        part: What is planned.
        shares: The share of each source.
        delivered: Tokens that each source gives.
    """
    total = max(1, sum(delivered.values()))
    values = []
    for path, node in walk(tree_of_part(part)):
        if node.children:
            names = streams_of(node)
            tokens = sum(delivered.get(name, 0) for name in names)  # a cell without rows is not among them
            share = sum(shares.get(name, 0) for name in names)
            values.append(
                {
                    "group": path,
                    "sources": names,
                    "share": share,
                    "delivered_tokens": tokens,
                    "delivered_share": tokens / total,
                }
            )
    return values


def print_groups(values: list[dict[str, Any]], *, explain: bool) -> None:
    """Print `group_values` for a person; nothing where there are none."""
    if not values:
        return
    rows = [
        (
            group["group"],
            percent_text(group["share"]),
            percent_text(group["delivered_share"]),
            count_text(group["delivered_tokens"]),
            count_text(len(group["sources"])),
        )
        for group in values
    ]
    print()
    print_table(GROUP_COLUMNS, rows, explain=explain)


# --- What a part's views hold: rows of a source that have a share of their own.
#
# Bytes are those of whole pages, as they are read. Cost: one look at the rows of each view.

SELECTION_COLUMNS = {
    "rows of": "the source that the rows lie in, and stay in",
    "has": "a source, selection or child by its name: what has a share of these rows",
    "documents": "rows that it has in this part",
    "tokens": "of these rows",
    "a window": "pages of the source whose rows are shuffled together: about as many rows as in one of the source",
    "bytes read": "for each byte that it has: pages are read whole. Where this is high, a copy of the rows reads less",
    "leaves": "rows that another stream has, too, and that are left to it",
}


def selection_values(catalog: Catalog, entries: Mapping[str, ViewEntry]) -> list[dict[str, Any]]:
    """Numbers of each view of a catalog; `entries` are those of its part in the manifest."""
    return [
        {
            "name": name,
            "source": view.source,
            "num_documents": len(view.kept),
            "num_tokens": view.num_tokens,
            "max_document_tokens": view.longest_tokens,
            "window_pages": view.window_units,
            "bytes_read_per_byte": bytes_read_per_byte(catalog.sources[view.source], view),
            "left": dict(entries[name].left),
            "fingerprint": view.fingerprint,
        }
        for name, view in catalog.views.items()
    ]


def rows_and_tokens(part: Part, catalog: Catalog, stream: str) -> tuple[int, int]:
    """Rows that a stream draws from, and their tokens; of a source as it is with rows that other parts use."""
    found = [
        catalog.views[name] if name in catalog.views else catalog.sources[row_sets_of(part)[name].source]
        for name in part.streams[stream].members
    ]
    counts = [len(one.kept) if isinstance(one, View) else one.num_documents for one in found]
    return sum(counts), sum(one.num_tokens for one in found)


def shares_of_sources(part: Part, shares: Mapping[str, Fraction]) -> dict[str, Fraction]:
    """What the streams over each source have together, in equal parts where a stream is over several."""
    found = dict.fromkeys(part.sources, Fraction(0))
    for name, stream in part.streams.items():
        for source in stream.sources:
            found[source] += shares[name] / len(stream.sources)
    return found


def print_selections(values: Sequence[Mapping[str, Any]], *, part: str = "", explain: bool) -> None:
    """Print `selection_values` below other tables, with the part's name if given; nothing where there are none."""
    if not values:
        return
    rows = [
        (
            one["source"],
            one["name"],
            count_text(one["num_documents"]),
            count_text(one["num_tokens"]),
            f"{count_text(one['window_pages'])} pages",
            "-" if one["bytes_read_per_byte"] is None else f"{one['bytes_read_per_byte']:,.4g}",
            ", ".join(f"{count_text(count)} to {name}" for name, count in sorted(one["left"].items())) or "-",
        )
        for one in values
    ]
    print(f"\n{part}" if part else "")
    print_table(SELECTION_COLUMNS, rows, explain=explain)


def bytes_read_per_byte(source: SourceCatalog, view: View) -> float | None:
    """Bytes of the pages that an epoch of a view reads, over the bytes in them that belong to kept rows, by tokens.

    None where no kept row has tokens. 1 in formats whose rows are read without their page.
    """
    if row_of(source.format).type_in_file is not None:
        return 1.0
    kept = np.asarray(view.kept, np.int64)
    pages, of_row = np.unique(source.pages.page_of_rows(kept), return_inverse=True)
    num_bytes = source.pages.place(pages).num_bytes
    first_row, tokens = source.sizes.first_row_of_page, source.sizes.tokens
    borders = zip(first_row[pages].tolist(), first_row[pages + 1].tolist(), strict=True)
    all_tokens = np.array([tokens[start:stop].sum(dtype=np.int64) for start, stop in borders])
    kept_tokens = np.bincount(of_row, weights=tokens[kept], minlength=len(pages))
    kept_bytes = float((num_bytes * kept_tokens / np.maximum(all_tokens, 1)).sum())
    return float(num_bytes.sum()) / kept_bytes if kept_bytes else None
