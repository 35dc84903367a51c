"""The table of kinds: each kind says all that is asked of it, and is imported when it is met."""

from __future__ import annotations

import subprocess
import sys

from torchmix.modalities.table import KINDS, all_kinds
from torchmix.recipe.items import KINDS as RECIPE_KINDS


def test_every_kind_says_what_the_seam_asks() -> None:
    kinds = all_kinds()
    assert set(kinds) == set(RECIPE_KINDS)
    for name, kind in kinds.items():
        left = [word for word in dir(kind) if getattr(getattr(kind, word), "__isabstractmethod__", False)]
        assert not left and kind.kind == name == RECIPE_KINDS[name].words.kind


def test_a_kind_that_is_not_met_is_not_imported() -> None:
    homes = sorted({home.partition(":")[0].rpartition(".")[0] for home in KINDS.values()})
    program = f"import sys, torchmix.steps.worker.main; print([home for home in {homes} if home in sys.modules])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.strip() == "[]"
