"""Positions in three dimensions of the tokens of a microbatch, as Qwen2-VL's rotary embeddings take them.

In: the positions of a rank's tokens, the boundaries of the microbatch, and where its images stand. Out: time, row and
column of each token. Must hold: a text token has three equal positions, each one more than the largest before it; an
image of h x w tokens begins at such a position t, and its token in row r and column c has (t, t + r, t + c); what
follows goes on at t + max(h, w). Positions restart where those of the text do, which need not be where attention stops:
a token of position p has its stretch begin p tokens before it. Cost: a few operations on the tokens.

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
    position_ids: torch.Tensor, cu_seqlens_padded: torch.Tensor, images: torch.Tensor, *, cp_rank: int
) -> torch.Tensor:
    """Positions of a rank's tokens.

    Args:
        position_ids: int64 [B, T], counted from any token on, 0 in padding; T is a slice of a CP rank, or all.
        cu_seqlens_padded: int32 [segments + 1] at full length; context parallelism slices each of them.
        images: int32 [k, 5], see COLUMNS, of this microbatch, by their tokens.
        cp_rank: Which slice it is.

    Returns:
        int64 [3, B, T].

    Raises:
        OptionError: An image has no grid of tokens.
    """
    flat = position_ids.reshape(-1)
    if not len(images):
        return position_ids.expand(3, *position_ids.shape).clone()
    _, first, tokens, rows, columns = images.to(flat.device, torch.int64).T.contiguous().unbind(0)
    if bool((rows == 0).any()):
        raise OptionError(
            "mrope_position_ids: an image has no grid of tokens, since its source cuts tiles; remove tiles or anyres "
            "from the source, or use position_ids"
        )
    place = _places(cu_seqlens_padded.to(flat.device, torch.int64), len(flat), cp_rank)
    stretch = place - flat
    gained = tokens - torch.maximum(rows, columns)  # by which positions run ahead less than tokens do
    total = torch.cat([gained.new_zeros(1), torch.cumsum(gained, 0)])  # of the images before each
    num_before_stretch = torch.searchsorted(first, stretch)
    num_begun = torch.searchsorted(first, place, right=True)
    image = (num_begun - 1).clamp(min=0)
    local = place - first[image]
    is_inside = (num_begun > num_before_stretch) & (local < tokens[image])
    before = total[torch.where(is_inside, image, num_begun)] - total[num_before_stretch]
    text = flat - before
    start = text - local
    across = columns[image]
    found = [start, start + local // across, start + local % across]
    return torch.stack([torch.where(is_inside, axis, text) for axis in found]).reshape(3, *position_ids.shape)


def _places(borders: torch.Tensor, num_tokens: int, cp_rank: int) -> torch.Tensor:
    """[num_tokens] where each token of a slice stands in the microbatch at full length."""
    token = torch.arange(num_tokens, device=borders.device)
    cp = int(borders[-1]) // num_tokens
    if cp == 1:
        return token
    segment = torch.searchsorted(borders // cp, token, right=True) - 1
    chunk = borders.diff()[segment] // (2 * cp)
    local = token - borders[segment] // cp
    skipped = torch.where(local < chunk, cp_rank, 2 * (cp - 1) - cp_rank)  # chunks of other ranks before it
    return borders[segment] + skipped * chunk + local
