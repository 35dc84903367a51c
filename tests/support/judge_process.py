"""A process that judges what a trial makes, one number at a time; being late or a crash is a verdict.

In: a module that, with `--seed SEED --judge`, writes a line of JSON when it is ready, and one for each number that it
reads. Out: these lines.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from typing import Any

from tests.support.processes import ROOT


class JudgeProcess:
    """A process that judges; one that is late or has crashed is ended, and another begun."""

    def __init__(self, module: str, seed: int, *, limit_s: float) -> None:
        """Nothing runs yet; `limit_s` is for one answer."""
        self._command = [sys.executable, "-m", module, "--seed", str(seed), "--judge"]
        self._limit_s = limit_s
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> JudgeProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def ask(self, number: int) -> dict[str, Any]:
        """The report on one number."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            assert self._answer(600.0) is not None, "the judge did not begin"
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        report = self._answer(self._limit_s)
        if report is None:
            code = self._process.poll()
            self._end()
            reason = f"no answer in {self._limit_s:.0f} s" if code is None else f"the process ended with code {code}"
            report = {"verdict": f"WRONG {reason}"}
        return report

    def _answer(self, limit_s: float) -> dict[str, Any] | None:
        """The next line, None if it does not come. One line is asked for at a time, so none waits in a buffer."""
        assert self._process is not None and self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], limit_s)[0]:
            return None
        line = self._process.stdout.readline()
        report: dict[str, Any] | None = json.loads(line) if line else None
        return report

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
