"""What is refused or said of a source's files before they are published.

In: the parts of all files of a source. Out: nothing, a warning, or an error. Must hold: a source without tokens, or
with more bad rows than its recipe allows, is not published. Cost: one pass over the parts, and over lengths up to the
first token.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torchmix.catalog.bad_rows import check_bad_rows, listed_text
from torchmix.catalog.parts import FilePart
from torchmix.catalog.settings import SourceSettings
from torchmix.errors import SourceUnreadable

logger = logging.getLogger(__name__)

SHOWN_ROWS = 3
"""Bad rows of a source that a message names."""


def check_parts(
    name: str, settings: SourceSettings, files: Sequence[tuple[str, FilePart]], *, may_be_empty: bool = False
) -> None:
    """Check a source's files; `files` are its paths with their parts.

    Raises:
        TooManyBadRows: More rows could not be read than `max_bad` allows.
        SourceUnreadable: No document has tokens.
    """
    num_rows = sum(len(part.tokens) for _, part in files)
    check_bad_rows(
        name, files, num_rows=num_rows, is_masked=settings.masks_bad_rows, max_bad=settings.max_bad, is_fresh=True
    )
    if num_bad := sum(part.num_bad_rows for _, part in files):
        listed = listed_text(files, SHOWN_ROWS)
        logger.warning("source %r: %d of %d rows cannot be read: %s", name, num_bad, num_rows, listed)
    if not may_be_empty and not any(part.tokens.any() for _, part in files):
        what = f"{num_rows} documents, all without tokens" if num_rows else "no documents"
        column = f"column {settings.column!r} of " if settings.column is not None else ""
        raise SourceUnreadable(
            f"source {name!r}: {column}{', '.join(settings.patterns)} holds {what}; remove the source, or name another "
            "file or column"
        )
