"""A recipe that is edited between two runs of a checkpoint, by Megatron's own schedules: other shares, a source more,
another layout."""

from __future__ import annotations

import base64
import json
from collections import Counter
from pathlib import Path

import pytest

from tests.support.files import make_text_file, random_texts
from tests.support.forks import MEGATRON
from tests.support.layouts import Layout, write_bytes_job
from tests.support.processes import Processes
from torchmix.cli.main import main
from torchmix.indexing.scan import index_recipe
from torchmix.recipe.load import load_recipe

pytestmark = pytest.mark.system

STEPS, KILL_AT = 20, 11
DEADLINE_S = 300.0


def test_a_checkpoint_goes_on_with_an_edited_recipe_at_another_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_bytes_job(tmp_path, boundaries="document")
    make_text_file(tmp_path / "late.parquet", random_texts(9, 300, mean_words=20))
    late = "  late: {path: late.parquet, text: text, tokenizer: bytes}\nmixture: {long: 30%, short: 20%, late: 50%}"
    edited = tmp_path / "edited.yaml"
    edited.write_text(recipe.read_text().replace("mixture: {long: 60%, short: 40%}", late))
    for path in (recipe, edited):
        index_recipe(load_recipe(path), tmp_path)
    assert main(["diff", str(recipe), str(edited), "--json"]) == 0
    word = json.loads(capsys.readouterr().out)["accept_edit"]
    first, second = Layout(pp=2, dp=2, steps=STEPS), Layout(tp=2, cp=2, steps=STEPS)
    with Processes(tmp_path) as processes:
        words = [recipe, tmp_path / "out", DEADLINE_S, STEPS, KILL_AT, first.name, second.name, edited, word]
        child = processes.fork_python("-m", "tests.support.megatron_restart", *map(str, words), after=MEGATRON)
        assert child.wait(deadline_s=DEADLINE_S + 300.0) == 0, child.report()
        went_on_at = json.loads(child.stdout().splitlines()[-1])["went_on_at"]
    assert 0 < went_on_at <= KILL_AT + 2 and went_on_at % 5 == 0

    # The checkpoint's state has the digest of all steps that the ranks were given; trace plans them by both recipes.
    (tmp_path / "state").write_bytes(base64.b64decode((tmp_path / "out" / "state").read_text()))
    sizes = {"long": 300, "short": 400, "late": 300}
    (tmp_path / "rows").write_text("".join(f"{name}:{row}\n" for name, n in sizes.items() for row in range(n)))
    capsys.readouterr()
    words = [edited, "--state", tmp_path / "state", "--list", tmp_path / "rows", "--json"]
    assert main(["trace", *map(str, words)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["stop"], found["edits"]) == (STEPS, [went_on_at])
    tokens: Counter[str] = Counter()
    spans: Counter[tuple[str, int, int, int]] = Counter()
    for piece in found["pieces"]:
        spans[piece["source"], piece["row"], piece["epoch"], piece["start"]] += 1
        tokens[piece["source"]] += (piece["stop"] - piece["start"]) * (piece["step"] >= went_on_at)
    assert max(spans.values()) == 1, "nothing is given twice"
    assert tokens["late"] / tokens.total() == pytest.approx(0.5, abs=0.05)
    assert all(piece["step"] >= went_on_at for piece in found["pieces"] if piece["source"] == "late")
