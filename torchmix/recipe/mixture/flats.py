"""What a flat of a mixture may be.

In: a recipe, or a part of it. Out: nothing, or the first fault with its path of keys. Must hold: a flat has a name of
its own, and each of its members once; bounds on epochs stand on the flat, since it has the one order that they count.
Cost: microseconds a member.
"""

from __future__ import annotations

from torchmix.errors import RecipeError, key_path
from torchmix.recipe.build import listed, nearest
from torchmix.recipe.streams import (
    CHILD,
    HasMixture,
    flats_of,
    leaves_of,
    members_of,
    places_of_members,
    possible_names,
    row_sets_of,
)
from torchmix.recipe.structs import Group, InnerFlat


def check_flats(part: HasMixture, where: str = "") -> None:
    """Check all flats of a mixture and of its changes.

    Args:
        part: A recipe, an evaluation of it, or a part.
        where: Path of keys of the part.

    Raises:
        RecipeError: A member does not exist, stands there twice or has a bound of its own; a flat has children, no
            member, the name of something else, or differs from another one of its name.
    """
    found: dict[str, Group] = {}
    for path, name, flat in flats_of(part):
        place = key_path(where, path)
        for key in ("children", "proportional"):
            if getattr(flat, key) is not None:
                raise RecipeError("a flat has no such key; its members stand under `flat`", f"{place}.{key}")
        if CHILD in name or name in {*part.sources, *part.selections}:
            reason = f"a {CHILD!r} separates a source from its child" if CHILD in name else "a source has that name"
            raise RecipeError(f"{name!r} cannot name a flat: {reason}", place)
        if flat.max_epochs is not None and flat.max_epochs < 1:
            raise RecipeError(f"{flat.max_epochs} is out of range; it must be at least 1", f"{place}.max_epochs")
        _check_members(part, flat, place)
        bare = found.setdefault(name, flat)
        if (sorted(members_of(bare)), bare.max_epochs, bare.on_exhausted) != (
            sorted(members_of(flat)),
            flat.max_epochs,
            flat.on_exhausted,
        ):
            raise RecipeError(f"the flat {name!r} has other members or bounds elsewhere; give it another name", place)


def _check_members(part: HasMixture, flat: Group, where: str) -> None:
    row_sets, leaves = row_sets_of(part), leaves_of(part)
    _check_inner_flats(flat, f"{where}.flat")
    found = set[str]()
    allowing: dict[str, str] = {}
    for place, member in places_of_members(flat, f"{where}.flat"):
        if member not in row_sets:
            names = sorted({*row_sets, *possible_names(part)})
            message = f"there is no source {member!r}{nearest(member, names)}; sources are {listed(names)}"
            raise RecipeError(message, place)
        if member in found:
            raise RecipeError(f"the source {member!r} stands there twice", place)
        found.add(member)
        rows = row_sets[member]
        if rows.max_epochs is not None and member not in leaves:
            raise RecipeError(
                f"{member!r} has max_epochs {rows.max_epochs}, and its rows come in the order of the flat; write "
                "max_epochs beside `flat`, and remove it there",
                place,
            )
        if rows.overlap == "allow" and rows.source in allowing:
            raise RecipeError(
                f"{member!r} may have rows that {allowing[rows.source]!r} has, too, and a flat has each row once; "
                "remove overlap: allow",
                place,
            )
        allowing[rows.source] = member


def _check_inner_flats(flat: Group | InnerFlat, where: str) -> None:
    if not flat.flat:
        raise RecipeError("names no source", where)
    for number, member in enumerate(flat.flat):
        if not isinstance(member, InnerFlat):
            continue
        place = f"{where}[{number}]"
        if member.max_epochs is not None:
            message = "a flat inside a flat has no bound, since its rows come in the order of the outer one; "
            raise RecipeError(f"{message}write max_epochs beside the outer `flat`", f"{place}.max_epochs")
        _check_inner_flats(member, f"{place}.flat")
