"""Which rows lie in a band of hashes: what a hold-out leaves to training, or has itself.

In: the rows of a source, and a band. Out: a mask. Must hold: whether a row is in the band follows from its id alone,
or, without an id, from the path of its file below the folder that the source's files share and its place in the file:
never from a seed, sizes, times, other rows, or where the data lie on this machine. So rows that come later join by the
same rule, and move no other. Cost: a SHA-256 for each row, by DuckDB.

The hash of a row is the first 64 bits of the SHA-256 of a text: the id, whole numbers in decimal; or `PATH:ROW`.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from torchmix.catalog.properties.database import open_database
from torchmix.catalog.properties.rows import PropertyRows
from torchmix.catalog.views.folders import below, shared_folder
from torchmix.errors import RecipeError
from torchmix.recipe.held_out import Band
from torchmix.recipe.source.format import paths_of
from torchmix.recipe.structs import Source

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
