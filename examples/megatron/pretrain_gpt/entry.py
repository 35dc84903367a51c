"""One rank: the shims that a CPU needs, the record of what is consumed, a deadline, and then Megatron's own script.

In: the patched `pretrain_gpt.py`, Megatron's arguments, and environment variables. Out: what the script does.

    torchrun --nproc-per-node 2 entry.py /tmp/patched/pretrain_gpt.py --data-recipe recipe.yaml ...

`MEGATRON_LM`: the checkout, whose packages are imported. `RECORD_DIR`: every rank writes what `get_batch` gave it to a
file in this folder. `DEADLINE_S`: after so many seconds every rank prints the stacks of all its threads and ends.
`FORGET_STATE`: checkpoints are saved as Megatron alone would, without torchmix's state.
`FAIL_ONCE`: `R:N:error`, process R raises an error when it asks for data in iteration N, the first time; `R:N:kill`, it
is killed.

Must hold: the script sees itself as `__main__`, as under `python pretrain_gpt.py`. Megatron spawns processes that write
checkpoints; they import this file under another name, and so get the shims, without which they could not import
Megatron. Where CUDA is present no shim is in force, and only the record and the deadline remain.

Cost: none beside what the shims cost.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, os.environ["MEGATRON_LM"])

import cpu_device
import cpu_imports
import torch

if not torch.cuda.is_available():
    cpu_imports.enable()
    cpu_device.enable()


def prepare() -> tuple[str, str]:
    """Set the deadline, the shims inside Megatron and the record; the script's text and path."""
    if "DEADLINE_S" in os.environ:
        faulthandler.dump_traceback_later(float(os.environ["DEADLINE_S"]), exit=True)
    script = Path(sys.argv[1])
    del sys.argv[0]
    if cpu_device.enabled():
        import cpu_megatron

        cpu_megatron.enable()
    if "RECORD_DIR" in os.environ:
        import record

        record.enable(Path(os.environ["RECORD_DIR"]))
    if "FORGET_STATE" in os.environ:
        forget_state()
    if "FAIL_ONCE" in os.environ:
        fail_once(*os.environ["FAIL_ONCE"].split(":"))
    return script.read_text(encoding="utf-8"), str(script)


def forget_state() -> None:
    """Take what torchmix adds out of the arguments that Megatron puts into a checkpoint."""
    from megatron.training import checkpointing

    original = checkpointing.generate_state_dict

    def generate_state_dict(args: Any, *rest: Any, **named: Any) -> Any:
        kept = {name: value for name, value in vars(args).items() if not name.startswith("torchmix")}
        return original(argparse.Namespace(**kept), *rest, **named)

    checkpointing.generate_state_dict = generate_state_dict


def fail_once(rank: str, iteration: str, how: str) -> None:
    """Let a process fail in an iteration."""
    from megatron.training import get_args

    import torchmix.megatron_adapter as tmx

    factory = tmx.get_batch
    to_fail_in = [int(iteration)] if os.environ["RANK"] == rank else []

    def get_batch(script: dict[str, Any]) -> Any:
        original = factory(script)

        def failing(*given: Any) -> Any:
            if get_args().curr_iteration in to_fail_in:
                to_fail_in.clear()
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError(f"rank {rank} was told to fail in iteration {iteration}")
            return original(*given)

        return failing

    tmx.get_batch = get_batch


if __name__ == "__main__":
    source, path = prepare()
    exec(compile(source, path, "exec"), globals())
