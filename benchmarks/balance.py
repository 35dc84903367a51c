"""Balance: methods of sharing items out, the placement of samples, and what the chain of a strategy costs.

    python benchmarks/balance.py [--quick]

Items have the costs of a 12B Llama: a token costs as much as 55,296 pairs. *captions*: images with short texts, a few
long ones; *32K* and *128K*: lengths with a heavy tail. A rank has tp 4 and pp 8, so 288 GPUs are 9 ranks, and each rank
has 8 microbatches. 72 items a GPU, or a rank. The rival is a heap in Python, longest processing time, one item after
the other. Each method has its time over the heap's, the median of several calls, and in brackets its costliest bin over
the largest of the mean and the costliest item. Karmarkar and Karp's differencing is Python, too, and is left out where
it would take minutes.

The second table places packed samples: the sum over microbatches of the slowest rank over its lower bound, by `rows`,
by sums of ranks alone, and in hash order. The last line is the processor's time of `Planner.step` over that of the same
fold with the placement called directly: what the graph of a strategy adds.
"""

from __future__ import annotations

import argparse
import heapq
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray
from planning import make_planner

from torchmix.parallel.place_tree import Layout
from torchmix.planner.balance import in_hash_order, in_rows, report
from torchmix.planner.cursor import Cursor
from torchmix.planner.graph.strategy import backbone_cost
from torchmix.planner.methods import equal_counts, karmarkar_karp, lpt, zigzag
from torchmix.planner.plan import ModulePlan, StepPlan, plan_digest
from torchmix.planner.planner import Planner
from torchmix.planner.simulation import bins_of, by_rank_sums, next_fit

Items = NDArray[np.int64]
PER_TOKEN = 55_296
MICROBATCHES = 8
MOST_DIFFERENCED = 200_000
"""Items times bins."""


def lengths_of(kind: str, count: int) -> Items:
    rng = np.random.default_rng(7)
    if kind == "captions":
        tokens = np.minimum(rng.lognormal(3.4, 0.6, count), 64) + np.minimum(rng.lognormal(6.2, 0.9, count), 8192)
        long = rng.random(count) < 0.0162
        tokens[long] += np.minimum(rng.lognormal(6.0, 1.0, int(long.sum())), 8192)
    else:
        most = 32_768 if kind == "32K" else 131_072
        tokens = np.minimum(rng.lognormal(6.5, 1.5 if kind == "32K" else 1.8, count), most)
    return np.maximum(tokens, 8).astype(np.int64)


def cost_of(tokens: Items) -> Items:
    return tokens * (PER_TOKEN + tokens)


def heap_lpt(cost: Items, num_bins: int) -> Items:
    bin_of_item = np.empty(len(cost), np.int64)
    heap = [(0, number) for number in range(num_bins)]
    for item in np.argsort(-cost, kind="stable").tolist():
        load, number = heap[0]
        heapq.heapreplace(heap, (load + int(cost[item]), number))
        bin_of_item[item] = number
    return bin_of_item


def arrival(cost: Items, num_bins: int) -> Items:
    return np.arange(len(cost), dtype=np.int64) * num_bins // len(cost)


HEAP = "heap"
METHODS: dict[str, Callable[[Items, int], Items]] = {
    HEAP: heap_lpt,
    "lpt": lpt,
    "equal counts": equal_counts,
    "zigzag": zigzag,
    "karmarkar_karp": karmarkar_karp,
    "arrival order": arrival,
}


def median_s(call: Callable[[], object], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        began = time.thread_time()
        call()
        taken.append(time.thread_time() - began)
    return float(np.median(taken))


def methods_table(gpus: tuple[int, ...], repeats: int) -> None:
    rivals = [name for name in METHODS if name != HEAP]
    print(f"items | GPUs | count | bins | {HEAP} ms | {' | '.join(rivals)}")
    for kind in ("captions", "32K", "128K"):
        for num_gpus in gpus:
            for per, count in (("GPU", 72 * num_gpus), ("rank", 72 * num_gpus // 32)):
                bins = num_gpus // 32 * MICROBATCHES
                cost = cost_of(lengths_of(kind, count))
                heap_s = median_s(partial(heap_lpt, cost, bins), repeats)
                cells = [f"{heap_s * 1e3:.2f}"]
                for name in rivals:
                    if name == "karmarkar_karp" and count * bins > MOST_DIFFERENCED:
                        cells.append("-")
                        continue
                    ratio = median_s(partial(METHODS[name], cost, bins), repeats) / heap_s
                    cells.append(f"{ratio:.3g} x ({over_bound(cost, METHODS[name](cost, bins), bins):.4f})")
                print(f"{kind} a {per} | {num_gpus} | {count:,} | {bins:,} | {' | '.join(cells)}", flush=True)


def over_bound(cost: Items, bin_of_item: Items, bins: int) -> float:
    """The costliest bin over the largest of the mean and the costliest item."""
    loads = np.zeros(bins, np.int64)
    np.add.at(loads, bin_of_item, cost)
    return float(loads.max() / max(-(-int(cost.sum()) // bins), int(cost.max())))


def samples_table(gpus: tuple[int, ...]) -> None:
    print()
    print("length | ranks | rows | sums of ranks | hash order")
    for kind, length in (("captions", 8192), ("32K", 32_768), ("128K", 131_072)):
        for num_gpus in gpus:
            layout = Layout(dp=num_gpus // 32)
            num_samples = layout.dp * MICROBATCHES
            tokens = lengths_of(kind, num_samples * 40 if kind == "captions" else num_samples * 60)
            tokens = np.minimum(tokens, length)
            sample = next_fit(tokens, length)
            inside = sample < num_samples
            squares = np.bincount(sample[inside], tokens[inside].astype(np.float64) ** 2, num_samples)
            cost = PER_TOKEN * length + squares.astype(np.int64)
            placements = (in_rows(cost, layout), by_rank_sums(cost, layout), in_hash_order(num_samples, layout))
            found = [report(cost, placed, layout).ratio for placed in placements]
            ideal = max(-(-int(cost.sum()) // layout.dp), int(cost.max()))
            sums = [bins_of(cost, placed, layout).max(axis=0).sum() / ideal for placed in placements]
            assert np.allclose(found, sums)
            print(f"{length} | {layout.dp} | {found[0]:.4f} | {found[1]:.4f} | {found[2]:.4f}", flush=True)


def chain_ratio(num_steps: int) -> float:
    """Processor's time of `Planner.step` over that of the fold with the placement called directly."""
    one, other = (make_planner(512, 64, 32, "best_fit", 20_000) for _ in range(2))
    cursor, same = one.start(), other.start()
    by_chain, directly = [], []
    for number in range(num_steps):
        for turn in (0, 1):
            began = time.thread_time()
            if turn == number % 2:
                plan, cursor = one.step(cursor)
                by_chain.append(time.thread_time() - began)
            else:
                direct, same = placed_directly(other, same)
                directly.append(time.thread_time() - began)
        assert direct.plan_digest == plan.plan_digest
    return float(np.median(by_chain[2:]) / np.median(directly[2:]))


def placed_directly(planner: Planner, cursor: Cursor) -> tuple[StepPlan, Cursor]:
    """The step at a cursor, by the rules of `rows` and without a graph."""
    layout, batch = planner.layout, planner.part.batch
    packed, drawn, asked, after = planner.fold(cursor)
    num_samples = batch.samples
    assert isinstance(num_samples, int)
    cost = backbone_cost(planner.part).of_samples(
        packed.pieces.tokens, packed.sample, num_samples=num_samples, length=batch.length
    )
    placement = in_rows(cost, layout)
    backbone = ModulePlan(layout=layout, placement=placement, balance=report(cost, placement, layout))
    tokens = planner.tokens_of_step(packed, drawn, asked)
    step = planner.drawn_step(cursor, packed, tokens, after.order_digest)
    digest = plan_digest(after.order_digest, placement, layout)
    return step.make(modules={"backbone": backbone}, plan_digest=digest), after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one size of job, and few repeats")
    args = parser.parse_args()
    gpus = (288,) if args.quick else (288, 1152, 4096)
    methods_table(gpus, 3 if args.quick else 9)
    samples_table(gpus)
    ratio = chain_ratio(12 if args.quick else 80)
    print(f"\nPlanner.step takes {ratio:.3f} x the fold with the placement called directly")


if __name__ == "__main__":
    main()
