"""The share of a role, and what single ranks of it get beside that, as tensors and as bytes of the wire.

In: named tensors. Out: payloads; and tensors again, as views into the bytes that came. Must hold: what came is checked
before memory is taken for it. Cost: one copy at the leader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from torchmix.errors import WireError
from torchmix.parallel.array_form import DTYPES
from torchmix.parallel.shares.wire import (
    MAX_DESCRIPTION_BYTES,
    MAX_PAYLOAD_BYTES,
    Block,
    Envelope,
    decode_payload,
    encode_payload,
)

_DTYPE_OF_NAME: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
_NAME_OF_DTYPE = {dtype: name for name, dtype in _DTYPE_OF_NAME.items()}

OWN = "own.sizes"
"""Name of an array of a share: int64 [ranks, 2], bytes of the description and of the whole payload that follow for each
rank alone; 0 and 0 for the leader itself."""


class Share(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The data of one global batch that the ranks of one role receive."""

    header: bytes
    """The caller's own message, opaque here."""
    tensors: dict[str, torch.Tensor]
    """CPU tensors of any shape, with dtypes of `array_form.DTYPES`; their order is kept."""
    own: Mapping[int, dict[str, torch.Tensor]] = msgspec.field(default_factory=dict)
    """Tensors for one rank alone, by global rank: for each rank of the role but the leader, or for none."""


def blocks_of(tensors: Mapping[str, torch.Tensor]) -> list[Block]:
    """Tensors as they travel."""
    return [_block_of(name, tensor) for name, tensor in tensors.items()]


def tensors_of(blocks: Sequence[Block], payload: torch.Tensor) -> dict[str, torch.Tensor]:
    """Arrays that came, as views of the torch buffer, so that they know whether it is pinned."""
    return {block.name: _tensor_of(block, payload) for block in blocks}


def own_payloads(share: Share, ranks: Sequence[int]) -> tuple[dict[str, torch.Tensor], dict[int, NDArray[np.uint8]]]:
    """What ranks get alone: the array that announces it, beside the share's, and the payload of each.

    Args:
        share: Of the role.
        ranks: Those of the role, the leader perhaps among them.
    """
    if not share.own:
        return {}, {}
    sizes = np.zeros((len(ranks), 2), np.int64)
    payloads = {}
    for number, rank in enumerate(ranks):
        if rank in share.own:
            described, payloads[rank] = encode_payload(b"", blocks_of(share.own[rank]))
            sizes[number] = described, payloads[rank].size
    return {OWN: torch.from_numpy(sizes)}, payloads


def own_size(tensors: dict[str, torch.Tensor], envelope: Envelope, *, place: int, num_ranks: int) -> Envelope | None:
    """Take the announcement out of a share that came: what follows for the rank at `place` of its role, if anything.

    Raises:
        WireError: It is none, with `rank` the leader's.
    """
    sizes = tensors.pop(OWN, None)
    if sizes is None:
        return None
    is_form = sizes.dtype == torch.int64 and tuple(sizes.shape) == (num_ranks, 2)
    described, total = sizes[place].tolist() if is_form else (-1, -1)
    if not (0 < described <= total <= MAX_PAYLOAD_BYTES and described <= MAX_DESCRIPTION_BYTES):
        raise WireError(
            f"what came from leader rank {envelope.leader} announces {tuple(sizes.shape)} sizes of arrays for single "
            f"ranks, {described} and {total} for this one, of {num_ranks}",
            envelope.leader,
        )
    return replace(envelope, description_bytes=described, header_bytes=0, payload_bytes=total)


def own_tensors(envelope: Envelope, payload: torch.Tensor) -> dict[str, torch.Tensor]:
    """The arrays that came for this rank alone."""
    return tensors_of(decode_payload(envelope, payload.numpy())[1], payload)


def _block_of(name: str, tensor: torch.Tensor) -> Block:
    assert tensor.device.type == "cpu", f"tensor {name!r} is on {tensor.device}; the exchange runs on the CPU"
    assert tensor.dtype in _NAME_OF_DTYPE, f"tensor {name!r} is {tensor.dtype}; the wire carries {DTYPES}"
    flat = tensor.detach().contiguous().view(-1)
    # An empty array of numpy may have a stride of 0, and then has no view of another dtype.
    values = flat.view(torch.uint8).numpy() if len(flat) else np.zeros(0, np.uint8)
    return Block(name=name, dtype=_NAME_OF_DTYPE[tensor.dtype], shape=tuple(tensor.shape), values=values)


def _tensor_of(block: Block, payload: torch.Tensor) -> torch.Tensor:
    start = block.values.ctypes.data - payload.data_ptr() if block.values.size else 0
    flat = payload[start : start + block.values.size].view(_DTYPE_OF_NAME[block.dtype])
    return flat.view(block.shape)
