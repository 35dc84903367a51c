"""What each source of a recipe costs a loader, kept beside its catalog.

In: what was measured, the catalog that it was measured with. Out: `profile.json` in the catalog's folder, and what it
says. Must hold: the file is replaced in one step; a profile of another catalog, or of other transforms, is refused by
name. All values are integers, so that whatever follows from a profile is the same on every machine. Cost: one small
file.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from torchmix.catalog.manifest import flush_folder
from torchmix.catalog.store import Catalog
from torchmix.errors import CatalogError, CatalogMissing, CatalogStale
from torchmix.service.served import transforms_digest

PROFILE_NAME = "profile.json"
PROFILE_VERSION = 1


class SourceProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What some rows of a source have cost; counts and sums over those rows."""

    tokens: int
    """Tokens that were read, 0 where the source has none."""
    busy_ns: int
    """Time that the reading thread took for them, without waiting for a processor: what bounds a loader."""
    cpu_ns: int
    """Time of processors, of all threads."""
    read_bytes: int
    """Bytes read from files."""
    decoded_bytes: int
    """Bytes of decoded pages, or of texts."""
    sent_bytes: int
    """Bytes of ids that a loader would send."""
    window_bytes: int
    """Decoded pages that are kept while a window of the source is read and the next one is made ready."""
    state_bytes: int
    """Memory of a loader for having the source open: what a process took for it beside decoded pages."""
    pages: int
    """Pages of the whole source."""
    images: int = 0
    """Images that were decoded, resized and cut into patches; 0 where the source has none."""
    image_tokens: int = 0
    """Tokens of the rows that have these images."""
    image_ns: int = 0
    """Time that these images took, as `busy_ns`."""
    image_bytes: int = 0
    """Bytes of these images in their files."""
    patch_bytes: int = 0
    """Bytes of their patches."""


class CostProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the sources of a catalog cost."""

    version: int = PROFILE_VERSION
    catalog: str
    """Fingerprint of the catalog that was measured."""
    transforms: str
    """Digest of the transforms from rows to tokens, in hex."""
    sources: dict[str, SourceProfile]
    """By name."""


def profile_of(catalog: Catalog, seed: int, sources: dict[str, SourceProfile]) -> CostProfile:
    """The profile of a catalog whose sources have been measured."""
    return CostProfile(
        catalog=catalog.fingerprint,
        transforms=transforms_digest(catalog, seed).hex(),
        sources={name: sources[name] for name in sorted(sources)},
    )


def write_profile(folder: Path, profile: CostProfile) -> Path:
    """Put a profile into a catalog's folder in one step; returns its path.

    Raises:
        OSError: The disk is full or the folder cannot be written; the profile that was there stays.
    """
    path, new = folder / PROFILE_NAME, folder / f".{PROFILE_NAME}.{os.getpid()}"
    try:
        with new.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    flush_folder(folder)
    return path


_decode_profile = msgspec.json.Decoder(CostProfile).decode


def read_profile(folder: Path, catalog: Catalog, seed: int) -> CostProfile:
    """The profile of a catalog.

    Args:
        folder: The catalog's.
        catalog: What the profile must be of.
        seed: The recipe's; maps may draw from it.

    Raises:
        CatalogMissing: There is none.
        CatalogStale: It is of another catalog, other transforms or another version of the format.
        CatalogError: It is damaged or cannot be read.
    """
    path = folder / PROFILE_NAME
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise CatalogMissing(f"there is no {path}; run torchmix profile to measure what the sources cost") from error
    except OSError as error:
        raise CatalogError(f"cannot read {path}: {error.strerror}") from error
    try:
        found = _decode_profile(content)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CatalogError(f"{path} is damaged ({error}); run torchmix profile again") from error
    if found.version != PROFILE_VERSION:
        raise CatalogStale(f"{path} has version {found.version}, this torchmix reads {PROFILE_VERSION}; run it again")
    if found.catalog != catalog.fingerprint:
        raise CatalogStale(
            f"{path} was measured with catalog {found.catalog}, this is catalog {catalog.fingerprint}; run torchmix "
            "profile again"
        )
    transforms = transforms_digest(catalog, seed).hex()
    if found.transforms != transforms:
        raise CatalogStale(
            f"{path} was measured with transforms {found.transforms}, these are {transforms}; run torchmix profile "
            "again"
        )
    if missing := sorted(catalog.sources.keys() - found.sources.keys()):
        raise CatalogStale(f"{path} lacks source {missing[0]!r}; run torchmix profile again")
    return found
