"""Changes of the shares that begin at an epoch of a stream: when they begin, what they overtake, and after a resume."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import msgspec
import pytest

from tests.support.book_shares import still_begun
from tests.support.mixtures import SIZES, forecast_of, make_planner, plan_steps
from tests.support.recipes import make_recipe
from torchmix.errors import RecipeError, StateError
from torchmix.mixture.shares import BegunStage, StagePlaces
from torchmix.planner.cursor import Cursor, Decision
from torchmix.planner.forecast import StageForecast
from torchmix.planner.planner import Planner
from torchmix.recipe.changes import Stage
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.load import check_recipe
from torchmix.recipe.parts import part_of
from torchmix.recipe.ramp import tokens_before
from torchmix.recipe.structs import Batch, EpochPlace, Recipe
from torchmix.recipe.tree import Node
from torchmix.steps.history import cursor_of_state
from torchmix.steps.state import LoaderState, state_of_cursor

LENGTH = 256
SHARES = {"books": "20%", "code": "29%", "gaps": "20%", "one": "1%", "tiny": "1%", "web": "29%"}
AT_EPOCH = {"from": {"epochs": 1, "of": "gaps"}, "set": {"gaps": "1%"}}


def scheduled(*changes: dict[str, Any], **choices: Any) -> Recipe:
    recipe = make_recipe(SHARES, samples=8, length=LENGTH, packing={"align_tokens": 1})
    return check_recipe({**msgspec.to_builtins(recipe), "schedule": list(changes), **choices})


def shares_by_step(planner: Planner, cursors: list[Cursor], name: str) -> list[float]:
    """Share of a stream in each step, from the decisions of the cursor after it."""
    s = planner.streams.index(name)
    return [float(planner.shares(after.decisions, step=after.step - 1)[s]) / 2**32 for after in cursors[1:]]


def first_step_after_epoch(cursors: list[Cursor], planner: Planner, name: str, epochs: int = 1) -> int:
    s = planner.streams.index(name)
    return next(cursor.step for cursor in cursors if int(cursor.position.epoch[s]) >= epochs)


def test_a_change_begins_with_the_step_after_the_epoch_and_a_ramp_counts_from_there() -> None:
    plain = make_planner(scheduled(), SIZES)
    plain_plans, plain_cursors = plan_steps(plain, 60)
    begins = first_step_after_epoch(plain_cursors, plain, "gaps")
    assert 2 < begins < 40
    before = plain.shares((), step=0)[plain.streams.index("gaps")] / 2**32
    for more, ramp in (({}, 0), ({"to": "10 steps"}, 10), ({"to": f"{5 * 8 * LENGTH} tokens"}, 5)):
        planner = make_planner(scheduled({**AT_EPOCH, **more}), SIZES)
        plans, cursors = plan_steps(planner, 60)
        same = [one.order_digest == other.order_digest for one, other in zip(plans, plain_plans, strict=True)]
        assert all(same[:begins]) and not same[begins + 1], "nothing differs before"
        shares = shares_by_step(planner, cursors, "gaps")
        line = [before + (0.01 - before) * min(1, (k + 0.5) / ramp) if ramp else 0.01 for k in range(60 - begins)]
        assert shares == pytest.approx([before] * begins + line, abs=1e-8)
        assert cursors[-1].decisions == (Decision(step=begins, kind="stage", name="gaps", epochs=1),)
        for at in (begins, begins + 1, begins + 4):
            again, _ = plan_steps(make_planner(scheduled({**AT_EPOCH, **more}), SIZES), 60 - at, cursors[at])
            assert [plan.order_digest for plan in again] == [plan.order_digest for plan in plans[at:]]


def test_epochs_of_one_stream_follow_each_other_and_a_later_place_overtakes() -> None:
    second = {"from": {"epochs": 2, "of": "gaps"}, "set": {"gaps": "30%"}}
    planner = make_planner(scheduled({**AT_EPOCH, "set": {"gaps": "25%"}}, second), SIZES)
    _, cursors = plan_steps(planner, 60)
    one, two = (first_step_after_epoch(cursors, planner, "gaps", epochs) for epochs in (1, 2))
    shares = shares_by_step(planner, cursors, "gaps")
    assert shares[one] == pytest.approx(0.25) and shares[two] == pytest.approx(0.3) and one < two < 60
    early = {"from": "2 steps", "set": {"code": "40%"}}
    planner = make_planner(scheduled(AT_EPOCH, early), SIZES)
    _, cursors = plan_steps(planner, 60)
    assert not cursors[-1].decisions, "the change at the epoch was overtaken"
    shares = shares_by_step(planner, cursors, "gaps")
    code = 0.29 * 0.99 / 0.8
    assert shares[-1] == pytest.approx(0.01 * 0.6 / (1 - code), abs=1e-8), (
        "its shares follow from those of the change before it"
    )


def test_a_place_inside_of_a_ramp_waits_for_its_end() -> None:
    ramp = {**AT_EPOCH, "to": "20 steps"}
    plain = make_planner(scheduled(), SIZES)
    begins = first_step_after_epoch(plan_steps(plain, 40)[1], plain, "gaps")
    later = {"from": f"{begins + 10} steps", "set": {"gaps": "50%"}}
    planner = make_planner(scheduled(ramp, later), SIZES)
    _, cursors = plan_steps(planner, begins + 30)
    shares = shares_by_step(planner, cursors, "gaps")
    assert shares[begins + 19] < 0.05 and shares[begins + 20] == pytest.approx(0.5)


def test_a_forecast_knows_the_step_and_estimates_it_beyond_what_it_plans() -> None:
    part = part_of(scheduled({**AT_EPOCH, "to": "10 steps"}), "train")
    exact = forecast_of(part, SIZES, 60)
    planner = make_planner(scheduled(AT_EPOCH), SIZES)
    begins = first_step_after_epoch(plan_steps(planner, 60)[1], planner, "gaps")
    assert exact.stages == (StageForecast(start=begins, stop=begins + 10),)
    guessed = forecast_of(part, SIZES, 60, simulated_steps=2)
    assert guessed.stages[0] is not None and abs(guessed.stages[0].start - begins) <= 3
    by_name = {one.name: one for one in guessed.sources}
    for one in exact.sources:
        assert by_name[one.name].share == pytest.approx(one.share, abs=0.01), one.name
    assert forecast_of(part, SIZES, 1).stages == (None,)


def test_an_edited_schedule_has_the_begun_changes_that_the_book_says() -> None:
    draw, batch, tree = random.Random(1), Batch(samples=2, length=4), Node(name="", weight=Fraction(1))
    num_kept = 0
    for _ in range(300):
        schedule: list[dict[str, Any]] = []
        at = 0
        for _ in range(draw.randint(0, 5)):
            at += draw.randint(0, 4)
            place = {"epochs": draw.randint(1, 2), "of": draw.choice("ab")}
            schedule.append({"from": f"{at} steps" if draw.random() < 0.4 else place})
        stages = []
        for change in schedule:
            place = change["from"]
            if isinstance(place, str):
                token = tokens_before(batch, int(place.split()[0]))
                stages.append(Stage(start_token=token, stop_token=token, tree=tree))
            else:
                stages.append(Stage(start_token=0, stop_token=0, tree=tree, epoch=EpochPlace(**place)))
        steps = sorted(draw.randint(0, 12) for _ in range(draw.randint(0, 4)))
        begun = tuple(BegunStage(draw.choice("ab"), draw.randint(1, 2), step) for step in steps)
        places = StagePlaces(stages, batch)
        kept = [(step, of, epochs) for of, epochs, step in places.still_begun(begun)]
        assert kept == still_begun(schedule, [(step, of, epochs) for of, epochs, step in begun]), (schedule, begun)
        assert len(places.steps_of(places.still_begun(begun))) == len(kept)
        num_kept += len(kept)
    assert num_kept > 50


def with_decisions(state: LoaderState, decisions: tuple[Decision, ...]) -> LoaderState:
    return msgspec.structs.replace(state, at=msgspec.structs.replace(state.at, decisions=decisions))


def test_a_state_keeps_what_has_begun_and_refuses_what_has_not() -> None:
    recipe = scheduled(AT_EPOCH)
    planner = make_planner(recipe, SIZES)
    plans, cursors = plan_steps(planner, 40)
    at = first_step_after_epoch(cursors, planner, "gaps") + 3
    state = state_of_cursor(cursors[at], planner, recipe="r", catalog="")
    back = cursor_of_state(state, planner, catalog="")
    assert back is not None
    again, _ = plan_steps(planner, 40 - at, back)
    assert [plan.order_digest for plan in again] == [plan.order_digest for plan in plans[at:]]
    with pytest.raises(StateError, match="no such changes"):
        cursor_of_state(state, make_planner(scheduled(), SIZES), catalog="")
    early = state_of_cursor(cursors[2], planner, recipe="r", catalog="")
    forged = with_decisions(early, state.at.decisions)
    with pytest.raises(StateError, match="in step"):
        cursor_of_state(forged, planner, catalog="")
    first = msgspec.structs.replace(state.at.decisions[0], step=1)
    with pytest.raises(StateError, match="at which schedule"):
        cursor_of_state(with_decisions(early, (first,)), planner, catalog="")


def test_the_fingerprint_covers_the_epoch_and_the_ramp() -> None:
    def fingerprint(**choices: Any) -> str:
        return recipe_fingerprint(scheduled({**AT_EPOCH, **choices}))

    prints = [
        fingerprint(),
        fingerprint(to="5 steps"),
        fingerprint(to="5 tokens"),
        fingerprint(**{"from": {"epochs": 2, "of": "gaps"}}),
        fingerprint(**{"from": {"epochs": 1, "of": "code"}}),
    ]
    assert len(set(prints)) == len(prints)


@pytest.mark.parametrize(
    ("change", "choices", "where", "words"),
    [
        ({"from": {"epochs": 1, "of": "gap"}}, {}, "schedule[0].from.of", "did you mean 'gaps'"),
        ({"from": {"epochs": 0, "of": "gaps"}}, {}, "schedule[0].from.epochs", "at least 1"),
        ({"from": {"epochs": 1}}, {}, "schedule[0].from.of", "required"),
        ({"to": {"epochs": 2, "of": "gaps"}}, {}, "schedule[0].to", "no epoch, since where it ends would follow"),
        ({"to": "soon"}, {}, "schedule[0].to", "no place"),
        ({}, {"dynamic": {"policy": "odm"}}, "schedule[0].from", "with `dynamic`"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], choices: dict[str, Any], where: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words) as caught:
        scheduled({**AT_EPOCH, **change}, **choices)
    assert caught.value.where == where


def test_an_epoch_beyond_max_epochs_never_ends() -> None:
    plain = msgspec.to_builtins(scheduled())
    plain["sources"]["gaps"]["max_epochs"] = 1
    check_recipe({**plain, "schedule": [AT_EPOCH]})
    with pytest.raises(RecipeError, match="its epoch 2 never ends"):
        check_recipe({**plain, "schedule": [{**AT_EPOCH, "from": {"epochs": 2, "of": "gaps"}}]})
