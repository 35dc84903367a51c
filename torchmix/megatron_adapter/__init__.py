"""Megatron's names and hooks; nothing else in torchmix knows them.

In reading order:

    arguments.py         flags on Megatron's command line
    data_flags.py        what becomes of each flag of Megatron about data
    refusals.py          flags of Megatron that cannot work, and why
    batch_sizes.py       Megatron's sizes and ramp-up against the recipe's
    places.py            parallel_state -> place tree; what each model chunk needs   (torch)
    distillation.py      the identity of the data, for logits of a teacher
    checkpoint_args.py   the state of the data in Megatron's checkpoint; where a run begins
    packed_seq.py        boundaries as Megatron's PackedSeqParams                    (torch)
    microbatches.py      one stream for all model chunks of a rank                   (torch)
    images_around.py     the images of a step around Megatron's schedule             (torch)
    losses/              the loss of each source; a warning where tokens weigh unequal (torch)
    script_fields.py     which fields a script's batch has, in which order
    batch.py             `get_batch`, in the layout of the script                    (torch)
    evaluation.py        validation and test                                         (torch)
    counts.py            Megatron's counts against the plan's, and steps it skips    (torch)
    datasets.py          `provider`: iterators for train, validation and test        (torch)

A script is moved to torchmix in four lines; `docs/megatron.md` shows them. The names below are imported when they are
first used: they need torch, and Megatron when they are called.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchmix.megatron_adapter.arguments import enabled, extra_args
    from torchmix.megatron_adapter.batch import get_batch
    from torchmix.megatron_adapter.datasets import close, provider
    from torchmix.megatron_adapter.images_around import place_images, with_images
    from torchmix.megatron_adapter.packed_seq import packed_seq_params

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
    "packed_seq_params": "torchmix.megatron_adapter.packed_seq",
    "place_images": "torchmix.megatron_adapter.images_around",
    "provider": "torchmix.megatron_adapter.datasets",
    "with_images": "torchmix.megatron_adapter.images_around",
}


def __getattr__(name: str) -> Any:
    if name in _HOME_OF_LAZY_NAME:
        return getattr(import_module(_HOME_OF_LAZY_NAME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
