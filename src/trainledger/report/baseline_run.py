"""`baseline run` as text: what was run, a row per number of ranks, what differs from the ledger, where it is kept."""

from __future__ import annotations

from trainledger.report.document import BLANK, Column, Document, Style, Table, Text, table
from trainledger.report.prove import shrunken
from trainledger.report.words import Answer, whole
from trainledger.units import format_bytes, format_gb


def document(answer: Answer) -> Document:
    """The whole ladder, the verdict last."""
    machine = answer["machine"]
    where = f"{machine['device']}, {machine['cores']} cores, torch {machine['torch_version']}"
    clock = f"{answer['rounds']} rounds of {answer['steps']} steps each, in turns"
    return [
        Text(f"{answer['model']}, {answer['scaling']} scaling: {answer['layout']}", "answer"),
        Text(f"on {where}; {clock}"),
        *shrunken(answer["shrunken"]),
        BLANK,
        _throughput(answer),
        BLANK,
        _account(answer),
        BLANK,
        *_predicted(),
        Text(f"kept as {answer['name']}, number {answer['number']} of {answer['book']}"),
        _verdict(answer),
    ]


def _throughput(answer: Answer) -> Table:
    columns = [
        *map(Column, ("ranks", "tokens/step", "step, median", "tokens/s", "efficiency", "99 %", "by the ledger"))
    ]
    rows: list[list[str]] = []
    for rung in answer["rungs"]:
        found = rung["scaled"]
        predicted = found["predicted"]
        rows.append(
            [
                whole(found["ranks"]),
                whole(found["tokens"]),
                seconds(found["step_s"]),
                f"{found['tokens_per_s']:,.0f}",
                share(found["efficiency"]),
                between(found["efficiency_low"], found["efficiency_high"]),
                between(predicted["exposed"], predicted["hidden"]),
            ]
        )
    return table(columns, rows)


def _account(answer: Answer) -> Table:
    names = ("ranks", "peak", "predicted", "allocator", "calls", "predicted", "bytes in and out", "predicted", "differ")
    rows: list[list[str]] = []
    styles: list[Style] = []
    for rung in answer["rungs"]:
        memory, traffic = rung["memory"], rung["traffic"]
        wrong = memory["wrong"] + traffic["wrong"]
        allocator, predicted = memory["allocator_peak_bytes"], memory["predicted_bytes"]
        rows.append(
            [
                whole(rung["scaled"]["ranks"]),
                format_bytes(memory["peak_bytes"]),
                "routed" if predicted is None else format_bytes(predicted),
                "" if allocator is None else format_bytes(allocator),
                whole(traffic["calls"]),
                whole(traffic["predicted_calls"]),
                format_gb(traffic["bytes"]),
                format_gb(traffic["predicted_bytes"]),
                whole(wrong),
            ]
        )
        styles.append("bad" if wrong else "")
    return table([*map(Column, names)], rows, styles)


def _predicted() -> Document:
    said = (
        "by the ledger: its FLOP, calls and bytes at the rates of the reference, with all sending exposed to all hidden"
    )
    return [Text("peak: of the rank that holds most; calls and bytes: of all ranks together", "dim"), Text(said, "dim")]


def _verdict(answer: Answer) -> Text:
    if answer["verdict"] == "proven":
        return Text("proven: every line of memory and traffic is as predicted, and nothing is unexplained", "good")
    return Text("differs: `trainledger prove` with the same flags names the lines", "bad")


def seconds(value: float) -> str:
    """A time of a step.

    >>> seconds(0.0153), seconds(2.5)
    ('15.3 ms', '2.5 s')
    """
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def share(value: float) -> str:
    """An efficiency."""
    return f"{value * 100:.0f} %"


def between(low: float | None, high: float | None) -> str:
    """An interval; "" where there is none."""
    return "" if low is None or high is None else f"{low * 100:.0f} to {share(high)}"
