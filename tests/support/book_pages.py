"""Pages and identities of files as docs/formats.md tells them, written again from its text, one document at a time.

Nothing here imports torchmix or numpy.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence


def indexed_pages(starts: Sequence[int], tokens: Sequence[int], token_bytes: int) -> list[list[int]]:
    """Section "Pages", of `megatron`: [offset, bytes, rows] of each page of documents that begin at these bytes."""
    pages: list[list[int]] = []
    before, waiting, last_end, last_block = 0, 0, None, None
    for start, count in zip(starts, tokens, strict=True):
        if count == 0:
            if pages:
                pages[-1][2] += 1
            else:
                waiting += 1
            continue
        block = before // 65536
        if not pages or start != last_end or block != last_block:
            pages.append([start, 0, 0])
        pages[-1][1] += count * token_bytes
        pages[-1][2] += 1 + waiting
        before, waiting = before + count * token_bytes, 0
        last_end, last_block = start + count * token_bytes, block
    return pages


def indexed_footer_hash(bin_content: bytes, idx_content: bytes) -> str:
    """Section "Footer hash", of `megatron`."""
    parts = [struct.pack("<qq", len(bin_content), len(idx_content))]
    block = 4096
    for content in (idx_content, bin_content):
        if len(content) <= 16 * block:
            parts.append(content)
        else:
            starts = [i * (len(content) - block) // 15 for i in range(16)]
            parts += [content[start : start + block] for start in starts]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:32]


def line_pages(line_bytes: Sequence[int], frame_bytes: Sequence[int] | None) -> list[list[int]]:
    """Section "Pages of JSON lines and Arrow": lines of these sizes, negative for blank ones.

    Of a plain file [offset, bytes, rows] of each page; of one in frames of so much content each, the first frame of a
    page, its frames, its rows, and what its codec has more than 1 or 2.
    """
    starts = [sum(abs(size) for size in line_bytes[:i]) for i in range(len(line_bytes) + 1)]
    if frame_bytes is None:
        rows_of_cell: dict[int, list[int]] = {}
        for i, size in enumerate(line_bytes):
            page = rows_of_cell.setdefault(starts[i] // 65536, [starts[i], 0, 0])
            page[1] += abs(size)
            page[2] += size > 0
        return [page for page in rows_of_cell.values() if page[2]]
    frames = [sum(frame_bytes[:i]) for i in range(len(frame_bytes) + 1)]
    pages: list[list[int]] = []
    for cell in range(frames[-1] // 65536 + 1):
        own = [i for i in range(len(frame_bytes)) if frames[i] // 65536 == cell]
        lines = [i for i in range(len(line_bytes)) if own and frames[own[0]] <= starts[i] < frames[own[-1] + 1]]
        if not any(line_bytes[i] > 0 for i in lines):
            continue
        end = starts[lines[-1] + 1]
        last = next(i for i in range(len(frame_bytes)) if frames[i + 1] >= end)
        last = max(last, own[-1])
        flags = 4 * (frames[own[0]] not in starts) + 8 * (frames[last + 1] > end)
        pages.append([own[0], last + 1 - own[0], sum(line_bytes[i] > 0 for i in lines), flags])
    return pages


def row_pages(row_bytes: Sequence[int]) -> list[int]:
    """Section "Pages of JSON lines and Arrow": rows of each page of a batch whose rows have so many bytes of values."""
    pages: list[int] = []
    start, last_block = 0, None
    for i, size in enumerate(row_bytes):
        block = start // 65536 if any(row_bytes[i:]) else last_block
        if block != last_block:
            pages.append(0)
        pages[-1] += 1
        start, last_block = start + size, block
    return pages


def ends_hash(content: bytes) -> str:
    """Section "Footer hash", of `jsonl` and `arrow`."""
    return hashlib.sha256(content[:32768] + content[max(0, len(content) - 32768) :]).hexdigest()[:32]
