"""Videos for tests: files of every form, and their patches by loops, from libavcodec's whole decoding."""

from __future__ import annotations

import ast
import functools
import importlib.util
import io
import tempfile
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.support.media import MediaKind

FORMS = (
    ("mp4", "libx264"),
    ("webm", "libvpx-vp9"),
    ("matroska", "libx264"),
    ("mov", "mpeg4"),
    ("mp4", "libx264 fragments"),
)
PATCH, MERGE = 4, 2
WORDS: dict[str, Any] = {
    "rate": 4,
    "least_frames": 2,
    "most_frames": 8,
    "patch": PATCH,
    "merge": MERGE,
    "min_pixels": 256,
    "max_pixels": 1024,
}


def video_of(
    frames: np.ndarray,
    form: tuple[str, str],
    *,
    rate: int = 12,
    times: list[int] | None = None,
    turn: int = 0,
    keys: int = 6,
    bframes: int = 2,
    pixels: str = "yuv420p",
) -> bytes:
    """A file of frames, uint8 [n, height, width, 3].

    Args:
        frames: Their pixels.
        form: Of FORMS.
        rate: Frames a second.
        times: The time of each frame, in parts of a second of which `rate` are one; None: one after the other.
        turn: Degrees that a viewer turns it by.
        keys: Frames from one keyframe to the next.
        bframes: Frames between others that are predicted from both sides.
        pixels: How the codec keeps them.
    """
    import av

    codec, _, way = form[1].partition(" ")
    file = io.BytesIO()
    options = {"movflags": "frag_keyframe+empty_moov"} if way else {}
    with av.open(file, "w", format=form[0], options=options) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], pixels
        stream.gop_size = keys
        stream.codec_context.thread_count = 1
        stream.codec_context.time_base = Fraction(1, rate)
        stream.options = {
            "libx264": {"preset": "ultrafast", "bf": str(bframes), "crf": "30"},
            "libx265": {"preset": "ultrafast", "x265-params": f"bframes={bframes}:log-level=none:pools=none"},
            "libvpx": {"cpu-used": "8", "deadline": "realtime", "lag-in-frames": "0"},
            "libvpx-vp9": {"cpu-used": "8", "deadline": "realtime", "lag-in-frames": "0"},
            "libsvtav1": {"preset": "8"},
        }.get(codec, {})
        if turn:
            stream.set_display_rotation(turn)
        for number, picture in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = number if times is None else times[number], Fraction(1, rate)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def drawn_frames(rng: np.random.Generator, count: int, width: int, height: int) -> np.ndarray:
    """A square that moves over a plane of colour."""
    frames = np.broadcast_to(rng.integers(0, 256, 3, dtype=np.uint8), (count, height, width, 3)).copy()
    colour, place = rng.integers(0, 256, 3), rng.integers(0, [height // 2, width // 2])
    for number, frame in enumerate(frames):
        y, x = (int(at + number) % (side // 2) for at, side in zip(place, (height, width), strict=True))
        frame[y : y + height // 3, x : x + width // 3] = colour
    return frames


def make_video(rng: np.random.Generator, number: int) -> bytes:
    """A video of up to some seconds; some are turned, some have frames at uneven times."""
    form = FORMS[number % len(FORMS)]
    width, height = (2 * int(side) for side in rng.integers(10, 40, 2))
    count, rate = int(rng.integers(1, 40)), int(rng.choice([5, 12, 25, 30]))
    times = None
    if number % 4 == 3:
        times = np.cumsum(rng.integers(1, 4, count)).tolist()
    turn = int(rng.choice([90, 180, -90])) if number % 3 == 1 and form[0] in ("mp4", "mov") else 0
    return video_of(drawn_frames(rng, count, width, height), form, rate=rate, times=times, turn=turn)


def decoded(content: bytes) -> tuple[list[Any], float]:
    """All frames of a video as they are shown, and how many seconds it lasts by their times."""
    import av

    with av.open(io.BytesIO(content)) as container:
        stream = container.streams.video[0]
        frames = sorted(container.decode(stream), key=lambda frame: frame.pts)
        times = [float(frame.pts * stream.time_base) for frame in frames]
        step = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.04
    return frames, times[-1] - times[0] + step


def sizes_of(content: bytes) -> tuple[list[Any], int, int, int]:
    """Its frames, how many are seen, and the width and height that they are scaled to."""
    frames, seconds = decoded(content)
    shown = (frames[0].width, frames[0].height)
    width, height = shown[::-1] if round(frames[0].rotation) % 180 else shown
    count = len(frames)
    seen = min(max(round(seconds * 1000) / 1000 * WORDS["rate"], WORDS["least_frames"]), WORDS["most_frames"], count)
    seen = int(seen // 2 * 2) or min(count, 2)
    block = PATCH * MERGE
    to_width, to_height = (round(side / block) * block for side in (width, height))
    if to_width * to_height > WORDS["max_pixels"]:
        by = (width * height / WORDS["max_pixels"]) ** 0.5
        to_width, to_height = (max(block, int(side / by // block) * block) for side in (width, height))
    elif to_width * to_height < WORDS["min_pixels"]:
        by = (WORDS["min_pixels"] / (width * height)) ** 0.5
        to_width, to_height = (-int(-side * by // block) * block for side in (width, height))
    return frames, seen, to_width, to_height


def slow_patches(content: bytes) -> np.ndarray:
    """What an encoder gets, [patches, 3 * 2 * PATCH ** 2], from frames that are decoded all, and cut by loops."""
    from av.video.reformatter import Interpolation as Way

    frames, seen, width, height = sizes_of(content)
    exact = Way.BICUBIC | Way.ACCURATE_RND | Way.BITEXACT | Way.FULL_CHR_H_INT
    pictures = []
    for number in range(seen):
        frame = frames[number * len(frames) // seen]
        sides = (height, width) if round(frame.rotation) % 180 else (width, height)
        picture = frame.reformat(width=sides[0], height=sides[1], format="rgb24", interpolation=exact).to_ndarray()
        pictures.append(np.rot90(picture, round(frame.rotation) // 90))
    if seen % 2:
        pictures.append(pictures[-1])
    found = []
    for pair in (pictures[at : at + 2] for at in range(0, len(pictures), 2)):
        for y in range(0, height, PATCH * MERGE):
            for x in range(0, width, PATCH * MERGE):
                for dy, dx in ((0, 0), (0, PATCH), (PATCH, 0), (PATCH, PATCH)):
                    part = [p[y + dy : y + dy + PATCH, x + dx : x + dx + PATCH] for p in pair]
                    found.append(np.stack(part).transpose(3, 0, 1, 2).reshape(-1))
    return np.stack(found)


def tokens_of_video(content: bytes) -> int:
    """As Qwen2-VL counts them."""
    _, seen, width, height = sizes_of(content)
    return -(-seen // 2) * (width // (PATCH * MERGE)) * (height // (PATCH * MERGE))


def odd_videos() -> dict[str, tuple[bytes, str]]:
    """See `MediaKind.odd`."""
    rng = np.random.default_rng(3)
    frames = drawn_frames(rng, 24, 64, 48)
    mp4, webm = video_of(frames, FORMS[0]), video_of(frames, FORMS[1])
    return {
        "a text": (b"what is seen", "no MP4, MOV, WebM or Matroska"),
        "a sound": (b"RIFF\x24\0\0\0WAVEfmt ", "no MP4, MOV, WebM or Matroska"),
        "a picture": (b"\xff\xd8\xff\xe0" + bytes(100), "no MP4, MOV, WebM or Matroska"),
        "a sound alone": (_sound_alone(), "no pictures, only sound"),
        "an MP4 cut off before its tables": (mp4[:60], "does not open"),
        "an MP4 without its end": (_at_front(frames)[:-200], "cut off: its tables name frames"),
        "a WebM without frames": (webm[: webm.index(b"\x1f\x43\xb6\x75")], "it"),
        "an MP4 of zeros": (mp4[:40] + bytes(len(mp4) - 40), "it"),
        "a strip": (video_of(drawn_frames(rng, 2, 1002, 4)[:, :4], FORMS[0]), "over 200 times the other"),
    }


def _at_front(frames: np.ndarray) -> bytes:
    """An MP4 whose tables come before its frames."""
    import av

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.mp4"
        with (
            av.open(io.BytesIO(video_of(frames, FORMS[0]))) as source,
            av.open(str(path), "w", options={"movflags": "faststart"}) as to,
        ):
            stream = to.add_stream_from_template(source.streams.video[0])
            for packet in source.demux(video=0):
                if packet.size:
                    packet.stream = stream
                    to.mux(packet)
        return path.read_bytes()


def _sound_alone() -> bytes:
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16_000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def sizes_against_transformers(rng: np.random.Generator, number: int) -> dict[str, Any]:
    """See `MediaKind`: 64 sizes and lengths, and the patches of one, by the code of Qwen2-VL's processor, whose module
    would need torchvision."""
    import torch

    from tests.trials.media import modality_of

    theirs = functions_of_processor("sample_frames", "smart_resize", "patchify")
    sizes = different = ends = values = 0
    for _ in range(64):
        temporal, rate = int(rng.integers(1, 4)), float(rng.choice([0.5, 1, 2, 3, 4, 7.5]))
        least = int(rng.integers(1, 9))
        words = {
            "rate": rate,
            "temporal_patch": temporal,
            "least_frames": least,
            "most_frames": int(rng.integers(9, 800)),
        }
        frames, milliseconds = int(np.exp(rng.uniform(1.5, 10))), int(np.exp(rng.uniform(4, 15)))
        width, height = (int(side) for side in np.exp(rng.uniform(0, 9, 2)))
        if max(width, height) > 200 * min(width, height) or frames < temporal:
            continue
        metadata = SimpleNamespace(total_num_frames=frames, fps=frames * 1000 / milliseconds)
        self = SimpleNamespace(num_frames=None, fps=rate, temporal_patch_size=temporal, min_frames=least)
        self.max_frames = words["most_frames"]
        sizes += 1
        modality = modality_of(VIDEO, words)
        held = {"frames": frames, "milliseconds": milliseconds, "width": width, "height": height}
        columns = modality.sizes({key: np.array([value]) for key, value in held.items()}).columns
        to_height, to_width = theirs["smart_resize"](height, width, 28, 100_352, 602_112)
        grid = tuple(int(columns[key][0]) for key in ("grid_time", "grid_height", "grid_width"))
        try:
            numbers = theirs["sample_frames"](self, metadata).tolist()
        except ZeroDivisionError:  # fewer frames than a patch has, by its bounds
            continue
        seen = grid[0] * temporal
        different += grid[1:] != (to_height // 14, to_width // 14) or len(numbers) not in (seen, seen + 1)
        ends += numbers != [i * frames // seen for i in range(seen)]  # theirs adds a rounded step; some have one more
    modality = modality_of(VIDEO)
    pixels = rng.integers(0, 256, (5, 24, 32, 3), dtype=np.uint8)
    ours = modality._patches(iter(pixels), 5, 32, 24)  # type: ignore[attr-defined]
    held = torch.from_numpy(pixels).permute(0, 3, 1, 2)[None]
    cut = theirs["patchify"](SimpleNamespace(), held, PATCH, MERGE, 2)[0].numpy().reshape(ours.shape)
    values += ours.size
    different += int((ours != cut).sum())
    return {"sizes": sizes, "values": values, "different": different, "ends": ends}


@functools.cache
def functions_of_processor(*names: str) -> dict[str, Any]:
    """Functions of the file of Qwen2-VL's processor of videos, without their annotations."""
    [home] = importlib.util.find_spec("transformers").submodule_search_locations  # type: ignore[union-attr, misc]
    tree = ast.parse((Path(home) / "models/qwen2_vl/video_processing_qwen2_vl.py").read_text(encoding="utf-8"))
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            node.decorator_list, node.returns = [], None
            for argument in (*node.args.args, *node.args.kwonlyargs, node.args.kwarg):
                if argument is not None:
                    argument.annotation = None
            space: dict[str, Any] = {}
            exec("import math\nimport torch\n" + ast.unparse(node), space)
            found[node.name] = space[node.name]
    return found


VIDEO = MediaKind(
    kind="video",
    suffix="vid",
    words=WORDS,
    sizes="patches",
    unit_array="pixel_values_videos",
    make=make_video,
    units=slow_patches,
    tokens=tokens_of_video,
    odd=odd_videos,
    sizes_against_transformers=sizes_against_transformers,
    packages=("av",),
    shown=("<video controls", 'src="data:image/png'),
)
