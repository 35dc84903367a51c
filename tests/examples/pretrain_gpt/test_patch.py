"""The four lines of torchmix in a script with Megatron's anchors: put in once, or refused with the line to write."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.example import PRETRAIN_GPT, example_module

patch = example_module("patch", PRETRAIN_GPT)

SCRIPT = """\
from model_provider import model_provider

stimer = StragglerDetector()


def get_batch(data_iterator, vp_stage=None):
    return None, None, None, None, None, None


def train_valid_test_datasets_provider(train_val_test_num_samples, vp_stage=None):
    return None, None, None


if __name__ == "__main__":
    train_valid_test_datasets_provider.is_distributed = True
    pretrain(
        train_valid_test_datasets_provider,
        args_defaults={'tokenizer_type': 'GPT2BPETokenizer'},
        extra_args_provider=add_modelopt_args if has_nvidia_modelopt else None,
        store=store,
    )
"""


def added(text: str) -> list[str]:
    return [line[1:] for line in patch.difference(SCRIPT, text, "x.py").splitlines() if line[0] == "+"][1:]


def test_four_lines_are_added_or_changed() -> None:
    assert added(patch.patched(SCRIPT)) == [
        "import torchmix.megatron_adapter as tmx",
        "    if tmx.enabled():",
        "        get_batch, train_valid_test_datasets_provider = tmx.get_batch(globals()), tmx.provider",
        "        extra_args_provider=tmx.extra_args(add_modelopt_args if has_nvidia_modelopt else None),",
    ]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("extra_args_provider=add_vlm_extra_args,", "extra_args_provider=tmx.extra_args(add_vlm_extra_args),"),
        (
            "extra_args_provider=add_vlm_extra_args, args_defaults={'tokenizer_type': 'GPT2BPETokenizer'}",
            "extra_args_provider=tmx.extra_args(add_vlm_extra_args), args_defaults={'tokenizer_type': "
            "'GPT2BPETokenizer'}",
        ),
    ],
    ids=["0.16", "0.18"],
)
def test_the_script_of_images_has_its_own_anchors(line: str, wanted: str) -> None:
    text = SCRIPT.replace("stimer = StragglerDetector()", "from pretrain_gpt import loss_func")
    text = text.replace("extra_args_provider=add_modelopt_args if has_nvidia_modelopt else None,", line)
    found = patch.patched(text).splitlines()
    assert found[found.index("from pretrain_gpt import loss_func") + 1] == "import torchmix.megatron_adapter as tmx"
    assert f"        {wanted}" in found


def test_nothing_else_changes() -> None:
    new = set(added(patch.patched(SCRIPT)))
    kept = [line for line in patch.patched(SCRIPT).splitlines() if line not in new]
    assert kept == [line for line in SCRIPT.splitlines() if "extra_args_provider=" not in line]


def test_a_provider_of_arguments_may_be_any_expression() -> None:
    text = SCRIPT.replace("add_modelopt_args if has_nvidia_modelopt else None", "partial(mine, more=[1, 2])")
    assert "        extra_args_provider=tmx.extra_args(partial(mine, more=[1, 2]))," in added(patch.patched(text))


@pytest.mark.parametrize(
    ("anchor", "told"),
    [
        ("stimer = StragglerDetector()\n", "import torchmix.megatron_adapter as tmx"),
        ('if __name__ == "__main__":\n', "tmx.get_batch(globals()), tmx.provider"),
        (
            "        extra_args_provider=add_modelopt_args if has_nvidia_modelopt else None,\n",
            "extra_args_provider=tmx.extra_args(...),",
        ),
    ],
)
def test_a_missing_or_doubled_anchor_is_an_error_with_the_line_to_write(anchor: str, told: str) -> None:
    for text, count in ((SCRIPT.replace(anchor, ""), 0), (SCRIPT.replace(anchor, anchor * 2), 2)):
        with pytest.raises(patch.AnchorMissing) as caught:
            patch.patched(text)
        assert f"found {count}" in str(caught.value)
        assert told in str(caught.value)


@pytest.mark.parametrize("name", ["get_batch", "train_valid_test_datasets_provider"])
def test_a_script_without_the_functions_is_refused(name: str) -> None:
    with pytest.raises(patch.AnchorMissing, match=name):
        patch.patched(SCRIPT.replace(f"def {name}(", "def another("))


def test_a_patched_script_is_not_patched_again() -> None:
    with pytest.raises(patch.AnchorMissing, match="already"):
        patch.patched(patch.patched(SCRIPT))


def test_the_command_shows_the_difference_and_writes_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, copy = tmp_path / "pretrain_gpt.py", tmp_path / "mine.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(sys, "argv", ["patch.py", str(script), "--write", str(copy)])
    assert patch.main() == 0
    assert copy.read_text() == patch.patched(SCRIPT)
    assert script.read_text() == SCRIPT
    assert "+++ b/pretrain_gpt.py" in capsys.readouterr().out


def test_the_command_writes_nothing_if_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, copy = tmp_path / "pretrain_gpt.py", tmp_path / "mine.py"
    script.write_text(SCRIPT.replace("__main__", "main"))
    monkeypatch.setattr(sys, "argv", ["patch.py", str(script), "--write", str(copy)])
    assert patch.main() == 1
    assert not copy.exists()
    assert "looked for one line" in capsys.readouterr().err
