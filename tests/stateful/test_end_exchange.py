"""How a leader that is closed before its data ends tells the other ranks: after a loss, never as an end of the data."""

from __future__ import annotations

from typing import cast

from torchmix.errors import RankLost
from torchmix.parallel.fan_out import FanOut
from torchmix.stateful.serve import end_exchange


class Told:
    """What the other ranks are told, in the place of an exchange."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.words: list[str] = []
        self._failure = failure

    def send_end(self) -> None:
        self.words.append("end")

    def send_failure(self, error: BaseException) -> None:
        self.words.append(str(error))
        if self._failure is not None:
            raise self._failure


def lost() -> None:
    raise RankLost("rank 3 is gone", rank=3)


def test_a_close_without_a_loss_is_an_end() -> None:
    for check in (None, lambda: None):
        told = Told()
        end_exchange(cast(FanOut, told), check)
        assert told.words == ["end"]


def test_a_close_after_a_loss_is_a_failure_that_names_it() -> None:
    told = Told()
    end_exchange(cast(FanOut, told), lost)
    assert told.words == ["rank 3 is gone"]


def test_what_the_failure_meets_is_not_raised_in_its_place() -> None:
    told = Told(RankLost("the peer is gone, too", rank=1))
    end_exchange(cast(FanOut, told), lost)
    assert told.words == ["rank 3 is gone"]
