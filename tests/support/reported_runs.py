"""A run for `torchmix report`: a policy, three edits, a loss that jumps, a worker that is killed, and a ledger."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

import torchmix
from tests.support.files import make_text_file, random_texts
from tests.support.processes import workers_of_this_process
from torchmix.errors import StateMismatch

EDITED_AT = (8, 14, 20)
STEPS = 26
SPIKE = 17
SLOW = 11
KILLED_AFTER = 1
"""The step behind which the worker of the first stretch is killed; later stretches read in this process."""
SOURCES = ("code", "prose", "web")
TEXT = "</script><b>bold</b> & 'quoted'"
"""In every document of `code`: a page has to show it as text."""


class Ledger(msgspec.Struct, kw_only=True):
    """What a run was given, kept by its own loop."""

    tokens: dict[int, dict[str, int]] = {}
    """Step -> source -> tokens delivered."""
    workers_lost: dict[int, int] = {}
    """Step -> workers lost until then."""


def write_run(folder: Path) -> Ledger:
    """Make recipe, data, state and log of a run in a folder."""
    for number, name in enumerate(SOURCES):
        texts = [f"{TEXT} {text}" if name == "code" else text for text in random_texts(number, 300, mean_words=20.0)]
        make_text_file(folder / f"{name}.parquet", texts)
    recipe: dict[str, Any] = {
        "version": 1,
        "seed": 5,
        "batch": {"samples": 8, "length": 256},
        "sources": {name: {"path": f"{name}.parquet", "text": "text", "tokenizer": "bytes"} for name in SOURCES},
        "mixture": {"text": {"share": "70%", "children": {"prose": 1, "web": 1}}, "code": "30%"},
        "dynamic": {"policy": "odm", "at": "text", "every": "4 steps", "lag": "2 steps"},
        "balance": {"method": "rows", "model": {"layers": 4, "hidden": 64, "ffn": 128, "heads": 4}},
    }
    ledger = Ledger()
    state: Mapping[str, Any] | None = None
    edits: list[dict[str, Any]] = [
        {},
        {"mixture": {**recipe["mixture"], "code": "40%", "text": {**recipe["mixture"]["text"], "share": "60%"}}},
        {
            "sources": {**recipe["sources"], "prose": {**recipe["sources"]["prose"], "max_epochs": 9}},
            "deny": ["d.parquet"],
        },
        {"mixture": {**recipe["mixture"], "code": "10%", "text": {**recipe["mixture"]["text"], "share": "90%"}}},
    ]
    pq.write_table(pa.table({"source": ["web", "code"], "row": [3, 5]}), folder / "d.parquet")
    with (folder / "log.jsonl").open("w", encoding="utf-8") as log:
        for edit, stop in zip(edits, (*EDITED_AT, STEPS), strict=True):
            recipe |= edit
            (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
            torchmix.index(folder / "recipe.yaml")
            state = _train(folder / "recipe.yaml", stop, state, ledger, log)
    assert state is not None
    (folder / "state.bin").write_bytes(state["torchmix_state"])
    return ledger


def _train(recipe: Path, stop: int, state: Mapping[str, Any] | None, ledger: Ledger, log: Any) -> Any:
    words: dict[str, Any] = {"micro_batch_size": 4, "max_steps": stop}
    words |= {"loaders": "node", "look_ahead": 1} if state is None else {"loaders": "in_process"}
    with torchmix.build_loader(recipe, **words) as loader:
        if state is not None:
            try:
                loader.load_state_dict(state)
            except StateMismatch as error:
                [code] = re.findall(r"accept_edit='(\w{16})'", str(error))
                loader.load_state_dict(state, accept_edit=code)
        for microbatch in loader:
            if not microbatch.is_last_of_step:
                continue
            step, stats = microbatch.step, loader.stats()
            if (step, state) == (KILLED_AFTER, None):
                [worker] = workers_of_this_process()
                os.kill(worker, signal.SIGKILL)
            ledger.tokens[step] = dict(stats["tokens_of_source"])
            ledger.workers_lost[step] = stats["workers_lost"]
            losses = {name: (loss_of(name, step), tokens) for name, tokens in ledger.tokens[step].items() if tokens}
            loader.report(step, {name: (loss * tokens, tokens) for name, (loss, tokens) in losses.items()})
            log.write(json.dumps({"rank": 0, **stats, "data_wait_s": 0.01}) + "\n")
            log.write(json.dumps({"rank": 1, "step": step, "data_wait_s": 0.5 if step == SLOW else 0.02}) + "\n")
        return loader.state_dict()


def loss_of(source: str, step: int) -> float:
    """The mean loss of a source at a step; `web` jumps once."""
    return 4.0 - 0.01 * step + 0.1 * SOURCES.index(source) + (3.0 if (source, step) == ("web", SPIKE) else 0.0)
