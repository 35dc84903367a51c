"""Shares that an operator writes into a file while the run goes on.

In: a YAML or JSON file, `{web: 70%, code: 30%}` or bare numbers. Out: its shares, each time that they change. Must
hold: a file that is missing says nothing; one that is half written or wrong is an error, and the shares stay as they
are where the recipe says `on_error: keep`. Replace the file by a rename, so that nobody reads half of it. Cost: one
read of a small file for each decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torchmix.errors import RecipeError
from torchmix.recipe.build import nearest
from torchmix.recipe.shares import parse_share


class SharesFile:
    """See the file."""

    def __init__(self, *, path: str) -> None:
        """Take the file, which need not exist yet."""
        self._path = Path(path)

    def start(self, names: Sequence[str], shares: Mapping[str, float]) -> None:
        """See `policy.Policy.start`."""
        self._names = list(names)
        self._last: dict[str, float] | None = None

    def observe(self, step: int, losses: Mapping[str, tuple[float, int]]) -> None:
        """See `policy.Policy.observe`; losses do not matter."""

    def decide(self, step: int) -> Mapping[str, float] | None:
        """See `policy.Policy.decide`.

        Raises:
            RecipeError: The file is no mapping of every child to a share.
        """
        from torchmix.recipe.yaml_lines import parse_yaml  # YAML is slow to load, and not needed without such a policy

        try:
            content, _ = parse_yaml(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError, RecipeError) as error:
            raise RecipeError(f"{self._path}: cannot be read as YAML: {' '.join(str(error).split())}") from None
        shares = self._checked(content)
        if shares == self._last:
            return None
        self._last = shares
        return shares

    def _checked(self, content: object) -> dict[str, float]:
        if not isinstance(content, dict):
            raise RecipeError(
                f"{self._path}: holds no mapping of names to shares; write {{{self._names[0]}: 70%, ...}}"
            )
        for name in content:
            if name not in self._names:
                raise RecipeError(
                    f"{self._path}: {name!r} is no child of this group{nearest(str(name), self._names)}; its children "
                    f"are {', '.join(self._names)}"
                )
        missing = [name for name in self._names if name not in content]
        if missing:
            raise RecipeError(f"{self._path}: has no share of {', '.join(missing)}; write one for every child")
        return {name: float(parse_share(content[name], f"{self._path}: {name}")) for name in self._names}
