"""The orders of a planner, made to follow edits of their rows.

In: the streams of a part with their orders, and the edits that a cursor remembers. Out: orders whose edited epochs have
eras. Must hold: orders follow the edits that were entered last, and no others. Cost: that of `replay.py` where the
edits are others than before, else a comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchmix.catalog.sizes import SourceSizes
from torchmix.catalog.views.earlier import EarlierRows
from torchmix.mixture.edited_windows import EraWindows
from torchmix.mixture.order import StreamOrder
from torchmix.mixture.spaces.space import Space
from torchmix.planner.eras.records import NO_ERAS, Eras
from torchmix.planner.eras.replay import Members, Replay
from torchmix.planner.eras.versions import StreamRows, Versions
from torchmix.planner.stream_order import order_of_space
from torchmix.recipe.parts import Part


class EditedOrders:
    """Which edits the orders of a part follow."""

    def __init__(
        self,
        part: Part,
        orders: Sequence[StreamOrder],
        sizes: Mapping[str, SourceSizes],
        fingerprints: Mapping[str, str],
        earlier: EarlierRows | None,
    ) -> None:
        """Begin with none.

        Args:
            part: What is planned.
            orders: Of each stream, by sorted name.
            sizes: Of each source.
            fingerprints: Of each source and view; empty: not known.
            earlier: Rows that these had before.
        """
        self._part, self._orders, self.earlier = part, orders, earlier
        self.members: dict[str, Members] = {
            name: tuple((one, fingerprints[one]) for one in stream.members) if fingerprints else ()
            for name, stream in sorted(part.streams.items())
        }
        """Members of each stream, with the fingerprints of their rows."""
        self._versions = Versions(part, sizes, earlier)
        self._entered = NO_ERAS
        self._edited: dict[str, tuple[int, list[EraWindows]]] = {}

    def rows(self, stream: str, members: Members) -> StreamRows:
        """A version of a stream; see `Versions.rows`."""
        return self._versions.rows(stream, members)

    def sources_of(self, members: Members) -> set[str]:
        """Sources of members, as far as the part still has them."""
        return self._versions.sources_of(members)

    def enter(self, eras: Eras) -> bool:
        """Make the orders follow edits; whether they followed others.

        Raises:
            StateMismatch: The catalog does not have the rows that a stream had before an edit.
            StateError: A place that no run comes to.
        """
        if eras.edits == self._entered.edits:
            return False
        self._edited = Replay(self._versions, self.members, self._order).eras(eras)
        self._entered = eras
        self.take(self._orders)
        return True

    def num_windows_of(self, eras: Eras, before: Mapping[str, Members], name: str, epoch: int) -> int:
        """Windows of an epoch of a stream, with the rows that streams had before an edit.

        Args:
            eras: The edits before that.
            before: Members of all streams then.
            name: The stream.
            epoch: Its epoch.

        Raises:
            StateMismatch, StateError: As `enter`.
        """
        edited = Replay(self._versions, before, self._order).eras(eras) if eras.edits else {}
        of_epoch, windows = edited.get(name, (epoch, []))
        if windows and of_epoch == epoch:
            return windows[-1].start + windows[-1].num_windows
        return self._order(name, self.rows(name, before[name]).space, None).num_windows

    def take(self, orders: Sequence[StreamOrder]) -> None:
        """Let other orders of the same streams follow the edits, as those of longer samples."""
        self._orders = orders
        for order in orders:
            order.edit(*self._edited.get(order.name, (0, ())))

    def forget(self, eras: Eras) -> None:
        """Take the edits that are still needed of those that were entered: orders need nothing of the others."""
        self._entered = eras

    def _order(self, name: str, space: Space, era: int | None) -> StreamOrder:
        return order_of_space(self._part, name, space, era=era)
