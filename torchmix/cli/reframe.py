"""`torchmix reframe`: write a compressed file of lines again, in frames that can be read one by one.

Cost: one pass, with a progress bar of rate and time left.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from torchmix.cli.terminal import ExitCode, count_text, print_json, progress_bar
from torchmix.errors import OptionError, RecipeError
from torchmix.formats.jsonl.frames import FRAME_BYTES, LEVELS, LONG_LINES, MOST_FRAME_BYTES, codec_of_name, reframe
from torchmix.recipe.amounts import bytes_text, parse_bytes

HELP = "write a compressed file of JSON lines again, in frames that can be read one by one"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this verb beside --json."""
    parser.add_argument("source", type=Path, metavar="IN", help="a file of lines, plain, gzip or zstd")
    parser.add_argument("target", type=Path, metavar="OUT", help="a new file; compressed if it ends in .gz or .zst")
    parser.add_argument(
        "--frame",
        type=_frame_bytes,
        default=FRAME_BYTES,
        metavar="SIZE",
        help="content of a frame, about (default 1MiB); smaller ones are read faster and compress worse",
    )
    parser.add_argument("--level", type=int, metavar="N", help="how hard to compress (gzip 1 to 9, zstd 1 to 22)")


def run(arguments: argparse.Namespace) -> ExitCode:
    """Write the new file.

    Raises:
        TorchmixError: A file cannot be read or written; then there is no new file.
    """
    codec = codec_of_name(arguments.target)
    lowest, _, highest = LEVELS[codec] if codec is not None else (0, 0, 0)
    if arguments.level is not None and not lowest <= arguments.level <= highest:
        what = f"goes from {lowest} to {highest}" if codec is not None else "needs an OUT that ends in .gz or .zst"
        raise OptionError(f"--level {arguments.level}: the level {what}")
    total = arguments.source.stat().st_size if arguments.source.is_file() else 0
    with progress_bar(total, unit="B", title="reframing", silent=arguments.json or arguments.quiet, scale=True) as bar:

        def show(num_bytes: int) -> None:
            bar.update(num_bytes)

        done = reframe(
            arguments.source,
            arguments.target,
            frame_bytes=arguments.frame,
            level=arguments.level,
            progress=show,
        )
    if arguments.json:
        print_json(
            {
                "source": str(arguments.source),
                "target": str(arguments.target),
                "num_frames": done.num_frames,
                "content_bytes": done.content_bytes,
                "read_bytes": done.read_bytes,
                "written_bytes": done.written_bytes,
            }
        )
    else:
        frames = f" in {count_text(done.num_frames)} frames" if codec is not None else ""
        print(
            f"{arguments.target}: {bytes_text(done.content_bytes)}{frames}, {bytes_text(done.written_bytes)}; "
            f"{arguments.source} has {bytes_text(done.read_bytes)}"
        )
    return ExitCode.OK


def _frame_bytes(text: str) -> int:
    """A type of argument: the size of a frame."""
    most_bytes = MOST_FRAME_BYTES // LONG_LINES
    try:
        num_bytes = parse_bytes(text, where="")
    except RecipeError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if num_bytes > most_bytes:
        raise argparse.ArgumentTypeError(f"{text} is more than {most_bytes >> 20}MiB")
    return num_bytes
