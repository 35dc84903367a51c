"""Plain SVG for the pictures of these pages: rectangles, lines and words on a white ground."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

INK, GREY, PALE = "#222222", "#666666", "#e3e6ee"
COLORS = ("#4269d0", "#efb118", "#ff725c", "#3ca951", "#a463f2", "#6cc5b0", "#9c6b4e", "#ff8ab7")
MONO = "DejaVu Sans Mono, Menlo, Consolas, monospace"


class Canvas:
    """A picture that grows by calls; all lengths are pixels."""

    def __init__(self, width: int, height: int, *, alt: str, size: int = 13) -> None:
        """`alt`: what the picture shows, for who cannot see it; `size`: of words."""
        self.width, self.height = width, height
        self._size = size
        self._parts = [f"<title>{escape(alt)}</title>", f'<rect width="{width}" height="{height}" fill="#ffffff"/>']

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, *, edge: str = "", tip: str = ""
    ) -> None:
        """A filled rectangle; `tip` appears over it."""
        stroke = f' stroke="{edge}"' if edge else ""
        inside = f"><title>{escape(tip)}</title></rect>" if tip else "/>"
        size = f'width="{_n(width)}" height="{_n(height)}"'
        self._parts.append(f'<rect x="{_n(x)}" y="{_n(y)}" {size} fill="{fill}"{stroke}{inside}')

    def line(self, points: Iterable[tuple[float, float]], color: str, *, width: float = 2, dashes: str = "") -> None:
        """A line through points."""
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        stroke = f'stroke="{color}" stroke-width="{_n(width)}"{dashed}'
        self._parts.append(f'<polyline points="{path}" fill="none" {stroke}/>')

    def text(
        self, x: float, y: float, words: str, *, color: str = INK, at: str = "start", bold: bool = False, size: int = 0
    ) -> None:
        """Words whose baseline begins, is centered (`at` middle) or ends (`at` end) at a point."""
        anchor = "" if at == "start" else f' text-anchor="{at}"'
        weight = ' font-weight="bold"' if bold else ""
        font = f' font-size="{size}"' if size else ""
        fill = "" if color == INK else f' fill="{color}"'
        self._parts.append(f'<text x="{_n(x)}" y="{_n(y)}"{anchor}{weight}{font}{fill}>{escape(words)}</text>')

    def __str__(self) -> str:
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
        fonts = f'width="{self.width}" height="{self.height}" font-family="sans-serif" font-size="{self._size}" '
        return f'{head}{fonts}fill="{INK}" role="img">\n' + "\n".join(self._parts) + "\n</svg>\n"


def chart(
    title: str,
    lines: Mapping[str, tuple[Sequence[float], Sequence[float], str, str]],
    *,
    alt: str,
    across: str,
    up: str,
    top: float,
    height: int = 300,
    marks: Sequence[tuple[float, str]] = (),
) -> Canvas:
    """Lines over one axis, each named at its end.

    Args:
        title: Above the picture.
        lines: Name -> values across, values up, color, dashes; a name that begins with a space is not written.
        alt: What the picture shows.
        across, up: What the axes are.
        top: Where the axis up ends; it begins at 0.
        height: Pixels.
        marks: Places across with a thin line and its words.
    """
    width, left, right, above, below = 760, 58, 150, 46, 40
    canvas = Canvas(width, height, alt=alt)
    first = min(min(x) for x, *_ in lines.values())
    last = max(max(x) for x, *_ in lines.values())

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            left + (width - left - right) * (x - first) / max(last - first, 1e-9),
            height - below - (height - above - below) * y / top,
        )

    canvas.text(16, 22, title, bold=True)
    for part in range(5):
        value = top * part / 4
        (x0, y), (x1, _) = place(first, value), place(last, value)
        canvas.line([(x0, y), (x1, y)], PALE, width=1)
        canvas.text(left - 8, y + 4, f"{value:g}", color=GREY, at="end", size=11)
    for part in range(5):
        value = round(first + (last - first) * part / 4)
        canvas.text(place(value, 0)[0], height - below + 18, f"{value:,}", color=GREY, at="middle", size=11)
    canvas.text(left, above - 8, up, color=GREY, size=11)
    canvas.text(width - right, height - 6, across, color=GREY, at="end", size=11)
    taken, down = 0.0, 0
    for x, words in sorted(marks):
        at = place(x, 0)[0]
        down = down + 14 if at < taken else 0  # below the words that it would touch
        taken = at + 7 * len(words)
        canvas.line([place(x, 0), place(x, top)], GREY, width=1, dashes="2 3")
        canvas.text(at + 4, above + 10 + down, words, color=GREY, size=11)
    ends: list[float] = []
    for xs, ys, color, dashes in lines.values():
        canvas.line([place(x, y) for x, y in zip(xs, ys, strict=True)], color, dashes=dashes)
    named = [(place(xs[-1], ys[-1])[1], name, color) for name, (xs, ys, color, _) in lines.items() if name[0] != " "]
    for y, name, color in sorted(named):
        ends.append(max(y + 4, ends[-1] + 15 if ends else 0))
        canvas.text(width - right + 8, ends[-1], name, color=color, bold=True, size=12)
    return canvas


def _n(value: float) -> str:
    """A number with one digit behind the point, if it needs one."""
    return f"{round(value, 1):g}"
