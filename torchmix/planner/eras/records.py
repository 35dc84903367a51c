"""What a run remembers of the rows that its streams had before they were edited.

In: what streams had and where they stood when an edit was accepted. Out: values for the cursor and the state. Must
hold: they are enough, with the catalog, to make every window that is still to come of the epochs that were edited; what
no such epoch needs is forgotten. Cost: some 60 bytes for each stream of an edit, until its epoch ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from torchmix.array_types import Int64Array

NO_COUNTS: Mapping[str, int] = {}


class StreamBefore(msgspec.Struct, frozen=True, kw_only=True):
    """A stream before an edit of its rows."""

    name: str
    epoch: int
    window: int
    offset: int
    members: tuple[tuple[str, str], ...]
    """Name of each member, and the fingerprint of its rows; none where the edit added the stream."""
    after: tuple[tuple[str, str], ...]
    """The members after the edit; none where it removed the stream. Edits in between may be forgotten."""


class Eras(msgspec.Struct, frozen=True, kw_only=True):
    """Edits of rows that still matter, in their order; and how many each stream has seen."""

    edits: tuple[tuple[StreamBefore, ...], ...] = ()
    """The streams whose rows each edit changed, and those that took rows or gave them away."""
    counts: Mapping[str, int] = msgspec.field(default_factory=lambda: NO_COUNTS)
    """By stream; those without edits are left out."""


NO_ERAS = Eras()


def still_needed(eras: Eras, streams: Sequence[str], epoch: Int64Array, max_epochs: Int64Array) -> Eras:
    """The edits that an epoch which is not over follows from; the last one that a stream may give is never over.

    Args:
        eras: All that are remembered.
        streams: Names of the streams.
        epoch: [S] the epoch that each stands in.
        max_epochs: [S] epochs that each may give.
    """
    if not eras.edits:
        return eras
    last = [
        {one, one - 1} if one >= most else {one} for one, most in zip(epoch.tolist(), max_epochs.tolist(), strict=True)
    ]
    epochs = dict(zip(streams, last, strict=True))
    kept = []
    for edit in reversed(eras.edits):
        if any(before.epoch in epochs.get(before.name, ()) for before in edit):
            kept.append(edit)
            for before in edit:  # what one has given decides what another one gets
                epochs.setdefault(before.name, set()).add(before.epoch)
    return eras if len(kept) == len(eras.edits) else Eras(edits=tuple(reversed(kept)), counts=eras.counts)
