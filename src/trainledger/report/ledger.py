"""`ledger` as text: the plan, one of its lines, or a sweep."""

from __future__ import annotations

from collections.abc import Mapping

from trainledger.report.bars import bars
from trainledger.report.document import BLANK, Column, Document, Table, Text, left, table
from trainledger.report.words import (
    Answer,
    assumed,
    busiest,
    card,
    change,
    degrees,
    engine,
    fit_style,
    gpus,
    held,
    notes,
    percent,
    whole,
    yes,
)
from trainledger.units import format_bytes, format_count, format_gb

LARGEST = 6
NAMED = 4
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
    split = degrees(plan, axes)
    chosen = f"{plan['precision']}, {plan['optimizer']}, seq {plan['seq']}, recompute {plan['recompute']}"
    return [
        *_verdict(answer),
        Text(f"{answer['model']} on {gpus(plan['gpus'])}, {engine(answer['profile'])}", "answer"),
        Text(f"plan: zero_stage {plan['zero_stage']}, {f'{split}, ' if split else ''}{chosen}"),
        *assumed(answer),
        BLANK,
        _memory(answer),
        Text(f"how sure: {sure}", "dim"),
        *_limits(answer),
        BLANK,
        *bars(answer),
        BLANK,
        *_outside(answer),
        *_traffic(answer),
        Text(f"largest of {len(answer['lines'])} lines (--json has all, --explain LINE tells one)", "heading"),
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
        return [Text(f"fits, {format_bytes(free)} free of {at}{_band(meters)}: most {where}", "good")]
    if free >= 0:
        on_host = format_bytes(memory["host_bytes"])
        return [Text(f"does not fit: the card holds it, the host does not hold {on_host} per GPU", "bad")]
    largest = ", ".join(f"{one['name']} {format_bytes(one['amount'])}" for one in memory["alive"][:NAMED])
    return [
        Text(f"does not fit: {format_bytes(-free)} over {at}{_band(meters)}, {where}", "bad"),
        Text(f"largest there: {largest}"),
        change(memory["smallest_change"]),
    ]


def _band(meters: Answer) -> str:
    """How far the meter that decides may be off, where that is known."""
    device = meters.get("device", meters["allocated"])
    less, more = device["estimate"] - device["lower"], device["upper"] - device["estimate"]
    return f", band -{format_bytes(less)} +{format_bytes(more)}" if less or more else ""


def _memory(answer: Answer) -> Table:
    memory = answer["memory"]
    total = memory["meters"]["allocated"]["estimate"]
    rows = [
        [name, format_bytes(amount), percent(amount / total) if total else "-"]
        for name, amount in memory["by_category"].items()
        if amount
    ]
    rows.append([f"all that is allocated in the {memory['place']}", format_bytes(total), ""])
    if "device" in memory["meters"]:
        rows.append(["with context and communicators", format_bytes(memory["meters"]["device"]["estimate"]), ""])
    if memory["host_bytes"]:
        rows.append(["host memory, beside it", format_bytes(memory["host_bytes"]), ""])
    return table([left("held per GPU"), Column("at most"), Column("of peak")], rows)


def _limits(answer: Answer) -> Document:
    """How far the plan can be stretched on its card."""
    mbs, seq = answer["memory"]["largest_mbs"], answer["memory"]["longest_seq"]
    if mbs is None or seq is None:
        return []
    if not mbs and not seq:
        return [Text("with all else as it is no micro-batch and no sequence fits")]
    largest = f"a micro-batch of {mbs}" if mbs else "no micro-batch"
    longest = f"sequences of {whole(seq)}" if seq else "no sequence"
    return [Text(f"with all else as it is at most {largest} fits, or {longest}")]


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
    split = degrees(plan, AXES)
    style = "good" if found else "bad"
    return [
        Text(f"{params} at most: their states fit {at}", style),
        Text(f"on {gpus(plan['gpus'])}, {engine(answer['profile'])}", "answer"),
        Text(f"plan: zero_stage {plan['zero_stage']}, {f'{split}, ' if split else ''}{plan['precision']}"),
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
    lines = sorted(answer["lines"], key=lambda line: -line["amount"])[:LARGEST]
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
        *(Text(f"{name} {row['value']} is refused: {row['refused']}", "warn") for row in rows if "refused" in row),
    ]


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)
