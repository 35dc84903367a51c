"""Pieces to their places by native calls: equal to the reference, and what is out of bounds is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.files import make_tokens_file, random_tokens
from tests.support.indexed_datasets import random_sequences, write_dataset
from tests.support.native import native_or_not
from tests.support.plans import random_plan, values_of
from tests.support.recipes import make_recipe
from torchmix.constructor.build import BlockPieces, pieces_of_replica
from torchmix.errors import NativeError
from torchmix.indexing.scan import index_recipe
from torchmix.native.calls import Gather, Locate
from torchmix.native.load import address_of, array_of, num_calls, run
from torchmix.reader.piece_copy import fill_from, write_padding
from torchmix.reader.protocol import NO_LABEL, BlankPiece, Filling, Tokens, WantedPieces
from torchmix.reader.reader import Reader

DTYPES = (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64)
BAD = (-1, -(2**31), 2**31, 2**32 - 1, 2**32, 2**40, -(2**40), 2**62)
LENGTH = 48
FORGED = (-1, -(2**62), 2**62, 2**63 - 1, 10**6)


def some_pieces(seed: int, dtype: type) -> tuple[BlockPieces, np.ndarray, np.ndarray]:
    """Pieces, and values with some that are no ids, in pieces and in padding."""
    rng = np.random.default_rng(seed)
    plan, documents = random_plan(seed, is_packed=seed % 3 > 0, align_tokens=(1, 4)[seed % 2], length=LENGTH)
    pieces = pieces_of_replica(plan, seed % 2)
    values, successors = values_of(pieces, documents, length=LENGTH, dtype=np.int64)
    info = np.iinfo(dtype)
    values = (values % min(info.max, 60_000)).astype(dtype)
    fitting = [one for one in BAD if info.min <= one <= info.max]
    for place in rng.integers(0, len(values), seed % 4 if fitting else 0):
        values[place] = np.array(rng.choice(np.array(fitting, object)), dtype)
    return pieces, values, successors


def outs_of(sizes: list[int]) -> list[Filling]:
    return [Filling(*(np.full(size, 7, np.int32) for _ in range(2))) for size in sizes]


def as_lists(outs: list[Filling]) -> list[list[int]]:
    return [field.tolist() for out in outs for field in out]


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_any_type_become_the_same_tokens_and_labels(dtype: type) -> None:
    before, num_blank = num_calls().get("tm_gather", 0), 0
    for seed in range(30):
        pieces, values, successors = some_pieces(seed, dtype)
        wanted, found = pieces.wanted(LENGTH), []
        cut = LENGTH * (seed % pieces.num_samples)
        for native in (True, False):
            outs = outs_of([cut, len(values) - cut])
            with native_or_not(native):
                write_padding(wanted, outs)
                tokens = Tokens(values=values, successors=successors)
                blank = fill_from(wanted, tokens, ~pieces.ends_document, outs)
            found.append((blank, as_lists(outs)))
        assert found[0] == found[1]
        num_blank += len(found[0][0])
    assert num_calls()["tm_gather"] == before + 2 * 30, "padding, and pieces"
    assert (num_blank > 0) == (dtype not in (np.uint8, np.uint16))


def test_places_without_a_piece_are_padding() -> None:
    none = np.zeros(0, np.int64)
    wanted = WantedPieces(
        source=none.astype(np.int32), row=none, epoch=none, start=none, tokens=none, places=none, num_places=6
    )
    for native in (True, False):
        outs = outs_of([2, 4])
        with native_or_not(native):
            write_padding(wanted, outs)
        assert as_lists(outs) == [[0] * 2, [NO_LABEL] * 2, [0] * 4, [NO_LABEL] * 4]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """Files that are mapped, of three types and two files each, and two sources of pages."""
    folder: Path = tmp_path_factory.mktemp("data")
    keys: dict[str, dict[str, object]] = {}
    for number, dtype in enumerate(("uint16", "int32", "uint8")):
        for file in range(2):
            sequences = random_sequences(10 * number + file, 80, mean_tokens=300, dtype=dtype, empty=0.1)
            write_dataset(folder / f"bin{number}{file}", sequences, dtype=dtype)
        keys[f"bin{number}"] = {"path": f"bin{number}*.idx", "tokens": None}
    for number in range(2):
        documents = random_tokens(number, 120, mean_tokens=200)
        make_tokens_file(folder / f"web{number}.parquet", documents, page_bytes=2000)
        keys[f"web{number}"] = {"path": f"web{number}.parquet"}
    recipe = make_recipe(dict.fromkeys(keys, "20%"), sources=keys)
    return Reader(index_recipe(recipe, folder), folder, cache_bytes=60_000)


def random_wanted(reader: Reader, seed: int) -> WantedPieces:
    """Pieces of all sources, some of no tokens, with gaps between them."""
    rng = np.random.default_rng(seed)
    lengths = [source.catalog.sizes.tokens for source in reader._sources]
    source = rng.integers(0, 3 if seed % 4 == 0 else 5, int(rng.integers(1, 60)))
    row = np.array([rng.integers(len(lengths[s])) for s in source])
    start = np.array([rng.integers(int(lengths[s][r]) + 1) for s, r in zip(source, row, strict=True)])
    tokens = np.array(
        [rng.integers(int(lengths[s][r]) - at + 1) for s, r, at in zip(source, row, start, strict=True)], np.int64
    )
    gaps = rng.integers(0, 4, len(source))
    places = np.cumsum(tokens + gaps) - tokens
    return WantedPieces(
        source=source.astype(np.int32),
        row=row,
        epoch=np.zeros(len(source), np.int64),
        start=start,
        tokens=tokens,
        places=places,
        num_places=int(places[-1] + tokens[-1] + 5),
    )


def test_a_reader_fills_and_reads_as_its_reference(reader: Reader) -> None:
    before = num_calls()
    for seed in range(60):
        wanted, found = random_wanted(reader, seed), []
        for native in (True, False):
            outs = outs_of([wanted.num_places])
            with native_or_not(native):
                filled, read = reader.fill(wanted, outs), reader.read(wanted)
            values = [read.values[a : a + n].tolist() for a, n in zip(wanted.places, wanted.tokens, strict=True)]
            found.append((filled.blank, as_lists(outs), values, read.values.dtype, read.successors.tolist()))
        assert found[0] == found[1]
    after = num_calls()
    assert after["tm_locate"] - before.get("tm_locate", 0) == 2 * 60, "one for each call of the reader"
    assert after["tm_gather"] - before.get("tm_gather", 0) >= 3 * 60


def test_what_is_mapped_takes_one_call_to_find_and_one_to_copy(reader: Reader) -> None:
    wanted = random_wanted(reader, 4)
    with native_or_not(True):
        outs, before = outs_of([wanted.num_places]), num_calls()
        reader.fill(wanted, outs, pads=False)
        after = num_calls()
    assert [after[name] - before[name] for name in ("tm_locate", "tm_gather")] == [1, 1]


def gather(**changed: tuple[int, int]) -> Gather:
    """A call of three pieces out of two runs, one with documents, into two outs; some of it changed."""
    held = {
        "values": np.arange(100, dtype=np.uint16),
        "paged": np.arange(50, dtype=np.int32),
        "offsets": np.array([0, 10, 30, 50]),
        "tokens": np.zeros((2, 40), np.int32),
        "labels": np.zeros((2, 40), np.int32),
    }
    runs = [
        (address_of(held["values"]), 100, 2, 0, 0),
        (address_of(held["paged"]), 50, -4, address_of(held["offsets"]), 4),
    ]
    outs = [(address_of(held["tokens"][k]), address_of(held["labels"][k]), 40 * k, 40) for k in range(2)]
    arrays = {
        "runs": np.array(runs).reshape(-1),
        "outs": np.array(outs).reshape(-1),
        "piece": np.arange(3),
        "run": np.array([0, 1, 0]),
        "begin": np.array([5, 0, 70]),
        "row": np.array([0, 1, 0]),
        "start": np.array([0, 3, 0]),
        "length": np.array([20, 15, 30]),
        "place": np.array([0, 25, 45]),
        "successor": np.zeros(3, np.int64),
        "odd": np.zeros(12, np.int64),
        "gap_place": np.array([0, 25, 45]),
        "gap_length": np.array([20, 15, 30]),
    }
    goes_on = np.array([True, True, False])
    for name, (place, value) in changed.items():
        arrays[name][place] = value
    call = Gather(
        **{name: array_of(array, np.int64) for name, array in arrays.items()},
        goes_on=array_of(goes_on, np.bool_),
        blanks=1,
        type=-4,
        no_loss=NO_LABEL,
    )
    call.held = (held, arrays, goes_on)  # type: ignore[attr-defined]
    return call


def test_the_call_that_is_forged_below_is_taken_as_it_is() -> None:
    with native_or_not(True):
        call = gather()
        assert run(call) == 0 and call.num_odd == 0
    held, arrays, _ = call.held  # type: ignore[attr-defined]
    assert held["tokens"][0, :20].tolist() == list(range(5, 25)) and held["labels"][0, 19] == 25
    assert held["tokens"][0, 25:].tolist() == list(range(13, 28)) and held["labels"][0, 39] == 28
    assert held["tokens"][1, 5:35].tolist() == list(range(70, 100)) and held["labels"][1, 34] == NO_LABEL
    assert arrays["successor"].tolist() == [25, 28, 0]


@pytest.mark.parametrize("value", FORGED)
@pytest.mark.parametrize(
    "name", ["piece", "run", "begin", "row", "start", "length", "place", "gap_place", "gap_length"]
)
def test_forged_numbers_of_pieces_are_refused(name: str, value: int) -> None:
    at = {"begin": 0, "row": 1, "start": 1}.get(name, 2)
    with native_or_not(True):
        call = gather(**{name: (at, value)})
        if name == "start":
            assert run(call) == Gather.OTHER_ROWS and call.fault_at == 1
            return
        with pytest.raises(NativeError, match=r"tm_gather refuses entry -?\d+"):
            run(call)


@pytest.mark.parametrize(
    ("name", "at", "value"),
    [
        ("runs", 1, 20),
        ("runs", 2, 3),
        ("runs", 6, 20),
        ("runs", 9, 2),
        ("outs", 2, 1),
        ("outs", 6, 39),
        ("outs", 3, -1),
    ],
)
def test_forged_arrays_of_tokens_are_refused(name: str, at: int, value: int) -> None:
    with native_or_not(True), pytest.raises(NativeError, match="tm_gather refuses"):
        run(gather(**{name: (at, value)}))


def test_forged_documents_of_a_page_are_refused() -> None:
    for value in (*FORGED, 51):
        with native_or_not(True):
            call = gather()
            call.held[0]["offsets"][2] = value  # type: ignore[attr-defined]
            with pytest.raises(NativeError, match="documents lie outside"):
                run(call)


def locate(reader: Reader, wanted: WantedPieces, **changed: tuple[int, int]) -> Locate:
    """A call of a reader, with some of it changed."""
    n = len(wanted)
    table = reader._locator._table_of(reader._mapped.token_bytes).copy()
    arrays = {"row": wanted.row, "start": wanted.start, "tokens": wanted.tokens, "order": np.arange(n)}
    arrays = {name: array.copy() for name, array in arrays.items()} | {"sources": table.reshape(-1)}
    arrays |= {"columns": np.zeros(8 * n, np.int64), "first_piece": np.zeros(n, np.int64)}
    source, goes_on = wanted.source.copy(), np.zeros(n, np.bool_)
    for name, (at, value) in changed.items():
        (source if name == "source" else arrays[name])[at] = value
    call = Locate(
        **{name: array_of(array, np.int64) for name, array in arrays.items()},
        source=array_of(source, np.int32),
        goes_on=array_of(goes_on, np.bool_),
    )
    call.held = (arrays, source, goes_on)  # type: ignore[attr-defined]
    return call


def test_forged_pieces_are_located_nowhere(reader: Reader) -> None:
    wanted = random_wanted(reader, 4)
    with native_or_not(True):
        assert run(locate(reader, wanted)) == 0
        for value in FORGED:
            for name in ("row", "start", "tokens"):
                assert run(locate(reader, wanted, **{name: (0, value)})) == 1, "outside, as the reference says"
            with pytest.raises(NativeError, match="the order names no piece"):
                run(locate(reader, wanted, order=(0, value)))
        for value in (-1, 5, 2**31 - 1):
            with pytest.raises(NativeError, match="there is no such source"):
                run(locate(reader, wanted, source=(0, value)))
        s = int(wanted.source[0])
        for column, value in ((4, 0), (9, 0), (12, 0)):  # pages, chunks and files of the first source
            with pytest.raises(NativeError, match="tm_locate refuses"):
                run(locate(reader, wanted, sources=(13 * s + column, value)))


def test_arrays_of_other_lengths_are_refused() -> None:
    with native_or_not(True):
        for name in ("begin", "row", "start", "place", "successor", "odd", "run", "runs", "outs"):
            call = gather()
            getattr(call, name).n -= 1
            with pytest.raises(NativeError, match="tm_gather refuses"):
                run(call)


def test_the_first_value_that_is_no_id_is_named() -> None:
    with native_or_not(True):
        call = gather()
        call.held[0]["paged"][[15, 17]] = [-5, -6]  # type: ignore[attr-defined]
        assert run(call) == 0 and call.num_odd == 1
    odd = call.held[1]["odd"].tolist()  # type: ignore[attr-defined]
    assert odd[:4] == [1, Gather.ODD_NO_ID, 2, -5]
    assert BlankPiece(1, 2, -5).value == -5
