"""How the site looks: every page in a real browser, wide and as a phone, light and dark; a page that overflows fails.

    python -m tests.look                     the pages of site/, which `make docs` has built
    python -m tests.look --shots FOLDER      and a picture of each, the whole page

Must hold: a page has the colors of the system; no page is wider than its window; no line is cut off, so whatever is
wider than its box can be scrolled; each picture has a size; no page asks another host for anything, or has a script
that fails. A page takes some tenths of a second. Without a browser nothing is looked at, which is said and is no
failure.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from typing import Any

from tests.support.browser import CHROMIUM, Browser

ROOT = Path(__file__).parents[1]
WIDTHS = (1280, 390)
COLORS = "has not the colors of the system"
SETTLES_S = 60.0
FAULTS = r"""
(() => {
  const found = [], width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width + 1) {
    const wide = [...document.querySelectorAll("body *")].filter(e => {
      const r = e.getBoundingClientRect();
      if (r.width === 0 || r.right <= width + 1) return false;
      for (let p = e.parentElement; p; p = p.parentElement)
        if (getComputedStyle(p).overflowX !== "visible" && p !== document.body) return false;
      return true;
    });
    const names = wide.slice(0, 3).map(e => e.tagName + "." + e.className + " " + e.textContent.trim().slice(0, 40));
    found.push("is " + document.documentElement.scrollWidth + " wide: " + names.join("; "));
  }
  // What navigation cuts, a tap opens; what is cut in an article is lost.
  for (const e of document.querySelectorAll("article *")) {
    const style = getComputedStyle(e), r = e.getBoundingClientRect();
    if (style.display === "inline" || r.width < 2 || r.height < 2) continue;
    if (["hidden", "clip"].includes(style.overflowX) && e.scrollWidth > e.clientWidth + 1 && e.textContent.trim())
      found.push("cuts a line: " + e.tagName + "." + e.className + " " + e.textContent.trim().slice(0, 40));
  }
  for (const e of document.images)
    if (e.complete && e.naturalWidth === 0) found.push("a picture is missing: " + e.src);
  const paint = getComputedStyle(document.body).backgroundColor.match(/[\d.]+/g).map(Number);
  const bright = (paint[0] + paint[1] + paint[2]) / 3, wanted = matchMedia("(prefers-color-scheme: dark)").matches;
  if (paint.length === 3 && wanted !== bright < 128) found.push("has not the colors of the system");
  return found;
})()
"""
"""JavaScript: what is wrong with a page as it is laid out now."""
LAID_OUT = "document.documentElement.clientWidth"
"""JavaScript: for how wide a window."""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *words: Any) -> None:
        """Say nothing."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """A folder on a port of this machine; its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def faults_of(folder: Path, shots: Path | None = None, *, settles_s: float = SETTLES_S) -> list[str]:
    """What is wrong with the pages of a folder, each with its page, width and colors.

    Args:
        folder: HTML files, also in folders.
        shots: Where a picture of each goes, if anywhere.
        settles_s: How long a page may take to have its colors and a new width.
    """
    pages = sorted(path for path in folder.rglob("*.html") if path.name != "404.html")
    found: list[str] = []
    with served(folder) as address, Browser() as browser:
        for path in pages:
            name = path.relative_to(folder).as_posix()
            for dark, width in product((False, True), WIDTHS):
                browser.look(width, dark=dark)
                if width == WIDTHS[0]:
                    browser.open(address + name)
                # Scripts of a page choose its colors after it is loaded, and another width is laid out when it can be.
                deadline = time.monotonic() + settles_s
                while time.monotonic() < deadline and (
                    browser.value(LAID_OUT) != width or COLORS in browser.value(FAULTS)
                ):
                    time.sleep(0.05)
                where = f"{name} at {width}, {'dark' if dark else 'light'}"
                found += [f"{where}: {fault}" for fault in browser.value(FAULTS)]
                if shots is not None:
                    shots.mkdir(parents=True, exist_ok=True)
                    file = f"{name.replace('/', '_')}-{width}-{'dark' if dark else 'light'}.png"
                    browser.picture(shots / file, whole=True)
            outside = [url for url in browser.requests() if not url.startswith((address, "data:", "blob:"))]
            found += [f"{name} asks for {url}" for url in outside]
            found += [f"{name}: {error[:200]}" for error in browser.errors()]
    return found


def main() -> int:
    """Run from the command line; 1 where a page has a fault, 2 where there is no page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "site")
    parser.add_argument("--shots", type=Path)
    asked = parser.parse_args()
    if CHROMIUM is None:
        print("no browser is installed, so no page was looked at")
        return 0
    if not list(asked.folder.rglob("*.html")):
        print(f"{asked.folder} has no page: make docs builds them", file=sys.stderr)
        return 2
    found = faults_of(asked.folder, asked.shots)
    print("\n".join(found) or "every page fits, wide and as a phone, light and dark")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
