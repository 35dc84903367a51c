"""Indexes that others have put beside a tar shard -> its samples, without a look at each header.

In: the path of a shard, and its bytes. Out: its samples, or None where no index lies there. Must hold: an index is
verified as it is used: members lie inside the file and in order, nothing follows the last one that the index lacks, and
the header of each member that is read says what the index says. An index of another file is an error that names it.
Cost: reading the index, and two headers; the others are in the pages that a scan reads anyway.

    X.idx                       DALI's, text: `v1.2 SAMPLES`, then a sample a line: SUFFIX OFFSET SIZE NAME for each
                                member (`v1.1`: without NAME)
    .nv-meta/index.sqlite       Energon's, in a folder above: tables `samples` and `sample_parts`; the number of a tar
                                file is its place in `shard_counts` of .info.json or .info.yaml beside it
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from torchmix.errors import CorruptPage, RecipeError, SourceUnreadable
from torchmix.formats.webdataset.members import (
    BLOCK_BYTES,
    Member,
    Read,
    TarSample,
    member_of_header,
    members_of,
    names_a_sample,
    samples_of_members,
)

DALI_VERSIONS = {"v1.1": 3, "v1.2": 4}
"""Words of a member."""
_NO_KEY = "\0"
"""Begins the name of a sample whose key the index does not have."""
MOST_FOLDERS = 4
"""Folders above a shard that are looked into for Energon's index."""


class BesideIndex:
    """The samples of one shard by an index beside it."""

    def __init__(self, path: Path, members: list[Member], num_bytes: int) -> None:
        """Use `index_beside`."""
        self.path = path
        self._members = members
        self._num_bytes = num_bytes

    def samples(self, read: Read) -> Iterator[TarSample]:
        """The samples, in order.

        Raises:
            SourceUnreadable: The index is of another file.
        """
        self._check_end(read)
        return samples_of_members(iter(self._members))

    def check_header(self, member: Member, header: bytes | memoryview) -> None:
        """Compare a member with the block before it in the shard; errors as `samples`."""
        found = member_of_header(header)
        if found is None or found.num_bytes != member.num_bytes:
            what = "no header of a member" if found is None else f"a member of {found.num_bytes} bytes"
            raise self._other(f"it has {member.name!r} with {member.num_bytes} bytes, where the shard has {what}")
        is_short = len(member.name.encode()) < 100 and len(found.name.encode()) < 100
        if is_short and not found.name.startswith("././@") and not _same_name(found.name, member.name):
            raise self._other(f"it has {member.name!r}, where the shard has {found.name!r}")

    def _check_end(self, read: Read) -> None:
        stop = 0
        for member in self._members:
            if member.offset < stop + BLOCK_BYTES or member.offset % BLOCK_BYTES or member.stop > self._num_bytes:
                raise self._other(f"it has {member.name!r} at byte {member.offset}, where no member can be")
            stop = -(-member.stop // BLOCK_BYTES) * BLOCK_BYTES
        for member in (self._members[0], self._members[-1]) if self._members else ():
            self.check_header(member, read(member.offset - BLOCK_BYTES, BLOCK_BYTES))
        try:
            rest = members_of(lambda place, count: read(stop + place, count), self._num_bytes - stop)
            more = next((member for member in rest if names_a_sample(member.name)), None)
        except (CorruptPage, SourceUnreadable):
            raise self._other(f"the shard goes on behind byte {stop}") from None
        if more is not None:
            raise self._other(f"it lacks the member {more.name!r}")

    def _other(self, what: str) -> SourceUnreadable:
        return SourceUnreadable(
            f"the index {self.path} beside it is of another file: {what}; make the index again, or remove it"
        )


def index_beside(path: str | Path, num_bytes: int) -> BesideIndex | None:
    """The index beside a shard, DALI's before Energon's; None where there is none, or the shard lies in a store.

    Raises:
        SourceUnreadable: An index is damaged.
    """
    if "://" in str(path):
        return None
    shard = Path(path)
    dali = shard.with_name(f"{shard.name.removesuffix('.tar')}.idx")
    if dali.is_file():
        return BesideIndex(dali, list(_with_begins(_dali(dali))), num_bytes)
    for folder in list(shard.absolute().parents)[:MOST_FOLDERS]:
        energon = folder / ".nv-meta" / "index.sqlite"
        if energon.is_file():
            members = _energon(energon, shard.absolute().relative_to(folder).as_posix())
            return None if members is None else BesideIndex(energon, list(_with_begins(members)), num_bytes)
    return None


def _with_begins(members: list[Member]) -> Iterator[Member]:
    """Members whose headers begin behind the member before."""
    stop = 0
    for member in members:
        yield Member(name=member.name, offset=member.offset, num_bytes=member.num_bytes, begin=stop)
        stop = -(-member.stop // BLOCK_BYTES) * BLOCK_BYTES


def _dali(path: Path) -> list[Member]:
    try:
        first, *lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        version, count = first.split()
        words_of_member = DALI_VERSIONS[version]
        samples = [line.split(" ") for line in lines if line]
        if len(samples) != int(count):
            raise ValueError(f"{len(samples)} samples where it says {count}")
        members: list[Member] = []
        for number, words in enumerate(samples):
            if len(words) % words_of_member:
                raise ValueError(f"line {number + 2} has {len(words)} words, no multiple of {words_of_member}")
            for at in range(0, len(words), words_of_member):
                suffix, offset, size, *name = words[at : at + words_of_member]
                named = name[0] if name else f"{_NO_KEY}{number}.{suffix}"
                members.append(Member(name=named, offset=int(offset), num_bytes=int(size), begin=0))
    except (ValueError, KeyError) as error:
        raise SourceUnreadable(
            f"the index {path} beside it does not read ({error}); make it again, or remove it"
        ) from None
    return members


def _energon(path: Path, shard: str) -> list[Member] | None:
    """The members of a shard; None where the index has no such shard, or no places of members."""
    try:
        shards = _shards_of(path.parent)
        if shard not in shards:
            return None
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro&immutable=1", uri=True)) as tables:
            known = {name for (name,) in tables.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if not {"samples", "sample_parts"} <= known:
                return None
            rows = tables.execute(
                "SELECT s.sample_key, p.part_name, p.content_byte_offset, p.content_byte_size FROM sample_parts AS p "
                "JOIN samples AS s ON s.tar_file_id = p.tar_file_id AND s.sample_index = p.sample_index "
                "WHERE p.tar_file_id = ? ORDER BY p.content_byte_offset",
                (shards.index(shard),),
            )
            return [
                Member(name=f"{key}.{part}", offset=int(offset), num_bytes=int(size), begin=0)
                for key, part, offset, size in rows
            ]
    except (sqlite3.Error, ValueError, TypeError) as error:
        raise SourceUnreadable(f"the index {path} does not read ({error}); make it again, or remove it") from None


def _shards_of(folder: Path) -> list[str]:
    """Names of tar files, in the order of their numbers; ValueError where the list is damaged."""
    for file, load in ((folder / ".info.json", json.loads), (folder / ".info.yaml", _parse_yaml)):
        if file.is_file():
            told = load(file.read_text(encoding="utf-8"))
            counts = told.get("shard_counts") if isinstance(told, Mapping) else None
            if not isinstance(counts, Mapping):
                raise ValueError(f"{file} has no shard_counts")
            return [str(shard) for shard in counts]
    return []


def _parse_yaml(text: str) -> object:
    from torchmix.recipe.yaml_lines import parse_yaml  # YAML, which a process that only reads pages does not need

    try:
        return parse_yaml(text)[0]
    except RecipeError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _same_name(in_shard: str, in_index: str) -> bool:
    """Whether two names mean one member."""
    base, other = (name.rpartition("/")[2].partition(".") for name in (in_shard, in_index))
    return base[2].lower() == other[2].lower() and (base[0] == other[0] or other[0].startswith(_NO_KEY))
