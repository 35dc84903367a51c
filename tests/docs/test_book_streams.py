"""Selections and flats of the second implementation against the planner, over random recipes."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from itertools import islice

import numpy as np
import pytest

from tests.docs.test_book import random_source
from tests.support.book_jobs import BookJob
from tests.support.book_steps import steps
from tests.support.book_streams import BookStream, flat_of, selection_of, stream_of, window_pages_of
from torchmix.catalog.sizes import SourceSizes
from torchmix.catalog.store import View
from torchmix.parallel.place_tree import Layout
from torchmix.planner.planner import Planner
from torchmix.recipe.load import check_recipe
from torchmix.recipe.parts import part_of


def view_of(stream: BookStream, source: str) -> View:
    """The selection as the catalog has it."""
    tokens = [stream.rows.tokens[row] for row in stream.kept]
    return View(
        source=source,
        kept=np.array(sorted(stream.kept), np.uint32),
        window_units=stream.rows.window_pages,
        fingerprint="",
        longest_tokens=max(tokens),
        num_tokens=sum(tokens),
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(18))
def test_the_planner_makes_the_steps_of_the_book(seed: int) -> None:
    rng = random.Random(f"streams {seed}")
    method = ("page", "row", "none")[seed % 3]
    books = {name: replace(random_source(rng, name), method=method) for name in ("a", "b", "c")}
    selections, views = {}, {}
    for name, source in (("odd", "a"), ("Few", "b")):
        count = rng.randint(1, len(books[source].tokens))
        kept = {0, *rng.sample(range(len(books[source].tokens)), count)}
        pages = rng.randint(1, books[source].num_pages)
        selections[name] = selection_of(name, books[source], sorted(kept), pages)
        views[name] = view_of(selections[name], source)
    known = {**{name: stream_of(book) for name, book in books.items()}, **selections}
    members = {"mixed": ["c", *rng.sample(["odd", "b"], rng.randint(1, 2))], "all": ["Few", "a"]}
    most_pages = rng.choice([1, 2, 4])
    flats = {}
    for name, names in members.items():
        children = [known[member] for member in sorted(names)]
        flats[name] = flat_of(name, children, window_pages_of(children, most_pages))
    streams = {**flats, "a": known["a"], "odd": known["odd"]}
    packing = {"method": ("best_fit", "concat", "pad")[seed // 3 % 3], "overflow": "split", "align_tokens": 8}
    bounds = {"max_epochs": 1, "on_exhausted": "renormalise"}
    plain = {
        "version": 1,
        "seed": seed,
        "batch": {"samples": 8, "length": 48},
        "sources": {
            **{name: {"path": "none", "tokens": "ids"} for name in books},
            **{name: {"from": view.source, "where": "x"} for name, view in views.items()},
        },
        "mixture": {
            "a": 3,
            "odd": 2,
            "mixed": {"share": 3, "flat": members["mixed"], **bounds},
            "all": {"share": 2, "flat": members["all"]},
        },
        "packing": packing,
        "shuffle": {"method": method, "window_pages": most_pages},
    }
    sizes = {
        name: SourceSizes(
            first_row_of_page=np.array(book.first_row_of_page, np.int64),
            tokens=np.array(book.tokens, np.int32),
            window_pages=book.window_pages,
        )
        for name, book in books.items()
    }
    planner = Planner(part_of(check_recipe(plain), "train"), sizes, Layout(dp=2, micro_batch_size=1), views=views)
    shares = {"a": Fraction(3, 10), "odd": Fraction(1, 5), "mixed": Fraction(3, 10), "all": Fraction(1, 5)}
    job = BookJob(seed=seed, ramp=[(0, 8)], length=48, **packing, shares=shares, max_epochs={"mixed": 1}, dp=2)
    cursor = planner.start()
    for book in islice(steps(job, streams), 12):
        plan, cursor = planner.step(cursor)
        assert book.order_digest == plan.order_digest.hex(), f"seed {seed}, step {plan.step}"
        assert list(book.asked.values()) == plan.asked_tokens.tolist()
        assert [piece.stream for _, _, _, piece in book.rows] == [planner.streams[s] for s in plan.pieces.stream]
