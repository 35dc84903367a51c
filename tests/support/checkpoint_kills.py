"""A program: checkpoints of the example, saved by processes that are killed at chosen moments.

In: a recipe and a folder. Out: a JSON line per process: the step it could load, and its folder after it. The processes
are forks, since importing Megatron takes seconds: each saves the step after the one it has loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.example import example_module
from torchmix.recipe.load import load_recipe

MOMENTS = {
    "nothing": "",
    "while the files are written": "checkpoint.dcp.save",
    "before it has its name": "pathlib.Path.rename",
    "before `latest` names it": "pathlib.Path.replace",
    "before what it replaces is removed": "checkpoint.shutil.rmtree",
}
"""What a process is doing when it is killed, and the function that kills it instead."""


def in_fork(program: Callable[[], None]) -> int:
    """Exit status of `program` run by a fork of this process."""
    pid = os.fork()
    if pid == 0:
        program()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def load_then_save(recipe_path: Path, folder: Path, kill_in: str) -> None:
    """Load the latest checkpoint if there is one, then save the next step, and die in `kill_in`."""
    train = example_module("train")
    recipe = load_recipe(recipe_path)
    device = train.start_megatron(argparse.Namespace(tp=1, cp=1, pp=1, seed=1))
    model = train.gpt.build_model(recipe, device)
    optimizer = train.gpt.build_optimizer(model, learning_rate=1e-3)
    path = train.checkpoint.latest(folder)
    step = 0
    if path is not None:
        restored = train.checkpoint.load(path, model=model, optimizer=optimizer)
        step = restored.step
        assert restored.data_state == bytes([step]), restored
    print(json.dumps({"loaded": step}), flush=True)
    for parameter in model[0].parameters():
        parameter.main_grad.fill_(1.0)
    optimizer.step()
    with mock.patch(kill_in, die) if kill_in else mock.patch.dict({}):
        train.checkpoint.save(folder, step=step + 1, model=model, optimizer=optimizer, data_state=bytes([step + 1]))


def main(recipe_path: Path, folder: Path) -> None:
    example_module("train")
    for moment, kill_in in [*MOMENTS.items(), ("nothing", "")]:
        code = in_fork(lambda kill_in=kill_in: load_then_save(recipe_path, folder, kill_in))  # type: ignore[misc]
        print(json.dumps({"killed": moment, "code": code, "left": sorted(path.name for path in folder.iterdir())}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
