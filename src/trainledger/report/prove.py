"""`prove` as text: what was run, what is equal, what differs, what was only reported, what nothing explains."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from trainledger.reconcile.verdict import WRONG
from trainledger.report.document import BLANK, Column, Document, Style, Table, Text, left, table
from trainledger.report.words import Answer, notes, on_ranks, whole
from trainledger.units import format_bytes

WIDTH = 116
MOST_ITEMS = 20
"""Of what nothing explains; --json has all."""

Lines = Sequence[Answer]


def document(answer: Answer) -> Document:
    """The whole comparison, the verdict last."""
    lines = answer["lines"]
    found: Document = [*_header(answer), BLANK, _ranks(answer), BLANK, *_equal(answer)]
    wrong = [line for line in lines if line["verdict"] in WRONG]
    if wrong:
        found += [BLANK, Text(f"{whole(len(wrong))} lines differ", "heading"), _listed(wrong, "bad")]
    within = [line for line in lines if line["verdict"] == "within"]
    if within:
        found += [BLANK, Text("modelled, and within their tolerance", "heading"), _listed(within)]
    reported = [line for line in lines if line["verdict"] == "reported"]
    if reported:
        found += [BLANK, Text("reported, without an exact prediction", "heading"), _listed(reported)]
    return [*found, *notes(answer), BLANK, *_unexplained(answer), _verdict(answer)]


def _header(answer: Answer) -> Document:
    ran = f" in a dry run, of which {spans(answer['ranks'])} stand for all" if answer["dry"] else ""
    losses = ", ".join(f"{loss:.6g}" for loss in answer["losses"])
    return [
        *on_ranks(answer, ran),
        *shrunken(answer["shrunken"]),
        Text(f"ran {answer['steps']} steps and measured the last{f'; loss {losses}' if losses else ''}"),
    ]


def shrunken(small: Answer | None) -> Document:
    """What was made smaller, and by which rule."""
    if small is None:
        return [Text("at full size")]
    changed = ", ".join(f"{one['what']} {whole(one['before'])} -> {whole(one['after'])}" for one in small["changes"])
    said = [f"shrunken by {small['factor']:.4g}: {changed}", f"rule: {small['rule']}"]
    return [Text(line, "dim") for text in said for line in textwrap.wrap(text, WIDTH, subsequent_indent="  ")]


def _ranks(answer: Answer) -> Table:
    """A row for ranks whose lines are all the same."""
    apart: dict[int, list[Answer]] = {rank: [] for rank in answer["ranks"]}
    for line in answer["lines"]:
        apart.setdefault(line["rank"], []).append(line)
    alike: dict[tuple[Any, ...], list[int]] = {}
    for rank, lines in apart.items():
        key = tuple((_key(line), line["predicted"], line["measured"], line["verdict"]) for line in lines)
        alike.setdefault(key, []).append(rank)
    columns = [left("ranks"), *map(Column, ("lines", "equal", "within", "differ", "reported", "held at most", "calls"))]
    rows: list[list[str]] = []
    styles: list[Style] = []
    for ranks in alike.values():
        lines = apart[ranks[0]]
        counts = {word: sum(line["verdict"] == word for line in lines) for word in ("equal", "within", "reported")}
        wrong = len(lines) - sum(counts.values())
        rows.append(
            [
                spans(ranks),
                whole(len(lines)),
                whole(counts["equal"]),
                whole(counts["within"]),
                whole(wrong),
                whole(counts["reported"]),
                format_bytes(_held(lines)),
                whole(sum(line["measured"] or 0 for line in lines if line["unit"] == "calls")),
            ]
        )
        styles.append("bad" if wrong else "")
    return table(columns, rows, styles)


def _held(lines: Iterable[Answer]) -> int:
    """What was measured at the fullest of the instants, by named lines."""
    held: dict[str, int] = {}
    for line in lines:
        if line.get("instant"):
            held[line["instant"]] = held.get(line["instant"], 0) + (line["measured"] or 0)
    return max(held.values(), default=0)


def _equal(answer: Answer) -> Document:
    """Lines that are equal: each, or those of a category together."""
    lines = [line for line in answer["lines"] if line["verdict"] == "equal"]
    if not lines:
        return [Text("no line is equal", "bad")]
    if answer["list_equal"]:
        return [Text(f"{whole(len(lines))} lines are equal", "heading"), _listed(lines)]
    groups: dict[str, dict[int, list[Answer]]] = {}
    for line in lines:
        groups.setdefault(_category(line), {}).setdefault(line["rank"], []).append(line)
    columns = [left("equal"), Column("lines a rank"), Column("of a rank, at most"), left("ranks")]
    rows = [
        [
            name,
            _span(sorted({len(own) for own in ranks.values()})),
            max((_sum(own) for own in ranks.values()), key=lambda pair: pair[0])[1],
            spans(sorted(ranks)),
        ]
        for name, ranks in groups.items()
    ]
    return [table(columns, rows)]


def _category(line: Answer) -> str:
    kind, category, *_ = line["id"].split("/")
    return f"{kind} {category}" if kind != "done" else "done"


def _sum(lines: Lines) -> tuple[int, str]:
    """(amount to compare by, amount in words) of a rank's own lines of one category; a group's are not."""
    lines = [line for line in lines if ":conserved" not in line["id"]] or lines
    if lines[0]["id"].startswith("held/"):
        held = _held(lines) or sum(line["measured"] or 0 for line in lines)
        return held, format_bytes(held)
    if lines[0]["id"].startswith("done/"):
        flop = sum(line["measured"] or 0 for line in lines)
        return flop, f"{whole(flop)} FLOP"
    calls = sum(line["measured"] or 0 for line in lines if line["unit"] == "calls")
    moved = sum(line["measured"] or 0 for line in lines if line["unit"] == "B")
    return moved, f"{whole(calls)} call{'s' if calls != 1 else ''}, {format_bytes(moved)} in and out"


def _span(counts: Sequence[int]) -> str:
    return whole(counts[0]) if len(counts) == 1 else f"{whole(counts[0])} to {whole(counts[-1])}"


def _listed(lines: Lines, style: Style = "") -> Table:
    """Lines one by one, those of several ranks that say the same together."""
    columns = [left("line"), left("at"), Column("predicted"), Column("measured"), left("unit"), left("ranks")]
    rows = [
        [
            line["id"],
            line.get("instant", ""),
            _figure(line["predicted"]),
            _figure(line["measured"], "not seen"),
            line["unit"],
            ranks,
        ]
        for line, ranks in _together(lines)
    ]
    styles: list[Style] = [style] * len(rows)
    return table(columns, rows, styles)


def _together(entries: Lines) -> Iterator[tuple[Answer, str]]:
    """Entries that are the same but for their rank, once, with their ranks."""
    alike: dict[str, tuple[Answer, list[int]]] = {}
    for entry in entries:
        same = repr([value for key, value in entry.items() if key != "rank"])
        alike.setdefault(same, (entry, []))[1].append(entry["rank"])
    return ((entry, spans(sorted(set(ranks)))) for entry, ranks in alike.values())


def _key(line: Answer) -> tuple[str, str]:
    return line["id"], line.get("instant", "")


def _figure(value: int | None, absent: str = "-") -> str:
    return absent if value is None else whole(value)


def _unexplained(answer: Answer) -> Document:
    beyond: Mapping[str, Any] = answer["unexplained"]
    items = list(_together(beyond["items"]))
    said = f"unexplained: {format_bytes(beyond['bytes'])}, {whole(beyond['calls'])} calls"
    if not items:
        return [Text(said)]
    words = [left(title) for title in ("unexplained", "of", "born in", "at")]
    rows = [
        [
            item["what"],
            item["op"],
            " ".join(filter(None, (item["phase"], item["dtype"], "x".join(map(str, item["shape"]))))),
            ", ".join(item["instants"]),
            whole(item["times"]),
            whole(item["bytes"]),
            ranks,
        ]
        for item, ranks in items[:MOST_ITEMS]
    ]
    styles: list[Style] = ["bad"] * len(rows)
    more = len(items) - len(rows)
    return [
        table([*words, Column("times"), Column("bytes"), left("ranks")], rows, styles),
        *([Text(f"and {whole(more)} more; --json has all", "dim")] if more else []),
        Text(said, "bad"),
    ]


def _verdict(answer: Answer) -> Text:
    counts = Counter(line["verdict"] for line in answer["lines"])
    wrong = sum(counts[word] for word in WRONG)
    judged = counts["equal"] + counts["within"] + wrong
    if answer["verdict"] == "proven":
        within = f", {whole(counts['within'])} modelled ones within their tolerance" if counts["within"] else ""
        return Text(f"proven: all {whole(counts['equal'])} lines are equal{within}, and nothing is unexplained", "good")
    items = len(answer["unexplained"]["items"])
    found = f"{whole(wrong)} of {whole(judged)} lines differ, and {whole(items)} items are unexplained"
    return Text(f"differs: {found}", "bad")


def spans(ranks: Sequence[int]) -> str:
    """Ranks in words.

    >>> spans([0, 1, 2, 5]), spans([3])
    ('0-2, 5', '3')
    """
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
