"""The order of a source: what counts of it, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.support.mixtures import make_planner
from tests.support.recipes import make_recipe
from tests.support.sizes import synthetic_sizes
from torchmix.catalog.sizes import SourceSizes
from torchmix.errors import DocumentTooLong, PlanError
from torchmix.planner.stream_order import check_rows_of_part, order_of_stream, space_of_stream
from torchmix.recipe.load import check_recipe
from torchmix.recipe.parts import part_of
from torchmix.recipe.structs import Evaluation, Recipe

LENGTH = 64


def sizes_of(*tokens: int) -> SourceSizes:
    return SourceSizes(first_row_of_page=np.array([0, len(tokens)]), tokens=np.array(tokens, np.int32), window_pages=1)


def recipe_of(overflow: str, documents: tuple[str, str] | None) -> Recipe:
    source: dict[str, Any] = {} if documents is None else {"documents": documents}
    return make_recipe({"web": "100%"}, length=LENGTH, packing={"overflow": overflow}, sources={"web": source})


def counted(overflow: str, documents: tuple[str, str] | None, sizes: SourceSizes) -> dict[int, int]:
    window = order_of_stream(part_of(recipe_of(overflow, documents), "train"), "web", {"web": sizes}).window(0, 0)
    return dict(sorted(zip(window.rows.tolist(), np.diff(window.ends).tolist(), strict=True)))


@pytest.mark.parametrize(
    ("overflow", "expected"),
    [("split", [10, 100, 64, 65]), ("truncate", [10, 64, 64, 64]), ("drop", [10, 0, 64, 0])],
)
def test_what_counts_of_documents_that_are_used(overflow: str, expected: list[int]) -> None:
    sizes = sizes_of(10, 100, 64, 65)
    assert list(counted(overflow, None, sizes).values()) == expected
    assert list(counted(overflow, ("0%", "75%"), sizes).values()) == [*expected[:3], 0]
    assert list(counted(overflow, ("25%", "75%"), sizes).values()) == [0, *expected[1:3], 0]


def test_a_source_has_a_rule_of_its_own() -> None:
    sizes = sizes_of(10, 100, 64, 20)
    for own, expected in (
        ({"overflow": "truncate", "max_length": 16}, [10, 16, 16, 16]),
        ({"overflow": "drop", "max_length": 20}, [10, 0, 0, 20]),
        ({"overflow": "drop"}, [10, 0, 64, 20]),
    ):
        recipe = make_recipe({"a": "50%", "b": "50%"}, length=LENGTH, sources={"a": {"packing": own}})
        part = part_of(recipe, "train")
        counts = {}
        for name in ("a", "b"):
            window = order_of_stream(part, name, {"a": sizes, "b": sizes}).window(0, 0)
            counts[name] = [tokens for _, tokens in sorted(zip(window.rows, np.diff(window.ends), strict=True))]
        assert counts == {"a": expected, "b": [10, 100, 64, 20]}
    told = {"packing": {"overflow": "error", "max_length": 32}}
    part = part_of(make_recipe({"a": "100%"}, length=LENGTH, sources={"a": told}), "train")
    with pytest.raises(DocumentTooLong, match=r"row 1 has 100 tokens, its packing.max_length is 32"):
        order_of_stream(part, "a", {"a": sizes})


def test_only_used_documents_can_be_too_long() -> None:
    sizes = sizes_of(1, 2, 3, 70)
    assert sum(counted("error", ("0%", "75%"), sizes).values()) == 6
    with pytest.raises(DocumentTooLong, match="row 3 has 70 tokens"):
        order_of_stream(part_of(recipe_of("error", ("50%", "100%")), "train"), "web", {"web": sizes})


@pytest.mark.parametrize(
    ("overflow", "tokens", "reason"),
    [
        ("split", (5, 5, 0, 0), "all documents of its rows 2 to 4 are empty"),
        ("drop", (5, 5, 0, 70), "drops all of its rows 2 to 4 beyond 64 tokens"),
        ("drop", (5, 70, 0, 0), "all documents of its rows 2 to 4 are empty"),
    ],
)
def test_used_rows_without_tokens_are_refused(overflow: str, tokens: tuple[int, ...], reason: str) -> None:
    with pytest.raises(PlanError, match=f"source 'web' would give no tokens: .*{reason}.*rows that are used"):
        order_of_stream(part_of(recipe_of(overflow, ("50%", "100%")), "train"), "web", {"web": sizes_of(*tokens)})


def test_a_part_that_rounds_to_no_row_is_refused() -> None:
    with pytest.raises(PlanError, match=r"none of its 3 rows lies in the part that is used \(rows 3 to 3\)"):
        order_of_stream(part_of(recipe_of("split", ("99%", "99.9%")), "train"), "web", {"web": sizes_of(1, 2, 3)})


def test_sources_without_a_row_in_a_part_are_named_with_it_and_what_to_do() -> None:
    whole = replace(make_recipe({"web": "50%", "a": "30%", "b": "20%"}), split=(969, 30, 1))
    rows = {"web": 10_000, "a": 400, "b": 7}
    check_rows_of_part(whole, "train", rows)
    with pytest.raises(PlanError) as error:
        check_rows_of_part(whole, "validation", rows)
    assert str(error.value).startswith(
        "validation: none of the 7 rows of source 'b' lies in its 96.9% to 99.9%. To mend it, give validation a larger "
        "weight in `split`; or replace `split` with `documents` for the sources of each part"
    )
    with pytest.raises(PlanError, match=r"^test: none of the 400 rows of source 'a' .*; none of the 7 rows of source"):
        check_rows_of_part(whole, "test", rows)
    own = Evaluation(sources={"b": replace(whole.sources["b"], documents=("99%", "100%"))}, mixture={"b": "100%"})
    with pytest.raises(PlanError, match=r"^test: none of the 7 rows .* 99% to 100%\. To mend it, widen `documents`"):
        check_rows_of_part(replace(whole, split=None, test=own), "test", {"b": 7})


def test_a_recipe_with_a_split_is_planned_as_its_training_part() -> None:
    sizes = {"web": synthetic_sizes(300, shortest=5, longest=60)}
    whole = replace(make_recipe({"web": "100%"}), split=(7, 3))
    for recipe in (whole, part_of(whole, "train")):
        plan, _ = make_planner(recipe, sizes).step(make_planner(recipe, sizes).start())
        assert plan.pieces.row.max() < 210
        assert plan.order_digest == make_planner(whole, sizes).step(make_planner(whole, sizes).start())[0].order_digest


@pytest.mark.parametrize(("other", "wanted"), [("a.tar", 3 * 64), ("a.parquet", 3)])
def test_a_window_of_a_flat_counts_shards_as_a_window_of_a_source_does(other: str, wanted: int) -> None:
    part = part_of(
        check_recipe(
            {
                "version": 1,
                "seed": 1,
                "batch": {"samples": 4, "length": LENGTH},
                "sources": {name: {"path": other, "text": "txt", "tokenizer": "bytes"} for name in "ab"},
                "mixture": {"all": {"flat": ["a", "b"], "share": "100%"}},
                "shuffle": {"window_pages": 3},
            }
        ),
        "train",
    )
    count = 3 * 64 * 5
    sizes = SourceSizes(first_row_of_page=np.arange(count + 1), tokens=np.full(count, 9, np.int32), window_pages=1)
    assert space_of_stream(part, "all", {"a": sizes, "b": sizes}, {}).window_units == wanted
