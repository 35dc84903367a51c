"""The example of FlatMixture: ratios 9000, 518 and 1019, a nested flat of small sources, and a share of a millionth."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from tests.support.mixtures import forecast_of, make_planner
from tests.support.sizes import synthetic_sizes
from torchmix.recipe.load import check_recipe
from torchmix.recipe.parts import part_of
from torchmix.recipe.structs import Recipe

LENGTH = 256
MIXTURE = {
    "text": {
        "share": "79.9999%",
        "children": {"web": 9000, "german": 518, "small": {"share": 1019, "flat": ["pubmed", "peps", "laws"]}},
    },
    "code": "20%",
    "rare": "0.0001%",
}
WHOLE = Fraction(799999, 1000000)
SHARES = {
    "web": WHOLE * 9000 / 10537,
    "german": WHOLE * 518 / 10537,
    "small": WHOLE * 1019 / 10537,
    "code": Fraction(1, 5),
    "rare": Fraction(1, 1000000),
}
SIZES = {
    "web": synthetic_sizes(4000, shortest=5, longest=1500, salt=1),
    "german": synthetic_sizes(300, shortest=5, longest=400, salt=2),
    "pubmed": synthetic_sizes(60, shortest=50, longest=900, rows_per_page=5, salt=3),
    "peps": synthetic_sizes(9, shortest=5, longest=60, rows_per_page=9, salt=4),
    "laws": synthetic_sizes(200, shortest=5, longest=200, salt=5),
    "code": synthetic_sizes(900, shortest=20, longest=400, salt=6),
    "rare": synthetic_sizes(5, shortest=6, longest=9, rows_per_page=5, salt=7),
}


def flat_mixture() -> Recipe:
    return check_recipe(
        {
            "version": 1,
            "seed": 9,
            "batch": {"samples": 64, "length": LENGTH},
            "sources": {name: {"path": f"{name}.parquet", "tokens": "ids"} for name in SIZES},
            "mixture": MIXTURE,
        }
    )


def test_every_stream_has_its_share_after_every_step_and_a_millionth_comes_when_it_is_owed() -> None:
    planner = make_planner(flat_mixture(), SIZES)
    assert planner.streams == tuple(sorted(SHARES))
    cursor, asked, drawn = planner.start(), 0, np.zeros(len(SHARES), np.int64)
    longest = [order.space.longest_tokens for order in planner.orders]
    first_rare = None
    for step in range(360):
        _, new, of_step, cursor = planner.fold(cursor)
        asked += int(of_step.sum())
        np.add.at(drawn, new.stream, new.tokens)
        for s, name in enumerate(planner.streams):
            # Shares are integers out of 2^32, and each stream is asked for whole tokens.
            off = abs(int(drawn[s]) - SHARES[name] * asked)
            assert off <= min(LENGTH, longest[s]) / 2 + 2 * len(SHARES) + asked * Fraction(1, 2**32), (step, name)
        if first_rare is None and drawn[planner.streams.index("rare")]:
            first_rare = step
    assert first_rare is not None
    owed, most = 64 * LENGTH * first_rare / 1_000_000, longest[planner.streams.index("rare")]
    assert 2 < owed <= most / 2 + 2, "a document of 6 to 8 tokens comes when half of it is owed, in whole tokens"


def test_members_of_the_flat_come_by_their_size_and_once_an_epoch() -> None:
    planner = make_planner(flat_mixture(), SIZES)
    cursor, small = planner.start(), planner.streams.index("small")
    tokens = dict.fromkeys(("pubmed", "peps", "laws"), 0)
    while int(cursor.position.epoch[small]) < 1:
        _, new, _, cursor = planner.fold(cursor)
        mine = (new.stream == small) & (new.epoch == 0)
        for source, count in zip(new.source[mine].tolist(), new.tokens[mine].tolist(), strict=True):
            tokens[planner.sources[source]] += count
    assert tokens == {name: int(SIZES[name].tokens.sum()) for name in tokens}


def test_check_names_the_millionth_as_starved_in_a_short_run_and_as_given_in_a_long_one() -> None:
    part = part_of(flat_mixture(), "train")
    short, long = (forecast_of(part, SIZES, steps, simulated_steps=20) for steps in (20, 100_000))
    rare = [next(one for one in each.sources if one.name == "rare") for each in (short, long)]
    assert rare[0].delivered_tokens == 0 and rare[1].delivered_tokens > LENGTH
