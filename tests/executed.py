"""Every test is executed somewhere: the junit files of all runs of CI, united.

    python -m tests.executed runs/junit/test.xml runs/junit/test-examples.xml ...

A test that each run skipped fails the check and is named with its reason, unless what it lacks is in `LACKING`. A
module that is skipped whole counts as executed where another run has executed a test of it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

LACKING = {
    r"hosts on one machine (need|cannot be made)": "network namespaces need root",
    r"no browser is installed": "CI installs one where it can",
    r"prometheus is not installed": "the names in the queries are checked without it",
    r"where CUDA is present": "a machine with a GPU runs what the test fakes",
    r"swift is not installed": "ms-swift needs Transformer Engine; a person runs its data path with a stand-in",
    r"(gcc|clang|ziglang) is not installed": "one compiler alone compiles in CI; a person runs the others",
    r"reads /proc|no /proc here|the kernel of Linux|this system has files alone": "the system is not Linux",
}
"""Reasons of tests that a machine of CI may skip: what it lacks, and why no run has it."""


def skipped_everywhere(files: Iterable[Path]) -> dict[str, str]:
    """Name of each test that some run skipped and none executed, to the last reason.

    Args:
        files: The files of pytest's `--junit-xml`, one a run.
    """
    executed: set[str] = set()
    skipped: dict[str, str] = {}
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            module, name = case.get("classname", ""), case.get("name", "")
            test = f"{module}::{name}" if module else name  # the name of a module that is skipped whole
            skip = next((each for each in case.findall("skipped") if each.get("type") != "pytest.xfail"), None)
            if skip is None:
                executed |= {test, module}
            else:
                skipped[test] = skip.text if skip.get("message") == "collection skipped" else skip.get("message", "")
    return {test: reason or "" for test, reason in sorted(skipped.items()) if test not in executed}


def main(words: list[str]) -> int:
    """Run from the command line; 1 where a test is executed by no run, 2 where no run is named."""
    if not words:
        print("name the junit files of all runs", file=sys.stderr)
        return 2
    found = skipped_everywhere(map(Path, words))
    bare = {test: reason for test, reason in found.items() if not any(re.search(each, reason) for each in LACKING)}
    for test, reason in bare.items():
        print(f"no run executes {test}: {reason}")
    print(f"{len(words)} runs; {len(found) - len(bare)} tests need what this machine lacks")
    if bare:
        print(
            f"{len(bare)} tests are executed by no run: give a run what they need, or say in {__file__} what is lacking"
        )
    return int(bool(bare))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
