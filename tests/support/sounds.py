"""Sounds for tests: files of every form, and their features by loops, from libsndfile's whole decoding."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from tests.support.media import MediaKind

FORMS = (
    ("WAV", "PCM_16"),
    ("FLAC", "PCM_16"),
    ("OGG", "VORBIS"),
    ("MP3", "MPEG_LAYER_III"),
    ("WAV", "FLOAT"),
    ("OGG", "OPUS"),
    ("WAVEX", "PCM_24"),
    ("RF64", "PCM_16"),
    ("WAV", "ULAW"),
)
RATES = (8_000, 16_000, 24_000, 48_000, 12_000)
"""All forms have these; all but Opus have 44,100, too."""
MELS, CHUNK_S = 8, 2
WORDS: dict[str, Any] = {"rule": "qwen2_audio", "mels": MELS, "chunk_seconds": CHUNK_S}


def sound_of(samples: np.ndarray, rate: int, form: tuple[str, str]) -> bytes:
    """A file of samples, float [n] or [n, channels]."""
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=form[0], subtype=form[1])
    return file.getvalue()


def drawn_samples(rng: np.random.Generator, count: int, rate: int, channels: int = 1) -> np.ndarray:
    """Some tones and noise, float32 [count, channels]."""
    time = np.arange(count)[:, None] / rate
    tones = np.sin(2 * np.pi * rng.uniform(80, rate / 3, channels) * time) * rng.uniform(0.05, 0.4)
    return (tones + rng.normal(0, 0.02, (count, channels))).astype(np.float32)


def make_sound(rng: np.random.Generator, number: int) -> bytes:
    """A sound of up to some seconds."""
    form = FORMS[number % len(FORMS)]
    rate = int(rng.choice(RATES if form[1] == "OPUS" else (*RATES, 44_100, 22_050)))
    count, channels = int(rng.integers(rate // 10, rate * 5)), int(rng.integers(1, 3))
    return sound_of(drawn_samples(rng, count, rate, channels), rate, form)


def whole_waveform(content: bytes) -> np.ndarray:
    """All samples at 16,000 a second, as one channel, as librosa makes them with soxr."""
    import soundfile
    import soxr

    samples, rate = soundfile.read(io.BytesIO(content), dtype="float32", always_2d=True)
    mono = samples.mean(axis=1)
    found = mono if rate == 16_000 else soxr.resample(mono, rate, 16_000, quality="HQ")
    length = -(-len(mono) * 16_000 // rate)
    return np.pad(found, (0, max(0, length - len(found))))[:length]


def slow_features(chunk: np.ndarray, mels: int) -> np.ndarray:
    """Log-mel features as the paper of Whisper and its code have them, column by column."""
    padded = np.pad(chunk.astype(np.float64), 200, mode="reflect")
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)
    power = np.array([np.abs(np.fft.rfft(padded[at : at + 400] * window)) ** 2 for at in range(0, len(chunk), 160)])
    top = 15 + np.log(8) / (np.log(6.4) / 27)
    edges = [
        200 * m / 3 if m < 15 else 1000 * np.exp(np.log(6.4) / 27 * (m - 15)) for m in np.linspace(0, top, mels + 2)
    ]
    found = np.zeros((mels, len(power)))
    for row in range(mels):
        low, middle, high = edges[row : row + 3]
        for k in range(201):
            height = min((40 * k - low) / (middle - low), (high - 40 * k) / (high - middle))
            if height > 0:
                found[row] += height * 2 / (high - low) * power[:, k]
    log = np.log10(np.maximum(found, 1e-10))
    return ((np.maximum(log, log.max() - 8) + 4) / 4).T


def slow_units(content: bytes, *, mels: int = MELS, chunk_s: int = CHUNK_S) -> np.ndarray:
    """What an encoder gets, [positions, 2 * mels]."""
    samples, chunk = whole_waveform(content), chunk_s * 16_000
    chunks = [samples[at : at + chunk] for at in range(0, len(samples), chunk)]
    found = [slow_features(np.pad(one, (0, chunk - len(one))), mels) for one in chunks]
    return np.concatenate(found).reshape(-1, 2 * mels)


def tokens_of_sound(content: bytes) -> int:
    """As Qwen2-Audio counts them, for each chunk."""
    left, found = len(whole_waveform(content)), 0
    while left > 0:
        heard = -(-min(left, CHUNK_S * 16_000) // 160)
        found += ((heard - 1) // 2 + 1 - 2) // 2 + 1
        left -= CHUNK_S * 16_000
    return found


def odd_sounds() -> dict[str, tuple[bytes, str]]:
    """See `MediaKind.odd`."""
    rng = np.random.default_rng(3)
    short = drawn_samples(rng, 16_000, 16_000)
    wav, flac, ogg, opus, mp3 = (
        sound_of(short, 16_000, form)
        for form in (
            ("WAV", "PCM_16"),
            ("FLAC", "PCM_16"),
            ("OGG", "VORBIS"),
            ("OGG", "OPUS"),
            ("MP3", "MPEG_LAYER_III"),
        )
    )
    data = wav.index(b"data")
    form = wav.index(b"fmt ") + 8
    bare = np.full((16_000, 1), np.nan, np.float32)
    longer = sound_of(drawn_samples(rng, 48_000, 16_000), 16_000, ("OGG", "VORBIS"))
    return {
        "a text": (b"what is heard", "no WAV, FLAC, OGG or MP3"),
        "a picture": (b"\x89PNG\r\n\x1a\n" + bytes(100), "no WAV, FLAC, OGG or MP3"),
        "a video": (bytes(4) + b"ftypisom" + bytes(100), "no WAV, FLAC, OGG or MP3"),
        "a WAV cut off": (wav[:9_000], "cut off: its header says 32000 bytes"),
        "a WAV cut in its header": (wav[:30], "cut off after 30 bytes"),
        "a WAV without samples": (wav[: data + 4] + bytes(4), "no samples"),
        "a WAV of ADPCM": (sound_of(short, 16_000, ("WAV", "MS_ADPCM")), "a WAV of the form 2"),
        "a WAV at 1 Hz": (wav[: form + 4] + b"\1\0\0\0" + wav[form + 8 :], "1 samples a second"),
        "a WAV of no channel": (wav[: form + 2] + bytes(2) + wav[form + 4 :], "blocks of 2 bytes"),
        "a WAV of NaN": (sound_of(bare, 16_000, ("WAV", "FLOAT")), "no numbers"),
        "a WAV of a click": (sound_of(short[:100], 16_000, ("WAV", "PCM_16")), "too short for a token"),
        "a WAV of an hour": (
            sound_of(np.zeros(14_400_000, np.int16), 4_000, ("WAV", "ULAW")),
            "more than most_seconds",
        ),
        "a FLAC without a length": (flac[:18] + flac[18:22] + bytes(4) + flac[26:], "does not say how long"),
        "a FLAC cut off": (flac[: len(flac) // 2], "it does not decode"),
        "a FLAC that says more": (flac[:25] + b"\xff" + flac[26:], "decode"),
        "an OGG cut off": (ogg[:-100], "no page of it ends"),
        "an OGG without its middle": (longer[:5_000] + longer[9_000:], "decode"),
        "two OGG in one": (ogg + opus, "several sounds"),
        "an OGG of another kind": (ogg.replace(b"\x01vorbis", b"\x7fFLAC\1\0", 1), "Vorbis and Opus are read"),
        "an MP3 cut off": (mp3[: len(mp3) // 2], "cut off: its header says"),
        "an MP3 of one frame": (mp3[:300], "30 frames, and 0 are there"),
        "an ID3 tag without a sound": (b"ID3\4\0\0\0\0\0\x20" + bytes(42), "no two frames"),
    }


SOUND = MediaKind(
    kind="sound",
    suffix="snd",
    words=WORDS,
    sizes="positions",
    unit_array="input_features",
    make=make_sound,
    units=slow_units,
    tokens=tokens_of_sound,
    odd=odd_sounds,
    packages=("soundfile", "soxr"),
    shown=("<svg", "<audio controls"),
    tolerance=2e-6,
)
