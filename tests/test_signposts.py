"""Signposts hold: every file, name and verb that a docstring, a comment or a page points to exists."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.test_fences import FILES, ROOT, nodes, place
from torchmix.cli.main import VERBS

FOLDERS = ("torchmix", "tests", "examples", "benchmarks", "docs", ".ci")
OTHERS_FILES = {
    "pretrain_gpt.py",
    "pretrain_vlm.py",
    "examples/multimodal/train.py",
    "examples/mimo/train.py",
    "tools/preprocess_data.py",
    "megatron/core/num_microbatches_calculator.py",
    "megatron/core/datasets/utils.py",
    "megatron/core/datasets/indexed_dataset.py",
    "blended_megatron_dataset_builder.py",
    "blended_megatron_dataset_config.py",
    "models/qwen2_vl/image_processing_qwen2_vl.py",
    "models/got_ocr2/image_processing_got_ocr2.py",
}
"""Of Megatron and transformers."""
OTHERS_NAMES = {
    *("BlendedMegatronDatasetBuilder", "get_blend_from_list", "_IndexWriter", "parse_and_validate_args", "torch_dist"),
    *("get_rope_index", "smart_resize", "get_optimal_tiled_canvas", "crop_to_patches", "select_best_resolution"),
    *(
        "get_batch_on_this_cp_rank",
        "thd_get_partitioned_indices",
        "_get_unpadded_features",
        "exif_transpose",
        "getexif",
    ),
    *("cross_entropy", "extra_args_provider", "pretrain", "train_valid_test_datasets_provider", "savgol_filter"),
    *("get_forward_backward_func", "_build_megatron_dataset_splits", "parse_and_normalize_split"),
    *("convert_split_vector_to_split_matrix", "clip_min_probability", "cpp", "tcpi_bytes_received"),
    *("SmoothedMeanWeightUpdater", "Exp3WeightUpdater", "group_update", "crc32_combine", "tofile", "weights_only"),
}
"""Of Megatron, transformers, Pillow, zlib, numpy, scipy, torch, ZeroMQ, Linux, and of the authors of policies."""
EXAMPLES = {"MODULE.ARRAY", "text.german"}


@cache
def tokens_of(path: Path) -> list[tokenize.TokenInfo]:
    """The names and comments among the tokens of a file of Python."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return [token for token in tokens if token.type in (tokenize.NAME, tokenize.COMMENT)]


@cache
def words() -> list[tuple[Path, int, str]]:
    """The comments and docstrings of the package, with their files and lines."""
    return [(path, line, text) for path in FILES for line, text in words_of(path)]


def words_of(path: Path) -> Iterator[tuple[int, str]]:
    """The comments and docstrings of a file, with their lines."""
    for node in nodes(path):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    for token in tokens_of(path):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@cache
def names() -> frozenset[str]:
    """Every name and every word of a string in the package."""
    return frozenset(name for path in FILES for name in names_of(path))


def names_of(path: Path) -> Iterator[str]:
    """Every name and every word of a string in a file; docstrings do not count."""
    for token in tokens_of(path):
        if token.type == tokenize.NAME:
            yield token.string
    documented = {id(node.value) for node in nodes(path) if isinstance(node, ast.Expr)}
    for node in nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
            yield from re.findall(r"\w+", node.value)


def test_every_file_that_the_package_names_exists() -> None:
    present = {path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")}
    present |= {path.name for path in ROOT.iterdir()}
    ends = {name[start:] for name in present for start in [0, *(m.end() for m in re.finditer("/", name))]}
    faults = [
        f"{place(path).split(':')[0]}:{line} {name}"
        for path, line, text in words()
        for name in re.findall(r"(?<![\w/.-])((?:\w+/)*\w+\.(?:py|md))\b", text)
        if name not in ends and name not in OTHERS_FILES
    ]
    assert not faults, "these files do not exist:\n" + "\n".join(faults)


def test_every_name_in_backticks_is_one_of_the_package() -> None:
    known = names() | OTHERS_NAMES
    faults = [
        f"{place(path).split(':')[0]}:{line} `{name}`"
        for path, line, text in words()
        for name in re.findall(r"`([A-Za-z_][\w.]*?)(?:\(\))?`", text)
        if name.split(".")[-1] not in known and name not in EXAMPLES
    ]
    assert not faults, "nothing has these names:\n" + "\n".join(faults)


def test_a_dotted_signpost_begins_with_a_file_or_a_class_that_exists() -> None:
    known = names() | {path.stem for path in FILES} | OTHERS_NAMES
    faults = [
        f"{place(path).split(':')[0]}:{line} `{name}`"
        for path, line, text in words()
        for name in re.findall(r"See `(\w+)\.\w+`", text)
        if name not in known
    ]
    assert not faults, "\n".join(faults)


def test_every_verb_that_a_text_names_is_one() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md"), *FILES]
    faults = [
        f"{page.relative_to(ROOT)} torchmix {verb}"
        for page in pages
        for verb in re.findall(r"`torchmix ([a-z]+)\b(?! =)", page.read_text(encoding="utf-8"))
        if verb not in dict(VERBS)
    ]
    assert not faults, "\n".join(faults)
