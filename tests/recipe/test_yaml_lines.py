"""Text to values: the line of every key path, anchors, percentages, and what YAML must not do."""

from __future__ import annotations

import pytest
import yaml

from torchmix.errors import RecipeError
from torchmix.recipe import load as yaml_lines
from torchmix.recipe.load import line_of, parse_yaml

TEXT = """\
version: 1
sources:
  web:
    path:
      - a
      - b
  no: {path: c}
"""


def test_every_key_path_has_its_line() -> None:
    plain, lines = parse_yaml(TEXT)
    assert plain == {"version": 1, "sources": {"web": {"path": ["a", "b"]}, "no": {"path": "c"}}}
    assert lines == {
        "": 1,
        "version": 1,
        "sources": 2,
        "sources.web": 3,
        "sources.web.path": 4,
        "sources.web.path[0]": 5,
        "sources.web.path[1]": 6,
        "sources.no": 7,
        "sources.no.path": 7,
    }


@pytest.mark.parametrize(
    ("where", "line"),
    [("sources.web.path[1]", 6), ("sources.web.path[1].x", 6), ("sources.web.tokens", 3), ("seed", 0)],
)
def test_a_path_that_is_not_in_the_text_has_the_line_of_what_encloses_it(where: str, line: int) -> None:
    assert line_of(where, parse_yaml(TEXT)[1]) == line


def test_a_place_without_text_has_no_line() -> None:
    assert line_of("sources.web", {}) == 0


def test_a_key_that_overrides_a_merged_one_may_not_come_twice() -> None:
    with pytest.raises(RecipeError, match="twice"):
        parse_yaml("a: &a {path: x}\nb: {<<: *a, path: y, path: z}\n")


def doubled(levels: int, opened: str, closed: str, alias: str) -> str:
    """Anchors of which each has the one before ten times."""
    lines = [f"a0: &a0 {opened}x: y{closed}" if opened == "{" else "a0: &a0 [x]"]
    for number in range(1, levels):
        lines.append(f"a{number}: &a{number} {alias.format(', '.join([f'*a{number - 1}'] * 10))}")
    return "\n".join(lines) + "\n"


@pytest.mark.slow
@pytest.mark.parametrize("alias", ["[{}]", "{{<<: [{}]}}"], ids=["lists", "merges"])
def test_aliases_that_repeat_without_bound_are_refused_at_their_line(
    alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(yaml_lines, "MOST_REPEATED", 100_000)
    opened, closed = ("[", "]") if alias == "[{}]" else ("{", "}")
    assert parse_yaml(doubled(3, opened, closed, alias))[0]["a1"] in ([["x"]] * 10, {"x": "y"})
    with pytest.raises(RecipeError, match=r"aliases repeat more than 100,000 .*fewer aliases") as found:
        parse_yaml(doubled(30, opened, closed, alias))
    assert 0 < found.value.line <= 30


def test_a_long_text_that_is_repeated_counts_by_its_length() -> None:
    text = f"a: &a {'x' * 1_000_000}\nb: [{', '.join(['*a'] * 17)}]\n"
    with pytest.raises(RecipeError, match="aliases repeat"):
        parse_yaml(text)


def test_merges_keep_the_order_and_the_winners_of_yaml() -> None:
    text = 'a: &a {x: 1, y: 1}\nb: &b {y: 2, z: 2}\nc: {<<: [*a, *b], z: 3}\nd: {<<: *b, "<<": 1}\n'
    assert parse_yaml(text)[0] == yaml.safe_load(text)
    for wrong in ("a: {<<: [1]}", "a: {<<: 1}", "a: &a {<<: *a}", "a: {<<: {x: 1, x: 2}}"):
        with pytest.raises(RecipeError):
            parse_yaml(wrong)


def test_a_second_merge_key_in_a_mapping_is_refused_at_its_line() -> None:
    with pytest.raises(RecipeError, match=r"twice, first in line 3; merge a list, <<: \[\*a, \*b\]") as found:
        parse_yaml("a: &a {x: 1}\nc:\n  <<: *a\n  <<: *a\n")
    assert (found.value.where, found.value.line) == ("c.<<", 4)


@pytest.mark.parametrize(
    "text", ["!!python/object/apply:os.system [ls]", "!!python/name:os.system", "!!set {a}", "!x {}"]
)
def test_tags_make_nothing(text: str) -> None:
    with pytest.raises(RecipeError):
        parse_yaml(f"seed: {text}")


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1900, 20_000])  # read by libyaml, and by PyYAML itself
@pytest.mark.parametrize("level", ["[]", "{a: }", "- ", "a:\n"])
def test_deep_nesting_is_an_error_and_no_crash(level: str, depth: int) -> None:
    if level == "a:\n":
        depth = min(depth, 3000)  # an indent for each level
        text = "".join(" " * i + level for i in range(depth))
    else:
        text = level.rstrip("]}") * depth + ("" if level == "- " else level[-1]) * depth
    with pytest.raises(RecipeError, match="nests too deeply"):
        parse_yaml(text)


def test_both_parsers_see_the_same_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
a: &shared {path: [x, "y z"], share: 0.5%, when: 2024-01-01, no: yes, ~: null}
b:
  <<: *shared
  text: |
    two
    lines
  folded: >-
    one
    line
c: [1, 0x1f, 1e3, 1_000, .5, '1', !!str 1]
"""
    native = parse_yaml(text)
    monkeypatch.setattr(yaml_lines, "NATIVE_LOADER", yaml.SafeLoader)
    assert parse_yaml(text) == native
