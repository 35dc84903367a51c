"""Megatron's own data road, as `pretrain_gpt.py` of Megatron-LM core_v0.16.1 builds it.

In: a corpus, a number of samples, a place in the job. Out: the datasets of `BlendedMegatronDatasetBuilder`, and the
DataLoader over them. `megatron.training` is not in the wheel, so two short pieces of it are repeated here: the sampler
(`MegatronPretrainingSampler`, drop_last) and the arguments of the DataLoader (`build_pretraining_data_loader`).

Settings are those that let it run fastest: no attention mask in the loader, no reset of positions, no loss mask at the
end of documents, mapped .bin files, a cache folder for its indices. `document=True` turns on what it offers for
document boundaries, `reset_position_ids` and `eod_mask_loss`; the boundaries themselves it cannot give.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

warnings.filterwarnings("ignore")  # of Apex and Transformer Engine, which a CPU does not have, and of pin_memory
import torch  # noqa: E402
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder  # noqa: E402
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig  # noqa: E402
from megatron_data import EOD, Corpus  # noqa: E402

logging.getLogger("megatron").setLevel(logging.ERROR)
SPLIT = "100,0,0"
"""Megatron's `--split`: training alone. With a validation part it refuses blends with small sources, as oversampled."""


class Tokenizer:
    """What GPTDataset asks of a tokenizer, as its NullTokenizer answers."""

    eod = EOD
    pad = -1

    def __init__(self, vocabulary: int) -> None:
        self.vocab_size = vocabulary
        self.unique_identifiers = {"class": "Tokenizer", "vocabulary": vocabulary}


class PretrainingSampler:
    """Megatron's `MegatronPretrainingSampler`: samples in order, each data-parallel rank its part of each row."""

    def __init__(self, *, total: int, consumed: int, micro_batch_size: int, dp_rank: int, dp: int) -> None:
        self.total, self.consumed = total, consumed
        self.micro_batch_size, self.dp_rank, self.dp = micro_batch_size, dp_rank, dp

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in range(self.consumed, self.total):
            batch.append(index)
            if len(batch) == self.micro_batch_size * self.dp:
                start = self.dp_rank * self.micro_batch_size
                yield batch[start : start + self.micro_batch_size]
                batch = []


def join_job_of_one() -> None:
    """A process group of one rank: with a cache folder BlendedDataset asks for its rank."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


def build_dataset(
    corpus: Corpus,
    *,
    num_samples: int,
    length: int,
    document: bool = False,
    builder_threads: int = 1,
    is_built_on_rank: Callable[[], bool] = lambda: True,
) -> Any:
    """The training dataset, None where it is not built; every rank of a job calls this."""
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=length,
        blend=(corpus.prefixes, corpus.shares),
        split=SPLIT,
        num_dataset_builder_threads=builder_threads,
        path_to_cache=str(corpus.folder / "megatron-cache"),
        tokenizer=Tokenizer(corpus.vocabulary),  # type: ignore[arg-type]
        reset_position_ids=document,
        reset_attention_mask=False,
        eod_mask_loss=document,
        create_attention_mask=False,
    )
    built = BlendedMegatronDatasetBuilder(GPTDataset, [num_samples, 0, 0], is_built_on_rank, config).build()  # type: ignore[arg-type]
    return built[0]


def build_data_loader(
    dataset: Any, *, micro_batch_size: int, num_workers: int, dp_rank: int = 0, dp: int = 1
) -> torch.utils.data.DataLoader[Any]:
    """The DataLoader of `build_pretraining_data_loader` with `--dataloader-type single`."""
    sampler = PretrainingSampler(
        total=len(dataset), consumed=0, micro_batch_size=micro_batch_size, dp_rank=dp_rank, dp=dp
    )
    return torch.utils.data.DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_workers,
        pin_memory=True,
        persistent_workers=num_workers > 0,
    )
