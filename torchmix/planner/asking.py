"""How many tokens a draw asks for, so that the drawn pieces fill the batch after alignment.

In: the missing aligned tokens, and what earlier draws gave. Out: tokens to ask for. Must hold: pure, in integers;
alignment adds at most a quarter of a batch to what a draw gives beyond the missing tokens, unless asking less would
give nothing. Cost: none.

Short documents with a large alignment take up many times their tokens. The ratio over all earlier draws predicts this
factor. Where lengths change the prediction fails; then the draw is discarded and repeated with fewer tokens.
"""

from __future__ import annotations

import msgspec

MOST_ALIGNED = 1 << 40
"""Totals above this are halved, so they stay small and the ratio follows recent draws."""


class DrawnTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of all draws so far."""

    raw: int = 1
    """Tokens without alignment; where shares count documents, what these cost."""
    aligned: int = 1
    """Tokens with each piece rounded up to the alignment."""

    def to_ask(self, need_tokens: int) -> int:
        """Tokens to ask for, 1 or more, when `need_tokens` aligned tokens are missing."""
        return max(1, -(-need_tokens * self.raw // self.aligned))

    def plus(self, raw_tokens: int, aligned_tokens: int) -> DrawnTokens:
        """The totals after a draw."""
        raw, aligned = self.raw + raw_tokens, self.aligned + aligned_tokens
        while aligned > MOST_ALIGNED:
            raw, aligned = raw // 2, aligned // 2
        return DrawnTokens(raw=raw, aligned=aligned)


def ask_less(
    asked_tokens: int, *, need_tokens: int, raw_tokens: int, aligned_tokens: int, capacity_tokens: int
) -> int | None:
    """Tokens to ask for when a draw is repeated from the same position; None if the draw counts.

    Args:
        asked_tokens: Tokens that the draw asked for.
        need_tokens: Aligned tokens that were missing.
        raw_tokens, aligned_tokens: Tokens that the draw gave, before and after alignment.
        capacity_tokens: Capacity of the step's batch.
    """
    if aligned_tokens - max(raw_tokens, need_tokens) <= capacity_tokens // 4:
        return None
    less = need_tokens * raw_tokens // aligned_tokens
    return less if 1 <= less < asked_tokens else None
