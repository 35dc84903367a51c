"""torchmix as the data of ms-swift's Megatron path: `megatron pt` with a recipe for its dataset.

In: the flags of `megatron pt`, with `--dataset recipe.yaml`. Out: the run of ms-swift's own trainer, whose microbatches
are int64 [1, tokens] ids, positions and labels. Must hold: a step of the recipe is an iteration, so `batch.samples` is
`--global_batch_size`; with `--padding_free true` documents do not see each other, since positions begin at 0 in each.
ms-swift moves tensors, chooses those of a stage and cuts sequences for CP by itself, so all ranks of a replica receive
the same. The state lies beside each checkpoint, and a run may continue at another number of ranks.

    torchrun --nproc-per-node 8 examples/ms_swift/pretrain.py --dataset recipe.yaml --padding_free true ...
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

from megatron.core import mpu
from swift.megatron.pipelines.train.pretrain import MegatronPretrain
from swift.megatron.trainers.trainer import MegatronTrainer

import torchmix

STATE = "torchmix_state.bin"


class TorchmixTrainer(MegatronTrainer):
    """ms-swift's trainer, on a recipe."""

    def _prepare_data_iterator(self, train_dataset: Path, *_: Any, **__: Any) -> tuple[Iterator[Any], None]:
        args, recipe = self.args, torchmix.load_recipe(train_dataset)
        if recipe.batch.samples != args.global_batch_size or args.virtual_pipeline_model_parallel_size:
            raise ValueError(f"{train_dataset}: batch.samples must be --global_batch_size, without virtual stages")
        self.loader = torchmix.build_loader(
            train_dataset,
            topology=torchmix.parallel.whole_replicas(mpu.get_data_parallel_rank()),
            micro_batch_size=args.micro_batch_size,
            max_steps=args.train_iters,
            accept_edit=os.environ.get("TORCHMIX_ACCEPT_EDIT"),
        )
        if args.mcore_model and not args.finetune:
            self.loader.load_state_dict({"torchmix_state": Path(args.mcore_model, STATE).read_bytes()})
        return self._microbatches(), None

    def _microbatches(self) -> Iterator[dict[str, Any]]:
        for microbatch in self.loader:
            labels = microbatch.labels_int32.long().flatten().roll(1)  # ms-swift rolls them back
            fields = {"input_ids": microbatch.tokens, "position_ids": microbatch.position_ids, "labels": labels}
            yield {name: tensor.view(1, -1) for name, tensor in fields.items()}

    def save_checkpoint(self) -> None:
        """ms-swift's, with the state of the loader."""
        super().save_checkpoint()
        if mpu.get_data_parallel_rank(with_context_parallel=True) == 0:
            folder = Path(self.args.output_dir, f"checkpoint-{self.state.iteration}")
            (folder / STATE).write_bytes(self.loader.state_dict()["torchmix_state"])


class TorchmixPretrain(MegatronPretrain):
    """ms-swift's `megatron pt`, on a recipe."""

    def _prepare_dataset(self) -> tuple[Path, None]:
        return Path(self.args.dataset[0]), None

    def prepare_trainer(self) -> TorchmixTrainer:
        """The trainer of the recipe."""
        return TorchmixTrainer(self.args, self.template)


if __name__ == "__main__":
    TorchmixPretrain(sys.argv[1:]).main()
