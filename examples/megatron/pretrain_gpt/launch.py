"""One run of the patched script: start its ranks, wait no longer than a deadline, and read their logs.

In: a checkout, ranks, Megatron's arguments, a folder. Out: a `Run`: exit codes, losses by iteration, logs, records.

Must hold: a run ends. At the deadline each rank prints the stacks of all its threads and ends itself (`entry.py`); a
rank that cannot do even that is killed soon after, with all its processes. When a rank has failed, the others have a
minute to notice. Ranks are started as torchrun starts them, by the same environment variables, but without its agent,
which would end the others as soon as one has failed: here they must notice themselves.

Where CUDA is present ranks use it as Megatron does; else `CPU_FLAGS` are added.

Cost: what the run costs; imports of Megatron take most of it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed import TCPStore

HERE = Path(__file__).resolve().parent
CPU_FLAGS = (
    *("--distributed-backend", "gloo"),
    *("--transformer-impl", "local"),
    *("--cp-comm-type", "all_gather"),
    "--use-cpu-initialization",
    "--no-bias-gelu-fusion",
    "--no-bias-dropout-fusion",
    "--no-masked-softmax-fusion",
    "--no-gradient-accumulation-fusion",
    "--no-persist-layer-norm",
)
"""Megatron's own switches for what it would do on a GPU alone."""
GRACE_S = 30.0
"""Between the deadline of the ranks and the end of everything."""
AFTER_FAILURE_S = 60.0
"""What the other ranks have to end after one has failed."""
_LOSS = re.compile(r" iteration +(\d+)/.*? lm loss: ([0-9.E+-]+)")
_TROUBLE = ("Timeout (", "torchmix.errors.", "Traceback (most recent call last)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """How a run went."""

    exit_codes: tuple[int | None, ...]
    """By rank; None for one that had to be killed, negative for one that a signal ended."""
    logs: tuple[str, ...]
    """By rank."""
    records: Path
    loss_of_iteration: dict[int, float]
    """Iteration, from 1 -> loss per token, as Megatron prints it."""

    @property
    def is_fine(self) -> bool:
        return all(code == 0 for code in self.exit_codes)

    @property
    def log(self) -> str:
        return "\n".join(self.logs)

    @property
    def trouble(self) -> str:
        """What of each rank's log tells most about a failure: stacks at the deadline, or an error, else the end."""
        parts = []
        for rank, (code, log) in enumerate(zip(self.exit_codes, self.logs, strict=True)):
            start = max((log.find(mark) for mark in _TROUBLE), default=-1)
            parts.append(f"--- rank {rank}, exit code {code}\n{log[start:][:4000] if start >= 0 else log[-1500:]}")
        return "\n".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Runner:
    """Starts runs of one script, each in a folder of its own."""

    script: Path
    """The patched copy."""
    checkout: Path
    """Of Megatron-LM, whose packages the script imports."""
    folder: Path
    """Where runs leave their logs and records."""
    deadline_s: float
    """Until every rank of a run prints its stacks and ends."""

    def run(self, name: str, arguments: Sequence[str], *, ranks: int, **environment: str) -> Run:
        """Run the script to its end.

        Args:
            name: The name of the run; each has another.
            arguments: Megatron's; those for a CPU are added where there is no GPU.
            ranks: Processes, all on this machine.
            environment: More variables for all ranks.
        """
        print(f"{name} ...", flush=True)
        with self.started(name, arguments, ranks=ranks, **environment) as processes:
            end_s = time.monotonic() + self.deadline_s + GRACE_S
            while any(process.poll() is None for process in processes) and time.monotonic() < end_s:
                if any(process.poll() for process in processes):
                    wait(processes, min(AFTER_FAILURE_S, end_s - time.monotonic()))
                    break
                time.sleep(0.2)
            return self.result(name, [process.poll() for process in processes])

    @contextlib.contextmanager
    def started(
        self, name: str, arguments: Sequence[str], *, ranks: int, **environment: str
    ) -> Iterator[list[subprocess.Popen[bytes]]]:
        """The processes of all ranks; they, and what they have started, are gone when the context ends."""
        folder = self._folder_of(name)
        folder.mkdir(parents=True)
        command = [sys.executable, str(HERE / "entry.py"), str(self.script), *arguments]
        command += () if torch.cuda.is_available() else CPU_FLAGS
        (folder / "command.txt").write_text(shlex.join(command) + "\n", encoding="utf-8")
        # Kept here, as torchrun keeps it: its port is bound before any rank knows the number.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {
            "OMP_NUM_THREADS": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron asserts it
            "PYTHONWARNINGS": "ignore",
            **os.environ,
            "MEGATRON_LM": str(self.checkout),
            "RECORD_DIR": str(folder / "records"),
            "DEADLINE_S": str(self.deadline_s),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            **environment,
        }
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                with (folder / f"log-{rank}.txt").open("wb") as log:
                    started = subprocess.Popen(
                        command, stdout=log, stderr=subprocess.STDOUT, env=own, start_new_session=True
                    )
                processes.append(started)
            yield processes
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def result(self, name: str, exit_codes: Sequence[int | None]) -> Run:
        """What a run has left behind so far."""
        folder = self._folder_of(name)
        files = [folder / f"log-{rank}.txt" for rank in range(len(exit_codes))]
        logs = tuple(file.read_text(encoding="utf-8", errors="replace") for file in files)
        return Run(
            exit_codes=tuple(exit_codes), logs=logs, records=folder / "records", loss_of_iteration=losses_of(logs[-1])
        )

    def _folder_of(self, name: str) -> Path:
        return self.folder / "runs" / name.replace(" ", "-")


def wait(processes: Sequence[subprocess.Popen[bytes]], most_s: float) -> None:
    """Until all have ended, or some time has passed."""
    end_s = time.monotonic() + most_s
    while any(process.poll() is None for process in processes) and time.monotonic() < end_s:
        time.sleep(0.05)


def losses_of(log: str) -> dict[int, float]:
    """Loss per token by iteration, from the lines that Megatron's last rank writes at `--log-interval 1`."""
    return {int(iteration): float(loss) for iteration, loss in _LOSS.findall(log)}
