"""Placements of samples and items over random recipes, against arithmetic of their own, as one JSON.

    python -m tests.trials.placements --seed 1 --count 2000 --out placements.json

In: a seed and a number of combinations of method, level, objective, order of microbatches, group size and layout, each
with modules of documents and of images. Out: what each combination was; an AssertionError names the first that breaks a
promise. Must hold, of each step: samples, slots, costs, objectives, bounds, traffic and digests are those of
`book_placement`, which is written from docs/formats.md and imports nothing; so is the place of each sample and each
item, but for differencing, whose ties the page does not say, and for which group gets what; every image of the pieces
is computed once. A run goes on where it stopped. Cost: 30 ms a combination.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np

from tests.support import book_placement as book
from tests.support.mixtures import make_planner
from tests.support.recipes import make_recipe
from tests.support.trial import continued, trial_parser
from torchmix.catalog.sizes import SourceSizes, TokenRuns
from torchmix.errors import PlanError
from torchmix.planner.plan import ItemPlan, StepPlan
from torchmix.recipe.load import check_recipe
from torchmix.recipe.structs import Balance, EncoderModel, FittedCost, Model, Module, Recipe

OWN = "tests.support.strategies:in_turn"
METHODS = ("none", "rows", "lpt", "zigzag", "karmarkar_karp", OWN)
LEVELS, OBJECTIVES = ("both", "bucket", "bin"), ("rows", "max", "rank", "pipeline")
ORDERS = ("unimodal", "descending", "keep")
STEPS = 2
Images = dict[str, list[list[tuple[int, int, int, int]]]]
"""By source and row: first token, tokens, patches and tiles of each image."""


def in_turn(costs: list[int], buckets: int, bins: int) -> list[int]:
    """What OWN does."""
    found = [0] * len(costs)
    for place, each in enumerate(sorted(range(len(costs)), key=lambda each: (costs[each], each))):
        found[each] = place % (buckets * bins)
    return found


def random_sources(draw: random.Random, length: int) -> tuple[dict[str, SourceSizes], Images]:
    sizes: dict[str, SourceSizes] = {}
    images: Images = {}
    for name in ("a", "b", "c", "d")[: draw.randint(1, 4)]:
        longest = draw.choice([length // 8, length // 2, 3 * length])
        tokens = [draw.randint(1, max(2, longest)) for _ in range(draw.randint(20, 120))]
        images[name] = [[] for _ in tokens]
        each = draw.choice([0, 1, 3, 20])
        same = each == 20 or draw.random() < 0.3
        for row, count in enumerate(tokens):
            at = 0
            for _ in range(draw.randint(0, each)):
                at += draw.randint(0, 3)
                wide = 2 if same else draw.randint(1, 6)
                if at + wide > count:
                    break
                tiles = draw.choice([1, 1, 2, 4])
                patches = 4 * wide if same else tiles * draw.randint(1, 60 // tiles)
                images[name][row].append((at, wide, patches, tiles))
                at += wide
        table = [image for of_row in images[name] for image in of_row]
        columns = np.array(table, np.int32).reshape(-1, 4).T
        items = TokenRuns(
            first_run_of_row=np.cumsum([0, *map(len, images[name])]).astype(np.int64),
            offset=columns[0].copy(),
            tokens=columns[1].copy(),
            sizes={"patches": columns[2].copy(), "segments": columns[3].copy()},
        )
        sizes[name] = SourceSizes(
            first_row_of_page=np.array([0, len(tokens) // 2, len(tokens)], np.int64),
            tokens=np.array(tokens, np.int32),
            window_pages=draw.choice([1, 8]),
            items={"image": items} if table else {},
        )
    return sizes, images


def random_model(draw: random.Random) -> EncoderModel | None:
    if draw.random() < 0.2:
        return None
    patch = draw.choice([None, 4])
    layers, heads = draw.randint(1, 4), draw.choice([2, 4])
    window = draw.choice([None, 3, 9])
    return EncoderModel(
        layers=layers,
        hidden=8 * heads,
        ffn=draw.choice([16, 50]),
        heads=heads,
        kv_heads=draw.choice([None, 1, 2]),
        mlp=draw.choice(["gelu", "swiglu"]),
        patch=patch,
        window=window,
        full_layers=() if window is None else tuple(draw.sample(range(layers), draw.randint(0, layers))),
        merge=draw.choice([1, 2]),
        out=draw.choice([None, 32]),
    )


def random_module(draw: random.Random, items: str, sources: list[str], stages: int) -> Module:
    method, model = draw.choice(["lpt", "lpt", *(each for each in METHODS if each != "rows")]), random_model(draw)
    return Module(
        items=items,  # type: ignore[arg-type]
        sources=None if draw.random() < 0.6 else tuple(draw.sample(sources, draw.randint(1, len(sources)))),
        sizes="patches" if items == "image" and draw.random() < 0.8 else "tokens",
        axis=draw.choice(["DP", "CP", "WORLD"]),
        method=method,
        scope="microbatch" if draw.random() < (0.4 if stages == 1 else 0.05) else "step",
        group_size=draw.choice([None, None, 1, 2, 3, 5]),
        # Around the bytes of the largest image.
        cap=None if model is None or draw.random() < 0.6 else cost_of_item(60, model)[1] * draw.randint(1, 12) // 4,
        near_text=draw.choice([None, "0%", "2%", "5%", "29%", "300%"]) if method == "lpt" else None,
        model=model,
    )


def random_combination(
    number: int, draw: random.Random
) -> tuple[Recipe, dict[str, SourceSizes], Images, dict[str, int]]:
    """The levels, objectives and orders come in turn, the rest by chance."""
    layout = {
        "dp": draw.choice([1, 2, 3, 4, 6, 8]),
        "micro_batch_size": draw.choice([1, 1, 2, 3]),
        "tp": draw.choice([1, 1, 2]),
        "cp": draw.choice([1, 1, 2]),
        "pp": draw.choice([1, 1, 2, 4]),
    }
    row = layout["dp"] * layout["micro_batch_size"]
    samples = row * draw.choice([1, 2, 3, 4, 6])
    if draw.random() < 0.3:  # masked samples fill the last microbatch
        samples -= draw.randrange(row)
    length = draw.choice([32, 96])
    sizes, images = random_sources(draw, length)
    weights = [draw.randint(1, 9) for _ in sizes]
    percents = [100 * weight // sum(weights) for weight in weights]
    percents[0] += 100 - sum(percents)
    recipe = make_recipe(
        {name: f"{percent}%" for name, percent in zip(sizes, percents, strict=True)},
        samples=samples,
        length=length,
        seed=draw.randrange(1 << 30),
        packing={
            "method": draw.choice(["best_fit", "best_fit", "concat", "pad"]),
            "boundaries": draw.choice(["document", "document", "none"]),
            "align_tokens": draw.choice([1, 4]),
        },
    )
    vocab_size = draw.choice([None, 500])
    model: Model | None = Model(
        layers=draw.randint(1, 40),
        hidden=64,
        ffn=draw.choice([100, 256]),
        heads=4,
        kv_heads=draw.choice([None, 1, 2]),
        vocab=draw.choice([None, 0, vocab_size or 1000]),
        experts_per_token=draw.choice([None, 2]),
    )
    cost = FittedCost(per_token=draw.randint(0, 50), per_pair=draw.randint(1, 9)) if draw.random() < 0.2 else None
    method = METHODS[number % len(METHODS)]
    if cost is not None or (method != "rows" and draw.random() < 0.1):
        model = None
    balance = Balance(
        method=method,
        level=LEVELS[number // 6 % 3],  # type: ignore[arg-type]
        objective=OBJECTIVES[number // 18 % 4],  # type: ignore[arg-type]
        microbatches=ORDERS[number // 72 % 3],  # type: ignore[arg-type]
        group_size=draw.choice([None, None, 1, 2, 3, 5]),
        model=model,
        cost=cost,
    )
    modules = {}
    if any(each.items for each in sizes.values()) and draw.random() < 0.8:
        pictured = [name for name, each in sizes.items() if each.items]
        modules["vision"] = random_module(draw, "image", pictured, layout["pp"])
    if draw.random() < 0.4:
        modules["reader"] = random_module(draw, "document", list(sizes), layout["pp"])
    whole = msgspec.structs.replace(recipe, balance=balance, modules=modules, vocab_size=vocab_size, starve="allow")
    return check_recipe(whole), sizes, images, layout


def check_samples(plan: StepPlan, recipe: Recipe, layout: dict[str, int], costs: list[int]) -> dict[str, int]:
    """The backbone of a step: its report and its places."""
    keys, dp, size = recipe.balance, layout["dp"], layout["micro_batch_size"]
    own = in_turn if keys.method == OWN else None
    balance = book.Balance(keys.method, keys.level, keys.objective, keys.microbatches, layout["pp"], own)
    places = list(
        zip(plan.placement.dp_rank_of_sample.tolist(), plan.placement.microbatch_of_sample.tolist(), strict=True)
    )
    count = len(costs) // (dp * size)
    plain = book.placed_by_number(dp, size, len(costs))
    bins = defaultdict(list)
    for sample, place in enumerate(places):
        bins[place].append(sample)
    assert sorted(bins) == [(rank, at) for rank in range(dp) for at in range(count)], "bins"
    for held in bins.values():
        assert len(held) == size and plan.placement.slot_of_sample[held].tolist() == list(range(size)), held
    report = plan.balance
    assert report.cost == book.objective_of(places, costs, dp, count, balance), (report, balance)
    assert report.hash_order_cost == book.objective_of(plain, costs, dp, count, balance), (report, balance)
    assert report.lower_bound == book.bound_of(costs, dp, count, balance), (report, balance)
    assert report.lower_bound <= report.cost <= report.hash_order_cost
    if keys.level == "bucket":
        assert [at for _, at in places] == [at for _, at in plain]
    if keys.level == "bin":
        assert [rank for rank, _ in places] == [rank for rank, _ in plain]
    expected = plain
    grouped = keys.group_size is not None and keys.group_size < dp and keys.level != "bin" and keys.method != "none"
    if report.took_hash_order:
        assert places == plain and keys.method != "none"
    if keys.method == "none" or (grouped and report.took_hash_order) or keys.method == "karmarkar_karp":
        pass
    elif grouped:
        assert keys.group_size is not None
        expected = in_groups(places, plain, costs, dp, size, keys.group_size, balance)
    else:
        expected = book.placed(dp, size, costs, plain, balance)
        is_dear = book.objective_of(expected, costs, dp, count, balance) > report.hash_order_cost
        assert is_dear == report.took_hash_order
        expected = plain if is_dear else expected
    if keys.method != "karmarkar_karp":
        assert places == expected, balance
    digest = book.plan_digest(dp, size, places, plan.order_digest)
    modules: dict[str, Any] = {}
    for name, module in plan.item_modules.items():
        columns = (
            module.items.sample,
            module.items.offset,
            module.consumer_of_item,
            module.bin_of_item,
            module.slot_of_item,
        )
        items = list(zip(*(column.tolist() for column in columns), strict=True))
        modules[name] = module.axis, module.num_consumers, module.num_bins, items
    assert plan.plan_digest.hex() == book.module_digest(digest, modules)
    return {"hash_order": report.took_hash_order, "grouped": grouped}


def groups_of(count: int, group_size: int) -> list[int]:
    groups = -(-count // group_size)
    return [number * groups // count for number in range(count)]


def check_dealt(costs: list[int], members: list[int], group_of: list[int], bins: list[int]) -> None:
    """Of each block of as many as there are bins, by cost, every group gets as many as it has bins."""
    order = sorted(members, key=lambda each: (-costs[each], each))
    for start in range(0, len(order), len(group_of)):
        block = order[start : start + len(group_of)]
        got = [group_of[bins[each]] for each in block]
        for group in set(group_of):
            held, most = got.count(group), group_of.count(group)
            assert held == most if len(block) == len(group_of) else held <= most, "dealt"


def in_groups(
    places: list[tuple[int, int]],
    plain: list[tuple[int, int]],
    costs: list[int],
    dp: int,
    size: int,
    group_size: int,
    balance: book.Balance,
) -> list[tuple[int, int]]:
    """The places inside the groups that samples are in."""
    group_of = groups_of(dp, group_size)
    assert max(map(group_of.count, group_of)) <= group_size
    ranks_of = [rank for rank, _ in places]
    blocks = [list(range(len(costs)))]
    if balance.level == "bucket":
        blocks = [[s for s, (_, at) in enumerate(plain) if at == row] for row in sorted({at for _, at in plain})]
    for block in blocks:
        check_dealt(costs, block, group_of, ranks_of)
    found = list(places)
    for group in sorted(set(group_of)):
        ranks = [rank for rank in range(dp) if group_of[rank] == group]
        mine = [sample for sample, rank in enumerate(ranks_of) if group_of[rank] == group]
        inner = [plain[sample] for sample in mine]
        for sample, (rank, at) in zip(
            mine, book.placed(len(ranks), size, [costs[sample] for sample in mine], inner, balance), strict=True
        ):
            found[sample] = ranks[rank], at
    return found


def items_of(plan: StepPlan, module: Module, images: Images) -> list[tuple[int, int, int, int, int]]:
    """Sample, offset, rows, size and tiles of each item, found piece by piece."""
    pieces = plan.pieces
    found: list[tuple[int, int, int, int, int]] = []
    columns = (pieces.source, pieces.row, pieces.start, pieces.tokens, plan.sample, plan.sample_offset)
    for source, row, start, tokens, sample, offset in zip(*(column.tolist() for column in columns), strict=True):
        name = plan.sources[source]
        if module.sources is not None and name not in module.sources:
            continue
        if module.items == "document":
            found.append((sample, offset, tokens, tokens, 1))
            continue
        for at, wide, *of_image in images[name][row]:
            if start <= at and at + wide <= start + tokens:
                size, tiles = (wide, 1) if module.sizes == "tokens" else of_image
                found.append((sample, offset + at - start, wide, size, tiles))
    return sorted(found) if module.items == "image" else found


def cost_of_item(size: int, model: EncoderModel | None, tiles: int = 1) -> tuple[int, int]:
    """Cost and bytes of an item, from the dimensions."""
    if model is None:
        return size, 0
    kv = model.hidden * (model.kv_heads or model.heads) // model.heads
    wide = model.ffn * {"gelu": 2, "swiglu": 3}[model.mlp]
    unit = model.layers * (2 * model.hidden + 2 * kv + wide)
    unit += 0 if model.out is None else model.merge**2 * model.hidden + model.out
    unit += 0 if model.patch is None else 3 * model.patch**2
    tile = -(-size // tiles)
    near = tile
    if model.window is not None:
        near = min(tile, model.window if model.patch is None else max(1, model.window // model.patch) ** 2)
    full = model.layers if model.window is None else len(model.full_layers)
    attended = 2 * full * tile + 2 * (model.layers - full) * near
    return size * (unit + attended), size * 2 * model.layers * (6 * model.hidden + 2 * kv + wide)


def expected_consumers(
    module: Module,
    costs: list[int],
    memory: list[int],
    homes: list[int],
    found: list[int] | None,
    count: int,
    dp: int,
) -> tuple[list[int] | None, bool]:
    """The consumers of the items of one bin, and whether they are near their text; None: the cap cannot be kept.

    `found` says which group an item is in; None: there is no plan.
    """
    own = in_turn if module.method == OWN else None
    cap = None if module.cap is None else int(module.cap)
    keys = book.ModuleBalance(module.method, cap, own=own)
    if module.near_text is not None:
        for near in book.items_near_text(costs, homes, count, dp, Fraction(module.near_text[:-1]) / 100):
            if cap is None or most(memory, near, count) <= cap:
                return near, True
    if module.group_size is None or module.group_size >= count or found is None:
        return book.items_of_group(costs, memory, count, keys), False
    group_of = groups_of(count, module.group_size)
    check_dealt(costs, list(range(len(costs))), group_of, found)
    placed = list(found)
    for group in sorted(set(group_of)):
        bins = [number for number in range(count) if group_of[number] == group]
        mine = [item for item, number in enumerate(found) if group_of[number] == group]
        inner = book.items_of_group([costs[item] for item in mine], [memory[item] for item in mine], len(bins), keys)
        if inner is None:
            return None, False
        for item, number in zip(mine, inner, strict=True):
            placed[item] = bins[number]
    return placed, False


def most(values: list[int], bins: list[int], count: int) -> int:
    sums = [0] * count
    for value, number in zip(values, bins, strict=True):
        sums[number] += value
    return max(sums)


def rows_cost(costs: list[int], bin_of: list[int], consumer: list[int], count: int, num_bins: int) -> int:
    return sum(
        most([c if at == b else 0 for c, at in zip(costs, bin_of, strict=True)], consumer, count)
        for b in range(num_bins)
    )


def check_module(plan: StepPlan, name: str, module: Module, images: Images, layout: dict[str, int]) -> dict[str, int]:
    placed: ItemPlan = plan.item_modules[name]
    dp = layout["dp"]
    of_replica = consumers_of_replica(module, layout)
    count, num_bins = dp * of_replica, plan.num_microbatches if module.scope == "microbatch" else 1
    assert (placed.num_consumers, placed.num_bins, placed.unit) == (count, num_bins, module.items)
    items = items_of(plan, module, images)
    names = ("sample", "offset", "tokens", "size", "segments")
    columns = [getattr(placed.items, name) for name in names]
    assert items == list(zip(*(column.tolist() for column in columns), strict=True)), "items"
    pairs = [cost_of_item(size, module.model, tiles) for *_, size, tiles in items]
    costs, memory = [cost for cost, _ in pairs], [each for _, each in pairs]
    assert placed.cost_of_item.tolist() == costs
    rank = plan.placement.dp_rank_of_sample.tolist()
    microbatch = plan.placement.microbatch_of_sample.tolist()
    bin_of = [microbatch[sample] if num_bins > 1 else 0 for sample, *_ in items]
    homes = [rank[sample] for sample, *_ in items]
    consumer = placed.consumer_of_item.tolist()
    assert placed.bin_of_item.tolist() == bin_of
    held: dict[tuple[int, int], int] = defaultdict(int)
    for place, slot in zip(zip(consumer, bin_of, strict=True), placed.slot_of_item.tolist(), strict=True):
        assert slot == held[place]
        held[place] += 1
    hashed = [item % count for item in range(len(items))]
    report = placed.balance
    plain_cost = rows_cost(costs, bin_of, hashed, count, num_bins)
    assert report.hash_order_cost == plain_cost and report.cost == rows_cost(costs, bin_of, consumer, count, num_bins)
    bound = 0
    for number in range(num_bins):
        here = [cost for cost, at in zip(costs, bin_of, strict=True) if at == number]
        bound += book.bound_of_items(here, count)
    assert report.lower_bound == max(1, bound)
    num_near = num_left = 0
    expected = hashed if module.method == "none" else [0] * len(items)
    for number in sorted(set(bin_of)) if module.method != "none" else ():
        mine = [item for item, at in enumerate(bin_of) if at == number]
        of = [[values[item] for item in mine] for values in (costs, memory, homes, consumer)]
        took = of[3] if not report.took_hash_order else None
        got, is_near = expected_consumers(module, of[0], of[1], of[2], took, count, dp)
        assert got is not None or (took is None and module.group_size is not None), "the cap cannot be kept"
        num_near += is_near
        num_left += not is_near
        for item, each in zip(mine, got or of[3], strict=True):
            expected[item] = each
    assert report.left_text == (module.near_text is not None and num_left > 0)
    if report.took_hash_order:
        assert consumer == hashed and not num_near
    elif module.method != "karmarkar_karp":
        assert consumer == expected, module
    if module.cap is not None:
        places = [at * num_bins + number for at, number in zip(consumer, bin_of, strict=True)]
        assert most(memory, places, count * num_bins) <= int(module.cap)
    if module.method != "none" and not num_near and module.cap is None:
        assert report.cost <= plain_cost
    if not report.took_hash_order and not num_near and module.cap is None and module.group_size is None:
        assert rows_cost(costs, bin_of, expected, count, num_bins) <= plain_cost or module.method == "karmarkar_karp"
    away = sum(
        rows for (_, _, rows, *_), at, home in zip(items, consumer, homes, strict=True) if at // of_replica != home
    )
    assert plan.rows_that_travel(name) == away
    return {"items": len(items), "near": num_near, "left": num_left, "items_in_hash_order": report.took_hash_order}


def may_be_refused(plan: StepPlan, module: Module, images: Images, layout: dict[str, int]) -> bool:
    """Whether a module breaks its cap, or has groups of which it is not known; `plan` is of the backbone alone."""
    count = layout["dp"] * consumers_of_replica(module, layout)
    if module.cap is None or (module.group_size is not None and module.group_size < count and module.method != "none"):
        return module.cap is not None
    items = items_of(plan, module, images)
    pairs = [cost_of_item(size, module.model, tiles) for *_, size, tiles in items]
    microbatch, rank = plan.placement.microbatch_of_sample.tolist(), plan.placement.dp_rank_of_sample.tolist()
    bin_of = [microbatch[sample] if module.scope == "microbatch" else 0 for sample, *_ in items]
    for number in set(bin_of):
        mine = [item for item, at in enumerate(bin_of) if at == number]
        costs, memory, homes = (
            [of[item] for item in mine]
            for of in ([cost for cost, _ in pairs], [each for _, each in pairs], [rank[sample] for sample, *_ in items])
        )
        got: list[int] | None = [item % count for item in mine]
        if module.method != "none":
            got, _ = expected_consumers(module, costs, memory, homes, None, count, layout["dp"])
        if got is None or most(memory, got, count) > int(module.cap):
            return True
    return False


def consumers_of_replica(module: Module, layout: dict[str, int]) -> int:
    return {"DP": 1, "CP": layout["cp"], "WORLD": layout["tp"] * layout["cp"] * layout["pp"]}[module.axis]


def try_combination(seed: int, number: int) -> dict[str, Any]:
    """Check one combination; what it was."""
    draw = random.Random(f"{seed} {number}")
    recipe, sizes, images, layout = random_combination(number, draw)
    planner, plain = make_planner(recipe, sizes, **layout, elastic=True), make_planner(recipe, sizes, dp=1)
    backbone_planner = make_planner(msgspec.structs.replace(recipe, modules={}), sizes, **layout, elastic=True)
    cursor, totals = planner.start(), defaultdict(int)
    whole = recipe.packing.boundaries == "none"
    keys = recipe.balance
    per_token, per_pair = 1, 0
    if keys.cost is not None:
        per_token, per_pair = keys.cost.per_token, keys.cost.per_pair
    elif keys.model is not None:
        kv = keys.model.hidden * (keys.model.kv_heads or keys.model.heads) // keys.model.heads
        per_pair = keys.model.layers
        per_token = per_pair * (
            2 * keys.model.hidden + 2 * kv + 3 * keys.model.ffn * (keys.model.experts_per_token or 1)
        )
        per_token += (recipe.vocab_size or 0) if keys.model.vocab is None else keys.model.vocab
    for _ in range(STEPS):
        order = plain.skip(cursor).order_digest
        try:
            plan, cursor = planner.step(cursor)
        except PlanError as error:
            modules, pipelined = recipe.modules.values(), layout["pp"] > 1
            backbone = backbone_planner.step(cursor)[0]
            if "items of microbatches need one pipeline stage" in str(error):
                assert pipelined and any(module.scope == "microbatch" for module in modules), error
            else:
                assert any(may_be_refused(backbone, module, images, layout) for module in modules), error
                totals["refused_by_a_cap"] += 1
            cursor = planner.skip(cursor)
            continue
        assert plan.order_digest == order, "a layout changes the order"
        rows = list(zip(plan.sample.tolist(), plan.pieces.tokens.tolist(), strict=True))
        of_cost = (per_token, 0, per_pair) if whole else (per_token, per_pair, 0)
        costs = book.costs_of_samples(of_cost, plan.length, plan.num_samples, rows)
        found = [check_samples(plan, recipe, layout, costs)]
        found += [check_module(plan, name, module, images, layout) for name, module in recipe.modules.items()]
        for each in found:
            for name, value in each.items():
                totals[name] += int(value)
        totals["steps"] += 1
    words = [keys.method.rpartition(":")[2], keys.level, keys.objective, keys.microbatches, f"groups {keys.group_size}"]
    return {"words": ", ".join(words), **layout, **totals}


def main() -> None:
    found = continued(trial_parser(__doc__, count=2000).parse_args(), try_combination)
    sums: dict[str, int] = defaultdict(int)
    for one in found.values():
        for name in one.keys() - {"words", "dp", "micro_batch_size", "tp", "cp", "pp"}:
            sums[name] += one[name]
    print(json.dumps({"combinations": len(found), **dict(sorted(sums.items()))}))


if __name__ == "__main__":
    main()
