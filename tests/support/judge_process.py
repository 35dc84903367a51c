"""A process that judges what a trial makes, one number at a time; being late or a crash is a verdict.

In: a module that, with `--seed SEED --judge`, writes a line of JSON when it is ready, and one for each number that it
reads. Out: these lines; and a trial over many numbers, which continues where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
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
        began = time.monotonic()
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        report = self._answer(self._limit_s)
        if report is None:
            code = self._process.poll()
            self._end()
            reason = f"no answer in {self._limit_s:.0f} s" if code is None else f"the process ended with code {code}"
            report = {"verdict": f"WRONG {reason}"}
        return {**report, "seconds": round(time.monotonic() - began, 3)}

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


def run_trial(judge: JudgeProcess, *, seed: int, count: int, out: Path) -> dict[str, Any]:
    """Judge 0 to `count`, by a judge of a seed; what is in `out` already is not judged again."""
    result: dict[str, Any] = {"seed": seed, "done": 0, "verdicts": {}, "wrong": [], "slowest_s": 0.0}
    if out.exists():
        result = json.loads(out.read_text())
        assert result["seed"] == seed, f"{out} is of seed {result['seed']}"
    verdicts = Counter(result["verdicts"])
    for number in range(result["done"], count):
        report = judge.ask(number)
        is_wrong = report["verdict"].startswith("WRONG")
        when = f"{report['when']}: " if "when" in report else ""
        verdicts["wrong" if is_wrong else when + report["verdict"]] += 1
        if is_wrong:
            result["wrong"].append({"number": number, **report})
        slowest = max(result["slowest_s"], report["seconds"])
        result |= {"done": number + 1, "verdicts": dict(sorted(verdicts.items())), "slowest_s": slowest}
        if number % 50 == 49 or number == count - 1 or is_wrong:
            out.write_text(json.dumps(result, indent=1) + "\n")
    return result


def judged_trial(
    module: str, text: str | None, judge_numbers: Callable[[int], None], *, count: int, limit_s: float
) -> None:
    """The `main` of such a module: the trial, the judge of one number, or the process that judges."""
    name = module.rpartition(".")[2]
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--out", type=Path, help=f"one JSON; {name}-SEED.json in this folder by default")
    parser.add_argument("--only", type=int, help="judge this one alone")
    parser.add_argument("--judge", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.judge:
        judge_numbers(arguments.seed)
        return
    with JudgeProcess(module, arguments.seed, limit_s=limit_s) as judge:
        if arguments.only is not None:
            print(json.dumps(judge.ask(arguments.only), indent=1))
            return
        out = arguments.out or Path(f"{name}-{arguments.seed}.json")
        result = run_trial(judge, seed=arguments.seed, count=arguments.count, out=out)
    print(json.dumps(result, indent=1))
    sys.exit(bool(result["wrong"]))
