"""`torchmix check`: each fault is found, alone, and decides the exit code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from tests.support.catalogs import open_catalog
from tests.support.files import make_text_file, make_tokens_file, random_tokens
from tests.support.loaders import run_job
from tests.support.projects import make_indexed_project, make_project
from tests.support.vocabularies import make_tokenizer
from torchmix.cli import check as check_verb
from torchmix.cli.findings import FINDINGS_OF_CATALOG, Finding, Level, sources_findings
from torchmix.cli.main import main
from torchmix.parallel.topology import Topology
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of
from torchmix.stateful import leader
from torchmix.steps.memory_budget import STEP_TOKEN_BYTES, MemoryBudget, budget_of_node


def indexed(folder: Path, *edits: tuple[str, str]) -> Path:
    return make_indexed_project(folder, *edits)


def check(recipe: Path, capsys: pytest.CaptureFixture[str], code: int, *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["check", str(recipe), "--json", *words]) == code
    output = capsys.readouterr()
    assert output.err == ""
    values: dict[str, Any] = json.loads(output.out)
    assert values["exit_code"] == code
    return values


def messages(values: dict[str, Any], level: str, where: str) -> list[str]:
    return [one["message"] for one in values["findings"] if (one["level"], one["where"]) == (level, where)]


def test_a_sound_recipe_is_exit_code_0_with_the_numbers_of_each_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = indexed(tmp_path)
    values = check(recipe, capsys, 0, "--steps", "30")
    assert [one["name"] for one in values["sources"]] == ["code", "tiny", "web"]
    for one in values["sources"]:
        assert one["first_step"] <= 2
        assert one["runs_out_step"] is None
        assert one["delivered_tokens"] == pytest.approx(one["share"] * values["fill"] * 30 * 4096, abs=2000)
    assert main(["check", str(recipe), "--steps", "30"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("30 steps of 4,096 tokens")
    assert [line.split()[0] for line in lines[2:6]] == ["source", "code", "tiny", "web"]


def test_rows_that_could_not_be_indexed_are_told_with_file_row_and_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    masked = ("text: text, tokenizer: bytes}", "text: text, tokenizer: bytes, bad_rows: mask, max_bad: 1%}")
    recipe = make_project(tmp_path, ("code.parquet", "code.jsonl"), masked)
    lines = [json.dumps({"text": f"text {i}"}) for i in range(500)]
    lines[0] = lines[400] = "garbage"
    (tmp_path / "code.jsonl").write_text("\n".join(lines))
    assert main(["index", str(recipe)]) == 0
    assert "2 of 500 rows cannot be read: code.jsonl row 0: line 1" in caplog.text
    values = check(recipe, capsys, 0, "--steps", "30")
    [told] = [one for one in messages(values, "note", "sources.code") if "could not be read" in one]
    assert told.startswith("2 of 500 rows could not be read, and have no tokens (bad_rows: mask): code.jsonl row 0:")
    assert "; code.jsonl row 400: line 401: " in told
    [code] = [one for one in values["sources"] if one["name"] == "code"]
    assert (code["num_bad_rows"], code["num_empty"]) == (2, 2)
    assert [(bad["path"], bad["row"]) for bad in code["bad_rows"]] == [("code.jsonl", 0), ("code.jsonl", 400)]
    recipe = make_project(tmp_path, ("code.parquet", "code.jsonl"))
    [finding] = messages(check(recipe, capsys, 3), "data", "sources.code.text")
    assert "line 1, at byte 0" in finding


def test_documents_without_an_end_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tokenizer(tmp_path / "t.json")
    recipe = indexed(tmp_path, ("tokenizer: bytes", "tokenizer: t.json"))
    [note] = messages(check(recipe, capsys, 0, "--steps", "30"), "note", "sources.code.end_id")
    assert "does not learn where they end" in note
    recipe.write_text(recipe.read_text().replace("t.json", "t.json, end_id: 0"))
    assert main(["index", str(recipe)]) == 0
    assert not messages(check(recipe, capsys, 0, "--steps", "30"), "note", "sources.code.end_id")


def test_check_changes_nothing_on_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_project(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    check(recipe, capsys, 1, "--steps", "30")
    assert sorted(tmp_path.rglob("*")) == before


def test_without_a_catalog_files_and_columns_are_still_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_project(tmp_path)
    values = check(recipe, capsys, 1)
    assert "run torchmix index" in messages(values, "finding", "catalog")[0]
    (tmp_path / "tiny.parquet").unlink()
    make_text_file(tmp_path / "code.parquet", ["a"], column="body")
    (tmp_path / "data" / "web-1.parquet").write_bytes(b"not parquet")
    values = check(recipe, capsys, 3)
    assert "tiny.parquet" in messages(values, "data", "sources.tiny.path")[0]
    assert "no column 'text'" in messages(values, "data", "sources.code.text")[0]
    (message,) = messages(values, "data", "sources.web.tokens")
    assert "web-1.parquet" in message


def test_a_column_of_another_type_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_project(tmp_path)
    make_text_file(tmp_path / "tiny.parquet", ["a", "b"], column="input_ids")
    values = check(recipe, capsys, 3)
    assert "is string, not a list of integers" in messages(values, "data", "sources.tiny.tokens")[0]


def test_a_new_file_waits_for_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = indexed(tmp_path)
    make_tokens_file(tmp_path / "data" / "web-7.parquet", random_tokens(9, 50))
    (message,) = messages(check(recipe, capsys, 1, "--steps", "5"), "finding", "sources.web.path")
    assert "1 file(s) added - data/web-7.parquet" in message and "run torchmix index" in message


def test_a_changed_file_is_exit_code_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = indexed(tmp_path)
    make_tokens_file(tmp_path / "data" / "web-1.parquet", random_tokens(9, 50))
    (message,) = messages(check(recipe, capsys, 3, "--steps", "5"), "data", "sources.web.path")
    assert "1 file(s) changed - data/web-1.parquet" in message


def test_a_file_that_is_gone_is_exit_code_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = indexed(tmp_path)
    (tmp_path / "data" / "web-0.parquet").unlink()
    (message,) = messages(check(recipe, capsys, 3, "--steps", "5"), "data", "sources.web.path")
    assert "1 file(s) removed - data/web-0.parquet" in message


def test_a_catalog_of_other_settings_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = indexed(tmp_path)
    recipe.write_text(recipe.read_text().replace("tokens: input_ids}\n  web", "tokens: id}\n  web"))
    values = check(recipe, capsys, 3)  # `id` is no list, which is worse than a stale catalog
    assert "built with column" in messages(values, "finding", "catalog")[0]
    assert values["sources"] == []


def test_a_recipe_may_accept_a_source_of_less_than_a_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edits = (("79%", "79.9%"), ("tiny: 1%", "tiny: 0.1%"), ("seed: ", "starve: allow\nseed: "))
    values = check(indexed(tmp_path, *edits), capsys, 0, "--steps", "20")
    assert any("less than one sample of 256" in message for message in messages(values, "note", "sources.tiny"))


def test_a_source_of_less_than_a_sample_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = indexed(tmp_path, ("79%", "79.9%"), ("tiny: 1%", "tiny: 0.1%"))
    values = check(recipe, capsys, 1, "--steps", "20")
    (message,) = messages(values, "finding", "sources.tiny")
    assert "less than one sample of 256" in message
    tiny = values["sources"][1]
    assert tiny["delivered_tokens"] < 256
    check(recipe, capsys, 0, "--steps", "100")


def test_a_finding_says_once_where_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_project(tmp_path, ("tokenizer: bytes", "tokenizer: none.json"), ("web-*.parquet", "no-*.parquet"))
    values = check(recipe, capsys, 3)
    (message,) = messages(values, "data", "sources.code.tokenizer")
    assert message.startswith("cannot read ") and "none.json: No such file" in message
    (message,) = messages(values, "data", "sources.web.path")
    assert message.startswith("'data/no-*.parquet' matches no file")


def test_padding_of_a_fifth_of_the_batches_is_a_finding_with_its_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = indexed(tmp_path, ("balance:", "packing: {align_tokens: 256}\nbalance:"))
    values = check(recipe, capsys, 1, "--steps", "20")
    (message,) = messages(values, "finding", "packing")
    assert "20 of 20 batches are filled below 80%" in message and "rounded up to align_tokens 256 take" in message
    assert values["lowest_fill"] < values["fill"] < 0.8


def test_whole_documents_that_leave_room_are_the_cause_where_alignment_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = indexed(tmp_path)
    make_tokens_file(tmp_path / "data" / "web-0.parquet", [[1] * 144] * 800)
    make_tokens_file(tmp_path / "data" / "web-1.parquet", [[1] * 144] * 800)
    assert main(["index", str(recipe)]) == 0
    (message,) = messages(check(recipe, capsys, 1, "--steps", "20"), "finding", "packing")
    assert "whole documents leave room at the ends of samples of 256 tokens" in message


def test_sources_that_come_late_or_in_few_steps_are_told_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = indexed(tmp_path, ("web: 79%", "web: 79.98%"), ("tiny: 1%", "tiny: 0.02%"))
    values = check(recipe, capsys, 0, "--steps", "1000")
    tiny = values["sources"][1]
    late, uneven = messages(values, "note", "mixture")
    assert tiny["first_step"] > 10 and late.startswith(f"tiny (step {tiny['first_step']}): the first token comes after")
    assert f"in single steps tiny ({tiny['step_deviation']:.0%}) are off" in uneven
    assert "less than two of their pieces" in uneven


def test_a_source_that_runs_out_is_a_finding_with_its_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = indexed(tmp_path, ("tokenizer: bytes", "tokenizer: bytes, max_epochs: 1"))
    values = check(recipe, capsys, 1)
    (message,) = messages(values, "finding", "sources.code")
    step = values["stop_step"]
    assert f"runs out in step {step}, after max_epochs 1, and the run stops there" in message
    assert main(["plan", str(recipe), "--steps", str(step)]) == 0
    assert main(["plan", str(recipe), "--steps", str(step + 1)]) == 3
    check(recipe, capsys, 0, "--steps", str(step))


def test_a_source_that_hands_its_share_on_is_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = indexed(tmp_path, ("tokenizer: bytes", "tokenizer: bytes, max_epochs: 1, on_exhausted: renormalise"))
    values = check(recipe, capsys, 0, "--steps", "60")
    empty, message = messages(values, "note", "sources.code")
    assert empty.startswith("10 of 300 documents have no tokens of their own: they are empty texts")
    assert "runs out in step" in message and "the other sources have its share" in message
    assert main(["plan", str(recipe), "--steps", "60"]) == 0


def test_the_end_of_all_sources_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bounds = "max_epochs: 1, on_exhausted: renormalise"
    recipe = indexed(
        tmp_path,
        ("tokenizer: bytes", f"tokenizer: bytes, {bounds}"),
        ("tiny.parquet, tokens: input_ids", f"tiny.parquet, tokens: input_ids, {bounds}"),
        ("web-*.parquet, tokens: input_ids", f"web-*.parquet, tokens: input_ids, {bounds}"),
    )
    values = check(recipe, capsys, 1)
    (message,) = messages(values, "finding", "sources")
    assert f"by step {values['stop_step']}" in message
    notes = [note for name in ("code", "tiny", "web") for note in messages(values, "note", f"sources.{name}")]
    assert sum("the other sources have its share" in note for note in notes) == 2
    assert sum("no other source is left, and the run stops there" in note for note in notes) == 1


def test_empty_documents_and_repeats_are_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = indexed(tmp_path, ("web: 79%", "web: 40%"), ("tiny: 1%", "tiny: 40%"))
    values = check(recipe, capsys, 0, "--steps", "5")
    web = values["sources"][2]
    (message,) = messages(values, "note", "sources.web")
    assert message.startswith(f"{web['num_empty']} of 3,000 documents have no tokens")
    tiny = values["sources"][1]
    (message,) = messages(values, "note", "sources.tiny")
    assert f"up to {tiny['most_repeats']} times in one step" in message and tiny["most_repeats"] > 3


def test_empty_texts_count_as_documents_without_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_project(
        tmp_path, ("  code:", "  prose: {path: prose.parquet, text: text, tokenizer: bytes}\n  code:")
    )
    recipe.write_text(recipe.read_text().replace("web: 79%", "web: 59%, prose: 20%"))
    make_text_file(tmp_path / "prose.parquet", ["", "a text", None, "", "another text that is longer"] * 40)
    assert main(["index", str(recipe), "--json"]) == 0
    [prose] = [one for one in json.loads(capsys.readouterr().out)["sources"] if one["name"] == "prose"]
    assert prose["num_empty"] == 120
    values = check(recipe, capsys, 0, "--steps", "20")
    assert [one["num_empty"] for one in values["sources"] if one["name"] == "prose"] == [120]
    message, *_ = messages(values, "note", "sources.prose")
    assert message == (
        "120 of 200 documents have no tokens of their own: 80 are empty texts and come with the token that begins or "
        "ends each text; a selection with `where: tokens > 1` leaves them out; the other 40 have no token at all and "
        "are passed over"
    )


def test_a_document_longer_than_a_batch_is_a_note_with_a_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_project(tmp_path)
    make_tokens_file(tmp_path / "tiny.parquet", [[1] * 10_000, [2] * 50])
    assert main(["index", str(recipe)]) == 0
    values = check(recipe, capsys, 0, "--steps", "200")
    [message] = [text for text in messages(values, "note", "sources") if "longest document" in text]
    assert "more tokens than a batch, 4,096" in message
    assert "tiny (10,000 tokens, 250 steps)" in message  # of 40 tokens, 1 % of a batch


def test_memory_of_open_documents_is_said_and_more_than_the_cache_is_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_project(tmp_path)
    make_tokens_file(tmp_path / "tiny.parquet", [[1] * 10_000, [2] * 50])
    assert main(["index", str(recipe)]) == 0
    longest = [one["max_document_tokens"] for one in check(recipe, capsys, 0, "--steps", "20")["sources"]]
    open_bytes = 4 * sum(tokens for tokens in longest if tokens > 256)
    text = recipe.read_text()
    for cache_bytes, is_told in ((open_bytes - 1, True), (open_bytes, False)):
        recipe.write_text(f"{text}\nread: {{cache: {cache_bytes}}}\n")
        values = check(recipe, capsys, 0, "--steps", "20")
        assert values["open_document_bytes"] == open_bytes > 40_000
        told = [message for message in messages(values, "note", "read.cache") if "beside the cache" in message]
        assert bool(told) == is_told
    assert main(["check", str(recipe), "--steps", "20"]) == 0
    assert "open documents: up to " in capsys.readouterr().out
    own = text.replace("tiny.parquet, tokens: input_ids", "tiny.parquet, tokens: input_ids, packing: {overflow: drop}")
    recipe.write_text(own)
    assert check(recipe, capsys, 0, "--steps", "20")["open_document_bytes"] == open_bytes - 40_000
    recipe.write_text(text.replace("balance:", "packing: {overflow: truncate}\nbalance:"))
    assert check(recipe, capsys, 0, "--steps", "20")["open_document_bytes"] == 0


def test_what_a_node_that_reads_first_leaves_to_loaders_is_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = indexed(tmp_path)
    text = recipe.read_text()
    for method in ("page", "row"):
        extra = f"\nshuffle: {{method: {method}}}\nloaders: {{where: [node, job]}}\nread: {{cache: "
        recipe.write_text(f"{text}{extra}1GiB}}\n")
        assert not messages(check(recipe, capsys, 0, "--steps", "20"), "note", "loaders.where")
        recipe.write_text(f"{text}{extra}40000}}\n")
        [message] = messages(check(recipe, capsys, 0, "--steps", "20"), "note", "loaders.where")
        found = re.match(r"the node has memory for .* of the (.*) or so that .* asked for about (.*) % of", message)
        assert found is not None and 0 < float(found[2]) < 100


def test_memory_of_a_node_is_what_a_run_of_these_ranks_adds_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = indexed(tmp_path)
    text = recipe.read_text()
    recipe.write_text(f"{text}\nloaders: {{where: in_process}}\n")
    found: list[MemoryBudget] = []

    def recorded(*given: Any, **options: Any) -> MemoryBudget:
        found.append(budget_of_node(*given, **options))
        return found[-1]

    monkeypatch.setattr(leader, "budget_of_node", recorded)
    run_job(recipe, Topology(dp=2, tp=2, cp=2), max_steps=1)
    sizes = ("--steps", "20", "--dp", "2", "--tp", "2", "--cp", "2")
    terms = check(recipe, capsys, 0, *sizes)["node_memory_bytes"]
    assert [one.terms for one in found] == [terms] * 2
    assert terms["steps at peers"] == STEP_TOKEN_BYTES * 4096 * 8, "slices of six peers, and messages of two leaders"
    half = check(recipe, capsys, 0, *sizes, "--node-ranks", "4")["node_memory_bytes"]
    assert {name: 2 * value for name, value in half.items()} == {**terms, "steps": 2 * half["steps"]}
    assert "steps at peers" not in check(recipe, capsys, 0, "--steps", "20")["node_memory_bytes"]
    alone, most = (
        check(recipe, capsys, 0, "--steps", "20", *more)["node_memory_bytes"]
        for more in ((), ("--dp", "4", "--node-ranks", "3"))
    )
    assert most["read.cache"] == 3 * alone["read.cache"], "of the nodes with three leaders and with one"
    recipe.write_text(f"{text}\nloaders: {{where: in_process, memory: {sum(terms.values()) - 1}}}\n")
    [message] = messages(check(recipe, capsys, 1, *sizes), "finding", "loaders.memory")
    assert "+ steps at peers " in message
    for more, said in (
        ((), "a node that reads everything for 8 ranks"),
        (("--node-ranks", "4"), "a node of 4 of 8 ranks"),
    ):
        main(["check", str(recipe), *sizes, *more])
        assert f"memory of {said}, at most: read.cache " in capsys.readouterr().out


def test_what_the_planner_refuses_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = indexed(tmp_path, ("balance:", "packing: {overflow: error}\nbalance:"))
    values = check(recipe, capsys, 1)
    assert "`overflow: error`" in messages(values, "finding", "sources")[0]


def test_estimates_are_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_verb, "SIMULATED_STEPS", 40)
    recipe = indexed(
        tmp_path, ("web-*.parquet, tokens: input_ids", "web-*.parquet, tokens: input_ids, max_epochs: 100")
    )
    assert main(["check", str(recipe), "--steps", "1000000"]) == 1
    output = capsys.readouterr().out
    assert "runs out in about step" in output
    assert "estimated from the first 40 steps" in output


def test_rows_split_over_pages_are_a_note(tmp_path: Path) -> None:
    path = indexed(tmp_path)
    recipe = load_recipe(path)
    part, catalog = part_of(recipe, "train"), open_catalog(recipe, tmp_path)
    web = catalog.sources["web"]
    files = (msgspec.structs.replace(web.files[0], split_pages=2, tail_bytes=1000), *web.files[1:])
    altered = replace(catalog, sources=catalog.sources | {"web": replace(web, files=files)})
    found = [one.message for one in sources_findings(part, altered, recipe.read) if "split over pages" in one.message]
    assert len(found) == 1 and found[0].startswith("1 of 2 files")
    assert "1000 B more" in found[0] and "% of the column" in found[0]
    assert not [one for one in sources_findings(part, catalog, recipe.read) if "split over pages" in one.message]
    files = (web.files[0], msgspec.structs.replace(web.files[1], whole_chunks=True))
    altered = replace(catalog, sources=catalog.sources | {"web": replace(web, files=files)})
    found = [one.message for one in sources_findings(part, altered, recipe.read) if "only be read whole" in one.message]
    assert len(found) == 1 and found[0].startswith("1 of 2 files")


def test_a_cache_that_is_too_small_for_the_windows_is_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = indexed(tmp_path, ("balance:", "shuffle: {window_pages: 4}\nbalance:"))
    windows = open_catalog(load_recipe(recipe), tmp_path).sources
    kept = {"bytes": 1, None: 2}  # texts as texts, ids below 65,536 in two bytes
    present = sum(
        kept[one.tokenizer] * one.num_tokens // -(-one.sizes.num_pages // one.sizes.window_pages)
        for one in windows.values()
    )
    text = recipe.read_text()
    for cache_bytes, said in ((present - 1, "many times"), (present, "in bursts"), (3 * present, None)):
        recipe.write_text(f"{text}\nread: {{cache: {cache_bytes}}}\n")
        found = messages(check(recipe, capsys, 0, "--steps", "30"), "note", "read.cache")
        assert [said in message for message in found] == ([True] if said else [])


def test_a_new_finding_is_a_row_of_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = [Finding(level=Level.FINDING, where="sources.web", message="has few letters")]
    monkeypatch.setattr(check_verb, "FINDINGS_OF_CATALOG", (*FINDINGS_OF_CATALOG, lambda seen: iter(few)))
    assert messages(check(indexed(tmp_path), capsys, 1), "finding", "sources.web") == ["has few letters"]
