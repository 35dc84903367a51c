"""A tar file -> its members and the samples that they make, without unpacking."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import msgspec

from torchmix.errors import CorruptPage, RecipeError, SourceUnreadable

# --- Members of a tar file, and how they group into samples.
#
# The key of a member is its path up to the first dot of its last component, and the rest in lower case is its suffix,
# as WebDataset has it; only consecutive members of a key are a sample; members whose last component begins with a dot
# are passed over. A member that is cut off, a header that is none and a suffix that stands twice in a sample are
# errors that name the member. Cost: a header of 512 bytes a member is read. The tar format is POSIX.1-2001's, with
# GNU's long names.

Read = Callable[[int, int], bytes]
BLOCK_BYTES = 512
_NAMED = re.compile(r"((?:.*/|)[^./][^./]*)\.([^/]*)", re.DOTALL)
_MOST_NAME_BYTES = 1 << 20
_GZIP = b"\x1f\x8b"
_OF_NEXT = (b"x", b"L", b"g")
"""Kinds of headers that tell of the next member."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A file in the tar."""

    name: str
    offset: int
    """First byte of its content; a header of BLOCK_BYTES lies before it."""
    num_bytes: int
    begin: int
    """First byte of its headers: a long name has one of its own."""

    @property
    def stop(self) -> int:
        """The byte behind its content, without padding."""
        return self.offset + self.num_bytes


class TarSample(msgspec.Struct, kw_only=True):
    """Consecutive members with one key."""

    key: str
    first: Member
    members: dict[str, Member] = msgspec.field(default_factory=dict)
    """By suffix."""


def samples_of(read: Read, num_bytes: int, *, is_part: bool = False) -> Iterator[TarSample]:
    """The samples of a tar file, in order; `is_part`: of a part of it, in which the last member may be cut off.

    Raises:
        SourceUnreadable: It is compressed, no tar, or a suffix stands twice in a sample.
        CorruptPage: A header is damaged, or a member is cut off.
    """
    return samples_of_members(members_of(read, num_bytes, is_part=is_part))


def names_a_sample(name: str) -> bool:
    """Whether a member of this name is a part of a sample."""
    return _NAMED.fullmatch(name) is not None


def samples_of_members(members: Iterator[Member]) -> Iterator[TarSample]:
    """The samples that members of a shard make; errors as `samples_of`."""
    sample: TarSample | None = None
    for member in members:
        match = _NAMED.fullmatch(member.name)
        if match is None:
            continue
        key, suffix = match[1], match[2].lower()
        if sample is None or sample.key != key:
            if sample is not None:
                yield sample
            sample = TarSample(key=key, first=member)
        if suffix in sample.members:
            raise SourceUnreadable(f"{member.name!r} stands twice in its sample; write the shard again")
        sample.members[suffix] = member
    if sample is not None:
        yield sample


def members_of(read: Read, num_bytes: int, *, is_part: bool = False) -> Iterator[Member]:
    """The regular files of a tar; errors as `samples_of`."""
    place, name, size, headers = 0, "", -1, 0
    last = "the first member"
    while place < num_bytes:
        block = read(place, BLOCK_BYTES)
        if place == 0 and block[:2] == _GZIP:
            raise SourceUnreadable("it is compressed, so that members have no offsets; unpack it to a .tar")
        if len(block) < BLOCK_BYTES:
            raise CorruptPage(f"it ends inside the header behind {last}; copy the shard again")
        if not any(block):
            return
        held = _size(block)
        if held is None:
            what = "is no tar file" if place == 0 else f"has no header of a member at byte {place}, behind {last}"
            error = SourceUnreadable if place == 0 else CorruptPage
            raise error(f"it {what}; name a WebDataset shard, or copy it again")
        kind = block[156:157]
        begin = place + BLOCK_BYTES
        if kind in _OF_NEXT:
            if held > _MOST_NAME_BYTES or begin + held > num_bytes:
                raise CorruptPage(f"the name behind {last} is cut off; copy the shard again")
            content = read(begin, held)
            if kind == b"L":
                name = content.rstrip(b"\0").decode("utf-8", "surrogateescape")
            elif kind == b"x":
                told = _pax(content)
                name, size = told.get("path", name), int(told.get("size", size))
        else:
            found, num = name or _name(block), held if size < 0 else size
            name, size = "", -1
            if begin + num > num_bytes:
                if is_part:
                    return
                raise CorruptPage(
                    f"the member {found!r} at byte {place} is cut off: {num_bytes - begin} of {num} bytes are "
                    "there; copy the shard again"
                )
            last, held = repr(found), num
            if kind in (b"0", b"\0", b"7"):
                yield Member(name=found, offset=begin, num_bytes=num, begin=headers)
        place = begin + -(-held // BLOCK_BYTES) * BLOCK_BYTES
        if kind not in _OF_NEXT:
            headers = place


def member_of_header(block: bytes | memoryview) -> Member | None:
    """A member by its header alone, without the long name and size that another may say; None if it is no header."""
    header = bytes(block[:BLOCK_BYTES])
    size = _size(header) if len(header) == BLOCK_BYTES else None
    return None if size is None else Member(name=_name(header), offset=BLOCK_BYTES, num_bytes=size, begin=0)


def size_in_header(block: bytes | memoryview) -> int | None:
    """Bytes of a member by its header; None if it is no header. A size in a PAX header before it is not seen."""
    return _size(bytes(block[:BLOCK_BYTES]))


def _size(block: bytes) -> int | None:
    """The size in a header whose checksum is right."""
    try:
        checksum = int(block[148:156].strip(b" \0") or b"0", 8)
    except ValueError:
        return None
    if sum(block[:148]) + sum(block[156:]) + 8 * 0x20 != checksum:
        return None
    field_bytes = block[124:136]
    if field_bytes[0] & 0x80:
        return int.from_bytes(field_bytes[1:], "big")
    try:
        return int(field_bytes.strip(b" \0") or b"0", 8)
    except ValueError:
        return None


def _name(block: bytes) -> str:
    name = block[:100].split(b"\0", 1)[0]
    if block[257:263] == b"ustar\0":
        prefix = block[345:500].split(b"\0", 1)[0]
        name = prefix + b"/" + name if prefix else name
    return name.decode("utf-8", "surrogateescape")


def _pax(content: bytes) -> dict[str, str]:
    """Records `LENGTH KEY=VALUE` of a PAX header."""
    told: dict[str, str] = {}
    while content:
        length, _, _ = content.partition(b" ")
        if not length.isdigit() or not 0 < int(length) <= len(content):
            break
        record = content[len(length) + 1 : int(length)].rstrip(b"\n")
        key, _, value = record.partition(b"=")
        told[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        content = content[int(length) :]
    return told


# --- Indexes that others have put beside a tar shard -> its samples, without a look at each header.
#
# An index is verified as it is used: members lie inside the file and in order, nothing follows the last one that the
# index lacks, and the header of each member that is read says what the index says. An index of another file is an
# error that names it. Cost: reading the index, and two headers; the others are in the pages that a scan reads anyway.
#
#     X.idx                       DALI's, text: `v1.2 SAMPLES`, then a sample a line: SUFFIX OFFSET SIZE NAME for each
#                                 member (`v1.1`: without NAME)
#     .nv-meta/index.sqlite       Energon's, in a folder above: tables `samples` and `sample_parts`; the number of a tar
#                                 file is its place in `shard_counts` of .info.json or .info.yaml beside it

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
            raise self._other(f"the shard continues behind byte {stop}") from None
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
    from torchmix.recipe.load import parse_yaml  # YAML, which a process that only reads pages does not need

    try:
        return parse_yaml(text)[0]
    except RecipeError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _same_name(in_shard: str, in_index: str) -> bool:
    """Whether two names mean one member."""
    base, other = (name.rpartition("/")[2].partition(".") for name in (in_shard, in_index))
    return base[2].lower() == other[2].lower() and (base[0] == other[0] or other[0].startswith(_NO_KEY))
