"""`train` as text: how it ended, what was learned, how fast, how much in FP8, and what was predicted of it."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator

from trainledger.reconcile.verdict import WRONG
from trainledger.report.document import BLANK, Column, Document, Style, Text, left, table
from trainledger.report.words import Answer, notes, on_ranks, percent, whole
from trainledger.units import format_bytes

WIDTH = 116
MOST_SAID = 10
MOST_CHECKPOINTS = 5
MOST_LOST = 5
"""Operands of layers that casts to FP8 lost most of; --json has all."""


def document(answer: Answer) -> Document:
    """The whole answer, how it ended last."""
    found: Document = [*_header(answer), BLANK, *_learned(answer), BLANK, *_products(answer)]
    if answer["checkpoints"]:
        found += [BLANK, *_checkpoints(answer)]
    if answer["lines"]:
        found += [BLANK, *_predicted(answer)]
    if answer["said"]:
        found += [BLANK, *_said(answer)]
    return [*found, *notes(answer), BLANK, *_ended(answer)]


def _header(answer: Answer) -> Document:
    found = on_ranks(answer)
    if answer["resumed_from"]:
        found.append(Text(f"went on after step {answer['first']} from {answer['resumed_from']}"))
    found += [Text(f"passed over {path}: {why}", "warn") for path, why in answer["passed_over"]]
    return found


def _learned(answer: Answer) -> Document:
    """Losses, speed and memory."""
    rows = [
        ["steps", f"{whole(answer['steps'])} of {whole(answer['steps_asked'])}", f"{whole(answer['tokens'])} tokens"],
        ["loss", _loss(answer["loss"]), _begun(answer["first_loss"])],
    ]
    if answer["held_out_loss"] is not None:
        over = f"over {whole(answer['held_out_sequences'])} sequences"
        rows.append(["held-out loss", _loss(answer["held_out_loss"]), over])
    if answer["tokens_per_s"] is not None:
        each = answer["tokens_per_s"] / answer["world_size"]
        rows.append(["tokens/s", f"{answer['tokens_per_s']:,.0f}", f"{each:,.0f} a rank, the median of steps"])
    meter = "allocated" if answer["meter"] == "allocated" else "resident, of a whole process"
    rows.append(["memory", format_bytes(answer["memory_bytes"]), f"{meter}, of the rank that held most"])
    if answer["scale"] is not None:
        rows.append(["loss scale", f"{answer['scale']:g}", f"skipped: {whole(answer['skipped'])}"])
    return [table([left(""), Column(""), left("")], rows)]


def _products(answer: Answer) -> Document:
    """How much of the arithmetic is in FP8, of the whole job in one step."""
    gemms = answer["gemms"]
    if gemms["ran"] is None:
        return [Text(f"products of weights: {whole(gemms['gemms'])} a step, none of them in FP8")]
    found: Document = [
        Text(
            f"products of weights: {whole(gemms['gemms'])} a step, {whole(gemms['fp8_gemms'])} of them in FP8: "
            f"{percent(gemms['fp8_share'])} of their FLOP, {percent(gemms['fp8_share_of_all'])} with attention",
            "" if gemms["fp8_gemms"] else "bad",
        ),
        Text(f"seen to run in FP8 in the first step: {whole(gemms['ran'])}"),
    ]
    if gemms["fallen"]:
        found.append(Text(f"fell back to bf16: {', '.join(gemms['fallen'])}", "warn"))
    worst = sorted(gemms["lost"], key=lambda one: one["saturated"] + one["flushed"], reverse=True)[:MOST_LOST]
    if worst:
        columns = [left("casts to FP8, the worst"), left("operand"), Column("saturated"), Column("flushed")]
        rows = [[one["layer"], one["operand"], percent(one["saturated"]), percent(one["flushed"])] for one in worst]
        found.append(table(columns, rows))
    return found


def _checkpoints(answer: Answer) -> Document:
    every = answer["checkpoints"]
    columns = [Column("checkpoint after step"), Column("bytes"), Column("training waited")]
    rows = [
        [whole(one["step"]), format_bytes(one["bytes"]), f"{one['blocked_s']:.3f} s"]
        for one in every[-MOST_CHECKPOINTS:]
    ]
    found: Document = [table(columns, rows)]
    if len(every) > MOST_CHECKPOINTS:
        waited = sum(one["blocked_s"] for one in every)
        found.append(Text(f"the last of {whole(len(every))}, for which training waited {waited:.3f} s in all", "dim"))
    return found


def _predicted(answer: Answer) -> Document:
    """By kind of line, of the rank that measured most: predicted beside measured."""
    lines = answer["lines"]
    kinds: dict[tuple[str, str], dict[int, list[Answer]]] = {}
    for line in lines:
        kinds.setdefault(_kind(line), {}).setdefault(line["rank"], []).append(line)
    rows: list[list[str]] = []
    styles: list[Style] = []
    for (kind, unit), ranks in kinds.items():
        predicted, measured = max((_sums(own) for own in ranks.values()), key=lambda pair: pair[1])
        counts = Counter(line["verdict"] for own in ranks.values() for line in own)
        wrong = sum(counts[word] for word in WRONG)
        rows.append([kind, _figure(predicted, unit), _figure(measured, unit), _judged(counts)])
        styles.append("bad" if wrong else "")
    beyond = answer["unexplained"]
    columns = [left(f"step {answer['observed_step']}"), Column("predicted"), Column("measured"), left("lines")]
    return [
        table(columns, rows, styles),
        Text(f"unexplained: {format_bytes(beyond['bytes'])}, {whole(beyond['calls'])} calls"),
    ]


def _kind(line: Answer) -> tuple[str, str]:
    kind, category, *_ = line["id"].split("/")
    at = f" at {line['instant']}" if line.get("instant") else ""
    return (f"{kind} {category}{at}" if kind != "done" else "done"), line["unit"]


def _sums(own: list[Answer]) -> tuple[int, int]:
    own = [line for line in own if ":conserved" not in line["id"]]
    return sum(line["predicted"] or 0 for line in own), sum(line["measured"] or 0 for line in own)


def _figure(amount: int, unit: str) -> str:
    return format_bytes(amount) if unit == "B" else f"{whole(amount)} {unit}"


def _judged(counts: Counter[str]) -> str:
    return ", ".join(
        f"{whole(counts[word])} {word}" for word in ("equal", "within", "reported", *WRONG) if counts[word]
    )


def _said(answer: Answer) -> Iterator[Text]:
    for text in answer["said"][:MOST_SAID]:
        for line in textwrap.wrap(text, WIDTH, subsequent_indent="  "):
            yield Text(line, "warn")
    if (more := len(answer["said"]) - MOST_SAID) > 0:
        yield Text(f"and {whole(more)} more; --json and {answer['metrics']} have all", "dim")


def _ended(answer: Answer) -> Document:
    found: Document = [Text(f"curves: {answer['report']}")]
    if answer["ended"] == "finished":
        return [*found, Text(f"finished: all {whole(answer['steps'])} steps are taken", "good")]
    said = f"stopped after step {whole(answer['steps'])} of {whole(answer['steps_asked'])}, and saved"
    return [*found, Text(f"{said}; go on with {answer['go_on']}", "warn")]


def _begun(loss: float | None) -> str:
    return "" if loss is None else f"{loss:.4f} in the first step"


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"
