"""Small multiples of lines as an SVG that can be read on white and on black, without a library."""

import math
from collections.abc import Mapping, Sequence
from html import escape

Lines = Mapping[str, Sequence[float]]
_COLOURS = ("#0b8a5b", "#d9822b", "#3b7dd8", "#a855b5")  # enough contrast with either
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f }
.soft, .unit { fill: #6e7781 } .title { font-weight: 600 } .unit { font-weight: 400 }
.grid { stroke: #8c959f; stroke-opacity: .35 } .learnt { fill: #8c959f; fill-opacity: .18 }
.line { fill: none; stroke-width: 2 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .soft, .unit { fill: #9198a1 } }
"""
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 300, 170, 40, 58, 56


def svg(panels: Mapping[str, Lines], ticks: Sequence[str], learnt: Mapping[str, int]) -> str:
    """A panel beside another, two in a row, each with the same lines; the step to the tick
    ``learnt`` of a panel is shaded. Values of a panel begin at 0 and have a scale of their own."""
    names = list(next(iter(panels.values())))
    rows = -(-len(panels) // 2)
    width = 2 * (_LEFT + _WIDTH + _GAP / 2)
    height = _TOP + rows * (_HEIGHT + _GAP)
    drawn = [_legend(names)]
    for n, (title, lines) in enumerate(panels.items()):
        x, y = _LEFT + n % 2 * (_WIDTH + _GAP), _TOP + n // 2 * (_HEIGHT + _GAP)
        inside = _panel(title, lines, ticks, learnt.get(title))
        drawn.append(f'<g transform="translate({x} {y})">{inside}</g>')
    size = f'width="{width:.0f}" height="{height}" viewBox="0 0 {width:.0f} {height}"'
    body = "\n".join(drawn)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><style>{_STYLE}</style>'
    return f"{head}\n{body}\n</svg>\n"


def _legend(names: Sequence[str]) -> str:
    step = 2 * (_WIDTH + _GAP) / len(names)
    return "".join(
        f'<g transform="translate({_LEFT + n * step:.0f} 16)">'
        f'<path class="line" stroke="{_COLOURS[n]}" d="M0 0H18"/>'
        f'<text x="24" y="4">{escape(name)}</text></g>'
        for n, name in enumerate(names)
    )


def _panel(title: str, lines: Lines, ticks: Sequence[str], learnt: int | None) -> str:
    top = math.ceil(2 * max(max(values) for values in lines.values())) / 2
    xs = [_WIDTH * n / (len(ticks) - 1) for n in range(len(ticks))]
    unit = '<tspan class="unit" dx="6">nats per token</tspan>'
    parts = [f'<text class="title" y="-8">{escape(title)}{unit}</text>']
    if learnt is not None:
        left, right = xs[learnt - 1], xs[learnt]
        parts.append(
            f'<rect class="learnt" x="{left:.0f}" width="{right - left:.0f}" height="{_HEIGHT}"/>'
        )
    for value in (0, top / 2, top):
        y = _HEIGHT * (1 - value / top)
        parts.append(f'<path class="grid" d="M0 {y:.1f}H{_WIDTH}"/>')
        parts.append(
            f'<text class="soft" x="-6" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
        )
    for x, tick in zip(xs, ticks, strict=True):
        anchor = "start" if x == 0 else "end" if tick == ticks[-1] else "middle"
        parts.append(
            f'<text class="soft" x="{x:.0f}" y="{_HEIGHT + 18}" text-anchor="{anchor}">'
            f"{escape(tick)}</text>"
        )
    for colour, (name, values) in zip(_COLOURS, lines.items(), strict=False):
        points = [(x, _HEIGHT * (1 - v / top)) for x, v in zip(xs, values, strict=True)]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        parts.append(
            f'<path class="line" stroke="{colour}" d="M{path}"><title>{escape(name)}</title></path>'
        )
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
    return "".join(parts)
