"""The schedule of a recipe: places in steps and tokens, the trees they lead to, and what is wrong with one."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from tests.support.recipe_text import TEXT, load_text
from torchmix.errors import RecipeError
from torchmix.recipe.changes import stages_of_part
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of
from torchmix.recipe.tree import stream_shares

RAMP = TEXT.replace("samples: 64", "samples: [{from_step: 0, samples: 64}, {from_step: 10, samples: 128}]")


def scheduled(*changes: str) -> str:
    return RAMP + "schedule:\n" + "".join(f"  - {change}\n" for change in changes)


def test_places_are_tokens_of_the_steps_before_and_shares_follow_each_other(tmp_path: Path) -> None:
    (tmp_path / "anneal.yaml").write_text("mixture: {web: 1, peps: 3}\n")
    recipe = load_text(
        tmp_path,
        scheduled(
            "{from: 5 steps, set: {web: 50%}}",
            "{from: 12 steps, to: 2.5M tokens, set: {web: 1/5}}",
            "{from: 3M tokens, file: anneal.yaml}",
            "{from: 0.01B tokens, mixture: {peps: 100%}}",
        ),
    )
    step = 64 * 1024
    stages = stages_of_part(recipe)
    places = [(stage.start_token, stage.stop_token) for stage in stages]
    assert places == [(5 * step,) * 2, (14 * step, 2_500_000), (3_000_000,) * 2, (10_000_000,) * 2]
    shares = [stream_shares(stage.tree).get("web", 0) for stage in stages]
    assert shares == [Fraction(1, 2), Fraction(1, 5), Fraction(1, 4), 0]
    assert stages_of_part(part_of(recipe, "train")) == stages


def test_a_source_may_begin_later(tmp_path: Path) -> None:
    text = scheduled("{from: 3 steps, set: {peps: 30%}}").replace("{web: 70%, peps: 30%}", "{web: 100%, peps: 0%}")
    (stage,) = stages_of_part(load_text(tmp_path, text))
    assert stream_shares(stage.tree)["peps"] == Fraction(3, 10)
    with pytest.raises(RecipeError, match=r"the mixture has no 'peps'"):
        load_text(tmp_path, text.replace(", peps: 0%", ""))
    with pytest.raises(RecipeError, match=r"share of 'peps' is never above 0"):
        load_text(tmp_path, text.replace("set: {peps: 30%}", "set: {web: 100%}"))


OVERLAP = ["{from: 5 steps, to: 9 steps, set: {web: 1%}}", "{from: 8 steps, set: {web: 2%}}"]


@pytest.mark.parametrize(
    ("changes", "where", "words"),
    [
        (
            ["{from: 5, set: {web: 50%}}"],
            "schedule[0].from",
            "expected 5000 steps, 12T tokens, or an epoch as .epochs: 2, of: NAME.; got number 5",
        ),
        (
            ["{from: 5 steps, to: {epochs: 2, of: web}, set: {web: 50%}}"],
            "schedule[0].to",
            "expected 5000 steps or 12T tokens, where the ramp ends, or nothing; no epoch, since where it ends would",
        ),
        (["{from: 5 steps, to: 9, set: {web: 50%}}"], "schedule[0].to", "ramp ends, or nothing; got number 9"),
        (["{from: 5 token s, set: {web: 50%}}"], "schedule[0].from", "write 5000 steps, or 12T tokens"),
        (["{from: 0.5 steps, set: {web: 50%}}"], "schedule[0].from", "no whole number of steps"),
        (["{from: 9999999T tokens, set: {web: 50%}}"], "schedule[0].from", "beyond 10.18"),
        (["{from: 5 steps, to: 5 steps, set: {web: 50%}}"], "schedule[0].to", "is not after 5 steps"),
        (
            ["{from: 5 steps, to: 9 steps, set: {web: 1%}}", "{from: 8 steps, set: {web: 2%}}"],
            "schedule[1].from",
            "is before",
        ),
        (
            ["{from: 5 steps, to: 9 steps, shape: cosin, set: {web: 50%}}"],
            "schedule[0].shape",
            "not one of line, cosine .did you mean 'cosine'",
        ),
        (["{from: 5 steps, shape: cosine, set: {web: 50%}}"], "schedule[0].shape", "without `to` .* remove it"),
        (["{from: 5 steps}"], "schedule[0]", "changes nothing; give one of set, mixture and file"),
        (["{from: 5 steps, set: {}}"], "schedule[0].set", "sets nothing"),
        (["{from: 5 steps, set: {web: 1%}, mixture: {web: 1, peps: 1}}"], "schedule[0]", "gives set and mixture"),
        (["{from: 5 steps, set: {webb: 50%}}"], "schedule[0].set", "no 'webb' .did you mean 'web'"),
        (["{from: 5 steps, set: {web: 70%, peps: 40%}}"], "schedule[0].set", "sum to 1.1, which is more than 1"),
        (["{from: 5 steps, set: {web: 50%, peps: 40%}}"], "schedule[0].set", "leave 0.1, and nothing else"),
        (["{from: 5 steps, set: {web: 3}}"], "schedule[0].set.web", "3 is a number; a share that is set is text"),
        (["{from: 5 steps, mixture: {wbe: 1}}"], "schedule[0].mixture.wbe", "did you mean 'web'"),
        (["{from: 5 steps, file: none.yaml}"], "schedule[0].file", "cannot read"),
        (["{from: 5 steps, sett: {web: 1%}}"], "schedule[0].sett", "did you mean 'set'"),
    ],
)
def test_what_is_wrong_is_named_by_its_place(tmp_path: Path, changes: list[str], where: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words) as caught:
        load_text(tmp_path, scheduled(*changes))
    assert caught.value.where == where and caught.value.line >= 20


def test_children_that_share_by_sizes_cannot_be_set(tmp_path: Path) -> None:
    text = scheduled("{from: 5 steps, set: {g.web: 50%}}")
    text = text.replace("{web: 70%, peps: 30%}", "{g: {share: 100%, proportional: 1, children: [web, peps]}}")
    with pytest.raises(RecipeError, match="children of 'g' share by their sizes"):
        load_text(tmp_path, text)


def test_a_schedule_is_in_the_fingerprint_by_what_it_does(tmp_path: Path) -> None:
    def fingerprint(*changes: str) -> str:
        return recipe_fingerprint(load_text(tmp_path, scheduled(*changes)))

    half = fingerprint("{from: 5 steps, set: {web: 50%}}")
    assert half == fingerprint("{from: 327680 tokens, set: {peps: 1/2}}"), "said otherwise, it is the same"
    others = [
        recipe_fingerprint(load_text(tmp_path, RAMP)),
        fingerprint("{from: 6 steps, set: {web: 50%}}"),
        fingerprint("{from: 5 steps, set: {web: 51%}}"),
        fingerprint("{from: 5 steps, to: 6 steps, set: {web: 50%}}"),
        fingerprint("{from: 5 steps, to: 6 steps, shape: cosine, set: {web: 50%}}"),
    ]
    assert len({half, *others}) == 6
    assert others[3] == fingerprint("{from: 5 steps, to: 6 steps, shape: line, set: {web: 50%}}")


def test_a_mixture_of_a_file_is_part_of_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "anneal.yaml").write_text("mixture: {web: 1, peps: 3}\n")
    recipe = load_text(tmp_path, scheduled("{from: 5 steps, file: anneal.yaml}"))
    (tmp_path / "anneal.yaml").write_text("seed: 3\n")
    assert recipe.schedule[0].mixture == {"web": 1, "peps": 3} and recipe.schedule[0].file is None
    with pytest.raises(RecipeError, match="has no `mixture`"):
        load_recipe(tmp_path / "recipe.yaml")
