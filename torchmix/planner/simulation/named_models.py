"""Dimensions of well-known models, for simulations and for recipes to copy.

In: a name. Out: a `Model`. Must hold: the numbers are those of the published configuration. Cost: none.
"""

from __future__ import annotations

from torchmix.errors import OptionError
from torchmix.recipe.balance.structs import Model
from torchmix.recipe.build import nearest

MODELS = {
    "llama3-8b": Model(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=128256),
    "llama3-70b": Model(layers=80, hidden=8192, ffn=28672, heads=64, kv_heads=8, vocab=128256),
    "llama3-405b": Model(layers=126, hidden=16384, ffn=53248, heads=128, kv_heads=8, vocab=128256),
    "mistral-7b": Model(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=32000),
    "mixtral-8x7b": Model(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=32000, experts_per_token=2),
    "qwen2.5-7b": Model(layers=28, hidden=3584, ffn=18944, heads=28, kv_heads=4, vocab=152064),
    "qwen2.5-32b": Model(layers=64, hidden=5120, ffn=27648, heads=40, kv_heads=8, vocab=152064),
    "qwen2.5-72b": Model(layers=80, hidden=8192, ffn=29568, heads=64, kv_heads=8, vocab=152064),
}


def named_model(name: str) -> Model:
    """The dimensions of a model.

    Raises:
        OptionError: There is no such name; says the nearest one.
    """
    if name not in MODELS:
        raise OptionError(
            f"--model {name!r} is not one of {', '.join(MODELS)}{nearest(name, tuple(MODELS))}; other dimensions go "
            f"into the recipe's balance.model"
        )
    return MODELS[name]
