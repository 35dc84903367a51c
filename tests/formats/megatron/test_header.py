from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.indexed_datasets import CODES, HEADER, MAGIC, random_sequences, write_dataset
from torchmix.errors import SourceUnreadable
from torchmix.formats.megatron.files import HEADER_BYTES, IndexHeader, read_header
from torchmix.storage.random_access import LocalFile

TOKEN_DTYPES = [name for name in CODES if "float" not in name]


def header_of(path: Path) -> IndexHeader:
    file = LocalFile(path)
    try:
        return read_header(file)
    finally:
        file.close()


@pytest.mark.parametrize("dtype", TOKEN_DTYPES)
@pytest.mark.parametrize("modes", [None, [0, 1, 0, 0, 3]])
def test_a_header_says_what_the_files_hold_and_where(tmp_path, dtype, modes):
    sequences = random_sequences(1, 5, dtype=dtype)
    write_dataset(tmp_path / "web", sequences, dtype=dtype, documents=[0, 2, 2, 5], modes=modes)
    path = tmp_path / "web.idx"
    header = header_of(path)
    assert header == IndexHeader(
        num_bytes=path.stat().st_size,
        dtype=np.dtype(dtype),
        num_sequences=5,
        num_documents=3,
        has_modes=modes is not None,
    )
    file = LocalFile(path)
    try:
        assert header.lengths(file, 0, 5).tolist() == [len(sequence) for sequence in sequences]
        pointers = np.cumsum([0, *(sequence.nbytes for sequence in sequences)])[:5]
        assert header.pointers(file, 1, 4).tolist() == pointers[1:4].tolist()
        assert header.document_indices(file, 0, 4).tolist() == [0, 2, 2, 5]
        if modes is not None:
            assert header.modes(file, 0, 5).tolist() == modes
    finally:
        file.close()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "begins with b'', not with"),
        (b"PAR1" + bytes(60), "begins with b'PAR1.*no index of Megatron's"),
        (MAGIC[:5], "5 bytes, less than a header; it was cut"),
        (MAGIC + bytes(10), "19 bytes, less than a header"),
        (HEADER.pack(MAGIC, 2, 8, 0, 1) + bytes(8), "version 2, and 1 is read"),
        (HEADER.pack(MAGIC, 1, 6, 0, 1) + bytes(8), r"holds float64 \(dtype code 6\), which are no token ids"),
        (HEADER.pack(MAGIC, 1, 7, 0, 1) + bytes(8), r"holds float32 \(dtype code 7\), which are no token ids"),
        (HEADER.pack(MAGIC, 1, 9, 0, 1) + bytes(8), "dtype code 9, and 1 to 5 and 8 are token ids"),
        (HEADER.pack(MAGIC, 1, 8, 0, 0), "0 sequences and 0 document indices"),
        (HEADER.pack(MAGIC, 1, 8, 3, 4) + bytes(67), "has 101 bytes, but 3 sequences .* need 102, or with modes 105"),
        (HEADER.pack(MAGIC, 1, 8, 3, 4) + bytes(72), "has 106 bytes"),
        (HEADER.pack(MAGIC, 1, 8, 2**63, 2**63) + bytes(72), "it was cut or is still being written"),
    ],
)
def test_a_file_that_is_no_whole_index_is_named_with_what_it_is(tmp_path, content, says):
    (tmp_path / "web.idx").write_bytes(content)
    with pytest.raises(SourceUnreadable, match=says):
        header_of(tmp_path / "web.idx")


def test_every_length_but_the_two_right_ones_is_refused(tmp_path):
    write_dataset(tmp_path / "web", random_sequences(1, 7), modes=[0] * 7)
    content = (tmp_path / "web.idx").read_bytes()
    right = {len(content), len(content) - 7}
    for length in range(HEADER_BYTES, len(content) + 9):
        (tmp_path / "cut.idx").write_bytes((content + bytes(9))[:length])
        if length in right:
            assert header_of(tmp_path / "cut.idx").has_modes == (length == len(content))
        else:
            with pytest.raises(SourceUnreadable, match=f"has {length} bytes"):
                header_of(tmp_path / "cut.idx")
