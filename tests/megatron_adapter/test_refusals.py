"""Flags that cannot work are refused by name, all at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.support.fake_megatron import default_args
from torchmix.errors import RecipeError
from torchmix.megatron_adapter import flags
from torchmix.megatron_adapter.flags import FlagGroup, check_refusals
from torchmix.recipe.structs import Balance, Batch, Evaluation, Fim, Packing, Recipe, Source

SOURCE = Source(path="web.parquet", tokens="input_ids")
RECIPE = Recipe(version=1, seed=1, batch=Batch(samples=8, length=64), sources={"web": SOURCE}, mixture={"web": "100%"})


def recipe_with(**changes: Any) -> Recipe:
    return msgspec.structs.replace(RECIPE, **changes)


def check(recipe: Recipe = RECIPE, *, cp: int = 1, pp: int = 1, **changes: Any) -> None:
    check_refusals(default_args(**changes), recipe, cp=cp, pp=pp)


def test_defaults_are_not_refused() -> None:
    check()
    check_refusals(default_args(), recipe_with(packing=Packing(boundaries="none")), cp=2, pp=4)


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"data_path": ["1.0", "/p/web"]}, "--data-path"),
        ({"data_args_path": "f"}, "--data-args-path"),
        ({"train_data_path": ["f"]}, "--train-data-path"),
        ({"per_split_data_args_path": "f"}, "--per-split-data-args-path"),
        ({"mock_data": True}, "--mock-data"),
        ({"dataloader_type": "cyclic"}, "--dataloader-type"),
        ({"yaml_cfg": "f.yaml"}, "--yaml-cfg"),
        ({"fim_data": True, "fim_no_prefix": "#!"}, "--fim-no-prefix"),
        ({"use_varlen_dataset": True}, "--use-varlen-dataset"),
        ({"use_varlen_dataset": True, "varlen_sbhd_validation": True}, "--varlen-sbhd-validation"),
        ({"pad_packed_seq_alignment": "max"}, "--pad-packed-seq-alignment"),
        ({"thd_max_packed_sequences": 8}, "--thd-max-packed-sequences"),
        ({"cp_partition_mode": "contiguous"}, "--cp-partition-mode"),
        ({"perform_rl_step": True}, "--perform-rl-step"),
        ({"hybrid_context_parallel": True}, "--hybrid-context-parallel"),
        ({"dynamic_context_parallel": True}, "--dynamic-context-parallel"),
        ({"sequence_packing_scheduler": "dp_balanced"}, "--sequence-packing-scheduler"),
        ({"phase_transition_iterations": [10]}, "--phase-transition-iterations"),
        ({"dataloader_inter_document_masking": True}, "--dataloader-inter-document-masking"),
        ({"dataloader_save": "f"}, "--dataloader-save"),
        ({"cuda_graph_impl": "full_iteration"}, "full-iteration graph"),
        ({"cuda_graph_scope": ["full_iteration"]}, "full-iteration graph"),
        ({"cuda_graph_scope": [SimpleNamespace(name="full_iteration")]}, "full-iteration graph"),
        ({"overlap_moe_expert_parallel_comm": True}, "--overlap-moe-expert-parallel-comm"),
    ],
)
def test_each_flag_is_refused_by_name(changes: dict[str, Any], flag: str) -> None:
    with pytest.raises(RecipeError, match=f"{flag}: "):
        check(**changes)


@pytest.mark.parametrize("axis", ["TP", "CP", "PP"])
def test_a_trainer_that_would_send_is_refused(axis: str) -> None:
    recipe = recipe_with(balance=Balance(broadcast_at=axis))  # type: ignore[arg-type]
    check(recipe)
    with pytest.raises(RecipeError, match=f"balance.broadcast_at: {axis}: torchmix's get_batch sends nothing"):
        check(recipe, cp=2, pp=2, tensor_model_parallel_size=2)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(RecipeError) as raised:
        check(mock_data=True, use_varlen_dataset=True, eval_iters=10)
    assert all(flag in str(raised.value) for flag in ("--mock-data", "--use-varlen-dataset", "--eval-iters 10"))


@pytest.mark.parametrize(
    ("flag", "packing", "fault"),
    [
        ("reset_attention_mask", {"boundaries": "none"}, "--reset-attention-mask: .* write boundaries: document"),
        ("reset_position_ids", {"boundaries": "none"}, "--reset-position-ids: .* write packing.positions: document"),
        ("reset_position_ids", {"positions": "sample"}, "--reset-position-ids: .* write packing.positions: document"),
        ("eod_mask_loss", {"reset_loss": "keep"}, "--eod-mask-loss: .* packing.reset_loss: keep"),
    ],
)
def test_a_switch_that_the_recipe_has_off_is_refused(flag: str, packing: dict[str, Any], fault: str) -> None:
    sources = {"web": msgspec.structs.replace(SOURCE, reset_id=3)}
    check(recipe_with(sources=sources), **{flag: True})
    with pytest.raises(RecipeError, match=fault):
        check(recipe_with(sources=sources, packing=Packing(**packing)), **{flag: True})


FIM = {"fim_data": True, "fim_rate": 0.5, "fim_spm_rate": 0.25, "fim_prefix_token": "<pre>", "fim_no_prefix": None}
FIM |= {"fim_middle_token": "<mid>", "fim_suffix_token": "<suf>", "fim_split_sample": None, "fim_fragment_rate": None}


@pytest.mark.parametrize(
    ("fim", "changes", "fault"),
    [
        (None, {}, r"--fim-data: sources.web has no fim, .*rate: 0.5, spm: 0.25, ids: \[those of <pre>, <mid>, <suf>"),
        ({"rate": 0.4}, {}, "--fim-rate 0.5: the recipe says sources.web.fim.rate: 0.4"),
        ({"spm": 0.5}, {}, "--fim-spm-rate 0.25: the recipe says sources.web.fim.spm: 0.5"),
        ({"ids": ("<pre>", "<suf>", 3)}, {}, "--fim-middle-token <mid>: the recipe says <suf>"),
        ({}, {"fim_split_sample": "<file>", "fim_fragment_rate": 0.5}, "--fim-split-sample <file>: .*split: None"),
        ({"split": 9, "fragment_rate": 0.5}, {}, "--fim-split-sample None: .*fim.split: 9"),
        (
            {"split": 9, "fragment_rate": 0.5},
            {"fim_split_sample": "<file>", "fim_fragment_rate": 0.75},
            "--fim-fragment-rate 0.75: .*fragment_rate: 0.5",
        ),
    ],
)
def test_fill_in_the_middle_is_that_of_each_source(
    fim: dict[str, Any] | None, changes: dict[str, Any], fault: str
) -> None:
    good = {"rate": 0.5, "spm": 0.25, "ids": (1, 2, 3)}
    check(recipe_with(sources={"web": msgspec.structs.replace(SOURCE, fim=Fim(**good))}), **FIM)
    source = SOURCE if fim is None else msgspec.structs.replace(SOURCE, fim=Fim(**{**good, **fim}))
    recipe = recipe_with(sources={"web": source})
    with pytest.raises(RecipeError, match=fault):
        check(recipe, **{**FIM, **changes})
    check(recipe, **{**FIM, **changes, "fim_data": False})


def test_positions_alone_do_not_stop_attention() -> None:
    recipe = recipe_with(packing=Packing(boundaries="none", positions="document"))
    check(recipe, reset_position_ids=True)
    check(recipe, cp=2, reset_position_ids=True)
    with pytest.raises(RecipeError, match="--reset-attention-mask"):
        check(recipe, reset_position_ids=True, reset_attention_mask=True)


def test_chats_do_not_see_each_other() -> None:
    check(sft=True)
    check(pp=2, micro_batch_size=2, sft=True)
    with pytest.raises(RecipeError, match=r"--sft: .* write packing\.boundaries: document"):
        check(recipe_with(packing=Packing(boundaries="none")), sft=True)


def test_context_parallelism_cuts_documents_or_knows_none() -> None:
    concat = Packing(method="concat")
    check(recipe_with(packing=concat))
    check(recipe_with(packing=Packing(method="concat", boundaries="none")), cp=2)
    with pytest.raises(RecipeError, match="--context-parallel-size 2: attention cuts each document"):
        check(recipe_with(packing=concat), cp=2)


def test_a_recipe_may_require_that_all_tokens_weigh_alike() -> None:
    required = recipe_with(per_token_loss="require")
    check(required, calculate_per_token_loss=True)
    check(calculate_per_token_loss=False)
    with pytest.raises(RecipeError, match="per_token_loss: require; give --calculate-per-token-loss"):
        check(required, calculate_per_token_loss=False)


@pytest.mark.parametrize("changes", [{"eval_iters": 5}, {"eval_iters": 0, "full_validation": True}])
def test_validation_needs_a_validation_part(changes: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="the recipe has no validation; give it `split` or `validation`"):
        check(**changes)
    check(recipe_with(split=(90, 10, 0)), **changes)
    check(recipe_with(validation=Evaluation(sources={"held": SOURCE}, mixture={"held": "100%"})), **changes)


def test_several_validation_sets_are_whole_and_have_the_names_of_sources() -> None:
    other = msgspec.structs.replace(SOURCE, documents=("90%", "100%"))
    both = {"web": other, "books": other}
    recipe = recipe_with(sources=both, mixture={"web": "50%", "books": "50%"}, split=(90, 10, 0))
    sets = {"multiple_validation_sets": True, "full_validation": True}
    check(recipe, **sets)
    check(recipe, **sets, validation_set_names=["books", "web"])
    with pytest.raises(RecipeError, match=r"--validation-set-names web books: .* --validation-set-names books web"):
        check(recipe, **sets, validation_set_names=["web", "books"])
    with pytest.raises(RecipeError, match="--multiple-validation-sets: Megatron has it only with --full-validation"):
        check(recipe, multiple_validation_sets=True)
    with pytest.raises(RecipeError, match="--multiple-validation-sets with virtual pipeline stages"):
        check(recipe, **sets, virtual_pipeline_model_parallel_size=2)
    with pytest.raises(RecipeError, match="--eval-iters 0 with --full-validation: the recipe has no validation"):
        check(**sets)


def test_a_row_of_the_table_refuses_is_on_the_page_and_declares_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    row = FlagGroup(
        flags="--data-twice", fate="refused", note="once is enough", error="leave it out", in_init={"type": int}
    )
    monkeypatch.setattr(flags, "DATA_FLAGS", (*flags.DATA_FLAGS, row))
    assert flags.fate_of_flag()["--data-twice"].note == "once is enough"
    assert flags.init_flags()["--data-twice"] == {"type": int}
    with pytest.raises(RecipeError, match="--data-twice: leave it out"):
        check(data_twice=True)


def test_conflicts_of_several_rows_are_told_together() -> None:
    with pytest.raises(RecipeError) as raised:
        check(recipe_with(packing=Packing(method="concat")), cp=2, eval_iters=2)
    assert all(flag in str(raised.value) for flag in ("--eval-iters 2", "--context-parallel-size 2"))
