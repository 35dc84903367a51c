"""Sounds, as the seam asks for them: what is of sounds alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.sizes import Column
from torchmix.errors import ItemUnreadable, OptionError
from torchmix.modalities.modality import Alter, DraftOfKind, ItemSizes, Measures, Modality, ReadRange, TowerForm
from torchmix.modalities.sounds.features import HOP, RATE, chunks_of, decoder_id, log_mel, resampled, waveform
from torchmix.modalities.sounds.header import (
    HEADER_VERSION,
    SoundHeader,
    header_of,
    is_mp3,
    read_header,
)
from torchmix.recipe.sounds import Sounds

TOKENS_PER_SECOND = 50
"""By the default rule, of whole chunks."""
_SHOWN_CHUNKS = 4
_MEDIA = {"wav": "audio/wav", "flac": "audio/flac", "ogg": "audio/ogg", "mp3": "audio/mpeg"}


class SoundModality(Modality, frozen=True, kw_only=True):
    """The sounds of a source; a unit is a position of the encoder, of two columns of features."""

    words: Sounds

    kind: ClassVar[str] = Sounds.kind
    header_id: ClassVar[str] = f"sounds-{HEADER_VERSION}"
    measured: ClassVar[tuple[str, ...]] = ("samples", "rate", "channels")
    units: ClassVar[str] = "positions"
    segments: ClassVar[str | None] = "chunks"
    unit_array: ClassVar[str] = "input_features"
    unit_type: ClassVar[np.dtype[Any]] = np.dtype(np.float32)
    item_arrays: ClassVar[Mapping[str, tuple[str, ...]]] = {"feature_lengths": ("heard",)}
    stand_in_name: ClassVar[str] = "silence"
    builds_differ: ClassVar[str] = "features of sounds may differ in their last bits"
    suffixes: ClassVar[str] = "wav|flac|ogg|oga|opus|mp3"
    column_words: ClassVar[str] = "audio|sound|speech|wav|mp3|flac"
    shown_by: ClassVar[str] = "audio"
    draft: ClassVar[DraftOfKind] = DraftOfKind(
        columns=("audio", "sound", "speech", "wav", "flac", "mp3", "ogg", "wav|flac|mp3", "audio_path"),
        tokens=(
            ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),  # Qwen2-Audio
            ("<|audio_pad|>", "<|audio_start|>", "<|audio_end|>"),  # Qwen2.5-Omni
            ("<audio>",),
        ),
        options=(("rule", "whisper"), ("mels", "80")),
        note="sounds by Whisper's rule, 1,500 tokens for each 30 s; docs/sounds.md has others",
        module=(
            "hearing:                    # the encoder of the sounds: all ranks, each its part; docs/sounds.md",
            "  items: sound",
            "  sizes: positions",
            "  near_text: 5%             # how far above the least possible a rank's work may be, so fewer rows travel",
            "  # what a sound costs: write the dimensions of your encoder",
            "  model: {layers: 32, hidden: 1280, ffn: 5120, heads: 20, out: 4096}",
        ),
    )

    def measure(self, read: ReadRange, num_bytes: int) -> Measures:
        """See `Modality`."""
        header = read_header(read, num_bytes)
        if header.samples > self.words.most_seconds * header.rate:
            message = f"its header says {header.samples / header.rate:.1f} s, more than most_seconds"
            raise ItemUnreadable(f"{message} {self.words.most_seconds}")
        if self.words.channel is not None and self.words.channel >= header.channels:
            raise ItemUnreadable(f"it has {header.channels} channels, and channel {self.words.channel} is to be heard")
        if not self._tokens(self._heard(np.array([header.samples]), np.array([header.rate])))[0]:
            raise ItemUnreadable(f"it is too short for a token: {header.samples} samples at {header.rate}")
        return header[1:]

    def sizes(self, measures: Mapping[str, Column]) -> ItemSizes:
        """See `Modality`."""
        heard = self._heard(np.asarray(measures["samples"], np.int64), np.asarray(measures["rate"], np.int64))
        chunks = -(-heard // self._columns)
        columns = {"chunks": chunks, "heard": heard, "positions": chunks * (self._columns // 2)}
        return ItemSizes(tokens=self._tokens(heard), columns=columns)

    @property
    def _columns(self) -> int:
        """Columns of features of a chunk; even."""
        return self.words.chunk_seconds * RATE // HOP

    def _heard(self, samples: Int64Array, rate: Int64Array) -> Int64Array:
        """Columns of features that are of the sound, and not of the silence behind it."""
        found: Int64Array = -(-resampled(samples, rate) // HOP)
        most = self._columns if self.words.longer == "cut" else np.iinfo(np.int64).max
        return np.minimum(found, most)

    def _tokens(self, heard: Int64Array) -> Int64Array:
        if self.words.rule == "whisper":
            found: Int64Array = -(-heard // self._columns) * (self._columns // 2)
            return found
        whole, rest = heard // self._columns, heard % self._columns
        return np.asarray(whole * _pooled(self._columns) + np.where(rest > 0, _pooled(rest), 0), np.int64)

    @property
    def rule_id(self) -> str:
        """See `Modality`."""
        return f"{self.words.rule}:{self.words.chunk_seconds}:{self.words.longer}"

    @property
    def bounds_id(self) -> str:
        """See `Modality`."""
        return f"{self.words.most_seconds}:{'' if self.words.channel is None else self.words.channel}"

    @property
    def decoding_id(self) -> str:
        """See `Modality`."""
        return f"{self.words.mels}:{'mean' if self.words.channel is None else self.words.channel}"

    @property
    def unit_values(self) -> int:
        """See `Modality`; two columns, which the encoder's second convolution makes one position of."""
        return 2 * self.words.mels

    def tower_form(self) -> TowerForm:
        """See `Modality`; chunks, each of its filters by columns."""
        mels = self.words.mels
        return TowerForm(split=(self._columns // 2, 2, mels), order=(2, 0, 1), shape=(mels, self._columns))

    def decode(
        self, content: bytes | memoryview, measures: Measures, alter: Alter | None = None
    ) -> NDArray[np.float32]:
        """See `Modality`; what is altered are the samples that are heard, float32 [samples] at RATE."""
        header, chunk = header_of(content), self._columns * HOP
        self.check_measures(header[1:], measures)
        most = chunk if self.words.longer == "cut" else header.samples * RATE
        chunks: Iterable[NDArray[np.float32]] = chunks_of(
            content, header, channel=self.words.channel, chunk=chunk, most=most
        )
        if alter is not None:
            held, heard = np.concatenate(list(chunks)), min(resampled(header.samples, header.rate), most)
            held[:heard] = alter(held[:heard].copy())
            chunks = held.reshape(-1, chunk)
        return self._units(log_mel(one, self.words.mels) for one in chunks)

    def _units(self, chunks: Iterable[NDArray[np.float32]]) -> NDArray[np.float32]:
        found: NDArray[np.float32] = np.concatenate(list(chunks)).reshape(-1, self.unit_values)
        return found

    def stand_in(self, measures: Measures) -> NDArray[np.float32]:
        """See `Modality`."""
        header = SoundHeader("", *measures)
        heard = self._heard(np.array([header.samples]), np.array([header.rate]))[0]
        silence = log_mel(np.zeros(self._columns * HOP, np.float32), self.words.mels)
        return self._units([silence] * int(-(-heard // self._columns)))

    def pictures(self, units: NDArray[Any], columns: Mapping[str, int]) -> list[NDArray[np.uint8]]:
        """See `Modality`; the features of the first chunks, low tones below and loud ones bright."""
        chunks = units.reshape(columns["chunks"], -1, self.words.mels)[:_SHOWN_CHUNKS].astype(np.float32)
        least = chunks.min()
        levels = 255 * (chunks - least) / max(1e-6, float(chunks.max() - least))
        return [np.repeat(one.T[::-1, :, None], 3, axis=2) for one in levels.astype(np.uint8)]

    @classmethod
    def build_id(cls) -> str:
        """See `Modality`."""
        return decoder_id()

    @classmethod
    def media_type(cls, content: bytes | memoryview) -> str:
        """See `Modality`."""
        return _MEDIA[header_of(content).kind]

    def preview(self, content: bytes | memoryview) -> str:
        """See `Modality`; with its waveform, where it decodes."""
        try:
            shown = waveform(content, header_of(content))
        except (ItemUnreadable, OptionError):
            shown = ""
        return shown + super().preview(content)

    @classmethod
    def seems_item(cls, value: bytes) -> bool:
        """See `Modality`."""
        is_wav = value[:4] in (b"RIFF", b"RF64") and value[8:12] == b"WAVE"
        is_ogg = value[:4] == b"OggS" and (b"\x01vorbis" in value[:64] or b"OpusHead" in value[:64])
        return is_wav or is_ogg or value[:4] == b"fLaC" or is_mp3(value[:4])

    @classmethod
    def usual_tokens(cls, value: bytes) -> float:
        """See `Modality`."""
        words = Sounds(column="-", token=0)
        try:
            header = header_of(value)
        except ItemUnreadable:
            return float(TOKENS_PER_SECOND * words.chunk_seconds)
        heard = {"samples": np.array([header.samples]), "rate": np.array([header.rate])}
        return float(cls(words=words).sizes(heard).tokens[0])


def _pooled(heard: Any) -> Any:
    """Tokens of a chunk by Qwen2-Audio: two columns make a position, and two positions a token."""
    return ((heard - 1) // 2 + 1 - 2) // 2 + 1
