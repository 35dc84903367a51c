"""The dashboard for Grafana: its queries name figures that a loader has, and a real Prometheus answers each."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import torchmix
from tests.support.ports import free_port
from tests.support.processes import ROOT, wait_until
from tests.support.projects import make_indexed_project

DASHBOARD = json.loads((ROOT / "examples" / "grafana" / "torchmix.json").read_text(encoding="utf-8"))
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


@pytest.fixture(scope="module")
def stats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    recipe = make_indexed_project(tmp_path_factory.mktemp("project"))
    with torchmix.build_loader(recipe, micro_batch_size=4, max_steps=1, loaders="in_process") as loader:
        assert all(microbatch.step == 0 for microbatch in loader)
        return loader.stats()


def test_every_query_is_of_figures_that_there_are(stats: dict[str, Any]) -> None:
    known = set(re.findall(r"^(torchmix_\w+)", torchmix.prometheus_text(stats), re.MULTILINE))
    asked = {name for query in QUERIES for name in re.findall(r"torchmix_\w+", query)}
    assert len(QUERIES) > 12 and asked <= known, asked - known


@pytest.mark.system
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_prometheus_finds_something_by_every_query(stats: dict[str, Any], tmp_path: Path) -> None:
    began_s = time.monotonic()

    class Figures(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            growing = {"step": int(10 * (time.monotonic() - began_s)), "total_data_wait_s": time.monotonic() - began_s}
            texts = [torchmix.prometheus_text({**stats, **growing}, {"rank": rank}) for rank in (0, 1)]
            lines = "".join(texts).splitlines()
            kept = list(dict.fromkeys(lines))  # types are said once
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(("\n".join(sorted(kept, key=lambda line: line.lstrip("# TYPEHL"))) + "\n").encode())

        def log_message(self, *words: Any) -> None:
            """Say nothing."""

    figures = ThreadingHTTPServer(("127.0.0.1", 0), Figures)
    thread = threading.Thread(target=figures.serve_forever, daemon=True)
    thread.start()
    port = free_port()
    config = tmp_path / "prometheus.yml"
    config.write_text(
        "{global: {scrape_interval: 1s}, scrape_configs: [{job_name: run, static_configs: "
        f"[{{targets: ['127.0.0.1:{figures.server_port}']}}]}}]}}"
    )
    words = [f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    process = subprocess.Popen(
        ["prometheus", *words, f"--web.listen-address=127.0.0.1:{port}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:

        def found(query: str) -> list[Any]:
            text = urllib.parse.quote(query.replace("$job", "run"))
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?query={text}") as answer:
                    results: list[Any] = json.load(answer)["data"]["result"]
                    return results
            except OSError:
                return []

        def missing() -> list[str]:
            """Queries that find nothing, or something that is no number."""
            values = {query: [float(one["value"][1]) for one in found(query)] for query in QUERIES}
            return [query for query, here in values.items() if not here or any(map(math.isnan, here))]

        wait_until(lambda: not missing(), deadline_s=300, what=lambda: str(missing()))
    finally:
        process.kill()
        process.wait(30)
        figures.shutdown()
        figures.server_close()
        thread.join()
