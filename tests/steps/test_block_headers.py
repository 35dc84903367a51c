"""Headers of a block on their way to another process: each with its own state, read when somebody asks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import asdict, replace

from tests.support.mixtures import SHARES, SIZES, make_planner, plan_steps
from tests.support.recipes import make_recipe
from torchmix.parallel.place_tree import Layout
from torchmix.steps import header as headers
from torchmix.steps.header import decode_headers, encode_headers, header_of
from torchmix.steps.state import StateToAsk, encode_state, state_of_cursor


def some_headers(count: int) -> list[headers.StepHeader]:
    planner = make_planner(make_recipe(SHARES), SIZES)
    plans, cursors = plan_steps(planner, count)
    return [
        header_of(
            plan,
            StateToAsk.of(state_of_cursor(cursor, planner, recipe="0" * 16, catalog="1" * 16)),
            recipe="0" * 16,
            layout=Layout(),
            first_microbatch=int(plan.step == 0),
            plan_s=plan.step / 8,
            read_s=0.5,
            build_s=0.25,
            reading={"bytes_read": plan.step},
            bad_tokens={"a": plan.step} if plan.step else None,
        )
        for plan, cursor in zip(plans, cursors[1:], strict=True)
    ]


@pytest.mark.parametrize("count", [1, 5])
def test_each_header_comes_with_the_state_of_its_step(count: int) -> None:
    sent = some_headers(count)
    found = decode_headers(encode_headers(sent))
    assert [encode_state(one.after.state) for one in found] == [encode_state(one.after.state) for one in sent]
    assert len({encode_state(one.after.state) for one in found}) == count
    for one, other in zip(found, sent, strict=True):
        without = {name: value for name, value in asdict(other).items() if name != "after"}
        assert {name: value for name, value in asdict(one).items() if name != "after"} == without


def test_no_state_is_decoded_before_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode_headers(some_headers(4))
    decoded: list[int] = []
    decode = headers.decode_cursor

    def noted(place: bytes) -> object:
        decoded.append(len(place))
        return decode(place)

    monkeypatch.setattr(headers, "decode_cursor", noted)
    found = decode_headers(data)
    assert [one.step for one in found] == [0, 1, 2, 3] and not decoded
    assert found[2].after.state.step == 3
    assert len(decoded) == 1


def test_headers_are_encoded_once_for_all_who_get_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, encoded = some_headers(4), list[int]()
    encode = headers.encode_headers

    def noted(some: Sequence[headers.StepHeader]) -> bytes:
        encoded.append(len(some))
        return encode(some)

    monkeypatch.setattr(headers, "encode_headers", noted)
    shared = headers.HeadersToSend(sent)
    assert shared.are(list(sent)) and not shared.are(sent[:3])
    assert not shared.are([*sent[:2], replace(sent[2], bad_tokens={"b": 7}), sent[3]])
    assert shared.data() == shared.data() == encode(sent)
    assert [one.step for one in decode_headers(shared.data(2))] == [2, 3]
    assert encoded == [4, 2]
