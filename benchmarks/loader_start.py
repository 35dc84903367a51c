"""How soon a loader gives its first batch, and its next one after a state is loaded, above the imports.

    python benchmarks/loader_start.py [--sources 8 306] [--rounds 3] [--quick]

Parquet files of token lists with an index, a step of 8 x 4096 tokens. Each round is a new process. Wall seconds and CPU
seconds (user and system, of the process and the worker that it has started) from `build_loader` to the first
microbatch, and from `load_state_dict` to the next one; of each figure the smallest over rounds, since a machine that
others use adds to all of them. "start_worker" is called before `import torch`, as a script does that wants its first
batch soon; otherwise `build_loader` starts the worker. Beside them a plain DataLoader's first batch, with one worker of
torch's that does nothing but make zeros, and the share of each figure in it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from synthetic import write_tokens

TOKENS = 24_000_000
KINDS = {
    "in_process": "in_process",
    "node": "node",
    "start_worker": "node, after `torchmix.start_worker()`",
}
"""What the table calls each."""
PROGRAM = """
import json, sys, time
import torchmix
if sys.argv[2] == "start_worker":
    torchmix.start_worker()
import torch
sys.path.insert(0, sys.argv[3])
from process_trees import cpu_seconds
torchmix.build_loader  # what a trainer imports
torch.set_num_threads(1)
began, cpu = time.perf_counter(), cpu_seconds()
where = "in_process" if sys.argv[2] == "in_process" else "node"
loader = torchmix.build_loader(sys.argv[1], loaders=where, topology=torchmix.Topology())
built = time.perf_counter()
steps = iter(loader)
next(steps)
first, cpu_first = time.perf_counter(), cpu_seconds()
for _ in range(63):
    next(steps)
state = loader.state_dict()
for _ in range(64):
    next(steps)
loading, cpu_loading = time.perf_counter(), cpu_seconds()
loader.load_state_dict(state)
next(steps)
found = [built - began, first - began, cpu_first - cpu, time.perf_counter() - loading, cpu_seconds() - cpu_loading]
loader.close()
print(json.dumps(found))
"""
PLAIN = """
import json, sys, time
import torch
sys.path.insert(0, sys.argv[1])
from process_trees import cpu_seconds

class Zeros(torch.utils.data.Dataset):
    def __len__(self):
        return 1 << 20

    def __getitem__(self, i):
        return torch.zeros(4096, dtype=torch.int64)

if __name__ == "__main__":
    torch.set_num_threads(1)
    began, cpu = time.perf_counter(), cpu_seconds()
    next(iter(torch.utils.data.DataLoader(Zeros(), batch_size=8, num_workers=1, multiprocessing_context="spawn")))
    print(json.dumps([0.0, time.perf_counter() - began, cpu_seconds() - cpu, 0.0, 0.0]))
"""


def write_recipe(folder: Path, num_sources: int) -> Path:
    """Files, their recipe and their index."""
    folder.mkdir(exist_ok=True)
    names = [f"s{number:03}" for number in range(num_sources)]
    for number, name in enumerate(names):
        write_tokens(folder / f"{name}.parquet", num_tokens=TOKENS // num_sources, page_bytes=256 << 10, seed=number)
    sources = "\n".join(f"  {name}: {{path: {name}.parquet, tokens: input_ids}}" for name in names)
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"version: 1\nseed: 1\nbatch: {{samples: 8, length: 4096}}\nsources:\n{sources}\n"
        f"mixture: {{{', '.join(f'{name}: 1' for name in names)}}}\nread: {{cache: 256MiB}}\n"
    )
    call = "import sys; from torchmix.cli.main import main; sys.exit(main(sys.argv[1:]))"
    subprocess.run([sys.executable, "-c", call, "index", str(recipe), "--quiet"], check=True, stdout=subprocess.DEVNULL)
    return recipe


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=int, nargs="+", default=[8, 306])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.sources, options.rounds = [8], 1
    print(
        "| sources, read by | `build_loader`, s | first batch, s | over the DataLoader's | CPU of it, s | "
        "`load_state_dict` to the next batch, s | CPU of it, s |"
    )
    print("|---|---|---|---|---|---|---|")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = str(Path(folder) / "pycache")  # as an installed package has it

        def run(*command: str) -> list[float]:
            done = subprocess.run(
                [sys.executable, *command], check=True, capture_output=True, text=True, env=environment, timeout=300
            )
            figures: list[float] = json.loads(done.stdout)
            return figures

        plain_script = Path(folder) / "plain.py"
        plain_script.write_text(PLAIN)
        here = str(Path(__file__).parent)
        recipes = {number: write_recipe(Path(folder) / str(number), number) for number in options.sources}
        cases = [(number, kind) for number in options.sources for kind in KINDS]
        rounds: dict[tuple[int, str], list[list[float]]] = {case: [] for case in [(0, "DataLoader"), *cases]}
        for number in range(options.rounds + 1):  # the first one writes what Python keeps compiled
            for (num_sources, kind), figures in rounds.items():
                if kind == "DataLoader":
                    one = run(str(plain_script), here)
                else:
                    one = run("-c", PROGRAM, str(recipes[num_sources]), kind, here)
                if number:
                    figures.append(one)
        for (num_sources, kind), all_figures in rounds.items():
            smallest = [round(min(column), 3) for column in zip(*all_figures, strict=True)]
            found.append([num_sources, kind, *smallest])
            built_s, first_s, *others = (f"{value:.2f}" for value in smallest)
            if not num_sources:
                plain_s = smallest[1]
                print(f"| torch's DataLoader, one worker, of zeros | | {first_s} | 1 | {others[0]} | | |")
                continue
            cells = [built_s, first_s, f"{smallest[1] / plain_s:.2f}", *others]
            print(f"| {num_sources}, {KINDS[kind]} | {' | '.join(cells)} |")
    print(json.dumps({"rows": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
