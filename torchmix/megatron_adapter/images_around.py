"""The images of a step around Megatron's schedule: encoded once before it, their gradients given back once after it.

In: Megatron's function that runs a step forwards and backwards, and the model's encoder. Out: the same function with
the images around it, and what puts their rows among the embeddings of a microbatch. Must hold: every rank calls the
function, also one without images and one in the middle of a pipeline, since the exchanges are of the whole job; none is
inside the schedule, where stages wait for each other. Cost: the rows of all images of the step are kept until it ends.

Megatron's own multimodal scripts encode inside `forward_step`, each rank the images of its own microbatch. Here the
planner has dealt the images of the step to all ranks by their cost.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from torchmix.constructor.modules.batch import ModuleBatch
from torchmix.errors import OptionError
from torchmix.megatron_adapter.microbatches import MicrobatchIterator
from torchmix.parallel.modules.route import HeldRows, place_rows, route

Encode = Callable[[ModuleBatch], torch.Tensor]
"""Images of this rank -> their rows, [sum of `batch.rows`, width]; also of no images."""


def with_images(forward_backward: Callable[..., Any], encode: Encode, *, module: str) -> Callable[..., Any]:
    """What `get_forward_backward_func` returned, with the images of the step around it.

    Args:
        forward_backward: Called with the keyword `data_iterator`, as Megatron does.
        encode: The encoder, on the device that trains. Its gradients are those of this rank: sum them over all ranks.
        module: The recipe's name of the module of images.

    Raises:
        OptionError: The iterator is not one of torchmix.
        KeyError: The recipe has no such module.
    """

    @wraps(forward_backward)
    def run(*arguments: Any, **options: Any) -> Any:
        shared = _iterator_of(options["data_iterator"]).shared
        batch = shared.next_microbatch().modules[module]
        if torch.cuda.is_available():
            batch = batch.to(torch.cuda.current_device(), non_blocking=True)
        trains = not options.get("forward_only", False)
        with torch.set_grad_enabled(trains):
            held = HeldRows(route(encode(batch), batch.routes))
        shared.images_of_step = held.rows, batch.routes
        try:
            result = forward_backward(*arguments, **options)
        finally:
            shared.images_of_step = None
        if trains:
            held.give_back()
        return result

    return run


def place_images(embeddings: torch.Tensor, data_iterator: Any) -> torch.Tensor:
    """Embeddings of the microbatch that the iterator gave last, with the rows of its images in their places.

    Args:
        embeddings: [tokens, rows, width], as Megatron's embedding gives them, not yet scattered over TP ranks.
        data_iterator: Of the chunk, as `forward_step` has it.

    Raises:
        OptionError: The iterator is not one of torchmix, or the step does not run inside `with_images`.
    """
    iterator = _iterator_of(data_iterator)
    if iterator.shared.images_of_step is None:
        raise OptionError("place_images: the images of this step are not encoded; run the schedule by with_images")
    rows, routes = iterator.shared.images_of_step
    placed = place_rows(embeddings.transpose(0, 1).contiguous(), rows, routes, iterator.index)
    return placed.transpose(0, 1).contiguous()


def _iterator_of(data_iterator: Any) -> MicrobatchIterator:
    """The iterator of torchmix inside what Megatron has put around it; the first one of several chunks."""
    found = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
    while not isinstance(found, MicrobatchIterator) and hasattr(found, "iterable"):
        found = found.iterable
    if not isinstance(found, MicrobatchIterator):
        raise OptionError(
            f"with_images: data_iterator is {type(found).__name__}, not torchmix's; take it from its provider"
        )
    return found
