"""The trial of the example on torchtitan's main, on two small trees with the signatures of 0.3 and of main."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trials.torchtitan_main import run

TRAINER = "class Trainer:\n    def __init__(self, config):\n        self.dataloader = config.dataloader.build({told})\n"
BASE = "class BaseDataLoader:\n    def __iter__(self) -> {batches}: ...\n    def {more}(self) -> None: ...\n"
BATCHES = "tuple[dict[str, Any], torch.Tensor]"


def tree(folder: Path, *, is_main: bool, told: str, more: str = "close", batches: str = BATCHES) -> Path:
    components = folder / "torchtitan" / "components"
    (components / "data").mkdir(parents=True)
    words = ", ".join(f"{name}=1" for name in ["dp_world_size", "dp_rank", "tokenizer", *told.split()])
    (folder / "torchtitan" / "trainer.py").write_text(TRAINER.format(told=words), encoding="utf-8")
    base = components / "data" / "loader.py" if is_main else components / "dataloader.py"
    base.write_text(
        BASE.format(more=more, batches="TrainerBatch" if is_main else f"Iterator[{batches}]"), encoding="utf-8"
    )
    if is_main:
        alias = f"TrainerBatch: TypeAlias = {batches}\n"
        (components / "data" / "collators.py").write_text(alias, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("is_main", "told"),
    [
        (True, "max_context_length num_tokens_per_batch"),
        (False, "seq_len local_batch_size snapshot_every_n_steps"),
    ],
)
def test_the_example_fits_both(tmp_path: Path, is_main: bool, told: str) -> None:
    found = run(tree(tmp_path, is_main=is_main, told=told))
    assert found["wrong"] == [] and found["told"] == ["dp_world_size", "dp_rank", "tokenizer", *told.split()]
    assert BATCHES in found["batches"]


def test_what_the_example_does_not_fit_is_named(tmp_path: Path) -> None:
    told = "max_context_length tokens_of_a_batch"
    found = run(tree(tmp_path, is_main=True, told=told, more="rewind", batches="TextBatch"))
    assert found["wrong"] == [
        "tokens_of_a_batch is told, with a meaning that is not known",
        "batches are TextBatch",
        "rewind is no method of the example",
        "the example fails: KeyError: 'local_batch_size'",
    ]
