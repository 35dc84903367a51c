"""Bytes of data pages -> an Arrow array, by pyarrow's own decoder.

    PAR1 | dictionary page | opening page | data pages | footer: one column, one chunk | footer's length | PAR1

pyarrow refuses a page that begins inside a row. Where the first one does, a page of one value is put before it, which
begins a row: what is left of the row before then belongs to that one, and it is dropped. This opening page is of
version 2, which may leave its value uncompressed in a chunk of any codec.

The rows are those the whole file gives, in list<..> and string types (what a writer's Arrow schema adds is left out:
fixed sizes, dictionaries, large offsets). The writer's checksums are verified, unless the bytes are known to be those
that were indexed. Only public, documented pyarrow is used. Cost: decompression and decoding as pyarrow does them, about
100 us per call and 10 us per page.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import replace

from torchmix.errors import CorruptPage
from torchmix.formats.parquet import thrift
from torchmix.formats.parquet.footer import MAGIC, Leaf, PageHeader, read_page_header
from torchmix.formats.source import PageRun

_LIST_OF_ONE_STRUCT = bytes([1 << 4 | thrift.STRUCT])
_REQUIRED, _DATA_PAGE_V2, _PLAIN, _FIXED_BYTES = 0, 3, 0, 7
_BYTES, _UTF8 = 6, 0
_NUM_CHILDREN, _CONVERTED, _LOGICAL = 5, 6, 10  # fields of a SchemaElement
_MAPS, _LOGICAL_MAP = (1, 2), 2
_MOST_VALUE_BYTES = 12  # of a plain value of variable size, where a size comes first


def encode_schema(leaf: Leaf, created_by: str) -> bytes:
    """What an in-memory file needs of the real one: the leaf's schema, and the writer, whose bugs pyarrow works around.

    Returns:
        A FileMetaData of these two fields, encoded.
    """
    root = thrift.write_struct([(4, thrift.BINARY, b"schema"), (5, thrift.I32, 1)])
    elements = thrift.write_list(thrift.STRUCT, [root, *map(_without_annotation, leaf.elements)])
    return thrift.write_struct([(2, thrift.LIST, elements), (6, thrift.BINARY, created_by.encode())])


def _without_annotation(element: bytes) -> bytes:
    """A SchemaElement that pyarrow reads as it lies.

    A text of JSON would come as an extension type, and is plain bytes; of a map one of its two children alone is there,
    which pyarrow refuses, and takes as a list of structs.
    """
    fields, _ = thrift.read_struct(element)
    converted, logical = fields.get(_CONVERTED), fields.get(_LOGICAL, {})
    is_map = _NUM_CHILDREN in fields and (converted in _MAPS or _LOGICAL_MAP in logical)
    is_text_of_a_kind = fields.get(1) == _BYTES and (converted is not None or logical) and converted != _UTF8
    if not is_map and not is_text_of_a_kind:
        return element
    types = {1: thrift.I32, 2: thrift.I32, 3: thrift.I32, 4: thrift.BINARY, 5: thrift.I32}
    return thrift.write_struct([(number, type, fields[number]) for number, type in types.items() if number in fields])


def decode_pages(run: PageRun) -> list[pa.Array]:
    """Rows of a run, as arrays of `run.num_rows` rows together, mostly one.

    Raises:
        CorruptPage: the bytes do not decode, or to another number of rows.
    """
    num_read = run.begins_inside_row + run.num_rows + run.rows_behind
    column = _decode(run, num_read + 1)
    if len(column) != num_read:
        raise CorruptPage(
            f"pages at bytes [{run.offset}, {run.offset + len(run.pages)}) hold {len(column)} rows, not "
            f"{num_read} as the index or the catalog says; the file is damaged or was changed, index it again"
        )
    arrays: list[pa.Array] = column.slice(int(run.begins_inside_row), run.num_rows).chunks
    return arrays


def decode_parts_of_rows(run: PageRun) -> list[pa.Array]:
    """As `decode_pages`, where the number of rows is not known and `begins_inside_row` may or may not be so.

    Returns:
        With `begins_inside_row` the first row is one value that is not in the file, and then the end of the row before,
        if the run begins inside one; the last row may continue behind the run.
    """
    arrays: list[pa.Array] = _decode(run, sum(header.num_values for header in read_headers(run)) + 1).chunks
    return arrays


def _decode(run: PageRun, most_rows: int) -> pa.ChunkedArray:
    try:
        return _open(run, read_headers(run), most_rows).read(use_threads=False).column(0)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, MemoryError):
            raise
        raise _find_damage(run, most_rows, error) from None


def read_headers(run: PageRun) -> list[PageHeader]:
    """Headers of a run's data pages; their positions count from the start of the run.

    Raises:
        CorruptPage: the run is not a sequence of whole pages.
    """
    headers, position = [], 0
    try:
        while position < len(run.pages):
            header = read_page_header(run.pages, position)
            if header.stop > len(run.pages):
                raise EOFError(f"page of {header.stop - position} bytes")
            if header.is_data:
                headers.append(header)
            position = header.stop
    except (EOFError, ValueError) as error:
        raise CorruptPage(
            f"no whole page at byte {run.offset + position}, in the run of pages at bytes "
            f"[{run.offset}, {run.offset + len(run.pages)}): {error}; the file is damaged, restore it"
        ) from None
    return headers


class _Envelope(NamedTuple):
    """The parts of the footer that all runs of a chunk share; between them come their sizes."""

    head: bytes
    chunk: bytes
    tail: bytes
    opening_page: bytes
    """A page before all others of a column with lists: one row that continues in the pages behind it."""


@lru_cache(maxsize=1024)
def _envelope(schema: bytes, codec: int) -> _Envelope:
    _, position = thrift.find_field(schema, 0, 2)
    elements_start = position
    _, num_elements, position = thrift.read_list_head(schema, position)
    elements = []
    for _ in range(num_elements):
        element, position = thrift.read_struct(schema, position)
        elements.append(element)
    created_by = thrift.read_struct(schema)[0][6]
    repetitions = [element[3] for element in elements[1:]]
    names = [thrift.write_varint(len(element[4])) + element[4] for element in elements[1:]]
    any_encoding = thrift.write_list(thrift.I32, [b"\x00"])  # a list that must be there; pages name their own
    metadata = thrift.write_struct(
        [
            (1, thrift.I32, elements[-1][1]),
            (2, thrift.LIST, any_encoding),
            (3, thrift.LIST, thrift.write_list(thrift.BINARY, names)),
            (4, thrift.I32, codec),
        ],
        end=False,
    )
    chunk = thrift.write_struct([(2, thrift.I64, 0), (3, thrift.STRUCT, metadata)], end=False)
    group = thrift.write_struct([(1, thrift.LIST, _LIST_OF_ONE_STRUCT + chunk)], end=False)
    return _Envelope(
        head=thrift.write_struct([(1, thrift.I32, 2), (2, thrift.LIST, schema[elements_start:position])], end=False),
        chunk=thrift.write_struct([(4, thrift.LIST, _LIST_OF_ONE_STRUCT + group)], after=3, end=False),
        tail=thrift.write_struct([(6, thrift.BINARY, created_by)], after=4),
        opening_page=_opening_page(
            most_definition=len(repetitions) - repetitions.count(_REQUIRED),
            value_bytes=elements[-1].get(2, 0) if elements[-1][1] == _FIXED_BYTES else _MOST_VALUE_BYTES,
        ),
    )


def _opening_page(*, most_definition: int, value_bytes: int) -> bytes:
    """A page of one row of one value, of any list column: zero, or nothing."""
    one_level = b"\x02"  # a run of length 1
    repetition = one_level + b"\x00"
    definition = one_level + bytes([most_definition])
    body = repetition + definition + bytes(value_bytes)
    sizes = [1, 0, 1, _PLAIN, len(definition), len(repetition)]  # values, nulls, rows, encoding, levels
    fields = [(number, thrift.I32, size) for number, size in enumerate(sizes, start=1)]
    data_header = thrift.write_struct(fields, end=False) + bytes([1 << 4 | thrift.FALSE, 0])  # is_compressed
    header = [(1, thrift.I32, _DATA_PAGE_V2), (2, thrift.I32, len(body)), (3, thrift.I32, len(body))]
    return thrift.write_struct([*header, (8, thrift.STRUCT, data_header)]) + body


def _open(run: PageRun, headers: list[PageHeader], num_rows: int) -> pq.ParquetFile:
    """Put the file in memory together and let pyarrow parse its footer; `num_rows` is the most that will be read."""
    envelope = _envelope(run.schema, run.kind)
    opening_page = envelope.opening_page if run.begins_inside_row else b""
    num_bytes = len(run.companion) + len(opening_page) + len(run.pages)
    decoded_bytes = len(opening_page) + sum(header.decoded_bytes for header in headers)
    sizes = [
        (5, thrift.I64, run.begins_inside_row + sum(header.num_values for header in headers)),
        (6, thrift.I64, decoded_bytes),
        (7, thrift.I64, num_bytes),
        (9, thrift.I64, len(MAGIC) + len(run.companion)),
    ]
    if len(run.companion):
        sizes.append((11, thrift.I64, len(MAGIC)))
    footer = b"".join(
        [
            envelope.head,
            thrift.write_struct([(3, thrift.I64, num_rows)], after=2, end=False),
            envelope.chunk,
            thrift.write_struct(sizes, after=4),
            b"\x00",  # ends the ColumnChunk
            thrift.write_struct([(2, thrift.I64, decoded_bytes), (3, thrift.I64, num_rows)], after=1),
            envelope.tail,
        ]
    )
    content = b"".join(
        [MAGIC, run.companion, opening_page, run.pages, footer, len(footer).to_bytes(4, "little"), MAGIC]
    )
    return pq.ParquetFile(pa.BufferReader(content), pre_buffer=False, page_checksum_verification=not run.is_as_indexed)


def _find_damage(run: PageRun, most_rows: int, error: Exception) -> CorruptPage:
    """Name the first page that does not decode, by halving the run; each half begins where the run does."""
    if len(run.companion) and not _is_sound_dictionary(run.companion):
        return CorruptPage(
            f"the dictionary page of the column chunk around byte {run.offset} has a wrong header or "
            "checksum; the file is damaged, restore it"
        )
    stops = [header.stop for header in read_headers(run)]
    sound, damaged = 0, len(stops)  # numbers of pages that decode, and that do not
    while damaged - sound > 1:
        middle = (sound + damaged) // 2
        half = replace(run, pages=run.pages[: stops[middle - 1]])
        try:
            _open(half, read_headers(half), most_rows).read(use_threads=False)
            sound = middle
        except (pa.ArrowException, OSError) as earlier:
            error, damaged = earlier, middle
    start, stop = [0, *stops][sound], stops[damaged - 1]
    rows = (
        f"within rows [{run.first_row}, {run.first_row + run.num_rows})"
        if run.num_rows
        else f"from row {run.first_row} on"
    )
    return CorruptPage(
        f"the page at bytes [{run.offset + start}, {run.offset + stop}), {rows}, does not decode: "
        f"{' '.join(str(error).split()).rstrip('.')}; the file is damaged, restore it"
    )


def _is_sound_dictionary(page: bytes | memoryview) -> bool:
    try:
        header = read_page_header(page, 0)
    except (EOFError, ValueError):
        return False
    body = page[header.body : header.stop]
    return header.is_dictionary and (header.checksum is None or zlib.crc32(body) == header.checksum)
