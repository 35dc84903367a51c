"""How many tokens a draw asks for, so that they fill what is missing once they are aligned.

In: aligned tokens that are missing, and what earlier draws gave. Out: tokens to ask. Must hold: pure, in integers;
alignment adds at most a quarter of a batch to what a draw gives beyond the tokens that are missing, unless asking less
would give nothing. Cost: none.

Documents of a few tokens with a large alignment take many times their tokens. The ratio of all that was drawn foretells
how many; where lengths change it does not, and the draw is taken back and asks less.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_ALIGNED = 1 << 40
"""Totals are halved above it, so they stay small, and late draws count as much as early ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnTokens:
    """Tokens of all draws so far."""

    raw: int = 1
    """As they are."""
    aligned: int = 1
    """Rounded up to the alignment, piece by piece."""

    def to_ask(self, need_tokens: int) -> int:
        """Tokens to ask, 1 or more, where so many aligned ones are missing."""
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
    """What to ask instead of a draw, from the same position; None if the draw counts.

    Args:
        asked_tokens: What the draw was asked for.
        need_tokens: Aligned tokens that were missing.
        raw_tokens, aligned_tokens: What the draw gave.
        capacity_tokens: Of the step's batch.
    """
    if aligned_tokens - max(raw_tokens, need_tokens) <= capacity_tokens // 4:
        return None
    less = need_tokens * raw_tokens // aligned_tokens
    return less if 1 <= less < asked_tokens else None
