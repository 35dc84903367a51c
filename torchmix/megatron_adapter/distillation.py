"""The identity of the data, where Megatron's offline distillation looks for it.

In: Megatron's command line and arguments. Out: Megatron's hash of a dataset covers the recipe. Must hold: two runs have
one hash only where each rank gets the same samples in the same microbatches.

A teacher (`--logits-save-dir`) writes the hash beside its logits, a student (`--logits-load-dir`) compares it with its
own, so that it does not learn from the logits of other tokens. Megatron takes the blend from `--data-path`; with a
recipe there is none, and every run has the hash of mock data. Here the blend is the recipe: what decides the order, the
catalog, what decides to which rank and microbatch a sample goes, and how attention sees it. Megatron's hash has
`--seed`, `--seq-length` and the number of samples, too.

Megatron can read a teacher's logits at another data-parallel size where microbatches are dealt in turn. torchmix deals
samples by their cost or their hash, so the sizes are part of the identity.

Cost: opening the catalog, once for each hash, which the ranks of the last stage make.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from torchmix.catalog.open_part import open_part
from torchmix.errors import RecipeError
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.load import load_recipe, recipe_directory
from torchmix.recipe.parts import Part, part_of

LOGITS_FLAGS = ("--logits-save-dir", "--logits-load-dir")
BESIDE_ATTENTION = frozenset(
    {"path", "tokenizer", "max_epochs", "on_exhausted", "bad_rows", "max_bad", "id", "properties", "split_by"}
)
"""Words of a source that alter nothing, or that the catalog or the order has already."""


def identify_data(arguments: Sequence[str] | None = None) -> None:
    """Let Megatron's hash of a dataset cover the recipe, where the command line asks for logits of a teacher.

    Args:
        arguments: Stands in for `sys.argv[1:]`.

    Raises:
        RecipeError: This version of Megatron makes the hash in another way.
    """
    given = sys.argv[1:] if arguments is None else arguments
    flags = [flag for flag in LOGITS_FLAGS if any(each.partition("=")[0] == flag for each in given)]
    if not flags:
        return
    from megatron.training.distillation import utils_logits

    if not (hasattr(utils_logits, "_blend_identifiers") and hasattr(utils_logits, "compute_dataset_hash")):
        raise RecipeError(
            f"{' and '.join(flags)}: this version of Megatron makes its hash of a dataset in a way that torchmix does "
            f"not know, so logits of other data would not be noticed; leave the flag out"
        )
    utils_logits._blend_identifiers = blend_of_recipe


def blend_of_recipe(args: Any) -> dict[str, Any]:
    """What Megatron hashes in the place of the blend.

    Args:
        args: Megatron's arguments.

    Returns:
        Texts and numbers by name, for JSON.

    Raises:
        CatalogError: The recipe is not indexed.
    """
    path = Path(args.data_recipe)
    recipe = load_recipe(path)
    part = part_of(recipe, "train")
    catalog = open_part(recipe_directory(path) / recipe.catalog, part)
    return {
        "kind": "torchmix",
        "recipe": recipe_fingerprint(part),
        "catalog": catalog.fingerprint,
        "attention": _digest(_attention(part)),
        "placement": {
            "balance": _digest(msgspec.to_builtins(part.balance)),
            "data_parallel_size": args.data_parallel_size,
            "context_parallel_size": args.context_parallel_size,
            "micro_batch_size": args.micro_batch_size,
        },
    }


def _attention(part: Part) -> Any:
    """What decides over which tokens attention goes, where positions begin again, and which tokens have a loss.

    Of a source, all words but those that `BESIDE_ATTENTION` names: a word that a recipe learns later counts.
    """
    sources = {
        name: {key: value for key, value in msgspec.to_builtins(source).items() if key not in BESIDE_ATTENTION}
        for name, source in part.sources.items()
    }
    return [msgspec.to_builtins(part.packing), sources]


def _digest(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()[:16]
