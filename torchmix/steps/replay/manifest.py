"""`plan.json`: what a plan on disk is of.

In: a planner, and the files of a plan. Out: a Struct, as JSON. Must hold: whatever decides which pieces are in which
step is in it, as a fingerprint; the files are known by their sizes and ends, so that a cut or foreign one is noticed
before a step is made from it. Cost: two short reads a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import msgspec

from torchmix.errors import PlanFilesError
from torchmix.parallel.layout import Layout
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.parts import Part
from torchmix.steps.replay.tables import MANIFEST, SCHEMAS
from torchmix.storage.file_ends import hash_ends
from torchmix.storage.random_access import LocalFile

PLAN_VERSION = 1
_Step = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class FileOfPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the Parquet files."""

    bytes: int
    ends: str
    """Hash of its first and last bytes; pages have checksums of their own."""


class PlanManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a plan is of."""

    version: int
    torchmix: str
    """The version that planned it."""
    part: str
    one_pass: bool
    recipe_fingerprint: str
    catalog_fingerprint: str
    denied: str
    """Fingerprint of the documents that are not given; empty where there are none."""
    first_step: _Step
    stop_step: _Step
    """The step behind the last one."""
    dp: int
    micro_batch_size: int
    """With `dp`: the layout that `dp_rank` and `microbatch` of the pieces are of."""
    placement: str
    """Hash of whatever else decides where samples are placed; see `placement_key`."""
    order_digest: str
    """The digest of all steps before `stop_step`."""
    files: dict[str, FileOfPlan]


def placement_key(part: Part, layout: Layout) -> str:
    """16 hex digits over the sizes of a job and the recipe's settings of balance and modules."""
    settings = msgspec.json.encode([part.balance, part.modules, part.packing.boundaries], order="sorted")
    sizes = msgspec.json.encode({**asdict(layout), "vocab_size": part.vocab_size}, order="sorted")
    return hashlib.sha256(settings + sizes).hexdigest()[:16]


def file_of_plan(path: Path) -> FileOfPlan:
    """Size and ends of a file."""
    with closing(LocalFile(path)) as file:
        num_bytes, ends = hash_ends(file)
    return FileOfPlan(bytes=num_bytes, ends=ends)


def encode_manifest(manifest: PlanManifest) -> bytes:
    """The bytes of `plan.json`."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


_decode_plan_manifest = msgspec.json.Decoder(PlanManifest).decode


def read_manifest(folder: Path) -> PlanManifest:
    """The manifest of a plan whose files are whole.

    Raises:
        PlanFilesError: There is no plan in the folder; it is of another version; a file is missing, cut or another.
    """
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
    except OSError as error:
        raise PlanFilesError(
            f"{folder} holds no plan: {MANIFEST} cannot be read ({error.strerror or error}); "
            f"`torchmix plan RECIPE --steps N --out {folder}` writes one"
        ) from error
    try:
        version = msgspec.json.decode(text, type=dict[str, object]).get("version")
        if version != PLAN_VERSION:
            raise PlanFilesError(f"{path} has version {version!r}, this torchmix reads version {PLAN_VERSION}")
        manifest = _decode_plan_manifest(text)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise PlanFilesError(f"{path} is damaged: {error}; plan again with --out") from error
    for name in SCHEMAS:
        _check_file(folder / name, manifest.files.get(name))
    return manifest


def _check_file(path: Path, expected: FileOfPlan | None) -> None:
    try:
        found = file_of_plan(path)
    except OSError as error:
        raise PlanFilesError(f"{path} cannot be read: {error.strerror}; plan again with --out") from error
    if found == expected:
        return
    what = "is another file than the one that was written"
    if expected is not None and found.bytes < expected.bytes:
        what = f"is cut: it has {found.bytes} bytes of {expected.bytes}"
    raise PlanFilesError(f"{path} {what}; plan again with --out")


def check_plan_of(manifest: PlanManifest, part: Part, catalog: str, *, folder: Path) -> None:
    """Refuse a plan of another part, recipe or catalog.

    Raises:
        PlanFilesError: Names both values.
    """
    pairs: Mapping[str, tuple[object, object]] = {
        "part": (manifest.part, part.name),
        "one_pass": (manifest.one_pass, part.one_pass),
        "recipe": (manifest.recipe_fingerprint, recipe_fingerprint(part)),
        "catalog": (manifest.catalog_fingerprint, catalog),
    }
    for what, (planned, here) in pairs.items():
        if planned != here:
            raise PlanFilesError(
                f"the plan in {folder} is of {what} {planned}, this loader has {what} {here}; plan again with --out, "
                f"or build the loader as the plan was made"
            )
