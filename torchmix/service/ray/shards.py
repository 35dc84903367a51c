"""Shards of an index as tasks of a Ray cluster.

A task does what `torchmix index --shard I/N` does; one whose worker or node is lost is done again. Cost: the footers of
all files for each shard, and the columns of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from torchmix.catalog.in_store import catalog_folder
from torchmix.catalog.settings import settings_of
from torchmix.errors import CatalogError
from torchmix.indexing.source_work import Shard, scan_shard
from torchmix.parallel.wire import ErrorForm
from torchmix.recipe.load import recipe_and_directory
from torchmix.recipe.parts import with_all_sources

RETRIES = 3
ShardProgress = Callable[[int, int, int], None]
"""Shards done, shards in all, files that the last one had."""


def shard_task(recipe: str, number: int, of: int, keep_tokens: bool) -> str:
    """What Ray runs: scan one shard; its report, or the error that it met, as JSON.

    Args:
        recipe: Path of the recipe, as every node sees it.
        number, of: Which shard, from 1 on.
        keep_tokens: Keep the ids of texts.
    """
    try:
        found, folder = recipe_and_directory("index", recipe, None)
        whole = with_all_sources(found)
        report = scan_shard(
            catalog_folder(folder, whole.catalog),
            settings_of(whole.sources, whole.shuffle),
            folder,
            Shard(number, of),
            keep_tokens=keep_tokens,
        )
    except Exception as error:  # the edge of a process: carried to the driver
        return json.dumps({"error": ErrorForm.of(error).text})
    return json.dumps(asdict(report))


def scan_shards(ray: Any, recipe: Path, shards: int, *, keep_tokens: bool, progress: ShardProgress) -> int:
    """Scan all files of a recipe as tasks; files scanned.

    Args:
        ray: The module, connected.
        recipe: The recipe's path, which all nodes see.
        shards: Into how many parts the files are cut.
        keep_tokens: Keep the ids of texts.
        progress: Called as shards are done.

    Raises:
        CatalogError: A shard could not be scanned; those that were are kept.
    """
    task = ray.remote(shard_task).options(num_cpus=1, max_retries=RETRIES, scheduling_strategy="SPREAD")
    numbers = {
        task.remote(str(recipe.absolute()), number, shards, keep_tokens): number for number in range(1, shards + 1)
    }
    left, files = list(numbers), 0
    while left:
        done, left = ray.wait(left, num_returns=1)
        for call in done:
            try:
                report = json.loads(ray.get(call))
            except ray.exceptions.RayError as error:
                report = {"error": f"its worker was lost {RETRIES + 1} times: {error}"}
            if "error" in report:
                for other in left:
                    ray.cancel(other)
                raise CatalogError(f"shard {numbers[call]} of {shards}: {report['error']}")
            files += report["files_of_shard"]
            progress(shards - len(left), shards, report["files_of_shard"])
    return files
