"""The page of a run: one file that needs no network, or with `--serve` the same from this process."""

from __future__ import annotations

import html
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from torchmix.boards.find import SeenProcess, runs_of, seen_processes
from torchmix.cli.top import run_values
from torchmix.errors import OptionError

# --- The page: charts, a step by a click, rows to mark.
#
# The numbers stand in the file as JSON, in `<script type="application/json" id="values">`; what documents hold is
# escaped before it is HTML. `page.js` draws. Cost: what the values have as JSON; texts and items are as large as they
# are.

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


# --- `--serve`: the page from this process, which reads any step when it is clicked and looks at running processes.
#
# It listens on the loopback alone, and answers whoever knows the token that it prints. Nothing can be changed through
# it.

TOKEN_BYTES = 24


def address_of(text: str) -> tuple[str, int]:
    """Host and port of `127.0.0.1:PORT`; port 0 is one that is free.

    Raises:
        OptionError: It is no address, or one that other machines reach.
    """
    host, colon, port = text.rpartition(":")
    host = host.strip("[]")
    try:
        is_here = host == "localhost" or ip_address(host).is_loopback
        number = int(port)
        if not colon or not 0 <= number < 1 << 16:
            raise ValueError(port)
    except ValueError as error:
        raise OptionError(f"--serve {text}: write it as 127.0.0.1:8000") from error
    if not is_here:
        raise OptionError(
            f"--serve {text}: the page is not encrypted, so it is served to this machine alone; write "
            f"127.0.0.1:{port}, and come from another machine by ssh -L {port}:127.0.0.1:{port}"
        )
    return host, number


class LiveLook:
    """What the processes of a recipe's runs show now."""

    def __init__(self, recipe: Path) -> None:
        """`recipe`: the file that the runs were opened with."""
        self._recipe = str(recipe.resolve())
        self._lock = threading.Lock()
        self._before: list[SeenProcess] = []
        self._before_s = time.monotonic()

    def values(self) -> dict[str, Any]:
        """Cells of a row for each process, and what has happened to them, in words."""
        with self._lock:
            seen, now_s = seen_processes(), time.monotonic()
            runs = [run_values(one, self._before, max(now_s - self._before_s, 1e-3)) for one in runs_of(seen)]
            self._before, self._before_s = seen, now_s
        processes, events = [], []
        for run in runs:
            if run["run"].rpartition(" ")[0] != self._recipe:
                continue
            for one in run["processes"]:
                rank = one["facts"].get("rank")
                figures: dict[str, Any] = next(iter(one["figures"].values()), {})
                rate, waits = figures.get("tokens_per_s"), figures.get("wait_share")
                cells = (
                    one["kind"] + ("" if rank is None else f" {rank}"),
                    str(one["pid"]),
                    one["state"],
                    f"{one['pss_bytes'] >> 20:,} MiB",
                    str(figures.get("step", "")),
                    "" if rate is None else f"{rate:,.0f}",
                    "" if waits is None else f"{100 * min(1.0, waits):.0f} %",
                )
                processes.append({"cells": list(cells)})
                events += [f"{one['kind']} {one['pid']}: {event['text']}" for event in one["events"]]
        return {"processes": processes, "events": events}


class PageServer:
    """Serves the page until it is closed."""

    def __init__(
        self,
        address: tuple[str, int],
        page: Callable[[], str],
        step: Callable[[int], dict[str, Any] | None],
        live: Callable[[], dict[str, Any]],
    ) -> None:
        """Listen.

        Args:
            address: Host and port.
            page: The whole page.
            step: What the page shows of a step; None where there is no such step. It is called by one thread at a time.
            live: See `LiveLook.values`.

        Raises:
            OptionError: The port is taken.
        """
        self.token = secrets.token_urlsafe(TOKEN_BYTES)
        lock, token = threading.Lock(), self.token

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                url = urlsplit(self.path)
                asked = parse_qs(url.query)
                if not secrets.compare_digest(asked.get("token", [""])[0].encode(), token.encode()):
                    self._answer(403, "text/plain", "the address lacks the token that torchmix report has printed")
                elif url.path == "/":
                    self._answer(200, "text/html", page())
                elif url.path == "/live":
                    self._answer(200, "application/json", json.dumps(live()))
                elif url.path == "/step" and asked.get("n", ["-"])[0].isdigit():
                    with lock:
                        found = step(int(asked["n"][0]))
                    code, text = (404, "there is no such step") if found is None else (200, json.dumps(found))
                    self._answer(code, "application/json" if code == 200 else "text/plain", text)
                else:
                    self._answer(404, "text/plain", "there is no such page")

            def _answer(self, code: int, kind: str, text: str) -> None:
                content = text.encode()
                self.send_response(code)
                self.send_header("Content-Type", f"{kind}; charset=utf-8")
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Cache-Control", "no-store")
                self.send_header("Referrer-Policy", "no-referrer")
                self.send_header("X-Content-Type-Options", "nosniff")
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *words: Any) -> None:
                """Say nothing: the token would be in the log."""

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            daemon_threads = True

        try:
            self._server = Server(address, Handler)
        except OSError as error:
            raise OptionError(f"--serve {address[0]}:{address[1]}: {error.strerror}") from error
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        self.url = f"http://{host}:{self._server.server_port}/?token={self.token}"

    def run(self) -> None:
        """Answer until `close` is called or Ctrl-C is pressed."""
        try:
            self._server.serve_forever()
        finally:
            self._server.server_close()

    def close(self) -> None:
        """End `run`, from another thread."""
        self._server.shutdown()
