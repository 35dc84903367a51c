"""What deny-lists take out of sources.

In: a catalog, or its manifest. Out: documents and tokens of each source that loses some, for a program and as lines.
Must hold: a source that loses none is left out. Cost: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchmix.catalog.manifest import Manifest
from torchmix.catalog.store import Catalog
from torchmix.cli.terminal import count_text
from torchmix.recipe.structs import Recipe


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
