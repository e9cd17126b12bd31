"""`check` as text: what was asked for, which storages of the plan it can have been, and what memory was full of."""

from __future__ import annotations

from collections.abc import Iterable

from trainledger.reconcile.out_of_memory import KNOBS
from trainledger.report.checked import document as checked
from trainledger.report.document import BLANK, Column, Document, Table, Text, left, table
from trainledger.report.words import Answer, notes, on_card, percent, whole
from trainledger.units import format_bytes

SHOWN = 8


def document(answer: Answer) -> Document:
    """Of a plan what stands against it; of a message the answer, then the storages, then what memory was full of."""
    if "findings" in answer:
        return checked(answer)
    return [
        _verdict(answer),
        Text(f"message: {answer['message']['text']}"),
        *on_card(answer),
        BLANK,
        *_storages(answer),
        *_inversions(answer),
        *_others(answer),
        *_full_of(answer),
        *_moments(answer),
        *notes(answer),
    ]


def _verdict(answer: Answer) -> Text:
    asked, found = answer["message"]["requested"], answer["candidates"]
    if found:
        first = found[0]
        return Text(f"{asked} asked for: {_named(first)}, {first['phase']}, {_stages(first)}", "answer")
    if answer["named"] and answer["inversions"]:
        made = answer["inversions"][0]
        return Text(f"{asked} asked for: {made['name']}, of {_tokens(made)} tokens on one rank", "answer")
    fitting = [f"{one['name']} at --mbs {mbs}" for one in answer["inversions"] if (mbs := _micro_batch(answer, one))]
    but = f", but {' or '.join(fitting)} would" if fitting else ""
    return Text(f"{asked} asked for: nothing that this plan makes has that size{but}", "warn")


def _micro_batch(answer: Answer, made: Answer) -> int | None:
    """The micro-batch of whole sequences that gives the size, where one does and chance is unlikely to."""
    each = made["planned_tokens"] // answer["plan"]["mbs"]
    least, most = made["tokens_at_least"], made["tokens_at_most"]
    if (most - least) * 20 > each:
        return None
    return most // each if most // each * each >= least else None


def _named(one: Answer) -> str:
    more = f" and {one['also']} more" if one["also"] else ""
    return f"{one['name']}{more}{'' if one['in_plan'] else ', which the plan as given does not make'}"


def _stages(one: Answer) -> str:
    stages = one["pp_stages"]
    if len(stages) == 1:
        return f"pp_stage {stages[0]}"
    return f"pp_stages {', '.join(map(str, stages))}" if stages else "no pp_stage"


def _tokens(made: Answer) -> str:
    least, most = made["tokens_at_least"], made["tokens_at_most"]
    return whole(least) if least == most else f"{whole(least)} to {whole(most)}"


def _storages(answer: Answer) -> Document:
    rows = answer["candidates"] or answer["nearest"]
    if not rows:
        return []
    title = "storages of that size" if answer["candidates"] else "nearest in size"
    found: Document = [_table(title, rows[:SHOWN])]
    if answer["candidates"]:
        knobs = dict.fromkeys((one["family"], one["knob"]) for one in rows[:SHOWN])
        found += _smaller(knobs)
    return [*found, BLANK]


def _smaller(knobs: Iterable[tuple[str, str]]) -> Document:
    """What makes each family of tensors smaller."""
    return [Text(f"smaller {family}: {knob}") for family, knob in knobs]


def _table(title: str, rows: list[Answer]) -> Table:
    columns = [left(title), Column("bytes"), Column("off"), left("made"), Column("pp_stage"), left("formula")]
    cells = [
        [
            _named(one),
            format_bytes(one["amount"]),
            "" if abs(one["off"]) < 0.00005 else f"{one['off']:+.2%}",
            f"{one['phase']}{' (host memory)' if one['place'] == 'host' else ''}",
            ", ".join(map(str, one["pp_stages"])),
            one["formula"],
        ]
        for one in rows
    ]
    return table(columns, cells, ["" if one["in_plan"] else "dim" for one in rows])


def _inversions(answer: Answer) -> Document:
    made = answer["inversions"]
    if not made:
        return []
    rows = [
        [
            one["name"],
            _tokens(one),
            whole(one["planned_tokens"]),
            f"{one['mbs']:.4g}",
            whole(one["seq"]),
            "" if one["vocabulary"] is None else whole(one["vocabulary"]),
        ]
        for one in made
    ]
    columns = [
        left("would have that size with"),
        Column("tokens"),
        Column("the plan's"),
        Column("as mbs"),
        Column("or as seq"),
        Column("or vocabulary"),
    ]
    knobs = dict.fromkeys((one["family"], KNOBS[one["family"]]) for one in made)
    return [table(columns, rows), *_smaller(knobs), BLANK]


def _others(answer: Answer) -> Document:
    """The further messages of the log: of other sizes one by one, of the same size how many."""
    rows = [
        [
            one["requested"],
            "" if one["index"] is None else str(one["index"]),
            whole(one["times"]),
            "nothing that this plan makes has that size" if one["candidate"] is None else _is(one["candidate"]),
        ]
        for one in answer["others"]
    ]
    found: Document = []
    if rows:
        columns = [left("further messages ask for"), Column("GPU"), Column("times"), left("which is")]
        found.append(table(columns, rows))
    if answer["repeats"]:
        count, asked = answer["repeats"], answer["message"]["requested"]
        more = "messages ask" if count != 1 else "message asks"
        found.append(Text(f"{whole(count)} more {more} for {asked}"))
    return [*found, BLANK] if found else []


def _is(candidate: Answer) -> str:
    return f"{_named(candidate)}, {candidate['phase']}"


def _full_of(answer: Answer) -> Document:
    parts, total = answer["full_of"], answer["message"]["total_bytes"]
    if not parts:
        return []
    rows = [
        [one["what"], format_bytes(one["amount"]), percent(one["amount"] / total) if total else ""] for one in parts
    ]
    return [table([left("memory was full of"), Column("bytes"), Column("of the card")], rows), BLANK]


def _moments(answer: Answer) -> Document:
    moment, peak = answer["moment"], answer["peak"]
    found: Document = []
    if moment is not None:
        found.append(Text(f"nearest place of the plan's step: {_place(moment)}"))
    if moment is None or moment["place"] != peak["place"] or moment["pp_stage"] != peak["pp_stage"]:
        found.append(Text(f"the plan holds most: {_place(peak)}"))
    return found


def _place(at: Answer) -> str:
    largest = ", ".join(f"{one['name']} {format_bytes(one['amount'])}" for one in at["alive"][:4])
    held = f"{format_bytes(at['allocated_bytes'])} allocated, {at['place']}, pp_stage {at['pp_stage']}"
    return f"{held}: {largest}" if largest else held
