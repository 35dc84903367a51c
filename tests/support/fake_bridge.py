"""A stand-in for `megatron.bridge`, which is on PyPI in an old version alone: the names that the adapter uses.

In: nothing. Out: modules for `sys.modules`, faithful to Megatron-Bridge's branch main of August 2026 where the adapter
looks: what asks for data has configuration and counts, and hands on neither; counts are saved as tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

SAMPLES, LENGTH = 8, 64


@dataclass(kw_only=True)
class DatasetProvider(ABC):
    dataloader_type: str | None = None
    num_workers: int = 2

    @abstractmethod
    def build_datasets(self, context: Any) -> Any:
        raise NotImplementedError


def schedule_of(**_: Any) -> Callable[..., Any]:
    """Instead of a schedule, what gives back how it was called."""
    return lambda **options: options


def modules_of() -> dict[str, ModuleType]:
    """New modules, by name; each call has others, since the adapter alters them."""

    @dataclass
    class TrainState:
        step: int = 0
        consumed_train_samples: int = 0
        consumed_valid_samples: int = 0

        def state_dict(self) -> dict[str, Any]:
            names = ("step", "consumed_train_samples", "consumed_valid_samples")
            return {name: torch.tensor(getattr(self, name)) for name in names}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.step = state_dict["step"].item()
            self.consumed_train_samples = state_dict["consumed_train_samples"].item()
            self.consumed_valid_samples = state_dict["consumed_valid_samples"].item()

    def build_train_valid_test_data_loaders(
        cfg: Any, train_state: Any, build: Callable[..., Any], dp_group: Any, *, eval_dp_group: Any = None
    ) -> Any:
        return build([0, 0, 0], cfg.dataset)

    names = ("", ".data", ".data.loaders", ".training", ".training.fault_tolerance", ".training.gpt_step")
    names += (
        ".training.train",
        ".training.eval",
        ".training.config",
        ".training.state",
        ".utils",
        ".utils.common_utils",
    )
    modules = {name: ModuleType(f"megatron.bridge{name}") for name in names}
    contents: dict[str, dict[str, Any]] = {
        ".data.loaders": {"build_train_valid_test_data_loaders": build_train_valid_test_data_loaders},
        ".training.fault_tolerance": {"shutdown": lambda state: None},
        ".training.gpt_step": {"_has_packed_sequence_metadata": None, "_middle_pp_stage_needs_batch": None},
        ".training.train": {"get_forward_backward_func": schedule_of},
        ".training.eval": {"get_forward_backward_func": schedule_of},
        ".training.config": {"DatasetProvider": DatasetProvider},
        ".training.state": {"TrainState": TrainState},
        ".utils.common_utils": {"print_rank_0": lambda text: None},
    }
    for name, module in modules.items():
        vars(module).update(contents.get(name, {}))
        if name:
            home, _, own = name.rpartition(".")
            setattr(modules[home], own, module)
    return {module.__name__: module for module in modules.values()}


def configuration(dataset: Any, **changes: Any) -> SimpleNamespace:
    """A `ConfigContainer`, as far as the adapter looks; `changes` are by section and field, as `train__train_iters`."""
    sections: dict[str, Any] = {
        "train": {"micro_batch_size": 1, "global_batch_size": SAMPLES, "train_iters": 100, "rampup_batch_size": None},
        "validation": {"eval_iters": 0, "eval_global_batch_size": SAMPLES, "eval_micro_batch_size": 1},
        "model": {"seq_length": LENGTH, "vocab_size": 1 << 20, "calculate_per_token_loss": True},
        "dist": {"use_tp_pp_dp_mapping": False},
    }
    for name, value in changes.items():
        section, _, field = name.partition("__")
        sections[section][field] = value
    return SimpleNamespace(dataset=dataset, **{name: SimpleNamespace(**fields) for name, fields in sections.items()})


def groups_of(place: Any = None, **sizes: int) -> SimpleNamespace:
    """A `ProcessGroupCollection` of these sizes, 1 where none is given, of the rank at a place, or of rank 0."""
    axes = ("tp", "cp", "pp", "dp")
    return SimpleNamespace(**{axis: _Group(sizes.get(axis, 1), getattr(place, axis, 0)) for axis in axes})


class _Group:
    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


def data_of(modules: dict[str, ModuleType], cfg: Any, counts: Any, groups: Any = None, **named: Any) -> Any:
    """What Bridge's own function for it gets from the dataset of a configuration."""
    groups = groups or groups_of()

    def build(num_samples: Any, dataset: Any) -> Any:
        return dataset.build_datasets(SimpleNamespace(pg_collection=groups))

    loaders: Any = modules["megatron.bridge.data.loaders"]
    return loaders.build_train_valid_test_data_loaders(
        cfg=cfg, train_state=counts, build=build, dp_group=dist.group.WORLD, **named
    )
