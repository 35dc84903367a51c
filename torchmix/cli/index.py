"""`torchmix index`: build the catalog, or bring it up to date.

In: a recipe. Out: the catalog of all its parts on disk, and a table of what each source holds. Must hold: only files
that are new or changed are scanned; a run that is stopped loses at most the files it was at. Cost: one pass over the
columns of those files, with rate and time left: a bar on a terminal, elsewhere a line every minute.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchmix.catalog.manifest import ViewEntry, read_manifest
from torchmix.catalog.open_part import open_part
from torchmix.catalog.parts import num_parts
from torchmix.catalog.store import Catalog, SourceCatalog
from torchmix.catalog.views.wanted import views_of
from torchmix.cli.selections import print_selections, selection_values
from torchmix.cli.terminal import ExitCode, add_explain, count_text, print_json, print_table, progress_bar
from torchmix.indexing.progress_lines import ProgressLines
from torchmix.indexing.scan import IndexReport, index_sources
from torchmix.recipe.byte_sizes import bytes_text
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.load import load_recipe, recipe_directory
from torchmix.recipe.parts import has_part, part_of, with_all_sources
from torchmix.recipe.source.documents import PARTS
from torchmix.recipe.structs import Recipe

COLUMNS = {
    "source": "a source of the recipe, by its name",
    "files": "its files",
    "size": "of these files, with columns that are not read",
    "documents": "rows of the files, with those that have no tokens",
    "empty": "rows without tokens, which are passed over",
    "tokens": "of all rows together",
    "longest": "tokens of the longest document",
    "pages": "units of reading: a page is read and decoded as a whole",
    "a window": "pages whose rows are shuffled together (shuffle.window_pages and window_bytes of the recipe)",
}
HELP = "build the catalog of a recipe, or bring it up to date"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this verb beside RECIPE and --json."""
    parser.add_argument("--force", action="store_true", help="scan every file again, in the sorted order of paths")
    add_explain(parser)


def run(arguments: argparse.Namespace) -> ExitCode:
    """Index, and print what each source holds.

    Raises:
        TorchmixError: A fault in the recipe, a file or a column; the catalog stays as it was.
    """
    recipe = load_recipe(arguments.recipe)
    directory = recipe_directory(arguments.recipe)
    whole = with_all_sources(recipe)
    try:
        report = _index(whole, directory, arguments)
    except KeyboardInterrupt:
        kept = num_parts(directory / recipe.catalog)
        what = f"the scans of {count_text(kept)} files are kept, and" if kept else "no scan of a file was finished;"
        print(
            f"torchmix: interrupted: {what} the catalog is as it was; run torchmix index again to go on",
            file=sys.stderr,
        )
        raise
    if arguments.json:
        views = {part: selection_values(*one) for part, one in _views(recipe, directory).items()}
        print_json(
            {
                "recipe": str(arguments.recipe),
                "recipe_fingerprint": recipe_fingerprint(recipe),
                # As a training run has it, which reads nothing of the other parts.
                "catalog_fingerprint": open_part(directory / recipe.catalog, part_of(recipe, "train")).fingerprint,
                **_values(report),
                "selections": [{"part": part, **one} for part, values in views.items() for one in values],
            }
        )
    else:
        _print(report, explain=arguments.explain)
        for part, one in _views(recipe, directory).items():
            print_selections(selection_values(*one), part=part, explain=arguments.explain)
    return ExitCode.OK


def _views(recipe: Recipe, directory: Path) -> dict[str, tuple[Catalog, Mapping[str, ViewEntry]]]:
    """The catalog of each part that has views, with what the manifest says of these."""
    parts = [part_of(recipe, name) for name in PARTS if has_part(recipe, name)]
    folder = directory / recipe.catalog
    views = read_manifest(folder).views
    return {part.name: (open_part(folder, part), views[part.name]) for part in parts if views_of(part).sources}


def _index(recipe: Recipe, directory: Path, arguments: argparse.Namespace) -> IndexReport:
    """Index, with a bar on a terminal, and with lines elsewhere."""
    silent = arguments.json or arguments.quiet
    if not silent and not sys.stderr.isatty():
        lines = ProgressLines(lambda line: print(f"torchmix: {line}", file=sys.stderr, flush=True))
        print(f"torchmix: looking at the files of {len(recipe.sources)} sources", file=sys.stderr, flush=True)
        report = index_sources(recipe, directory, progress=lines, force=arguments.force)
        lines.end()
        return report
    with progress_bar(0, unit="B", title="indexing", silent=silent, scale=True) as bar:

        def show(done_bytes: int, all_bytes: int, source: str, file: str) -> None:
            bar.total = all_bytes
            bar.set_postfix_str(source, refresh=False)
            bar.update(done_bytes - bar.n)

        return index_sources(recipe, directory, progress=show, force=arguments.force)


def _values(report: IndexReport) -> dict[str, Any]:
    return {
        "catalog": str(report.catalog.directory),
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
                "num_empty": source.num_empty,
                "num_bad_rows": source.num_bad_rows,
                "num_tokens": source.num_tokens,
                "max_document_tokens": source.max_document_tokens,
                "num_pages": source.pages.num_pages,
                "window_pages": source.sizes.window_pages,
                "split_row_files": _split_row_files(source),
                "tail_bytes": _tail_bytes(source),
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
            count_text(source.num_empty),
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
    print(f"\n{report.catalog.directory}: {scanned}{resumed}")
    for change, count in sorted(Counter(one.change for one in report.changes).items()):
        print(f"{count_text(count)} {change}")
    for source in report.catalog.sources.values():
        if split := _split_row_files(source):
            print(
                f"{source.name}: rows are split over pages in {split} files; reading each page to where its last row "
                f"ends takes {bytes_text(_tail_bytes(source))} more"
            )


def _num_bytes(source: SourceCatalog) -> int:
    return sum(file.num_bytes for file in source.files)


def _split_row_files(source: SourceCatalog) -> int:
    return sum(file.split_pages > 0 for file in source.files)


def _tail_bytes(source: SourceCatalog) -> int:
    return sum(file.tail_bytes for file in source.files)
