"""What one replica's steps of a block are built from, and the steps once the first of them is asked for.

In: pieces of each step, and the tokens of all of them in one array. Out: the arrays of one step after the other. Must
hold: as if each had been built alone, and what cannot be built is an error in the place of its step. Cost: one `build`
for each consumer; where tokens are masked, or a page is bad, one for each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchmix.constructor.arrays import StepArrays
from torchmix.constructor.build import ReplicaPieces
from torchmix.constructor.joined_steps import cut_steps
from torchmix.errors import TorchmixError
from torchmix.reader.pieces.piece_copy import Tokens
from torchmix.steps.blocks.read_blocks import tokens_of_part

Build = Callable[[ReplicaPieces, Tokens], StepArrays]


class ReplicaBlock:
    """The steps of one replica in a block."""

    def __init__(self, steps: Sequence[ReplicaPieces], joined: ReplicaPieces, tokens: Tokens, length: int) -> None:
        """Nothing is built yet.

        Args:
            steps: The pieces of each.
            joined: From `join_pieces`.
            tokens: Of `joined`.
            length: Tokens of a sample.
        """
        self._steps, self._joined, self._tokens, self._length = steps, joined, tokens, length
        self._number_of_step = {step.step: number for number, step in enumerate(steps)}
        self._built: dict[int, list[StepArrays]] = {}

    def build(self, step: int, consumer: int, make: Build, *, is_joint: bool) -> StepArrays:
        """A step's arrays, in memory of the consumer's.

        Args:
            step: Its number.
            consumer: Whom it is for.
            make: Builds from pieces and their tokens.
            is_joint: Whether no token is masked because of its id.

        Raises:
            TorchmixError: The step cannot be built.
        """
        number = self._number_of_step[step]
        if consumer not in self._built:
            self._built[consumer] = self._all(make) if is_joint and len(self._steps) > 1 else []
        if built := self._built[consumer]:
            return built[number]
        pieces = self._steps[number]
        first = sum(len(before.row) for before in self._steps[:number])
        part = (first, first + len(pieces.row))
        begin = number * pieces.num_samples * self._length
        return make(pieces, tokens_of_part(self._tokens, part, (begin, begin + pieces.num_samples * self._length)))

    def _all(self, make: Build) -> list[StepArrays]:
        """All steps; none where they must be built one by one."""
        if self._tokens.unlabelled is not None:
            return []
        try:
            joined = make(self._joined, self._tokens)
        except TorchmixError:  # it belongs in the place of its step
            return []
        if joined.num_masked_tokens or joined.bad_tokens is not None:
            return []
        return cut_steps(joined, self._steps)
