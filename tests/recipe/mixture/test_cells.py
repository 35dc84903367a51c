"""Cells in a recipe: which streams they are, and what is wrong with some."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from tests.support.recipe_text import load_text
from torchmix.errors import RecipeError
from torchmix.recipe.changes import parse_shares
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.parts import part_of
from torchmix.recipe.structs import Recipe

CELLS = "of: [web, german], shares: {lang: {en: 80%, de: 20%}, source: {web: 1, german: 3}}"


def recipe_of(folder: Path, mixture: str, *, more: str = "") -> Recipe:
    sources = "".join(f"  {name}: {{path: {name}.parquet, tokens: ids}}\n" for name in ("web", "code"))
    sources += "  papers: {path: p/*/*.parquet, tokens: ids, split_by: dir}\n"
    sources += "  german: {from: code, where: lang = 'de', max_epochs: 2}\n"
    head = "version: 1\nseed: 1\nbatch: {samples: 4, length: 64}\nsources:\n"
    return load_text(folder, f"{head}{sources}mixture: {mixture}\n{more}")


def test_each_cell_is_a_stream_over_its_source(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, f"{{talk: {{share: 60%, cells: {{{CELLS}}}}}, code: 20%, papers: 20%}}")
    streams = part_of(recipe, "train").streams
    cells = ["talk/german/de", "talk/german/en", "talk/web/de", "talk/web/en"]
    assert list(streams) == ["code", "papers", *cells]
    assert streams["talk/german/de"].sources == ("code",) and streams["talk/german/de"].max_epochs == 2
    shares = parse_shares(recipe)
    assert [shares[name] for name in cells] == [pytest.approx(float(x)) for x in (0.09, 0.36, 0.03, 0.12)]
    assert sum(shares.values()) == 1 and shares["code"] == Fraction(1, 5)


def test_children_of_a_source_have_cells_and_a_slash_in_a_value_is_no_separator(tmp_path: Path) -> None:
    cells = '{of: [papers/peps], shares: {licence: {"a/b": 1, "50%": 1}, kind: {c: 1}}}'
    recipe = recipe_of(tmp_path, f"{{talk: {{share: 1, cells: {cells}}}, code: 1, german: 1, web: 1}}")
    names = [name for name, one in part_of(recipe, "train").streams.items() if one.is_cell]
    assert names == ["talk/papers/peps/c/50%25", "talk/papers/peps/c/a%2Fb"]


def test_the_fingerprint_covers_shares_and_values_in_any_order(tmp_path: Path) -> None:
    def fingerprint(cells: str) -> str:
        mixture = f"{{talk: {{share: 1, cells: {{{cells}}}}}, code: 1, papers: 1}}"
        return recipe_fingerprint(recipe_of(tmp_path, mixture))

    first = fingerprint(CELLS)
    assert first == fingerprint("shares: {source: {german: 75%, web: 25%}, lang: {de: 1, en: 4}}, of: [german, web]")
    assert first != fingerprint(CELLS.replace("80%", "70%").replace("20%", "30%"))
    assert first != fingerprint(CELLS.replace("de:", "fr:"))
    assert first != fingerprint(CELLS.replace("lang", "language"))


@pytest.mark.parametrize(
    ("mixture", "where", "words"),
    [
        ("talk: {share: 1, cells: {of: [wbe], shares: {lang: {en: 1}}}}", "cells.of[0]", "did you mean 'web'"),
        ("talk: {share: 1, cells: {of: [], shares: {lang: {en: 1}}}}", "cells.of", "names no source"),
        ("talk: {share: 1, cells: {of: [web, web], shares: {lang: {en: 1}}}}", "cells.of[1]", "twice"),
        ("talk: {share: 1, cells: {of: [web], shares: {}}}", "cells.shares", "name a property"),
        ("talk: {share: 1, cells: {of: [web], shares: {source: {web: 1}}}}", "cells.shares", "name a property"),
        ("talk: {share: 1, cells: {of: [web], shares: {lang: {}}}}", "cells.shares.lang", "names no value"),
        ("talk: {share: 1, cells: {of: [web], shares: {lang: {en: 70%}}}}", "cells.shares.lang", "sum to 70%"),
        ("talk: {share: 1, cells: {of: [web], shares: {lang: {en: 1, de: 0}}}}", "cells.shares.lang.de", "share 0"),
        ('talk: {share: 1, cells: {of: [web], shares: {lang: {"": 1}}}}', "cells.shares.lang", "no value"),
        (
            "talk: {share: 1, cells: {of: [web, german], shares: {lang: {en: 1}, source: {web: 1}}}}",
            "cells.shares.source",
            "has web, and the cells are of german, web",
        ),
        (
            "talk: {share: 1, cells: {of: [web], shares: {lang: {en: 1}}}, children: {web: 1}}",
            "children",
            "no such key",
        ),
        ("talk: {share: 1, cells: {of: [web], shares: {lang: {en: 1}}}, max_epochs: 2}", "max_epochs", "bounds"),
        ("web: {share: 1, cells: {of: [web], shares: {lang: {en: 1}}}}", "mixture.web", "a source has that name"),
        ("talk: {cells: {of: [web], shares: {lang: {en: 1}}}}", "mixture.talk.share", "required"),
        ("talk: {share: 1, cells: {of: [web], share: {lang: {en: 1}}}}", "cells.share", "did you mean 'shares'"),
    ],
)
def test_what_is_wrong_is_named_by_its_path(tmp_path: Path, mixture: str, where: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words) as caught:
        recipe_of(tmp_path, f"{{{mixture}, code: 1, papers: 1, german: 1}}")
    assert caught.value.where.endswith(where)


def test_too_many_cells_are_refused(tmp_path: Path) -> None:
    values = "{" + ", ".join(f"v{i}: 1" for i in range(70)) + "}"
    talk = f"talk: {{share: 1, cells: {{of: [web], shares: {{a: {values}, b: {values}}}}}}}"
    with pytest.raises(RecipeError, match="4900 cells, at most 4096"):
        recipe_of(tmp_path, f"{{{talk}, code: 1, papers: 1, german: 1}}")


def test_a_schedule_sets_no_single_cell_and_no_other_cells_under_one_name(tmp_path: Path) -> None:
    mixture = f"{{talk: {{share: 60%, cells: {{{CELLS}}}}}, code: 20%, papers: 20%}}"
    with pytest.raises(RecipeError, match="share by their sizes"):
        recipe_of(tmp_path, mixture, more="schedule: [{from: 5 steps, set: {talk.talk/web/de: 50%}}]\n")
    recipe_of(tmp_path, mixture, more="schedule: [{from: 5 steps, set: {talk: 50%}}]\n")
    other = "{talk: {share: 1, cells: {of: [web], shares: {lang: {en: 1}}}}, code: 1}"
    with pytest.raises(RecipeError, match="cells of other sources or properties"):
        recipe_of(tmp_path, mixture, more=f"schedule: [{{from: 5 steps, mixture: {other}}}]\n")
