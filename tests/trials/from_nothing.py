"""Trial: from an empty folder to a trained model and a resumed run, as the README and the tutorial say.

    python -m tests.trials.from_nothing --out from_nothing.json [--empty-root FOLDER]

With `--empty-root` the walk has a folder as its root, with this machine's `/usr`, `/etc` and `/opt` in it and nothing
else: no home, no checkout, no compiler. It needs `unshare`, and no container runtime.

In: this repository's last commit. Out: one JSON with the seconds of each step, and what training printed last. A clone,
a home folder and an environment of variables are new; pip's settings alone are those of this machine. Must hold: every
step ends with exit code 0, and the digests of `torchmix plan` are those of training. Costs what pip downloads, and two
to ten minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEADLINE_S = 3600
KEPT = ("PIP_", "SSL_", "REQUESTS_", "http_proxy", "https_proxy", "no_proxy")
FILES = """
import json, pathlib, random
import pyarrow as pa, pyarrow.parquet as pq
random.seed(0)
for folder in ("data", "corpus"):
    pathlib.Path(folder).mkdir()
for number in range(2):
    rows = [[random.randrange(1_000) for _ in range(random.randrange(20, 300))] for _ in range(900)]
    pq.write_table(pa.table({"input_ids": pa.array(rows, pa.list_(pa.int32()))}), f"data/web-{number}.parquet")
words = "some words that a reader may have".split()
texts = [" ".join(random.choices(words, k=random.randrange(5, 90))) for _ in range(400)]
pq.write_table(pa.table({"text": texts}), "corpus/peps.parquet")
"""
RESHARE = """
import pathlib, sys, yaml
recipe = yaml.safe_load(pathlib.Path("recipe.yaml").read_text()) | yaml.safe_load(sys.stdin.read())
pathlib.Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
"""


class Walk:
    """Steps one after another, in one environment; times are kept."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self.seconds: dict[str, float] = {}

    def step(
        self, name: str, command: Sequence[str], folder: Path, *, given: str = "", codes: Sequence[int] = (0,)
    ) -> str:
        """Run a step; what it printed.

        Raises:
            RuntimeError: It failed.
        """
        begin = time.monotonic()
        done = subprocess.run(
            command,
            cwd=folder,
            env=self.environment,
            input=given,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        self.seconds[name] = round(time.monotonic() - begin, 1)
        print(f"{self.seconds[name]:8.1f} s  {name}", flush=True)
        if done.returncode not in codes:
            raise RuntimeError(f"{name} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        return done.stdout


def tutorial(walk: Walk, page: str, folder: Path) -> list[str]:
    """Follow the page in a folder; the digests that its scripts and its plans printed."""
    walk.step("tutorial: files", ["python", "-c", FILES], folder)
    digests: list[str] = []
    code, printed = "", ""
    for language, block in re.findall(r"^```(console|yaml|python)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        if language == "yaml":
            walk.step("tutorial: shares", ["python", "-c", RESHARE], folder, given=block)
        elif language == "python":
            (folder / "train.py").write_text(block, encoding="utf-8")
        else:
            for line in block.splitlines():
                command = line.removeprefix("$ ").replace("CODE", code)
                may_fail = " check " in command or "--die-at" in command or command.endswith("--steps 14")
                codes = (0, 1) if may_fail else (0,)
                printed = walk.step(f"tutorial: {command}", ["bash", "-c", f"{command} 2>&1"], folder, codes=codes)
                code = next(iter(re.findall(r"accept_edit='(\w{16})'", printed)), code)
                digests += re.findall(r"digest +(\w{16})", printed)
    return digests


def run(python: str, train_args: str) -> dict[str, object]:
    """Walk the whole road; times and what came of it."""
    with tempfile.TemporaryDirectory() as temporary:
        home, clone = Path(temporary) / "home", Path(temporary) / "torchmix"
        home.mkdir()
        environment = {key: value for key, value in os.environ.items() if key.startswith(KEPT)}
        environment |= {"HOME": str(home), "LANG": "C.UTF-8", "PATH": f"{clone / '.venv' / 'bin'}:/usr/bin:/bin"}
        walk = Walk(environment)
        walk.step("clone", ["git", "clone", "--quiet", "--depth", "1", ROOT.as_uri(), str(clone)], home)
        walk.step("install", ["make", f"PYTHON={python}", ".venv/.trains"], clone)
        printed = walk.step("make train", ["make", f"PYTHON={python}", f"TRAIN_ARGS={train_args}"], clone)
        own = Path(temporary) / "own"
        own.mkdir()
        page = (clone / "docs" / "tutorial.md").read_text(encoding="utf-8")
        digests = tutorial(walk, page, own)
    assert digests[-1] == digests[-2], "the plan has another digest than training"
    return {"seconds": walk.seconds, "trained": printed.strip().splitlines()[-4:], "digests": digests}


INSIDE = """
set -e
cd "$1"
for folder in usr etc opt; do mkdir -p $folder && mount --rbind /$folder $folder; done
for folder in bin lib lib64 sbin; do ln -sfn usr/$folder $folder; done
mkdir -p proc dev tmp root && mount -t proc proc proc && mount --rbind /dev dev
for compiler in usr/bin/*gcc* usr/bin/*clang* usr/bin/cc; do
  if [ -f "$compiler" ] && [ ! -L "$compiler" ]; then mount --bind /dev/null "$compiler"; fi
done
shift
exec chroot . /usr/bin/env -i HOME=/root LANG=C.UTF-8 PATH=/usr/bin:/bin "$@"
"""
"""A shell, in name spaces of its own: from the folder, and the command that it becomes there."""


def run_in(root: Path, train_args: str) -> str:
    """Walk where a folder is the root; the JSON of what was found.

    Raises:
        subprocess.CalledProcessError: A step failed, or name spaces are not allowed here.
    """
    if not (root / "src").exists():
        subprocess.run(["git", "clone", "--quiet", "--depth", "1", ROOT.as_uri(), str(root / "src")], check=True)
    kept = [f"{key}={value}" for key, value in os.environ.items() if key.startswith(KEPT)]
    walk = "cd /src && exec python3 -m tests.trials.from_nothing --python /usr/bin/python3 --out /tmp/found.json"
    inside = ["bash", "-c", INSIDE, "bash", str(root.absolute()), *kept, "bash", "-c", f'{walk} --train-args "$0"']
    unshared = ["unshare", "--map-root-user", "--mount", "--pid", "--fork"]
    subprocess.run([*unshared, *inside, train_args], check=True)
    return (root / "tmp" / "found.json").read_text(encoding="utf-8")


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--train-args", default="--tp 2", help="of make train, such as '--tp 2 --steps 20'")
    parser.add_argument("--out", type=Path, default=Path("from_nothing.json"))
    parser.add_argument("--empty-root", type=Path, metavar="FOLDER", help="made, if it is missing, and not removed")
    asked = parser.parse_args()
    if asked.empty_root is not None:
        asked.empty_root.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(run_in(asked.empty_root, asked.train_args), encoding="utf-8")
        return 0
    found = run(asked.python, asked.train_args)
    asked.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
