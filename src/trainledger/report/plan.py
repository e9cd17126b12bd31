"""`plan` as text."""

from __future__ import annotations

from trainledger.report.document import BLANK, Column, Document, Table, Text, left, table
from trainledger.report.words import (
    Answer,
    assumed,
    beyond,
    busiest,
    card,
    change,
    engine,
    gpus,
    notes,
    states_alone,
    whole,
)
from trainledger.units import format_bytes, format_gb

DEGREES = ("tp", "pp", "vpp", "cp", "ep", "etp")
PARETO_SHOWN = 5
FLAGS = {"zero_stage": "zero"}
"""Columns whose flag has another name."""


def document(answer: Answer) -> Document:
    """The best plan first, then the others, then why the rest is not there."""
    return [
        *_verdict(answer),
        Text(
            f"{answer['model']} on {gpus(answer['gpus'])}, {engine(answer['profile'])}, {answer['precision']}, "
            f"{answer['optimizer']}, seq {answer['seq']}, gbs {answer['gbs']}"
        ),
        *_fixed(answer),
        *assumed(answer),
        BLANK,
        *_best(answer),
        *_rejected(answer),
        *_pareto(answer),
        *notes(answer),
    ]


def _verdict(answer: Answer) -> Document:
    tried, fitting = whole(answer["evaluated"]), answer["accepted"]
    at = card(answer["accelerator"], answer["usable_bytes"])
    if fitting:
        free = format_bytes(answer["pareto"][0]["headroom_bytes"])
        if states_alone(answer):
            left = f"the leanest leaves {free} for activations, which are not counted"
            return [Text(f"the states alone of {whole(fitting)} of {tried} plans fit {at}: {left}", "warn")]
        return [
            Text(
                f"{whole(fitting)} of {tried} plans fit {at}: the leanest leaves {free} free",
                "good",
            )
        ]
    if not answer["passing"]:
        return [Text(f"no plan passes the rules: all {tried} are rejected", "bad")]
    return [Text(f"none of {tried} plans fits {at}", "bad"), change(answer["smallest_change"])]


def _fixed(answer: Answer) -> Document:
    fixed = ", ".join(_typed(name, value) for name, value in answer["fixed"].items())
    return [Text(f"fixed: {fixed}")] if fixed else []


def _typed(name: str, value: int) -> str:
    """A fixed degree as it is typed.

    >>> _typed("zero_stage", 1), _typed("dp_replicate", 2), _typed("sp", 0)
    ('zero 1', 'dp-replicate 2', 'no-sp')
    """
    if name == "sp":
        return "sp" if value else "no-sp"
    return f"{FLAGS.get(name, name.replace('_', '-'))} {value}"


def _best(answer: Answer) -> Document:
    if not answer["plans"]:
        return []
    first = {"headroom": "most memory left", "traffic": "least sent"}[answer["sort"]]
    title = f"{first}, {len(answer['plans'])} of {whole(answer['accepted'])}"
    return [Text(title, "heading"), _table(answer["plans"]), busiest(), beyond("allocated", "free"), BLANK]


def _table(candidates: list[Answer]) -> Table:
    """One plan a row; a degree that is 1 in all of them, or an etp that follows tp, is not shown."""
    plans = [one["plan"] for one in candidates]
    shown = [name for name in DEGREES if any(plan[name] > 1 for plan in plans)]
    if all(plan["etp"] == plan["tp"] for plan in plans):
        shown = [name for name in shown if name != "etp"]
    columns = [
        *(Column(name) for name in shown),
        Column("dp"),
        Column("zero"),
        Column("mbs"),
        Column("micro-batches"),
        left("recompute"),
        Column("allocated"),
        Column("states"),
        Column("activations"),
        Column("free"),
        Column("sent/step"),
    ]
    rows = [
        [
            *(str(one["plan"][name]) for name in shown),
            _dp(one["plan"]),
            str(one["plan"]["zero_stage"]),
            str(one["plan"]["mbs"]),
            str(one["plan"]["num_microbatches"]),
            one["recompute"],
            format_bytes(one["total_bytes"]),
            format_bytes(one["states_bytes"]),
            "-" if one["activations_bytes"] is None else format_bytes(one["activations_bytes"]),
            format_bytes(one["headroom_bytes"]),
            format_gb(one["wire_bytes"]),
        ]
        for one in candidates
    ]
    return table(columns, rows)


def _dp(plan: Answer) -> str:
    """The data-parallel degree, as replicas x shards where there are replicas."""
    replicate, shard = plan["dp_replicate"], plan["dp_shard"]
    return str(shard) if replicate == 1 else f"{replicate}x{shard}"


def _rejected(answer: Answer) -> Document:
    if not answer["rejected"]:
        return []
    rows = [[whole(count), rule] for rule, count in answer["rejected"].items()]
    return [Text("rejected", "heading"), table([Column("plans"), left("rule")], rows), BLANK]


def _pareto(answer: Answer) -> Document:
    front = answer["pareto"]
    if not front:
        return []
    size = answer["pareto_size"]
    title = f"memory against traffic, {min(len(front), PARETO_SHOWN)} of {whole(size)} that no other beats in both"
    return [Text(title, "heading"), _table(_spread(front)), BLANK]


def _spread(front: list[Answer]) -> list[Answer]:
    """A few of the front, both ends and evenly between."""
    if len(front) <= PARETO_SHOWN:
        return front
    last = len(front) - 1
    return [front[round(step * last / (PARETO_SHOWN - 1))] for step in range(PARETO_SHOWN)]
