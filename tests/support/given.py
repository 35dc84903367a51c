"""What a source has given up to a position, told from its windows and lengths alone."""

from __future__ import annotations

from collections.abc import Sequence

from torchmix.mixture.order import StreamOrder


def given_tokens(
    order: StreamOrder, counted: Sequence[int], length: int, at: tuple[int, int, int]
) -> dict[tuple[int, int], int]:
    """Tokens that each (epoch, row) has given where the source stands at (epoch, window, offset).

    Args:
        order: The source's order; only its rows are used.
        counted: Tokens that each row counts for.
        length: Tokens of a sample, by which documents are drawn.
        at: The position; its offset counts pieces.
    """
    given: dict[tuple[int, int], int] = {}
    for epoch in range(at[0] + 1):
        for window in range(order.num_windows if epoch < at[0] else at[1] + 1):
            left = at[2] if (epoch, window) == at[:2] else 1 << 62
            for row in order.window(epoch, window).rows.tolist():
                pieces = max(1, -(-counted[row] // length))
                if counted[row] and left > 0:
                    given[epoch, row] = counted[row] if left >= pieces else left * length
                left -= pieces
    return given
