"""`get_batch` in the layouts of both scripts, for packed and dense batches and for every kind of stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.fake_megatron import FIELDS_OF_CORE, NEWER_KEYS, default_args, installed, script_of
from tests.support.microbatches import make_microbatch
from torchmix.megatron_adapter import batch, get_batch
from torchmix.megatron_adapter.batch import Needs
from torchmix.megatron_adapter.losses import SourceLosses
from torchmix.megatron_adapter.microbatches import Item, item_of

ALL = Needs(tokens=True, labels=True)


def item(*, packed: bool = True, part: str = "train") -> Item:
    """Two samples of 8 tokens: documents of 3 (padded to 4) and 4 tokens, then one of 8."""
    sequence = torch.arange(16, dtype=torch.int32).view(2, 8)
    labels = sequence + 1
    labels[0, 3] = -100
    microbatch = make_microbatch(
        tokens_int32=sequence,
        labels_int32=labels,
        spans=torch.tensor([[0, 0, 0], [3, 0, -1], [4, 0, 1], [8, 0, 0]], dtype=torch.int32),
        cu_seqlens=torch.tensor([0, 3, 7, 15], dtype=torch.int32),
        cu_seqlens_padded=torch.tensor([0, 4, 8, 16], dtype=torch.int32),
        max_seqlen=8,
        step=3,
        index=1,
    )
    return item_of(microbatch, part=part, packed=packed)


@pytest.fixture
def megatron() -> Iterator[None]:
    with installed(default_args(), core=True):
        yield


def call(layout: str, given: Item) -> Any:
    script = script_of(layout)
    return get_batch(script)(iter([given]), None)


@pytest.mark.parametrize("layout", ["0.18", "0.20"])
def test_the_ten_fields_of_newer_scripts_are_packed(layout: str, megatron: None) -> None:
    fields = dict(zip(NEWER_KEYS, call(layout, item()), strict=True))
    assert fields["tokens"].tolist() == [list(range(16))]
    assert fields["labels"].tolist() == [[1, 2, 3, 0, *range(5, 17)]]
    assert fields["loss_mask"].tolist() == [[1, 1, 1, 0, *[1] * 12]]
    assert fields["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 2, 3, *range(8)]]
    assert {fields[name].dtype for name in ("tokens", "labels", "position_ids")} == {torch.int64}
    assert fields["cu_seqlens"].tolist() == [[0, 3, 7, 15]], "true lengths, from which Megatron counts FLOPs"
    assert fields["cu_seqlens_padded"].tolist() == [[0, 4, 8, 16]]
    assert fields["cu_seqlens"].dtype == fields["cu_seqlens_padded"].dtype == fields["max_seqlen"].dtype == torch.int32
    assert (fields["max_seqlen"].dim(), int(fields["max_seqlen"].item())) == (1, 8)
    assert [name for name in NEWER_KEYS if fields[name] is None] == [
        "attention_mask",
        "hybrid_cp_group",
        "local_cp_size",
    ]


@pytest.mark.parametrize("layout", ["0.16", "dev"])
def test_the_tuples_of_core_016_and_dev_have_padded_boundaries(layout: str, megatron: None) -> None:
    tokens, labels, loss_mask, attention_mask, position_ids, params, *rest = call(layout, item())
    assert rest == ([None] if layout == "dev" else []), "padding_mask, which dev has for its varlen data alone"
    assert tokens.shape == labels.shape == loss_mask.shape == position_ids.shape == (1, 16)
    assert attention_mask is None
    assert params.qkv_format == "thd"
    for boundaries in (params.cu_seqlens_q, params.cu_seqlens_kv, params.cu_seqlens_q_padded):
        assert boundaries.tolist() == [0, 4, 8, 16]
    assert params.max_seqlen_q == params.max_seqlen_kv == 8


@pytest.mark.parametrize("layout", FIELDS_OF_CORE)
def test_dense_batches_keep_their_rows_and_have_no_boundaries(layout: str, megatron: None) -> None:
    result = call(layout, item(packed=False))
    fields = dict(zip(FIELDS_OF_CORE[layout], result, strict=True))
    assert fields["tokens"].shape == fields["labels"].shape == (2, 8)
    given = {name for name, value in fields.items() if value is not None}
    assert given == {"tokens", "labels", "loss_mask", "position_ids"}


@pytest.mark.parametrize(
    ("needs", "names"),
    [
        (Needs(tokens=True, labels=False), {"tokens", "position_ids"}),
        (Needs(tokens=False, labels=True), {"labels", "loss_mask"}),
        (Needs(tokens=False, labels=False), set()),
        (ALL, {"tokens", "position_ids", "labels", "loss_mask"}),
    ],
)
def test_each_stage_gets_its_own_and_all_get_boundaries(needs: Needs, names: set[str]) -> None:
    assert set(batch.fields_of(item(), needs)) == names | {"cu_seqlens", "cu_seqlens_padded", "max_seqlen"}
    assert set(batch.fields_of(item(packed=False), needs)) == names


def test_sources_are_tied_to_a_mask_that_is_not_the_items_own(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = SourceLosses(part="train", names=["a"], is_due=lambda: False)
    monkeypatch.setitem(batch.losses_of_part, "train", losses)
    for packed in (True, False):
        given = item(packed=packed)
        before = dict(given)
        mask = batch.fields_of(given, ALL)["loss_mask"]
        assert given.keys() == before.keys(), "Megatron may keep and replay the item"
        assert all(given[name] is before[name] for name in given)
        assert mask.torchmix_sources.losses is losses
        assert mask.torchmix_sources.is_last_of_step
        assert mask.torchmix_sources.index.reshape(-1).tolist() == [0, 0, 0, -1, 1, 1, 1, 1, *[0] * 8]
    assert not hasattr(batch.fields_of(item(part="test"), ALL)["loss_mask"], "torchmix_sources")


def test_the_scripts_loss_is_wrapped_where_it_has_one(megatron: None) -> None:
    script = script_of("0.16", lambda loss_mask, output: "loss")
    own = script["loss_func"]
    get_batch(script)
    assert script["loss_func"] is not own
    assert script["loss_func"](torch.ones(1), torch.ones(1)) == "loss"


def test_a_newer_key_is_none(megatron: None) -> None:
    script = script_of("0.20")
    script["BATCH_KEYS"] = [*NEWER_KEYS, "padding_mask"]
    assert get_batch(script)(iter([item()]), None)[-1] is None


def test_what_dev_does_with_boundaries_is_done(megatron: None) -> None:
    """The branch dev completes them in get_batch, by a function that its script imports."""
    completed: list[Any] = []
    script = {**script_of("dev"), "finalize_packed_seq_params": completed.append}
    batch = get_batch(script)(iter([item()]), None)
    assert completed == [batch[5]]
    get_batch(script)(iter([item(packed=False)]), None)
    assert completed[1:] == [None]
