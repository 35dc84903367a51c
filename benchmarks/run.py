"""Run benchmarks, keep what each one found as one JSON, and put their tables into a page.

    python benchmarks/run.py planning reading               # all of them without names; --quick for small ones
    python benchmarks/run.py planning -- --steps 20         # what stands behind -- goes to the benchmark
    python benchmarks/run.py --page docs/performance.md     # write the tables that were kept into the page

In: names of scripts in this folder. Out: `runs/benchmarks/NAME.json`: the command, the commit, the machine, seconds,
what was printed, its tables and its own JSON. Must hold: a script that fails is said and ends the run with its exit
code after the others have run; the file of an earlier run stays then. A page takes the tables of `NAME` between the
lines `<!-- benchmark NAME -->` and `<!-- end -->`, or the second one alone with `<!-- benchmark NAME 2 -->`, so no
figure in it is copied by hand. Cost: that of the scripts.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
KEPT = HERE.parent / "runs" / "benchmarks"
PARTS = {"megatron_data", "megatron_rival", "process_trees", "run", "synthetic"}
"""What others import, and this file."""
PLACE = r"<!-- benchmark (\w+)(?: ([1-9]))? -->\n.*?<!-- end -->"
"""The markers in a page, and what stands between them: all tables of a benchmark, or the one with this number."""
PACKAGES = ("torch", "numpy", "pyarrow", "torchdata", "megatron-core")


def names() -> list[str]:
    """The benchmarks of this folder."""
    return sorted(path.stem for path in HERE.glob("*.py") if path.stem not in PARTS)


def tables_of(printed: str) -> list[list[list[str]]]:
    """Tables in what a script printed: neighbouring lines with equally many cells, the first of which is the head.

    Cells stand between bars; a table may have bars outside, and a ruler below its head, as Markdown has. JSON may stand
    between its lines.
    """
    tables: list[list[list[str]]] = []
    before = 0
    for line in printed.splitlines():
        if line.startswith("{"):
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if "|" in line else []
        if len(cells) < 2:
            before = 0
            continue
        if all(re.fullmatch(r":?-{3,}:?", cell) for cell in cells):
            continue
        if len(cells) != before:
            tables.append([])
        tables[-1].append(cells)
        before = len(cells)
    return [table for table in tables if len(table) > 1]


def objects_of(printed: str) -> list[Any]:
    """Lines that are JSON objects."""
    found = []
    for line in printed.splitlines():
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found


def markdown(tables: list[list[list[str]]]) -> str:
    """Tables as Markdown, with an empty line between them."""
    texts = []
    for head, *rows in tables:
        lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
        texts.append("\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]]))
    return "\n\n".join(texts)


def run(name: str, words: list[str]) -> int:
    """Run one benchmark, and keep what it found; its exit code."""
    command = [sys.executable, str(HERE / f"{name}.py"), *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    begin = time.monotonic()
    printed = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            printed += line
            print(line, end="", flush=True)
    code = process.returncode
    if code:
        print(f"{name} ended with exit code {code}; nothing is kept of it", file=sys.stderr)
        return code
    record = {
        "benchmark": name,
        "command": ["python", f"benchmarks/{name}.py", *words],
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": {"cpus": os.cpu_count(), "processor": platform.machine(), "system": platform.system()},
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "seconds": round(time.monotonic() - begin, 1),
        "tables": tables_of(printed),
        "objects": objects_of(printed),
        "printed": printed,
    }
    KEPT.mkdir(parents=True, exist_ok=True)
    (KEPT / f"{name}.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    return 0


def fill(page: str, records: dict[str, Any]) -> tuple[str, list[str]]:
    """A page with the tables that were kept in their places, and the names of the places that stay as they are."""
    missing = []

    def replace(match: re.Match[str]) -> str:
        name, number = match[1], match[2]
        tables = records.get(name, {"tables": []})["tables"]
        if number is not None:
            tables = tables[int(number) - 1 : int(number)]
        if not tables:
            missing.append(name)
            return match[0]
        return f"<!-- benchmark {name}{f' {number}' if number else ''} -->\n\n{markdown(tables)}\n\n<!-- end -->"

    return re.sub(PLACE, replace, page, flags=re.DOTALL), missing


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> int:
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names())}")
    parser.add_argument("--quick", action="store_true", help="give --quick to those that have it")
    parser.add_argument("--page", type=Path, help="write kept tables into this page; runs nothing")
    options = parser.parse_args(words[:split])
    if unknown := sorted(set(options.names) - set(names())):
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(names())}")
    if options.page is not None:
        records = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(KEPT.glob("*.json"))}
        text, missing = fill(options.page.read_text(encoding="utf-8"), records)
        options.page.write_text(text, encoding="utf-8")
        for name in missing:
            print(f"{name}: nothing was kept; run `python benchmarks/run.py {name}`", file=sys.stderr)
        return 1 if missing else 0
    codes = []
    for name in options.names or names():
        has_quick = "--quick" in (HERE / f"{name}.py").read_text(encoding="utf-8")
        codes.append(run(name, [*(["--quick"] if options.quick and has_quick else []), *words[split + 1 :]]))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
