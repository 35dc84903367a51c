"""Positions in three dimensions of the tokens of a microbatch, as Qwen2-VL's rotary embeddings take them.

In: the positions of a rank's tokens, the boundaries of the microbatch, and where its images stand. Out: time, row and
column of each token. Must hold: a text token has three equal positions, each one more than the largest before it; an
image of h x w tokens begins at such a position t, and its token in row r and column c has (t, t + r, t + c); what
follows goes on at t + max(h, w). Positions restart where those of the text do. Cost: a few operations on the tokens.

The rule is `get_rope_index` of Qwen2-VL in transformers, for images: there two images without a token between them are
taken for one, here they are two.
"""

from __future__ import annotations

import torch

from torchmix.errors import OptionError

COLUMNS = ("microbatch", "token", "tokens", "rows", "columns")
"""The table of images: first token in the microbatch at full length, tokens, and their grid; 0 x 0 where the size
rule cuts tiles."""


def mrope_position_ids(
    position_ids: torch.Tensor, cu_seqlens_padded: torch.Tensor, images: torch.Tensor
) -> torch.Tensor:
    """Positions of a rank's tokens.

    Args:
        position_ids: int64 [B, T], from 0 on in each stretch between boundaries; T is a slice of a CP rank, or all.
        cu_seqlens_padded: int32 [segments + 1] at full length.
        images: int32 [k, 5], see COLUMNS, of this microbatch, by their tokens.

    Returns:
        int64 [3, B, T].

    Raises:
        OptionError: An image has no grid of tokens.
    """
    flat = position_ids.reshape(-1)
    if not len(images):
        return position_ids.expand(3, *position_ids.shape).clone()
    _, place, tokens, rows, columns = images.to(flat.device, torch.int64).T.contiguous().unbind(0)
    if bool((rows == 0).any()):
        raise OptionError(
            "mrope_position_ids: an image has no grid of tokens, since its source cuts tiles; remove tiles or anyres "
            "from the source, or use position_ids"
        )
    borders = cu_seqlens_padded.to(flat.device, torch.int64)
    length = int(borders[-1])
    cp = length // len(flat)
    token_segment = torch.searchsorted(borders // cp, torch.arange(len(flat), device=flat.device), right=True) - 1
    segment = torch.searchsorted(borders, place, right=True) - 1
    offset = place - borders[segment]
    gained = tokens - torch.maximum(rows, columns)  # by which positions run ahead less than tokens do
    total = torch.cumsum(gained, 0)
    first = torch.searchsorted(segment, segment)  # of the images of the same segment
    before = total - gained - torch.where(first > 0, total[first - 1], 0)
    last = torch.searchsorted(segment * length + offset, token_segment * length + flat, right=True) - 1
    is_behind = (last >= 0) & (segment[last.clamp(min=0)] == token_segment)
    image = last.clamp(min=0)
    local = flat - offset[image]
    is_inside = is_behind & (local < tokens[image])
    start = offset[image] - before[image]
    text = flat - torch.where(is_behind, before[image] + gained[image], 0)
    across = columns[image]
    found = [start, start + local // across, start + local % across]
    return torch.stack([torch.where(is_inside, axis, text) for axis in found]).reshape(3, *position_ids.shape)
