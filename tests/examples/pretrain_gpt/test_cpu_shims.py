"""The fake CUDA device and the stand-ins for imports, in a process of their own: they alter torch for good."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.deadlines import LONG_S
from tests.support.example import PRETRAIN_GPT, example_module
from tests.support.processes import Processes

cpu_device = example_module("cpu_device", PRETRAIN_GPT)
record = example_module("record", PRETRAIN_GPT)

PROGRAM = """
import sys
import torch, torch.distributed as dist
assert "triton" not in sys.modules
import cpu_imports, cpu_device

cpu_imports.enable()
cpu_device.enable()
cpu_device.enable()
assert torch.cuda.is_available() and cpu_device.enabled()

# Whatever asks for the GPU gets the CPU.
for device in ("cuda", "cuda:1", torch.device("cuda"), 0, torch.cuda.current_device()):
    for made in (torch.zeros(2, device=device), torch.tensor([1], device=device), torch.ones(2).to(device)):
        assert made.device.type == "cpu", (device, made.device)
assert torch.zeros(2).to("cuda", torch.float64, non_blocking=True).dtype == torch.float64
assert torch.ones(2).to(dtype=torch.int64).dtype == torch.int64
assert torch.ones(2).cuda().pin_memory().new_zeros(3, device="cuda").device.type == "cpu"
assert torch.nn.Linear(2, 2).cuda().weight.device.type == "cpu"
assert torch.ones(1).type() == "torch.cuda.FloatTensor" and torch.ones(1).long().type() == "torch.LongTensor"
assert torch.ones(1).type(torch.int64).dtype == torch.int64

# What is drawn on the GPU does not move the CPU's generator, and its state can be saved and restored.
before = torch.get_rng_state()
torch.cuda.manual_seed(7)
state = torch.cuda.get_rng_state()
drawn = torch.rand(4, device="cuda")
torch.cuda.set_rng_state(state)
assert torch.equal(torch.rand(4, device="cuda"), drawn)
assert torch.equal(torch.get_rng_state(), before)
assert not torch.equal(torch.rand(4), drawn)

# Streams and events.
with torch.cuda.stream(torch.cuda.Stream()):
    event = torch.cuda.Event(enable_timing=True)
    event.record()
torch.cuda.current_stream().wait_event(event)
torch.cuda.synchronize()
assert event.elapsed_time(torch.cuda.Event()) == 0.0 and torch.cuda.memory_allocated() == 0

# Imports: decorators leave functions as they are.
import triton, triton.language as tl
from typing import override

@triton.jit
@override
@torch.compile(dynamic=True)
def twice(x, size: tl.constexpr = 1):
    return 2 * x

assert twice(3) == 6

# gloo: a message is what it was when it was sent, though its memory is given another meaning at once.
dist.init_process_group(
    "gloo", store=dist.FileStore(sys.argv[2], 2), rank=int(sys.argv[1]), world_size=2, device_id=torch.device("cpu")
)
dist.barrier(device_ids=[0])
if sys.argv[1] == "0":
    work = []
    for number in range(8):
        message = torch.full((1 << 18,), float(number))
        work.append(dist.isend(message, 1))
        message.fill_(-1.0)
    [each.wait() for each in work]
else:
    for number in range(8):
        message = torch.empty(1 << 18)
        dist.irecv(message, 0).wait()
        assert bool((message == number).all()), number
dist.barrier()
dist.destroy_process_group()
print("done")
"""


@pytest.mark.system
@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is faked where CUDA is present")
def test_a_machine_without_a_gpu_looks_as_if_it_had_one(tmp_path: Path) -> None:
    program = f"import sys\nsys.path.insert(0, {str(PRETRAIN_GPT)!r})\n{PROGRAM}"
    with Processes(tmp_path) as processes:
        ranks = [processes.fork_python("-c", program, str(rank), str(tmp_path / "store")) for rank in range(2)]
        processes.wait_all(ranks, deadline_s=LONG_S)
        outputs = [rank.stdout() for rank in ranks]
    assert [output.splitlines()[-1] for output in outputs] == ["done", "done"], "\n".join(outputs)


def test_importing_the_shims_alters_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [(torch, "zeros"), (torch, "compile"), (torch.Tensor, "to"), (torch.cuda, "is_available"), (dist, "isend")]
    before = [getattr(owner, name) for owner, name in names]
    for name in ("cpu_device", "cpu_imports"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        example_module(name, PRETRAIN_GPT)
    assert all(getattr(owner, name) is old for (owner, name), old in zip(names, before, strict=True))


def test_what_is_a_cuda_device() -> None:
    assert all(cpu_device.is_cuda(device) for device in ("cuda", "cuda:3", 0, 2, torch.device("cuda", 1)))
    assert not any(cpu_device.is_cuda(device) for device in ("cpu", None, True, torch.device("cpu"), torch.float32))


def test_both_layouts_of_a_batch_are_recorded_alike() -> None:
    tokens = torch.arange(4).view(1, 4)
    mask = torch.ones(1, 4)
    cut = torch.tensor([0, 4], dtype=torch.int32)

    class Params:
        cu_seqlens_q_padded = cut

    keys = ["cu_seqlens", "cu_seqlens_padded", "labels", "loss_mask", "position_ids", "tokens"]
    new = record._fields([cut.view(1, 2), cut.view(1, 2), tokens, mask, tokens, tokens], {"BATCH_KEYS": keys})
    old = record._fields((tokens, tokens, mask, None, tokens, Params()), {})
    found = {"tokens": [0, 1, 2, 3], "labels": [0, 1, 2, 3], "mask": [1] * 4, "boundaries": [0, 4]}
    assert new == old == {**found, "cp_size": None}
    values = [cut.view(1, 2), cut.view(1, 2), tokens, torch.tensor([2]), mask, tokens, tokens]
    shared = record._fields(values, {"BATCH_KEYS": sorted([*keys, "local_cp_size"])})
    assert shared == {**found, "cp_size": 2}


def test_pictures_are_recorded_where_there_are_any() -> None:
    script, tokens = {"DEFAULT_IMAGE_TOKEN_INDEX": -200}, torch.arange(4).view(1, 4)
    for images, wanted in (
        (torch.ones(2, 3, 4, 4), [record.hash_of_picture(torch.ones(3, 4, 4))] * 2),
        (torch.empty(2, 0), 2),
        (None, None),
    ):
        assert record._fields((tokens, tokens, tokens, images, tokens, None, None), script)["pictures"] == wanted


def test_a_stage_without_tensors_is_recorded_as_none() -> None:
    none = {"tokens": None, "labels": None, "mask": None, "boundaries": None, "cp_size": None}
    assert record._fields((None,) * 6, {}) == none
