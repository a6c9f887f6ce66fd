"""The index of the decision records, from their titles."""

from __future__ import annotations

from pathlib import Path

from docs.generators.markdown import generated

# The first number of each group; a record belongs to the last group that begins at or before it.
GROUPS = {
    1: "Environment",
    10: "Protocol",
    20: "Transport",
    30: "Store",
    40: "Identities and joining",
    50: "Sessions and delivery",
    60: "Inventory",
    70: "Gateway",
    80: "Node daemon",
    90: "Processes of the control plane",
    101: "How the parts behave together",
    120: "Signed intent and the life of keys",
    133: "Delivery in time, and at rest",
    137: "What simulations are judged by",
    140: "What relays and attestors say",
    150: "Delivery, killed and measured",
    155: "The whole, simulated and judged",
    160: "Found by measuring, and by faults",
    180: "On slow machines, and with slow peers",
    188: "Found by those who tried to break it",
}

INTRODUCTION = """\
# Decisions

One page each: what asked for a decision, the decision, and what would change our mind. A record changes only when what
it says turned out wrong; one that a later record replaces says so. Records 101 to 115 hold what the protocol's headings
leave open, and where this implementation is narrower than the original protocol; each says what of it is built.

Code and pages refer to a record by its number, as in `decisions 0105`."""


def page(folder: Path) -> str:
    """Return docs/decisions/README.md."""
    lines = [generated("the titles of the records"), "", INTRODUCTION]
    opened = None
    for path in sorted(folder.glob("[0-9]*.md")):
        number = int(path.name[:4])
        group = max(first for first in GROUPS if first <= number)
        if group != opened:
            opened = group
            lines += ["", f"## {GROUPS[group]}", ""]
        title = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ").partition(" ")[2]
        lines.append(f"- [{path.name[:4]}]({path.name}) {title}")
    return "\n".join(lines)
