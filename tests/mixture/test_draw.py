from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import pytest

from tests.support.sizes import synthetic_sizes
from torchmix.catalog.sizes import SourceSizes
from torchmix.errors import SourceExhausted
from torchmix.mixture.draw import MAX_ASKED_TOKENS, Position, Stretches, draw, exhausted_error
from torchmix.mixture.order import SourceOrder, StreamOrder
from torchmix.mixture.shares import SHARE_ONE, integer_shares

ENDLESS = 1 << 40


def of_tokens(tokens: list[int], *, rows_per_page: int = 3, window_pages: int = 2) -> SourceSizes:
    first_row = np.append(np.arange(0, len(tokens), rows_per_page), len(tokens)).astype(np.int64)
    return SourceSizes(first_row_of_page=first_row, tokens=np.array(tokens, np.int32), window_pages=window_pages)


def documents_of(order: StreamOrder, max_epochs: int) -> Iterator[tuple[int, int, int]]:
    """(epoch, row, tokens) of a source, one by one, the empty ones too."""
    for epoch in range(max_epochs):
        for window in range(order.num_windows):
            made = order.window(epoch, window)
            for row, tokens in zip(made.rows.tolist(), np.diff(made.ends).tolist(), strict=True):
                yield epoch, row, tokens


@dataclass
class SlowSource:
    """A source as the rule has it: it gives documents while it owes more than half of the next one."""

    order: StreamOrder
    max_epochs: int
    debt: int = 0
    residue: Fraction = Fraction(0)
    ran_out: bool = False
    given: list[tuple[int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.coming = documents_of(self.order, self.max_epochs)
        self.following = next(self.coming, None)

    def charge(self, owed: Fraction) -> list[tuple[int, int, int]]:
        whole = self.residue + owed
        self.debt += int(whole)
        self.residue = whole - int(whole)
        start = len(self.given)
        while self.debt > 0 and owed > 0:
            if self.following is None:
                self.ran_out, self.debt, self.residue = True, 0, Fraction(0)
            elif self.following[2] < 2 * self.debt:
                self.given.append(self.following)
                self.debt -= self.following[2]
                self.following = next(self.coming, None)
            else:
                break
        return self.given[start:]


CONFIGURATIONS: dict[str, tuple[dict[str, SourceSizes], dict[str, Fraction]]] = {
    "like lengths": (
        {
            "a": synthetic_sizes(900, shortest=10, longest=400, rows_per_page=9, window_pages=8, salt=1),
            "b": synthetic_sizes(400, shortest=10, longest=400, rows_per_page=9, window_pages=8, salt=2),
        },
        {"a": Fraction(7, 10), "b": Fraction(3, 10)},
    ),
    "a share of 1e-5 and rows of any length": (
        {
            "huge": synthetic_sizes(3000, shortest=1, longest=5000, rows_per_page=20, window_pages=16, salt=3),
            "tiny": synthetic_sizes(60, shortest=1, longest=40, rows_per_page=20, window_pages=16, salt=4),
            "long": synthetic_sizes(50, shortest=90_000, longest=100_000, rows_per_page=1, window_pages=16, salt=5),
        },
        {"huge": Fraction(89_999, 10**5), "tiny": Fraction(1, 10**5), "long": Fraction(1, 10)},
    ),
    "one row, many epochs in a draw": (
        {"one": of_tokens([7]), "two": of_tokens([1, 3000]), "web": synthetic_sizes(500, shortest=1, longest=900)},
        {"one": Fraction(1, 3), "two": Fraction(1, 3), "web": Fraction(1, 3)},
    ),
    "documents of one token and of none": (
        {
            "ones": of_tokens([1] * 50),
            "gaps": of_tokens([0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 2, 0, 9, 0, 0, 0], rows_per_page=2),
            "last": of_tokens([0] * 20 + [100]),
        },
        {"ones": Fraction(1, 7), "gaps": Fraction(2, 7), "last": Fraction(4, 7)},
    ),
}

# A window costs as much as its 3 rows here: ask little of sources that have little.
USUAL_TOKENS = {"one row, many epochs in a draw": 400, "documents of one token and of none": 30}


def orders_of(sizes: dict[str, SourceSizes], seed: int = 5) -> list[SourceOrder]:
    return [SourceOrder(name, sizes[name], seed=seed) for name in sorted(sizes)]


def asks(name: str, seed: int, count: int) -> list[int]:
    """Numbers of tokens to ask: usual ones, none, single ones, and large ones."""
    rng = random.Random(seed)
    usual = USUAL_TOKENS.get(name, 4000)
    return [rng.choice([usual, usual, rng.randint(0, 3), rng.randint(0, 2 * usual), 5 * usual]) for _ in range(count)]


def tuples(documents: Stretches, source: int) -> list[tuple[int, int, int]]:
    mask = documents.stream == source
    columns = (documents.epoch, documents.row, documents.tokens)
    return list(zip(*(column[mask].tolist() for column in columns), strict=True))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_draws_are_those_of_taking_documents_one_by_one(name):
    sizes, fractions = CONFIGURATIONS[name]
    orders, shares = orders_of(sizes), integer_shares(fractions)
    slow = [SlowSource(order, ENDLESS) for order in orders_of(sizes)]
    position, endless = Position.start(len(orders)), np.full(len(orders), ENDLESS)
    for asked in asks(name, 31, 60):
        drawn = draw(orders, shares, position, asked, max_epochs=endless)
        position = drawn.position
        assert drawn.ran_out == ()
        assert np.all(np.diff(drawn.stretches.stream) >= 0), "documents are not sorted by source"
        for s, source in enumerate(slow):
            expected = source.charge(Fraction(int(shares[s]) * asked, SHARE_ONE))
            assert tuples(drawn.stretches, s) == [each for each in expected if each[2] > 0]
            assert int(position.debt[s]) == source.debt
            assert Fraction(int(position.residue[s]), SHARE_ONE) == source.residue


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_drawn_tokens_stay_within_half_the_longest_document_of_the_share_at_every_step(name):
    sizes, fractions = CONFIGURATIONS[name]
    orders, shares = orders_of(sizes), integer_shares(fractions)
    longest = [int(order.sizes.tokens.max()) for order in orders]
    position, endless = Position.start(len(orders)), np.full(len(orders), ENDLESS)
    charged = np.zeros(len(orders), np.int64)
    given = np.zeros(len(orders), np.int64)
    total = 0
    for asked in asks(name, 32, 120):
        drawn = draw(orders, shares, position, asked, max_epochs=endless)
        position = drawn.position
        total += asked
        charged += drawn.asked
        np.add.at(given, drawn.stretches.stream, drawn.stretches.tokens)
        assert np.all((position.residue >= 0) & (position.residue < SHARE_ONE))
        for s in range(len(orders)):
            # Charged tokens are whole; what is left of the exact share is less than one more.
            assert 0 <= Fraction(int(shares[s]) * total, SHARE_ONE) - int(charged[s]) < 1
            assert abs(int(given[s] - charged[s])) <= longest[s] / 2
            assert int(charged[s] - given[s]) == int(position.debt[s])


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_nothing_is_lost_or_repeated_across_windows_epochs_and_draws(name):
    sizes, fractions = CONFIGURATIONS[name]
    orders, shares = orders_of(sizes), integer_shares(fractions)
    position, endless = Position.start(len(orders)), np.full(len(orders), ENDLESS)
    given: list[list[tuple[int, int, int]]] = [[] for _ in orders]
    for asked in asks(name, 33, 50):
        drawn = draw(orders, shares, position, asked, max_epochs=endless)
        position = drawn.position
        for s, documents in enumerate(given):
            documents += tuples(drawn.stretches, s)
    for s, order in enumerate(orders_of(sizes)):
        coming = (each for each in documents_of(order, ENDLESS) if each[2] > 0)
        assert given[s] == [next(coming) for _ in given[s]], sorted(sizes)[s]


def test_one_row_gives_many_epochs_in_one_draw():
    sizes, fractions = CONFIGURATIONS["one row, many epochs in a draw"]
    orders, shares = orders_of(sizes), integer_shares(fractions)
    drawn = draw(orders, shares, Position.start(3), 3 * 1400, max_epochs=np.full(3, ENDLESS))
    epochs = drawn.stretches.epoch[drawn.stretches.stream == 0]
    assert epochs.tolist() == list(range(200))
    assert drawn.position.epoch[0] == 200 and drawn.position.debt[0] == 0


def test_a_source_of_share_1e_5_appears_at_its_rate():
    sizes, fractions = CONFIGURATIONS["a share of 1e-5 and rows of any length"]
    orders, shares = orders_of(sizes), integer_shares(fractions)
    names = sorted(sizes)
    position, given, steps_with_it = Position.start(3), 0, []
    for step in range(500):
        drawn = draw(orders, shares, position, 65_536, max_epochs=np.full(3, ENDLESS))
        position = drawn.position
        tokens = int(drawn.stretches.tokens[drawn.stretches.stream == names.index("tiny")].sum())
        given += tokens
        if tokens:
            steps_with_it.append(step)
    owed = 500 * 65_536 / 10**5
    assert abs(given - owed) <= 40 / 2 + 1, (given, owed)
    # Documents of at most 40 tokens, 0.66 tokens a step: never more than 61 steps apart.
    assert steps_with_it[0] <= 31 and max(np.diff(steps_with_it)) <= 62


def test_a_draw_does_not_alter_the_position_it_starts_from_and_gives_the_same_again():
    sizes, fractions = CONFIGURATIONS["like lengths"]
    orders, shares = orders_of(sizes), integer_shares(fractions)
    start = draw(orders, shares, Position.start(2), 5000, max_epochs=np.full(2, ENDLESS)).position
    before = {name: getattr(start, name).copy() for name in start.__struct_fields__}
    one, other = (draw(orders, shares, start, 300_000, max_epochs=np.full(2, ENDLESS)) for _ in range(2))
    assert np.all(one.position.epoch > start.epoch)
    for name in start.__struct_fields__:
        assert np.array_equal(getattr(start, name), before[name])
        assert np.array_equal(getattr(one.position, name), getattr(other.position, name))
    for name in one.stretches.__struct_fields__:
        assert np.array_equal(getattr(one.stretches, name), getattr(other.stretches, name))
        assert getattr(one.stretches, name).dtype == np.int64
    assert not np.any(Position.start(2).debt)


def test_asking_nothing_gives_nothing():
    sizes, fractions = CONFIGURATIONS["like lengths"]
    drawn = draw(orders_of(sizes), integer_shares(fractions), Position.start(2), 0, max_epochs=np.full(2, ENDLESS))
    assert len(drawn.stretches.row) == 0 and drawn.ran_out == ()
    assert drawn.asked.tolist() == [0, 0]


def test_the_largest_ask_of_a_whole_share_stays_inside_64_bits():
    order = SourceOrder("web", of_tokens([2**31 - 1] * 4), seed=1)
    position = Position(
        epoch=np.zeros(1, np.int64),
        window=np.zeros(1, np.int64),
        offset=np.zeros(1, np.int64),
        debt=np.array([2**30]),
        residue=np.array([SHARE_ONE - 1]),
    )
    whole = np.array([SHARE_ONE])
    drawn = draw([order], whole, position, MAX_ASKED_TOKENS, max_epochs=np.array([ENDLESS]))
    assert drawn.asked.tolist() == [MAX_ASKED_TOKENS]
    assert drawn.position.residue.tolist() == [SHARE_ONE - 1]
    assert drawn.stretches.tokens.tolist() == [2**31 - 1]
    with pytest.raises(AssertionError):
        draw([order], whole, position, MAX_ASKED_TOKENS + 1, max_epochs=np.array([ENDLESS]))


def test_a_source_gives_its_last_epoch_to_the_last_document_and_then_runs_out():
    sizes = {"few": of_tokens([5, 0, 8, 3, 9, 1, 7]), "web": synthetic_sizes(500, shortest=1, longest=50)}
    third = SHARE_ONE // 3  # of no round number of tokens: a residue is left
    shares, max_epochs = np.array([third, SHARE_ONE - third]), np.array([3, ENDLESS])
    slow = SlowSource(SourceOrder("few", sizes["few"], seed=5), 3)
    position, given, web = Position.start(2), [], 0
    orders = orders_of(sizes)
    for step in range(100):
        drawn = draw(orders, shares, position, 20, max_epochs=max_epochs)
        position = drawn.position
        assert tuples(drawn.stretches, 0) == [
            each for each in slow.charge(Fraction(third * 20, SHARE_ONE)) if each[2] > 0
        ], step
        given += tuples(drawn.stretches, 0)
        web += sum(tokens for _, _, tokens in tuples(drawn.stretches, 1))
        assert drawn.ran_out == ((0,) if slow.ran_out else ())
        if slow.ran_out:
            break
    assert sum(tokens for _, _, tokens in given) == 3 * 33
    assert sorted((epoch, row) for epoch, row, _ in given) == [(e, row) for e in range(3) for row in (0, 2, 3, 4, 5, 6)]
    stands = [int(getattr(position, each)[0]) for each in ("epoch", "window", "offset", "debt", "residue")]
    assert stands == [3, 0, 0, 0, 0]
    # What it could not give was not taken from, nor given to, the other one.
    assert abs(web - 20 * (step + 1) * 2 / 3) <= 26


def test_a_source_that_gave_its_last_token_exactly_has_not_run_out_until_it_is_asked_again():
    order, whole, once = SourceOrder("few", of_tokens([4, 4, 4, 4]), seed=1), np.array([SHARE_ONE]), np.array([1])
    drawn = draw([order], whole, Position.start(1), 16, max_epochs=once)
    assert drawn.ran_out == () and int(drawn.stretches.tokens.sum()) == 16
    again = draw([order], whole, drawn.position, 1, max_epochs=once)
    assert again.ran_out == (0,) and len(again.stretches.row) == 0


def test_a_source_without_a_share_gives_nothing_and_keeps_what_it_owes():
    sizes, _ = CONFIGURATIONS["like lengths"]
    zeros = np.zeros(2, np.int64)
    owing = Position(epoch=zeros, window=zeros + 1, offset=zeros + 2, debt=zeros + 5000, residue=zeros + 9)
    drawn = draw(orders_of(sizes), np.array([0, SHARE_ONE]), owing, 9000, max_epochs=np.full(2, ENDLESS))
    assert set(drawn.stretches.stream.tolist()) == {1}
    for name in drawn.position.__struct_fields__:
        assert getattr(drawn.position, name)[0] == getattr(owing, name)[0]


def test_lengths_that_count_for_less_are_charged_as_such_and_told_whole():
    sizes = synthetic_sizes(500, shortest=0, longest=900)
    order = SourceOrder("web", sizes, seed=1, counted=lambda tokens: np.where(tokens > 600, 0, np.minimum(tokens, 100)))
    drawn = draw([order], np.array([SHARE_ONE]), Position.start(1), 30_000, max_epochs=np.array([ENDLESS]))
    documents = drawn.stretches
    assert np.array_equal(documents.document_tokens, sizes.tokens[documents.row])
    assert np.array_equal(documents.tokens, np.minimum(documents.document_tokens, 100))
    assert documents.document_tokens.max() <= 600 and documents.tokens.min() > 0
    assert abs(int(documents.tokens.sum()) - 30_000) <= 50


def test_the_error_of_a_source_that_ran_out_says_which_when_and_what_to_do():
    one = str(exhausted_error("web", 4, 17, all_sources=False))
    for said in ("'web'", "max_epochs (4)", "step 17", "renormalise", "torchmix check"):
        assert said in one
    all_of_them = exhausted_error("", 0, 17, all_sources=True)
    assert isinstance(all_of_them, SourceExhausted)
    assert "every source" in str(all_of_them) and "max_steps=17" in str(all_of_them)
    assert "no data is left for step 0; take a smaller batch" in str(exhausted_error("", 0, 0, all_sources=True))
