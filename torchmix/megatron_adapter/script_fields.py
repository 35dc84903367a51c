"""The fields that a `pretrain_gpt.py` expects of its `get_batch`, read off the script.

In: the script's own names (`globals()`). Out: the names of the fields, in their order. Must hold: the order is the
script's own word, never a guess from a version: a field in another place would train on labels as tokens.

    script                    says its fields by
    core 0.19, 0.20, main     BATCH_KEYS, a list at the top of the script
    core 0.16, 0.17           the names that forward_step unpacks: six, the last one PackedSeqParams
    core 0.18                 likewise: ten, with boundaries; its BATCH_KEYS lies inside get_batch
    dev                       likewise: seven, PackedSeqParams and then padding_mask

Cost: parsing one function, once.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from typing import Any

from torchmix.errors import RecipeError

NEEDED = ("tokens", "labels", "loss_mask", "position_ids")
"""Fields that every script must take."""
PARAMS = "packed_seq_params"
BOUNDARIES = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
"""Where documents end: as one object, or as three tensors."""


def fields_of_script(script: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of what the script's `get_batch` returns, in order.

    Args:
        script: `globals()` of the script.

    Raises:
        RecipeError: The script does not say them, or says others than torchmix has.
    """
    keys = script.get("BATCH_KEYS")
    names = tuple(keys) if keys is not None else _names_unpacked(script.get("forward_step"))
    has_boundaries = PARAMS in names or set(BOUNDARIES) <= set(names)
    if set(NEEDED) <= set(names) and has_boundaries:
        return names
    if "get_batch" not in script:
        what = "has no get_batch"
    elif names:
        what = f"takes the fields {', '.join(names)} from its get_batch"
    else:
        what = "has no BATCH_KEYS, and no forward_step that unpacks what its get_batch returns into names"
    raise RecipeError(
        f"the script {what}. torchmix gives {', '.join(NEEDED)}, and either {PARAMS} or {', '.join(BOUNDARIES)}, as "
        f"the pretrain_gpt.py of Megatron-LM core 0.16 to 0.20 takes them; pass globals() of such a script"
    )


def _names_unpacked(function: Any) -> tuple[str, ...]:
    """The names to which a function assigns what `get_batch` returns; none if it does not, or has no source."""
    if function is None:
        return ()
    try:
        text = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    except (OSError, TypeError):
        return ()
    for node in ast.walk(ast.parse(text)):
        if not (isinstance(node, ast.Assign) and _is_call_of_get_batch(node.value)):
            continue
        target = node.targets[0]
        if isinstance(target, (ast.Tuple, ast.List)) and all(isinstance(each, ast.Name) for each in target.elts):
            return tuple(each.id for each in target.elts if isinstance(each, ast.Name))
    return ()


def _is_call_of_get_batch(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "get_batch"
