"""How much of the tokens of a source is trained on, where it has chats or a mask of loss.

In: a part with its catalog. Out: findings. Must hold: images need not be among tokens without loss, so the part that is
trained on is at most what is said. Cost: one pass over the runs of tokens without loss.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from torchmix.catalog.store import Catalog
from torchmix.cli.check.findings import Finding, Level
from torchmix.cli.terminal import count_text, percent_text
from torchmix.formats.documents.item_kinds import NO_LOSS
from torchmix.recipe.parts import Part
from torchmix.recipe.source.layout_structs import Chat


def loss_findings(part: Part, catalog: Catalog) -> Iterator[Finding]:
    """Findings in the loss of a part."""
    for name in sorted(part.sources):
        source = catalog.sources[name]
        table = source.sizes.items.get(NO_LOSS)
        if table is None or not source.num_tokens:
            continue
        all_tokens, of_recipe = count_text(source.num_tokens), part.sources[name]
        trained = source.num_tokens - int(np.asarray(table.tokens).sum(dtype=np.int64))
        if trained:
            message = f"{percent_text(trained / source.num_tokens)} of its {all_tokens} tokens have loss"
            yield Finding(level=Level.NOTE, where=f"sources.{name}", message=message)
            continue
        what = "loss_mask is 0, false or below 0 everywhere"
        if of_recipe.loss_mask is None:
            roles = (of_recipe.chat or Chat()).loss
            what = f"no message is of the role {' or '.join(roles)}"
        message = f"none of its {all_tokens} tokens has loss: {what}; nothing is learned from it"
        yield Finding(level=Level.FINDING, where=f"sources.{name}", message=message)
