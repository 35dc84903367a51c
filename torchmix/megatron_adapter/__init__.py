"""Megatron's names and hooks; nothing else in torchmix knows them.

In reading order:

    arguments.py     the flags that torchmix adds to Megatron's command line, and the fields that a script expects
    runs.py          runs of ranks under Megatron's own context parallelism of several sizes: its two ways, and what
                     they ask of a recipe
    flags.py         what becomes of each flag of Megatron that concerns data, and which are refused, with the reason
    batch_sizes.py   Megatron's sizes and counts against the recipe's: length, micro-batch, global batch, consumed
                     samples
    checkpoint.py    the state of the data inside Megatron's checkpoint, and where a run begins
    losses.py        the loss of each source, into Megatron's logs and to the policy of the recipe
    vision.py        images for Megatron's own vision scripts, and their text with one token for each picture
    microbatches.py  one stream of microbatches for every model chunk of a rank, and the images around Megatron's
                     schedule
    bins.py          planned bins in the place of Megatron's own reading, gathering, planning and sending
    batch.py         `get_batch`: a microbatch as the installed pretrain_gpt wants it, for the place of this rank
    evaluation.py    validation and test: parts of the recipe, read again from where Megatron's own count of samples
                     says
    open_loaders.py  the loaders of a run of Megatron or Bridge: opened where its counts stand, closed at its end; after
                     an in-process restart they go on in the next one
    datasets.py      the provider of train, validation and test data: what Megatron calls instead of a builder of
                     datasets
    bridge.py        a recipe as the dataset of Megatron-Bridge's configuration; imported by its own name, since it
                     needs that package
    schedulers.py    Megatron's own schedulers of documents of any length, to be compared with a plan

A script is moved to torchmix in four lines; `docs/megatron.md` shows them. The names below are imported when they are
first used: they need torch, and Megatron when they are called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchmix.lazy_names import lazy_name

if TYPE_CHECKING:
    from torchmix.megatron_adapter.arguments import enabled, extra_args
    from torchmix.megatron_adapter.batch import get_batch, packed_seq_params
    from torchmix.megatron_adapter.datasets import close, provider
    from torchmix.megatron_adapter.microbatches import place_images, with_images

__all__ = [
    "close",
    "enabled",
    "extra_args",
    "get_batch",
    "packed_seq_params",
    "place_images",
    "provider",
    "with_images",
]

_HOME_OF_LAZY_NAME = {
    "close": "torchmix.megatron_adapter.datasets",
    "enabled": "torchmix.megatron_adapter.arguments",
    "extra_args": "torchmix.megatron_adapter.arguments",
    "get_batch": "torchmix.megatron_adapter.batch",
    "packed_seq_params": "torchmix.megatron_adapter.batch",
    "place_images": "torchmix.megatron_adapter.microbatches",
    "provider": "torchmix.megatron_adapter.datasets",
    "with_images": "torchmix.megatron_adapter.microbatches",
}


def __getattr__(name: str) -> Any:
    return lazy_name(__name__, _HOME_OF_LAZY_NAME, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
