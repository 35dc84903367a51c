"""What megatron-core 0.16 needs to run on a machine without a GPU; nothing where CUDA is present.

In: nothing. Out: after `enable()`, megatron-core's model, DDP, optimizer, pipeline schedules and distributed
checkpoints run on CPU tensors over gloo.

Must hold: importing this file changes nothing, `enable()` returns at once where `torch.cuda.is_available()`, and
calling it twice is calling it once. The numbers are Megatron's own: every replacement computes what the original
computes, elsewhere.

Megatron-core assumes a GPU in three places that a small GPT meets:

1. `device=torch.cuda.current_device()`, in some fifty places, which raises without a driver. It is made to answer
   the CPU device, which every `device=` accepts.
2. `torch.zeros(..., device="cuda")` and `torch.tensor(..., device="cuda")`, for the token count of a step and for
   gradient norms. Both factories are wrapped, so that the word "cuda" means the CPU. No other operation is
   intercepted: a `TorchFunctionMode` would do as well, but would cost every operation a call into Python.
3. The clipping of gradients asserts the type name "torch.cuda.FloatTensor". The function is replaced by its own
   arithmetic.

The rest is configuration, and stands in `model.py`: weights initialised on the CPU, fused kernels off, and no batched
point-to-point messages (gloo has none). Random states of CUDA are only used by dropout, which the example does not
have.

Cost: one Python call more for each `torch.zeros` and `torch.tensor`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch

_enabled = False


def enable() -> None:
    """Let megatron-core run on this machine's CPU; no effect where CUDA is present.

    Call it before the first object of Megatron is made. It replaces two functions of torch and one of megatron-core for
    the rest of the process.
    """
    global _enabled
    if _enabled or torch.cuda.is_available():
        return
    _enabled = True
    torch.cuda.current_device = lambda: torch.device("cpu")
    for name in ("zeros", "tensor"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))

    # Imported here: it takes seconds, and a machine with CUDA does not need it from this file.
    from megatron.core.optimizer import optimizer

    optimizer.clip_grad_by_total_norm_fp32 = _clip_gradients


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same factory of tensors, for which every CUDA device is the CPU."""

    @wraps(factory)
    def make(*args: Any, **options: Any) -> torch.Tensor:
        if "device" in options and str(options["device"]).startswith("cuda"):
            options["device"] = "cpu"
        return factory(*args, **options)

    return make


def _clip_gradients(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    total_norm: float,
    use_decoupled_grad: bool = False,
) -> None:
    """Scale gradients in place so that their norm is at most `max_norm`.

    Source: megatron-core 0.16.1, `optimizer/clip_grads.py`, `clip_grad_by_total_norm_fp32`, less its assertion.
    """
    assert not use_decoupled_grad, "only Transformer Engine's optimizer has decoupled gradients"
    coefficient = max_norm / (total_norm + 1.0e-6)
    if coefficient >= 1.0:
        return
    for parameter in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
        if parameter.grad is not None:
            parameter.grad.detach().mul_(coefficient)
