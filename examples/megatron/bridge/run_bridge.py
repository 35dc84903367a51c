"""Does Megatron-Bridge train on what a recipe plans? At several layouts, and after a resume elsewhere.

    python run_bridge.py ~/Megatron-Bridge ~/Megatron-LM --only "thd CP2" --keep /tmp/bridge

In: checkouts of Bridge, and of the Megatron-LM that it names in `3rdparty/Megatron-LM`. Out: a table, and exit code 1
if a line fails. Each line trains six steps by Bridge's own `pretrain` and forward step, and goes on from its checkpoint
of step 3 on a single rank. A line passes if what Bridge's `get_batch` returned, on all ranks together, is in each step
what torchmix plans without Bridge and without ranks; and if losses after the resume are those of the run that was
saved, and at DP2 and CP2, whose first weights are the same, those of a single rank, to 1e-5.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "pretrain_gpt"))
corpus, records = importlib.import_module("corpus"), importlib.import_module("consumed")

STEPS, SAVED_AT = 6, 3
LAYOUTS = {
    "DP2": {"dp": 2},
    "TP2": {"tp": 2},
    "CP2": {"cp": 2},
    "PP2": {"pp": 2},
    "PP2 x VP2": {"pp": 2, "vp": 2},
    "PP2, 2 samples": {"pp": 2, "micro_batch_size": 2},
    "PP4": {"pp": 4},
}
_LOSS = re.compile(r" iteration +(\d+)/.*? lm loss: ([0-9.E+-]+)")


@dataclass(frozen=True, kw_only=True)
class Run:
    """How a run went."""

    log: str
    problems: list[str]
    losses: dict[int, float]


class Runner:
    """Starts runs of `train_bridge.py`."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._checkouts = ["--bridge", str(options.bridge), "--megatron", str(options.megatron)]
        self._deadline_s = options.deadline_s
        self.folder = folder

    def run(
        self, name: str, recipe: str, layout: dict[str, int], *more: str, first: int = 0, steps: int = STEPS
    ) -> Run:
        """Train, and compare what was consumed with the plan.

        Args:
            name: Of the run; each has another.
            recipe: Name of a recipe of the corpus.
            layout: Sizes of axes.
            more: Arguments of `train_bridge.py`.
            first: The step that is to be consumed first.
            steps: The step to end before.
        """
        home = self.folder / "runs" / name.replace(" ", "-")
        home.mkdir(parents=True)
        axes = {axis: layout.get(axis, 1) for axis in ("tp", "cp", "pp", "vp", "micro_batch_size")}
        num_ranks = layout.get("dp", 1) * axes["tp"] * axes["cp"] * axes["pp"]
        command = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1", "--master-port", "0"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--nproc-per-node", str(num_ranks)]
        command += [str(HERE / "train_bridge.py"), str(self.folder / f"{recipe}.yaml"), *self._checkouts]
        command += [word for axis, size in axes.items() for word in (f"--{axis.replace('_', '-')}", str(size))]
        command += ["--record", str(home / "records"), "--deadline-s", str(self._deadline_s), "--steps", str(steps)]
        text, code = _output_of([*command, *more], self._deadline_s + 60)
        (home / "log.txt").write_text(text, encoding="utf-8")
        problems = [f"exit code {code}: {_end_of(text)}"] if code else []
        lines = [line for line in records.read_records(home / "records") if line["step"] is not None]
        found = records.consumed(lines, cp=axes["cp"], pp=axes["pp"], chunks=axes["vp"], length=corpus.LENGTH)
        plan = records.planned_samples(self.folder / f"{recipe}.yaml", steps)
        expected = {step: plan[step] for step in range(first, steps)}
        problems += found.problems + records.difference(expected, found.samples_of_step)
        problems += [f"step {step} was not to be consumed" for step in set(found.samples_of_step) - set(expected)]
        losses = {int(step): float(loss) for step, loss in _LOSS.findall(text)}
        return Run(log=text, problems=problems, losses=losses)


def _output_of(command: list[str], deadline_s: float) -> tuple[str, int]:
    """What a run writes, and its exit code; it and all its processes are gone afterwards."""
    words = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONWARNINGS": "ignore", **os.environ}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=words, start_new_session=True
    )
    try:
        text, _ = process.communicate(timeout=deadline_s)
        return text, process.returncode
    except subprocess.TimeoutExpired:
        return "did not end in time", 124
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _end_of(text: str) -> str:
    """The last error that a run tells of."""
    marks = [line for line in text.splitlines() if re.search(r"(Error|Mismatch|Lost)\b.*: ", line)]
    return marks[0] if marks else text[-300:]


def _lines(runner: Runner, only: list[str]) -> list[tuple[str, list[str]]]:
    """Each line that was asked for, with what is wrong in it."""
    table: list[tuple[str, list[str]]] = []
    alone: dict[str, Run] = {}

    def is_asked(name: str) -> bool:
        return not only or any(name.startswith(start) for start in only)

    def reference(packing: str) -> Run:
        if packing not in alone:
            alone[packing] = runner.run(f"{packing} alone", packing, {})
        return alone[packing]

    for packing in corpus.PACKING:
        for layout, sizes in LAYOUTS.items():
            name = f"{packing} {layout}"
            if not is_asked(name):
                continue
            print(f"{name} ...", flush=True)
            one = reference(packing)
            save = ("--save", str(runner.folder / "checkpoints" / name), "--save-interval", str(SAVED_AT))
            whole = runner.run(name, packing, sizes, *save)
            load = ("--load", save[1], "--ckpt-step", str(SAVED_AT))
            rest = runner.run(f"{name} resumed", packing, {}, *load, first=SAVED_AT)
            problems = [f"alone: {problem}" for problem in one.problems] + whole.problems
            problems += [f"resumed: {problem}" for problem in rest.problems]
            problems += _unequal(rest.losses, whole.losses, SAVED_AT + 1)
            if not {"tp", "pp"} & set(sizes):
                problems += _unequal(whole.losses, one.losses, 1)
            table.append((name, problems))
    return table


def _unequal(found: dict[int, float], expected: dict[int, float], first: int) -> list[str]:
    """Iterations whose loss is another than expected."""
    return [
        f"iteration {step}: loss {found.get(step)} and {expected.get(step)}"
        for step in range(first, STEPS + 1)
        if step not in found or step not in expected or abs(found[step] - expected[step]) > 1e-5 * expected[step]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bridge", type=Path)
    parser.add_argument("megatron", type=Path)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="lines that begin so")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where logs, records and checkpoints stay")
    parser.add_argument("--deadline-s", type=float, default=300.0, help="of one run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = options.keep or Path(folder)
        corpus.write_corpus(home)
        table = _lines(Runner(options, home), options.only)
    print(json.dumps({"lines": len(table), "wrong": sum(bool(problems) for _, problems in table)}))
    for name, problems in table:
        print(f"{name:12} {'ok' if not problems else '; '.join(problems[:4])}")
    sys.exit(any(problems for _, problems in table) or not table)


if __name__ == "__main__":
    main()
