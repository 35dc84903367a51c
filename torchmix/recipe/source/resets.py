"""What restarts where a document ends, and where a token inside a row ends one.

In: the packing and the sources of a recipe. Out: whether attention, positions and the loss restart there, and after
which ids. Must hold: each of the three can be set without the others, like Megatron's `--reset-attention-mask`,
`--reset-position-ids` and `--eod-mask-loss`. Cost: none.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchmix.recipe.structs import Packing, Source


def resets_attention(packing: Packing) -> bool:
    """Whether attention stops at the end of a document."""
    return packing.boundaries == "document"


def resets_positions(packing: Packing) -> bool:
    """Whether positions count from 0 in each document; else they count through a sample."""
    return (packing.positions or packing.boundaries) == "document"


def masks_resets(packing: Packing) -> bool:
    """Whether a `reset_id` has no label."""
    return packing.reset_loss == "mask"


def sources_with_resets(sources: Mapping[str, Source]) -> dict[str, int]:
    """The `reset_id` of each source that has one."""
    return {name: source.reset_id for name, source in sources.items() if source.reset_id is not None}
