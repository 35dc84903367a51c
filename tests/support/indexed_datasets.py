"""Megatron datasets for tests: documents in, a .bin and a .idx out; and Megatron's own reader and builder of them.

`write_dataset` is written from the layout alone. `megatron_indexed` loads the file of megatron-core that defines the
format, without the package around it, whose import takes seconds and warns of what is not installed.
"""

from __future__ import annotations

import importlib.util
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.stand_ins import standing_in

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}
HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\x00\x00"


def random_sequences(
    seed: int, count: int, *, mean_tokens: float = 20.0, dtype: str = "uint16", empty: float = 0.05
) -> list[NDArray[Any]]:
    """Sequences of log-normal length over all ids of a dtype; a part `empty` of them has no tokens."""
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(np.log(mean_tokens), 0.8, count).astype(np.int64)
    lengths[rng.random(count) < empty] = 0
    info = np.iinfo(dtype)
    return [rng.integers(info.min, info.max, length, dtype, endpoint=True) for length in lengths.tolist()]


def write_dataset(
    prefix: Path,
    sequences: Sequence[Any],
    *,
    dtype: str = "uint16",
    documents: Sequence[int] | None = None,
    pointers: Sequence[int] | None = None,
    modes: Sequence[int] | None = None,
    content: bytes | None = None,
) -> Path:
    """Write `prefix`.bin and `prefix`.idx; returns the path of the .bin.

    Args:
        prefix: As Megatron's `--data-path` takes it; its folder is made.
        sequences: Tokens of each.
        dtype: The type of the tokens, and its code.
        documents: Document indices; by default each sequence is a document.
        pointers: First byte of each sequence; by default one after the other.
        modes: The mode of each sequence; makes it the multimodal variant.
        content: The .bin, where it is not the sequences one after the other.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    arrays = [np.asarray(sequence, dtype) for sequence in sequences]
    lengths = np.array([len(array) for array in arrays], "<i4")
    ends = np.cumsum(lengths, dtype=np.int64) * np.dtype(dtype).itemsize
    starts = np.concatenate([[0], ends])[: len(arrays)] if pointers is None else pointers
    borders = np.arange(len(arrays) + 1) if documents is None else documents
    parts = [
        HEADER.pack(MAGIC, 1, CODES[dtype], len(arrays), len(borders)),
        lengths.tobytes(),
        np.array(starts, "<i8").tobytes(),
        np.array(borders, "<i8").tobytes(),
        b"" if modes is None else np.array(modes, "<i1").tobytes(),
    ]
    prefix.with_name(prefix.name + ".idx").write_bytes(b"".join(parts))
    path = prefix.with_name(prefix.name + ".bin")
    path.write_bytes(b"".join(array.tobytes() for array in arrays) if content is None else content)
    return path


def documents_of(sequences: Sequence[NDArray[Any]], borders: Sequence[int]) -> list[NDArray[np.int64]]:
    """Sequences joined to documents, as int64."""
    return [
        np.concatenate([np.zeros(0, np.int64), *(sequence.astype(np.int64) for sequence in sequences[start:stop])])
        for start, stop in pairwise(borders)
    ]


@contextmanager
def megatron_indexed() -> Iterator[ModuleType]:
    """`megatron.core.datasets.indexed_dataset`, the real file, on stand-ins for what it needs of object storage."""
    folder = importlib.util.find_spec("megatron")
    assert folder is not None and folder.submodule_search_locations, "megatron-core is in constraints.txt"
    path = Path(next(iter(folder.submodule_search_locations))) / "core" / "datasets" / "indexed_dataset.py"
    storage, client, utils = (ModuleType(name) for name in ("storage", "client", "utils"))
    for name in ("S3Config", "ObjectStorageConfig"):
        setattr(storage, name, object)
    for name in ("cache_index_file", "dataset_exists", "get_index_cache_path", "get_object_storage_access"):
        setattr(storage, name, None)
    storage.parse_s3_path = None  # type: ignore[attr-defined]
    storage.is_object_storage_path = lambda path: False  # type: ignore[attr-defined]
    client.MultiStorageClientFeature = type("Off", (), {"is_enabled": staticmethod(lambda: False)})  # type: ignore[attr-defined]
    utils.log_single_rank = lambda *words: None  # type: ignore[attr-defined]
    stand_ins = {
        "megatron.core": ModuleType("megatron.core"),
        "megatron.core.datasets": ModuleType("megatron.core.datasets"),
        "megatron.core.datasets.object_storage_utils": storage,
        "megatron.core.msc_utils": client,
        "megatron.core.utils": utils,
    }
    with standing_in(stand_ins):
        spec = importlib.util.spec_from_file_location("megatron_indexed_dataset", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
