"""Sounds and videos: lengths, values, odd files, commands, and what ranks get over readers and layouts."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml

import torchmix
from tests.support.decoded_work import CountedStream
from tests.support.media import (
    AFTER,
    BEFORE,
    END,
    ITEM,
    MediaKind,
    MediaRow,
    make_media_rows,
    write_media,
    write_media_project,
)
from tests.support.sounds import FORMS, SOUND, drawn_samples, sound_of
from tests.support.videos import FORMS as VIDEO_FORMS
from tests.support.videos import VIDEO, drawn_frames, video_of
from tests.trials.media import CASES, KINDS, LENGTH, modality_of, try_odd, try_readers, units_or_reason
from torchmix.cli.main import main
from torchmix.errors import CorruptPage, ItemUnreadable, MemoryLimit, OptionError, RecipeError
from torchmix.indexing.scan import index_recipe
from torchmix.modalities.modality import PlannedItem, ReadRange
from torchmix.modalities.sounds.header import header_of, with_frame_count
from torchmix.modalities.table import build_of
from torchmix.modalities.videos.frames import decoded_frames
from torchmix.modalities.videos.kind import VideoModality
from torchmix.modalities.videos.packets import opened, packets_of
from torchmix.reader.items import ItemReader
from torchmix.recipe.load import check_recipe, load_recipe

ALL_KINDS = pytest.mark.parametrize("kind", KINDS.values(), ids=str)
NEW_KINDS = pytest.mark.parametrize("kind", [SOUND, VIDEO], ids=str)
"""tests/modalities/images and tests/system/test_images.py have those of images."""
HERE = tuple(case for case in CASES if case[1] != "loaders" and "node" not in case[1])
"""Cases that start no process beside a worker."""


@ALL_KINDS
def test_odd_and_broken_files_are_named(kind: MediaKind) -> None:
    modality = modality_of(kind)
    for name, (content, message) in kind.odd().items():
        found = units_or_reason(modality, content)
        assert isinstance(found, str) and message in found, f"{name}: {found}"


@ALL_KINDS
def test_damaged_files_are_refused_or_read_as_planned(kind: MediaKind) -> None:
    found = [try_odd(kind, 7, number) for number in range(30)]
    assert 5 < sum("refused" in one for one in found) < 30


@pytest.mark.slow
@NEW_KINDS
def test_every_value_of_every_rank_is_that_of_other_code_also_after_a_resume(kind: MediaKind) -> None:
    assert try_readers(kind, 5, 0, cases=HERE)["items"] > 3


@NEW_KINDS
@pytest.mark.system
def test_loaders_that_decode_send_the_same_values(kind: MediaKind) -> None:
    cases = (("lists", "loaders", "tp 2 dp 2"),)
    assert try_readers(kind, 5, 0, cases=cases, resumes=False)["items"] > 3


@ALL_KINDS
def test_bad_rows_are_named_or_masked_by_row(kind: MediaKind, tmp_path: Path) -> None:
    rows = make_media_rows(kind, 2, 6)
    odd = list(kind.odd().values())[:3]
    rows += [MediaRow(texts=(f"odd {k};", ";"), items=(content,)) for k, (content, _) in enumerate(odd)]
    recipe: dict[str, Any] = {
        "version": 1,
        "seed": 3,
        "batch": {"samples": 2, "length": LENGTH},
        "sources": {"s": write_media(tmp_path, "s", "lists", rows, kind)},
        "mixture": {"s": 1},
    }
    with pytest.raises(Exception, match=rf"row 6: its {kind.kind}"):
        index_recipe(check_recipe(recipe), tmp_path)
    recipe["sources"]["s"] |= {"bad_rows": "mask", "max_bad": "50%"}
    shutil.rmtree(tmp_path / ".torchmix", ignore_errors=True)
    catalog = index_recipe(check_recipe(recipe), tmp_path)
    table = catalog.sources["s"].sizes.items[kind.kind]
    assert np.asarray(table.tokens)[-3:].tolist() == [0, 0, 0]
    assert (np.asarray(table.tokens)[:-3] > 0).all()


@ALL_KINDS
def test_an_item_that_is_altered_later_is_named_or_stood_in_for(kind: MediaKind, tmp_path: Path) -> None:
    write_media_project(tmp_path, kind, ["files"], length=LENGTH, rows=4)
    catalog = index_recipe(load_recipe(tmp_path / "recipe.yaml"), tmp_path)
    first = sorted((tmp_path / "files").glob(f"*.{kind.suffix}"))[0]
    row, number = (int(part) for part in first.stem.split("-"))
    content = first.read_bytes()
    first.write_bytes(kind.make(np.random.default_rng(99), 1))
    reader = ItemReader(catalog, tmp_path)
    table, modality = reader.table("files", kind.kind), reader.modality("files", kind.kind)
    item = int(table.first_run_of_row[row]) + number
    planned = PlannedItem.of("files", modality, table, item)
    [altered] = reader.read("files", kind.kind, np.array([item]))
    reader.close()
    with pytest.raises(CorruptPage, match=rf"{kind.kind} {number} of row {row}: it has .* the index found"):
        modality.units_of(planned, altered, is_masked=False)
    stood_in = modality.units_of(planned, altered, is_masked=True)
    assert stood_in.shape == modality.units_of(planned, content, is_masked=False).shape


def _libav_lacks(*_: object, **__: object) -> Any:
    raise pytest.importorskip("av").error.MemoryError(12, "Cannot allocate memory")


def _libsndfile_lacks(*_: object, **__: object) -> Any:
    raise pytest.importorskip("soundfile").LibsndfileError(17)


def _nothing_is_spare(size: int) -> bytearray:
    raise MemoryError


SPARE = "torchmix.modalities.videos.packets.bytearray"
LACKS = {
    "video": [
        {"av.open": _libav_lacks, SPARE: _nothing_is_spare},
        {"torchmix.modalities.videos.frames.decoded_frames": _libav_lacks},
    ],
    "sound": [{"soundfile.SoundFile.read": _libsndfile_lacks}],
}


@NEW_KINDS
def test_a_lack_of_memory_names_source_file_and_row_and_masks_nothing(
    kind: MediaKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_media_project(tmp_path, kind, ["lists"], length=LENGTH, rows=4)
    recipe = load_recipe(tmp_path / "recipe.yaml")
    catalog = index_recipe(recipe, tmp_path)
    reader, at = ItemReader(catalog, tmp_path), np.array([1])
    [planned], modality = reader.planned("lists", kind.kind, at, at), reader.modality("lists", kind.kind)
    [content] = reader.read("lists", kind.kind, at)
    reader.close()
    [file] = catalog.sources["lists"].files
    called = rf"source 'lists': {kind.kind} {planned.number} of row {planned.row} in {file.path}: decoding it asks for"
    for lacks in LACKS[kind.kind]:
        with monkeypatch.context() as patched:
            for name, lacking in lacks.items():
                patched.setattr(name, lacking, raising=False)
            for is_masked in (False, True):
                with pytest.raises(MemoryLimit, match=called):
                    modality.units_of(planned, content, is_masked=is_masked)
    if kind is VIDEO:  # its header is read by libav
        source = msgspec.structs.replace(recipe.sources["lists"], bad_rows="mask")
        monkeypatch.setattr("av.open", _libav_lacks)
        with pytest.raises(ItemUnreadable, match=r"it does not open .*Cannot allocate"):  # with memory to spare
            opened(io.BytesIO(content), bytes(content[:64]))
        monkeypatch.setattr(SPARE, _nothing_is_spare, raising=False)
        with pytest.raises(MemoryLimit, match=rf"{file.path}: reading it .* may have \(the video of row 0, "):
            index_recipe(msgspec.structs.replace(recipe, sources={"lists": source}, catalog="other"), tmp_path)
        assert not (tmp_path / "other" / "manifest.json").exists()


@pytest.mark.slow
@NEW_KINDS
def test_init_check_and_show_know_the_kind(
    kind: MediaKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = make_media_rows(kind, 4, 8)
    written = write_media(tmp_path, "data", "struct", rows, kind)
    assert main(["init", written["path"], "--tokenizer", "bytes", "--force"]) == 0
    found = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    [source] = found["sources"].values()
    assert source["items"][kind.kind]["column"] == "items"
    assert any(module["items"] == kind.kind for module in found["modules"].values())
    assert main(["index", "recipe.yaml"]) == 0
    assert main(["check", "recipe.yaml", "--steps", "20"]) == 0, "what init has written"
    assert found["batch"]["length"] >= (2048 if kind is SOUND else 512), "a sound of 30 s has 1,500 tokens"
    write_media_project(tmp_path, kind, ["lists"], length=LENGTH, rows=8)
    assert main(["index", "recipe.yaml"]) == 0
    assert main(["check", "recipe.yaml", "--steps", "2"]) in (0, 1)
    assert main(["profile", "recipe.yaml", "--seconds", "1", "--tokens", "2000"]) == 0
    capsys.readouterr()
    assert main(["show", "recipe.yaml", "--step", "0", "--html", "page.html"]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert all(text in page for text in kind.shown), "what a browser shows of an item"
    assert 'what an encoder gets</summary><div class="made"><img src="data:image/png' in page


@NEW_KINDS
def test_a_missing_package_is_named(kind: MediaKind, monkeypatch: pytest.MonkeyPatch) -> None:
    content = kind.make(np.random.default_rng(1), 0)
    for package in kind.packages:
        monkeypatch.setitem(sys.modules, package, None)
    if kind is SOUND:
        assert header_of(content), "an index needs none"
    with pytest.raises(OptionError, match=f"pip install {' '.join(kind.packages)}"):
        build_of([kind.kind])


# --- Sounds alone.


@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_a_header_says_what_decodes(form: tuple[str, str]) -> None:
    soundfile = pytest.importorskip("soundfile")
    rng = np.random.default_rng(11)
    for rate in (8_000, 16_000, 48_000):
        for count in (160, 5_000, 70_001):
            content = sound_of(drawn_samples(rng, count, rate, 2), rate, form)
            samples, found = soundfile.read(io.BytesIO(content), always_2d=True)
            assert header_of(content)[1:] == (len(samples), found, samples.shape[1])


def without_frame_count(content: bytes) -> bytes:
    """An MP3 without its first frame, which has no sound and says how many frames follow."""
    start = next(at for at in range(len(content)) if content[at] == 0xFF and content[at + 1] & 0xE6 == 0xE2)
    following = next(at for at in range(start + 4, len(content)) if content[at : at + 2] == content[start : start + 2])
    return content[following:]


def test_an_mp3_that_does_not_say_its_length_is_whole() -> None:
    rng = np.random.default_rng(5)
    quiet, loud = drawn_samples(rng, 40_000, 16_000) * 0.001, rng.normal(0, 0.3, (80_000, 1)).astype(np.float32)
    whole = sound_of(np.concatenate([quiet, loud]), 16_000, ("MP3", "MPEG_LAYER_III"))
    bare = without_frame_count(whole)
    assert header_of(bare).samples > 118_000
    units = units_or_reason(modality_of(SOUND), bare)
    assert isinstance(units, np.ndarray)
    said = modality_of(SOUND).decode(with_frame_count(bare), header_of(bare)[1:])
    assert np.array_equal(units, said), "as one that says how many frames it has"


def test_tokens_of_both_rules_and_of_what_is_longer_than_a_chunk() -> None:
    def tokens(seconds: float, **words: Any) -> int:
        modality = modality_of(SOUND, {"rule": "whisper"} | words)
        samples = {"samples": np.array([int(seconds * 48_000)]), "rate": np.array([48_000]), "channels": np.array([1])}
        return int(modality.sizes(samples).tokens[0])

    assert [tokens(s) for s in (0.1, 30, 30.01, 61)] == [1500, 1500, 3000, 4500]
    assert [tokens(s, rule="qwen2_audio") for s in (1, 29.9, 30, 31)] == [25, 747, 750, 775]
    assert tokens(61, longer="cut") == 1500 and tokens(61, longer="cut", rule="qwen2_audio") == 750
    assert tokens(4, chunk_seconds=2) == 200


def test_a_cut_sound_is_its_first_chunk_and_a_channel_is_heard_alone() -> None:
    samples = drawn_samples(np.random.default_rng(2), 5 * 16_000, 16_000, 2)
    content = sound_of(samples, 16_000, ("WAV", "FLOAT"))
    whole = units_or_reason(modality_of(SOUND), content)
    cut = units_or_reason(modality_of(SOUND, {**SOUND.words, "longer": "cut"}), content)
    assert isinstance(whole, np.ndarray) and np.array_equal(cut, whole[: len(whole) // 3])
    right = units_or_reason(modality_of(SOUND, {**SOUND.words, "channel": 1}), content)
    alone = units_or_reason(modality_of(SOUND), sound_of(samples[:, 1], 16_000, ("WAV", "FLOAT")))
    assert np.array_equal(right, alone) and not np.array_equal(right, whole)
    refused = units_or_reason(modality_of(SOUND, {**SOUND.words, "channel": 2}), content)
    assert refused == "it has 2 channels, and channel 2 is to be heard"


def test_values_depend_on_no_block_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    contents = [SOUND.make(np.random.default_rng(3), number) for number in range(len(FORMS))]
    before = [units_or_reason(modality_of(SOUND), content) for content in contents]
    monkeypatch.setattr("torchmix.modalities.sounds.features._BLOCK_VALUES", 1_000)
    for content, units in zip(contents, before, strict=True):
        assert np.array_equal(units_or_reason(modality_of(SOUND), content), units)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"mels": 0}, "items.sound.mels"),
        ({"chunk_seconds": 601}, "items.sound.chunk_seconds"),
        ({"most_seconds": 10}, "more than most_seconds"),
        ({"rule": "whispr"}, "rule"),
    ],
)
def test_options_of_sounds_are_checked(words: dict[str, Any], message: str) -> None:
    source = {"path": "x.parquet", "text": "text", "tokenizer": "bytes"}
    items = {"sound": {"column": "items", "token": ITEM, **words}}
    recipe = {"version": 1, "seed": 1, "batch": {"samples": 1, "length": 8}, "mixture": {"s": 1}}
    with pytest.raises(RecipeError, match=message):
        check_recipe({**recipe, "sources": {"s": {**source, "items": items}}})


# --- Videos alone.


@pytest.mark.parametrize("bframes", [0, 3])
def test_packets_are_decoded_from_the_keyframe_before_a_seen_frame(
    bframes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = drawn_frames(np.random.default_rng(1), 60, 32, 32)
    content = video_of(frames, ("mp4", "libx264"), keys=10, bframes=bframes)
    pixels, counts = [], []
    for codecs in (("h264",), ()):
        monkeypatch.setattr("torchmix.modalities.videos.frames._SAYS_REFERENCES", codecs)
        container, stream = opened(io.BytesIO(content), content[:64])
        with container:
            packets = list(packets_of(container, stream))
            times = sorted(packet.pts for packet in packets)
            counted = CountedStream(stream)
            found = list(decoded_frames(counted, packets, [times[12], times[15], times[47]]))
            pixels.append([frame.to_ndarray() for frame in found])
        assert [frame.pts for frame in found] == [times[12], times[15], times[47]]
        seen = {times.index(time) for time in counted.times}
        assert min(seen) == 10 and not seen & set(range(22, 40)), "groups without a seen frame are passed over"
        assert len(counted.times) <= 6 + 8 + 2 * (2 + bframes)
        counts.append(counted.num_frames)
    assert np.array_equal(*pixels), "whatever is passed over"
    assert counts[0] < counts[1] if bframes else counts[0] == counts[1], "no frame refers to one between others"


def range_of(content: bytes) -> ReadRange:
    return lambda at, count: content[at : at + count]


@pytest.mark.parametrize("form", VIDEO_FORMS, ids="-".join)
def test_a_video_is_measured_without_decoding_and_turned(form: tuple[str, str]) -> None:
    frames = drawn_frames(np.random.default_rng(2), 20, 64, 32)
    for turn in (0, 90, 180) if form[0] in ("mp4", "mov") else (0,):
        content = video_of(frames, form, rate=10, turn=turn)
        measures = modality_of(VIDEO).measure(range_of(content), len(content))
        assert measures == (20, 2000, *((32, 64) if turn == 90 else (64, 32)))


def test_frames_are_chosen_as_the_processor_of_qwen2_vl_chooses() -> None:
    def seen(frames: int, seconds: float, **words: Any) -> int:
        modality = modality_of(VIDEO, words)
        assert isinstance(modality, VideoModality)
        return int(modality.seen(np.array([frames]), np.array([int(seconds * 1000)]))[0])

    assert [seen(300, 10), seen(300, 1), seen(3, 0.1), seen(1, 0.1), seen(100_000, 3_600)] == [20, 4, 2, 1, 768]
    assert seen(300, 10, rate=0.5) == 4 and seen(300, 10, rate=0.7, temporal_patch=3, least_frames=1) == 6
    assert seen(300, 10, most_frames=7) == 6


def test_positions_of_a_video_count_its_patches_in_time() -> None:
    modality = modality_of(VIDEO)
    columns = {"grid_time": np.array([4]), "grid_height": np.array([6]), "grid_width": np.array([8])}
    columns["milliseconds"] = np.array([3900])
    grids = modality.grids(columns, np.array([0]))
    assert [int(one[0]) for one in (grids.frames, grids.rows, grids.columns)] == [4, 3, 4]
    assert grids.milliseconds is not None and int(grids.milliseconds[0]) == 3900


def test_uneven_times_do_not_change_which_frames_are_seen() -> None:
    frames = drawn_frames(np.random.default_rng(4), 16, 32, 32)
    uneven = np.cumsum(np.random.default_rng(5).integers(1, 9, 16)).tolist()
    for form in VIDEO_FORMS[:2]:
        content = video_of(frames, form, times=uneven)
        found = units_or_reason(modality_of(VIDEO), content)
        assert isinstance(found, np.ndarray) and np.array_equal(found, VIDEO.units(content))


def test_trials_count_what_they_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.trials import media

    out = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["media", "odd", "--kind", "sound", "--count", "3", "--out", str(out)])
    media.main()
    assert list(json.loads(out.read_text())) == [f"1/{number}/sound/odd" for number in range(3)]


@pytest.mark.parametrize("kind", [SOUND, VIDEO], ids=str)
def test_items_stand_in_lists_of_texts_by_their_types(tmp_path: Path, kind: MediaKind) -> None:
    for package in kind.packages:
        pytest.importorskip(package)
    rng, part = np.random.default_rng(6), {"sound": "audio", "video": "video"}[kind.kind]
    rows: list[tuple[list[Any], list[bytes]]] = []
    for number, parts in enumerate((["a", {"type": part}, "bc"], [{"type": part}, {"type": part}, "d"], ["e"])):
        rows.append((parts, [kind.make(rng, number) for one in parts if isinstance(one, dict)]))
    lines, documents = [], set()
    for number, (parts, items) in enumerate(rows):
        names = [f"{number}-{at}.{kind.suffix}" for at in range(len(items))]
        for name, item in zip(names, items, strict=True):
            (tmp_path / name).write_bytes(item)
        lines.append(json.dumps({"parts": parts, "items": names}))
        ids: list[int] = []
        left = list(items)
        for one in parts:
            ids += [BEFORE, *[ITEM] * kind.tokens(left.pop(0)), AFTER] if isinstance(one, dict) else list(one.encode())
        documents.add((*ids, END))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    words = {"column": "items", "folder": ".", "token": ITEM, "before": BEFORE, "after": AFTER, **kind.words}
    recipe = {
        "version": 1,
        "seed": 1,
        "batch": {"samples": 3, "length": 1024},
        "packing": {"method": "pad"},
        "sources": {
            "s": {"path": "rows.jsonl", "interleaved": "parts", "tokenizer": "bytes", "items": {kind.kind: words}}
        },
        "mixture": {"s": 1},
        "modules": {"tower": {"items": kind.kind, "sizes": kind.sizes}},
    }
    checked = check_recipe(recipe, tmp_path)
    index_recipe(checked, tmp_path)
    with torchmix.build_loader(checked, directory=tmp_path, loaders="in_process", max_steps=1) as loader:
        [*microbatches] = loader
    found = set()
    for microbatch in microbatches:
        starts, counts = microbatch.cu_seqlens_padded.tolist(), microbatch.cu_seqlens.diff().tolist()
        flat = microbatch.tokens.flatten().tolist()
        found |= {tuple(flat[start : start + count]) for start, count in zip(starts, counts, strict=False) if count}
    assert found == documents
    batch = microbatches[0].modules["tower"]
    units = np.split(batch.arrays[kind.unit_array].numpy(), batch.units.cumsum(0)[:-1].tolist())
    everything = [item for _, items in rows for item in items]
    assert sorted(batch.arrays["number"].tolist()) == list(range(len(everything)))
    for number, mine in zip(batch.arrays["number"].tolist(), units, strict=True):
        assert np.abs(mine.astype(float) - kind.units(everything[number])).max() <= kind.tolerance
