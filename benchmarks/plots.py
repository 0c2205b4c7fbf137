"""Line plots as SVG, for pages that show a benchmark's figures."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _RIGHT = 460, 280, 50, 34, 44, 14
_COLOURS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df")
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#24292f}.title{font-weight:600}"
    ".grid{stroke:#8c959f;stroke-opacity:.35}.line{fill:none;stroke-width:2}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}}"
)


@dataclass
class Panel:
    """A plot of lines: by name, the points (x, y) in order of x."""

    title: str
    x_name: str
    lines: dict[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    log_x: bool = False
    steps: bool = True  # y changes at each point at once

    def svg(self) -> str:
        """Return the plot's elements."""
        points = [point for line in self.lines.values() for point in line] or [(1.0, 1.0)]
        xs, top = [x for x, _ in points], max(y for _, y in points) or 1.0
        low, high = (min(xs), max(xs)) if self.log_x else (0.0, max(xs) or 1.0)
        ticks = _decades(low, high) if self.log_x else _ticks(high)
        low, high = (min(low, ticks[0]), max(high, ticks[-1]))

        def across(x: float) -> float:
            part = math.log(x / low) / math.log(high / low) if self.log_x else x / high
            return _LEFT + part * (_WIDTH - _LEFT - _RIGHT)

        def up(y: float) -> float:
            return _HEIGHT - _BOTTOM - y / top * (_HEIGHT - _TOP - _BOTTOM)

        parts = [f'<text class="title" x="{_LEFT}" y="18">{escape(self.title)}</text>']
        for y in _ticks(top):
            parts.append(
                f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{up(y):.1f}" '
                f'y2="{up(y):.1f}"/><text x="{_LEFT - 6}" y="{up(y) + 4:.1f}" '
                f'text-anchor="end">{y:g}</text>'
            )
        for x in ticks:
            parts.append(
                f'<text x="{across(x):.1f}" y="{_HEIGHT - _BOTTOM + 16}" '
                f'text-anchor="middle">{x:g}</text>'
            )
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        parts.append(
            f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">'
            f"{escape(self.x_name)}</text>"
        )
        for number, (name, line) in enumerate(self.lines.items()):
            colour, path, last = _COLOURS[number % len(_COLOURS)], "", None
            for x, y in line:
                if last is not None and self.steps:
                    path += f"L{across(x):.1f},{up(last):.1f}"
                path += f"{'M' if last is None else 'L'}{across(x):.1f},{up(y):.1f}"
                last = y
            parts.append(f'<path class="line" stroke="{colour}" d="{path}"/>')
            at = _HEIGHT - _BOTTOM - 14 - 16 * (len(self.lines) - 1 - number)
            parts.append(
                f'<text x="{_WIDTH - _RIGHT - 6}" y="{at}" text-anchor="end" '
                f'style="fill:{colour}">{escape(name)}</text>'
            )
        return "".join(parts)


def page(panels: Sequence[Panel], columns: int = 2) -> str:
    """Return an SVG document with the panels in rows."""
    rows = math.ceil(len(panels) / columns)
    width, height = columns * _WIDTH, rows * _HEIGHT
    groups = [
        f'<g transform="translate({number % columns * _WIDTH},{number // columns * _HEIGHT})">'
        f"{panel.svg()}</g>"
        for number, panel in enumerate(panels)
    ]
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    style = f"<style>{_STYLE}</style>"
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return f"{opening}{style}{''.join(groups)}</svg>\n"


def distribution(values: Sequence[float], most: int = 200) -> list[tuple[float, float]]:
    """Return the points (value, share of values up to it) of at most so many values."""
    ordered = sorted(values)
    count = len(ordered)
    if not count:
        return []
    ranks = sorted({n * (count - 1) // (most - 1) for n in range(most)})
    return [(ordered[rank], (rank + 1) / count) for rank in ranks]


def _ticks(high: float) -> list[float]:
    step = 10 ** math.floor(math.log10(high))
    step = next(step * part for part in (0.2, 0.5, 1, 2) if high / (step * part) <= 6)
    return [step * n for n in range(math.floor(high / step + 1e-9) + 1)]


def _decades(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.floor(math.log10(high)) + 1
    return [10.0**power for power in range(first, last + 1)]
