"""A policy and a strategy of a user's, as rows of the matrix name them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchmix.planner.graph.strategy import flops, vit_flops


class Turning:
    """Gives each child more in turn."""

    def __init__(self, *, turn: int) -> None:
        self._turn, self._seen = turn, 0

    def start(self, names: Sequence[str], shares: Mapping[str, float]) -> None:
        """See `policy.Policy`."""
        self._names, self._shares = list(names), dict(shares)

    def observe(self, step: int, losses: Mapping[str, tuple[float, int]]) -> None:
        """See `policy.Policy`."""
        self._seen += 1

    def decide(self, step: int) -> Mapping[str, float]:
        """See `policy.Policy`."""
        favoured = self._names[self._seen // self._turn % len(self._names)]
        return {name: share * (3 if name == favoured else 1) for name, share in self._shares.items()}


children: list[str] = []
"""The children whose shares the row's function of the step decides, in the process that writes its recipe."""


def of_step(step: int) -> dict[str, float]:
    """Gives each child more in turn, by the step alone."""
    return {name: 3.0 if step // 2 % len(children) == i else 1.0 for i, name in enumerate(children)}


def _strategy(unit: str | None, sources: tuple[str, ...] | None) -> Any:
    def strategy(step: Any, tree: Any, model: Any) -> Any:
        tokens = step.graph("tokens").mix(step.schedule)
        if step.runs is not None:
            return tokens.distribute("CP").cost(flops(model)).balance()
        backbone = tokens.distribute("DP").cost(flops(model)).balance("lpt")
        if unit is None:
            return backbone
        sizes = {"document": "tokens", "sound": "positions"}.get(unit, "patches")
        items = step.graph(sizes, sources, unit=unit, module="vision").distribute("WORLD")
        return step.plan(backbone=backbone, vision=items.cost(vit_flops(model.vision)).balance("lpt", scope="step"))

    return strategy


none_none = none_given = _strategy(None, None)
document_none, document_given = _strategy("document", None), _strategy("document", ("main",))
image_none, image_given = _strategy("image", None), _strategy("image", ("main",))
sound_none, sound_given = _strategy("sound", None), _strategy("sound", ("main",))
video_none, video_given = _strategy("video", None), _strategy("video", ("main",))
