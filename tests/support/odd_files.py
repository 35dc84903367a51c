"""Files that are made to harm a reader: claims of sizes, tables, times and loops that their bytes do not hold."""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Callable, Iterator

import numpy as np
from PIL import Image

from tests.support.media import MediaKind, mutated
from tests.support.pictures import png_of_size, saved
from tests.support.sounds import drawn_samples, sound_of
from tests.support.synthetic_images import exif_block, png_chunk, with_chunk
from tests.support.videos import FORMS, drawn_frames, video_of

# --- Images.


def long_zeros(count: int) -> bytes:
    """So many zeros, compressed."""
    packer, found = zlib.compressobj(9), b""
    for _ in range(count >> 20):
        found += packer.compress(bytes(1 << 20))
    return found + packer.flush()


def png_with(png: bytes, name: bytes, body: bytes, *, late: bool = False) -> bytes:
    """A PNG with one more chunk."""
    return with_chunk(png, name, body, late=late)


def jpeg_of_scans(count: int) -> bytes:
    """A progressive JPEG of 1,000 a side whose last scan comes again and again, without its data."""
    jpeg = saved("JPEG", 1_000, 1_000, progressive=True, quality=30)
    last = jpeg.rindex(b"\xff\xda")
    return jpeg[:-2] + (jpeg[last : last + 10] + b"\0") * count + b"\xff\xd9"


def gif_of_frames(count: int) -> bytes:
    """An animation of many frames."""
    gif = saved("GIF")
    at = gif.index(b"\x2c", 13 + 3 * 256 if gif[10] & 0x80 else 13)
    return gif[:at] + gif[at:-1] * count + b"\x3b"


def ico_of(png: bytes) -> bytes:
    """An icon that says 16 x 16 pixels, of a PNG."""
    return struct.pack("<HHHBBBBHHII", 0, 1, 1, 16, 16, 0, 0, 1, 32, len(png), 22) + png


def tiff_of(**entries: tuple[int, int, int]) -> bytes:
    """A TIFF of one directory; by number of the tag its type, count and value."""
    held = sorted((int(tag[1:]), entry) for tag, entry in entries.items())
    body = struct.pack("<H", len(held))
    for tag, (kind, count, value) in held:
        body += struct.pack("<HHII", tag, kind, count, value)
    return b"II*\0\x08\0\0\0" + body + struct.pack("<I", 8) + bytes(64)  # whose next directory is itself


def hostile_images() -> Iterator[tuple[str, bytes]]:
    """Each with what is wrong with it."""
    png, jpeg, gif, webp, tiff, bmp = (saved(kind) for kind in ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"))
    vp8x = b"VP8X" + struct.pack("<I", 10) + b"\0\0\0\0" + b"\xff\xff\xff" * 2
    usual = {"t258": (3, 1, 8), "t259": (3, 1, 1), "t262": (3, 1, 1), "t277": (3, 1, 1), "t273": (4, 1, 8)}
    yield "a PNG of 50,000 a side", png_of_size(50_000, 50_000, body=bytes(1 << 20))
    yield "a PNG of 2^31 a side", png_of_size((1 << 31) - 1, (1 << 31) - 1)
    yield "a PNG whose pixels are 256 MiB more", png.replace(b"IDAT", b"IDAT", 1)[:33] + _idat(long_zeros(256 << 20))
    yield "a PNG with a text of 256 MiB", png_with(png, b"zTXt", b"Comment\0\0" + long_zeros(256 << 20))
    yield "a PNG with EXIF of 256 MiB", png_with(png, b"zTXt", b"Raw profile type exif\0\0" + long_zeros(256 << 20))
    yield "a PNG with XMP of 256 MiB", png_with(png, b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + long_zeros(256 << 20))
    yield "a PNG with a profile of 256 MiB", png_with(png, b"iCCP", b"x\0\0" + long_zeros(256 << 20))
    yield (
        "a PNG of 100,000 empty chunks",
        png[:33] + (struct.pack(">I", 0) + b"teXt" + b"\0\0\0\0") * 100_000 + png[33:],
    )
    yield "a PNG of long chunks", png[:33] + struct.pack(">I", 0xFFFF_FFFF) + png[37:]
    yield "a PNG of 3 bits", png_of_size(40, 30, depth=3, body=bytes(4000))
    yield "a PNG of an animation that says 2^31 frames", png_with(png, b"acTL", struct.pack(">II", 1 << 31, 0))
    yield "a PNG whose EXIF points behind it", png_with(png, b"eXIf", exif_block(6)[6:-20])
    yield "a PNG with EXIF at its end", png_with(png, *png_chunk("raw", 6), late=True)[:-12]
    yield "a JPEG of 65,000 a side", _with_size(jpeg, 65_000, 65_000)
    yield "a JPEG of 1,000 a side", _with_size(jpeg, 1_000, 1_000)
    yield "a JPEG of no rows", _with_size(jpeg, 0, 40)
    yield "a JPEG of 20,000 scans", jpeg_of_scans(20_000)
    yield "a JPEG of fill bytes", b"\xff\xd8" + b"\xff" * 500_000
    yield "a JPEG of long segments", b"\xff\xd8" + (b"\xff\xe1\xff\xff" + bytes(0xFFFD)) * 20
    yield "a JPEG of empty segments", b"\xff\xd8" + b"\xff\xe1\0\2" * 100_000 + jpeg[2:]
    yield "a JPEG of restarts alone", jpeg[:-2] + b"\xff\xd0" * 100_000 + b"\xff\xd9"
    yield "a JPEG of two sizes", jpeg[:2] + _sof(jpeg, 60_000, 60_000) + jpeg[2:]
    yield "a JPEG without tables", jpeg.replace(b"\xff\xdb", b"\xff\xed").replace(b"\xff\xc4", b"\xff\xed")
    yield "a JPEG of arithmetic codes", jpeg.replace(b"\xff\xc0", b"\xff\xc9")
    yield "a GIF of 65,535 a side", gif[:6] + b"\xff\xff\xff\xff" + gif[10:]
    yield "a GIF whose frame is larger than its screen", _gif_frame(gif, 60_000, 60_000)
    yield "a GIF of 20,000 frames", gif_of_frames(20_000)
    yield "a GIF of no pixels", gif[:6] + bytes(4) + gif[10:]
    yield "a GIF of blocks without an end", gif[:-1] + b"\x21\xfe" + b"\xff" * 200_000
    yield "a WebP that says 16,777,216 a side", b"RIFF" + struct.pack("<I", len(webp) + 10) + b"WEBP" + vp8x + webp[12:]
    yield "a WebP of 16,383 a side", webp[:26] + b"\xff\x3f\xff\x3f" + webp[30:]
    yield "a WebP of long chunks", webp[:16] + b"\xff\xff\xff\xff" + webp[20:]
    yield "a TIFF of 2^31 a side", tiff_of(**usual, t256=(4, 1, 1 << 31), t257=(4, 1, 1 << 31), t279=(4, 1, 8))
    yield (
        "a TIFF of strips that are not there",
        tiff_of(**usual, t256=(3, 1, 400), t257=(3, 1, 400), t278=(4, 1, 400), t279=(4, 1, 1 << 31)),
    )
    yield (
        "a TIFF of 2^28 strips",
        tiff_of(**{**usual, "t273": (4, 1 << 28, 8)}, t256=(3, 1, 400), t257=(3, 1, 400), t279=(4, 1 << 28, 8)),
    )
    yield "a TIFF of 65,535 channels", tiff_of(**{**usual, "t277": (3, 1, 65_535)}, t256=(3, 1, 400), t257=(3, 1, 400))
    yield (
        "a TIFF of large tiles",
        tiff_of(**usual, t256=(3, 1, 40), t257=(3, 1, 40), t322=(4, 1, 1 << 30), t323=(4, 1, 1 << 30), t324=(4, 1, 8)),
    )
    yield "a TIFF cut off", tiff[: len(tiff) // 2]
    yield "a BMP of 2^31 a side", bmp[:18] + struct.pack("<ii", (1 << 31) - 1, (1 << 31) - 1) + bmp[26:]
    yield "a BMP upside down and 2^31 high", bmp[:22] + struct.pack("<i", -(1 << 31)) + bmp[26:]
    yield "a BMP of runs", bmp[:28] + struct.pack("<HI", 8, 1) + bmp[34:]
    yield "a BMP whose pixels are behind it", bmp[:10] + struct.pack("<I", 1 << 31) + bmp[14:]
    yield "an icon of a PNG of 12,000 a side", ico_of(png_of_size(12_000, 12_000, body=bytes(1 << 20)))
    yield "PostScript", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 40\n%%EndComments\n{} loop\n%%EOF\n"
    yield "a PCX", b"\x0a\5\1\x08" + bytes(4) + b"\xff\xff\xff\xff" + bytes(200)
    yield "a PSD of 30,000 a side", b"8BPS\0\1" + bytes(6) + struct.pack(">HIIHH", 3, 30_000, 30_000, 8, 3) + bytes(90)
    yield "a PPM of 40,000 a side", b"P6 40000 40000 255\n" + bytes(300)
    if "AVIF" in Image.registered_extensions().values():
        avif = saved("AVIF")
        at = avif.index(b"ispe") + 8
        yield "an AVIF of 60,000 a side", avif[:at] + struct.pack(">II", 60_000, 60_000) + avif[at + 8 :]
        yield "an AVIF cut off", avif[: len(avif) // 2]
        yield "an AVIF of a box without a size", avif[:32] + bytes(4) + avif[36:]


def _idat(body: bytes) -> bytes:
    found = b""
    for name, held in ((b"IDAT", body), (b"IEND", b"")):
        found += struct.pack(">I", len(held)) + name + held + struct.pack(">I", zlib.crc32(name + held))
    return found


def _sof(jpeg: bytes, height: int, width: int) -> bytes:
    at = jpeg.index(b"\xff\xc0")
    length = int.from_bytes(jpeg[at + 2 : at + 4], "big") + 2
    return jpeg[at : at + 5] + struct.pack(">HH", height, width) + jpeg[at + 9 : at + length]


def _with_size(jpeg: bytes, height: int, width: int) -> bytes:
    at = jpeg.index(b"\xff\xc0")
    return jpeg[: at + 5] + struct.pack(">HH", height, width) + jpeg[at + 9 :]


def _gif_frame(gif: bytes, width: int, height: int) -> bytes:
    at = gif.index(b"\x2c", 13 + 3 * 256 if gif[10] & 0x80 else 13)
    return gif[: at + 5] + struct.pack("<HH", width, height) + gif[at + 9 :]


# --- Sounds.


def hostile_sounds() -> Iterator[tuple[str, bytes]]:
    """Each with what is wrong with it."""
    short = drawn_samples(np.random.default_rng(3), 16_000, 16_000)
    forms = (("WAV", "PCM_16"), ("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III"))
    wav, flac, ogg, opus, mp3 = (sound_of(short, 16_000, form) for form in forms)
    rf64 = sound_of(short, 16_000, ("RF64", "PCM_16"))
    form, data = wav.index(b"fmt ") + 8, wav.index(b"data") + 4
    for name, size in (("2^32 - 1", 0xFFFF_FFFF), ("2^31", 1 << 31), ("one more", 32_002), ("odd", 31_999), ("0", 0)):
        yield f"a WAV whose data is {name}", wav[:data] + struct.pack("<I", size) + wav[data + 4 :]
    for name, at, value in (
        ("0 channels", 2, struct.pack("<H", 0)),
        ("65,535 channels", 2, struct.pack("<H", 65_535)),
        ("a rate of 0", 4, bytes(4)),
        ("a rate of 2^32 - 1", 4, b"\xff\xff\xff\xff"),
        ("blocks of 0", 12, bytes(2)),
        ("33 bits", 14, struct.pack("<H", 33)),
        ("0 bits", 14, bytes(2)),
        ("the form 65,535", 0, b"\xff\xff"),
        ("MP3 in it", 0, b"\x55\0"),
    ):
        yield f"a WAV of {name}", wav[: form + at] + value + wav[form + at + len(value) :]
    yield "a WAV of 5,000 chunks", wav[:12] + (b"junk" + struct.pack("<I", 0)) * 5_000 + wav[12:]
    yield "a WAV of a long chunk", wav[:12] + b"junk" + struct.pack("<I", 0xFFFF_FFF0) + wav[12:]
    yield "a WAV whose data comes first", wav[:12] + wav[data - 4 :] + wav[12 : data - 4]
    yield "a WAV of endless numbers", sound_of(np.full((16_000, 1), np.inf, np.float32), 16_000, ("WAV", "FLOAT"))
    yield "an RF64 of 2^63", rf64[:20] + b"\xff" * 16 + rf64[36:]
    for name, bits in (("2^36 - 1", (1 << 36) - 1), ("1,000", 1_000), ("twice as many", 32_000)):
        packed = (int.from_bytes(flac[18:26], "big") >> 36 << 36) | bits
        yield f"a FLAC that says {name} samples", flac[:18] + packed.to_bytes(8, "big") + flac[26:]
    yield "a FLAC of blocks of 0", flac[:8] + bytes(4) + flac[12:]
    yield "a FLAC of 2^20 a second", flac[:18] + b"\xff\xff\xf0" + flac[21:]
    yield "a FLAC of long tags", flac[:42] + b"\x04\xff\xff\xff" + flac[42:]
    yield "a FLAC of 100,000 tags", flac[:4] + b"\0" + flac[5:42] + b"\x04\0\0\0" * 100_000 + flac[42:]
    yield "a FLAC of its form alone", flac[:42]
    last = ogg.rindex(b"OggS")
    for name, place in (("2^62", 1 << 62), ("-2", (1 << 64) - 2), ("fewer", 8_000), ("more", 32_000), ("0", 0)):
        yield f"an OGG whose end is {name}", ogg[: last + 6] + struct.pack("<Q", place) + ogg[last + 14 :]
        opus_last = opus.rindex(b"OggS")
        yield f"an Opus whose end is {name}", opus[: opus_last + 6] + struct.pack("<Q", place) + opus[opus_last + 14 :]
    yield (
        "an OGG of empty pages",
        ogg[: ogg.index(b"OggS", 4)] + (b"OggS\0\0" + bytes(8) + ogg[14:18] + bytes(9)) * 5_000,
    )
    yield "an OGG of codes of books that are not there", ogg.replace(b"\x05vorbis", b"\x05vorbis\xff\xff\xff", 1)
    yield "an OGG of 255 channels", ogg.replace(ogg[39:40], b"\xff", 1)
    yield "an OGG of tags of 2^32 bytes", ogg.replace(b"\x03vorbis", b"\x03vorbis\xff\xff\xff\xff", 1)
    yield "an OGG of another stream at its end", ogg + ogg.replace(ogg[14:18], b"\1\2\3\4")
    yield "an OGG of a codec that nobody knows", ogg.replace(b"\x01vorbis", b"\x01speeex", 1)
    yield "an Opus that skips all", opus[:38] + b"\xff\xff" + opus[40:]
    yield "an Opus of 255 channels", opus[:37] + b"\xff" + opus[38:]
    frame = next(at for at in range(len(mp3)) if mp3[at] == 0xFF and mp3[at + 1] & 0xE6 == 0xE2)
    yield "an MP3 without frames", b"ID3\4\0\0\0\0\0\x20" + bytes(90)
    yield "an MP3 whose tag is 2^28 bytes", b"ID3\4\0\0\x7f\x7f\x7f\x7f" + mp3
    yield "an MP3 of tags alone", b"ID3\4\0\0\0\0\0\0" * 100_000
    yield "an MP3 behind a megabyte of noise", b"ID3\4\0\0\0\0\0\0" + bytes(range(1, 255)) * 4_000 + mp3[frame:]
    at = max(mp3.find(b"Xing"), mp3.find(b"Info"))
    yield "an MP3 that says 2^31 frames", mp3[: at + 8] + struct.pack(">I", 1 << 31) + mp3[at + 12 :]
    yield "an MP3 that says no frames", mp3[: at + 8] + bytes(4) + mp3[at + 12 :]
    yield "an MP3 of a frame's head, over and over", mp3[frame : frame + 4] * 100_000
    yield "an MP3 of two rates", mp3[frame:] + sound_of(short, 44_100, ("MP3", "MPEG_LAYER_III"))
    yield "a sound of no bytes", b""
    yield "a sound of one byte", b"\xff"
    yield "a WAV of an hour of nothing", wav[:data] + struct.pack("<I", 0x7FFF_F000) + wav[data + 4 :]
    yield "a MIDI file", b"MThd\0\0\0\6\0\1\0\1\0\x60MTrk\0\0\0\4\0\xff\x2f\0"
    yield "an AIFF", sound_of(short, 16_000, ("AIFF", "PCM_16"))
    yield "a CAF", sound_of(short, 16_000, ("CAF", "PCM_16"))


# --- Videos.


def box(name: bytes, body: bytes) -> bytes:
    """A box of an MP4."""
    return struct.pack(">I", 8 + len(body)) + name + body


def with_table(mp4: bytes, name: bytes, at: int, body: bytes) -> bytes:
    """An MP4 with other bytes at a place behind the name of a table."""
    place = mp4.index(name) + 4 + at
    return mp4[:place] + body + mp4[place + len(body) :]


def counted(mp4: bytes, count: int) -> bytes:
    """An MP4 whose tables say so many samples of a byte."""
    found = with_table(mp4, b"stsz", 4, struct.pack(">II", 1, count))
    found = with_table(found, b"stts", 4, struct.pack(">II", 1, count))
    return with_table(found, b"stsc", 4, struct.pack(">IIII", 1, 1, count, 1))


def ebml(name: bytes, body: bytes, *, size: int | None = None) -> bytes:
    """An element of Matroska; `size` is what it says."""
    return name + struct.pack(">Q", (1 << 56) | (len(body) if size is None else size)) + body


def hostile_videos() -> Iterator[tuple[str, bytes]]:
    """Each with what is wrong with it."""
    frames = drawn_frames(np.random.default_rng(3), 24, 64, 48)
    mp4, webm, mkv, mov, parts = (video_of(frames, form) for form in FORMS)
    moov, mdat = mp4.index(b"moov") - 4, mp4.index(b"mdat") - 4
    for count in (1 << 21, 1_000_000_000, 0xFFFF_FFFF):
        yield f"an MP4 whose tables say {count} frames", counted(mp4, count)
        flags = parts.index(b"trun") + 4
        yield f"an MP4 whose part says {count} frames", with_table(parts, b"trun", 0, struct.pack(">II", 1, count))
        yield (
            f"an MP4 whose part says {count} frames of nothing",
            parts[:flags] + struct.pack(">II", 0, count) + parts[flags + 8 :],
        )
    for name, delta in (("years", 0x7FFF_FFFF), ("no time", 0)):
        yield f"an MP4 of frames of {name}", with_table(mp4, b"stts", 8, struct.pack(">II", 24, delta))
    yield "an MP4 that says it lasts years", with_table(mp4, b"mdhd", 16, b"\x7f\xff\xff\xff")
    yield "an MP4 of 2^31 parts of a second", with_table(mp4, b"mdhd", 12, b"\x7f\xff\xff\xff")
    yield "an MP4 of no parts of a second", with_table(mp4, b"mdhd", 12, bytes(4))
    for name in (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"stsd", b"stsz", b"stco", b"mdat", b"tkhd", b"hdlr"):
        for said, size in (("0", 0), ("1", 1), ("7", 7), ("2^32 - 1", 0xFFFF_FFFF)):
            at = mp4.index(name) - 4
            yield f"an MP4 whose {name.decode()} says {said} bytes", mp4[:at] + struct.pack(">I", size) + mp4[at + 4 :]
    yield (
        "an MP4 of boxes in boxes",
        mp4[:moov] + functools.reduce(lambda held, _: box(b"moov", held), range(3_000), b""),
    )
    yield "an MP4 of 200,000 empty boxes", mp4[:moov] + box(b"free", b"") * 200_000 + mp4[moov:]
    yield "an MP4 of 5,000 tracks", mp4[:mdat] + box(b"moov", box(b"trak", mp4[mp4.index(b"tkhd") - 4 :][:92]) * 5_000)
    squeezed = long_zeros(256 << 20)
    packed = box(b"dcom", b"zlib") + box(b"cmvd", struct.pack(">I", 256 << 20) + squeezed)
    yield "an MP4 whose tables are 256 MiB, packed", mp4[:moov] + box(b"moov", box(b"cmov", packed))
    at = mp4.index(b"avc1") + 28
    yield "an MP4 of 65,535 a side", mp4[:at] + b"\xff\xff\xff\xff" + mp4[at + 4 :]
    yield (
        "an MP4 whose frames are larger than it says",
        _of_other_size(mp4, drawn_frames(np.random.default_rng(1), 2, 2048, 2048)),
    )
    yield "an MP4 of frames that are behind it", with_table(mp4, b"stco", 8, b"\xff\xff\xff\x00")
    yield "an MP4 of frames at its start", with_table(mp4, b"stco", 8, bytes(4))
    yield "an MP4 of frames of 2^31 bytes", with_table(mp4, b"stsz", 12, b"\x7f\xff\xff\xff" * 4)
    yield "an MP4 of a codec that nobody knows", mp4.replace(b"avc1", b"zzzz")
    yield "an MP4 that refers to another file", mp4.replace(b"url \0\0\0\1", b"url \0\0\0\0")
    yield "an MP4 turned by a little", with_table(mp4, b"tkhd", 40, struct.pack(">iii", 60_000, 3_000, 0))
    yield "an MP4 in pieces", mp4[mdat:moov] + mp4[:mdat] + mp4[moov:]
    yield "an MP4 of two movies", mp4 + mp4[moov:]
    yield "an MP4 of its first box", mp4[:mdat]
    yield "an MP4 of its tables alone", mp4[moov:]
    yield (
        "an MP4 whose frames are noise",
        mp4[: mdat + 8] + np.random.default_rng(1).bytes(moov - mdat - 8) + mp4[moov:],
    )
    yield "an MP4 without keyframes", _without_keys(mp4)
    segment = webm.index(b"\x18\x53\x80\x67")
    head, cluster = webm[:segment], webm.index(b"\x1f\x43\xb6\x75")
    yield "a WebM without an end", head + b"\x18\x53\x80\x67\x01\xff\xff\xff\xff\xff\xff\xff" + webm[segment + 12 :]
    for name, place in (("segment", segment), ("cluster", cluster), ("tracks", webm.index(b"\x16\x54\xae\x6b"))):
        yield (
            f"a WebM whose {name} says 2^56 - 2 bytes",
            webm[: place + 4] + b"\x01" + b"\xff" * 6 + b"\xfe" + webm[place + 12 :],
        )
        yield f"a WebM whose {name} says no bytes", webm[: place + 4] + b"\x01" + bytes(7) + webm[place + 12 :]
        yield f"a WebM cut in its {name}", webm[: place + 9]
    seek = ebml(b"\x4d\xbb", ebml(b"\x53\xab", b"\x11\x4d\x9b\x74") + ebml(b"\x53\xac", bytes(8)))
    yield (
        "a WebM whose table of places names itself",
        head + ebml(b"\x18\x53\x80\x67", ebml(b"\x11\x4d\x9b\x74", seek * 2_000)),
    )
    yield (
        "a WebM of segments in segments",
        head + functools.reduce(lambda held, _: ebml(b"\x18\x53\x80\x67", held), range(3_000), webm[segment + 12 :]),
    )
    yield "a WebM of 100,000 empty clusters", webm[:cluster] + ebml(b"\x1f\x43\xb6\x75", b"") * 100_000
    block = ebml(b"\xa3", b"\x81\x7f\xff\x86\xff" + b"\xff" * 300)
    yield "a WebM of laced frames", webm[:cluster] + ebml(b"\x1f\x43\xb6\x75", ebml(b"\xe7", b"\0") + block * 200)
    late = ebml(b"\x1f\x43\xb6\x75", ebml(b"\xe7", b"\x7f" + b"\xff" * 7) + ebml(b"\xa3", b"\x81\0\0\x80" + bytes(99)))
    yield "a WebM of a frame in the far future", webm + late
    yield (
        "a WebM of private bytes of 2^40",
        webm.replace(b"\x86\x85V_VP9", b"\x86\x85V_VP9\x63\xa2\x04\xff\xff\xff\xff\xff", 1),
    )
    yield "a WebM of 2^31 a side", _with_number(webm, b"\xb0", 1 << 31)
    yield "a WebM without frames", webm[:cluster]
    yield "a Matroska of a codec that nobody knows", mkv.replace(b"V_MPEG4/ISO/AVC", b"V_MPEG4/ISO/XXX")
    yield "a Matroska of frames that are noise", _noise_behind(mkv, mkv.index(b"\x1f\x43\xb6\x75") + 40)
    yield "a Matroska of a document that nobody knows", mkv.replace(b"matroska", b"xxxxxxxx")
    yield "a MOV of frames that are noise", _noise_behind(mov, mov.index(b"mdat") + 4, mov.index(b"moov") - 4)
    yield "an MP4 of parts without a movie", parts[parts.index(b"moof") - 4 :]
    yield "an MP4 of parts cut off", parts[: parts.rindex(b"moof") + 30]
    yield "a part over and over", parts + parts[parts.rindex(b"moof") - 4 :] * 200
    yield "a video of no bytes", b""
    yield "a video of its name", b"\0\0\0\x20ftypisom"
    yield "a video of EBML alone", b"\x1a\x45\xdf\xa3"
    yield "a playlist", b"#EXTM3U\n#EXTINF:1\nfile:///etc/passwd\n"
    yield "a list of files", b"ffconcat version 1.0\nfile /etc/passwd\n"
    yield "a picture of HEIF", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(200)


def _of_other_size(mp4: bytes, frames: np.ndarray) -> bytes:
    """A large video whose table says the sides of a small one."""
    large = video_of(frames, FORMS[0])
    at = large.index(b"avc1") + 28
    return large[:at] + struct.pack(">HH", 64, 48) + large[at + 4 :]


def _without_keys(mp4: bytes) -> bytes:
    at = mp4.index(b"stss") + 8
    return mp4[:at] + bytes(4) + mp4[at + 4 :]


def _with_number(webm: bytes, name: bytes, value: int) -> bytes:
    at = webm.index(name, webm.index(b"\x16\x54\xae\x6b"))
    size = webm[at + 1] & 0x7F
    return webm[: at + 1] + b"\x84" + struct.pack(">I", value) + webm[at + 2 + size :]


def _noise_behind(content: bytes, start: int, stop: int | None = None) -> bytes:
    noise = np.random.default_rng(2).bytes(len(content))
    return content[:start] + noise[start:stop] + (b"" if stop is None else content[stop:])


HOSTILE: dict[str, Callable[[], Iterator[tuple[str, bytes]]]] = {
    "image": hostile_images,
    "sound": hostile_sounds,
    "video": hostile_videos,
}


@functools.cache
def hostile(kind: str) -> tuple[tuple[str, bytes], ...]:
    """Those of a kind; made once, since some are packed for a second."""
    return tuple(HOSTILE[kind]())


def odd_file(kind: MediaKind, seed: int, number: int) -> tuple[str, bytes]:
    """What is wrong with it, and the file: hostile ones first, then such as somebody damaged."""
    known = hostile(kind.kind)
    if number < len(known):
        return known[number]
    rng = np.random.default_rng([seed, number])
    whole = kind.make(rng, number)
    if number % 3:
        return f"damaged, {number}", mutated(rng, whole)
    cut = int(rng.integers(0, len(whole)))
    return f"cut off after {cut} of {len(whole)} bytes", whole[:cut]
