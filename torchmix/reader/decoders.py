"""How each source of a catalog is read.

In: an open catalog. Out: a `FormatSource` for each of its sources, in its order. Must hold: what turns rows into tokens
here is what the catalog's lengths were taken with. Cost: opening tokenizers, once each.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torchmix.catalog.store import Catalog
from torchmix.errors import CatalogStale
from torchmix.formats.documents.text import with_items
from torchmix.formats.source import FormatSource
from torchmix.formats.table import choose_source
from torchmix.transform.maps.row_map import open_maps
from torchmix.transform.open_tokenizer import Tokenizers


def decoders_of(
    catalog: Catalog,
    directory: Path,
    chosen: Mapping[str, FormatSource] | None = None,
    *,
    maps: Mapping[str, str] | None = None,
) -> list[FormatSource]:
    """Choose how each source is read.

    Args:
        catalog: The catalog.
        directory: The recipe's folder; paths of tokenizers are relative to it.
        chosen: By name; by default as the catalog says.
        maps: The words of the function of each source that has one, by name, as a recipe has them.

    Raises:
        CatalogStale: The catalog holds lengths of another transform, for example of another tokenizer.
        RecipeError, SourceUnreadable: A tokenizer or a function cannot be opened here.
    """
    tokenizers, decoders = Tokenizers(directory), list[FormatSource]()
    opened = open_maps(maps or {}, directory)
    for name, source in catalog.sources.items():
        if chosen is not None:
            decoder = chosen[name]
        else:
            decoder = choose_source(name, source, (file.path for file in source.files), tokenizers, opened.get(name))
        if decoder.transform_id != source.transform_id:
            of, first = "this torchmix", ""
            if source.map is not None:
                of, first = f"the map {source.map.function} here", "put back the version it was indexed with, or "
            elif source.tokenizer not in (None, "bytes"):
                of, first = f"the tokenizer {source.tokenizer} here", "put back what it was when indexed, or "
            raise CatalogStale(
                f"source {name!r}: the catalog at {catalog.directory} holds lengths of transform "
                f"{source.transform_id!r}, {of} has {decoder.transform_id!r}; {first}run torchmix index"
            )
        decoders.append(with_items(decoder, source.sizes.items))
    return decoders
