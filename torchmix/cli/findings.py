"""What is wrong, or worth knowing, before a run starts: all findings of `torchmix check`."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.catalog.manifest import BadRows, listed_text, read_manifest
from torchmix.catalog.settings import settings_of
from torchmix.catalog.sizes import DECODED_TOKEN_BYTES, TokenRuns
from torchmix.catalog.store import Catalog, SourceCatalog, open_part, vocabulary_misfits
from torchmix.catalog.views import child_folder
from torchmix.cli.second_interpreter import difference_elsewhere
from torchmix.cli.streams import rows_and_tokens, shares_of_sources
from torchmix.cli.terminal import ExitCode, count_text, percent_text
from torchmix.errors import CatalogError, CorruptPage, PlanError, RecipeError, SourceUnreadable
from torchmix.formats.documents import NO_LOSS
from torchmix.formats.source import FormatSource
from torchmix.formats.table import choose_source, find_source_files, row_of
from torchmix.indexing.file_changes import match_files
from torchmix.indexing.scan_files import fingerprint_files
from torchmix.modalities.table import kind_named, open_augments
from torchmix.parallel.place_tree import Layout
from torchmix.planner.balance import encoder_cost
from torchmix.planner.contexts import least_load, least_work
from torchmix.planner.forecast import LOW_FILL, Forecast, SourceForecast
from torchmix.planner.graph.strategy import runs_of
from torchmix.planner.planner import Planner
from torchmix.planner.stream_order import check_rows_of_part
from torchmix.recipe.amounts import bytes_text, parse_bytes
from torchmix.recipe.build import listed
from torchmix.recipe.changes import parse_shares, tree_of_part
from torchmix.recipe.items import key_of_items, kinds_of
from torchmix.recipe.parts import Part, has_part, part_of
from torchmix.recipe.ramp import most_length, stages_of
from torchmix.recipe.sources import PARTS, longest_of, maps_of, overflow_of, paths_of, rows_of
from torchmix.recipe.streams import BASE, CHILD, Cell, cells_of, row_sets_of
from torchmix.recipe.structs import Chat, EncoderModel, EpochPlace, Module, Quantiles, Read, Recipe
from torchmix.recipe.tree import walk
from torchmix.service.scale.loads import CostProfile, read_profile
from torchmix.steps.memory_budget import MemoryBudget, budget_of_node, ranks_of_nodes
from torchmix.steps.replica_steps import StreamOptions
from torchmix.storage.stores import place_of
from torchmix.transform.maps import open_maps
from torchmix.transform.open_tokenizer import Tokenizers

# --- What is known of a stream before a run: its rows, its place in the recipe, its figures.
#
# A stream that is a source has the facts of that source.


def values_of_stream(part: Part, catalog: Catalog, forecast: SourceForecast) -> dict[str, Any]:
    """Facts and figures of a stream, for a program; what only a source has is None for others."""
    num_documents, num_tokens = rows_and_tokens(part, catalog, forecast.name)
    values: dict[str, Any] = {
        "name": forecast.name,
        "share": forecast.share,
        "asked_share": forecast.asked_share,
        "members": list(part.streams[forecast.name].members),
        "num_documents": num_documents,
        "num_tokens": num_tokens,
        "epoch_tokens": forecast.epoch_tokens,
        "first_step": forecast.first_step,
        "delivered_tokens": forecast.delivered_tokens,
        "epochs": forecast.epochs,
        "runs_out_step": forecast.runs_out_step,
        "most_repeats": forecast.most_repeats,
        "step_deviation": forecast.deviation,
    }
    own = catalog.sources[forecast.name] if part.streams[forecast.name].is_source else None
    ids = None if own is None else own.ids
    return values | {
        "num_empty": None if own is None else own.num_without_content(),
        "num_bad_rows": None if own is None else own.num_bad_rows,
        "bad_rows": [
            {"path": file.path, "row": bad.row, "reason": bad.reason}
            for file in (() if own is None else own.files)
            for bad in file.bad_rows
        ],
        "max_document_tokens": None if own is None else own.max_document_tokens,
        "smallest_id": None if ids is None else ids.smallest,
        "largest_id": None if ids is None else ids.largest,
        "tokenizer_vocab_size": None if own is None else own.vocab_size,
    }


def where_of_stream(part: Part, name: str) -> str:
    """Where a recipe says what a stream is."""
    if not part.streams[name].is_flat and not part.streams[name].is_cell:
        return f"sources.{name}"
    paths = (path for path, node in walk(tree_of_part(part)) if node.name == name and not node.children)
    return f"mixture.{next(paths, name)}"


# --- What is wrong, or worth knowing, before a run starts.
#
# A fault that would stop or starve a run is a finding; what a run survives as the recipe says is a note.

LATE = 0.01
"""Part of a run after which the first token of a source is late."""
FIRST_STEPS = 10
"""Steps in which no source is late, however short the run."""
FAR = 0.5
"""A source comes unevenly if its part of single steps differs from its share by more than this part of the share."""
SHOWN_SOURCES = 5
"""Sources that a finding of several names."""
TEXT_TOKEN_BYTES = 4
"""Bytes of text of a token, where the index does not know them."""
SHOWN_ROWS = 10
"""Bad rows of a source that a finding names."""
MOST_AMPLIFICATION = 1.5
"""Above so many decodes of a page in an epoch, `check` says what shuffling by row costs."""


class Level(enum.Enum):
    """How much a finding matters; the value is how it is shown."""

    NOTE = "note"
    """Worth knowing; the run continues."""
    FINDING = "finding"
    """The run would stop, or not do what the recipe seems to want."""
    DATA = "data"
    """What lies on disk is missing, changed or unreadable."""


EXIT_CODE_OF_LEVEL = {Level.NOTE: ExitCode.OK, Level.FINDING: ExitCode.FINDINGS, Level.DATA: ExitCode.DATA}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing found."""

    level: Level
    where: str
    """Path of keys in the recipe, as `sources.web`."""
    message: str
    """What is so, with values, and what to do."""


def sources_findings(part: Part, catalog: Catalog, read: Read, budget: MemoryBudget | None = None) -> Iterator[Finding]:
    """Findings in what the catalog holds of each source, whatever the number of steps; `budget`: the memory of a node,
    where it reads first and asks loaders for the rest."""
    smallest = min(stage.samples for stage in stages_of(part.batch))
    capacity, shares = smallest * part.batch.length, shares_at_start(part, catalog)
    longest_of_source: dict[str, int] = {}
    for name in sorted(part.sources):
        where, source = f"sources.{name}", catalog.sources[name]
        tokens = used_tokens(part, source)
        start, stop = rows_of(part.sources[name], source.num_documents)
        num_empty, longest_tokens = source.num_empty, source.max_document_tokens
        if len(tokens) < source.num_documents:
            num_empty, longest_tokens = int((tokens == 0).sum()), int(tokens.max(initial=0))
        if num_contentless := source.num_without_content(start, stop):
            yield _without_content(source, where, num_contentless, num_empty, len(tokens))
        if source.num_bad_rows:
            yield _bad_rows(source, where)
        if longest_tokens > capacity and overflow_of(part.sources[name], part.packing) == "split":
            longest_of_source[name] = longest_tokens
        yield from _costly_files(source, where)
        if source.tokenizer not in (None, "bytes") and source.end_id is None:
            message = "no token ends its documents, so a model does not learn where they end; name one by end_id"
            yield Finding(level=Level.NOTE, where=f"{where}.end_id", message=message)
    yield from _long_documents(longest_of_source, shares, capacity)
    yield from _large_documents(part, catalog, read)
    by_page = part.shuffle.method == "page"
    if budget is not None and budget.spills:
        yield from _left_to_loaders(part, catalog, budget, by_page=by_page)
    else:
        yield from _small_cache(part, catalog, read) if by_page else _scattered_rows(part, catalog, read)


def _without_content(source: SourceCatalog, where: str, count: int, num_empty: int, num_documents: int) -> Finding:
    message = f"{count_text(count)} of {count_text(num_documents)} documents have no tokens"
    if texts := count - num_empty:
        message = (
            f"{message} of their own: {count_text(texts) if num_empty else 'they'} are empty texts and come with the "
            f"token that begins or ends each text; a selection with `where: tokens > {source.tokens_of_nothing}` "
            "leaves them out"
        )
    passed = (
        "they are passed over"
        if not texts
        else f"the other {count_text(num_empty)} have no token at all and are passed over"
    )
    return Finding(level=Level.NOTE, where=where, message=f"{message}; {passed}" if num_empty else message)


def _long_documents(tokens: Mapping[str, int], shares: Mapping[str, Fraction], capacity: int) -> Iterator[Finding]:
    """One note for all sources whose longest document is longer than a batch; the slowest source comes first."""
    steps = {name: -(-longest // max(1, int(shares[name] * capacity))) for name, longest in tokens.items()}
    if steps:
        names = sorted(steps, key=lambda name: (-steps[name], name))
        each = [f"{name} ({count_text(tokens[name])} tokens, {count_text(steps[name])} steps)" for name in names]
        message = (
            f"the longest document has more tokens than a batch, {count_text(capacity)}, so at the share of its source "
            f"its pieces come in about so many steps: {listed(each, 5)}; to avoid that, use overflow: truncate or "
            f"drop, or a larger batch"
        )
        yield Finding(level=Level.NOTE, where="sources", message=message)


def used_tokens(part: Part, source: SourceCatalog) -> NDArray[np.int32]:
    """Tokens of the documents of a source that the recipe uses."""
    start, stop = rows_of(part.sources[source.name], source.num_documents)
    return source.sizes.tokens[start:stop]


def _decoded(part: Part, catalog: Catalog) -> list[SourceCatalog]:
    """Sources whose pages are decoded and kept; of files that are mapped only pieces are copied."""
    sources = [catalog.sources[name] for name in part.sources]
    return [source for source in sources if row_of(source.format).type_in_file is None]


def open_document_bytes(part: Part, catalog: Catalog) -> int:
    """Memory that a reader may need for documents that are drawn in part: the longest one of each source."""
    most = (
        source.max_document_tokens
        for source in _decoded(part, catalog)
        if overflow_of(part.sources[source.name], part.packing) == "split"
        and source.max_document_tokens > longest_of(part.sources[source.name], part.batch.length)
    )
    return DECODED_TOKEN_BYTES * sum(most)


def _large_documents(part: Part, catalog: Catalog, read: Read) -> Iterator[Finding]:
    """Each source may have a document open, whose tokens are kept beside the cache."""
    num_bytes = open_document_bytes(part, catalog)
    if num_bytes > parse_bytes(read.cache, where="read.cache"):
        message = (
            f"documents longer than a sample are drawn piece by piece, and what is left of one of each source is kept "
            f"beside the cache: up to {bytes_text(num_bytes)}, more than {read.cache}. Give the process that "
            f"reads as much memory more, or use overflow: truncate or drop"
        )
        yield Finding(level=Level.NOTE, where="read.cache", message=message)


def _small_cache(part: Part, catalog: Catalog, read: Read) -> Iterator[Finding]:
    """A cache that does not hold what is being drawn from makes a page be decoded again for nearly every row."""
    present_bytes, all_bytes = _window_bytes(part, catalog)
    cache_bytes = parse_bytes(read.cache, where="read.cache")
    if cache_bytes < all_bytes:
        what = "the present windows" if cache_bytes < present_bytes else "the present and the next windows"
        message = (
            f"{read.cache} holds less than {what} of all sources (about {bytes_text(present_bytes)}, "
            f"with the next ones {bytes_text(all_bytes)}): pages would be decoded "
            f"{'many times' if cache_bytes < present_bytes else 'in bursts'}; enlarge it, or make shuffle.window_bytes "
            f"smaller, which changes the order"
        )
        yield Finding(level=Level.NOTE, where="read.cache", message=message)


def _left_to_loaders(part: Part, catalog: Catalog, budget: MemoryBudget, *, by_page: bool) -> Iterator[Finding]:
    """What a node that reads first leaves to loaders, since its memory does not hold it."""
    _, needed_bytes = _window_bytes(part, catalog)
    what = "the present and the next windows"
    if not by_page:
        needed_bytes, what = sum(_kept_bytes(part, source) for source in _decoded(part, catalog)), "all pages"
    if budget.cache_bytes < needed_bytes:
        message = (
            f"the node has memory for {bytes_text(budget.cache_bytes)} of the {bytes_text(needed_bytes)} or so that "
            f"{what} of all sources take, so loaders are asked for about "
            f"{percent_text(1 - budget.cache_bytes / needed_bytes)} of the pages; a larger read.cache, or more "
            f"loaders.memory, lowers it"
        )
        yield Finding(level=Level.NOTE, where="loaders.where", message=message)


def _window_bytes(part: Part, catalog: Catalog) -> tuple[int, int]:
    """Bytes of the pages of the present windows of all sources, and of these and the next ones."""
    present_bytes = all_bytes = 0
    for source in _decoded(part, catalog):
        num_windows = -(-source.sizes.num_pages // source.sizes.window_pages)
        used = len(used_tokens(part, source)) / source.num_documents
        source_bytes = round(_kept_bytes(part, source) * used)
        present_bytes += source_bytes // num_windows
        all_bytes += source_bytes * min(num_windows, 2) // num_windows
    return present_bytes, all_bytes


def _kept_bytes(part: Part, source: SourceCatalog) -> int:
    """Bytes of all pages of a source as they are kept: ids in two bytes where the index saw no larger one, or texts.

    Of texts the index knows bytes where they are tokens, and else how many are stored, which may be compressed; a
    vocabulary of some ten thousand ids has about four bytes of English a token.
    """
    if part.sources[source.name].text is not None:
        if source.tokenizer == "bytes" and part.sources[source.name].map is None:
            return source.num_tokens
        return max(int(source.pages.chunk_bytes.sum()), TEXT_TOKEN_BYTES * source.num_tokens)
    ids = source.ids if source.tokenizer is None else None
    is_narrow = ids is not None and ids.smallest >= 0 and ids.largest < 1 << 16
    return (2 if is_narrow else DECODED_TOKEN_BYTES) * source.num_tokens


def _scattered_rows(part: Part, catalog: Catalog, read: Read) -> Iterator[Finding]:
    """Rows in no order of pages: a page that is not kept is decoded for each of its rows."""
    sources = _decoded(part, catalog)
    if not sources:
        return
    all_bytes = sum(_kept_bytes(part, source) for source in sources)
    kept = min(1.0, parse_bytes(read.cache, where="read.cache") / all_bytes)
    shares = shares_at_start(part, catalog)
    rows_of_page = sum(float(shares[source.name]) * source.num_documents / source.pages.num_pages for source in sources)
    amplification = 1 + (1 - kept) * (rows_of_page - 1)
    if part.shuffle.method == "row" and amplification > MOST_AMPLIFICATION:
        message = (
            f"row decodes each page about {amplification:.1f} times an epoch (decode_amplification): a page "
            f"has {rows_of_page:.0f} rows, and read.cache holds {percent_text(kept)} of all pages. With method page it "
            f"is about one; a larger read.cache, or files with smaller pages, lower it"
        )
        yield Finding(level=Level.NOTE, where="shuffle.method", message=message)


def _bad_rows(source: SourceCatalog, where: str) -> Finding:
    bad, documents = count_text(source.num_bad_rows), count_text(source.num_documents)
    listed = listed_text([(file.path, file) for file in source.files], SHOWN_ROWS)
    message = f"{bad} of {documents} rows could not be read, and have no tokens (bad_rows: mask): {listed}"
    return Finding(level=Level.NOTE, where=where, message=message)


def _costly_files(source: SourceCatalog, where: str) -> Iterator[Finding]:
    split = sum(file.split_pages > 0 for file in source.files)
    if split:
        tail_bytes, page_bytes = sum(file.tail_bytes for file in source.files), int(source.pages.chunk_bytes.sum())
        message = (
            f"{split} of {len(source.files)} files have rows split over pages: reading each page on to where its last "
            f"row ends takes {bytes_text(tail_bytes)} more, {tail_bytes / page_bytes:.0%} of the column; write them "
            f"again with pages that end at rows, as with a page index, to read less"
        )
        yield Finding(level=Level.NOTE, where=where, message=message)
    whole = sum(file.whole_chunks for file in source.files)
    if whole:
        message = (
            f"{whole} of {len(source.files)} files have chunks of many rows that can only be read whole; write them "
            f"again in smaller ones to read less"
        )
        yield Finding(level=Level.NOTE, where=where, message=message)


def forecast_findings(part: Part, result: Forecast) -> Iterator[Finding]:
    """Findings in what the sources will give in N steps."""
    for source in result.sources:
        yield from _starved(part, result, source)
        yield from _runs_out(part, result, source)
        if source.most_repeats > 1:
            step_tokens = count_text(round(source.share * result.fill * result.capacity_tokens))
            message = (
                f"one document comes up to {source.most_repeats} times in one step: an epoch has "
                f"{count_text(source.epoch_tokens)} tokens, a step takes about {step_tokens}; a lower share avoids that"
            )
            yield Finding(level=Level.NOTE, where=where_of_stream(part, source.name), message=message)
    yield from _late_sources(result)
    yield from _uneven_sources(result)
    if result.stop_step is not None and not _stops_by_error(part, result):
        message = (
            f"every source has given its max_epochs by step {result.stop_step}; train for fewer steps or raise them"
        )
        yield Finding(level=Level.FINDING, where="sources", message=message)


def _late_sources(result: Forecast) -> Iterator[Finding]:
    """Sources that a run begins without."""
    border = result.start + max(LATE * result.num_steps, FIRST_STEPS)
    end = result.start + result.num_steps
    late = [one for one in result.sources if one.first_step is not None and border < one.first_step < end]
    if late:
        late.sort(key=lambda one: (-(one.first_step or 0), one.name))
        named = _named(late, [f"step {count_text(one.first_step or 0)}" for one in late])
        message = (
            f"{named}: the first token comes after {LATE:.0%} of the run, since a piece is drawn when half of it is "
            f"owed; a larger share, or a larger batch, brings it sooner"
        )
        yield Finding(level=Level.NOTE, where="mixture", message=message)


def _uneven_sources(result: Forecast) -> Iterator[Finding]:
    """Sources whose part of single steps is far from their share, by reason."""
    few: list[SourceForecast] = []
    waiting: list[SourceForecast] = []
    for source in result.sources:
        if source.deviation > FAR and source.piece_tokens:
            a_step = source.share * result.fill * result.capacity_tokens
            (few if a_step < 2 * source.piece_tokens else waiting).append(source)
    for sources, reason in (
        (few, "their share of a step is less than two of their pieces, so they come in some steps and not in others; "
              "over many steps they have it. Shorter samples, or a larger batch, even it out"),
        (waiting, "their pieces fit no sample when they are drawn, and wait for later steps; documents of like "
                  "lengths, a longer batch.length or more samples even it out"),
    ):  # fmt: skip
        if sources:
            sources.sort(key=lambda one: (-one.deviation, one.name))
            named = _named(sources, [f"{one.deviation:.0%}" for one in sources])
            message = f"in single steps {named} are off their shares by as much on average: {reason}"
            yield Finding(level=Level.NOTE, where="mixture", message=message)


def _named(sources: Sequence[SourceForecast], facts: Sequence[str]) -> str:
    """Some sources by name, each with a fact, and how many more there are."""
    shown = [f"{one.name} ({fact})" for one, fact in zip(sources[:SHOWN_SOURCES], facts, strict=False)]
    more = len(sources) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _starved(part: Part, result: Forecast, source: SourceForecast) -> Iterator[Finding]:
    if source.runs_out_step is not None and source.runs_out_step < result.start:
        return  # it has given what it was to give
    batch_tokens = result.capacity_tokens * (result.fill or 1.0)
    all_tokens = batch_tokens * result.num_steps
    # A run that stops early says little of what the source would give: go by its share then.
    tokens = source.delivered_tokens if result.stop_step is None else source.share * all_tokens
    if tokens < part.batch.length:
        message = (
            f"gives {count_text(int(tokens))} tokens in {count_text(result.num_steps)} steps, less than one sample of "
            f"{count_text(part.batch.length)}; a share of at least {percent_text(part.batch.length / all_tokens)}, "
            f"or more steps, would give one{'' if part.allows_starving else '; `starve: allow` accepts it'}"
        )
        yield Finding(
            level=Level.NOTE if part.allows_starving else Level.FINDING,
            where=where_of_stream(part, source.name),
            message=message,
        )


def _runs_out(part: Part, result: Forecast, source: SourceForecast) -> Iterator[Finding]:
    step = source.runs_out_step
    if step is None:
        return
    about = "" if result.is_exact(step) else "about "
    settings = part.streams[source.name]
    has_been = step < result.start
    verb = "ran" if has_been else "runs"
    fact = f"{verb} out in {about}step {count_text(step)}, after max_epochs {settings.max_epochs}"
    if settings.on_exhausted == "error" and not has_been:
        message = (
            f"{fact}, and the run stops there; raise max_epochs, lower its share, or set on_exhausted: renormalise"
        )
        yield Finding(level=Level.FINDING, where=where_of_stream(part, source.name), message=message)
    else:
        is_last = all(one.runs_out_step is not None and one.runs_out_step <= step for one in result.sources)
        then = (
            "no other source is left, and the run stops there"
            if is_last
            else "from there on the other sources have its share"
        )
        message = f"{fact}; {then}"
        yield Finding(level=Level.NOTE, where=where_of_stream(part, source.name), message=message)


def _stops_by_error(part: Part, result: Forecast) -> bool:
    return any(
        source.runs_out_step is not None
        and source.runs_out_step >= result.start
        and part.streams[source.name].on_exhausted == "error"
        for source in result.sources
    )


def shares_at_start(part: Part, catalog: Catalog) -> dict[str, Fraction]:
    """Share of the streams over each source."""
    tokens = {name: rows_and_tokens(part, catalog, name)[1] for name in part.streams}
    return shares_of_sources(part, parse_shares(part, tokens=tokens))


# --- Rows that are in no cell of a group, or in no child that the mixture names, and so are never trained on.
#
# The counts are those of the index. Cost: one read of the manifest.

SHOWN_CHILDREN = 10
"""Children that a note names."""


def cell_findings(part: Part, catalog: Catalog) -> Iterator[Finding]:
    """A note for each source, selection or child that has rows in no cell of a group."""
    groups = {name: (path, cells) for path, name, cells in cells_of(part)}
    if not groups:
        return
    entries, row_sets = read_manifest(catalog.directory).views[part.name], row_sets_of(part)
    one_of_each: dict[tuple[str, str], Cell] = {}
    for one in row_sets.values():
        if one.cell is not None and one.cell.base not in row_sets:  # else these rows have that share
            one_of_each.setdefault((one.cell.group, one.cell.base), one.cell)
    for (group, base), cell in one_of_each.items():
        path, cells = groups[group]
        if count := entries[cell.name].in_no_cell:
            wanted = "; ".join(
                f"{name} is none of {', '.join(sorted(values))}"
                for name, values in sorted(cells.shares.items())
                if name != BASE
            )
            message = (
                f"{count_text(count)} rows of {base} are in no cell, since their {wanted}; they are not trained on"
            )
            yield Finding(level=Level.NOTE, where=f"{path}.cells", message=message)


def child_findings(part: Part, catalog: Catalog) -> Iterator[Finding]:
    """A note for each source that is cut, of whose children the mixture names some, and neither all nor the rest."""
    row_sets = row_sets_of(part)
    for name, source in part.sources.items():
        own = [one for one in row_sets.values() if one.source == name]
        named = {one.child for one in own if one.child is not None}
        has_rest = any(one.child is None and one.where is None for one in own)
        if source.split_by is None or not named or has_rest:
            continue
        where, what = f"sources.{name}.split_by", ""
        if isinstance(source.split_by, Quantiles):
            numbers = range(1, source.split_by.quantiles + 1)
            left = [f"q{number}" for number in numbers if f"q{number}" not in named]
        else:
            rows: dict[str, int] = {}
            for file in catalog.sources[name].files:
                child = child_folder(paths_of(source), file.path, where)
                rows[child] = rows.get(child, 0) + file.num_rows
            left = sorted(child for child, count in rows.items() if count and child not in named)
            what = f", {count_text(sum(rows[child] for child in left))} rows"
        if left:
            each = listed([f"{name}{CHILD}{child}" for child in left], SHOWN_CHILDREN)
            selected = any(one.where is not None for one in own)
            trained = "no row of them is trained on" + (", but for those of selections" if selected else "")
            message = (
                f"the mixture does not name {len(left)} of {len(left) + len(named)} children ({each}{what}): "
                f"{trained}; give them shares, or {name} itself, which has the rest"
            )
            yield Finding(level=Level.NOTE, where=where, message=message)


# --- What is wrong with the files of a recipe: missing, unreadable, without the column, new or changed since
# indexing.
#
# Files are only read, at their ends; every source is looked at, so that one run names all faults. Cost: the footer of
# each file; of indexed files also a listing.

SHOWN_FILES = 5
"""Files named in one finding; the others are counted."""


def file_findings(recipe: Recipe, directory: Path, catalog: Catalog | None) -> list[Finding]:
    """Look at every data file of a recipe.

    Args:
        recipe: A checked recipe.
        directory: Its folder.
        catalog: Its catalog; None if there is none that fits. If it lacks a source, only files and columns are
            looked at.
    """
    findings: list[Finding] = []
    tokenizers = Tokenizers(directory)
    maps = open_maps(maps_of(recipe.sources), directory)
    open_augments(recipe.sources, directory)
    for name, settings in sorted(settings_of(recipe.sources, recipe.shuffle).items()):
        key = "tokenizer"
        try:
            if settings.tokenizer is not None:
                tokenizers.open(name, settings.tokenizer, begin_id=settings.begin_id, end_id=settings.end_id)
            key = "path"
            paths = find_source_files(name, settings, directory)
            source = choose_source(name, settings, paths, tokenizers, maps.get(name))
        except SourceUnreadable as error:
            findings.append(_of_error(error, f"sources.{name}.{key}", name))
            continue
        key = "path" if settings.column is None else "tokens" if settings.tokenizer is None else "text"
        if settings.map is not None:
            key = settings.map.takes
        masks_bad_rows = settings.masks_bad_rows
        where = f"sources.{name}.{key}"
        unreadable = [
            _of_error(error, where, name)
            for error in _unreadable(source, paths, directory, masks_bad_rows=masks_bad_rows)
        ]
        findings += unreadable
        held = None if catalog is None else catalog.sources.get(name)
        if held is not None and source.transform_id != held.transform_id:
            what = "tokenizer" if settings.map is None else "map or its tokenizer"
            message = f"the {what} is another than when the source was indexed; put it back, or run torchmix index"
            key = "tokenizer" if settings.map is None else "map"
            findings.append(Finding(level=Level.DATA, where=f"sources.{name}.{key}", message=message))
        if held is not None and not unreadable:
            findings += _changes(source, paths, directory, held)
    return findings


def _of_error(error: CatalogError, where: str, name: str) -> Finding:
    """A finding whose message does not say again where it is."""
    message = str(error).removeprefix(f"{where}: ").removeprefix(f"source {name!r}: ")
    return Finding(level=Level.DATA, where=where, message=message)


def _unreadable(
    source: FormatSource, paths: list[str], directory: Path, *, masks_bad_rows: bool
) -> Iterator[SourceUnreadable | CorruptPage]:
    """Files that cannot be opened, or do not hold what the source needs."""
    for path in paths:
        try:
            source.check(place_of(directory, path), BadRows() if masks_bad_rows else None)
        except (SourceUnreadable, CorruptPage) as error:
            yield error


def _changes(source: FormatSource, paths: list[str], directory: Path, held: SourceCatalog) -> Iterator[Finding]:
    """Files that differ from what was indexed."""
    found = fingerprint_files([(source, path) for path in paths], directory)
    _, changes = match_files(source.name, found, held.files)
    remedies = {
        "added": (Level.FINDING, "not in the catalog, so not trained on; run torchmix index to add them"),
        "moved": (Level.FINDING, "at another path than indexed; run torchmix index, which keeps the order"),
        "changed": (
            Level.DATA,
            "not the files that were indexed; put them back, or run torchmix index for another order",
        ),
        "removed": (Level.DATA, "gone since indexing; put them back, or run torchmix index for another order"),
    }
    for change, (level, remedy) in remedies.items():
        of_kind = [one.path for one in changes if one.change == change]
        if of_kind:
            names = ", ".join(of_kind[:SHOWN_FILES]) + (", ..." if len(of_kind) > SHOWN_FILES else "")
            yield Finding(
                level=level,
                where=f"sources.{source.name}.path",
                message=f"{len(of_kind)} file(s) {change} - {names}: {remedy}",
            )


# --- Batches that hold much padding.
#
# What a recipe wastes in most steps is a finding, what it wastes in some is a note.


def fill_findings(part: Part, result: Forecast) -> Iterator[Finding]:
    """Batches with much padding: their samples cost as much as full ones."""
    if not result.num_low_fills:
        return
    packing, length = part.packing, count_text(part.batch.length)
    if packing.method == "pad":
        reason = (
            f"each document has a sample of {length} tokens of its own; a shorter batch.length, or method: best_fit, "
            f"wastes less"
        )
    elif 1 - result.alignment > (1 - result.fill) / 2:
        reason = (
            f"documents rounded up to align_tokens {packing.align_tokens} take {1 / result.alignment:.2f} times their "
            f"tokens; a smaller align_tokens, or method: concat, wastes less"
        )
    else:
        reason = (
            f"whole documents leave room at the ends of samples of {length} tokens; a longer batch.length, more "
            f"samples, or method: concat, wastes less"
        )
    is_common = result.fill < LOW_FILL
    count, steps = count_text(result.num_low_fills), count_text(result.simulated_steps)
    message = (
        f"{count} of {steps} batches are filled below {LOW_FILL:.0%}, on average {percent_text(result.fill)}, step "
        f"{count_text(result.lowest_fill_step)} to {percent_text(result.lowest_fill)}: {reason}"
    )
    yield Finding(level=Level.FINDING if is_common else Level.NOTE, where="packing", message=message)


# --- Runs of ranks: one document for which all ranks wait.


def context_findings(part: Part, catalog: Catalog, layout: Layout, result: Forecast) -> Iterator[Finding]:
    """A document that takes its run longer than all ranks need for a step, so that most of them are idle."""
    context = part.balance.context
    if context is None or result.last is None:
        return
    runs = runs_of(part, context, layout)
    of_step = result.last[1].pieces.tokens
    most = max(int(used_tokens(part, catalog.sources[name]).max(initial=0)) for name in part.sources)
    longest = min(most, most_length(part.batch))
    alone = int(least_load(np.array([longest]), runs))
    mean = -(-least_work(of_step, runs) // runs.num_ranks)
    if alone > mean:
        message = (
            f"a document of {count_text(longest)} tokens takes the ranks of its run {alone / mean:.1f} times as long "
            f"as an even share of a step's work, and all {runs.num_ranks} ranks wait for it; a larger batch, longer "
            f"runs (sizes), fewer ranks or a shorter length waste less"
        )
        yield Finding(level=Level.NOTE, where="balance.context", message=message)


# --- What items of sources mean for a run: which source encoders and decoders work for, and items that samples cannot
# hold.
#
# The work of an item is what the module that encodes it says, or its units; the time to decode it is the profile's.
# Cost: one pass over the sizes of all items.

DOMINATES = 1.5
"""Times its share of the tokens that a source has of the encoder's work."""


def item_findings(
    part: Part, catalog: Catalog, shares: Mapping[str, Fraction], profile: CostProfile | None
) -> Iterator[Finding]:
    """Findings in the items of a part; `shares` are of tokens, by source. Without a profile nothing is said of time."""
    for kind in kinds_of(part.sources):
        names = [name for name in sorted(part.sources) if kind in catalog.sources[name].items]
        tables = {name: catalog.sources[name].sizes.items[kind] for name in names}
        for name, table in tables.items():
            yield from _cut_items(part, catalog.sources[name], kind, table)
        yield from _without_module(part, kind, tables)
    pairs = [(name, kind) for name in sorted(part.sources) for kind in sorted(catalog.sources[name].items)]
    modules = {pair: _encoding(part, *pair) for pair in pairs}
    models = {pair: module.model for pair, module in modules.items() if module is not None}
    # Without the dimensions of each, the work of two encoders cannot be compared.
    kinds = sorted({kind for _, kind in models})
    for some in [[*models]] if all(models.values()) else [[pair for pair in models if pair[1] == k] for k in kinds]:
        encoded = {pair: _encoder_work(catalog.sources[pair[0]], pair[1], models[pair]) for pair in some}
        yield from _dominating(encoded, shares, "the encoders' work")
    if profile is not None:
        costs = {(name, kind): profile.sources[name].items.get(kind) for name, kind in models}
        times = {pair: one.decode_ns / max(1, one.source_tokens) for pair, one in costs.items() if one is not None}
        yield from _dominating(times, shares, "the time that decoding takes, by the profile")


def _dominating(
    of_token: Mapping[tuple[str, str], float], shares: Mapping[str, Fraction], what: str
) -> Iterator[Finding]:
    """Items that are worked for more than the shares of their sources say.

    Args:
        of_token: By source and kind, the work for a token of the source.
        shares: Of tokens, by source.
        what: They are most of.
    """
    work = {pair: float(shares.get(pair[0], 0)) * each for pair, each in of_token.items()}
    total = sum(work.values())
    for (name, kind), mine in work.items() if len(work) > 1 and total else ():
        of_work, of_tokens = mine / total, float(shares.get(name, 0))
        if of_work >= 0.5 and of_work >= DOMINATES * of_tokens:
            message = (
                f"its {kind}s are {of_work:.0%} of {what}, and its share of the tokens is {of_tokens:.0%}; "
                f"to lower that, give it a smaller share, or smaller {kind}s by {key_of_items(kind)}"
            )
            yield Finding(level=Level.NOTE, where=f"sources.{name}.{key_of_items(kind)}", message=message)


def _without_module(part: Part, kind: str, tables: Mapping[str, TokenRuns]) -> Iterator[Finding]:
    """Sources whose items nobody encodes, although those of others are encoded."""
    encoders = {name: module for name, module in part.modules.items() if module.items == kind}
    for name, table in tables.items() if encoders else ():
        if not any(module.sources is None or name in module.sources for module in encoders.values()):
            message = (
                f"its {count_text(len(table.offset))} {kind}s are encoded by no module: {', '.join(encoders)} name "
                f"other sources; add {name} to `sources` of one of them, or leave that key out for all sources"
            )
            yield Finding(level=Level.FINDING, where=f"sources.{name}.{key_of_items(kind)}", message=message)


def _encoder_work(source: SourceCatalog, kind: str, model: EncoderModel | None) -> float:
    """Floating-point operations for the items of a source, over its tokens; without dimensions units, over them."""
    sizes, of_kind = source.sizes.items[kind].sizes, kind_named(kind)
    units = np.asarray(sizes[of_kind.units], np.int64)
    segments = None if of_kind.segments is None else np.asarray(sizes[of_kind.segments], np.int64)
    cost = float(encoder_cost(model)(units, segments).sum(dtype=np.float64))
    return cost * (1 if model is None else 2 * model.hidden) / max(1, source.num_tokens)


def _encoding(part: Part, name: str, kind: str) -> Module | None:
    """The first module that encodes such items of a source."""
    chosen = (module for module in part.modules.values() if module.items == kind)
    return next((module for module in chosen if module.sources is None or name in module.sources), None)


def _cut_items(part: Part, source: SourceCatalog, kind: str, table: TokenRuns) -> Iterator[Finding]:
    """Items that lie across the end of a sample in documents longer than one."""
    overflow = overflow_of(part.sources[source.name], part.packing)
    length = longest_of(part.sources[source.name], part.batch.length)
    if source.max_document_tokens <= length or overflow not in ("split", "truncate"):
        return
    first = np.asarray(table.offset, np.int64)
    last = first + np.asarray(table.tokens, np.int64) - 1
    is_cut = (first < length) & (last >= length)
    if overflow == "split":
        is_cut = first // length != last // length
    if is_cut.any():
        cut, of_all = count_text(int(is_cut.sum())), count_text(len(first))
        message = (
            f"{cut} of {of_all} {kind}s lie across the end of a sample of {count_text(length)} tokens and are left "
            f"out; to keep them, use longer samples, or smaller {kind}s by {key_of_items(kind)}"
        )
        yield Finding(level=Level.NOTE, where=f"sources.{source.name}.{key_of_items(kind)}", message=message)


# --- How much of the tokens of a source is trained on, where it has chats or a mask of loss.
#
# Items need not be among tokens without loss, so the part that is trained on is at most what is said. Cost: one pass
# over the runs of tokens without loss.


def loss_findings(part: Part, catalog: Catalog) -> Iterator[Finding]:
    """Findings in the loss of a part."""
    for name in sorted(part.sources):
        source = catalog.sources[name]
        table = source.sizes.marks.get(NO_LOSS)
        if table is None or not source.num_tokens:
            continue
        all_tokens, of_recipe = count_text(source.num_tokens), part.sources[name]
        trained = source.num_tokens - int(np.asarray(table.tokens).sum(dtype=np.int64))
        if trained:
            message = f"{percent_text(trained / source.num_tokens)} of its {all_tokens} tokens have loss"
            yield Finding(level=Level.NOTE, where=f"sources.{name}", message=message)
            continue
        what = "loss_mask is 0, false or below 0 everywhere"
        if of_recipe.loss_mask is None:
            roles = (of_recipe.chat or Chat()).loss
            what = f"no message is of the role {' or '.join(roles)}"
        message = f"none of its {all_tokens} tokens has loss: {what}; nothing is learned from it"
        yield Finding(level=Level.FINDING, where=f"sources.{name}", message=message)


# --- What reading will take of a node's memory.
#
# The sum is that of `build_loader`. Cost: some operations a source, and for each rank of the job.


def budget_of(whole: Recipe, part: Part, catalog: Catalog, layout: Layout, node_ranks: int | None) -> MemoryBudget:
    """The sum for the node that needs most; `node_ranks`: ranks of a node, None: it has all of the job."""
    budgets = [
        budget_of_node(part, catalog, whole.read, whole.loaders, here=here, layout=layout, options=StreamOptions())
        for here in ranks_of_nodes(layout, node_ranks)
    ]
    return max(budgets, key=lambda budget: budget.sum_bytes)


def memory_findings(budget: MemoryBudget) -> Iterator[Finding]:
    """A finding if the sum is more than there is; of this machine only a note, since another one will train."""
    try:
        budget.check()
    except RecipeError as error:
        level = Level.FINDING if budget.is_given else Level.NOTE
        yield Finding(level=level, where=error.where, message=error.message)


# --- Where the changes of the shares begin that wait for an epoch of a stream.
#
# An estimated step is said to be one.


def schedule_findings(part: Part, result: Forecast) -> Iterator[Finding]:
    """A note for each change of the schedule that begins at an epoch."""
    places = [(number, change.start) for number, change in enumerate(part.schedule)]
    at_epochs = [(number, place) for number, place in places if isinstance(place, EpochPlace)]
    epochs = {source.name: source.epochs for source in result.sources}
    for number, place in at_epochs:
        stage = result.stages[number]
        if stage is None:
            message = (
                f"does not begin in {count_text(result.num_steps)} steps: {place.of} gives {epochs[place.of]:,.4g} "
                f"epochs, not {place.epochs}, or a later change begins before"
            )
        else:
            step = stage.start
            about = "" if result.is_exact(step) else "about "
            verb = "began" if step < result.start else "begins"
            message = f"{verb} in {about}step {count_text(step)}, after epoch {place.epochs} of {place.of}"
        yield Finding(level=Level.NOTE, where=f"schedule[{number}]", message=message)


# --- What is wrong with the ids of a recipe's data: none that the model has, or of two vocabularies.
#
# Whatever a start would refuse is found here. Cost: opening the tokenizers, where there are two.


def vocabulary_findings(
    recipe: Recipe, directory: Path, catalog: Catalog | None, padded_vocab_size: int | None
) -> Iterator[Finding]:
    """Compare ids of sources with the model's, and tokenizers with each other.

    Args:
        recipe: A checked recipe, with the sources of all parts.
        directory: Its folder.
        catalog: Its catalog; None if there is none that fits.
        padded_vocab_size: Rows of the model's embedding, if they are known.
    """
    for where, message in vocabulary_misfits(recipe.vocab_size, catalog, padded_vocab_size=padded_vocab_size):
        yield Finding(level=Level.FINDING, where=where, message=message)
    yield from _two_vocabularies(recipe, directory)


def _two_vocabularies(recipe: Recipe, directory: Path) -> Iterator[Finding]:
    """One id, two meanings: nothing in tokens could tell it."""
    named = {name: source.tokenizer for name, source in sorted(recipe.sources.items()) if source.tokenizer is not None}
    if len(set(named.values())) < 2:
        return
    tokenizers, first_of = Tokenizers(directory), dict[str, str]()
    for name, tokenizer in named.items():
        with suppress(SourceUnreadable, RecipeError):  # told with the files
            first_of.setdefault(tokenizers.open(name, tokenizer).vocabulary, name)
    if len(first_of) > 1:
        first, second = list(first_of.values())[:2]
        message = (
            f"{named[second]} gives text other ids than {named[first]} of sources.{first}: a recipe is for one model, "
            "which has one vocabulary; name the same tokenizer for both"
        )
        yield Finding(level=Level.FINDING, where=f"sources.{second}.tokenizer", message=message)


# --- What lies beside the forecast: the other parts of the recipe, and functions of the user that remember.


def other_parts_findings(whole: Recipe, part: str, catalog: Catalog | None) -> Iterator[Finding]:
    """What keeps the parts that are not forecast from being planned at all."""
    if catalog is None:
        return
    for other in PARTS:
        if other == part or not has_part(whole, other):
            continue
        planned = part_of(whole, other)
        try:
            check_rows_of_part(whole, other, rows_of_sources(planned, catalog))
            of_part = open_part(catalog.directory, planned)
            Planner(planned, {name: one.sizes for name, one in of_part.sources.items()}, views=of_part.views)
        except PlanError as error:
            yield Finding(level=Level.FINDING, where=other, message=str(error).removeprefix(f"{other}: "))
        except CatalogError as error:
            yield Finding(level=Level.FINDING, where="catalog", message=str(error))


def history_findings(part: Part, catalog: Catalog, layout: Layout, result: Forecast) -> Iterator[Finding]:
    """A function of the user whose answer depends on what its process did before."""
    differs = None if result.last is None else difference_elsewhere(part, catalog, layout, *result.last)
    if differs is not None:
        yield Finding(level=Level.FINDING, where=differs[0], message=differs[1])


def rows_of_sources(part: Part, catalog: Catalog) -> dict[str, int]:
    """Rows of the files of each source."""
    return {name: catalog.sources[name].num_documents for name in part.sources}


# --- The table of findings. Whoever finds something new adds a row, and `torchmix check` shows it.


class CheckedRun(msgspec.Struct, frozen=True, kw_only=True):
    """What `torchmix check` has at hand."""

    whole: Recipe
    every: Recipe
    """The recipe with the sources of all parts."""
    part: Part
    """The one that is checked."""
    directory: Path
    """The recipe's."""
    layout: Layout
    node_ranks: int | None = None
    """Ranks of a node; None: one has all."""
    padded_vocab_size: int | None
    catalog_of_all: Catalog | None
    """The catalog of the sources of all parts; None if there is none that fits."""
    catalog_of_files: Catalog | None
    """That, or else the part's."""
    catalog: Catalog | None = None
    """The part's; None if there is none that fits."""
    forecast: Forecast | None = None

    @property
    def indexed(self) -> Catalog:
        """The part's catalog, where there is one."""
        assert self.catalog is not None, "rows behind FINDINGS_BEFORE_INDEX are asked with a catalog"
        return self.catalog

    @property
    def budget(self) -> MemoryBudget:
        """What reading takes of a node."""
        return budget_of(self.whole, self.part, self.indexed, self.layout, self.node_ranks)

    @property
    def profile(self) -> CostProfile | None:
        """What the part's sources cost; None where that was not measured of this catalog."""
        try:
            return read_profile(self.indexed.directory, self.indexed, self.part.seed)
        except CatalogError:
            return None

    @property
    def forecasted(self) -> Forecast:
        """The forecast, where there is one."""
        assert self.forecast is not None, "rows of FINDINGS_OF_FORECAST are asked with a forecast"
        return self.forecast


Find = Callable[[CheckedRun], Iterable[Finding]]

FINDINGS_BEFORE_INDEX: tuple[Find, ...] = (
    lambda seen: file_findings(seen.every, seen.directory, seen.catalog_of_files),
    lambda seen: vocabulary_findings(seen.every, seen.directory, seen.catalog_of_all, seen.padded_vocab_size),
    lambda seen: other_parts_findings(seen.whole, seen.part.name, seen.catalog_of_all),
)
"""What needs no catalog of the part."""
FINDINGS_OF_CATALOG: tuple[Find, ...] = (
    lambda seen: sources_findings(seen.part, seen.indexed, seen.whole.read, seen.budget),
    lambda seen: memory_findings(seen.budget),
    lambda seen: cell_findings(seen.part, seen.indexed),
    lambda seen: child_findings(seen.part, seen.indexed),
    lambda seen: item_findings(seen.part, seen.indexed, shares_at_start(seen.part, seen.indexed), seen.profile),
    lambda seen: loss_findings(seen.part, seen.indexed),
)
"""What the catalog of the part tells, whatever the number of steps."""
FINDINGS_OF_FORECAST: tuple[Find, ...] = (
    lambda seen: forecast_findings(seen.part, seen.forecasted),
    lambda seen: history_findings(seen.part, seen.indexed, seen.layout, seen.forecasted),
    lambda seen: fill_findings(seen.part, seen.forecasted),
    lambda seen: context_findings(seen.part, seen.indexed, seen.layout, seen.forecasted),
    lambda seen: schedule_findings(seen.part, seen.forecasted),
)
"""What N steps of the run tell."""


def findings_of(table: Iterable[Find], seen: CheckedRun) -> list[Finding]:
    """The findings of all rows of a table, in their order."""
    return [finding for find in table for finding in find(seen)]
