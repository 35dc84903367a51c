"""Flags on Megatron's command line; without a recipe nothing of Megatron changes."""

from __future__ import annotations

import argparse
import sys

import pytest

from torchmix.megatron_adapter import enabled, extra_args


def parser_of_megatron() -> argparse.ArgumentParser:
    """The two flags of Megatron that torchmix alters, with their defaults."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--dataloader-type", default=None)
    parser.add_argument(
        "--no-create-attention-mask-in-dataloader", action="store_false", dest="create_attention_mask_in_dataloader"
    )
    return parser


def parse(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *arguments])
    return extra_args()(parser_of_megatron()).parse_args()


@pytest.mark.parametrize("arguments", [["--data-recipe", "r.yaml"], ["--data-recipe=r.yaml"]])
def test_a_recipe_on_the_command_line_enables(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert enabled(arguments)
    args = parse(monkeypatch, *arguments)
    assert args.data_recipe == "r.yaml"
    assert args.dataloader_type == "external"
    assert args.create_attention_mask_in_dataloader is False
    assert (args.data_loaders, args.data_look_ahead, args.data_patience) == (None, 2, None)
    assert args.data_leaders == "replica"
    assert (args.data_start_fresh, args.data_source_loss) == (False, True)


def test_without_a_recipe_megatron_keeps_its_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not enabled(["--data-path", "x", "--data-recipes", "y"])
    args = parse(monkeypatch)
    assert args.data_recipe is None
    assert args.dataloader_type is None
    assert args.create_attention_mask_in_dataloader is True


def test_a_flag_that_was_given_is_seen_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse(monkeypatch, "--data-recipe", "r.yaml", "--dataloader-type", "cyclic").dataloader_type == "cyclic"


def test_a_previous_provider_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def previous(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--own", type=int)
        return parser

    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--own", "3", "--no-data-source-loss"])
    args = extra_args(previous)(parser_of_megatron()).parse_args()
    assert (args.own, args.data_source_loss) == (3, False)
