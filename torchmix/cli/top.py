"""`torchmix top`: this user's runs on this machine, as they are now.

No process is disturbed. Cost: a walk of the page tables of these processes, each time.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

from torchmix.boards.find import SeenProcess, SeenRun, runs_of, seen_processes
from torchmix.cli.terminal import ExitCode, add_explain, print_json, print_table

HELP = "show this user's runs on this machine: processes, rates, waits, memory"
COLUMNS = {
    "process": "what it is, with its rank where it trains",
    "pid": "its number",
    "state": "running, or stopped",
    "memory": "of the process; pages that several share are counted in parts (PSS)",
    "cpu": "processors that it uses: 1.00 is one whole",
    "part": "part of the recipe, or what it does",
    "step": "the last step that training took; empty before the first one",
    "tokens/s": "of the global batch",
    "waits": "part of the time that training waited for data",
    "decoded": "how often a page was decoded in its window",
}
LOADER_COLUMNS = {
    "clients": "of a loader: who reads through it",
    "asked/s": "of a loader: requests that it has answered in a second",
    "sent/s": "of a loader: what it has sent in a second",
}
"""Shown where a run has loaders."""
RATES = {
    "total_tokens": "tokens_per_s",
    "total_data_wait_s": "wait_fraction",
    "requests_replies": "replies_per_s",
    "bytes_sent": "bytes_sent_per_s",
}
"""Figures that grow, and their growth in a second."""
_CLEAR = "\x1b[H\x1b[2J"
_UUID = re.compile(r"([0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this verb beside --json."""
    parser.add_argument("--once", action="store_true", help="look once, and end; implied by --json")
    parser.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="S", help="seconds between two looks, for rates (default 1)"
    )
    add_explain(parser)


def run(arguments: argparse.Namespace) -> ExitCode:
    """Look, and look again until Ctrl-C."""
    is_once = arguments.once or arguments.json
    before, before_s = seen_processes(), time.monotonic()
    while True:
        time.sleep(arguments.interval)
        now, now_s = seen_processes(), time.monotonic()
        values = [run_values(one, before, now_s - before_s) for one in runs_of(now)]
        if arguments.json:
            print_json({"runs": values})
        else:
            if not is_once and sys.stdout.isatty():
                print(_CLEAR + _screen(values, arguments), end="", flush=True)
            else:
                print_runs(values, explain=arguments.explain)
        if is_once:
            return ExitCode.OK
        before, before_s = now, now_s


def run_values(run: SeenRun, before: Sequence[SeenProcess], passed_s: float) -> dict[str, Any]:
    """What is known of a run, with rates over the seconds since an earlier look."""
    earlier = {(seen.board.pid, seen.board.started): seen for seen in before}
    processes = []
    for seen in run.processes:
        past = earlier.get((seen.board.pid, seen.board.started))
        cpu = None if past is None else (seen.cpu_s - past.cpu_s) / passed_s
        processes.append(
            {
                "kind": seen.board.kind,
                "pid": seen.board.pid,
                "state": seen.state,
                "is_orphan": seen.is_orphan,
                "pss_bytes": seen.pss_bytes,
                "cpu": None if cpu is None else round(max(0.0, cpu), 2),
                "age_s": round(time.monotonic() - seen.board.since_s, 1),
                "shown_s_ago": round(time.monotonic() - seen.board.shown_s, 1),
                "facts": seen.board.facts,
                "figures": {name: _with_rates(name, seen, past) for name in seen.board.figures},
                "events": [{"at_s": event.at_s, "text": event.text} for event in seen.board.events],
            }
        )
    return {"run": run.name, "pss_bytes": sum(seen.pss_bytes for seen in run.processes), "processes": processes}


def _with_rates(name: str, seen: SeenProcess, past: SeenProcess | None) -> dict[str, Any]:
    """Figures, and the rates of those that grow, over the time between two of their writes."""
    figures: dict[str, Any] = dict(seen.board.figures[name])
    if past is None or name not in past.board.figures:
        return figures
    passed_s = seen.board.shown_s - past.board.shown_s
    if passed_s <= 0:
        return figures
    for total, rate in RATES.items():
        now, then = figures.get(total), past.board.figures[name].get(total)
        if isinstance(now, int | float) and isinstance(then, int | float):
            figures[rate] = max(0.0, (now - then) / passed_s)
    return figures


def _screen(values: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> str:
    """What fits the terminal, under a head; the last line says how much does not."""
    written = io.StringIO()
    with redirect_stdout(written):
        print(f"torchmix top on {socket.gethostname()}, {time.strftime('%H:%M:%S')}, every {arguments.interval:g} s")
        print("Ctrl-C ends it; --explain says what the columns mean\n")
        print_runs(values, explain=arguments.explain)
    lines = written.getvalue().rstrip().split("\n")
    room = max(4, shutil.get_terminal_size().lines - 1)
    if len(lines) > room:
        lines = [*lines[: room - 1], f"... {len(lines) - room + 1} more lines; --once prints all"]
    return "\n".join(lines) + "\n"


def print_runs(runs: Sequence[dict[str, Any]], *, explain: bool) -> None:
    """Print what `run_values` has found: a table for each run, and its events."""
    if not runs:
        print("no process of this user's runs is on this machine")
        return
    for run in runs:
        print(f"{_title(run['run'])}: {len(run['processes'])} processes, {_mebibytes(run['pss_bytes'])}")
        has_loaders = any(process["kind"] == "loader" for process in run["processes"])
        columns = COLUMNS | LOADER_COLUMNS if has_loaders else COLUMNS
        rows: list[tuple[str, ...]] = []
        for process in run["processes"]:
            rank = process["facts"].get("rank")
            title = (
                process["kind"] + ("" if rank is None else f" {rank}") + (" (orphan)" if process["is_orphan"] else "")
            )
            cpu = "" if process["cpu"] is None else f"{process['cpu']:.2f}"
            own = (title, str(process["pid"]), process["state"], _mebibytes(process["pss_bytes"]), cpu)
            for name, figures in process["figures"].items() or [("", {})]:
                rows.append((*own, name, *_cells(figures))[: len(columns)])
                own = ("", "", "", "", "")
        print_table(columns, rows, explain=explain and run is runs[-1])
        for process in run["processes"]:
            for event in process["events"]:
                print(f"  {time.strftime('%H:%M:%S', time.localtime(event['at_s']))} {process['pid']}: {event['text']}")
        print()


def _title(run: str) -> str:
    """A run's name for people: its recipe as seen from here, and as much of a random id as tells runs apart."""
    recipe, _, job = run.rpartition(" ")
    near = os.path.relpath(recipe) if recipe.startswith("/") else recipe
    short = _UUID.sub(r"\1", job)
    return f"{min(recipe, near, key=len)} {short}".strip()


def _mebibytes(count: int) -> str:
    return f"{count >> 20:,} MiB"


def _cells(figures: dict[str, Any]) -> tuple[str, ...]:
    step, rate, wait = figures.get("step"), figures.get("tokens_per_s"), figures.get("wait_fraction")
    decoded = figures.get("decode_amplification")
    asked, sent = figures.get("replies_per_s"), figures.get("bytes_sent_per_s")
    return (
        "" if step is None or step < 0 else str(step),
        "" if rate is None else f"{rate:,.0f}",
        "" if wait is None else f"{100 * min(1.0, wait):.0f} %",
        "" if decoded is None else f"{decoded:.2f}",
        str(figures.get("clients", "")),
        "" if asked is None else f"{asked:,.0f}",
        "" if sent is None else _mebibytes(int(sent)),
    )


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds") from error
    if not 0.05 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.05 and 3600 seconds")
    return value
