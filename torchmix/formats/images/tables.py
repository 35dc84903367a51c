"""The images of each file, from the catalog of their column.

In: the open catalog of the columns of images. Out: for a file of a source its images, to whoever scans its texts. Must
hold: files are found by their paths, since two indexes may count files in different orders. Cost: none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torchmix.catalog.items import ItemTable
from torchmix.catalog.settings import name_of_images
from torchmix.catalog.store import Catalog
from torchmix.errors import CatalogError
from torchmix.formats.documents.text import TableOfFile
from torchmix.formats.images.headers import IMAGE
from torchmix.storage.stores import place_of


class ImageTables:
    """Images of the files of several sources."""

    def __init__(self, catalog: Catalog, base: Path) -> None:
        """`catalog` holds the columns of images; paths of files are relative to `base`."""
        self._catalog = catalog
        self._base = base

    def of_source(self, name: str) -> TableOfFile:
        """The images of the files of one source."""
        source = self._catalog.sources[name_of_images(name)]
        files = {place_of(self._base, file.path): file for file in source.files}

        def find(path: str) -> tuple[ItemTable, Mapping[int, str]]:
            if path not in files:
                raise CatalogError(f"source {name!r}: the images of {path} are not indexed; run torchmix index")
            file = files[path]
            table = source.sizes.items[IMAGE].of_rows(file.first_row, file.first_row + file.num_rows)
            first = table.first_item_of_row
            reasons = {
                image: bad.reason
                for bad in file.bad_rows
                for image in range(int(first[bad.row]), int(first[bad.row + 1]))
            }
            return table, reasons

        return find
