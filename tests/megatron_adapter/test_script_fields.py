"""The fields of a batch are the script's own word: its BATCH_KEYS, or the names that its forward_step unpacks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fake_megatron import FIELDS_OF_CORE, get_batch, script_of
from torchmix.errors import RecipeError
from torchmix.megatron_adapter.arguments import fields_of_script, image_token_of


@pytest.mark.parametrize("layout", FIELDS_OF_CORE)
def test_each_version_says_its_fields(layout: str) -> None:
    assert fields_of_script(script_of(layout)) == FIELDS_OF_CORE[layout]


def test_an_order_of_its_own_is_followed() -> None:
    def forward_step(data_iterator: Any, model: Any) -> Any:
        loss_mask, tokens, labels, position_ids, packed_seq_params = get_batch(data_iterator)
        return model(tokens, labels, position_ids, loss_mask, packed_seq_params)

    names = fields_of_script({"get_batch": get_batch, "forward_step": forward_step})
    assert names == ("loss_mask", "tokens", "labels", "position_ids", "packed_seq_params")


def one_dict(data_iterator: Any, model: Any) -> Any:
    data_batch = get_batch(data_iterator)
    output_tensor, loss_mask = model(**data_batch)
    return output_tensor, loss_mask


def with_image_token(image_special_token_id: int = 7) -> None: ...


def test_a_dict_that_goes_on_to_the_model_is_mimos() -> None:
    script = {"get_batch": get_batch, "forward_step": one_dict, "model_provider": with_image_token}
    assert fields_of_script(script) == ("input_ids", "position_ids", "labels", "loss_mask", "modality_inputs")
    assert image_token_of(script) == 7


def five_fields(data_iterator: Any, model: Any) -> Any:
    tokens, labels, loss_mask, attention_mask, position_ids = get_batch(data_iterator)
    return model(tokens, labels, loss_mask, attention_mask, position_ids)


def one_object(data_iterator: Any, model: Any) -> Any:
    batch = get_batch(data_iterator)
    return model(batch)


def another_dict(data_iterator: Any, model: Any) -> Any:
    batch = get_batch(data_iterator)
    words = {"batch": batch}
    return model(**words)


@pytest.mark.parametrize(
    ("script", "what"),
    [
        (
            {"get_batch": get_batch, "forward_step": five_fields},
            "takes the fields tokens, labels, loss_mask, attention_mask, position_ids from its get_batch",
        ),
        ({"get_batch": get_batch, "BATCH_KEYS": ["tokens", "cu_seqlens"]}, "takes the fields tokens, cu_seqlens"),
        ({"get_batch": get_batch, "forward_step": one_object}, "has no BATCH_KEYS, and no forward_step that unpacks"),
        (
            {"get_batch": get_batch, "forward_step": one_dict, "model_provider": five_fields},
            "has no BATCH_KEYS, and no",
        ),
        (
            {"get_batch": get_batch, "forward_step": one_object, "model_provider": with_image_token},
            "has no BATCH_KEYS, and no",
        ),
        (
            {"get_batch": get_batch, "forward_step": another_dict, "model_provider": with_image_token},
            "has no BATCH_KEYS, and no",
        ),
        ({"get_batch": get_batch, "forward_step": len}, "has no BATCH_KEYS, and no forward_step that unpacks"),
        ({"get_batch": get_batch}, "has no BATCH_KEYS, and no forward_step that unpacks"),
        ({}, "has no get_batch"),
    ],
)
def test_a_script_of_another_kind_is_refused(script: dict[str, Any], what: str) -> None:
    with pytest.raises(RecipeError, match=f"the script {what}"):
        fields_of_script(script)
