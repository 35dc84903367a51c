"""The units of a module -> what the encoder of a model takes, normalised, on the device of the batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchmix.constructor.fields import ModuleBatch
from torchmix.errors import OptionError
from torchmix.modalities.modality import TowerForm
from torchmix.modalities.table import open_modality
from torchmix.recipe.items import items_of
from torchmix.recipe.load import recipe_and_directory
from torchmix.recipe.modules import DOCUMENT
from torchmix.recipe.structs import Recipe


class Tower:
    """Makes what the encoder of a module takes. Bytes travel as they are, and become numbers where they are used."""

    def __init__(self, form: TowerForm, unit_array: str) -> None:
        """See `open_tower`."""
        self._form, self._unit_array = form, unit_array
        self._levels: dict[torch.device, torch.Tensor] = {}

    def __call__(self, batch: ModuleBatch) -> torch.Tensor:
        """The input of the encoder.

        Args:
            batch: What a rank has of the module, `microbatch.modules[NAME]`.

        Returns:
            float32. Rows of patches [patches, values], as towers of Qwen take them; or pictures [pictures, 3, height,
            width], or chunks of sounds [chunks, mels, columns]. None of them if the rank has no items.
        """
        return self.of_units(batch.arrays[self._unit_array])

    def of_units(self, units: torch.Tensor) -> torch.Tensor:
        """The same of units of whole items, [units, values]."""
        form = self._form
        found = units.reshape(units.numel() // math.prod(form.split), *form.split)
        if form.levels is not None:
            channel = torch.arange(len(form.levels), device=units.device)
            channel = channel.reshape(-1, *(1,) * (len(form.split) - 1 - form.channel_axis))
            found = self._levels_on(units.device)[channel, found.int()]
        if form.repeat > 1:
            found = found.unsqueeze(2).expand(*found.shape[:2], form.repeat, *found.shape[2:])
        else:
            found = found.permute(0, *(1 + axis for axis in form.order))
        found = found.reshape(len(found), *form.shape)
        if form.padded is not None and form.padded != form.shape:
            wider = found.new_zeros(len(found), *form.padded)
            inside = (slice(None), *map(slice, form.shape))
            wider[inside] = found
            return wider
        return found

    def _levels_on(self, device: torch.device) -> torch.Tensor:
        if device not in self._levels:
            self._levels[device] = torch.from_numpy(self._form.levels).to(device)
        return self._levels[device]


def open_tower(
    recipe: str | Path | Recipe | Mapping[str, Any], module: str, *, directory: str | Path | None = None
) -> Tower:
    """What makes the input of a module's encoder of its units, by the options of its sources.

    Args:
        recipe: As `build_loader` takes it.
        module: The name of a module of items.
        directory: Likewise.

    Raises:
        RecipeError: The recipe has a fault.
        OptionError: There is no such module, no source of it says how its items are normalised, or two sources say
            different things.
    """
    checked, _ = recipe_and_directory("open_tower", recipe, directory)
    if module not in checked.modules or checked.modules[module].items == DOCUMENT:
        named = ", ".join(name for name, one in checked.modules.items() if one.items != DOCUMENT) or "none"
        raise OptionError(f"open_tower: {module!r} is no module of items; the recipe has {named}")
    kind, wanted = checked.modules[module].items, checked.modules[module].sources
    forms: dict[bytes, tuple[TowerForm, str, str]] = {}
    for name, source in sorted(checked.sources.items()):
        words = items_of(source).get(kind)
        if words is not None and (wanted is None or name in wanted):
            modality = open_modality(name, words)
            form = modality.tower_form()
            levels = None if form.levels is None else form.levels.tobytes()
            key = repr((form.split, form.order, form.shape, levels, form.repeat, form.padded)).encode()
            forms[key] = (form, name, modality.unit_array)
    if len(forms) != 1:
        said = " and ".join(repr(name) for _, name, _ in forms.values())
        what = f"sources {said} differ in patch, size, mean or deviation" if forms else f"no source has {kind}s"
        raise OptionError(f"open_tower: {what}; the encoder of {module!r} takes one form")
    [(form, _, unit_array)] = forms.values()
    return Tower(form, unit_array)
