"""`torchmix index`: build the catalog, or bring it up to date.

Only files that are new or changed are scanned; a run that is stopped loses at most the files it was at. Cost: one pass
over the columns of those files, with rate and time left: a bar on a terminal, elsewhere a line every minute.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from torchmix.catalog.file_index import num_file_indexes
from torchmix.catalog.in_store import address_of, catalog_folder
from torchmix.catalog.manifest import ViewEntry, read_manifest
from torchmix.catalog.settings import settings_of
from torchmix.catalog.store import Catalog, SourceCatalog, open_part, views_of
from torchmix.cli.streams import denied_of_recipe, print_denied, print_selections, selection_values
from torchmix.cli.terminal import (
    ExitCode,
    add_explain,
    add_recipe,
    at_least,
    count_text,
    print_json,
    print_table,
    progress_bar,
)
from torchmix.errors import OptionError
from torchmix.formats.kept_ids import in_place_of, kept_bytes
from torchmix.indexing.file_changes import ProgressLines
from torchmix.indexing.scan import IndexReport, index_sources
from torchmix.indexing.source_work import Shard, scan_shard
from torchmix.recipe.amounts import bytes_text
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.load import load_recipe, recipe_directory
from torchmix.recipe.parts import has_part, part_of, with_all_sources
from torchmix.recipe.sources import PARTS
from torchmix.recipe.structs import Recipe
from torchmix.service.ray.seats import connected
from torchmix.service.ray.shards import scan_shards

COLUMNS = {
    "source": "a source of the recipe, by its name",
    "files": "its files",
    "size": "of these files, with columns that are not read",
    "documents": "rows of the files, with those that have no tokens",
    "empty": "rows without tokens, which are passed over, and empty texts, which have what begins and ends each text",
    "tokens": "of all rows together",
    "longest": "tokens of the longest document",
    "pages": "units of reading: a page is read and decoded as a whole",
    "a window": "pages whose rows are shuffled together (shuffle.window_pages and window_bytes of the recipe)",
}
HELP = "build the catalog of a recipe, or bring it up to date"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this verb beside those of all verbs."""
    add_recipe(parser)
    parser.add_argument("--force", action="store_true", help="scan every file again, in the sorted order of paths")
    parser.add_argument(
        "--keep-tokens", action="store_true", help="keep the ids of texts, too, so that training tokenizes nothing"
    )
    parser.add_argument(
        "--shard",
        type=_shard,
        metavar="I/N",
        help="scan the I-th of N parts of the files, from 1/N on; when all N are done, run without it to publish",
    )
    parser.add_argument(
        "--ray",
        nargs="?",
        const="auto",
        metavar="ADDRESS",
        help="scan on this Ray cluster (auto: of this machine, or of RAY_ADDRESS), then publish",
    )
    parser.add_argument(
        "--shards", type=at_least(1), metavar="N", help="with --ray: tasks (default: two for each processor)"
    )
    add_explain(parser)


def run(arguments: argparse.Namespace) -> ExitCode:
    """Index, and print what each source holds.

    Raises:
        TorchmixError: A fault in the recipe, a file or a column; the catalog stays as it was.
    """
    recipe = load_recipe(arguments.recipe)
    directory = recipe_directory(arguments.recipe)
    whole = with_all_sources(recipe)
    if arguments.shard is not None:
        return _scan_shard(whole, directory, arguments)
    if arguments.ray is not None:
        _scan_on_ray(arguments)
    folder = catalog_folder(directory, recipe.catalog)
    try:
        report = _index(whole, directory, arguments)
    except KeyboardInterrupt:
        kept = num_file_indexes(folder)
        what = f"the scans of {count_text(kept)} files are kept, and" if kept else "no scan of a file was finished;"
        print(
            f"torchmix: interrupted: {what} the catalog is as it was; run torchmix index again to continue",
            file=sys.stderr,
        )
        raise
    if arguments.json:
        views = {part: selection_values(*one) for part, one in _views(recipe, folder).items()}
        print_json(
            {
                "recipe": str(arguments.recipe),
                "recipe_fingerprint": recipe_fingerprint(recipe),
                # As a training run has it, which reads nothing of the other parts.
                "catalog_fingerprint": open_part(folder, part_of(recipe, "train")).fingerprint,
                **_values(report),
                "denied": denied_of_recipe(read_manifest(folder), whole),
                "selections": [{"part": part, **one} for part, values in views.items() for one in values],
            }
        )
    else:
        _print(report, explain=arguments.explain)
        print_denied(denied_of_recipe(read_manifest(folder), whole))
        for part, one in _views(recipe, folder).items():
            print_selections(selection_values(*one), part=part, explain=arguments.explain)
    return ExitCode.OK


def _views(recipe: Recipe, folder: Path) -> dict[str, tuple[Catalog, Mapping[str, ViewEntry]]]:
    """The catalog of each part that has views, with what the manifest says of these."""
    parts = [part_of(recipe, name) for name in PARTS if has_part(recipe, name)]
    views = read_manifest(folder).views
    return {part.name: (open_part(folder, part), views[part.name]) for part in parts if views_of(part).sources}


def _shard(text: str) -> Shard:
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"{text!r} is no shard; write I/N, from 1/16 to 16/16 for sixteen")
    return Shard(int(number), int(of))


def _scan_shard(recipe: Recipe, directory: Path, arguments: argparse.Namespace) -> ExitCode:
    """Scan some of the files, for a later run to publish."""
    if arguments.force:
        raise OptionError("--shard does not go with --force: run `torchmix index --force` alone, or delete the catalog")
    silent = arguments.json or arguments.quiet
    lines = ProgressLines(lambda line: None if silent else print(f"torchmix: {line}", file=sys.stderr, flush=True))
    report = scan_shard(
        catalog_folder(directory, recipe.catalog),
        settings_of(recipe.sources, recipe.shuffle),
        directory,
        arguments.shard,
        progress=lines,
        keep_tokens=arguments.keep_tokens,
    )
    lines.end()
    number, of = arguments.shard
    if arguments.json:
        print_json({"recipe": str(arguments.recipe), "shard": number, "shards": of, **asdict(report)})
    else:
        resumed = f", {count_text(report.resumed_files)} of them before" if report.resumed_files else ""
        print(
            f"shard {number} of {of}: {count_text(report.files_of_shard)} of {count_text(report.files_in_all)} files "
            f"scanned{resumed}; when all shards are done, torchmix index {arguments.recipe} publishes them"
        )
    return ExitCode.OK


def _scan_on_ray(arguments: argparse.Namespace) -> None:
    """Scan all files as tasks of a Ray cluster; the index run that follows publishes what they found."""
    if arguments.force:
        raise OptionError("--ray does not go with --force: run `torchmix index --force` alone, or delete the catalog")
    ray = connected(arguments.ray)
    shards = arguments.shards or 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))
    silent = arguments.json or arguments.quiet
    with progress_bar(shards, unit="shard", title="scanning", silent=silent) as bar:

        def show(done: int, of: int, files: int) -> None:
            bar.update()
            if not silent and not sys.stderr.isatty():
                what = f"{count_text(files)} files in the last one"
                print(f"torchmix: {done} of {of} shards scanned, {what}", file=sys.stderr, flush=True)

        scan_shards(ray, arguments.recipe, shards, keep_tokens=arguments.keep_tokens, progress=show)


def _index(recipe: Recipe, directory: Path, arguments: argparse.Namespace) -> IndexReport:
    """Index, with a bar on a terminal, and with lines elsewhere."""
    silent = arguments.json or arguments.quiet
    if not silent and not sys.stderr.isatty():
        lines = ProgressLines(lambda line: print(f"torchmix: {line}", file=sys.stderr, flush=True))
        print(f"torchmix: looking at the files of {len(recipe.sources)} sources", file=sys.stderr, flush=True)
        report = index_sources(
            recipe, directory, progress=lines, force=arguments.force, keep_tokens=arguments.keep_tokens
        )
        lines.end()
        return report
    with progress_bar(0, unit="B", title="indexing", silent=silent, scale=True) as bar:

        def show(done_bytes: int, all_bytes: int, source: str, file: str) -> None:
            bar.total = all_bytes
            bar.set_postfix_str(source, refresh=False)
            bar.update(done_bytes - bar.n)

        return index_sources(recipe, directory, progress=show, force=arguments.force, keep_tokens=arguments.keep_tokens)


def _values(report: IndexReport) -> dict[str, Any]:
    kept = kept_bytes(report.catalog.directory)
    return {
        "catalog": _place(report),
        "scanned_files": report.scanned_files,
        "resumed_files": report.resumed_files,
        "kept_files": report.kept_files,
        "changes": [{"source": one.source, "path": one.path, "change": one.change} for one in report.changes],
        "sources": [
            {
                "name": source.name,
                "num_files": len(source.files),
                "num_bytes": _num_bytes(source),
                "num_documents": source.num_documents,
                "num_empty": source.num_without_content(),
                "num_bad_rows": source.num_bad_rows,
                "num_tokens": source.num_tokens,
                "max_document_tokens": source.max_document_tokens,
                "num_pages": source.pages.num_pages,
                "window_pages": source.sizes.window_pages,
                "split_row_files": _split_row_files(source),
                "tail_bytes": _tail_bytes(source),
                "kept_ids_bytes": kept.get(source.name, 0),
                "fingerprint": source.fingerprint,
            }
            for source in report.catalog.sources.values()
        ],
    }


def _print(report: IndexReport, *, explain: bool) -> None:
    rows = [
        (
            source.name,
            count_text(len(source.files)),
            bytes_text(_num_bytes(source)),
            count_text(source.num_documents),
            count_text(source.num_without_content()),
            count_text(source.num_tokens),
            count_text(source.max_document_tokens),
            count_text(source.pages.num_pages),
            f"{count_text(source.sizes.window_pages)} pages",
        )
        for source in report.catalog.sources.values()
    ]
    print_table(COLUMNS, rows, explain=explain)
    scanned = f"{report.scanned_files} files scanned, {report.kept_files} kept"
    resumed = f", {report.resumed_files} taken from an unfinished run" if report.resumed_files else ""
    print(f"\n{_place(report)}: {scanned}{resumed}")
    for change, count in sorted(Counter(one.change for one in report.changes).items()):
        print(f"{count_text(count)} {change}")
    kept = kept_bytes(report.catalog.directory)
    for source in report.catalog.sources.values():
        if source.name in kept:
            is_whole = in_place_of(source, report.catalog.directory) is not None
            what = "training tokenizes nothing of it" if is_whole else "not of all files, so training tokenizes it"
            print(f"{source.name}: its ids are kept, {bytes_text(kept[source.name])}; {what}")
        if split := _split_row_files(source):
            print(
                f"{source.name}: rows are split over pages in {split} files; reading each page to where its last row "
                f"ends takes {bytes_text(_tail_bytes(source))} more"
            )


def _place(report: IndexReport) -> str:
    """Where the catalog lies, as a user knows it."""
    return address_of(report.catalog.directory) or str(report.catalog.directory)


def _num_bytes(source: SourceCatalog) -> int:
    return sum(file.num_bytes for file in source.files)


def _split_row_files(source: SourceCatalog) -> int:
    return sum(file.split_pages > 0 for file in source.files)


def _tail_bytes(source: SourceCatalog) -> int:
    return sum(file.tail_bytes for file in source.files)
