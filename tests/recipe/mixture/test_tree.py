"""Shares of a tree: who has what, who inherits from whom, what a change of some shares does to the others."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from torchmix.errors import RecipeError
from torchmix.recipe.tree import Node, group, stream_shares, streams_of, walk, with_shares


def leaf(name: str, weight: int) -> Node:
    return Node(name=name, weight=Fraction(weight))


PAPER = group(
    "",
    Fraction(1),
    [
        group(
            "text",
            Fraction(80),
            [
                leaf("web", 9000),
                leaf("german", 518),
                group("small", Fraction(1019), [leaf("papers", 3), leaf("grades", 1)]),
            ],
        ),
        leaf("code", 20),
    ],
)


def test_a_child_has_its_part_of_what_its_group_has() -> None:
    assert stream_shares(PAPER) == {
        "web": Fraction(8, 10) * Fraction(9000, 10537),
        "german": Fraction(8, 10) * Fraction(518, 10537),
        "papers": Fraction(8, 10) * Fraction(1019, 10537) * Fraction(3, 4),
        "grades": Fraction(8, 10) * Fraction(1019, 10537) / 4,
        "code": Fraction(1, 5),
    }
    assert streams_of(PAPER) == ["code", "german", "grades", "papers", "web"]
    assert [path for path, _ in walk(PAPER)][:3] == ["code", "text", "text.german"]


def test_what_a_child_leaves_goes_to_its_siblings_and_what_a_group_leaves_to_those_of_the_group() -> None:
    shares = stream_shares(PAPER, gone={"papers"})
    assert shares["grades"] == Fraction(8, 10) * Fraction(1019, 10537) and shares["code"] == Fraction(1, 5)
    shares = stream_shares(PAPER, gone={"papers", "grades"})
    assert shares["web"] == Fraction(8, 10) * Fraction(9000, 9518) and shares["papers"] == shares["grades"] == 0
    assert shares["code"] == Fraction(1, 5), "nothing outside of the group moves"
    assert stream_shares(PAPER, gone={"web", "german", "papers", "grades"})["code"] == 1
    assert not any(stream_shares(PAPER, gone=streams_of(PAPER)).values())


def test_a_change_sets_the_named_and_keeps_the_ratios_of_the_others() -> None:
    before, after = stream_shares(PAPER), stream_shares(with_shares(PAPER, {"text.german": Fraction(1, 5)}))
    assert after["german"] == Fraction(8, 10) / 5 and after["code"] == before["code"]
    assert after["web"] / after["papers"] == before["web"] / before["papers"]
    assert sum(after.values()) == 1
    both = stream_shares(with_shares(PAPER, {"text": Fraction(6, 10), "code": Fraction(4, 10)}))
    assert both["code"] == Fraction(2, 5) and both["web"] / both["german"] == before["web"] / before["german"]
    deep = with_shares(PAPER, {"text.small.grades": Fraction(0), "code": Fraction(1, 2)})
    assert stream_shares(deep)["grades"] == 0 and stream_shares(deep)["code"] == Fraction(1, 2)
    assert stream_shares(with_shares(deep, {"text.small.grades": Fraction(1, 4)}))["grades"] > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text.germn": Fraction(1, 5)}, "no 'text.germn' .did you mean 'text.german'"),
        ({"german": Fraction(1, 5)}, "no 'german'"),
        ({"text.german": Fraction(1, 2), "text.web": Fraction(2, 3)}, "group 'text' sum to 1.16667"),
        ({"text": Fraction(1, 2), "code": Fraction(1, 3)}, "the mixture leave 0.166667, and nothing else there"),
    ],
)
def test_a_change_that_does_not_fit_is_named(changes: dict[str, Fraction], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        with_shares(PAPER, changes)


def random_tree(rng: random.Random, name: str, depth: int, names: list[str]) -> Node:
    weight = Fraction(rng.randint(1, 1000), rng.randint(1, 10))
    if depth == 0 or rng.random() < 0.3:
        names.append(f"s{len(names)}")
        return Node(name=names[-1], weight=weight)
    return group(name, weight, [random_tree(rng, f"g{depth}{i}", depth - 1, names) for i in range(rng.randint(1, 4))])


@pytest.mark.parametrize("seed", range(40))
def test_shares_sum_to_one_whatever_has_run_out(seed: int) -> None:
    rng = random.Random(seed)
    names: list[str] = []
    root = group("", Fraction(1), [random_tree(rng, f"g{i}", 3, names) for i in range(3)])
    gone: set[str] = set()
    before = stream_shares(root)
    for name in rng.sample(names, len(names)):
        assert sum(before.values()) == 1
        gone.add(name)
        after = stream_shares(root, gone)
        assert all(after[other] >= before[other] for other in names if other not in gone)
        assert not any(after[other] for other in gone)
        before = after
    assert not any(before.values())
