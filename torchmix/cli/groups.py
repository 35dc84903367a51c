"""Groups of a mixture -> rows of a table: what the sources of each have together.

In: a recipe, and figures of its sources. Out: a row for each group, by its path. Must hold: a group's figures are the
sums over its sources. Cost: none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchmix.cli.terminal import count_text, percent_text, print_table
from torchmix.recipe.mixture.shares_of_part import tree_of_part
from torchmix.recipe.mixture.tree import streams_of, walk
from torchmix.recipe.parts import Part

COLUMNS = {
    "group": "a group of the mixture, by the names on its path",
    "share": "the share of all tokens that its sources have together",
    "given": "their share of the tokens that are given",
    "tokens": "tokens that they give",
    "sources": "how many there are",
}


def group_values(part: Part, shares: Mapping[str, float], delivered: Mapping[str, int]) -> list[dict[str, Any]]:
    """Share and tokens of each group of the mixture at the start.

    Args:
        part: What is planned.
        shares: Of each source.
        delivered: Tokens that each source gives.
    """
    total = max(1, sum(delivered.values()))
    values = []
    for path, node in walk(tree_of_part(part)):
        if node.children:
            names = streams_of(node)
            tokens = sum(delivered.get(name, 0) for name in names)  # a cell without rows is not among them
            share = sum(shares.get(name, 0) for name in names)
            values.append(
                {
                    "group": path,
                    "sources": names,
                    "share": share,
                    "delivered_tokens": tokens,
                    "delivered_share": tokens / total,
                }
            )
    return values


def print_groups(values: list[dict[str, Any]], *, explain: bool) -> None:
    """Print `group_values` for a person; nothing where there are none."""
    if not values:
        return
    rows = [
        (
            group["group"],
            percent_text(group["share"]),
            percent_text(group["delivered_share"]),
            count_text(group["delivered_tokens"]),
            count_text(len(group["sources"])),
        )
        for group in values
    ]
    print()
    print_table(COLUMNS, rows, explain=explain)
