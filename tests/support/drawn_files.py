"""Encoded images, sounds and videos of every form, drawn by a random generator: codecs, sizes, rates, turns."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from tests.support.sounds import drawn_samples
from tests.support.synthetic_images import make_image
from tests.support.videos import drawn_frames, video_of

SOUND_FORMS = (
    *(("WAV", subtype) for subtype in ("PCM_16", "PCM_24", "PCM_32", "PCM_U8", "FLOAT", "DOUBLE", "ULAW", "ALAW")),
    ("WAVEX", "PCM_16"),
    ("RF64", "PCM_24"),
    *(("FLAC", subtype) for subtype in ("PCM_16", "PCM_24", "PCM_S8")),
    ("OGG", "VORBIS"),
    ("OGG", "OPUS"),
    ("MP3", "MPEG_LAYER_III"),
)
SOUND_RATES = (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 96_000)
OPUS_RATES = (8_000, 12_000, 16_000, 24_000, 48_000)
VIDEO_FORMS = (
    ("mp4", "libx264"),
    ("mp4", "libx264 fragments"),
    ("mp4", "libx265"),
    ("mp4", "libsvtav1"),
    ("mov", "libx264"),
    ("mov", "mpeg4"),
    ("webm", "libvpx"),
    ("webm", "libvpx-vp9"),
    ("webm", "libsvtav1"),
    ("matroska", "libx264"),
    ("matroska", "libvpx-vp9"),
)
TURNS = (0, 90, 180, -90)


def draw_image(rng: np.random.Generator) -> tuple[str, bytes]:
    """A form, and a file of up to 200 pixels a side, mostly small ones; rules refuse what is longer by more."""
    image = make_image(rng, most_side=min(200, int(np.exp(rng.uniform(2, 5.5)))))
    return f"{image.kind} {image.mode}", image.content


def draw_sound(rng: np.random.Generator) -> tuple[str, bytes]:
    """A form, and a file of up to some seconds."""
    import soundfile

    form = SOUND_FORMS[rng.integers(len(SOUND_FORMS))]
    is_mp3 = form[0] == "MP3"
    rate = int(rng.choice(OPUS_RATES if form[1] == "OPUS" else SOUND_RATES[:-1] if is_mp3 else SOUND_RATES))
    channels = int(rng.choice([1, 2] if is_mp3 else [1, 1, 2, 2, 3, 6]))
    count = int(np.exp(rng.uniform(np.log(rate * 0.06), np.log(rate * 4))))
    options: dict[str, Any] = {}
    if is_mp3:
        options = {"bitrate_mode": str(rng.choice(["CONSTANT", "AVERAGE", "VARIABLE"]))}
    if form[0] in ("FLAC", "MP3", "OGG"):
        options["compression_level"] = float(rng.integers(0, 10)) / 10
    file = io.BytesIO()
    samples = drawn_samples(rng, count, rate, channels)
    soundfile.write(file, samples, rate, format=form[0], subtype=form[1], **options)
    content = file.getvalue()
    if is_mp3 and rng.random() < 0.3:
        size = int(rng.integers(1, 3000))
        content = b"ID3\4\0\0\0\0" + bytes([size >> 7, size & 0x7F]) + bytes(size) + content
    if form[0] == "WAV" and rng.random() < 0.3:
        content = _with_chunk(content, b"LIST", bytes(int(rng.integers(1, 99))))
    return " ".join(form), content


def _with_chunk(wav: bytes, name: bytes, body: bytes) -> bytes:
    """A WAV with a chunk before its samples; of odd length it is filled up."""
    at = wav.index(b"data")
    chunk = name + len(body).to_bytes(4, "little") + body + bytes(len(body) % 2)
    size = int.from_bytes(wav[4:8], "little") + len(chunk)
    return wav[:4] + size.to_bytes(4, "little") + wav[8:at] + chunk + wav[at:]


def draw_video(rng: np.random.Generator) -> tuple[str, bytes]:
    """A form, and a file of up to some seconds; some are turned, some have frames at uneven times."""
    import av

    form = VIDEO_FORMS[rng.integers(len(VIDEO_FORMS))]
    least = 32 if form[1] in ("libsvtav1", "libx265") else 8  # half of the least that encoders take, in pixels
    width, height = (2 * int(side) for side in rng.integers(least, 60, 2))
    count, rate = int(rng.integers(1, 30)), int(rng.choice([1, 5, 12, 25, 30, 60]))
    times = np.cumsum(rng.integers(1, 4, count)).tolist() if rng.random() < 0.3 else None
    turn = int(rng.choice(TURNS)) if form[0] in ("mp4", "mov") else 0
    keys, bframes = int(rng.choice([1, 6, 250])), int(rng.integers(0, 4))
    frames = drawn_frames(rng, count, width, height)
    options = {"rate": rate, "times": times, "turn": turn, "keys": keys, "bframes": bframes}
    if form[1] == "libx264" and rng.random() < 0.3:
        options["pixels"] = "yuv444p" if rng.random() < 0.5 else "yuv420p10le"
    try:
        return " ".join(form), video_of(frames, form, **options)
    except av.error.FFmpegError:  # an encoder or a container does not take them together
        return draw_video(rng)


DRAW = {"image": draw_image, "sound": draw_sound, "video": draw_video}
