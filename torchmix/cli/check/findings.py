"""What is wrong, or worth knowing, before a run starts.

In: the recipe, its open catalog, and a forecast of N steps. Out: findings: what, where, and what to do. Must hold: a
fault that would stop or starve a run is a finding; what a run survives as the recipe says is a note. Cost: none; the
forecast has paid.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.catalog.bad_rows import listed_text
from torchmix.catalog.sizes import DECODED_TOKEN_BYTES
from torchmix.catalog.store import Catalog, SourceCatalog
from torchmix.cli.check.stream_facts import where_of_stream
from torchmix.cli.selections import rows_and_tokens, shares_of_sources
from torchmix.cli.terminal import ExitCode, count_text, percent_text
from torchmix.formats.table import READ_AS
from torchmix.planner.forecast.figures import Forecast, SourceForecast
from torchmix.recipe.build import listed
from torchmix.recipe.byte_sizes import bytes_text, parse_bytes
from torchmix.recipe.mixture.shares_of_part import parse_shares
from torchmix.recipe.parts import Part
from torchmix.recipe.ramp import stages_of
from torchmix.recipe.source.documents import rows_of
from torchmix.recipe.structs import Read

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
    """Worth knowing; the run goes on."""
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


def sources_findings(part: Part, catalog: Catalog, read: Read) -> Iterator[Finding]:
    """Findings in what the catalog holds of each source, whatever the number of steps."""
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
        if longest_tokens > capacity and part.packing.overflow == "split":
            longest_of_source[name] = longest_tokens
        yield from _costly_files(source, where)
        if source.tokenizer not in (None, "bytes") and source.end_id is None:
            message = "no token ends its documents, so a model does not learn where they end; name one by end_id"
            yield Finding(level=Level.NOTE, where=f"{where}.end_id", message=message)
    yield from _long_documents(longest_of_source, shares, capacity)
    yield from _large_documents(part, catalog, read)
    by_page = part.shuffle.method == "page"
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
    return [source for source in sources if READ_AS[source.format].type_in_file is None]


def open_document_bytes(part: Part, catalog: Catalog) -> int:
    """Memory that a reader may need for documents that are drawn in part: the longest one of each source."""
    if part.packing.overflow != "split":
        return 0
    longest = (source.max_document_tokens for source in _decoded(part, catalog))
    return DECODED_TOKEN_BYTES * sum(tokens for tokens in longest if tokens > part.batch.length)


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
    present_bytes = all_bytes = 0
    for source in _decoded(part, catalog):
        num_windows = -(-source.sizes.num_pages // source.sizes.window_pages)
        used = len(used_tokens(part, source)) / source.num_documents
        source_bytes = round(_kept_bytes(part, source) * used)
        present_bytes += source_bytes // num_windows
        all_bytes += source_bytes * min(num_windows, 2) // num_windows
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
        message = f"{fact}; from there on the other sources have its share"
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
