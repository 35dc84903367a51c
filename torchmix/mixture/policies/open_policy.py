"""The policy that a recipe names.

In: the recipe's `dynamic`. Out: a policy, not started. Must hold: only the recipe names code; nothing of a state, a log
or a message is imported. Cost: the import of a user's own module.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from pathlib import Path

from torchmix.errors import RecipeError
from torchmix.mixture.policies.ado import Ado
from torchmix.mixture.policies.odm import Exp3, Odm
from torchmix.mixture.policies.policy import Policy
from torchmix.mixture.policies.shares_file import SharesFile
from torchmix.recipe.structs import Dynamic


def open_policy(dynamic: Dynamic, base: str | Path) -> Policy:
    """Make the policy.

    Args:
        dynamic: The recipe's.
        base: The folder that the path of `file` is relative to.

    Raises:
        RecipeError: Its module or class does not exist, or does not take the options.
    """
    options = dict(dynamic.options)
    if dynamic.policy == "file" and isinstance(options.get("path"), str):
        options["path"] = str(Path(base, str(options["path"])))
    built_in: dict[str, Callable[..., Policy]] = {"ado": Ado, "odm": Odm, "exp3": Exp3, "file": SharesFile}
    make = built_in.get(dynamic.policy) or _own(dynamic.policy)
    try:
        policy = make(**options)
    except (TypeError, ValueError) as error:
        raise RecipeError(
            f"the policy {dynamic.policy!r} does not take these options: {error}", "dynamic.options"
        ) from None
    missing = [name for name in ("start", "observe", "decide") if not callable(getattr(policy, name, None))]
    if missing:
        raise RecipeError(f"the policy {dynamic.policy!r} has no method {', '.join(missing)}", "dynamic.policy")
    return policy


def _own(text: str) -> Callable[..., Policy]:
    try:
        found: Callable[..., Policy] = pkgutil.resolve_name(text)
    except (ImportError, AttributeError) as error:
        raise RecipeError(
            f"the policy {text!r} cannot be imported: {error}; put the folder of its module on PYTHONPATH",
            "dynamic.policy",
        ) from None
    return found
