"""The figures of a loader for Prometheus: one page, on this machine alone.

In: figures by name. Out: text at `http://127.0.0.1:PORT/metrics`. Must hold: nobody beyond this machine reaches it; a
scrape takes nothing from the loader but the time to write some forty lines. Format: Prometheus' text, version 0.0.4.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer

from torchmix.errors import OptionError

PRESENT = ("cache_bytes", "cache_pages", "open_document_bytes", "files_open", "decode_amplification", "clients")
"""Figures that also fall; the others are counters. Names that begin with `waiting` are, too."""


def metrics_text(figures: Mapping[str, int | float]) -> str:
    """Figures as lines, each metric with its type.

    Names begin with `torchmix_loader_`; names of seconds end with `_seconds`, those of counters with `_total`.
    """
    lines = []
    for name, value in figures.items():
        is_present = name in PRESENT or name.startswith("waiting")
        metric = name.removeprefix("total_")
        if metric.endswith("_s"):
            metric = f"{metric[:-2]}_seconds"
        metric = f"torchmix_loader_{metric}" + ("" if is_present else "_total")
        lines += [f"# TYPE {metric} {'gauge' if is_present else 'counter'}", f"{metric} {value!r}"]
    return "".join(f"{line}\n" for line in lines)


class MetricsPage:
    """A server of the page; `run` in a thread, `close` from another."""

    def __init__(self, port: int, figures: Callable[[], Mapping[str, int | float]]) -> None:
        """Listen.

        Args:
            port: On 127.0.0.1; 0: any free one.
            figures: What is shown, as it is at each scrape.

        Raises:
            OptionError: The port is taken.
        """

        class Page(BaseHTTPRequestHandler):
            """One scrape."""

            timeout = 5.0

            def scrape(self) -> None:
                """Answer."""
                is_known = self.path == "/metrics"
                body = metrics_text(figures()).encode() if is_known else b"the page is /metrics\n"
                self.send_response(200 if is_known else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = scrape  # noqa: N815  # the name that the server asks for

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        try:
            self._server = HTTPServer(("127.0.0.1", port), Page)
        except OSError as error:
            raise OptionError(f"--metrics {port}: {error}") from error
        self.port = self._server.server_port

    def run(self) -> None:
        """Answer until `close`."""
        self._server.serve_forever(poll_interval=0.5)

    def close(self) -> None:
        """End `run`."""
        self._server.shutdown()
        self._server.server_close()
