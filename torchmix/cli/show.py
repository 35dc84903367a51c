"""`torchmix show`: the text or the tokens of what training will see, for a terminal or as a page of HTML."""

from __future__ import annotations

import argparse
import html
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.store import Catalog, SourceCatalog
from torchmix.cli.run import add_decisions, add_layout, add_state, layout_of_arguments, open_recipe, run_fold, state_of
from torchmix.cli.terminal import (
    ExitCode,
    add_explain,
    add_part,
    add_recipe,
    at_least,
    count_text,
    excerpt,
    print_json,
    print_meanings,
    print_table,
    progress_bar,
    readable,
    write_html,
)
from torchmix.errors import CorruptPage, OptionError, TopologyError
from torchmix.formats.documents import NO_LOSS
from torchmix.formats.source import FormatSource
from torchmix.formats.table import choose_source
from torchmix.modalities.modality import Modality, PlannedItem
from torchmix.modalities.pictures import png_image
from torchmix.planner.plan import StepPlan
from torchmix.reader.items import ItemReader, open_items
from torchmix.reader.protocol import WantedPieces
from torchmix.reader.reader import Reader
from torchmix.recipe.build import listed, nearest
from torchmix.recipe.checks import TOKENIZERS
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.parts import Part
from torchmix.recipe.ramp import length_of_step
from torchmix.recipe.sources import maps_of, tokenizer_kind
from torchmix.steps.history import Segment
from torchmix.transform.maps import open_maps
from torchmix.transform.open_tokenizer import Tokenizers
from torchmix.transform.tokenizer import Tokenizer

# --- Documents as a person looks at them: where a row lies, its ids, its text.
#
# Ids come from the reader that training uses, and text from them, so what is shown is what a model sees; where the
# source has no tokenizer and none was named, there is no text. Cost: a page for each row that is not of the page
# before.

CACHE_BYTES = 256 << 20


class RowPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a row of a source lies."""

    file: str
    """Path, as the recipe gives it."""
    file_row: int
    """Row of the file."""
    page: int
    """Page of the source."""


class DocumentReader:
    """Reads documents of some sources to show them."""

    def __init__(
        self,
        catalog: Catalog,
        directory: Path,
        *,
        tokenizer: str | None = None,
        maps: Mapping[str, str] | None = None,
        seed: int = 0,
    ) -> None:
        """Open a catalog's sources.

        Args:
            catalog: The sources.
            directory: The recipe's folder.
            tokenizer: For sources of ids: as in a recipe, but a path is relative to the present folder.
            maps: The words of the map of each source that has one, by name, as the recipe has them.
            seed: The recipe's, for maps that are random.

        Raises:
            CatalogStale: The catalog holds lengths of another tokenizer than the recipe's is now.
            RecipeError, SourceUnreadable: A tokenizer cannot be opened.
        """
        self._catalog = catalog
        self.directory = directory
        """The recipe's folder."""
        self.seed = seed
        """The recipe's."""
        self._number = {name: number for number, name in enumerate(catalog.sources)}
        if tokenizer is not None and tokenizer_kind(tokenizer) is None:
            raise OptionError(f"--tokenizer {tokenizer}: no tokenizer; write {TOKENIZERS}")
        own, named = Tokenizers(directory), Tokenizers(Path())
        words = {name: word for name, word in (maps or {}).items() if name in catalog.sources}
        opened = open_maps(words, directory)
        sources: dict[str, FormatSource] = {}
        self._tokenizer: dict[str, Tokenizer | None] = {}
        for name, source in catalog.sources.items():
            sources[name] = choose_source(name, source, (file.path for file in source.files), own, opened.get(name))
            if source.tokenizer is not None:
                begin, end = source.begin_id, source.end_id
                self._tokenizer[name] = own.open(name, source.tokenizer, begin_id=begin, end_id=end)
            else:
                self._tokenizer[name] = None if tokenizer is None else named.open(name, tokenizer)
        self._reader = Reader(catalog, directory, cache_bytes=CACHE_BYTES, sources=sources, maps=words, seed=seed)

    def __enter__(self) -> DocumentReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.close()

    def ids(
        self, name: str, row: int, start: int = 0, tokens: int | None = None, *, epoch: int = 0
    ) -> NDArray[np.int64]:
        """Ids of a document from token `start` on: all, or `tokens` of them; of a random map, those of an epoch."""
        if tokens is None:
            tokens = int(self._catalog.sources[name].sizes.tokens[row]) - start
        rows, counts = np.array([row], np.int64), np.array([tokens], np.int64)
        wanted = WantedPieces.end_to_end(source=self._number[name], row=rows, epoch=epoch, start=start, tokens=counts)
        return self._reader.read(wanted).values.astype(np.int64)

    def text(self, name: str, ids: NDArray[np.int64]) -> str | None:
        """The text of some ids of a source; None where nothing tells how."""
        tokenizer = self._tokenizer[name]
        return None if tokenizer is None else tokenizer.decode(ids.tolist())


def place_of(source: SourceCatalog, row: int) -> RowPlace:
    """Where a row of a source lies."""
    first_rows = [file.first_row for file in source.files]  # of files without rows that of the next, which is found
    file = source.files[int(np.searchsorted(first_rows, row, side="right")) - 1]
    page = int(source.pages.page_of_rows(np.array([row], np.int64))[0])
    return RowPlace(file=file.path, file_row=row - file.first_row, page=page)


def only(catalog: Catalog, name: str) -> Catalog:
    """The catalog with one of its sources alone, so that nothing of the others is opened."""
    return replace(catalog, sources={name: catalog.sources[name]})


# --- `torchmix show --source`: rows of a source, as training sees them.
#
# Order and numbers of rows are the catalog's. Cost: one page at a time.


def rows_shown(
    catalog: Catalog, directory: Path, arguments: argparse.Namespace, *, maps: Mapping[str, str], seed: int
) -> Iterator[dict[str, Any]]:
    """Rows that the arguments name, one by one: source, row, file, file_row, page, tokens, and text or ids.

    Raises:
        OptionError: There is no such source, row or page.
    """
    name = arguments.source
    if name not in catalog.sources:
        hint = f"{nearest(name, catalog.sources)}; sources are {listed(sorted(catalog.sources))}"
        raise OptionError(f"--source {name}: there is no such source{hint}")
    source = catalog.sources[name]
    start, stop = _row_range(source, arguments)
    with DocumentReader(only(catalog, name), directory, tokenizer=arguments.tokenizer, maps=maps, seed=seed) as reader:
        for row in range(start, stop):
            place, ids = place_of(source, row), reader.ids(name, row)
            text = reader.text(name, ids)
            yield {
                "source": name,
                "row": row,
                "file": place.file,
                "file_row": place.file_row,
                "page": place.page,
                "tokens": len(ids),
                "text": text,
                "ids": ids.tolist() if text is None or arguments.tokens else None,
            }


def print_row(row: dict[str, Any]) -> None:
    """Print one row: a line that says where it lies, then its text, its ids, or both."""
    print(
        f"--- {row['source']} row {count_text(row['row'])}: {readable(row['file'])} row {count_text(row['file_row'])}, "
        f"page {count_text(row['page'])}, {count_text(row['tokens'])} tokens"
    )
    if row["text"] is not None:
        print(readable(row["text"], keep="\n\t"))
    if row["ids"] is not None:
        print(" ".join(map(str, row["ids"])))


def _row_range(source: SourceCatalog, arguments: argparse.Namespace) -> tuple[int, int]:
    """Rows to show, as (start, stop)."""
    if arguments.page is not None:
        if arguments.page >= source.pages.num_pages:
            raise OptionError(f"--page {arguments.page}: source {source.name!r} has {source.pages.num_pages} pages")
        first_row = source.pages.first_row
        return int(first_row[arguments.page]), int(first_row[arguments.page + 1])
    start, stop = arguments.rows if arguments.rows is not None else (arguments.row, arguments.row + 1)
    if stop > source.num_documents:
        option = "--rows" if arguments.rows is not None else "--row"
        raise OptionError(f"{option}: source {source.name!r} has {source.num_documents} rows, from 0 on")
    return start, stop


# --- A page of HTML with samples of a step: their text, the items in it, who encodes each, and what has no loss.

STYLE = """\
article { border: 1px solid #8884; border-radius: 6px; margin: 1em 0; padding: .5em 1em }
article h2 { font-size: 1em } .no-loss { color: #999; font-style: italic }
p.of { color: #777; font-size: .85em; margin: .2em 0 }
pre { white-space: pre-wrap; margin: .3em 0; font: inherit }
figure { display: inline-block; margin: .3em .5em; vertical-align: top }
figure img { max-height: 14em; max-width: 20em; display: block }
details summary { color: #777; font-size: .85em } .made img { display: inline-block; margin: 0 .2em .2em 0 }
"""


def write_page(path: Path, plan: StepPlan, catalog: Catalog, samples: Sequence[int], reader: DocumentReader) -> None:
    """Write the page.

    Args:
        path: The file to write.
        plan: The step.
        catalog: The catalog of its sources.
        samples: Numbers of the samples to show.
        reader: Reads their documents; the recipe's folder is its own.

    Raises:
        OSError: The file cannot be written.
    """
    title = f"step {plan.step}, digest {plan.order_digest.hex()}"
    write_html(path, title, html_of_samples(plan, catalog, samples, reader), style=STYLE)


def html_of_samples(plan: StepPlan, catalog: Catalog, samples: Sequence[int], reader: DocumentReader) -> Iterator[str]:
    """Samples of a step with their texts and items, as HTML in which all text is escaped; arguments as `write_page`.

    A line that says where a piece lies has `data-row`, as web:1234.
    """
    items = open_items(catalog, reader.directory, seed=reader.seed)
    try:
        for sample in samples:
            yield from _sample(plan, catalog, sample, reader, items)
    finally:
        if items is not None:
            items.close()


def _sample(
    plan: StepPlan, catalog: Catalog, sample: int, reader: DocumentReader, items: ItemReader | None
) -> Iterator[str]:
    placement, pieces = plan.placement, plan.pieces
    yield (
        f"<article><h2>sample {sample}: dp rank {placement.dp_rank_of_sample[sample]}, microbatch "
        f"{placement.microbatch_of_sample[sample]}</h2>\n"
    )
    for piece in np.flatnonzero(plan.sample == sample).tolist():
        name, row = plan.sources[int(pieces.source[piece])], int(pieces.row[piece])
        start, tokens = int(pieces.start[piece]), int(pieces.tokens[piece])
        place, ids = (
            place_of(catalog.sources[name], row),
            reader.ids(name, row, start, tokens, epoch=int(pieces.epoch[piece])),
        )
        yield (
            f'<p class="of" data-row="{html.escape(name)}:{row}">{html.escape(name)}: {html.escape(place.file)}, row '
            f"{place.file_row}, tokens {start} to "
            f"{start + tokens} of {pieces.document_tokens[piece]}</p>\n"
        )
        at, runs = 0, _runs_without_loss(catalog, name, row)
        for kind, item, offset, count in _items(catalog, name, row):
            if items is None or offset < start or offset + count > start + tokens:
                continue
            yield _text(reader, name, ids[at : offset - start], start + at, runs)
            yield _figure(plan, piece, name, kind, item, count, items)
            at = offset - start + count
        yield _text(reader, name, ids[at:], start + at, runs)
    yield "</article>\n"


def _items(catalog: Catalog, name: str, row: int) -> list[tuple[str, int, int, int]]:
    """Kind, number, offset and tokens of the items of a row, in the order of their tokens."""
    source = catalog.sources[name]
    found: list[tuple[str, int, int, int]] = []
    for kind in source.items:
        table = source.sizes.items[kind]
        numbers = range(int(table.first_run_of_row[row]), int(table.first_run_of_row[row + 1]))
        found += [(kind, number, int(table.offset[number]), int(table.tokens[number])) for number in numbers]
    return sorted(found, key=lambda one: one[2])


def _runs_without_loss(catalog: Catalog, name: str, row: int) -> list[tuple[int, int]]:
    """First token of each run of a row's tokens without loss, and the one behind it."""
    table = catalog.sources[name].sizes.marks.get(NO_LOSS)
    if table is None:
        return []
    numbers = range(int(table.first_run_of_row[row]), int(table.first_run_of_row[row + 1]))
    return [(int(table.offset[i]), int(table.offset[i]) + int(table.tokens[i])) for i in numbers]


def _text(reader: DocumentReader, name: str, ids: Int64Array, first: int, runs: list[tuple[int, int]]) -> str:
    """The text of some ids, from token `first` of their document on; what has no loss is marked."""
    parts: list[str] = []
    at = 0
    for start, stop in [*runs, (first + len(ids), first + len(ids))]:
        begin, end = (min(max(place - first, at), len(ids)) for place in (start, stop))
        parts.append(html.escape(reader.text(name, ids[at:begin]) or ""))
        if quiet := reader.text(name, ids[begin:end]) if end > begin else "":
            parts.append(f'<span class="no-loss">{html.escape(quiet)}</span>')
        at = end
    text = "".join(parts)
    return f"<pre>{text}</pre>\n" if text else ""


def _figure(plan: StepPlan, piece: int, name: str, kind: str, item: int, count: int, items: ItemReader) -> str:
    of, epoch = np.array([item], np.int64), plan.pieces.epoch[piece : piece + 1]
    [content], [planned] = items.read(name, kind, of), items.planned(name, kind, of, epoch)
    sizes, modality = items.table(name, kind).sizes, items.modality(name, kind)
    measures = " x ".join(str(sizes[key][item]) for key in modality.measured)
    told = [f"{measures}, {sizes[modality.units][item]} {modality.units}, {count} tokens"]
    for module, placed in plan.item_modules.items():
        found = np.flatnonzero((placed.items.piece == piece) & (placed.items.item == item))
        if len(found):
            told.append(f"{module}: consumer {int(placed.consumer_of_item[found[0]])} of {placed.num_consumers}")
    columns = {key: int(column[item]) for key, column in sizes.items()}
    return (
        f'<figure title="{html.escape(kind)} {item}">{modality.preview(content)}'
        f"{_made(modality, planned, content, columns)}"
        f"<figcaption>{html.escape('; '.join(told))}</figcaption></figure>\n"
    )


def _made(modality: Modality, planned: PlannedItem, content: memoryview, columns: Mapping[str, int]) -> str:
    """What an encoder gets of an item, to be opened; empty where there is nothing to show."""
    try:
        units = modality.units_of(planned, content, is_masked=False)
    except (CorruptPage, OptionError):
        return ""
    shown = "".join(map(png_image, modality.pictures(units, columns)))
    return f'<details><summary>what an encoder gets</summary><div class="made">{shown}</div></details>' if shown else ""


# --- `torchmix show --step`: what one step gives to a model, sample by sample.
#
# It is the step that training gets, since the same planner makes it and the same reader reads it. Cost: planning of
# all steps from 0, or from the state, since the order is a fold; then the pages of the pieces that are shown.

COLUMNS = {
    "source": "a source of the recipe, by its name",
    "file": "the file that the document lies in",
    "row": "its row, counted through all files of the source; torchmix show --source NAME --row R shows it whole",
    "epoch": "how often the source had been gone through before",
    "tokens": "which tokens of the document are this piece, half-open, of how many",
}


def plan_of_step(
    part: Part, catalog: Catalog, directory: Path, arguments: argparse.Namespace
) -> tuple[StepPlan, Segment]:
    """The step that the arguments name, and the recipe and the catalog that the run had at it.

    Raises:
        StateError: `--state` is no state of this recipe and catalog, or the step's recipe is not known.
        PlanError: The data ends before the step.
    """
    layout = layout_of_arguments(arguments, part)
    state = state_of(arguments, part, catalog)
    fold = run_fold(arguments, part, catalog, directory=directory, layout=layout, state=state, first=arguments.step)
    num_steps = arguments.step + 1 - fold.cursor.step
    with progress_bar(num_steps, unit="step", title="planning", silent=arguments.json or arguments.quiet) as bar:
        while fold.cursor.step < arguments.step:
            fold.pack()
            bar.update()
        plan, segment = fold.plan(), fold.segment
        if state is not None:
            fold.skip_to(state.step)  # whose digest tells whether these are the steps of its run
    return plan, segment


def samples_shown(
    plan: StepPlan,
    catalog: Catalog,
    directory: Path,
    arguments: argparse.Namespace,
    *,
    maps: Mapping[str, str],
    seed: int,
) -> Iterator[dict[str, Any]]:
    """Samples of a step, one by one, with their pieces.

    Raises:
        OptionError: There is no such sample.
        TopologyError: There is no such rank or microbatch.
    """
    placement, pieces = plan.placement, plan.pieces
    with DocumentReader(catalog, directory, tokenizer=arguments.tokenizer, maps=maps, seed=seed) as reader:
        for sample in numbers_of_samples(plan, arguments):
            shown: list[dict[str, Any]] = []
            for k in np.flatnonzero(plan.sample == sample).tolist():
                name, row = plan.sources[int(pieces.source[k])], int(pieces.row[k])
                start, tokens = int(pieces.start[k]), int(pieces.tokens[k])
                place, ids = (
                    place_of(catalog.sources[name], row),
                    reader.ids(name, row, start, tokens, epoch=int(pieces.epoch[k])),
                )
                text = reader.text(name, ids)
                shown.append(
                    {
                        "slot": int(plan.slot[k]),
                        "offset": int(plan.sample_offset[k]),
                        "stream": plan.streams[int(pieces.stream[k])],
                        "source": name,
                        "file": place.file,
                        "row": row,
                        "file_row": place.file_row,
                        "epoch": int(pieces.epoch[k]),
                        "start": start,
                        "tokens": tokens,
                        "document_tokens": int(pieces.document_tokens[k]),
                        "text": text,
                        "ids": ids.tolist() if text is None or arguments.tokens else None,
                    }
                )
            yield {
                "sample": sample,
                "dp_rank": int(placement.dp_rank_of_sample[sample]),
                "microbatch": int(placement.microbatch_of_sample[sample]),
                "tokens": sum(piece["tokens"] for piece in shown),
                "run": run_of_sample(plan, sample),
                "pieces": shown,
            }


def run_of_sample(plan: StepPlan, sample: int) -> dict[str, int] | None:
    """The ranks of dp x cp that share a sample; None where it is of one replica."""
    if plan.contexts is None:
        return None
    number = plan.contexts.bin_of_sample[sample]
    first, size = int(plan.contexts.first_rank_of_bin[number]), int(plan.contexts.size_of_bin[number])
    return {"first_rank": first, "ranks": size, "padded_tokens": int(plan.contexts.padded_tokens[sample])}


def print_sample(sample: dict[str, Any], *, length: int, characters: int) -> None:
    """Print one sample: a line about it, and a table of its pieces with their first and last characters."""
    where, run = f"dp rank {sample['dp_rank']}", sample["run"]
    if run is not None:
        last = run["first_rank"] + run["ranks"] - 1
        where = f"ranks {run['first_rank']} to {last} of dp x cp" if run["ranks"] > 1 else f"rank {last} of dp x cp"
        length = run["padded_tokens"]
    print(
        f"\nsample {sample['sample']}: {where}, microbatch {sample['microbatch']}, "
        f"{count_text(sample['tokens'])} of {count_text(length)} tokens"
    )
    rows = []
    for piece in sample["pieces"]:
        span = f"{count_text(piece['start'])} to {count_text(piece['start'] + piece['tokens'])}"
        rows.append(
            (
                piece["source"],
                readable(piece["file"]),
                count_text(piece["row"]),
                str(piece["epoch"]),
                f"{span} of {count_text(piece['document_tokens'])}",
            )
        )
    if rows:
        print_table(COLUMNS, rows, explain=False)
    for number, piece in enumerate(sample["pieces"]):
        if piece["text"] is not None:
            print(f"  {number}: {excerpt(piece['text'], characters)}")
        if piece["ids"] is not None:
            print(f"  {number}: {_ids_text(piece['ids'], characters // 6)}")


def _ids_text(ids: list[int], most: int) -> str:
    """Ids of the two ends, as text is cut."""
    if len(ids) <= 2 * most:
        return " ".join(map(str, ids))
    return " ".join([*map(str, ids[:most]), "...", *map(str, ids[len(ids) - most :])])


def numbers_of_samples(plan: StepPlan, arguments: argparse.Namespace) -> list[int]:
    """Numbers of the samples that the arguments name, ascending."""
    if arguments.sample is not None:
        if arguments.sample >= plan.num_samples:
            raise OptionError(
                f"--sample {arguments.sample}: step {plan.step} has {plan.num_samples} samples, from 0 on"
            )
        return [arguments.sample]
    chosen = np.ones(plan.num_samples, bool)
    replica = plan.placement.dp_rank_of_sample
    if plan.contexts is not None and arguments.dp_rank is not None:  # a run may be of several replicas
        contexts, cp = plan.contexts, plan.layout.cp
        first = contexts.first_rank_of_bin[contexts.bin_of_sample]
        last = first + contexts.size_of_bin[contexts.bin_of_sample] - 1
        replica = np.clip(arguments.dp_rank, first // cp, last // cp)
    for option, value, of_sample, count in (
        ("--dp-rank", arguments.dp_rank, replica, plan.layout.dp),
        ("--microbatch", arguments.microbatch, plan.placement.microbatch_of_sample, plan.num_microbatches),
    ):
        if value is not None:
            if value >= count:
                raise TopologyError(f"{option} {value}: there are {count}, from 0 on; see --dp and --micro-batch-size")
            chosen &= of_sample == value
    samples: list[int] = np.flatnonzero(chosen).tolist()
    return samples


# --- `torchmix show`: the text or the tokens of what training will see.
#
# What a document holds cannot act on the terminal.

HELP = "show the text or tokens of rows, or of a step"

OF_ROWS = ("row", "rows", "page")
OF_STEP = ("sample", "dp_rank", "microbatch", "state", "accept_edit", "html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this verb beside those of all verbs."""
    add_recipe(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--source", metavar="NAME", help="show rows of this source, with --row, --rows or --page")
    what.add_argument("--step", type=at_least(0), metavar="N", help="show what this step gives to the model")
    rows = parser.add_argument_group("with --source").add_mutually_exclusive_group()
    rows.add_argument("--row", type=at_least(0), metavar="R", help="one row")
    rows.add_argument("--rows", type=_range, metavar="A:B", help="rows A to B - 1")
    rows.add_argument("--page", type=at_least(0), metavar="P", help="all rows of a page")
    step = parser.add_argument_group("with --step")
    step.add_argument("--sample", type=at_least(0), metavar="S", help="one sample of the global batch (default all)")
    step.add_argument("--dp-rank", type=at_least(0), metavar="R", help="samples of one data-parallel rank")
    step.add_argument("--microbatch", type=at_least(0), metavar="M", help="samples of one microbatch")
    add_layout(step)
    add_state(step, "of the run that is meant, to plan from")
    add_decisions(parser)
    step.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page with texts and items, and who encodes them"
    )
    add_part(parser)
    parser.add_argument("--tokens", action="store_true", help="show ids, too, where there is text")
    parser.add_argument("--tokenizer", metavar="T", help="shows ids as text: bytes, tiktoken:NAME or a tokenizer.json")
    parser.add_argument(
        "--characters", type=at_least(1), default=60, metavar="C", help="of both ends of a piece (default 60)"
    )
    add_explain(parser)


def run(arguments: argparse.Namespace) -> ExitCode:
    """Show rows or a step.

    Raises:
        TorchmixError: Something is not there, or cannot be planned or read.
    """
    _check_options(arguments)
    _, directory, part, catalog = open_recipe(arguments.recipe, arguments.part)
    if arguments.source is not None:
        rows = rows_shown(catalog, directory, arguments, maps=maps_of(part.sources), seed=part.seed)
        if arguments.json:
            print_json({"recipe": str(arguments.recipe), "rows": list(rows)})
            return ExitCode.OK
        for row in rows:
            print_row(row)
        return ExitCode.OK
    plan, segment = plan_of_step(part, catalog, directory, arguments)
    part, catalog = segment.part, segment.catalog
    maps, seed = maps_of(part.sources), part.seed
    if arguments.html is not None:
        numbers = numbers_of_samples(plan, arguments)
        with DocumentReader(catalog, directory, tokenizer=arguments.tokenizer, maps=maps, seed=seed) as reader:
            write_page(arguments.html, plan, catalog, numbers, reader)
        if arguments.json:
            print_json({"file": str(arguments.html), "step": plan.step, "samples": len(numbers)})
        elif not arguments.quiet:
            print(f"wrote {len(numbers)} samples of step {plan.step} to {arguments.html}")
        return ExitCode.OK
    samples = samples_shown(plan, catalog, directory, arguments, maps=maps, seed=seed)
    if arguments.json:
        about = {
            "recipe": str(arguments.recipe),
            "recipe_fingerprint": recipe_fingerprint(part),
            "catalog_fingerprint": catalog.fingerprint,
            "step": plan.step,
            "dp": plan.layout.dp,
            "micro_batch_size": plan.layout.micro_batch_size,
            "order_digest": plan.order_digest.hex(),
        }
        print_json({**about, "samples": list(samples)})
        return ExitCode.OK
    length = length_of_step(part.batch, plan.step)
    sizes = f"of at most {length}" if plan.contexts is not None else f"x {length}"
    digest = plan.order_digest.hex()
    print(f"step {plan.step} of {arguments.recipe}: {plan.num_samples} samples {sizes} tokens, digest {digest}")
    for sample in samples:
        print_sample(sample, length=length, characters=arguments.characters)
    if arguments.explain:
        print_meanings(COLUMNS)
    return ExitCode.OK


def _check_options(arguments: argparse.Namespace) -> None:
    """Refuse options of the other way to show, which would silently do nothing."""
    given = {name for name in (*OF_ROWS, *OF_STEP) if getattr(arguments, name) is not None}
    wrong = given & set(OF_STEP if arguments.source is not None else OF_ROWS)
    if wrong:
        option = f"--{min(wrong).replace('_', '-')}"
        raise OptionError(f"{option} goes with {'--step' if arguments.source is not None else '--source'}")
    if arguments.source is not None and not given:
        raise OptionError("--source needs --row R, --rows A:B or --page P")
    if arguments.sample is not None and (arguments.dp_rank is not None or arguments.microbatch is not None):
        raise OptionError("--sample names one sample; leave --dp-rank and --microbatch out")


def _range(text: str) -> tuple[int, int]:
    """A type of argument: A:B, half-open."""
    start, colon, stop = text.partition(":")
    try:
        first, end = int(start), int(stop)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no range, as 10:20") from error
    if not colon or first < 0 or end <= first:
        raise argparse.ArgumentTypeError(f"{text!r} is no range of rows, as 10:20")
    return first, end
