from __future__ import annotations

from torchmix.steps.ahead import StopSignal


def test_what_is_left_is_called_once_it_is_set_before_or_after() -> None:
    stop, calls = StopSignal(), []
    stop.then(lambda: calls.append("before"))
    assert not stop.is_set() and not calls
    stop.set()
    assert stop.is_set() and calls == ["before"]
    stop.then(lambda: calls.append("after"))
    assert calls == ["before", "after"]
