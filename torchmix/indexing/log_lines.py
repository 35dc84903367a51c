"""What an index run says of files: how they differ from the catalog before, and what makes them costly to read.

In: changes, and parts of files. Out: one warning of each kind for a source. Must hold: a line names few files, however
many there are. Cost: none.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torchmix.catalog.parts import FilePart
from torchmix.indexing.file_changes import FileChange

logger = logging.getLogger(__name__)

SHOWN_FILES = 5
"""Files of one kind of change that a message names."""


def log_changes(name: str, changes: Sequence[FileChange]) -> None:
    """One line for each kind of change."""
    for kind in sorted({change.change for change in changes}):
        paths = [change.path for change in changes if change.change == kind]
        more = f" and {len(paths) - SHOWN_FILES} more" if len(paths) > SHOWN_FILES else ""
        logger.warning("source %r, since it was indexed: %s %s%s", name, kind, ", ".join(paths[:SHOWN_FILES]), more)


def log_costly_files(name: str, files: Sequence[tuple[str, FilePart]]) -> None:
    """One line for files whose rows are split over pages, and one for those that can only be read in large chunks."""
    for paths, what in (
        (
            [path for path, part in files if part.split_pages],
            "rows are split over pages, so pages are read on to where their last row ends; writing them again with a "
            "page index would save that",
        ),
        (
            [path for path, part in files if part.whole_chunks],
            "chunks of many rows can only be read whole; writing them again in smaller ones makes single pages "
            "readable",
        ),
    ):
        if paths:
            logger.warning("source %r: in %d of %d files, as %s, %s", name, len(paths), len(files), paths[0], what)
