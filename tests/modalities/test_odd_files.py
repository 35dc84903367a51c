"""Files that are made to harm a reader: what they claim is refused before it is believed."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest

from tests.support.media import MediaKind, mutated
from tests.support.odd_files import box, counted, ico_of, jpeg_of_scans, long_zeros, with_table
from tests.support.pictures import IMAGE, png_of_size
from tests.support.sounds import drawn_samples
from tests.support.videos import FORMS, VIDEO, drawn_frames, video_of
from tests.trials.media import modality_of, units_or_reason
from tests.trials.odd_files import KINDS, try_policies
from torchmix.errors import ItemUnreadable
from torchmix.modalities.images.header import header_of, read_header
from torchmix.modalities.videos import packets

CLIP = drawn_frames(np.random.default_rng(3), 8, 64, 48)
CLAIMS: dict[str, tuple[Callable[[], bytes], str]] = {
    "tables of 10^9 frames": (lambda: counted(video_of(CLIP, FORMS[0]), 10**9), "say 1000000000 frames of one size"),
    "sizes of 10^9 frames": (
        lambda: with_table(video_of(CLIP, FORMS[0]), b"stsz", 8, (10**9).to_bytes(4, "big")),
        "a table of it says 1000000000 frames",
    ),
    "a part of 10^9 frames": (
        lambda: with_table(video_of(CLIP, FORMS[4]), b"trun", 0, bytes(4) + (10**9).to_bytes(4, "big")),
        "say 1000000000 frames of one size",
    ),
    "a table that says no end": (
        lambda: with_table(counted(video_of(CLIP, FORMS[0]), 10**9), b"stsz", -8, b"\xff\xff\xff\xff"),
        "say 1000000000 frames of one size",
    ),
    "packed tables": (
        lambda: video_of(CLIP, FORMS[0])[:40] + box(b"moov", box(b"cmov", long_zeros(1 << 20))),
        "its tables are packed",
    ),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_video_that_claims_frames_is_refused_before_libav_makes_room(
    claim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, message = CLAIMS[claim]
    content = make()
    monkeypatch.setattr(packets, "import_av", None)  # nothing is opened
    found = units_or_reason(modality_of(VIDEO), content)
    assert isinstance(found, str) and message in found, found


def test_samples_of_raw_sound_beside_a_video_are_no_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format="mov") as container:
        pictures = container.add_stream("mpeg4", rate=12)
        pictures.width, pictures.height, pictures.pix_fmt = 64, 48, "yuv420p"
        sound = container.add_stream("pcm_s16le", rate=16_000, layout="mono")
        samples = (drawn_samples(np.random.default_rng(1), 16_000, 16_000) * 20_000).astype(np.int16).reshape(1, -1)
        heard = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        heard.sample_rate = 16_000
        for stream, frames in (
            (sound, [heard]),
            (pictures, [av.VideoFrame.from_ndarray(one, format="rgb24") for one in CLIP]),
        ):
            for frame in (*frames, None):
                container.mux(stream.encode(frame))
    content = file.getvalue()
    assert content.count(b"stsz") == 2
    monkeypatch.setattr(packets, "MOST_FRAMES", 1_000)
    assert isinstance(units_or_reason(modality_of(VIDEO), content), np.ndarray)
    counts = content.replace((16_000).to_bytes(4, "big") + b"\0\0\0\1", (16_000).to_bytes(4, "big") + b"\0\0\0\2")
    assert counts != content
    assert "say 16000 frames of one size" in str(units_or_reason(modality_of(VIDEO), counts))


def test_kinds_of_images_that_start_a_program_or_hold_another_image_are_none() -> None:
    icon = ico_of(png_of_size(12_000, 12_000, body=bytes(1 << 20)))
    for content in (icon, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 40\n%%EndComments\n"):
        with pytest.raises(ItemUnreadable, match="it is no image that Pillow reads here, as JPEG, PNG"):
            header_of(content)


def test_a_jpeg_of_endless_scans_is_not_decoded() -> None:
    modality = modality_of(IMAGE)
    assert isinstance(units_or_reason(modality, jpeg_of_scans(100)), np.ndarray)
    assert "it is a JPEG of 1210 scans" in str(units_or_reason(modality, jpeg_of_scans(1_200)))


def test_fill_bytes_of_a_jpeg_are_passed_over_in_blocks() -> None:
    content, reads = b"\xff\xd8" + b"\xff" * 400_000, list[int]()

    def read(at: int, count: int) -> bytes:
        reads.append(at)
        return content[at : at + count]

    with pytest.raises(ItemUnreadable):
        read_header(read, len(content))
    assert len(reads) < 500


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_damaged_file_is_named_or_masked_among_good_ones(kind: MediaKind) -> None:
    rng = np.random.default_rng(5)
    good = [kind.make(rng, 0), kind.make(rng, 4)]
    whole = kind.make(rng, 1)
    found = try_policies(kind, "files", whole[: len(whole) // 2], good)
    assert "taken" not in (found["indexed"], found["behind"]) or found.get("read", "") != "taken"
    assert found["behind"] != "taken"
    try_policies(kind, "lists", mutated(rng, whole), good)
