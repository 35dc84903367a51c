"""Ranks that were given different jobs are told so, with both values, and the others go on."""

from __future__ import annotations

import pytest

from torchmix.errors import RecipeError
from torchmix.parallel.agreement import agree

FACTS = {"topology": "tp 1 x dp 2", "micro_batch_size": "1"}


def ask(facts_of_rank: list[dict[str, str]]) -> list[str]:
    """What each rank is told, "" if nothing, with one store for all."""
    kept: dict[str, str] = {}
    told = []
    for rank, facts in enumerate(facts_of_rank):
        text = ""
        try:
            # One process stands for all ranks, so its count of loaders must not be in the key.
            agree(
                lambda _, value: kept.update(key=value),
                lambda _: kept["key"].encode(),
                rank=rank,
                facts=facts,
            )
        except RecipeError as error:
            text = str(error)
        told.append(text)
    return told


def test_equal_ranks_agree() -> None:
    assert ask([FACTS, dict(reversed(FACTS.items())), FACTS]) == ["", "", ""]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({**FACTS, "micro_batch_size": "2"}, "micro_batch_size 2, rank 0 1."),
        ({**FACTS, "max_steps": "7"}, "max_steps 7, rank 0 missing."),
        ({"topology": "tp 2"}, "micro_batch_size missing, rank 0 1; topology tp 2, rank 0 tp 1 x dp 2."),
    ],
)
def test_a_rank_that_differs_is_told_all_that_differs(given: dict[str, str], text: str) -> None:
    told = ask([FACTS, FACTS, given])
    assert told[:2] == ["", ""]
    assert told[2].startswith("build_loader: rank 2 was given other values than rank 0: ")
    assert text in told[2]


def test_each_loader_of_a_job_asks_under_a_key_of_its_own() -> None:
    keys: list[str] = []
    for _ in range(2):
        agree(lambda key, _: keys.append(key), lambda _: b"", rank=0, facts=FACTS)
    assert keys[0] != keys[1]
