"""Arrow files that are damaged before they are indexed: an error that says where, or what another reader reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.support.arrow_files import write_arrow
from torchmix.errors import CorruptPage
from torchmix.formats.arrow.messages import find_batches, open_arrow
from torchmix.formats.arrow.source import ArrowSource


def test_11_2_a_compressed_buffer_that_gives_fewer_bytes_than_it_says_is_damage(tmp_path: Path) -> None:
    """What is not written by lz4's decoder would be memory of something else."""
    rng = np.random.default_rng(1)
    values = np.concatenate([rng.integers(0, 2**31, 1000, np.int32), np.zeros(1000, np.int32)])
    lists = pa.ListArray.from_arrays(pa.array(np.arange(0, 2001, 10), pa.int32()), pa.array(values))
    path = write_arrow(tmp_path / "a.feather", pa.table({"ids": lists}), stream=False, codec="lz4", batch_rows=1000)
    source = ArrowSource(name="s", column="ids", kind="tokens")
    assert source.scan(path).tokens.tolist() == [10] * 200
    content, frame = path.read_bytes(), pa.compress(values.tobytes(), "lz4", asbytes=True)
    assert content.count(frame) == 1
    shorter = (pa.compress(rng.bytes(size), "lz4", asbytes=True) for size in range(3900, 4200))
    path.write_bytes(content.replace(frame, next(other for other in shorter if len(other) == len(frame))))
    with pytest.raises(pa.ArrowInvalid, match="fully decompress"):
        pa.ipc.open_file(str(path)).read_all()
    with pytest.raises(CorruptPage, match=r"a\.feather: the record batch at byte \d+, from row 0 on, does not decode"):
        source.scan(path)


def test_a_message_of_a_version_that_no_reader_knows_is_damage(tmp_path: Path) -> None:
    path = write_arrow(tmp_path / "a.arrow", pa.table({"ids": [[1, 2], [3]]}), stream=True)
    source = ArrowSource(name="s", column="ids", kind="tokens")
    assert source.scan(path).tokens.tolist() == [2, 1]
    content = bytearray(path.read_bytes())
    batch = content.index(b"\xff\xff\xff\xff", 8)
    table = batch + 8 + int.from_bytes(content[batch + 8 : batch + 12], "little")
    vtable = table - int.from_bytes(content[table : table + 4], "little", signed=True)
    version = table + int.from_bytes(content[vtable + 4 : vtable + 6], "little")
    assert content[version] == 4
    content[version] = 1
    path.write_bytes(content)
    with pytest.raises(pa.ArrowInvalid, match="version"):
        pa.ipc.open_stream(str(path)).read_all()
    with pytest.raises(CorruptPage, match="metadata is of version 2"):
        source.scan(path)


def test_a_batch_in_the_place_of_another_is_told_by_its_size_in_the_footer(tmp_path: Path) -> None:
    table = pa.table({"ids": [[i] * (40 if i < 5 else 3) for i in range(10)]})
    path = write_arrow(tmp_path / "a.arrow", table, batch_rows=5)
    source = ArrowSource(name="s", column="ids", kind="tokens")
    first, second = source_batches(path)
    content = bytearray(path.read_bytes())
    content[first : first + 400] = content[second : second + 400]
    path.write_bytes(content)
    with pytest.raises((pa.ArrowInvalid, OSError), match="body"):
        pa.ipc.open_file(str(path)).read_all()
    with pytest.raises(CorruptPage, match=rf"no whole message at byte {first}: its body has \d+ bytes, \d+ by the"):
        source.scan(path)


def source_batches(path: Path) -> list[int]:
    """Where the messages of the batches begin."""
    content = path.read_bytes()
    file = open_arrow(lambda offset, count: content[offset : offset + count], len(content))
    return [batch.offset for batch in find_batches(file, lambda a, n: content[a : a + n], None)]


@pytest.mark.parametrize("codec", [None, "zstd"], ids=["slices", "batch"])
def test_other_nulls_than_the_batch_counts_are_damage(tmp_path: Path, codec: str | None) -> None:
    """Text and tokens that damaged bits call null would be documents of no tokens."""
    rows = [None if i in (3, 77) else [i] for i in range(100)]
    bits = np.packbits([row is not None for row in rows], bitorder="little").tobytes()
    path = tmp_path / "a.arrow"
    table = pa.table({"ids": pa.array(rows, pa.list_(pa.int32()))})
    source = ArrowSource(name="s", column="ids", kind="tokens")
    write_arrow(path, table, codec=codec)
    content = path.read_bytes()
    assert content.count(bits) == 1, "zstd leaves so few bytes as they are"
    assert source.scan(path).tokens.sum() == 98
    path.write_bytes(content.replace(bits, bits[:-3] + bytes(3)))
    with pytest.raises(pa.ArrowInvalid, match="null_count"):
        pa.ipc.open_file(str(path)).read_all().validate(full=True)
    with pytest.raises(CorruptPage, match=r"\d+ of 100 rows are null by their bits, 2 by the batch"):
        source.scan(path)


def test_metadata_that_pyarrow_calls_damaged_is_so_wherever_the_damage_is(tmp_path: Path) -> None:
    table = pa.table({"other": [[1.5], [2.5]], "ids": [[1, 2], [3]], "text": ["a", "b"]})
    path = write_arrow(tmp_path / "a.arrow", table, stream=True)
    source = ArrowSource(name="s", column="ids", kind="tokens")
    content = path.read_bytes()
    batch = content.index(b"\xff\xff\xff\xff", 8)
    size = int.from_bytes(content[batch + 4 : batch + 8], "little")
    num_refused = 0
    for place in range(batch + 8, batch + 8 + size):
        damaged = bytearray(content)
        damaged[place] ^= 0x80
        path.write_bytes(damaged)
        try:
            pa.ipc.open_stream(str(path)).read_all()
        except (pa.ArrowException, OSError) as error:
            if "flatbuffers" in str(error):
                num_refused += 1
                with pytest.raises(CorruptPage, match=str(path)):
                    source.scan(path)
    assert num_refused > 20
