"""Planning: milliseconds of CPU per step, and how much of it is unavoidable.

    python benchmarks/planning.py [--steps 60]

Synthetic sizes, no files: shares fall as 1/n over the sources, documents have 20 to 20,000 tokens or more, mean about
4,000 (rows with *short*: 20 to 4,000, mean about 900). The bound in the same run is what any planner of these pieces
must do: sort one key per piece, and hash 56 bytes per piece for the order digest. `waits` is the share of a step's time
that a consumer waits when planning is slowed to 80 % of a step, in its thread ahead; planning in line would be 0.8.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from fractions import Fraction

import numpy as np

from torchmix.catalog.sizes import SourceSizes
from torchmix.parallel.place_tree import Layout
from torchmix.planner.planner import Planner
from torchmix.recipe.load import check_recipe
from torchmix.recipe.parts import part_of
from torchmix.recipe.structs import Balance, Batch, Model, Packing, Recipe, Source
from torchmix.stateful.feed import Ahead


def make_sizes(num_documents: int, longest: int, salt: int) -> SourceSizes:
    rng = np.random.default_rng(salt)
    tokens = 20 + (longest * rng.random(num_documents) ** 3).astype(np.int32)
    first_row = np.append(np.arange(0, num_documents, 100), num_documents)
    return SourceSizes(first_row_of_page=first_row, tokens=tokens, window_pages=64)


def make_planner(num_samples: int, num_sources: int, dp: int, method: str, longest: int) -> Planner:
    names = [f"source-{s:03d}" for s in range(num_sources)]
    total = sum(Fraction(1, s + 1) for s in range(num_sources))
    shares = [Fraction(round(Fraction(1, s + 1) / total * 10**8), 10**6) for s in range(num_sources)]
    shares[0] += 100 - sum(shares)
    recipe = Recipe(
        version=1,
        seed=1,
        batch=Batch(samples=num_samples, length=8192),
        sources={name: Source(path="none", tokens="ids") for name in names},
        mixture={name: f"{float(share):.6f}%" for name, share in zip(names, shares, strict=True)},
        packing=Packing(method=method),
        balance=Balance(method="rows", model=Model(layers=32, hidden=4096, ffn=11008, heads=32)),
    )
    sizes = {name: make_sizes(200_000 if s < 20 else 20_000, longest + 200 * s, s) for s, name in enumerate(names)}
    return Planner(part_of(check_recipe(recipe), "train"), sizes, Layout(dp=dp))


def bound_ms(num_pieces: int) -> float:
    """The bound of a step, measured once, so that it meets the same caches and neighbours as the step before it."""
    keys = np.random.default_rng(0).integers(0, 1 << 63, num_pieces).astype(np.uint64)
    table = np.zeros((num_pieces, 7), "<i8")
    began = time.thread_time()
    np.sort(keys)
    hashlib.sha256(table.tobytes()).digest()
    return (time.thread_time() - began) * 1e3


def wait_fraction(planner: Planner, step_s: float = 0.05, num_steps: int = 40) -> float:
    def plans():
        cursor = planner.start()
        while True:
            began = time.perf_counter()
            plan, cursor = planner.step(cursor)
            time.sleep(max(0.0, 0.8 * step_s - (time.perf_counter() - began)))
            yield plan

    ahead, waited = Ahead(plans(), depth=2, name="plan"), 0.0
    for step in range(num_steps + 3):
        began = time.perf_counter()
        next(ahead)
        if step >= 3:  # the first plans are not ahead of anything
            waited += time.perf_counter() - began
        time.sleep(step_s)
    ahead.close()
    return waited / (num_steps * step_s)


def print_case(num_samples: int, num_sources: int, dp: int, method: str, longest: int, steps: int) -> None:
    """A row of the table."""
    planner = make_planner(num_samples, num_sources, dp, method, longest)
    cursor, taken, bounds, pieces, fills, ratios = planner.start(), [], [], [], [], []
    for _ in range(steps):
        began = time.thread_time()
        plan, cursor = planner.step(cursor)
        taken.append((time.thread_time() - began) * 1e3)
        bounds.append(bound_ms(len(plan.pieces)))
        pieces.append(len(plan.pieces))
        fills.append(plan.fill)
        ratios.append((plan.balance.ratio, plan.balance.hash_order_ratio))
    median, p95 = np.percentile(taken[1:], [50, 95])
    count = int(np.mean(pieces))
    ratio = np.mean(ratios, axis=0)
    over_bound = np.median(np.divide(taken, bounds)[1:])
    print(
        f"{num_samples}{'' if longest == 20_000 else ', short'} | {num_sources} | {method} | {count:,} | "
        f"{median:.2f} | {p95:.2f} | {taken[0]:.0f} | {over_bound:.0f} | {min(fills):.3f} | "
        f"{ratio[0]:.4f} ({ratio[1]:.4f})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    print("G | sources | packing | pieces | median ms | p95 ms | first step ms | x bound | fill | balance (hash order)")
    for longest in (20_000, 4_000):
        for num_samples, num_sources, dp in ((64, 8, 4), (512, 64, 32), (4096, 306, 128)):
            for method in ("best_fit", "concat") if longest == 20_000 else ("best_fit",):
                print_case(num_samples, num_sources, dp, method, longest, args.steps)
    share = wait_fraction(make_planner(64, 8, 4, "best_fit", 20_000))
    print(f"planning slowed to 80 % of a step: waits {share:.4f} of a step's time (in line: 0.8)")


if __name__ == "__main__":
    main()
