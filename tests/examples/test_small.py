"""The small examples: torchtitan's dataloader, Lightning's DataModule, Hugging Face's Trainer.

Each runs where its package is installed, and goes on from a checkpoint with the steps of a run that was never stopped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import torchmix
from tests.support.example import EXAMPLE, example_module
from tests.support.files import make_text_file, random_texts

pytestmark = pytest.mark.filterwarnings("ignore")  # the packages' own
VOCABULARY, LENGTH, SAMPLES = 257, 32, 4


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    make_text_file(tmp_path / "prose.parquet", random_texts(1, 100))
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"{{version: 1, seed: 1, batch: {{samples: {SAMPLES}, length: {LENGTH}}}, mixture: {{prose: 100%}}, "
        "loaders: {where: in_process}, sources: {prose: {path: prose.parquet, text: text, tokenizer: bytes}}}",
        encoding="utf-8",
    )
    return str(path)


def tokens_of(recipe: str, *, steps: int, micro_batch_size: int = 2) -> list[torch.Tensor]:
    with torchmix.build_loader(recipe, micro_batch_size=micro_batch_size, max_steps=steps) as loader:
        return [microbatch.tokens for microbatch in loader]


def assert_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    assert len(some) == len(others)
    assert all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


class Toy(torch.nn.Module):
    """A model of one token."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(VOCABULARY, 8), torch.nn.Linear(8, VOCABULARY)
        self.seen: list[torch.Tensor] = []

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        self.seen.append(input_ids)
        return {"logits": self.head(self.table(input_ids))}


def test_they_are_small() -> None:
    for name in ("torchtitan/dataloader.py", "lightning/data_module.py", "huggingface/trainer.py"):
        assert len((EXAMPLE.parent / name).read_text(encoding="utf-8").splitlines()) < 80, name


def test_torchtitan_gets_microbatches_and_keeps_the_state(recipe: str) -> None:
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    module = example_module("dataloader", EXAMPLE.parent / "torchtitan")
    told: dict[str, Any] = {"dp_world_size": 1, "dp_rank": 0, "local_batch_size": 2, "tokenizer": None}
    config = module.TorchmixDataLoader.Config(recipe=recipe, max_steps=4)
    whole = tokens_of(recipe, steps=4)
    first = config.build(seq_len=LENGTH, snapshot_every_n_steps=1, **told)
    batches = iter(first)
    found = [next(batches) for _ in range(4)]
    state = first.state_dict()
    first.close()
    assert_equal([inputs["input"] for inputs, _ in found], whole[:4])
    assert {(name, tensor.dtype) for inputs, _ in found for name, tensor in inputs.items()} == {
        ("input", torch.int64),
        ("positions", torch.int64),
    }
    labels = torch.cat([labels for _, labels in found])
    assert (labels == -100).any() and 0 < labels.max() < VOCABULARY
    second = config.build(seq_len=LENGTH, **told)
    second.load_state_dict({})
    second.load_state_dict(state)
    assert_equal([inputs["input"] for inputs, _ in second], whole[4:])
    second.close()
    with pytest.raises(ValueError, match=f"batch.length {LENGTH} is not training.seq_len 64"):
        config.build(seq_len=64, **told)


def test_lightning_trains_and_resumes(recipe: str, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    module = example_module("data_module", EXAMPLE.parent / "lightning")

    class Model(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.toy = Toy()

        def training_step(self, microbatch: Any, index: int) -> torch.Tensor:
            logits = self.toy(microbatch.tokens)["logits"]
            loss: torch.Tensor = module.loss_of(self, logits, microbatch)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(steps: int, checkpoint: Path | None = None) -> list[torch.Tensor]:
        model, data = Model(), module.TorchmixData(recipe, micro_batch_size=2)
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_steps=steps,
            accumulate_grad_batches=data.accumulate(),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(model, data, ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / f"{steps}.ckpt")
        return model.toy.seen

    whole = tokens_of(recipe, steps=4)
    assert_equal(fit(2), whole[:4])
    assert_equal(fit(4, tmp_path / "2.ckpt"), whole[4:])


def test_hugging_faces_trainer_trains_and_resumes(recipe: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    module = example_module("trainer", EXAMPLE.parent / "huggingface")

    def train(steps: int, checkpoint: Path | None = None) -> list[torch.Tensor]:
        args = transformers.TrainingArguments(
            str(tmp_path / "out"),
            max_steps=steps,
            save_steps=2,
            per_device_train_batch_size=2,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        model = Toy()
        trainer = module.TorchmixTrainer(recipe, model=model, args=args)
        assert args.gradient_accumulation_steps == SAMPLES // 2
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        return model.seen

    whole = tokens_of(recipe, steps=4)
    assert_equal(train(2), whole[:4])
    assert_equal(train(4, tmp_path / "out" / "checkpoint-2"), whole[4:])


def test_hugging_faces_loss_is_that_of_the_whole_step() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    module = example_module("trainer", EXAMPLE.parent / "huggingface")
    logits, labels = torch.randn(2, 5, 7), torch.tensor([[1, 2, -100, 3, 4], [-100, 6, 5, -100, 0]])
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(module.loss_of({"logits": logits}, labels, num_items_in_batch=torch.tensor(7)), expected)
