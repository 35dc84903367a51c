"""The properties of a source's rows, as tables that fit the catalog row for row.

In: an open source, what is kept of its properties, and what the recipe says of paths. Out: blocks of rows, each a table
of the wanted properties. Must hold: row i of a block that begins at row f is row f + i of the source; a property has
one type in all blocks. Cost: kept columns are mapped; a block has at least one file, and stops at BLOCK_ROWS rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from torchmix.catalog.manifest import FileEntry, PropertiesEntry
from torchmix.catalog.properties.files import identity_of, open_table
from torchmix.catalog.store import SourceCatalog
from torchmix.errors import CatalogStale, RecipeError
from torchmix.recipe.build import nearest
from torchmix.recipe.source.properties import TOKENS

BLOCK_ROWS = 1 << 20
"""A block ends with the file in which it reaches this many rows."""


class PropertyRows:
    """All rows of one source with their properties."""

    def __init__(
        self,
        catalog_folder: Path,
        source: SourceCatalog,
        kept: PropertiesEntry | None,
        patterns: Mapping[str, str],
    ) -> None:
        """Take a source.

        Args:
            catalog_folder: Where the catalog lies.
            source: The source, open.
            kept: What the catalog keeps of its properties, if anything.
            patterns: Properties that follow from paths, with their regular expressions.
        """
        self._folder, self.source = catalog_folder, source
        self._patterns = {name: re.compile(pattern) for name, pattern in patterns.items()}
        self._tables: dict[str, tuple[str, ...]] = {}
        """Property -> the file in `properties` for each data file."""
        layers = [] if kept is None else [(tuple(kept.columns), kept.files)]
        layers += [] if kept is None else [(side.columns, side.files) for side in reversed(kept.side)]
        for names, files in layers:
            for name in names:
                self._tables[name] = tuple(files.get(identity_of(file), "") for file in source.files)
        self.names = tuple(sorted({TOKENS, *self._tables, *self._patterns}))
        """Names of all properties."""

    def check(self, names: Sequence[str], where: str) -> None:
        """Raise a RecipeError for a name that is no property; `where` is the path of keys."""
        for name in names:
            if name not in self.names:
                raise RecipeError(
                    f"{self.source.name!r} has no property {name!r}{nearest(name, self.names)}; it has "
                    f"{', '.join(self.names)}. Name a column of its files in `properties`, or join a table with "
                    "`torchmix properties add`",
                    where,
                )

    def blocks(self, names: Sequence[str]) -> Iterator[tuple[int, pa.Table]]:
        """The first row of each block, and the named properties of its rows, which `check` has passed.

        Raises:
            CatalogStale: Properties of a file are not kept yet.
            CatalogError: What is kept is damaged.
            RecipeError: The files hold values of types that do not fit together.
        """
        schema = self._schema(names)
        waiting: list[pa.Table] = []
        first = num_rows = 0
        for number, file in enumerate(self.source.files):
            waiting.append(self._of_file(number, file, schema))
            num_rows += file.num_rows
            if num_rows >= BLOCK_ROWS or number == len(self.source.files) - 1:
                yield first, pa.concat_tables(waiting)
                first, num_rows, waiting = first + num_rows, 0, []

    def whole(self, names: Sequence[str]) -> pa.Table:
        """All rows in one table; see `blocks`."""
        tables = [table for _, table in self.blocks(names)]
        return pa.concat_tables(tables) if tables else pa.table({name: pa.array([]) for name in names})

    def _schema(self, names: Sequence[str]) -> pa.Schema:
        fields = []
        for name in names:
            types = [self._table(name, number).schema.field(name).type for number in self._numbers(name)]
            fields.append(pa.field(name, self._one_type(name, types)))
        return pa.schema(fields)

    def _one_type(self, name: str, types: Sequence[pa.DataType]) -> pa.DataType:
        if name not in self._tables:
            return pa.int32() if name == TOKENS else pa.string()
        try:
            schemas = [pa.schema([pa.field("value", one)]) for one in dict.fromkeys(types)]
            return pa.unify_schemas(schemas, promote_options="permissive").field("value").type
        except pa.ArrowException:
            listed = ", ".join(sorted({str(one) for one in types}))
            raise RecipeError(
                f"property {name!r} is of types that do not fit together: {listed}; write its files alike",
                f"sources.{self.source.name}.properties",
            ) from None

    def _numbers(self, name: str) -> range:
        return range(len(self.source.files) if name in self._tables else 0)

    def _table(self, name: str, number: int) -> pa.Table:
        file = self._tables[name][number]
        if not file:
            raise CatalogStale(
                f"source {self.source.name!r}: the catalog lacks property {name!r} of "
                f"{self.source.files[number].path}; run torchmix index"
            )
        return open_table(self._folder, file)

    def _of_file(self, number: int, file: FileEntry, schema: pa.Schema) -> pa.Table:
        columns = []
        for field in schema:
            if field.name in self._tables:
                columns.append(self._table(field.name, number)[field.name].cast(field.type))
            elif field.name == TOKENS:
                tokens = self.source.sizes.tokens[file.first_row : file.first_row + file.num_rows]
                columns.append(pa.array(tokens))
            else:
                match = self._patterns[field.name].search(file.path)
                value = pa.scalar(None if match is None else match[1], pa.string())
                columns.append(pa.repeat(value, file.num_rows))
        return pa.table(columns, schema=schema)
