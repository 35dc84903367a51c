"""The rows of views -> their entries in the catalog, with arrays on disk.

In: the rows of each view of a source. Out: a `ViewEntry` each. Must hold: an entry whose source, definition and
properties are as before is kept with its arrays. Cost: 4 bytes a kept row, 8 in a source of 2^31 rows or more.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from torchmix.catalog.array_files import write_arrays
from torchmix.catalog.manifest import Manifest, PropertiesEntry, ViewEntry
from torchmix.catalog.properties.rows import PropertyRows
from torchmix.catalog.sizes import window_units_of_view
from torchmix.catalog.store import ARRAYS_FOLDER, ROWS_OF_VIEW, SourceCatalog
from torchmix.catalog.views.build import KeptRows, build_views
from torchmix.catalog.views.wanted import PartViews, SourceViews
from torchmix.recipe.source.properties import path_properties_of

Views = dict[str, dict[str, ViewEntry]]
"""By part, then by name."""


def views_of_manifest(
    folder: Path,
    parts: Sequence[PartViews],
    sources: Mapping[str, SourceCatalog],
    properties: Mapping[str, PropertiesEntry],
    old: Manifest | None,
) -> Views:
    """The views of a catalog: those that parts of a recipe need, made or kept, and those of others that still hold.

    Args:
        folder: The catalog's folder, locked by the caller.
        parts: What the parts of the recipe need.
        sources: The sources of the recipe, as they are to be published.
        properties: What is kept of the properties of each source.
        old: What was published before.

    Raises:
        RecipeError: As `build_views`.
        OSError: The disk is full, or not writable.
    """
    before = {} if old is None else old.views
    fingerprints = {name: entry.fingerprint for name, entry in ({} if old is None else old.sources).items()}
    fingerprints |= {name: source.fingerprint for name, source in sources.items()}
    views: Views = {
        part: {name: one for name, one in of_part.items() if fingerprints.get(one.source) == one.source_fingerprint}
        for part, of_part in before.items()
    }
    for part in parts:
        of_part = views.setdefault(part.part, {})
        for name, wanted in part.sources.items():
            made_of = _made_of(wanted, sources[name], properties.get(name))
            if all(one in of_part and of_part[one].made_of == made_of for one in wanted.row_sets):
                continue
            rows = PropertyRows(folder, sources[name], properties.get(name), path_properties_of(wanted.source))
            built = build_views(rows, wanted, may_be_empty=part.part != "train")
            for view, kept in built.items():
                may_lack_rows = view == name  # a source as it is needs none to be written
                of_part[view] = _write(folder, wanted, sources[name], kept, made_of, may_lack_rows=may_lack_rows)
    return {part: dict(sorted(views[part].items())) for part in sorted(views) if views[part]}


def _made_of(wanted: SourceViews, source: SourceCatalog, properties: PropertiesEntry | None) -> str:
    """16 hex digits over all that the rows follow from."""
    kept = [] if properties is None else [properties.files, *(side.files for side in properties.side)]
    content = [wanted.definition, source.fingerprint, [file.path for file in source.files], kept]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


def _write(
    folder: Path, wanted: SourceViews, source: SourceCatalog, kept: KeptRows, made_of: str, *, may_lack_rows: bool
) -> ViewEntry:
    sizes = source.sizes
    window = window_units_of_view(
        num_pages=sizes.num_pages,
        num_rows=sizes.num_documents,
        num_kept=len(kept.rows),
        window_pages=sizes.window_pages,
    )
    tokens = sizes.tokens[kept.rows]
    is_whole = may_lack_rows and len(kept.rows) == sizes.num_documents
    path = folder / ARRAYS_FOLDER / f"{wanted.name}.{secrets.token_hex(4)}"
    arrays = {}
    if not is_whole:
        path.parent.mkdir(exist_ok=True)
        narrow = np.int32 if sizes.num_documents < 1 << 31 else np.int64
        arrays = write_arrays(path, {ROWS_OF_VIEW: [kept.rows.astype(narrow)]})
    return ViewEntry(
        source=wanted.name,
        definition=wanted.definition,
        made_of=made_of,
        source_fingerprint=source.fingerprint,
        fingerprint=_fingerprint(kept, window, sizes.num_pages, sizes.num_documents),
        window_units=window,
        num_documents=len(kept.rows),
        num_tokens=int(tokens.sum(dtype=np.int64)),
        max_document_tokens=int(tokens.max(initial=0)),
        left=kept.left,
        in_no_cell=kept.in_no_cell,
        file=None if is_whole else path.name,
        arrays=arrays,
    )


def _fingerprint(kept: KeptRows, *numbers: int) -> str:
    digest = hashlib.sha256(b"".join(number.to_bytes(8, "little") for number in numbers))
    digest.update(np.ascontiguousarray(kept.rows, "<i8").data)
    return digest.hexdigest()[:16]
