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
    for content, block in ((idx_content, 32768), (bin_content, 4096)):
        if len(content) <= 16 * block:
            parts.append(content)
        else:
            starts = [i * (len(content) - block) // 15 for i in range(16)]
            parts += [content[start : start + block] for start in starts]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:32]
