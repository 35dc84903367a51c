"""One page of HTML about a run, which needs no network: charts, a step by a click, rows to mark.

The numbers stand in the file as JSON, in `<script type="application/json" id="values">`; what documents hold is escaped
before it is HTML. `page.js` draws. Cost: what the values have as JSON; texts and items are as large as they are.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
COMMANDS = """\
torchmix trace {recipe} --list marked.txt --deny-from {folder}deny.parquet
cp {recipe} {folder}edited.yaml && echo 'deny: [deny.parquet]' >> {folder}edited.yaml   # or add it to the list there
torchmix index {folder}edited.yaml
torchmix diff {recipe} {folder}edited.yaml --state STATE        # a state from before the step; prints CODE
torchmix plan {folder}edited.yaml --state STATE --accept-edit CODE --steps {steps}"""
"""From marked rows to an edit that was tried; the job resumes with `accept_edit=CODE`."""


def style() -> str:
    """CSS of the page."""
    return (FOLDER / "page.css").read_text(encoding="utf-8")


def parts(values: Mapping[str, Any]) -> Iterator[str]:
    """The body of the page, in pieces."""
    facts = values["facts"]
    told = " &middot; ".join(
        f"{html.escape(name)} <code>{html.escape(str(value))}</code>" for name, value in facts.items()
    )
    yield f'<p class="facts">{told}</p>\n'
    yield (
        "<p>Click a chart, or a step in the list: its documents stand below. Dashed lines are what the recipe asks; "
        "upright lines are edits (red dashes), decisions of a policy (dots) and faults (red).</p>\n"
    )
    yield '<section id="live" hidden><h2>Now</h2>'
    yield '<p id="live-none" class="dim">no process of this run is on this machine</p>'
    yield _table(("process", "pid", "state", "memory", "step", "tokens/s", "waits"), "live-processes")
    yield '<pre id="live-events" class="dim"></pre></section>\n'
    yield '<h2>Mixture, % of the tokens of a step</h2><div id="mixture"></div><p id="mixture-more" class="dim"></p>\n'
    yield '<h2>Losses by source</h2><div id="losses"></div>'
    yield (
        '<p id="losses-none" class="dim">none are known: name TensorBoard\'s folder, or a file of lines of JSON, with '
        "<code>--log</code>. Losses that <code>loader.report</code> took are read from the log of the policy.</p>\n"
    )
    yield '<h2>Waiting for data</h2><div id="waits"></div>'
    yield (
        '<p id="waits-none" class="dim">not known: log <code>{"rank": rank, **loader.stats()}</code> as a line of JSON '
        "on each rank, and name the files with <code>--log</code>.</p>\n"
    )
    yield f'<div id="slow-table">{_table(("rank", "waited in all", "longest", "in step"), "slow")}</div>\n'
    yield '<h2>What happened</h2><p id="events-none" class="dim">nothing is known</p><ul id="events"></ul>\n'
    yield (
        '<h2 id="step-name">Step</h2><p><button id="step-before">before</button> <input id="step-number" '
        'type="number" size="9" aria-label="step"> <button id="step-after">after</button></p>\n'
        '<p id="step-facts" class="facts"></p>\n'
    )
    yield _table(("stream", "asked", "given", "tokens", "loss"), "step-streams")
    yield '<div id="step-samples"></div>\n'
    folder, _, _ = values["recipe"].rpartition("/")
    commands = html.escape(
        COMMANDS.format(recipe=values["recipe"], folder=f"{folder}/" if folder else "", steps=values["try_steps"])
    )
    yield (
        '<section id="marked-section" hidden><h2 id="marked-count">Marked rows</h2>\n'
        '<textarea id="marked" rows="5" readonly aria-label="marked rows"></textarea>\n'
        '<p><button id="save">save marked.txt</button> <button id="copy">copy</button> <button id="unmark">unmark all'
        f"</button></p>\n<p>These commands take them out of the run, and try the edit before a job starts:</p>\n"
        f'<pre class="commands">{commands}</pre></section>\n'
    )
    content = json.dumps(values, separators=(",", ":")).replace("<", "\\u003c")
    yield f'<script type="application/json" id="values">{content}</script>\n'
    yield f"<script>{(FOLDER / 'page.js').read_text(encoding='utf-8')}</script>\n"


def _table(heads: Sequence[str], body: str) -> str:
    cells = "".join(f"<th>{head}</th>" for head in heads)
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody id="{body}"></tbody></table></div>'
