"""How unequal the tokens of microbatches are, where Megatron would weight microbatches alike.

In: the microbatches of the first step, on one rank that has loss masks. Out: one warning with figures. Without
`--calculate-per-token-loss` Megatron divides each microbatch's loss by its own tokens and averages the quotients, so a
token of a microbatch with much padding weighs more than others. Packing makes tokens per microbatch unequal; planning
can make them similar, not equal.

Must hold: it looks at one step and then never again. Cost: a sum over the loss masks of one step.
"""

from __future__ import annotations

import logging

from torchmix.constructor.fields import Microbatch

logger = logging.getLogger(__name__)


class FirstStepTokens:
    """Counts the trained tokens of each microbatch of the first step, and warns once."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._is_done = False

    def note(self, microbatch: Microbatch) -> None:
        """Look at a microbatch; after the first step's last one, warn if they differ."""
        if self._is_done or microbatch.labels_int32 is None:
            return
        self._tokens.append(int((microbatch.labels_int32 >= 0).sum()))
        if microbatch.is_last_of_step:
            self._is_done = True
            self._warn(microbatch)

    def _warn(self, microbatch: Microbatch) -> None:
        fewest, most = min(self._tokens), max(self._tokens)
        if fewest == most:
            return
        mean = sum(self._tokens) / len(self._tokens)
        logger.warning(
            "the loss is averaged over microbatches, not over tokens, and the %d microbatches of this rank in step %d "
            "have %s to %s tokens that count (mean %s): a token of the emptiest weighs %.3f times the mean, one of the "
            "fullest %.3f times. Give --calculate-per-token-loss to weight all tokens alike, or write "
            "per_token_loss: require in the recipe to refuse anything else",
            len(self._tokens),
            microbatch.step,
            f"{fewest:,}",
            f"{most:,}",
            f"{mean:,.0f}",
            mean / max(fewest, 1),
            mean / most,
        )
