"""What each pipeline stage holds, as a bar: one letter a part, and dots for what the card has free."""

from __future__ import annotations

from collections.abc import Mapping

from trainledger.report.document import Column, Document, Text, left, table
from trainledger.report.words import Answer
from trainledger.units import format_bytes

WIDTH = 60
PARTS: dict[str, str] = {
    "weights": "w",
    "gradients": "g",
    "optimizer": "o",
    "saved": "s",
    "working": "k",
    "passing": "p",
    "beside": "c",
    "unused": "u",
}
"""Part -> the letter it is drawn with."""
FREE, OVER = ".", "!"
LEGEND = (
    "w weights, g gradients, o optimizer, s saved activations, k working, p gathered and buffers, "
    "c context and communicators, u unused by the allocator"
)


def bars(answer: Answer) -> Document:
    """One bar for each distinct pipeline stage at its own highest place, all to one scale."""
    memory = answer["memory"]
    stages, usable = memory["stages"], memory["usable_bytes"]
    whole = max([sum(one[part] for part in PARTS) for one in stages] + ([usable] if usable is not None else []))
    if not whole:
        return []
    rows = [
        [
            str(one["pp_stage"]),
            f"[{bar(one, whole, usable)}]",
            format_bytes(sum(one[part] for part in PARTS)),
            "" if one["free"] is None else format_bytes(one["free"]),
            one["place"],
        ]
        for one in stages
    ]
    columns = [Column("pp_stage"), left("holds"), Column("most"), Column("free"), left("in the")]
    over = f", {OVER} over what is usable" if usable is not None and whole > usable else ""
    free = f", {FREE} free" if usable is not None else ""
    found: Document = [table(columns, rows), Text(f"{LEGEND}{free}{over}", "dim")]
    if len(rows) < answer["plan"]["pp"]:
        found.append(Text("a pp_stage that is not shown has the layers of one above it, and holds no more", "dim"))
    return found


def bar(parts: Mapping[str, int], whole: int, usable: int | None = None) -> str:
    """WIDTH letters for `whole` bytes; what lies beyond the usable bytes is drawn as over.

    Each part ends where its sum with those before it does, so that no part is more than half a letter off.

    >>> bar({**dict.fromkeys(PARTS, 0), "weights": 30, "optimizer": 15}, 60)
    'wwwwwwwwwwwwwwwwwwwwwwwwwwwwwwooooooooooooooo...............'
    """
    drawn, held = "", 0
    for part, letter in PARTS.items():
        held += parts[part]
        drawn = drawn.ljust(_letters(held, whole), letter)
    if usable is not None and held > usable:
        kept = _letters(usable, whole)
        drawn = drawn[:kept].ljust(len(drawn), OVER)
    return drawn.ljust(WIDTH, FREE)


def _letters(amount: int, whole: int) -> int:
    return (2 * WIDTH * amount + whole) // (2 * whole)
