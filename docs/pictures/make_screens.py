"""Screens of these pages: `python docs/pictures/make_screens.py [FOLDER]`.

In: nothing; a demonstration's corpus, and the corpus of `make_pictures.py`, are written to a temporary folder. Out:
`top.svg`, `torchmix top` over a run of four ranks whose node worker was killed, as a terminal shows it; `report.png`,
the page of `torchmix plan --simulate --report` in a browser. Needs tmux, Chromium, matplotlib and Pillow, and a minute.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from html import escape
from pathlib import Path

import make_pictures
import yaml

import torchmix

DEADLINE_S = 120.0
TORCHMIX = [sys.executable, "-c", "from torchmix.cli.main import main; raise SystemExit(main())"]
COLUMNS, ROWS, CHARACTER, LINE = 150, 80, 8.4, 19
TRAINING = """
import time, torch, torchmix
torch.distributed.init_process_group("gloo")
with torchmix.build_loader("recipe.yaml", topology=torchmix.Topology.from_torchrun(), loaders="node") as loader:
    for microbatch in loader:
        time.sleep(0.01)
"""
CHROMIUM = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --force-device-scale-factor=1"
)


def seen(folder: Path) -> list[dict[str, object]]:
    """Processes of the run of this folder."""
    done = subprocess.run([*TORCHMIX, "top", "--json", "--interval", "0.5"], capture_output=True, check=True)
    runs = [run for run in json.loads(done.stdout)["runs"] if run["run"].startswith(str(folder))]
    return [process for run in runs for process in run["processes"]]


def wait_for(folder: Path, condition: Callable[[list[dict[str, object]]], bool]) -> None:
    """Look until the processes are so."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition(seen(folder)):
        if time.monotonic() > deadline:
            raise TimeoutError("the run has not come so far")


def trained(processes: list[dict[str, object]], *, after: int) -> bool:
    """Whether all four trainers are behind a step."""
    steps = [one["figures"].get("train", {}).get("step", -1) for one in processes if one["kind"] == "trainer"]  # type: ignore[attr-defined]
    return len(steps) == 4 and min(steps) > after


def terminal_of_top(folder: Path) -> str:
    """What a terminal shows of a run whose worker was killed."""
    (folder / "train.py").write_text(TRAINING, encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "train.py"]
    log = (folder / "log").open("w", encoding="utf-8")
    run = subprocess.Popen(torchrun, cwd=folder, stdout=log, stderr=log)
    session = f"torchmix-screens-{os.getpid()}"
    try:
        wait_for(folder, lambda processes: trained(processes, after=2))
        worker = next(one for one in seen(folder) if one["kind"] == "node worker")
        os.kill(int(str(worker["pid"])), signal.SIGKILL)
        step = max(one["figures"].get("train", {}).get("step", -1) for one in seen(folder))  # type: ignore[attr-defined]
        wait_for(folder, lambda processes: trained(processes, after=step + 4))
        words = " ".join(f"'{word}'" for word in [*TORCHMIX, "top", "--interval", "2"])
        size = ["-x", str(COLUMNS), "-y", str(ROWS)]
        subprocess.run(["tmux", "new-session", "-d", "-s", session, *size, "-c", str(folder), words], check=True)
        deadline = time.monotonic() + DEADLINE_S
        while "trainer 3" not in (text := captured(session)) and time.monotonic() < deadline:
            time.sleep(0.2)
        head, _, runs = text.partition("\n\n")
        own = next(run for run in runs.split("\n\n") if run.startswith("recipe.yaml "))
        return f"{head}\n\n{own}"
    finally:
        subprocess.run(["tmux", "kill-session", "-t", session], check=False)
        run.send_signal(signal.SIGINT)
        run.wait(timeout=DEADLINE_S)
        log.close()


def captured(session: str) -> str:
    """The text of a session's terminal."""
    return subprocess.run(["tmux", "capture-pane", "-p", "-t", session], capture_output=True, text=True).stdout


def terminal_svg(text: str) -> str:
    """Lines of a terminal as a picture."""
    lines = text.rstrip().splitlines()
    width, height = round(CHARACTER * max(map(len, lines))) + 32, LINE * len(lines) + 28
    rows = [
        f'<text x="16" y="{28 + LINE * number}" xml:space="preserve">{escape(line)}</text>'
        for number, line in enumerate(lines)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-size="14" fill="#e6e6e6" '
        f'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace"><rect width="100%" height="100%" rx="6" '
        f'fill="#1d2330"/>\n' + "\n".join(rows) + "\n</svg>\n"
    )


def picture_of_report(folder: Path, target: Path) -> None:
    """The head of the page of a simulated plan, as a browser shows it."""
    from PIL import Image

    make_pictures.write_corpus(folder)
    recipe = make_pictures.recipe_of(512)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    torchmix.index(recipe, directory=folder)
    job = "plan recipe.yaml --simulate --world 512 --tp 4 --pp 2 --steps 10 --report plan.html --quiet"
    subprocess.run([*TORCHMIX, *job.split()], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    browser = shutil.which("chromium") or shutil.which("google-chrome") or "chromium"
    options = [*CHROMIUM.split(), f"--user-data-dir={folder / 'profile'}", "--window-size=1100,1560"]
    shot = folder / "report.png"
    command = [browser, *options, f"--screenshot={shot}", (folder / "plan.html").as_uri()]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL, timeout=DEADLINE_S)
    with Image.open(shot) as opened:
        opened.convert("RGB").quantize(64).save(target, optimize=True)


def main(folder: Path) -> None:
    """Write the screens."""
    with tempfile.TemporaryDirectory() as temporary:
        demo = Path(temporary) / "demo"
        demo.mkdir()
        subprocess.run([*TORCHMIX, "init", "--demo", "."], cwd=demo, check=True, stdout=subprocess.DEVNULL)
        subprocess.run([*TORCHMIX, "index", "recipe.yaml", "--quiet"], cwd=demo, check=True, stdout=subprocess.DEVNULL)
        (folder / "top.svg").write_text(terminal_svg(terminal_of_top(demo)), encoding="utf-8")
        report = Path(temporary) / "report"
        report.mkdir()
        picture_of_report(report, folder / "report.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
