"""Qwen2-Audio of transformers on torchmix's batches: Whisper's encoder on this rank's sounds, the model on its texts.

A model that takes all positions of Whisper's encoder differs in `encoded` alone. docs/models.md goes through it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchmix.constructor.fields import Microbatch, ModuleBatch
from torchmix.parallel import Routes, place_rows


def encoded(model: Any, batch: ModuleBatch, tower: Callable[[ModuleBatch], torch.Tensor]) -> torch.Tensor:
    """Rows of the sounds that this rank encodes, [rows, width]; there may be none."""
    encoder, projector = model.model.audio_tower, model.model.multi_modal_projector
    features = tower(batch)  # [chunks, mels, 3000]
    weights = [*encoder.parameters(), *projector.parameters()]
    if not len(features):
        return sum(weight.sum() for weight in weights) * features.new_zeros(0, projector.linear.out_features)
    columns = features.shape[-1]
    # All chunks of a sound but the last are full; the silence behind it gives no rows, and nothing attends to it.
    heard = batch.arrays["feature_lengths"].flatten().long().repeat_interleave(batch.segments.long())
    number = torch.cat([torch.arange(count) for count in batch.segments.tolist()])
    heard = (heard - number.to(heard.device) * columns).clamp(max=columns)
    positions, tokens = encoder._get_feat_extract_output_lengths(heard)
    place = torch.arange((columns - 2) // 2 + 1, device=features.device)
    is_hidden = (place >= positions[:, None])[:, None, None]
    mask = torch.zeros(is_hidden.shape, dtype=encoder.conv1.weight.dtype, device=features.device)
    mask = mask.masked_fill(is_hidden, torch.finfo(mask.dtype).min).expand(-1, 1, len(place), -1)
    rows: torch.Tensor = projector(encoder(features, attention_mask=mask).last_hidden_state)
    return rows[torch.arange(rows.shape[1], device=rows.device) < tokens[:, None]]


def logits_of(model: Any, microbatch: Microbatch, received: torch.Tensor, routes: Routes) -> torch.Tensor:
    """Logits of a microbatch, [B, T, vocabulary]: documents do not see each other."""
    embeddings = place_rows(model.get_input_embeddings()(microbatch.tokens), received, routes, microbatch.index)
    # Positions that begin at 0 in each document tell transformers where attention stops.
    text = model.model.language_model(inputs_embeds=embeddings, position_ids=microbatch.position_ids, use_cache=False)
    logits: torch.Tensor = model.lm_head(text.last_hidden_state)
    return logits
