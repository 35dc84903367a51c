"""How soon a loader gives its first batch, and its next one after a state is loaded, above the imports.

    python benchmarks/loader_start.py [--sources 8 306] [--rounds 3] [--quick]

Parquet files of token lists with an index, a step of 8 x 4096 tokens. Each round is a new process. Wall seconds and CPU
seconds (user and system, of the process and the worker that it has started, less the imports of the trainer) from
`build_loader` to the first microbatch, and wall seconds from `load_state_dict` to the next one. Medians over rounds. On
a machine that others use the CPU seconds are the sturdier figure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from synthetic import write_tokens

TOKENS = 24_000_000
PROGRAM = """
import json, sys, time
import torch, torchmix
sys.path.insert(0, sys.argv[3])
from process_trees import cpu_seconds
torchmix.build_loader  # what a trainer imports
torch.set_num_threads(1)
began, cpu = time.perf_counter(), cpu_seconds()
loader = torchmix.build_loader(sys.argv[1], loaders=sys.argv[2], topology=torchmix.Topology())
built = time.perf_counter()
steps = iter(loader)
next(steps)
first, cpu_first = time.perf_counter(), cpu_seconds()
for _ in range(63):
    next(steps)
state = loader.state_dict()
for _ in range(64):
    next(steps)
loading = time.perf_counter()
loader.load_state_dict(state)
next(steps)
found = [built - began, first - began, cpu_first - cpu, time.perf_counter() - loading]
loader.close()
print(json.dumps(found))
"""


def write_recipe(folder: Path, num_sources: int) -> Path:
    """Files, their recipe and their index."""
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
    print("| sources | loaders | build_loader, s | first batch, s | its CPU, s | after load_state_dict, s |")
    print("|---|---|---|---|---|---|")
    found = []
    for num_sources in options.sources:
        with tempfile.TemporaryDirectory() as folder:
            recipe = write_recipe(Path(folder), num_sources)
            for loaders in ("in_process", "node"):
                command = [sys.executable, "-c", PROGRAM, str(recipe), loaders, str(Path(__file__).parent)]
                rounds = [
                    json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                    for _ in range(options.rounds)
                ]
                figures = [round(statistics.median(column), 3) for column in zip(*rounds, strict=True)]
                found.append([num_sources, loaders, *figures])
                print(f"| {num_sources} | {loaders} | {' | '.join(map(str, figures))} |")
    print(json.dumps({"rows": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
