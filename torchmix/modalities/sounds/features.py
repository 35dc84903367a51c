"""Bytes of a sound -> its log-mel features: decoded, mixed to one channel, resampled, cut into chunks."""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.errors import ItemUnreadable, OptionError
from torchmix.modalities.sounds.header import SoundHeader, with_frame_count

# --- A chunk of a sound -> its log-mel features, as Whisper's.
#
# Equal, bit for bit, to the extractor of transformers that needs no torch; the one with torch differs in the last bits.
# A column of features is the power of 400 samples under a Hann window, every 160 samples, through triangular filters of
# the mel scale of Slaney's Auditory Toolbox, as a logarithm that is cut 8 below the largest of the chunk. Cost: one FFT
# a column, and two operations for each of some 400 weights.

RATE = 16_000
"""Samples a second that the features are made of."""
HOP, WINDOW = 160, 400
"""Samples from one column of features to the next, and under the window of each."""
HIGHEST_HZ = 8_000.0
_FLOOR = 1e-10


def log_mel(chunk: NDArray[np.float32], mels: int) -> NDArray[np.float32]:
    """Features of a chunk, [samples / HOP, mels].

    Args:
        chunk: float32 [samples] in [-1, 1]; a multiple of HOP, at least WINDOW.
        mels: Filters of the bank.
    """
    padded = np.pad(chunk, WINDOW // 2, mode="reflect").astype(np.float64)
    frames = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP]
    spectrum = np.fft.rfft(frames * _hann()).astype(np.complex64)
    power = np.abs(spectrum, dtype=np.float64) ** 2.0
    found = np.log10(np.maximum(_FLOOR, _filtered(power, mels))).astype(np.float32)[:, :-1]
    found = (np.maximum(found, found.max() - 8.0) + 4.0) / 4.0
    return np.ascontiguousarray(found.T)


def _filtered(power: NDArray[np.float64], mels: int) -> NDArray[np.float64]:
    """Power under each filter, [mels, columns]; summed in one order, where that of BLAS depends on its threads."""
    of_bins, bank = np.ascontiguousarray(power.T), mel_filters(mels)
    found = np.zeros((mels, len(power)))
    for row, weights in zip(found, bank.T, strict=True):
        for place in np.flatnonzero(weights).tolist():
            row += weights[place] * of_bins[place]
    return found


@lru_cache(maxsize=1)
def _hann() -> NDArray[np.float64]:
    return np.hanning(WINDOW + 1)[:-1]


@lru_cache(maxsize=8)
def mel_filters(mels: int) -> NDArray[np.float64]:
    """The bank, [WINDOW / 2 + 1, mels]: triangles of equal area over the frequencies of the FFT."""
    edges = _hertz(np.linspace(0.0, _highest_mel(), mels + 2))
    bins = np.linspace(0, RATE // 2, WINDOW // 2 + 1)
    widths = np.diff(edges)
    slopes = np.expand_dims(edges, 0) - np.expand_dims(bins, 1)
    triangles = np.maximum(0.0, np.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]))
    area = 2.0 / (edges[2 : mels + 2] - edges[:mels])
    return triangles * np.expand_dims(area, 0)


def _highest_mel() -> float:
    return float(15.0 + np.log(HIGHEST_HZ / 1000.0) * (27.0 / np.log(6.4)))


def _hertz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    """Slaney's scale: linear below 1,000 Hz, logarithmic above."""
    found = 200.0 * mel / 3.0
    is_log = mel >= 15.0
    found[is_log] = 1000.0 * np.exp(np.log(6.4) / 27.0 * (mel[is_log] - 15.0))
    return found


# --- Bytes of a sound -> its samples, as one channel at the rate of the features, a chunk at a time.
#
# libsndfile decodes, soxr resamples with its filter HQ, and what it gives is filled up to the length that follows from
# the header, rounded up, as librosa does. One thread; never more than a block and a chunk are held. Cost: that of both.

_BLOCK_VALUES = 1 << 17
_NO_MEMORY = 17
"""libsndfile's SFE_MALLOC_FAILED."""
_MP3_SLACK = 2 * 1152
"""Samples by which decoders of MP3 may differ over frames at both ends; such are filled with zeros, or left out."""


def chunks_of(
    content: bytes | memoryview, header: SoundHeader, *, channel: int | None, chunk: int, most: int
) -> Iterator[NDArray[np.float32]]:
    """The samples of a sound, float32 [chunk] each; the last one is filled with zeros.

    Args:
        content: Its bytes.
        header: Of the bytes.
        channel: The one to take; None: the mean of all.
        chunk: Samples of a chunk at RATE.
        most: Samples at RATE behind which nothing is taken.

    Raises:
        ItemUnreadable: It does not decode, is shorter or longer than its header says, or holds no numbers.
    """
    soundfile, soxr = import_sound()
    left = min(resampled(header.samples, header.rate), most)
    held = np.zeros(0, np.float32)
    to_rate = None if header.rate == RATE else soxr.ResampleStream(header.rate, RATE, 1, dtype="float32", quality="HQ")
    for block, is_last in _blocks(soundfile, content, header):
        mixed = block[:, channel] if channel is not None else block.mean(axis=1, dtype=np.float32)
        held = np.concatenate([held, mixed if to_rate is None else to_rate.resample_chunk(mixed, last=is_last)])
        while len(held) >= chunk and left > 0:
            whole, held = held[:chunk].copy(), held[chunk:]
            whole[left:] = 0
            yield whole
            left -= chunk
        if left <= 0:
            return
    while left > 0:
        last = np.zeros(chunk, np.float32)
        last[: min(left, len(held))] = held[: min(left, chunk)]
        yield last
        held, left = held[chunk:], left - chunk


def resampled(samples: Any, rate: Any) -> Any:
    """Samples at RATE of so many at a rate, rounded up; also of arrays."""
    return -(-samples * RATE // rate)


def _blocks(
    soundfile: Any, content: bytes | memoryview, header: SoundHeader
) -> Iterator[tuple[NDArray[np.float32], bool]]:
    """float32 [samples, channels], as many samples in sum as the header says; and whether it is the last."""
    is_mp3 = header.kind == "mp3"
    size = max(1, _BLOCK_VALUES // header.channels)
    try:
        with _read_forward(soundfile)(io.BytesIO(with_frame_count(content) if is_mp3 else content)) as file:
            if (file.samplerate, file.channels) != (header.rate, header.channels):
                raise ItemUnreadable(
                    f"its header says {header.channels} channels of {header.rate} samples a second, its decoder "
                    f"{file.channels} of {file.samplerate}"
                )
            # As `soundfile.read` begins: without it libsndfile leaves the pre-skip of some Opus files in, and the first
            # samples of an MP3 are others in their last bits.
            file.seek(0)
            left = header.samples
            while left:
                block = file.read(min(size, left), dtype="float32", always_2d=True)
                if not np.isfinite(block).all():
                    raise ItemUnreadable("it has samples that are no numbers")
                if not len(block):
                    if left > (_MP3_SLACK if is_mp3 else 0):
                        raise ItemUnreadable(
                            f"its header says {header.samples} samples, and {header.samples - left} decode"
                        )
                    block = np.zeros((left, header.channels), np.float32)
                left -= len(block)
                yield block, not left
            if not is_mp3 and len(file.read(1, dtype="float32")):
                raise ItemUnreadable(f"its header says {header.samples} samples, and more decode")
    except (ItemUnreadable, MemoryError):
        raise
    except Exception as error:  # libsndfile's errors are of several kinds
        if getattr(error, "code", None) == _NO_MEMORY:
            raise MemoryError(str(error)) from None
        message = " ".join(str(error).split())
        raise ItemUnreadable(f"it does not decode ({type(error).__name__}: {message[-120:]})") from None


@lru_cache(maxsize=1)
def _read_forward(soundfile: Any) -> Any:
    """`soundfile.SoundFile` without its seek after each read, which of MP3 and Opus alters the samples behind it."""

    class ReadForward(soundfile.SoundFile):  # type: ignore[misc]
        def seekable(self) -> bool:
            return False

    return ReadForward


def decoder_id() -> str:
    """The build that decodes here: versions of libsndfile, of soxr and of numpy, whose FFT is used."""
    soundfile, soxr = import_sound()
    return f"libsndfile {soundfile.__libsndfile_version__},soxr {soxr.__libsoxr_version__},numpy {np.__version__}"


def import_sound() -> tuple[Any, Any]:
    """The modules soundfile and soxr.

    Raises:
        OptionError: One is not installed.
    """
    try:
        import soundfile
        import soxr
    except (ImportError, OSError) as error:  # OSError: libsndfile does not load
        raise OptionError(
            f"sounds need the packages soundfile and soxr: pip install soundfile soxr ({error})"
        ) from error
    return soundfile, soxr


MOST_BARS = 240


def waveform(content: bytes | memoryview, header: SoundHeader) -> str:
    """An SVG of how loud a sound is, over its time."""
    samples = resampled(header.samples, header.rate)
    bar = -(-samples // MOST_BARS)
    peaks: list[float] = []
    for chunk in chunks_of(content, header, channel=None, chunk=bar * 64, most=samples):
        peaks += np.abs(chunk).reshape(-1, bar).max(axis=1).tolist()
    lines = "".join(
        f"M{x} {40 - 40 * min(1.0, peak):.1f}V{40 + 40 * min(1.0, peak):.1f}"
        for x, peak in enumerate(peaks[:MOST_BARS])
    )
    return f'<svg width="{MOST_BARS}" height="80"><path d="{lines}" stroke="currentColor"/></svg>'
