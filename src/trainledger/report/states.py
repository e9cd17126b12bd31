"""`states` as text."""

from __future__ import annotations

from trainledger.report.document import BLANK, Column, Document, Style, Table, Text, table
from trainledger.report.words import (
    Answer,
    assumed,
    beyond,
    card,
    degrees,
    fit_style,
    gpus,
    held,
    notes,
    percent,
    states_alone,
    yes,
)
from trainledger.units import format_count, format_gb

COLUMNS = ("weights", "gradients", "optimizer", "buffers", "activations", "total")


def document(answer: Answer) -> Document:
    """The answer first, then one row per zero_stage."""
    plan = answer["plan"]
    split = degrees(plan, ("tp", "pp", "vpp", "cp", "ep", "dp", "dp_replicate"))
    params = format_count(answer["total_params"])
    if answer["active_params"] != answer["total_params"]:
        params += f" ({format_count(answer['active_params'])} active)"
    name = answer["model"] if answer["model"].endswith(" parameters") else f"{answer['model']}, {params} parameters"
    where = f"{gpus(answer['gpus'])}{f' ({split})' if split else ''}"
    return [
        *_verdict(answer),
        Text(f"{name}, on {where}: bytes per GPU", "answer"),
        *assumed(answer),
        BLANK,
        _table(answer),
        *([] if answer["usable_bytes"] is None else [beyond("total", "fits")]),
        *_refused(answer),
        *_cards(answer),
        *notes(answer),
    ]


def _verdict(answer: Answer) -> Document:
    if answer["usable_bytes"] is None:
        return []
    at = card(answer["accelerator"], answer["usable_bytes"])
    fitting = [str(row["zero_stage"]) for row in answer["rows"] if row["fits"]]
    if fitting and states_alone(answer):
        return [Text(f"the states alone, without activations, fit {at} at zero_stage {', '.join(fitting)}", "warn")]
    if fitting:
        return [Text(f"fits {at} at zero_stage {', '.join(fitting)}", "good")]
    totals = [row["total_bytes"] for row in answer["rows"] if row["total_bytes"] is not None]
    over = held(min(totals) - answer["usable_bytes"])
    return [
        Text(
            f"does not fit {at} at any zero_stage: the leanest is {over} over",
            "bad",
        )
    ]


def _table(answer: Answer) -> Table:
    rows = answer["rows"]
    hosted = any(row["host_bytes"] for row in rows)
    buffered = any(row["buffers_bytes"] for row in rows)
    unsent = all(row["traffic_vs_ddp"] is None for row in rows)
    fewest = answer["fewest_gpus"]
    columns = [
        Column("zero_stage"),
        *(Column(name) for name in COLUMNS),
        Column("of full"),
        Column("host"),
        Column("dp sent/step"),
        Column("vs DDP"),
        Column("fits"),
        Column("fewest GPUs"),
    ]
    cells: list[list[str]] = []
    styles: list[Style] = []
    for row in rows:
        ratio = row["traffic_vs_ddp"]
        refused = row["total_bytes"] is None
        sizes = [held(row[f"{name}_bytes"]) if name != "buffers" or buffered else "" for name in COLUMNS]
        cells.append(
            [
                str(row["zero_stage"]),
                *sizes,
                percent(row["share_of_full"]),
                held(row["host_bytes"]) if hosted else "",
                "" if unsent else "-" if refused else format_gb(row["wire_bytes"]),
                "" if unsent else "-" if ratio is None else f"{ratio:.2f}",
                yes(row["fits"]),
                "" if fewest is None else _fewest(fewest[str(row["zero_stage"])]),
            ]
        )
        styles.append(fit_style(row))
    return table(columns, cells, styles)


def _fewest(count: int | None) -> str:
    return "none" if count is None else str(count)


def _refused(answer: Answer) -> Document:
    return [
        Text(f"zero_stage {row['zero_stage']} is refused: {row['refused']}", "warn")
        for row in answer["rows"]
        if "refused" in row
    ]


def _cards(answer: Answer) -> Document:
    cards = answer["single_cards"]
    if cards is None:
        return []
    if not cards:
        return [Text("no single card in the catalogue holds it unsharded", "bad")]
    return [Text(f"one card that holds it unsharded: {', '.join(one['name'] for one in cards)}")]
