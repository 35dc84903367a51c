"""open_pages: some files -> their pages, without a recipe.

In: files, a column, and a folder for the index. Out: `Pages`. Must hold: the index is built once, and is one that a
recipe with the same name, files and column can share; a fault is said in the words of this call. Cost: the first call
scans the files, later ones map the index.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from torchmix.catalog.settings import settings_of
from torchmix.errors import CatalogMissing, OptionError
from torchmix.indexing.progress_lines import ProgressLines
from torchmix.indexing.scan import update_catalog
from torchmix.indexing.scan_files import Progress
from torchmix.pages.pages import Pages
from torchmix.pages.wording import in_words_of_pages
from torchmix.recipe.byte_sizes import parse_bytes
from torchmix.recipe.checks import check_catalog_folder, check_shuffle
from torchmix.recipe.load import check_types
from torchmix.recipe.options import true_or_false
from torchmix.recipe.source_checks import check_source
from torchmix.recipe.structs import Read, Shuffle, Source

logger = logging.getLogger(__name__)


def open_pages(
    path: str | Path | Sequence[str | Path],
    *,
    catalog: str | Path,
    tokens: str | None = None,
    text: str | None = None,
    tokenizer: str = "bytes",
    begin_id: int | str | None = None,
    end_id: int | str | None = None,
    format: str | None = None,
    name: str = "pages",
    cache: str | int = "256MiB",
    window_pages: int = 256,
    window_bytes: str | int = "64MiB",
    update: bool = False,
    progress: Progress | None = None,
) -> Pages:
    """Open some files, and index them first if that was not done.

    Args:
        path: Files or globs; relative ones to the present folder. Any format that a recipe's source may have.
        catalog: Folder of the index; several `name`s may share it.
        tokens: Column of integer lists, of any integers. Exactly one of `tokens` and `text`, but with Megatron's files.
        text: Column of strings.
        tokenizer: Of `text`: `tiktoken:NAME` or the path of a tokenizer.json gives rows of ids; `bytes` gives strings.
        begin_id, end_id: What stands around each text's ids, as in a recipe.
        format: As in a recipe; None: by the files' names.
        name: Of these files in the index; also keys orders, so other names give other orders.
        cache: Decoded pages kept, as 256MiB or a number of bytes.
        window_pages, window_bytes: How far a row may travel with `method="page"`.
        update: Look for new and changed files, and index them. Rows of files that stay keep their order.
        progress: Called while indexing with bytes done, bytes in all, name and file; None: a line is logged every
            minute.

    Raises:
        OptionError: An argument is of another type than these, out of its range, or goes with no other.
        CatalogStale: The index was made with other arguments; `update=True` makes it again.
        SourceUnreadable, SourceChanged, CorruptPage: As `indexing.scan.update_catalog`.
    """
    paths = _paths(path)
    if not isinstance(catalog, str | os.PathLike):
        raise OptionError(f"open_pages: catalog={catalog!r} must be the path of a folder")
    if progress is not None and not callable(progress):
        raise OptionError(
            f"open_pages: progress={progress!r} must be called, with bytes done, bytes in all, name, file"
        )
    if not isinstance(name, str):
        raise OptionError(f"open_pages: name={name!r} must be text")
    true_or_false("open_pages", "update", update)
    with in_words_of_pages(name):
        where = f"sources.{name}"
        source = check_types(
            Source(
                path=paths,
                format=format,
                tokens=tokens,
                text=text,
                tokenizer=None if text is None else tokenizer,
                begin_id=begin_id,
                end_id=end_id,
            ),
            where,
        )
        shuffle = check_types(Shuffle(window_pages=window_pages, window_bytes=window_bytes), "shuffle")
        cache_bytes = parse_bytes(check_types(Read(cache=cache), "read").cache, where="read.cache")
        check_source(name, source, where)
        check_shuffle(shuffle)
        settings = settings_of({name: source}, shuffle)
        base = Path().absolute()
        catalog_folder = base / check_catalog_folder(os.fspath(catalog))

        def index() -> None:
            lines = ProgressLines(logger.warning, only_long=True)  # where there is no `progress` and it takes long
            update_catalog(catalog_folder, settings, base, progress=progress or lines, any_rows=True)
            lines.end()

        def opened() -> Pages:
            return Pages(name, settings[name], catalog_folder=catalog_folder, base=base, cache_bytes=cache_bytes)

        if update:
            index()
        try:
            return opened()
        except CatalogMissing:
            index()
            return opened()


def _paths(path: str | Path | Sequence[str | Path]) -> tuple[str, ...]:
    """The patterns of the files, as text."""
    paths = (path,) if isinstance(path, str | Path) else path
    if not isinstance(paths, Sequence) or not all(isinstance(one, str | os.PathLike) for one in paths):
        raise OptionError(f"open_pages: path={path!r} must be a path or a glob, or a list of them")
    return tuple(os.fspath(one) for one in paths)
