"""What the modules of a recipe must mean.

A column of sizes is looked up in the catalog, later. Cost: microseconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from fractions import Fraction

import msgspec

from torchmix.errors import RecipeError
from torchmix.recipe.amounts import parse_bytes, parse_fraction
from torchmix.recipe.build import check_ranges, listed, nearest
from torchmix.recipe.items import KINDS, has_items
from torchmix.recipe.ramp import most_length
from torchmix.recipe.structs import Balance, EncoderModel, Module, Recipe, Source

BACKBONE = "backbone"
"""The module that computes every token of a sample; every recipe has it."""
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,23}")
"""A module's name is part of the names of arrays that travel."""
DOCUMENT = "document"
"""What a module computes that computes no items inside documents."""


class MethodWords(msgspec.Struct, frozen=True, kw_only=True):
    """What a recipe may say with a method of balance."""

    places_items: bool = True
    """Whether it shares out items of modules; all of them place samples."""
    needs_cost: bool = False
    """Whether samples need the model's dimensions or a fitted cost, since their tokens would not do."""
    keeps_near_text: bool = False
    """Whether a module may have `near_text` with it."""


METHODS: dict[str, MethodWords] = {
    "rows": MethodWords(places_items=False, needs_cost=True),
    "lpt": MethodWords(keeps_near_text=True),
    "karmarkar_karp": MethodWords(),
    "zigzag": MethodWords(),
    "none": MethodWords(),
}
"""The built-in methods, by name. Their functions are in the other half of the table, in `planner/methods.py`."""


def _words_of(method: str, where: str, *, of_items: bool = False) -> MethodWords:
    """What may be said with a method; with one of the user's, only what needs no rule of its own."""
    if ":" in method:
        return MethodWords()
    valid = [name for name, words in METHODS.items() if words.places_items or not of_items]
    if method not in valid:
        raise RecipeError(f"{method!r} is not one of {', '.join(valid)}{nearest(method, valid)}", where)
    return METHODS[method]


def check_modules(modules: Mapping[str, Module], sources: Collection[str]) -> None:
    """Check all modules of a recipe.

    Args:
        modules: By name.
        sources: Names of the sources of all parts.

    Raises:
        RecipeError: The first fault.
    """
    for name, module in modules.items():
        where = f"modules.{name}"
        if not NAME.fullmatch(name) or name == BACKBONE:
            message = f"the name {name!r} is not usable: a letter, then at most 23 letters, digits or _, not {BACKBONE}"
            raise RecipeError(message, where)
        for i, source in enumerate(module.sources or ()):
            if source not in sources:
                message = f"{source!r} is no source of this recipe{nearest(source, sources)}"
                raise RecipeError(message, f"{where}.sources[{i}]")
        kinds = (DOCUMENT, *KINDS)
        if module.items not in kinds:
            message = f"{module.items!r} is not one of {listed(kinds)}{nearest(module.items, kinds)}"
            raise RecipeError(message, f"{where}.items")
        if module.sources == ():
            raise RecipeError("is empty; name sources, or remove the key for all of them", f"{where}.sources")
        words = _words_of(module.method, f"{where}.method", of_items=True)
        if module.near_text is not None:
            if not words.keeps_near_text:
                able = ", ".join(name for name, each in METHODS.items() if each.keeps_near_text)
                raise RecipeError(
                    f"is of the method {able}, and this one is {module.method}; remove it", f"{where}.near_text"
                )
            tolerance = near_text_of(module, f"{where}.near_text")
            if tolerance not in (None, ALWAYS_NEAR) and not 0 <= tolerance <= 10:
                raise RecipeError(f"{module.near_text} is out of range; as 5%, up to 1000%", f"{where}.near_text")
            if tolerance == ALWAYS_NEAR and module.cap is not None:
                message = f"items stay with their text always, whatever they take; remove the key, or {where}.near_text"
                raise RecipeError(message, f"{where}.cap")
        if module.group_size is not None and module.group_size < 1:
            raise RecipeError(f"{module.group_size} is out of range; it must be at least 1", f"{where}.group_size")
        _check_decode_at(module, f"{where}.decode_at")
        if module.cap is not None:
            if module.model is None:
                raise RecipeError("needs the module's model, from which the bytes of an item follow", f"{where}.cap")
            parse_bytes(module.cap, where=f"{where}.cap")
        if module.model is not None:
            _check_encoder(module.model, f"{where}.model")


ALWAYS_NEAR = Fraction(1 << 62)
"""The tolerance of `near_text: always`: more than any cost."""


def near_text_of(module: Module, where: str) -> Fraction | None:
    """The tolerance of a module's `near_text`, 1/20 of 5%; None where it has none.

    Raises:
        RecipeError: Neither a percentage nor `always`.
    """
    if module.near_text is None:
        return None
    if module.near_text == "always":
        return ALWAYS_NEAR
    try:
        return parse_fraction(module.near_text, where)
    except RecipeError as error:
        raise RecipeError(f"{module.near_text!r} is neither a percentage, as 5%, nor the word always", where) from error


def _check_decode_at(module: Module, where: str) -> None:
    if module.decode_at is not None and module.items == DOCUMENT:
        raise RecipeError("is of images, and this module computes documents; remove it", where)
    if module.decode_at == "rank" and module.axis != "WORLD":
        message = f"with axis {module.axis} several ranks encode an image, and each would decode it; write worker"
        raise RecipeError(message, where)


def check_balance(balance: Balance) -> None:
    """Check how samples are balanced; raises a RecipeError at the first fault."""
    words = _words_of(balance.method, "balance.method")
    if words.needs_cost and cost_key_of(balance) is None:
        message = f"method {balance.method} needs the model's dimensions: model: {{layers: , hidden: , ffn: , heads: }}"
        raise RecipeError(message, "balance.model")
    if balance.strategy is not None and balance.strategy.count(":") != 1:
        raise RecipeError(f"{balance.strategy!r} is no module:function", "balance.strategy")
    if balance.group_size is not None and balance.group_size < 1:
        raise RecipeError(f"{balance.group_size} is out of range; it must be at least 1", "balance.group_size")
    for key, check in COSTS.items():
        if getattr(balance, key) is not None:
            check(balance)


def check_broadcast(recipe: Recipe) -> None:
    """Check what cannot stand beside a trainer that sends whole samples to CP ranks; raises a RecipeError."""
    if recipe.balance.broadcast_at != "CP":
        return
    if recipe.balance.context is not None:
        message = "CP: in each microbatch other ranks share a document, so no group sends to all of them; remove it"
        raise RecipeError(message, "balance.broadcast_at")
    if recipe.modules:
        message = "CP: rows of a module go to the CP rank that embeds them, and the trainer cuts samples; remove it"
        raise RecipeError(message, "balance.broadcast_at")


CONTEXT_RANGES = {
    "rank_tokens": (1, 1 << 40),
    "align": (1, 1 << 40),
    "per_exchanged": (0, 1 << 40),
    "per_microbatch": (0, 1 << 40),
    "microbatches_of": (1, 1 << 20),
}


def check_context(recipe: Recipe) -> None:
    """Check runs of ranks, and all that cannot stand beside them; raises a RecipeError at the first fault."""
    context, is_whole = recipe.balance.context, recipe.packing.method == "whole"
    if context is None:
        if is_whole:
            message = "needs balance.context, which says how many ranks share a document: context: {rank_tokens: 32768}"
            raise RecipeError(message, "packing.method")
        return
    if not is_whole:
        message = f"is of packing.method: whole, and this one is {recipe.packing.method}; write whole, or remove it"
        raise RecipeError(message, "balance.context")
    check_ranges(context, "balance.context", **CONTEXT_RANGES)
    if context.sizes is not None:
        pairs = zip((1, *context.sizes), context.sizes, strict=False)
        if not context.sizes or any(each < 1 or each % before for before, each in pairs):
            message = f"{list(context.sizes)} are no sizes of runs: ascending, each a multiple of the one before"
            raise RecipeError(message, "balance.context.sizes")
        if len(set(context.sizes)) < len(context.sizes):
            raise RecipeError(f"{list(context.sizes)} has a size twice", "balance.context.sizes")
        widest, length = context.sizes[-1], most_length(recipe.batch)
        multiple = context.align * (2 * widest if widest > 1 else 1)
        if -(-length // multiple) * multiple > context.rank_tokens * widest:
            message = f"a document of {length} tokens fits no run: {widest} ranks hold {context.rank_tokens * widest}"
            raise RecipeError(message, "balance.context.sizes")
    if cost_key_of(recipe.balance) is None:
        message = "needs the model's dimensions: model: {layers: , hidden: , ffn: , heads: }, or a measured cost"
        raise RecipeError(message, "balance.model")
    plain = Balance()
    for key in ("method", "level", "objective", "microbatches", "group_size"):
        if getattr(recipe.balance, key) != getattr(plain, key):
            message = "places samples of one length; balance.context places those of whole; remove it"
            raise RecipeError(message, f"balance.{key}")
    if recipe.packing.boundaries != "document" or recipe.packing.positions == "sample":
        key = "positions" if recipe.packing.boundaries == "document" else "boundaries"
        message = "whole gives each document a sample of its own, so attention and positions are by document; remove it"
        raise RecipeError(message, f"packing.{key}")
    if recipe.modules:
        message = "modules are placed beside samples of one length; use packing.method: best_fit, or remove them"
        raise RecipeError(message, "modules")
    for part, sources in _sources_of_parts(recipe):
        for name, source in sources.items():
            if source.reset_id is not None or has_items(source):
                key = "images" if has_items(source) else "reset_id"
                message = f"packing.method: whole slices each document over ranks, and {key} cut it; use best_fit"
                raise RecipeError(message, f"{part}sources.{name}.{key}")


def _sources_of_parts(recipe: Recipe) -> Iterator[tuple[str, Mapping[str, Source]]]:
    yield "", recipe.sources
    for part in ("validation", "test"):
        if (content := getattr(recipe, part)) is not None:
            yield f"{part}.", content.sources


def _check_fitted(balance: Balance) -> None:
    assert balance.cost is not None, "of a recipe with a fitted cost"
    for key in ("per_token", "per_pair"):
        value = getattr(balance.cost, key)
        if not 0 <= value < 1 << 40:
            raise RecipeError(f"{value} is out of range; it must be in [0, 2^40)", f"balance.cost.{key}")
    if balance.cost.per_token + balance.cost.per_pair == 0:
        raise RecipeError("both are 0; one must be above", "balance.cost")


def _check_model(balance: Balance) -> None:
    assert balance.model is not None, "of a recipe with a model"
    if (balance.model.experts_per_token or 1) < 1:
        raise RecipeError("0 is out of range; it must be at least 1", "balance.model.experts_per_token")


COSTS: dict[str, Callable[[Balance], None]] = {"cost": _check_fitted, "model": _check_model}
"""The keys of `balance` that say what a sample costs, with the checks of their values; the first that is given counts.
The costs are in the other half of the table, in `planner/balance.py`."""


def cost_key_of(balance: Balance) -> str | None:
    """The key of `COSTS` by which samples cost; None: by their tokens."""
    return next((key for key in COSTS if getattr(balance, key) is not None), None)


def _check_encoder(model: EncoderModel, where: str) -> None:
    for key in ("layers", "hidden", "ffn", "heads", "kv_heads", "patch", "window", "merge", "out"):
        value = getattr(model, key)
        if value is not None and value < 1:
            raise RecipeError(f"{value} is out of range; it must be at least 1", f"{where}.{key}")
    if model.kv_heads is not None and model.heads % model.kv_heads:
        raise RecipeError(f"{model.kv_heads} does not divide heads {model.heads}", f"{where}.kv_heads")
    for i, layer in enumerate(model.full_layers):
        if not 0 <= layer < model.layers or layer in model.full_layers[:i]:
            message = f"layer {layer} does not exist or stands twice; layers are 0 to {model.layers - 1}"
            raise RecipeError(message, f"{where}.full_layers[{i}]")
    if model.full_layers and model.window is None:
        raise RecipeError("without a window all layers are full; remove the key", f"{where}.full_layers")
