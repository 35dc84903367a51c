"""What `torchmix check` says of sources some of whose tokens have no loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.chats import make_chats, plain_document, write_chats
from torchmix.cli.main import main


def check(folder: Path, capsys: pytest.CaptureFixture[str], **changes: Any) -> tuple[int, dict[str, tuple[str, str]]]:
    """The exit code, and level and message of the findings about loss, by place."""
    source = write_chats(folder, "chats", "jsonl", [[chat for chat in make_chats(1, 80) if chat]]) | changes
    recipe = {
        "version": 1,
        "seed": 1,
        "batch": {"samples": 2, "length": 512},
        "sources": {"chats": source},
        "mixture": {"chats": 1},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    assert main(["index", str(folder / "recipe.yaml")]) == 0
    capsys.readouterr()
    code = main(["check", str(folder / "recipe.yaml"), "--steps", "2", "--json"])
    found = json.loads(capsys.readouterr().out)["findings"]
    about_loss = [one for one in found if "have loss" in one["message"] or "has loss" in one["message"]]
    return code, {one["where"]: (one["level"], one["message"]) for one in about_loss}


def test_the_part_that_is_trained_on_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = check(tmp_path, capsys)
    documents = [plain_document(chat) for chat in make_chats(1, 80) if chat]
    part = sum(sum(has_loss) for _, has_loss in documents) / sum(len(ids) for ids, _ in documents)
    level, message = found["sources.chats"]
    assert (code, level) == (0, "note")
    assert abs(float(message.partition(" %")[0]) - 100 * part) < 0.1


def test_a_source_that_teaches_nothing_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = check(tmp_path, capsys, chat={"loss": ["tool"]})
    level, message = found["sources.chats"]
    assert code == 1 and level == "finding"
    assert "no message is of the role tool; nothing is learned from it" in message
