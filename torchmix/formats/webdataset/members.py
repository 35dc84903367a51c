"""A tar file -> its members and the samples that they make, without unpacking.

In: a file, as a function that reads ranges. Out: for each sample the place of each member by its suffix. Must hold: the
key of a member is its path up to the first dot of its last component, and the rest in lower case is its suffix, as
WebDataset has it; only consecutive members of a key are a sample; members whose last component begins with a dot are
passed over. A member that is cut off, a header that is none and a suffix that stands twice in a sample are errors that
name the member. Cost: a header of 512 bytes a member is read. The tar format is POSIX.1-2001's, with GNU's long names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import msgspec

from torchmix.errors import CorruptPage, SourceUnreadable

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
