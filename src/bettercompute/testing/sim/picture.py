"""Pictures of a herd over time: columns of text for a terminal, and the same as SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bettercompute.testing.sim.herd import HerdOutcome, Sample

BLOCKS = " ▁▂▃▄▅▆▇█"
COLUMNS = 72
SVG_WIDTH, SVG_HEIGHT, SVG_MARGIN = 720, 300, 48
SERIES: Sequence[tuple[str, str, Callable[[Sample], int]]] = (
    ("connected", "#1a7f37", lambda sample: sample.connected),
    ("attempts", "#0969da", lambda sample: sample.attempts),
    ("refusals", "#cf222e", lambda sample: sample.refusals),
)


def text(outcome: HerdOutcome) -> str:
    """Return one line of columns for each series, each against its own highest value."""
    samples = _spread(outcome.samples, COLUMNS)
    lines = []
    for name, _, value in SERIES:
        values = [value(sample) for sample in samples]
        highest = max(*values, 1)
        columns = "".join(BLOCKS[round(number / highest * (len(BLOCKS) - 1))] for number in values)
        lines.append(f"{name:>9} {columns} {values[-1]:>7}")
    end = f"{outcome.samples[-1].at_s:.0f} s"
    lines.append(f"{'':>9} 0{end:>{len(samples) - 1}}")
    return "\n".join(lines)


def svg(outcome: HerdOutcome) -> str:
    """Return the series over time as an SVG document, with N / rate as a line."""
    samples = _spread(outcome.samples, 2 * COLUMNS)
    last_s = max(samples[-1].at_s, outcome.herd.least_s)
    highest = max(*(value(sample) for sample in samples for _, _, value in SERIES), 1)

    def x(at_s: float) -> float:
        return SVG_MARGIN + at_s / last_s * (SVG_WIDTH - 2 * SVG_MARGIN)

    def y(number: int) -> float:
        return SVG_HEIGHT - SVG_MARGIN - number / highest * (SVG_HEIGHT - 2 * SVG_MARGIN)

    bottom, least_x = SVG_HEIGHT - SVG_MARGIN, x(outcome.herd.least_s)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{SVG_WIDTH}" height="{SVG_HEIGHT}">',
        "<style>text { font: 12px sans-serif }</style>",
        f'<rect width="{SVG_WIDTH}" height="{SVG_HEIGHT}" fill="white"/>',
        f'<path d="M{SVG_MARGIN} {SVG_MARGIN}V{bottom}H{SVG_WIDTH - SVG_MARGIN}" fill="none" stroke="#57606a"/>',
        f'<path d="M{least_x:.1f} {SVG_MARGIN}V{bottom}" stroke="#57606a" stroke-dasharray="4"/>',
        f'<text x="{least_x:.1f}" y="{bottom + 16}" text-anchor="middle">N/rate {outcome.herd.least_s:.1f} s</text>',
        f'<text x="{SVG_MARGIN - 6}" y="{SVG_MARGIN}" text-anchor="end">{highest}</text>',
        f'<text x="{SVG_WIDTH - SVG_MARGIN}" y="{bottom + 32}" text-anchor="end">{last_s:.0f} s</text>',
    ]
    for number, (name, colour, value) in enumerate(SERIES):
        points = " ".join(f"{x(sample.at_s):.1f},{y(value(sample)):.1f}" for sample in samples)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{SVG_MARGIN + 110 * number}" y="{SVG_MARGIN - 16}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _spread(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Return as many samples as there are columns, evenly over time, the first and the last included."""
    if len(samples) <= count:
        return list(samples)
    return [samples[round(number * (len(samples) - 1) / (count - 1))] for number in range(count)]
