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


def _strategy(sources: tuple[str, ...] | None, **units: str) -> Any:
    def strategy(step: Any, tree: Any, model: Any) -> Any:
        tokens = step.graph("tokens").mix(step.schedule)
        if step.runs is not None:
            return tokens.distribute("CP").cost(flops(model)).balance()
        backbone = tokens.distribute("DP").cost(flops(model)).balance("lpt")
        if not units:
            return backbone
        modules = {}
        for name, unit in units.items():
            sizes = {"document": "tokens", "sound": "positions"}.get(unit, "patches")
            items = step.graph(sizes, sources, unit=unit, module=name).distribute("WORLD")
            modules[name] = items.cost(vit_flops(getattr(model, name))).balance("lpt", scope="step")
        return step.plan(backbone=backbone, **modules)

    return strategy


ALL = {"vision": "image", "sound": "sound", "video": "video"}
none_none = none_given = _strategy(None)
document_none, document_given = _strategy(None, vision="document"), _strategy(("main",), vision="document")
image_none, image_given = _strategy(None, vision="image"), _strategy(("main",), vision="image")
sound_none, sound_given = _strategy(None, vision="sound"), _strategy(("main",), vision="sound")
video_none, video_given = _strategy(None, vision="video"), _strategy(("main",), vision="video")
all_none, all_given = _strategy(None, **ALL), _strategy(("main",), **ALL)
