"""Megatron's own masks and positions, without the package around them, whose import takes seconds."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

NAME = "_get_ltor_masks_and_position_ids"


def megatron_masks() -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """`_get_ltor_masks_and_position_ids` of `megatron.core.datasets.gpt_dataset`, compiled from the installed file."""
    folder = importlib.util.find_spec("megatron")
    assert folder is not None and folder.submodule_search_locations, "megatron-core is in constraints.txt"
    path = Path(next(iter(folder.submodule_search_locations))) / "core" / "datasets" / "gpt_dataset.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == NAME)
    names: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module(body=[function], type_ignores=[]), str(path), "exec"), names)
    found: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = names[NAME]
    return found
