"""The catalog of one part of a recipe, opened with its views.

In: the catalog's folder, and a part. Out: its `Catalog`. Must hold: as `store.open_catalog`. Cost: as that.
"""

from __future__ import annotations

from pathlib import Path

from torchmix.catalog.settings import settings_of
from torchmix.catalog.store import Catalog, open_catalog
from torchmix.catalog.views.wanted import views_of
from torchmix.recipe.parts import Part


def open_part(catalog_folder: Path, part: Part) -> Catalog:
    """Open the sources of a part, and the views that its streams need; errors as `open_catalog`."""
    return open_catalog(catalog_folder, settings_of(part.sources, part.shuffle), views_of(part))
