"""The last warnings of a process, kept for whoever asks what it said before it was lost.

In: records of the package's loggers. Out: the last lines, oldest first. Must hold: at most `MOST_LINES` lines of
`MOST_CHARACTERS`, whatever is logged; a line may be read by another thread at any time. Cost: of a warning, its text.
"""

from __future__ import annotations

import logging
from collections import deque

MOST_LINES = 5
MOST_CHARACTERS = 300


class LastWords(logging.Handler):
    """Keeps the last warnings and errors."""

    def __init__(self) -> None:
        """Nothing has been said yet."""
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
        self._lines: deque[str] = deque(maxlen=MOST_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self._lines.append(self.format(record).strip().partition("\n")[0][:MOST_CHARACTERS])

    def lines(self) -> tuple[str, ...]:
        """The last lines, oldest first."""
        return tuple(self._lines)
