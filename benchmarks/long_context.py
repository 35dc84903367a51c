"""Documents of any length in runs of ranks: what a step costs over its lower bound, beside fixed sizes and Megatron.

    python benchmarks/long_context.py [--ranks 16 64 256 1024] [--microbatches 2 4 8] [--megatron-ranks 64] [--quick]

Three distributions of lengths up to 256K: *tail*, log-normal (mean of the log 6.7, deviation 1.5); *tuning*, log-normal
with 2 % from 64K to 256K; *short*, 90 % around 800 tokens and 10 % from 8K to 256K. A rank holds 32,768 tokens, and a
step fills nine tenths of so many microbatches. The cost is that of an 8B Llama: an exchanged token costs 1/128 of a
computed one, and a microbatch nothing. All ways have one cost, padding and exchange included, and wait for the slowest
rank in each microbatch.

In the first table a cost stands over the lower bound: this plan; the best fixed size of runs, planned in the same way,
with its size; samples by number in the shortest fixed runs (Megatron's dp_balanced). *gain* is the best fixed size over
this plan. *ms* is the processor's time of a schedule, native, and *reference* that of the Python beside it. The second
table has padding, and GB that a step exchanges forward: keys and values of 8 heads of 128 in two bytes, 32 layers. The
third has Megatron's schedulers, where the installed one has them; they run as they are, with lengths alone, without the
gathering and the moving of samples that follow in Megatron.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from torchmix.errors import OptionError
from torchmix.megatron_adapter.schedulers import SCHEDULERS, place_as_megatron
from torchmix.native.load import is_native
from torchmix.planner.contexts import (
    ContextPlan,
    RunCosts,
    place_in_contexts,
    planned,
    searched_plainly,
    sizes_of_layout,
)

Lengths = NDArray[np.int64]
KINDS = ("tail", "tuning", "short")
MOST = 262_144
RANK_TOKENS = 32_768
PER_TOKEN = 32 * (2 * 4096 + 2 * 1024 + 3 * 14336)
BYTES_OF_TOKEN = 2 * 1024 * 2 * 32
"""Keys and values, 1,024 wide, in two bytes, of 32 layers."""


def lengths_of(kind: str, total: int, rng: np.random.Generator) -> Lengths:
    """Lengths of one of KINDS, together at least `total` tokens."""
    count = total // 64
    mean, deviation = {"tail": (6.7, 1.5), "tuning": (7.5, 1.3), "short": (6.7, 0.7)}[kind]
    lengths = np.exp(rng.normal(mean, deviation, count))
    part, least = {"tail": (0.0, 65536), "tuning": (0.02, 65536), "short": (0.1, 8192)}[kind]
    long = np.exp(rng.uniform(np.log(least), np.log(MOST), count))
    found = np.clip(np.where(rng.random(count) < part, long, lengths).astype(np.int64), 1, MOST)
    return found[: int(np.searchsorted(np.cumsum(found), total)) + 1]


def costs_of(num_ranks: int) -> RunCosts:
    """The cost of the model on so many ranks."""
    return RunCosts(
        per_token=PER_TOKEN,
        per_pair=32,
        per_exchanged=PER_TOKEN // 128,
        per_microbatch=0,
        rank_tokens=RANK_TOKENS,
        align=1,
        sizes=sizes_of_layout(None, num_ranks),
        num_ranks=num_ranks,
    )


def cases(ranks: list[int], microbatches: list[int]) -> Iterator[tuple[str, int, int, Lengths, RunCosts]]:
    """Kind, ranks, microbatches that a step would fill, lengths, costs."""
    for kind in KINDS:
        for num_ranks in ranks:
            for count in microbatches:
                total = num_ranks * RANK_TOKENS * count * 9 // 10
                rng = np.random.default_rng(num_ranks * 16 + count)
                yield kind, num_ranks, count, lengths_of(kind, total, rng), costs_of(num_ranks)


def fastest(call: Callable[[], Any], times: int) -> float:
    """The least of several times of this thread, in milliseconds."""
    best = float("inf")
    for _ in range(times):
        began = time.thread_time()
        call()
        best = min(best, time.thread_time() - began)
    return best * 1e3


def best_fixed(tokens: Lengths, costs: RunCosts) -> tuple[int, int, ContextPlan]:
    """Size, cost and plan of the cheapest fixed size that holds all samples and divides the ranks."""
    found = []
    for size in costs.sizes:
        if costs.num_ranks % size == 0 and costs.padded(tokens, size).max() <= costs.rank_tokens * size:
            plan, report = place_in_contexts(tokens, replace(costs, sizes=(size,)))
            found.append((report.cost, size, plan))
    cost, size, plan = min(found, key=lambda one: one[:2])
    return size, cost, plan


def padding_of(plan: ContextPlan, tokens: Lengths) -> str:
    """The part of padding in the tokens of a plan, as a percentage."""
    return f"{1 - tokens.sum() / plan.padded_tokens.sum():.2%}"


def exchanged_of(plan: ContextPlan) -> int:
    """Tokens that ranks get from others of their run."""
    return int((plan.tokens_of_bin * (plan.size_of_bin - 1)).sum())


def run(ranks: list[int], microbatches: list[int], megatron_ranks: int, times: int) -> float:
    """Print the tables; the largest cost over its bound of all cases."""
    found = [(*case, place_in_contexts(*case[3:])) for case in cases(ranks, microbatches)]
    print(f"native library: {'used' if is_native() else 'not used'}\n")
    print("lengths | ranks | documents | microbatches | this plan | best fixed | gain | by number | ms | reference")
    print("---|---|---|---|---|---|---|---|---|---")
    fixed_of = []
    for kind, num_ranks, _, tokens, costs, (plan, report) in found:
        size, fixed, fixed_plan = best_fixed(tokens, costs)
        fixed_of.append((size, fixed_plan))
        bound = report.lower_bound
        planning = fastest(lambda t=tokens, c=costs: place_in_contexts(t, c), times)  # type: ignore[misc]
        plainly = fastest(lambda t=tokens, c=costs: planned(searched_plainly(t, c).schedule, t, c), 1)  # type: ignore[misc]
        print(
            f"{kind} | {num_ranks} | {len(tokens)} | {plan.num_microbatches} | {report.ratio:.4f} | "
            f"{fixed / bound:.3f} ({size}) | {fixed / report.cost:.2f} x | {report.hash_order_ratio:.3f} | "
            f"{planning:.2f} | {plainly:.0f} ms"
        )
    print("\nlengths | ranks | microbatches | padding | of best fixed | GB exchanged | of best fixed")
    print("---|---|---|---|---|---|---")
    for (kind, num_ranks, _, tokens, _, (plan, _)), (_, fixed_plan) in zip(found, fixed_of, strict=True):
        ours, theirs = (exchanged_of(each) * BYTES_OF_TOKEN / 1e9 for each in (plan, fixed_plan))
        print(
            f"{kind} | {num_ranks} | {plan.num_microbatches} | {padding_of(plan, tokens)} | "
            f"{padding_of(fixed_plan, tokens)} | {ours:.0f} | {theirs:.0f}"
        )
    print("\nlengths | ranks | documents | scheduler | cost over the bound | padding | GB exchanged | ms")
    print("---|---|---|---|---|---|---|---")
    for kind, num_ranks, count, tokens, costs, (_, report) in found:
        if num_ranks > megatron_ranks or count != microbatches[-1]:
            continue
        for name in SCHEDULERS:
            began = time.thread_time()
            try:
                rival = place_as_megatron(name, tokens, costs)
            except OptionError as error:
                print(f"{kind} | {num_ranks} | {len(tokens)} | {name} | {str(error).splitlines()[0][:90]} | | |")
                continue
            spent = time.thread_time() - began
            cost = int(rival.load_of_ranks.max(axis=1).sum())
            print(
                f"{kind} | {num_ranks} | {len(tokens)} | {name} | {cost / report.lower_bound:.3f} | "
                f"{1 - tokens.sum() / rival.padded_tokens:.2%} | {rival.exchanged_tokens * BYTES_OF_TOKEN / 1e9:.0f} | "
                f"{spent * 1e3:.0f}"
            )
    worst = max(report.ratio for *_, (_, report) in found)
    print(f"\nthe largest cost over its bound, of {len(found)} steps: {worst:.4f}")
    return worst


def main() -> None:
    """Read the command line, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--megatron-ranks", type=int, default=64, help="most ranks for which Megatron's schedulers run")
    parser.add_argument("--times", type=int, default=7, help="of each schedule; the fastest counts")
    parser.add_argument("--quick", action="store_true", help="small ones alone")
    given = parser.parse_args()
    if given.quick:
        run([16], [2], 16, 1)
        return
    run(given.ranks, given.microbatches, given.megatron_ranks, given.times)


if __name__ == "__main__":
    main()
