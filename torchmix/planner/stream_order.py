"""A stream of a part -> its order: which rows are used, and how many tokens of each document count.

A stream that would give nothing is refused here, since a draw from it would never end. Cost: usually a check of the
first documents; all lengths are read only when `overflow: error` has to find a document that is too long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from torchmix.catalog.sizes import MAX_DOCUMENT_TOKENS, SourceSizes, window_pages_of
from torchmix.catalog.store import View
from torchmix.errors import CatalogMissing, DocumentTooLong, PlanError
from torchmix.mixture.order import StreamOrder
from torchmix.mixture.spaces import FlatSpace, RowRange, SourceSpace, Space, ViewSpace, drawn_units, windows_of_flat
from torchmix.mixture.windows import Denied
from torchmix.recipe.amounts import parse_bytes
from torchmix.recipe.fingerprint import digest_of
from torchmix.recipe.parts import Part, part_of
from torchmix.recipe.sources import FORMATS, format_of, longest_of, overflow_of, rows_of
from torchmix.recipe.streams import Stream
from torchmix.recipe.structs import Overflow, Recipe

DOCUMENT_CHARGE = 64
"""What a document costs where shares count documents: a debt is then exact to a 64th of one."""
NO_VIEWS: Mapping[str, View] = {}


def check_rows_of_part(recipe: Recipe, part: str, num_rows: Mapping[str, int]) -> None:
    """Refuse a part in which a source has no row. A small source may have none in a small part of a `split`.

    Args:
        recipe: A checked recipe, with all of its parts.
        part: `train`, `validation` or `test`.
        num_rows: Rows of each source of the part.

    Raises:
        PlanError: Names the part, each such source with its rows, and what to do.
        RecipeError: The recipe has no such part.
    """
    faults = []
    for name, source in sorted(part_of(recipe, part).sources.items()):
        start, stop = rows_of(source, num_rows[name])
        if start == stop:
            first, last = source.documents or ("0%", "100%")
            faults.append(f"none of the {num_rows[name]:,} rows of source '{name}' lies in its {first} to {last}")
    if not faults:
        return
    remedy = "widen `documents` of these sources, or leave them out of this part"
    if recipe.split is not None:
        remedy = (
            f"give {part} a larger weight in `split`; or replace `split` with `documents` for the sources of each "
            f"part, and leave these sources out of {part}"
        )
    raise PlanError(f"{part}: {'; '.join(faults)}. To mend it, {remedy}")


def order_of_stream(
    part: Part,
    name: str,
    sizes: Mapping[str, SourceSizes],
    views: Mapping[str, View] = NO_VIEWS,
    denied: Denied | None = None,
    *,
    length: int | None = None,
) -> StreamOrder:
    """The order of a stream. The recipe's used rows and overflow rule apply before any draw.

    Args:
        part: What is planned.
        name: The stream.
        sizes: Sizes of the part's sources, of those of the stream at least.
        views: Rows of members that do not have all rows of their source.
        denied: Documents that are not given, by the number of their source.
        length: Tokens of a sample; None: those of the first step. It alters no position.

    Raises:
        CatalogMissing: The rows of a member are not known.
        DocumentTooLong: `overflow: error`, and a used document exceeds a sample.
        PlanError: The stream would give no tokens at all.
    """
    source = part.streams[name].sources[0]  # checked: all of its sources have one rule
    overflow, longest = _rule_of_source(part, source, part.batch.length if length is None else length)
    space = space_of_stream(part, name, sizes, views)
    has_long = space.longest_tokens > longest  # the catalog's maximum over all rows: no lengths are read
    if overflow == "error" and has_long:
        _refuse_long_documents(part, name, space, longest)
    drops = overflow == "drop" and has_long
    may_be_empty = part.streams[name].is_cell  # then it has no share, and is never drawn from
    if not may_be_empty and not _has_tokens(space.lengths(), at_most=longest if drops else MAX_DOCUMENT_TOKENS):
        raise _no_tokens(part, name, space, sizes)
    mine = {s: rows for s, rows in (denied or {}).items() if sorted(part.sources)[s] in part.streams[name].sources}
    order = order_of_space(part, name, space, source, length=length, denied=mine)
    if mine and not may_be_empty and not epoch_tokens(order, [sizes[source] for source in sorted(part.sources)], mine):
        raise PlanError(
            f"stream '{name}' would give no tokens: deny-lists name all of its documents that {part.name} has; remove "
            f"it from the recipe, or some of its documents from the lists"
        )
    return order


def order_of_space(
    part: Part,
    name: str,
    space: Space,
    source: str,
    *,
    length: int | None = None,
    denied: Denied | None = None,
    era: int | None = None,
) -> StreamOrder:
    """The order of a stream over some rows, without a look at them.

    Args:
        part, name, length: As in `order_of_stream`; the part may have the stream no more.
        space: The rows.
        source: One of those that they lie in: all have one rule for what is too long.
        denied, era: As in `StreamOrder`.
    """
    length = part.batch.length if length is None else length
    overflow, longest = _rule_of_source(part, source, length)
    counts_all = space.longest_tokens <= longest or overflow not in ("truncate", "drop")
    counted = None if counts_all else partial(counted_tokens, part, source, length)
    # A stream's positions count pieces of the shortest samples, or else documents, whatever the length of samples.
    has_pieces = overflow == "split" and not part.counts_documents
    piece_tokens = longest_of(part.sources[source], part.batch.length)
    return StreamOrder(
        name,
        space,
        seed=part.seed,
        method=part.shuffle.method,
        counted=counted,
        piece_tokens=piece_tokens if has_pieces else None,
        charge=DOCUMENT_CHARGE if part.counts_documents else None,
        unit_pieces=longest // piece_tokens if has_pieces else 1,
        denied=denied,
        era=era,
    )


def _rule_of_source(part: Part, source: str, length: int) -> tuple[Overflow, int]:
    """What happens to documents of a source that are too long in samples of `length` tokens, and the longest others."""
    return overflow_of(part.sources[source], part.packing), longest_of(part.sources[source], length)


def counted_tokens(part: Part, source: str, length: int, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Tokens that documents of a source count for in samples of `length` tokens; 0 for those that are left out."""
    overflow, longest = _rule_of_source(part, source, length)
    if overflow == "truncate":
        return np.minimum(tokens, longest)
    return np.where(tokens <= longest, tokens, 0) if overflow == "drop" else tokens


def epoch_tokens(order: StreamOrder, sizes: Sequence[SourceSizes] = (), denied: Denied | None = None) -> int:
    """Tokens that one epoch of a stream gives: of the rows used, under the recipe's overflow rule.

    Args:
        order: The order of the stream.
        sizes: The sizes of each source of the part, by sorted name, where documents are denied.
        denied: Documents that are not given.
    """
    total = sum(int(order.counted(block).sum(dtype=np.int64)) for block in order.space.lengths())
    for source, rows in (denied or {}).items():
        held = rows[order.space.holds(source, rows)]
        total -= int(order.counted(sizes[source].tokens[held]).sum(dtype=np.int64))
    return total


def space_of_stream(part: Part, name: str, sizes: Mapping[str, SourceSizes], views: Mapping[str, View]) -> Space:
    """The rows that a stream draws from; see `order_of_stream`."""
    stream = part.streams[name]
    if not stream.is_flat:
        return _space_of_member(part, stream.members[0], sizes, views)
    return flat_space(part, [_space_of_member(part, member, sizes, views) for member in stream.members])


def flat_space(part: Part, spaces: Sequence[Space]) -> FlatSpace:
    """The space of a flat over spaces, sorted by name."""
    members = [_flat_member(space) for space in spaces]
    num_pages = sum(map(drawn_units, members))
    counted_pages = sum(-(-drawn_units(member) // _pages_as_one(part, member)) for member in members)
    window_pages = window_pages_of(
        num_pages=num_pages,
        num_tokens=sum(member.num_tokens for member in members),
        most_pages=part.shuffle.window_pages * num_pages // max(1, counted_pages),
        most_bytes=parse_bytes(part.shuffle.window_bytes, where="shuffle.window_bytes"),
    )
    return FlatSpace(members, num_windows=windows_of_flat(members, window_pages))


def _pages_as_one(part: Part, space: Space) -> int:
    """Pages of a member that count as one of `shuffle.window_pages`, as in a window of its source alone."""
    if not isinstance(space, SourceSpace | ViewSpace):
        return 1
    return FORMATS[format_of(part.sources[sorted(part.sources)[space.source]])].pages_as_one


def _flat_member(space: Space) -> Space:
    """A member whose rows that are not used do not exist: they would only thin the windows of the flat out."""
    if not isinstance(space, SourceSpace) or space.used_rows() == (0, space.num_rows):
        return space
    return ViewSpace(space.source, space.sizes, RowRange(*space.used_rows()), window_units=space.window_units)


def space_of_rows(part: Part, source: str, sizes: SourceSizes, view: View | None = None) -> Space:
    """The rows of a source, or of a view of it, that the part uses."""
    number, bounds = sorted(part.sources).index(source), rows_of(part.sources[source], sizes.num_documents)
    if view is None:
        return SourceSpace(number, sizes, rows=bounds)
    first, last = np.searchsorted(view.kept, bounds)
    return ViewSpace(number, sizes, view.kept[first:last], window_units=view.window_units)


def _space_of_member(part: Part, name: str, sizes: Mapping[str, SourceSizes], views: Mapping[str, View]) -> Space:
    if name in views:
        return space_of_rows(part, views[name].source, sizes[views[name].source], views[name])
    if name not in part.sources:
        raise CatalogMissing(f"the catalog does not have the rows of {name!r}; run `torchmix index` with this recipe")
    return space_of_rows(part, name, sizes[name])


def tokens_of_streams(
    part: Part,
    sizes: Mapping[str, SourceSizes],
    views: Mapping[str, View],
    denied: Denied | None,
) -> dict[str, int]:
    """Tokens of all rows of each stream's members, for groups that share by size; documents where these are counted.

    A cell that can give no token counts 0. `denied` as in `order_of_stream`.
    """

    def size_of(member: str) -> int:
        if not part.counts_documents:
            return (views[member] if member in views else sizes[member]).num_tokens
        return len(views[member].kept) if member in views else sizes[member].num_documents

    found = {name: sum(map(size_of, stream.members)) for name, stream in part.streams.items()}
    of_source = [sizes[name] for name in sorted(part.sources)]
    for name, stream in part.streams.items():
        if stream.is_cell and found[name]:
            order = order_of_stream(part, name, sizes, views, denied)
            has_tokens = any(bool(np.any(order.counted(block))) for block in order.space.lengths())
            if not has_tokens or (denied and not epoch_tokens(order, of_source, denied)):
                found[name] = 0
    return found


def stream_fingerprint(stream: Stream, of_member: Mapping[str, str]) -> str:
    """16 hex digits over a stream's rows: the catalog's of a source or view, else a digest of its members' and theirs.

    Args:
        stream: The stream.
        of_member: Fingerprint of each source and view; empty: not known, and so is the stream's.
    """
    if not of_member:
        return ""
    if not stream.is_flat:
        return of_member[stream.members[0]]
    return digest_of([[name, of_member[name]] for name in stream.members])


def _refuse_long_documents(part: Part, name: str, space: Space, length: int) -> None:
    kind = "source" if part.streams[name].is_source else "stream"
    row = space.used_rows()[0]
    for block in space.lengths():
        if int(block.max(initial=0)) > length:
            at = int(np.argmax(block))
            which = f"the document at row {row + at}" if part.streams[name].is_source else "a document"
            raise DocumentTooLong(
                f"{kind} '{name}': {which} has {int(block[at])} tokens, {_bound_of(part, name)} {length}, "
                f"and the recipe says `overflow: error`; use split, truncate or drop, or a longer one"
            )
        row += len(block)


def _bound_of(part: Part, name: str) -> str:
    is_own = part.sources[part.streams[name].sources[0]].packing.max_length is not None
    return "its packing.max_length is" if is_own else "batch.length is"


def _no_tokens(part: Part, name: str, space: Space, sizes: Mapping[str, SourceSizes]) -> PlanError:
    which, why = "", ""
    if part.streams[name].is_source:
        (start, stop), num_rows = space.used_rows(), sizes[name].num_documents
        which = "" if stop - start == num_rows else f" of its rows {start} to {stop}"
        if start == stop and num_rows:
            why = f"none of its {num_rows:,} rows lies in the part that is used (rows {start} to {stop})"
    if not why:
        longest = longest_of(part.sources[part.streams[name].sources[0]], part.batch.length)
        why = f"`overflow: drop` drops all{which} beyond {longest} tokens"
        if not _has_tokens(space.lengths(), at_most=MAX_DOCUMENT_TOKENS):
            why = f"all documents{which} are empty"
    kind = "source" if part.streams[name].is_source else "stream"
    return PlanError(
        f"{kind} '{name}' would give no tokens: {why}; remove it from the recipe, or change `overflow` or the rows "
        f"that are used"
    )


def _has_tokens(blocks: Iterable[NDArray[np.int32]], *, at_most: int) -> bool:
    """Whether some document has 1 to `at_most` tokens; usually only the first block is read."""
    return any(bool(np.any((block > 0) & (block <= at_most))) for block in blocks)
