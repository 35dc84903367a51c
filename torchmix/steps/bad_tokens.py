"""Tokens that could not be read: how many a run may have, and whether it has more.

All leaders come to the same, at the same step, and so does a run that was resumed however often: what was read in vain
so far is in the state.

The bound of a source is `max_bad` of its used tokens, times the epochs that streams over it have begun.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from fractions import Fraction

import msgspec
import numpy as np

from torchmix.catalog.store import Catalog
from torchmix.errors import TooManyBadRows
from torchmix.parallel.agreement import Masked
from torchmix.planner.cursor import Cursor
from torchmix.recipe.parts import Part
from torchmix.recipe.sources import masks_bad_rows, max_bad_of, rows_of
from torchmix.steps.header import StepHeader
from torchmix.steps.state import StateToAsk

logger = logging.getLogger(__name__)


class BadTokenBounds:
    """How many tokens of each source a run may read in vain."""

    def __init__(self, part: Part, catalog: Catalog) -> None:
        self._of_epoch: dict[str, Fraction] = {}
        self._sources = [part.streams[name].sources for name in sorted(part.streams)]
        for name, source in part.sources.items():
            if masks_bad_rows(source):
                start, stop = rows_of(source, catalog.sources[name].num_documents)
                tokens = catalog.sources[name].sizes.tokens[start:stop].sum(dtype=np.int64)
                self._of_epoch[name] = max_bad_of(source) * int(tokens)

    def at(self, cursor: Cursor) -> dict[str, int]:
        """The bound up to a cursor, for each source that masks bad rows."""
        epochs = dict.fromkeys(self._of_epoch, 0)
        if not epochs:
            return epochs
        for sources, epoch in zip(self._sources, cursor.position.epoch.tolist(), strict=True):
            for source in sources:
                if source in epochs:
                    epochs[source] += epoch + 1
        return {name: int(self._of_epoch[name] * count) for name, count in epochs.items()}


def masked_of(header: StepHeader, num_masked_tokens: int) -> Masked:
    """The tokens of one replica's part of a step that its reader masked."""
    if not header.bad_tokens:
        return Masked(num_tokens=num_masked_tokens)
    counts = np.array([header.bad_tokens.get(name, 0) for name in header.sources()], np.int64)
    return Masked(num_tokens=num_masked_tokens, bad_tokens=counts)


class BadTokens:
    """What a run has read in vain so far; leaders keep it, each for all."""

    def __init__(self, so_far: Mapping[str, int]) -> None:
        """`so_far`: tokens of sources, from the state that the run resumes from."""
        self._so_far = dict(so_far)

    @property
    def is_empty(self) -> bool:
        """Whether all could be read so far."""
        return not self._so_far

    def settle(self, header: StepHeader, masked: Masked) -> StepHeader:
        """Count what was masked of a step, and judge it.

        Args:
            header: The header of the step, as this leader's reader made it.
            masked: What the leaders of all replicas have masked.

        Returns:
            The header that all ranks get: `header` itself if nothing is masked.

        Raises:
            TooManyBadRows: More tokens of a source could not be read than `max_bad` allows.
        """
        if masked.bad_tokens is not None:
            for name, tokens in zip(header.sources(), masked.bad_tokens.tolist(), strict=True):
                if tokens:
                    self._so_far[name] = self._so_far.get(name, 0) + tokens
        if not self._so_far and not masked.num_tokens:
            return header
        for name, tokens in self._so_far.items():
            most = header.most_bad_tokens.get(name)
            if most is not None and tokens > most:
                raise TooManyBadRows(
                    f"source {name!r}: up to step {header.step} pages with {tokens} of its tokens could not be read, "
                    f"max_bad allows {most}. Restore the files that the leaders' warnings name, or raise max_bad, and "
                    "resume from the last checkpoint"
                )
        so_far = dict(self._so_far)
        return msgspec.structs.replace(
            header,
            after=StateToAsk(lambda: msgspec.structs.replace(header.after.state, bad_tokens=so_far)),
            bad_tokens=so_far,
            num_masked_tokens=masked.num_tokens,
        )
