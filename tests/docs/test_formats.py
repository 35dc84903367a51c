"""The code against the frozen vectors of docs/vectors.json: a difference here is another version of a format."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from tests.support.book_order import BookSource
from tests.support.plans import build_tensors, values_of
from tests.writers.write_vectors import bytes_of_columns
from torchmix.catalog.manifest import FileEntry, source_fingerprint
from torchmix.catalog.sizes import SourceSizes
from torchmix.constructor.build import BlockPieces
from torchmix.constructor.fields import batch_of_role, cp_slices
from torchmix.mixture.keys import hash_columns, keyed_order, mix64, named_key, order_by, permute
from torchmix.mixture.order import SourceOrder
from torchmix.mixture.shares import integer_shares
from torchmix.parallel.place_tree import Role
from torchmix.parallel.wire import (
    STAGES,
    Block,
    Envelope,
    decode_envelope,
    decode_payload,
    encode_envelope,
    encode_payload,
)
from torchmix.planner.pack import Pieces, piece_hashes
from torchmix.planner.plan import name_hash
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.load import load_recipe
from torchmix.recipe.sources import PARTS, documents_of_split, rows_of
from torchmix.recipe.structs import (
    Packing,
    Source,
)
from torchmix.steps.state import decode_state, encode_state
from torchmix.transform.bytes_tokenizer import tokenize

VECTORS = json.loads((Path(__file__).parents[2] / "docs" / "vectors.json").read_text(encoding="utf-8"))
SOURCES = {name: BookSource(name=name, **sizes) for name, sizes in VECTORS["sources"].items()}


def sizes_of(source: BookSource) -> SourceSizes:
    return SourceSizes(
        first_row_of_page=np.array(source.first_row_of_page, np.int64),
        tokens=np.array(source.tokens, np.int32),
        window_pages=source.window_pages,
    )


def u64(texts: list[str]) -> np.ndarray:
    return np.array([int(text, 16) for text in texts], np.uint64)


@pytest.mark.parametrize("vector", VECTORS["named_key"])
def test_named_keys(vector: dict[str, Any]) -> None:
    assert named_key(vector["seed"], *vector["path"]) == int(vector["key"], 16)


def test_hashes_of_names_and_values() -> None:
    for vector in VECTORS["name_hash"]:
        assert name_hash(vector.get("stream", vector["name"]), vector["name"]) == int(vector["hash"], 16)
    for vector in VECTORS["mix64"]:
        assert mix64(u64([vector["in"]])).tolist() == [int(vector["out"], 16)]
    for vector in VECTORS["hash_columns"]:
        columns = [np.array([value], np.int64) for value in vector["columns"]]
        assert hash_columns(int(vector["key"], 16), *columns).tolist() == [int(vector["hash"], 16)]


def test_orders_and_permutations() -> None:
    for vector in VECTORS["keyed_order"]:
        assert keyed_order(int(vector["key"], 16), vector["count"]).tolist() == vector["order"]
    for vector in VECTORS["order_by"]:
        majors = np.array(vector["majors"], np.uint64)
        assert order_by(majors, u64(vector["ties"]), major_bits=vector["major_bits"]).tolist() == vector["order"]
    for vector in VECTORS["permute"]:
        positions = np.array(vector["positions"], np.int64)
        assert permute(positions, vector["n"], int(vector["key"], 16)).tolist() == vector["images"]


@pytest.mark.parametrize("vector", VECTORS["window"])
def test_windows(vector: dict[str, Any]) -> None:
    order = SourceOrder(vector["source"], sizes_of(SOURCES[vector["source"]]), seed=vector["seed"])
    assert order.pages(vector["epoch"], vector["window"]).tolist() == vector["pages"]
    assert order.window(vector["epoch"], vector["window"]).rows.tolist() == vector["rows"]


@pytest.mark.parametrize("vector", VECTORS["row_window"])
def test_windows_of_rows(vector: dict[str, Any]) -> None:
    sizes = SourceSizes(
        first_row_of_page=np.array([0, vector["num_rows"]], np.int64),
        tokens=np.ones(vector["num_rows"], np.int32),
        window_pages=1,
    )
    order = SourceOrder(vector["source"], sizes, seed=vector["seed"], method="row")
    rows = order.window(vector["epoch"], vector["window"]).rows
    assert (len(rows), rows[:20].tolist()) == (vector["count"], vector["first"])


def test_integer_shares() -> None:
    for vector in VECTORS["integer_shares"]:
        shares = {name: Fraction(share) for name, share in vector["shares"].items()}
        assert dict(zip(sorted(shares), integer_shares(shares).tolist(), strict=True)) == vector["integers"]


def test_hashes_of_pieces() -> None:
    for vector in VECTORS["piece_hash"]:
        numbers = {name: np.array([vector.get(name, 0)]) for name in ("epoch", "row", "start", "tokens", "drawn_step")}
        pieces = Pieces(
            **numbers, stream=np.zeros(1, np.int64), source=np.zeros(1, np.int64), document_tokens=np.ones(1, np.int64)
        )
        names = np.array([name_hash(vector["source"], vector["source"])], np.uint64)
        hashes = piece_hashes(vector["seed"], vector["step"], names, pieces)
        assert hashes.tolist() == [int(vector["hash"], 16)]


def test_fingerprint_of_a_recipe(tmp_path: Path) -> None:
    for vector in VECTORS["recipe_fingerprint"]:
        path = tmp_path / "recipe.yaml"
        path.write_text(vector["recipe"], encoding="utf-8")
        assert recipe_fingerprint(load_recipe(path)) == vector["fingerprint"]


def test_fingerprint_of_a_source() -> None:
    for vector in VECTORS["source_fingerprint"]:
        unused = {
            "path": "",
            "first_row": 0,
            "num_rows": 0,
            "num_pages": 0,
            "split_pages": 0,
            "tail_bytes": 0,
            "whole_chunks": False,
            "schema": 0,
            "ids": None,
        }
        files = [FileEntry(num_bytes=size, footer_hash=footer, **unused) for size, footer in vector["files"]]
        found = source_fingerprint(files, vector["column"], vector["transform_id"], vector["window_pages"])
        assert found == vector["fingerprint"]


def test_bounds_of_a_split() -> None:
    for vector in VECTORS["split"]:
        for part, rows in zip(PARTS, vector["rows"], strict=True):
            documents = documents_of_split(vector["weights"], part)
            assert (documents is None) == (rows is None)
            if documents is not None:
                assert list(rows_of(Source(path="none", documents=documents), vector["num_rows"])) == rows


@pytest.mark.parametrize("vector", VECTORS["state"], ids=lambda vector: f"step-{vector['fields']['at']['step']}")
def test_bytes_of_a_state(vector: dict[str, Any]) -> None:
    data, fields = bytes.fromhex(vector["bytes"]), bytes_of_columns(vector["fields"])
    again = decode_state(data, recipe=fields["recipe"])
    assert encode_state(again) == data
    assert msgspec.msgpack.decode(data[23:]) == fields
    at = vector["fields"]["at"]
    for place, columns in (("position", at["position"]), ("pool", at["pool"])):
        for name, column in columns.items():
            assert getattr(getattr(again.at, place), name).tolist() == column


def test_bytes_of_an_exchange() -> None:
    for vector in VECTORS["wire"]:
        envelope = Envelope(**vector["fields"])
        assert encode_envelope(envelope).tolist() == vector["envelope"]
        role = Role(stage=STAGES[envelope.stage], cp_rank=envelope.cp_rank)
        received = np.array(vector["envelope"], np.int64)
        expected = {"sequence": envelope.sequence, "leader": envelope.leader, "replica": envelope.replica}
        assert decode_envelope(received, **expected, role=role) == envelope
        blocks = [
            Block(
                name=array["name"],
                dtype=array["dtype"],
                shape=tuple(array["shape"]),
                values=np.frombuffer(bytes.fromhex(array["bytes"]), np.uint8),
            )
            for array in vector["arrays"]
        ]
        description_bytes, payload = encode_payload(bytes.fromhex(vector["header"]), blocks)
        assert (description_bytes, payload.tobytes().hex()) == (envelope.description_bytes, vector["payload"])
        header, found = decode_payload(envelope, payload)
        assert header.hex() == vector["header"]
        assert [(block.name, block.dtype, list(block.shape), block.values.tobytes().hex()) for block in found] == [
            (array["name"], array["dtype"], array["shape"], array["bytes"]) for array in vector["arrays"]
        ]


@pytest.mark.parametrize("vector", VECTORS["tensors"], ids=lambda vector: vector["name"])
def test_tensors_of_small_samples(vector: dict[str, Any]) -> None:
    sample, offset, source, document, start, tokens = (
        np.array(column) for column in zip(*vector["pieces"], strict=True)
    )
    documents = {int(number): ids for number, ids in vector["documents"].items()}
    pieces = BlockPieces(
        steps=(0,),
        num_tokens_global=(0,),
        num_samples=vector["micro_batch_size"],
        micro_batch_size=vector["micro_batch_size"],
        sample=sample,
        sample_offset=offset,
        source=source.astype(np.int32),
        row=document,
        start=start,
        tokens=tokens,
        epoch=np.zeros_like(tokens),
        ends_document=start + tokens == [len(documents[number]) for number in document.tolist()],
    )
    packing = Packing(method=vector["method"], boundaries=vector["boundaries"], align_tokens=vector["align_tokens"])
    step = build_tensors(
        pieces,
        *values_of(
            pieces,
            {(int(s), d): documents[d] for s, d in zip(source, document.tolist(), strict=True)},
            length=vector["length"],
        ),
        length=vector["length"],
        packing=packing,
    )
    microbatch = step.microbatch(0)
    for name in ("tokens", "labels", "loss_mask", "position_ids", "source_index", "cu_seqlens", "cu_seqlens_padded"):
        assert getattr(microbatch, name).tolist() == vector[name], name
    assert microbatch.max_seqlen == vector["max_seqlen"]
    slices = cp_slices(step, 2, length=vector["length"], packing=packing)
    for cp_rank, wanted in enumerate(vector["tokens_of_cp_rank"]):
        share = batch_of_role(step, Role(stage="only", cp_rank=cp_rank), slices)
        assert share.microbatch(0).tokens.tolist() == wanted


def test_tokens_of_texts() -> None:
    vectors = VECTORS["bytes_tokenizer"]
    ids, offsets = tokenize(pa.array([vector["text"] for vector in vectors], pa.string()))
    found = [ids[start:stop].tolist() for start, stop in pairwise(offsets)]
    assert found == [vector["tokens"] for vector in vectors]
