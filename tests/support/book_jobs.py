"""What the steps of docs/formats.md depend on, as plain values; see `book_order`.

In: a run of docs/vectors.json. Out: a `BookJob`, and the streams that it draws from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

from tests.support.book_contexts import BookRuns
from tests.support.book_order import BookSource
from tests.support.book_streams import BookStream, flat_of, selection_of, stream_of, window_pages_of


class Piece(NamedTuple):
    """A part of a document; `stream` is what gave it, `source` where it lies."""

    stream: str
    source: str
    epoch: int
    row: int
    start: int
    tokens: int
    drawn_step: int


Row = tuple[int, int, int, Piece]
"""Sample, slot, offset in the sample, piece."""


@dataclass(frozen=True, kw_only=True)
class BookJob:
    """What the order depends on, and a layout."""

    seed: int
    ramp: Sequence[tuple[int, int]]
    """(from_step, samples) of each stage."""
    longer: Sequence[tuple[int, int]] = ()
    """(from_step, length) of stages with longer samples."""
    length: int
    method: str
    overflow: str
    align_tokens: int
    shares: Mapping[str, Fraction]
    max_epochs: Mapping[str, int] = field(default_factory=dict)
    """Sources that have a last epoch; the others take over their shares."""
    documents: Mapping[str, tuple[Fraction, Fraction]] = field(default_factory=dict)
    """The first and the last row, as fractions, of sources of which not all rows are used."""
    cut: frozenset[str] = frozenset()
    """Sources whose documents flow into what whole ones leave."""
    overflows: Mapping[str, str] = field(default_factory=dict)
    """The overflow of each source that has one of its own."""
    longest: Mapping[str, int] = field(default_factory=dict)
    """`max_length` of sources that have one."""
    one_pass: bool = False
    """What is left when all sources have run out still makes steps."""
    dp: int = 1
    micro_batch_size: int = 1
    cost: tuple[int, int, int] = (1, 0, 0)
    """Per token, per pair of tokens of a piece, and per pair of tokens of a sample."""
    runs: BookRuns | None = None
    """With the method `whole`: the runs of ranks."""

    def samples(self, step: int) -> int:
        """Section "Ramp"."""
        return [samples for from_step, samples in self.ramp if from_step <= step][-1]

    def length_of(self, step: int) -> int:
        """Section "Ramp": tokens of a sample; `length` is that of step 0."""
        return [self.length, *(length for from_step, length in self.longer if from_step <= step)][-1]

    def longest_of(self, source: str, step: int) -> int:
        """Section "Draw": a document of a source that has more tokens is too long."""
        return min(self.length_of(step), self.longest.get(source, self.length_of(step)))

    def overflow_of(self, source: str) -> str:
        """Section "Draw": what happens to it then."""
        return self.overflows.get(source, self.overflow)


def name_hash(stream: str, source: str) -> int:
    """Section "Keys and hashes"."""
    name = source.encode() if stream == source else stream.encode() + b"\0" + source.encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "little")


def fraction(percent: str) -> Fraction:
    """A share as the recipe writes it."""
    return Fraction(percent.removesuffix("%")) / 100


def job_of_run(run: dict[str, Any]) -> BookJob:
    """The job of a run of docs/vectors.json."""
    model = run["model"]
    per_token = model["layers"] * (2 * model["hidden"] + 2 * model["hidden"] + 3 * model["ffn"])
    whole = run["boundaries"] == "none"  # then every sample costs the same
    return BookJob(
        seed=run["seed"],
        ramp=run["samples"] if isinstance(run["samples"], list) else [(0, run["samples"])],
        length=run["length"],
        method=run["method"],
        overflow=run["overflow"],
        align_tokens=run["align_tokens"],
        shares={name: Fraction(share) for name, share in run["shares"].items()},
        max_epochs=run["max_epochs"],
        documents={name: tuple(map(fraction, part)) for name, part in run.get("documents", {}).items()},
        one_pass=run.get("one_pass", False),
        dp=run["dp"],
        micro_batch_size=run["micro_batch_size"],
        cost=(per_token, *((0, model["layers"]) if whole else (model["layers"], 0))),
    )


def streams_of_run(run: dict[str, Any], sources: Mapping[str, BookSource]) -> dict[str, BookStream]:
    """The streams of a run by name: those with a share."""
    known = {name: stream_of(source) for name, source in sources.items()}
    for name, view in run.get("views", {}).items():
        known[name] = selection_of(name, sources[view["source"]], view["rows"], view["window_pages"])
    for name, members in run.get("flats", {}).items():
        children = [known[member] for member in sorted(members)]
        known[name] = flat_of(name, children, window_pages_of(children, run["window_pages"]))
    return {name: known[name] for name in sorted(run["shares"])}
