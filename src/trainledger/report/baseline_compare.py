"""`baseline compare` as text: times with their intervals, peaks, the lines that moved, the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from trainledger.report.document import BLANK, Column, Document, Style, Table, Text, left, table
from trainledger.report.words import Answer, whole
from trainledger.units import format_bytes, format_gb

SHOWN = 40
STYLES: dict[str, Style] = {"accepted": "good", "rejected": "bad", "undecided": "warn"}


def document(answer: Answer) -> Document:
    """Everything that moved, the verdict last."""
    how = "run again in turns" if answer["again"] else "as recorded"
    return [
        Text(f"{answer['b']} in the place of {answer['a']}, {how}", "answer"),
        *(Text(f"{name}: {layout}") for name, layout in zip("AB", answer["layouts"], strict=True)),
        BLANK,
        _times(answer),
        *(Text(f"at {one['ranks']}: {one['reason']}", "dim") for one in answer["times"] if one["reason"]),
        BLANK,
        _peaks(answer["peaks"]),
        BLANK,
        *_moved(answer["moved"]),
        *_unproven(answer["unproven"]),
        _verdict(answer),
    ]


def _times(answer: Answer) -> Table:
    certain = f"{100 * answer['certain']:.3g} %"
    names = ("ranks", "rounds A", "rounds B", "step of B over A", certain, "machine of B over A")
    rows = [
        [
            whole(one["ranks"]),
            *map(whole, one["rounds"]),
            _percent(one["estimate"]),
            _ends(one),
            f"{one['machine']:.2f} x",
            one["verdict"],
        ]
        for one in answer["times"]
    ]
    columns = [*map(Column, names), left("throughput")]
    return table(columns, rows, [STYLES[one["verdict"]] for one in answer["times"]])


def _percent(ratio: float) -> str:
    """A change of time.

    >>> _percent(1.2), _percent(0.985)
    ('+20.0 %', '-1.5 %')
    """
    return f"{100 * (ratio - 1):+.1f} %"


def _ends(one: Answer) -> str:
    return "-" if one["low"] is None else f"{_percent(one['low'])} to {_percent(one['high'])}"


def _peaks(peaks: Sequence[Answer]) -> Table:
    rows = [
        [
            whole(one["ranks"]),
            format_bytes(one["a_bytes"]),
            format_bytes(one["b_bytes"]),
            _percent(one["b_bytes"] / one["a_bytes"]),
            one["verdict"],
        ]
        for one in peaks
    ]
    columns = [*map(Column, ("ranks", "peak of A", "peak of B", "change")), left("memory")]
    return table(columns, rows, [STYLES[one["verdict"]] for one in peaks])


def _moved(lines: Sequence[Answer]) -> Document:
    if not lines:
        return [Text("no line of memory or traffic moved", "good"), BLANK]
    columns = [Column("ranks"), left("line"), Column("A"), Column("B"), Column("change")]
    rows = [
        [
            whole(line["ranks"]),
            line["id"],
            _amount(line, line["a"]),
            _amount(line, line["b"]),
            _amount(line, (line["b"] or 0) - (line["a"] or 0), signed=True),
        ]
        for line in lines[:SHOWN]
    ]
    more = len(lines) - len(rows)
    return [
        Text(f"{whole(len(lines))} lines moved; of the rank that has most", "heading"),
        table(columns, rows),
        *([Text(f"and {whole(more)} more; --json has all", "dim")] if more else []),
        BLANK,
    ]


def _amount(line: Answer, amount: int | None, *, signed: bool = False) -> str:
    if amount is None:
        return "-"
    sign = "+" if signed and amount > 0 else ""
    if line["unit"] != "B":
        return f"{sign}{whole(amount)}"
    return f"{sign}{format_gb(amount) if line['id'].startswith('moved/') else format_bytes(amount)}"


def _unproven(ranks: Sequence[int]) -> Document:
    if not ranks:
        return []
    listed = ", ".join(map(str, ranks))
    return [Text(f"at {listed} ranks B was not what its ledger says: `trainledger prove` names the lines", "bad")]


def _verdict(answer: Answer) -> Text:
    word = answer["verdict"]
    least = f"{answer['least_percent']:g} %"
    judged = " and ".join(answer["judged"])
    return Text(f"{word}, judged by {judged}; the smallest slowdown of interest is {least}", STYLES[word])
