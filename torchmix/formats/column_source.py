"""What sources share whose rows are values of one named column, or member.

In: the settings of a source. Out: what they say about the encoding of its rows. Must hold: a format that is read so
adds files and pages alone. Cost: none.
"""

from __future__ import annotations

import msgspec

from torchmix.formats.column import Kind, row_encoder_of, transform_id_of, vocab_size_of
from torchmix.transform.bytes_tokenizer import BYTES
from torchmix.transform.maps.map_encoder import MapEncoder
from torchmix.transform.row_encoder import RowEncoder
from torchmix.transform.tokenizer import Tokenizer


class ColumnSource(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of such a source."""

    name: str
    column: str
    kind: Kind
    tokenizer: Tokenizer = BYTES
    """Encodes texts; unused with `tokens`."""
    map: MapEncoder | None = None
    """The function that rows go through; lengths are measured once their pages are known."""

    @property
    def transform_id(self) -> str:
        """See `source.FormatSource.transform_id`."""
        return transform_id_of(self.kind, self.tokenizer, self.map)

    @property
    def vocab_size(self) -> int | None:
        """See `source.FormatSource.vocab_size`."""
        return vocab_size_of(self.kind, self.tokenizer, self.map)

    @property
    def row_encoder(self) -> RowEncoder | None:
        """See `source.FormatSource.row_encoder`."""
        return row_encoder_of(self.kind, self.tokenizer, self.map)
