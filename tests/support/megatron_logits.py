"""A program: logits of the example's GPT before and after one document of a packed sample is edited.

In: a recipe, as the only argument. Out: a JSON line that counts the logits that changed, in the edited document and
outside it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from tests.support.example import example_module
from tests.support.microbatches import make_microbatch
from torchmix.constructor.fields import Microbatch
from torchmix.megatron_adapter import packed_seq_params
from torchmix.recipe.load import load_recipe

EDITED = slice(96, 160)
LENGTH = 256


def microbatch(tokens: Tensor) -> Microbatch:
    """Three documents in one sample; the second lies at `EDITED`, and its last tokens are padding."""
    return make_microbatch(
        tokens_int32=tokens.int(),
        spans=torch.tensor([[0, 0, 0], [96, 0, 0], [156, 0, -1], [160, 0, 0], [252, 0, -1]], dtype=torch.int32),
        cu_seqlens=torch.tensor([0, 96, 156, 252], dtype=torch.int32),
        cu_seqlens_padded=torch.tensor([0, 96, 160, 256], dtype=torch.int32),
        max_seqlen=96,
    )


def main(recipe_path: Path) -> None:
    train = example_module("train")
    recipe = load_recipe(recipe_path)
    assert recipe.batch.length == LENGTH
    device = train.start_megatron(argparse.Namespace(tp=1, cp=1, pp=1, seed=1))
    model = train.gpt.build_model(recipe, device)[0].eval()
    tokens = torch.randint(0, 257, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    edited = tokens.clone()
    edited[:, EDITED] = (edited[:, EDITED] + 1) % 257
    logits = []
    for version in (tokens, edited):
        batch = microbatch(version)
        with torch.no_grad():
            logits.append(
                model(
                    input_ids=batch.tokens,
                    position_ids=batch.position_ids,
                    attention_mask=None,
                    packed_seq_params=packed_seq_params(batch),
                )[0]
            )
    changed = logits[0] != logits[1]
    inside = int(changed[EDITED].sum())
    print(json.dumps({"inside": inside, "outside": int(changed.sum()) - inside, "logits": changed[EDITED].numel()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
