"""One shard of the files of sources -> their parts, for a later index run to publish.

In: the settings of sources, and which of several shards. Out: parts of its files in the catalog's folder. Must hold:
nothing is published or removed; shards may run at the same time, on any machines that share the folder, and an index
run waits for them. Cost: the footers of all files, and the columns of the shard's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from torchmix.catalog.lock import catalog_lock
from torchmix.catalog.manifest import read_manifest
from torchmix.catalog.settings import SourceSettings
from torchmix.errors import CatalogError
from torchmix.indexing.scan_files import Progress, scan_files
from torchmix.indexing.scan_tasks import Shard, files_to_scan, of_shard
from torchmix.indexing.source_work import compare


class ShardReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one shard did."""

    files_of_shard: int
    """Files of the shard."""
    files_in_all: int
    """Files that all shards scan together."""
    resumed_files: int
    """Files of the shard that had been scanned before."""


def scan_shard(
    catalog_folder: Path,
    settings: Mapping[str, SourceSettings],
    base: Path,
    shard: Shard,
    *,
    progress: Progress | None = None,
    keep_tokens: bool = False,
) -> ShardReport:
    """Scan the files of a shard; arguments and errors as those of `scan.update_catalog`."""
    with catalog_lock(catalog_folder, is_shared=True):
        try:
            sources = read_manifest(catalog_folder).sources
        except CatalogError:
            sources = {}
        try:
            work = compare(catalog_folder, settings, base, sources)
            files = files_to_scan(catalog_folder, work, ids_only=True, keep_tokens=keep_tokens)
            mine = of_shard(files, shard)
            scanned = scan_files([one.task for one in mine], base, progress)
        except OSError as error:
            raise CatalogError(
                f"cannot write the catalog at {catalog_folder}: {error}; mend that, then index again"
            ) from error
    return ShardReport(
        files_of_shard=len(mine), files_in_all=len(files), resumed_files=sum(file.resumed for file in scanned)
    )
