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
from typing import Literal

from torchmix.errors import CatalogMissing, OptionError
from torchmix.indexing.progress_lines import ProgressLines
from torchmix.indexing.scan import index_recipe
from torchmix.indexing.scan_files import Progress
from torchmix.pages.pages import Pages
from torchmix.pages.wording import in_words_of_pages
from torchmix.recipe.load import check_recipe
from torchmix.recipe.options import true_or_false
from torchmix.recipe.structs import RECIPE_VERSION, Batch, Read, Recipe, Shuffle, Source

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
    format: Literal["parquet", "megatron", "jsonl", "arrow"] | None = None,
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
        CatalogStale: The index was made with other arguments; `update=True` makes it anew.
        SourceUnreadable, SourceChanged, CorruptPage: As `indexing.scan.index_sources`.
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
        source = Source(
            path=paths,
            format=format,
            tokens=tokens,
            text=text,
            tokenizer=None if text is None else tokenizer,
            begin_id=begin_id,
            end_id=end_id,
        )
        recipe = check_recipe(
            Recipe(
                version=RECIPE_VERSION,
                seed=0,
                batch=Batch(samples=1, length=8),
                sources={name: source},
                mixture={name: "100%"},
                catalog=os.fspath(catalog),
                shuffle=Shuffle(window_pages=window_pages, window_bytes=window_bytes),
                read=Read(cache=cache),
            )
        )
        directory = Path().absolute()
        if update:
            _index(recipe, directory, progress)
        try:
            return Pages(recipe, directory)
        except CatalogMissing:
            _index(recipe, directory, progress)
            return Pages(recipe, directory)


def _index(recipe: Recipe, directory: Path, progress: Progress | None) -> None:
    """Index, and log how far it is where nobody is told and it takes long."""
    lines = ProgressLines(logger.warning, only_long=True)
    index_recipe(recipe, directory, progress=progress or lines, any_rows=True)
    lines.end()


def _paths(path: str | Path | Sequence[str | Path]) -> tuple[str, ...]:
    """The patterns of the files, as text."""
    paths = (path,) if isinstance(path, str | Path) else path
    if not isinstance(paths, Sequence) or not all(isinstance(one, str | os.PathLike) for one in paths):
        raise OptionError(f"open_pages: path={path!r} must be a path or a glob, or a list of them")
    return tuple(os.fspath(one) for one in paths)
