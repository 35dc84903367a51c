"""`torchmix keys`: a folder is all that it needs, and keys are not replaced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torchmix.cli.main import main


def test_keys_of_clients_are_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "keys"
    assert main(["keys", str(folder), "--clients", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"folder": str(folder), "clients": 2}
    names = ("server", "client-0", "client-1")
    assert {path.name for path in folder.iterdir()} == {
        f"{name}.{half}" for name in names for half in ("public", "secret")
    }
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.glob("*.secret"))
    before = (folder / "server.secret").read_text(encoding="ascii")
    assert main(["keys", str(folder)]) == 2
    assert "keys are not replaced" in capsys.readouterr().err
    assert (folder / "server.secret").read_text(encoding="ascii") == before
