"""A CUDA device that is the CPU: enough of `torch.cuda` for Megatron-LM's training loop on a machine without a GPU.

In: nothing. Out: after `enable()`, `torch.cuda.is_available()` is true, every tensor that is asked for on a CUDA device
is made on the CPU, and streams, events and memory statistics are there and empty.

Must hold: importing this file changes nothing; `enable()` does nothing where a real CUDA device is present. Nothing is
computed otherwise than Megatron computes it: what is replaced is where a tensor lives, never a number. The fake device
has a random generator of its own, as a real one has, so that code which draws "on the GPU" leaves the CPU's generator,
and with it the initial weights, alone. The wrappers are functions in torch's own namespaces, no mode: modes are of one
thread, and Megatron's and torchmix's threads need the same.

What Megatron-LM meets, in the order it meets it:

1. `assert torch.cuda.is_available()`, `set_device`, `device_count`, device properties.
2. `device="cuda"`, `device=torch.cuda.current_device()`, `.cuda()`, `.to("cuda")`, `.pin_memory()`.
3. `torch.cuda.manual_seed`, random states, which it saves in checkpoints; `torch.cuda.default_generators`.
4. `tensor.type() == "torch.cuda.FloatTensor"`, asserted by the optimizer and by the clipping of gradients.
5. `torch.cuda.synchronize`, streams, events, memory statistics, profiler marks.
6. `torch.distributed.barrier(device_ids=...)` and process groups bound to a `device_id`, which gloo refuses; `isend`
   of memory that is freed at once.

Cost: one Python call more for each tensor that is made or moved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

CPU = torch.device("cpu")
FACTORIES = (
    *("arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "tensor", "zeros"),
    *("empty_like", "full_like", "ones_like", "zeros_like"),
)
RANDOM_FACTORIES = ("rand", "randint", "randn", "randperm")
EMPTY_CALLS = (
    *("empty_cache", "init", "ipc_collect", "reset_peak_memory_stats", "set_device", "set_stream", "synchronize"),
    *("_lazy_init", "manual_seed_all"),
)
ZERO_CALLS = (
    *("device_memory_used", "max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"),
    "utilization",
)
FLOAT_NAMES = {"torch.FloatTensor", "torch.HalfTensor", "torch.BFloat16Tensor", "torch.DoubleTensor"}

_enabled = False


def enable() -> None:
    """Let CUDA mean the CPU for the rest of the process; no effect where a CUDA device is present.

    Call it before Megatron is imported.
    """
    global _enabled
    if _enabled or torch.cuda.is_available():
        return
    _enabled = True
    generator = torch.Generator()
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name in RANDOM_FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name), generator))
    for name in ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"):
        setattr(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))
    _fake_tensor_moves()
    _fake_device()
    _fake_random_states(generator)
    _fake_streams()
    _fit_gloo()


def enabled() -> bool:
    """Whether CUDA is the CPU in this process."""
    return _enabled


def is_cuda(device: Any) -> bool:
    """Whether an argument names a CUDA device: "cuda", "cuda:1", `torch.device("cuda")`; a bare index does too."""
    if isinstance(device, bool):
        return False
    return isinstance(device, int) or (isinstance(device, str | torch.device) and str(device).startswith("cuda"))


def _on_cpu(factory: Callable[..., Any], generator: torch.Generator | None = None) -> Callable[..., Any]:
    """The same factory, for which every CUDA device is the CPU; what it draws there comes from `generator`."""

    @wraps(factory)
    def make(*args: Any, **options: Any) -> Any:
        if is_cuda(options.get("device")):
            options["device"] = CPU
            if generator is not None:
                options.setdefault("generator", generator)
        options.pop("pin_memory", None)
        return factory(*args, **options)

    return make


def _fake_tensor_moves() -> None:
    move, name_of = torch.Tensor.to, torch.Tensor.type

    @wraps(move)
    def to(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if is_cuda(options.get("device")):
            options["device"] = CPU
        return move(self, *(CPU if is_cuda(argument) else argument for argument in args), **options)

    @wraps(name_of)
    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **options: Any) -> Any:
        if dtype is not None:
            return name_of(self, dtype, *args, **options)
        name = name_of(self)
        return name.replace("torch.", "torch.cuda.") if name in FLOAT_NAMES else name

    def stay(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return self

    torch.Tensor.to = to
    torch.Tensor.type = type_
    torch.Tensor.cuda = stay
    torch.Tensor.pin_memory = stay
    torch.nn.Module.cuda = lambda self, device=None: self


def _fake_device() -> None:
    properties = SimpleNamespace(
        name="CPU", major=8, minor=0, total_memory=1 << 34, multi_processor_count=1, warp_size=32, gcnArchName=""
    )
    answers: dict[str, Any] = {
        "current_device": 0,
        "device_count": 8,  # ranks of a host, at most
        "get_device_capability": (8, 0),
        "get_device_name": "CPU",
        "get_device_properties": properties,
        "is_available": True,
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "is_initialized": True,
        "memory_stats": dict.fromkeys(("num_alloc_retries", "allocation.all.current"), 0),
        "memory_summary": "",
    }
    for name in EMPTY_CALLS:
        answers[name] = None
    for name in ZERO_CALLS:
        answers[name] = 0
    for name, answer in answers.items():
        setattr(torch.cuda, name, _answering(answer))
    torch.cuda._lazy_call = lambda call, **options: call()


def _answering(answer: Any) -> Callable[..., Any]:
    return lambda *args, **options: answer


def _fake_random_states(generator: torch.Generator) -> None:
    """The generator of the fake device, under every name that Megatron reaches it by."""

    def set_state(state: torch.Tensor, *args: Any) -> None:
        generator.set_state(state)

    torch.cuda.default_generators = (generator,)
    for module in (torch.cuda, torch.cuda.random):
        module.manual_seed = generator.manual_seed
        module.initial_seed = generator.initial_seed
        module.get_rng_state = lambda *args, **options: generator.get_state()
        module.set_rng_state = set_state
    if hasattr(torch._C, "_cuda_setRNGState"):
        del torch._C._cuda_setRNGState


class Stream:
    """A stream of work that is done when it is asked for."""

    device = CPU
    priority = 0
    cuda_stream = 0

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def wait_stream(self, stream: Stream) -> None: ...


class Event:
    """A mark in a stream, reached at once."""

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        return 0.0

    def query(self) -> bool:
        return True

    def record(self, stream: Stream | None = None) -> None: ...

    def synchronize(self) -> None: ...

    def wait(self, stream: Stream | None = None) -> None: ...


def _fake_streams() -> None:
    stream = Stream()
    torch.cuda.Stream = Stream
    torch.cuda.Event = Event
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *args, **options: stream
    torch.cuda.stream = lambda *args, **options: contextlib.nullcontext()
    torch.cuda.device = lambda *args, **options: contextlib.nullcontext()
    torch.Tensor.record_stream = lambda self, stream: None
    for name in ("mark", "range_pop", "range_push"):
        setattr(torch.cuda.nvtx, name, _answering(None))


def _fit_gloo() -> None:
    """What Megatron asks of NCCL and gloo does not have.

    gloo has no devices: `barrier(device_ids=...)` and `init_process_group(device_id=...)` do without.

    Megatron frees a stage's output as soon as it has called `isend`, because a GPU's streams keep what they still read.
    gloo reads the memory itself, later: it is given a copy, kept until it is sent. Without it the interleaved schedule
    sends what lies there by then.
    """
    barrier, start, send = dist.barrier, dist.init_process_group, dist.isend
    sent: list[tuple[dist.Work, torch.Tensor]] = []
    dist.barrier = lambda group=None, async_op=False, device_ids=None: barrier(group, async_op)

    @wraps(start)
    def init_process_group(*args: Any, **options: Any) -> None:
        options.pop("device_id", None)
        start(*args, **options)

    @wraps(send)
    def isend(tensor: torch.Tensor, *args: Any, **options: Any) -> dist.Work | None:
        sent[:] = [each for each in sent if not each[0].is_completed()]
        copy = tensor.detach().clone()
        work = send(copy, *args, **options)
        if work is not None:
            sent.append((work, copy))
        return work

    dist.init_process_group = init_process_group
    dist.isend = dist.distributed_c10d.isend = isend  # both, since P2POp compares what it is given
