"""The rows of a source that a selection, a cell, a child of a split or a hold-out keeps."""

from __future__ import annotations

import hashlib
import os.path
import posixpath
import secrets
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.array_files import write_arrays
from torchmix.catalog.manifest import Manifest, PropertiesEntry, ViewEntry
from torchmix.catalog.properties import PropertyRows, columns_of_expression, kept_rows, open_database
from torchmix.catalog.sizes import window_units_of_view
from torchmix.catalog.store import ARRAYS_FOLDER, ROWS_OF_VIEW, PartViews, SourceCatalog, SourceViews
from torchmix.errors import RecipeError
from torchmix.recipe.build import listed, nearest
from torchmix.recipe.fingerprint import digest_of
from torchmix.recipe.parts import Band
from torchmix.recipe.sources import path_properties_of, paths_of
from torchmix.recipe.streams import Cell, RowSet
from torchmix.recipe.structs import Quantiles, Source

# --- Paths of files below the folder that all paths of a source share.
#
# Moving a source's folder changes nothing, where the recipe's paths move with it. Pure.

_MAGIC = frozenset("*?[")


def shared_folder(patterns: Sequence[str]) -> str:
    """The deepest folder that all paths and globs of a source begin with; empty if they share none."""
    folders = [_fixed_folder(pattern).split("/") for pattern in patterns]
    shared: list[str] = []
    for names in zip(*folders, strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return "/".join(shared)


def below(folder: str, path: str) -> str:
    """The path of a file below a shared folder."""
    return _plain(path).removeprefix(f"{folder}/") if folder else _plain(path)


def child_folder(patterns: Sequence[str], path: str, where: str) -> str:
    """The folder just below the shared one that a file lies in; `where` is the path of keys, for errors.

    Raises:
        RecipeError: The file lies in the shared folder itself.
    """
    folder = shared_folder(patterns)
    child, sign, _ = below(folder, path).partition("/")
    if not sign:
        place = folder or "the recipe's folder"
        message = (
            f"{path} lies directly in {place}; split_by: dir needs each file in a folder below, one for each child"
        )
        raise RecipeError(message, where)
    return child


def _fixed_folder(pattern: str) -> str:
    """The folder of a path; of a glob, as far as it is no pattern."""
    names = _plain(pattern).split("/")[:-1]
    magic = [number for number, name in enumerate(names) if _MAGIC & set(name)]
    return "/".join(names[: magic[0]] if magic else names)


def _plain(path: str) -> str:
    if "://" in path:
        return path
    return posixpath.normpath(path.replace(os.sep, "/"))


# --- Which rows lie in a band of hashes: what a hold-out leaves to training, or has itself.
#
# Whether a row is in the band follows from its id alone, or, without an id, from the path of its file below the folder
# that the source's files share and its place in the file: never from a seed, sizes, times, other rows, or where the
# data lie on this machine. So rows that come later join by the same rule, and move no other. Cost: a SHA-256 for each
# row, by DuckDB.
#
# The hash of a row is the first 64 bits of the SHA-256 of a text: the id, whole numbers in decimal; or `PATH:ROW`.

HASH_BITS = 64


def rows_in_band(rows: PropertyRows, source: Source, band: Band) -> NDArray[np.bool_]:
    """A mask [rows] of the rows whose hash lies in a band.

    Args:
        rows: The source's rows.
        source: What the recipe says of it.
        band: Bounds of hashes, as parts of all of them.

    Raises:
        RecipeError: A row has no id, or the id is neither text nor a whole number.
    """
    texts = _ids(rows, source.id) if source.id is not None else _places(rows, source)
    start, stop = map(_bound, band)
    masks = [np.zeros(0, np.bool_)]
    with open_database() as database:
        for table in texts:
            database.register("rows", table)
            # Digits of hexadecimal numbers of one length sort as the numbers do.
            found = database.execute(
                "SELECT hash >= ? AND hash < ? AS held FROM (SELECT substr(sha256(text), 1, 16) AS hash FROM rows)",
                [start, stop],
            )
            masks.append(np.asarray(found.fetchnumpy()["held"], np.bool_))
            database.unregister("rows")
    return np.concatenate(masks)


def _ids(rows: PropertyRows, id: str) -> list[pa.Table]:
    where = f"sources.{rows.source.name}.id"
    rows.check([id], where)
    tables = []
    for first, table in rows.blocks([id]):
        column = table[id]
        if not (pa.types.is_integer(column.type) or _is_text(column.type)):
            raise RecipeError(f"{id!r} is {column.type}; an id is text or a whole number", where)
        if column.null_count:
            row = first + int(pc.index(column.is_null(), True).as_py())
            raise RecipeError(f"row {row} has no {id!r}; hold_out chooses rows by it", where)
        tables.append(pa.table({"text": column.cast(pa.string())}))
    return tables


def _places(rows: PropertyRows, source: Source) -> list[pa.Table]:
    folder = shared_folder(paths_of(source))
    tables = []
    for file in rows.source.files:
        numbers = pa.array(np.arange(file.num_rows, dtype=np.int64)).cast(pa.string())
        path = pa.scalar(f"{below(folder, file.path)}:", pa.string())
        tables.append(pa.table({"text": pc.binary_join_element_wise(path, numbers, "")}))
    return tables


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _bound(text: str) -> str:
    """The smallest hash that is not below a part of all hashes, as text; of all hashes, what sorts behind them."""
    part = Fraction(text)
    number = -(-part.numerator * (1 << HASH_BITS) // part.denominator)
    return "g" if number >> HASH_BITS else f"{number:016x}"


# --- Cells of groups -> the rows of a source that lie in each.
#
# A value is compared as text, whatever the type of the property: 2020 is `2020`, and truth is `true`; a row whose
# property is null is in no cell. Cost: one look at each property, and 2 bytes a row for it.

_NO_VALUE = -1


class RowsOfCells:
    """Which rows of a source lie in which cell."""

    def __init__(self, rows: PropertyRows, cells: Sequence[Cell]) -> None:
        """Look the properties of some cells up.

        Raises:
            RecipeError: A property is missing, or of a type without values that text can name.
        """
        values: dict[str, set[str]] = {}
        for cell in cells:
            for name, value in cell.values:
                values.setdefault(name, set()).add(value)
        self._num_rows = rows.source.num_documents
        self._number = {name: {value: n for n, value in enumerate(sorted(values[name]))} for name in values}
        self._number_of_row = {name: _numbers(rows, name, sorted(values[name]), cells[0].group) for name in values}

    def of(self, cell: Cell) -> NDArray[np.bool_]:
        """A mask [rows] of one of these cells."""
        mask = np.ones(self._num_rows, np.bool_)
        for name, value in cell.values:
            mask &= self._number_of_row[name] == self._number[name][value]
        return mask


def _numbers(rows: PropertyRows, name: str, values: Sequence[str], group: str) -> NDArray[np.int16]:
    """[rows] the number of each row's value among some values, or that of no value."""
    where = f"mixture.{group}.cells.shares.{name}"
    rows.check([name], where)
    found = [np.zeros(0, np.int16)]
    for _, table in rows.blocks([name]):
        at = pc.index_in(_texts(table[name], name, where), value_set=pa.array(values, pa.string()))
        found.append(at.cast(pa.int16()).fill_null(_NO_VALUE).to_numpy().astype(np.int16))
    return np.concatenate(found)


def _texts(column: pa.ChunkedArray, name: str, where: str) -> pa.ChunkedArray:
    try:
        return column.cast(pa.string())
    except pa.ArrowException:
        message = f"property {name!r} is {column.type}, whose values no text names; use one of text, numbers or truth"
        raise RecipeError(message, where) from None


# --- `split_by` of a source -> which child each of its rows is of.
#
# A row is in at most one child; children of folders have all rows; children of quantiles differ by at most one row,
# and ties go by the order of rows. Cost: folders, a look at each path; quantiles, one sort of the property.


def rows_of_children(rows: PropertyRows, source: Source, children: Sequence[str]) -> dict[str, NDArray[np.bool_]]:
    """A mask [rows] of each child.

    Args:
        rows: The source's rows.
        source: What the recipe says of it; it has `split_by`.
        children: Names of the wanted children.

    Raises:
        RecipeError: There is no such child; or the property is missing, or no number.
    """
    name = rows.source.name
    if isinstance(source.split_by, Quantiles):
        return _quantiles(rows, source.split_by, children, f"sources.{name}.split_by")
    where = f"sources.{name}.split_by"
    patterns = paths_of(source)
    child_of_file = [child_folder(patterns, file.path, where) for file in rows.source.files]
    found = sorted(set(child_of_file))
    for child in children:
        if child not in found:
            raise RecipeError(
                f"there is no folder {child!r}{nearest(child, found)} in {name!r}; its folders are {listed(found)}",
                f"mixture.{name}/{child}",
            )
    masks = {child: np.zeros(rows.source.num_documents, np.bool_) for child in children}
    for file, child in zip(rows.source.files, child_of_file, strict=True):
        if child in masks:
            masks[child][file.first_row : file.first_row + file.num_rows] = True
    return masks


def _quantiles(rows: PropertyRows, cut: Quantiles, children: Sequence[str], where: str) -> dict[str, NDArray[np.bool_]]:
    rows.check([cut.column], f"{where}.column")
    column = rows.whole([cut.column])[cut.column]
    try:
        values = column.cast("float64").to_numpy()
    except (ValueError, NotImplementedError):
        raise RecipeError(f"property {cut.column!r} is {column.type}, no number", f"{where}.column") from None
    ranked = np.argsort(values, kind="stable")  # nulls are NaN here, and come last
    ranked = ranked[: len(values) - int(np.isnan(values).sum())]
    masks: dict[str, NDArray[np.bool_]] = {}
    for child in children:
        number = int(child[1:])
        start, stop = (len(ranked) * border // cut.quantiles for border in (number - 1, number))
        masks[child] = np.zeros(len(values), np.bool_)
        masks[child][ranked[start:stop]] = True
    return masks


# --- The rows of each view of a source.
#
# A row is in two sets only where one of them allows it. If two sets have rows in common, the one with fewer rows keeps
# them. Cost: DuckDB's for each expression; a byte a row and set.

Mask = NDArray[np.bool_]


class KeptRows(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The rows of one set."""

    rows: Int64Array
    """[K] rows of the source, ascending."""
    left: dict[str, int]
    """Rows that it leaves to a narrower set, by the name of that; a row may count for several."""
    in_no_cell: int = 0
    """With a cell: rows of what it is a cell of that are in no cell of its group."""


def build_views(rows: PropertyRows, wanted: SourceViews, *, may_be_empty: bool) -> dict[str, KeptRows]:
    """The rows of each row set of a source, by name.

    Args:
        rows: The source's rows.
        wanted: Its row sets, and which rows the part has.
        may_be_empty: Whether a set may have no rows once others and held out rows are gone.

    Raises:
        RecipeError: A property is missing, an expression is refused or does not fit, a set that is no cell keeps
            nothing or leaves all of its rows to others, or a child does not exist.
    """
    masks, outside = _masks(rows, wanted)
    for name, mask in masks.items():
        if not mask.any() and wanted.row_sets[name].cell is None:
            raise RecipeError(
                f"keeps none of the {len(mask):,} rows of {wanted.name!r}; a row for which it is null is not kept",
                _where(name, wanted.row_sets[name]),
            )
    held = None if wanted.band is None else rows_in_band(rows, wanted.source, wanted.band)
    sizes = {name: int(np.count_nonzero(mask)) for name, mask in masks.items()}
    order = sorted(masks, key=lambda name: (sizes[name], name == wanted.name, name))
    found: dict[str, KeptRows] = {}
    for number, name in enumerate(order):
        mask, left = masks[name].copy(), {}
        for narrower in order[:number]:
            if "allow" in (wanted.row_sets[name].overlap, wanted.row_sets[narrower].overlap):
                continue
            if common := int(np.count_nonzero(masks[name] & masks[narrower])):
                left[narrower] = common
                mask &= ~masks[narrower]
        is_cell = wanted.row_sets[name].cell is not None
        if left and not mask.any() and not is_cell:
            others = ", ".join(left)
            raise RecipeError(
                f"all of its {sizes[name]:,} rows are in {others}, too; write `overlap: allow` for a selection whose "
                "rows may come twice, or leave one of them out",
                f"mixture.{name}",
            )
        if held is not None:
            mask &= held
        kept = np.flatnonzero(mask)
        if not len(kept) and not may_be_empty and not is_cell:
            raise RecipeError(f"all of its {sizes[name]:,} rows are held out; hold out less", f"mixture.{name}")
        found[name] = KeptRows(rows=kept, left=left, in_no_cell=outside.get(name, 0))
    return found


def _masks(rows: PropertyRows, wanted: SourceViews) -> tuple[dict[str, Mask], dict[str, int]]:
    """The rows that each set says it has; and for cells, how many rows are in no cell."""
    num_rows = rows.source.num_documents
    children = {name: one.child for name, one in wanted.row_sets.items() if one.child is not None}
    cut = rows_of_children(rows, wanted.source, list(children.values())) if children else {}
    masks: dict[str, Mask] = {}
    in_cells = RowsOfCells(rows, [one.cell for one in wanted.row_sets.values() if one.cell is not None])
    selected: dict[str, Mask] = {}
    of_base: dict[tuple[str, str], Mask] = {}
    for name, one in wanted.row_sets.items():
        if one.where is not None:
            if one.where not in selected:
                selected[one.where] = _selected(rows, one.where, f"sources.{one.cell.base if one.cell else name}.where")
            mask = selected[one.where]
        elif one.child is not None:
            mask = cut[one.child]
        else:
            mask = np.ones(num_rows, np.bool_)
        masks[name] = mask
        if one.cell is not None:
            masks[name] = mask & in_cells.of(one.cell)
            key = one.cell.group, one.cell.base
            of_base[key] = of_base.get(key, mask) & ~masks[name]
    cells = {name: one.cell for name, one in wanted.row_sets.items() if one.cell is not None}
    counts = {key: int(np.count_nonzero(mask)) for key, mask in of_base.items()}
    return masks, {name: counts[cell.group, cell.base] for name, cell in cells.items()}


def _selected(rows: PropertyRows, text: str, where: str) -> Mask:
    columns = columns_of_expression(text, where)
    rows.check(columns, where)
    parts = [kept_rows(text, table, where) for _, table in rows.blocks(columns)]
    return np.concatenate(parts) if parts else np.zeros(0, np.bool_)


def _where(name: str, row_set: RowSet) -> str:
    return f"sources.{name}.where" if row_set.where is not None else f"mixture.{name}"


# --- The rows of views -> their entries in the catalog, with arrays on disk.
#
# An entry whose source, definition and properties are as before is kept with its arrays. Cost: 4 bytes a kept row, 8
# in a source of 2^31 rows or more.

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
    return digest_of([wanted.definition, source.fingerprint, [file.path for file in source.files], kept])


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
