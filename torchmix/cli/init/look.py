"""A look at one file of a source: its columns, and how much of it is what one trains on.

In: a file and its format. Out: the columns that hold text or lists of integers, and the ids that a byte of the file
becomes, about. Must hold: only a footer, a schema or the first lines are read. Cost: one or two reads.
"""

from __future__ import annotations

import pyarrow as pa
from pyarrow import fs

from torchmix.errors import SourceUnreadable
from torchmix.formats.found_column import FoundColumn
from torchmix.formats.table import READ_AS, refuse_other_names
from torchmix.recipe.source.format import DEFAULT_FORMAT
from torchmix.storage.stores import is_uri, open_store


def look_at(file: str, format: str) -> list[FoundColumn]:
    """The columns of a file, in its order; of a Megatron dataset one without a name.

    Raises:
        SourceUnreadable: It cannot be opened, or is of another format.
    """
    if format == DEFAULT_FORMAT:
        refuse_other_names(file, file)
    try:
        return list(READ_AS[format].look(file))
    except (OSError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise SourceUnreadable(f"{file}: cannot be looked at as {format}: {reason}") from None


def sizes_of(files: tuple[str, ...]) -> int:
    """Bytes of files, of one store or of this machine."""
    if is_uri(files[0]):
        store = open_store(files[0])
        return sum(info.size or 0 for info in store.system.get_file_info([store.path(file) for file in files]))
    return sum(info.size for info in fs.LocalFileSystem().get_file_info(list(files)))
