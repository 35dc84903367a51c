"""Pictures of the tutorial, from a walk through it: `python docs/pictures/make_tutorial.py [FOLDER]`.

In: docs/tutorial.md, whose commands are run in a temporary folder with two small sources. Out, in the folder (default:
this one): `tutorial.svg`, what a terminal shows of the kill, the resume and the edit; `same_run.svg`, the losses of
that run on those of a run that was not disturbed. Takes some minutes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))
from make_screens import terminal_svg
from svg import COLORS, chart

from tests.trials.from_nothing import FILES

PAGE = (Path(__file__).parents[1] / "tutorial.md").read_text(encoding="utf-8")
COLUMNS = 110
STEP = re.compile(r"^step (\d+) on (\d) rank\(s\): loss ([\d.]+), digest (\w{16})$", re.MULTILINE)


def run(command: str, folder: Path) -> str:
    """What a command of the page prints, also where it fails as the page says."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    return done.stdout + done.stderr


def kept(command: str, printed: str) -> list[str]:
    """The lines that the picture shows of a command."""
    if command.startswith("torchrun"):
        lines = STEP.findall(printed) and [match[0] for match in re.finditer(STEP, printed)]
        lost = re.search(r"^torchmix: rank 1 lost: .*$", printed, re.MULTILINE)
        return [*lines, lost[0] if lost else "", "..."]
    if command.startswith("torchmix"):
        return re.findall(r"^digest .*$", printed, re.MULTILINE)
    if "StateMismatch" in printed:
        return ["...", printed.strip().splitlines()[-1]]
    return [match[0] for match in re.finditer(STEP, printed)]


def walk(folder: Path) -> tuple[str, list[tuple[int, float]], str]:
    """Follow the page; what a terminal shows of its last half, step and loss of each step, and the last digest before
    the edit."""
    shown: list[str] = []
    losses: dict[int, float] = {}
    digest = code = ""
    trains = False
    for language, block in re.findall(r"^```(console|yaml|python)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        if language == "python":
            (folder / "train.py").write_text(block, encoding="utf-8")
            trains = True
        elif language == "yaml":
            recipe = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8")) | yaml.safe_load(block)
            (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
            shown += ["", "# recipe.yaml has other shares now"] if trains else []
        else:
            for line in block.splitlines():
                command = line.removeprefix("$ ").replace("CODE", code)
                printed = run(command, folder)
                for step, _, loss, found in STEP.findall(printed):
                    losses[int(step)] = float(loss)
                    digest = found if not code else digest
                code = next(iter(re.findall(r"accept_edit='(\w{16})'", printed)), code)
                if trains:
                    lines = [part for each in kept(command, printed) for part in textwrap.wrap(each, COLUMNS) or [""]]
                    shown += ["", f"$ {command}", *lines]
    return "\n".join(shown[1:]), sorted(losses.items()), digest


def undisturbed(folder: Path, steps: int) -> tuple[list[float], str]:
    """Losses and the last digest of a run of one rank that nobody stops, of the recipe before the edit."""
    found = STEP.findall(run(f"python train.py --steps {steps}", folder))
    return [float(loss) for _, _, loss, _ in found], found[-1][3]


def main(folder: Path) -> None:
    """Write the pictures."""
    with tempfile.TemporaryDirectory() as temporary:
        first, second = Path(temporary) / "first", Path(temporary) / "second"
        first.mkdir()
        subprocess.run([sys.executable, "-c", FILES], cwd=first, check=True)
        terminal, losses, digest = walk(first)
        shutil.copytree(first, second)
        (second / "checkpoint.pt").unlink()
        shares = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[0]
        recipe = yaml.safe_load((second / "recipe.yaml").read_text(encoding="utf-8")) | yaml.safe_load(shares)
        (second / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
        alone, end = undisturbed(second, 10)
    assert digest == end, "the run that was killed has another order than the one that was not"
    lines = {
        "one rank": (list(range(10)), alone, "#7f96d6", ""),
        "killed, resumed": ([step for step, _ in losses[:10]], [loss for _, loss in losses[:10]], COLORS[2], "3 5"),
    }
    picture = chart(
        f"One run twice: both end with the order digest {digest}",
        lines,
        alt="Losses of a run of two ranks, killed in step 5 and continued on one rank, on those of an undisturbed run",
        across="step",
        up="loss",
        top=8,
        height=260,
        marks=[(5, "rank 1 of 2 is killed; one rank goes on")],
    )
    (folder / "same_run.svg").write_text(str(picture), encoding="utf-8")
    (folder / "tutorial.svg").write_text(terminal_svg(terminal), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
