"""The order of a fixed mixture, as it was when it was frozen: any change of it breaks every run that resumes.

Where the order changes on purpose, write the file anew and say so in the changelog (`ORDER:`), from the root of the
tree: `python -m tests.golden.test_order > tests/golden/order.txt`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from tests.support.mixtures import SHARES, SIZES, make_planner, plan_steps
from tests.support.recipes import make_recipe
from torchmix.mixture.windows import Method
from torchmix.recipe.structs import Recipe, Shuffle

STEPS = 72
FILE = Path(__file__).parent / "order.txt"
HEADER = """\
# Digests of 16 samples of 256 tokens a step, seed 20260; sizes and shares in tests/support/mixtures.py.
# step, order of best_fit, order of concat, plan of best_fit at dp 4 x micro_batch_size 2"""

SHUFFLES_HEADER = "# step, order of best_fit with shuffle row, with shuffle none"


def recipe_of(method: str, shuffle: Method = "page") -> Recipe:
    recipe = make_recipe(SHARES, seed=20260, samples=16, length=256, packing={"method": method})
    return msgspec.structs.replace(recipe, shuffle=Shuffle(method=shuffle))


def lines() -> Iterator[str]:
    yield from HEADER.splitlines()
    best_fit, _ = plan_steps(make_planner(recipe_of("best_fit"), SIZES, dp=4, micro_batch_size=2), STEPS)
    concat, _ = plan_steps(make_planner(recipe_of("concat"), SIZES), STEPS)
    for one, other in zip(best_fit, concat, strict=True):
        yield f"{one.step} {one.order_digest.hex()} {other.order_digest.hex()} {one.plan_digest.hex()}"
    yield SHUFFLES_HEADER
    by_row, _ = plan_steps(make_planner(recipe_of("best_fit", "row"), SIZES), STEPS)
    unshuffled, _ = plan_steps(make_planner(recipe_of("best_fit", "none"), SIZES), STEPS)
    for one, other in zip(by_row, unshuffled, strict=True):
        yield f"{one.step} {one.order_digest.hex()} {other.order_digest.hex()}"


def test_the_order_is_the_one_in_the_tree() -> None:
    frozen = FILE.read_text(encoding="ascii").splitlines()
    assert len(frozen) == 2 * STEPS + len(HEADER.splitlines()) + 1
    for made, kept in zip(lines(), frozen, strict=True):
        assert made == kept, "the order of documents has changed"


def test_every_frozen_digest_is_another_one() -> None:
    lines = [line for line in FILE.read_text().splitlines() if not line.startswith("#")]
    digests = [digest for line in lines for digest in line.split()[1:]]
    assert len(digests) == 5 * STEPS == len(set(digests))


if __name__ == "__main__":
    print("\n".join(lines()))
