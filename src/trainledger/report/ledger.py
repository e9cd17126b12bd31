"""`ledger` as text: the plan, one of its lines, or a sweep."""

from __future__ import annotations

from collections.abc import Mapping

from trainledger.report.bars import bars
from trainledger.report.document import BLANK, Column, Document, Table, Text, left, table
from trainledger.report.words import (
    Answer,
    assumed,
    beyond,
    busiest,
    card,
    change,
    engine,
    fit_style,
    gpus,
    held,
    notes,
    percent,
    plan_line,
    states_alone,
    whole,
    yes,
)
from trainledger.units import format_bytes, format_count, format_gb

LARGEST = 6
NAMED = 4
METERS = {
    "reserved": "reserved by PyTorch's allocator",
    "device": "device (nvidia-smi): with context and communicators",
}
"""Meter -> how a row of it is called."""
AXES = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp", "dp_replicate", "mbs", "num_microbatches")


def document(answer: Answer) -> Document:
    """Whichever of the four was asked for."""
    if "fit_params" in answer:
        return _fit(answer)
    if "line" in answer:
        return _explanation(answer)
    return _sweep(answer) if "sweep" in answer else _ledger(answer)


def _ledger(answer: Answer) -> Document:
    plan = answer["plan"]
    axes = [name for name in AXES if name != "etp" or plan["etp"] != plan["tp"]]
    sure = ", ".join(f"{basis} {format_bytes(amount)}" for basis, amount in answer["memory"]["by_basis"].items())
    return [
        *_verdict(answer),
        Text(f"{answer['model']} on {gpus(plan['gpus'])}, {engine(answer['profile'])}", "answer"),
        plan_line(plan, axes=axes),
        *assumed(answer),
        BLANK,
        _memory(answer),
        *_more_than_at_once(answer),
        Text(f"how sure of what is allocated: {sure}", "dim"),
        *_limits(answer),
        BLANK,
        *bars(answer),
        BLANK,
        *_outside(answer),
        *_traffic(answer),
        Text(
            f"largest of {len(answer['lines'])} lines, held at the peak or moved (--json: all, --explain: one)",
            "heading",
        ),
        _largest(answer),
        *notes(answer),
    ]


def _verdict(answer: Answer) -> Document:
    memory = answer["memory"]
    meters, usable, free = memory["meters"], memory["usable_bytes"], memory["free_bytes"]
    where = f"at pp_stage {memory['pp_stage']}, {memory['place']}"
    if memory["fits"] is None:
        return [Text(f"holds {format_bytes(meters['allocated']['estimate'])} per GPU, {where}", "answer")]
    at = f"{card(answer['accelerator'], usable)}"
    if memory["fits"]:
        if states_alone(answer):
            left = f"{format_bytes(free)} of {at} are left for activations, which are not counted"
            return [Text(f"the states alone fit, {left}: most {where}", "warn")]
        worst = usable - meters.get("device", meters["allocated"])["upper"]
        verdict = f"fits, {format_bytes(free)} free of {at}{_bounds(meters, usable)}: most {where}"
        return [Text(verdict, "good" if worst >= 0 else "warn")]
    if free >= 0:
        on_host = format_bytes(memory["host_bytes"])
        return [Text(f"does not fit: the card holds it, the host does not hold {on_host} per GPU", "bad")]
    largest = ", ".join(f"{one['name']} {format_bytes(one['amount'])}" for one in memory["alive"][:NAMED])
    return [
        Text(f"does not fit: {format_bytes(-free)} over {at}{_bounds(meters, usable)}: most {where}", "bad"),
        Text(f"largest there: {largest}"),
        change(memory["smallest_change"]),
    ]


def _bounds(meters: Answer, usable: int) -> str:
    """What is free at the bounds of the meter that decides, where it has any, the worse one first.

    >>> _bounds({"allocated": {"estimate": 70 << 30, "lower": 66 << 30, "upper": 83 << 30}}, 79 << 30)
    ', bounds 4.00 GiB over to 13.0 GiB free'
    """
    device = meters.get("device", meters["allocated"])
    if device["lower"] == device["upper"]:
        return ""
    worst, best = (_left_over(usable - device[bound]) for bound in ("upper", "lower"))
    return f", bounds {worst.removesuffix(best[-5:])} to {best}"


def _left_over(free: int) -> str:
    return f"{format_bytes(free)} free" if free >= 0 else f"{format_bytes(-free)} over"


def _memory(answer: Answer) -> Table:
    memory = answer["memory"]
    total = memory["meters"]["allocated"]["estimate"]
    rows = [
        [name, format_bytes(amount), percent(amount / total) if total else "-"]
        for name, amount in memory["by_category"].items()
        if amount
    ]
    rows.append([f"allocated in the {memory['place']}", format_bytes(total), ""])
    rows += [
        [label, format_bytes(memory["meters"][meter]["estimate"]), ""]
        for meter, label in METERS.items()
        if meter in memory["meters"]
    ]
    if memory["host_bytes"]:
        rows.append(["host memory, beside it", format_bytes(memory["host_bytes"]), ""])
    return table([left("held per GPU"), Column("at most"), Column("of allocated")], rows)


def _more_than_at_once(answer: Answer) -> Document:
    """Why the categories may sum to more than is allocated."""
    memory = answer["memory"]
    if sum(memory["by_category"].values()) <= memory["meters"]["allocated"]["estimate"]:
        return []
    return [Text("at most: each category when it is largest, which is not for all at once; they do not add up", "dim")]


def _limits(answer: Answer) -> Document:
    """How far the plan can be stretched on its card, as it is typed."""
    mbs, seq = answer["memory"]["largest_mbs"], answer["memory"]["longest_seq"]
    if mbs is None or seq is None:
        return []
    if not mbs and not seq:
        return [Text("all else as it is, no --mbs and no --seq fits")]
    largest = f"--mbs {mbs}" if mbs else "no --mbs"
    longest = f"--seq {seq}" if seq else "no --seq"
    return [Text(f"largest that fits, all else as it is: {largest}, or {longest}")]


def _outside(answer: Answer) -> Document:
    """What is held while the run loads, steps first and saves, and on its hosts."""
    lines = answer["memory"]["outside"]
    if not lines:
        return []
    rows = [
        [one["what"], one["when"], one["place"], one["per"], format_bytes(one["amount"]), one["basis"]] for one in lines
    ]
    columns = [left("outside the step"), left("when"), left("memory"), left("of a"), Column("holds"), left("basis")]
    return [table(columns, rows), BLANK]


def _fit(answer: Answer) -> Document:
    plan = answer["plan"]
    found, at = answer["fit_params"], card(answer["accelerator"], answer["usable_bytes"])
    params = f"{format_count(found)} parameters" if found else "not one parameter"
    style = "good" if found else "bad"
    return [
        Text(f"{params} at most: their states fit {at}", style),
        Text(f"on {gpus(plan['gpus'])}, {engine(answer['profile'])}", "answer"),
        plan_line(plan, plan["precision"], AXES),
        *assumed(answer),
        Text("activations come on top, and ranks that cut tensors are taken to hold equal parts", "dim"),
    ]


def _traffic(answer: Answer) -> Document:
    if not answer["traffic"]:
        return [Text("sends nothing: one rank"), BLANK]
    columns = [
        left(f"sent per step by pp_stage {answer['memory']['pp_stage']}"),
        left("group"),
        left("what"),
        left("dtype"),
        Column("ranks"),
        Column("calls"),
        Column("in"),
        Column("out"),
        Column("wire"),
    ]
    rows = [
        [
            call["collective"],
            call["group"],
            call["what"],
            call["dtype"],
            str(call["ranks"]),
            whole(call["count"]),
            format_gb(call["in_bytes"]),
            format_gb(call["out_bytes"]),
            format_gb(call["wire_bytes"]),
        ]
        for call in answer["traffic"]
    ]
    rows.append(["all", "", "", "", "", "", "", "", format_gb(answer["wire_bytes"])])
    return [table(columns, rows), BLANK]


def _largest(answer: Answer) -> Table:
    """The largest of what is held at the peak and what is moved: what is held at other times is not beside it."""
    lines = [line for line in answer["lines"] if line["at_peak"] or not line["id"].startswith("held/")]
    lines = sorted(lines, key=lambda line: -line["amount"])[:LARGEST]
    return table([left("line"), Column("bytes"), left("basis")], [[*_amount(line), line["basis"]] for line in lines])


def _amount(line: Answer) -> tuple[str, str]:
    show = format_gb if line["id"].startswith("moved/") else format_bytes
    return line["id"], show(line["amount"])


def _explanation(answer: Answer) -> Document:
    line = answer["line"]
    texts: Mapping[str, str] = {entry["key"]: entry["text"] for entry in answer["references"]}
    cites = [f"{key}: {texts[key]}" for key in line["cites"]]
    return [
        Text(line["id"], "answer"),
        Text(f"amount    {whole(line['amount'])} {line['unit']} ({_amount(line)[1]})"),
        Text(f"basis     {line['basis']}"),
        Text(f"pp_stage  {line['pp_stage']}"),
        Text(f"formula   {line['formula']}"),
        *(Text(f"source    {cite}") for cite in cites or ["none"]),
    ]


def _sweep(answer: Answer) -> Document:
    columns = [
        Column(answer["sweep"]),
        Column("GPUs"),
        Column("dp"),
        Column("total"),
        Column("states"),
        Column("activations"),
        Column("sent/step"),
        Column("pp_stage"),
        Column("fits"),
    ]
    name, rows, styles = answer["sweep"], answer["rows"], []
    cells: list[list[str]] = []
    for row in rows:
        refused = row["total_bytes"] is None
        styles.append(fit_style(row))
        cells.append(
            [
                str(row["value"]),
                "" if name == "gpus" else _count(row["gpus"]),
                "" if name == "dp" else _count(row["dp"]),
                held(row["total_bytes"]),
                held(row["states_bytes"]),
                held(row["activations_bytes"]),
                "-" if refused else format_gb(row["wire_bytes"]),
                _count(row["pp_stage"]),
                yes(row["fits"]),
            ]
        )
    at = f" on {card(answer['accelerator'], answer['usable_bytes'])}" if answer["usable_bytes"] is not None else ""
    return [
        Text(f"{answer['model']}{at}, {engine(answer['profile'])}: bytes per GPU by {name}", "answer"),
        *assumed(answer),
        BLANK,
        table(columns, cells, styles),
        busiest(),
        *([] if answer["usable_bytes"] is None else [beyond("total", "fits")]),
        *(Text(f"{name} {row['value']} is refused: {row['refused']}", "warn") for row in rows if "refused" in row),
    ]


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)
