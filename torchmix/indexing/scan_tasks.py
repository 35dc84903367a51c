"""Sources against the catalog before -> the files to scan, and those of one shard of several.

In: sources with their files. Out: a `ScanTask` for each file that is new or changed, or whose ids are wanted and not
kept. Must hold: the same sources and catalog give the same tasks and the same shards on every machine; each task is of
one shard. Cost: the end of each file of ids where ids are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torchmix.catalog.parts import part_path
from torchmix.errors import RecipeError
from torchmix.formats.kept_ids.ids_file import kept_path, read_kept, remove_stale
from torchmix.formats.kept_ids.in_place_of import identity_of
from torchmix.indexing.file_changes import WantedFile
from torchmix.indexing.scan_files import ScanTask
from torchmix.indexing.source_work import SourceWork
from torchmix.transform.maps.map_encoder import MapEncoder


class Shard(NamedTuple):
    """One of several runs that scan files together."""

    number: int
    """From 1 to `of`."""
    of: int


class ToScan(NamedTuple):
    """A file to scan."""

    source: SourceWork
    file: WantedFile
    task: ScanTask


def files_to_scan(
    folder: Path, work: Sequence[SourceWork], *, ids_only: bool, keep_tokens: bool = False
) -> list[ToScan]:
    """The files that a run must scan.

    Args:
        folder: The catalog's.
        work: Its sources.
        ids_only: Whether integers that are no token ids are an error.
        keep_tokens: Whether ids are kept of all sources whose rows are encoded; else of those whose recipe says so.

    Raises:
        RecipeError: Ids of a random map are to be kept.
    """
    found: list[ToScan] = []
    for source in work:
        keeps = _keeps_ids(source, keep_tokens=keep_tokens)
        for file in source.files:
            task = _task(folder, source, file, ids_only=ids_only, keeps_ids=keeps)
            is_new = file.entry is None or source.held is None
            if is_new or (task.kept is not None and read_kept(task.kept, _identity(source, file)) is None):
                found.append(ToScan(source, file, task))
    return found


def of_shard(files: Sequence[ToScan], shard: Shard) -> list[ToScan]:
    """The files of one shard: the largest first, each is given to the shard that has the fewest bytes."""
    num_bytes = [0] * shard.of
    mine: list[ToScan] = []
    for one in sorted(files, key=lambda one: (-one.file.found.num_bytes, one.source.name, one.file.found.path)):
        least = num_bytes.index(min(num_bytes))
        num_bytes[least] += one.file.found.num_bytes
        if least == shard.number - 1:
            mine.append(one)
    return mine


def remove_stale_ids(folder: Path, work: Sequence[SourceWork]) -> None:
    """Remove ids of files and transforms that these sources no longer have."""
    current = [path for source in work for path in _kept_paths(folder, source)]
    remove_stale(folder, current, [source.name for source in work])


def _kept_paths(folder: Path, source: SourceWork) -> Iterator[Path]:
    for file in source.files:
        yield kept_path(folder, source.name, _identity(source, file))


def _keeps_ids(source: SourceWork, *, keep_tokens: bool) -> bool:
    encoder = source.source.row_encoder
    if encoder is None or not (keep_tokens or source.settings.keeps_tokens):
        return False
    if isinstance(encoder, MapEncoder) and encoder.map.is_random:
        if not source.settings.keeps_tokens:
            return False  # all sources were meant for which it can be
        raise RecipeError(
            f"the map {encoder.map.words} is random, so a row has other ids in each epoch; remove the key",
            f"sources.{source.name}.keep",
        )
    return True


def _identity(source: SourceWork, file: WantedFile) -> tuple[int, str, str, str]:
    found = file.found
    return identity_of(found.num_bytes, found.footer_hash, source.settings.column, source.source.transform_id)


def _task(folder: Path, source: SourceWork, file: WantedFile, *, ids_only: bool, keeps_ids: bool) -> ScanTask:
    found, settings = file.found, source.settings
    identity = (found.path, found.num_bytes, found.footer_hash)
    reading = (settings.column or "", source.source.transform_id, settings.masks_bad_rows)
    return ScanTask(
        source=source.source,
        found=found,
        part=part_path(folder, source.name, identity, reading),
        column=settings.column,
        ids_only=ids_only,
        masks_bad_rows=settings.masks_bad_rows,
        kept=kept_path(folder, source.name, _identity(source, file)) if keeps_ids else None,
    )
