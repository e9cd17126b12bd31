"""Phrases that several reports share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainledger.report.document import Document, Style, Text
from trainledger.units import format_bytes

Answer = Mapping[str, Any]

AXES = ("tp", "pp", "vpp", "cp", "ep", "dp", "dp_replicate", "mbs", "num_microbatches")
"""Of a plan, in the order in which they are said."""

ORDINARY: dict[str, tuple[str, ...]] = {
    "compile": ("", "off"),
    "dropout": ("",),
    "overlap_comm": ("", "off"),
    "loss": ("", "eager", "vocab-parallel", "sharded"),
    "attention": ("flash",),
    "schedule": ("1f1b",),
    "cp_comm": ("",),
    "routing": ("", "balanced"),
    "allocator": ("", "default"),
}
"""Words of a plan -> those that need not be said: what an engine that has the choice does by itself."""

HIDDEN_NOTES = ("model-as-read",)
"""Said by `model`, and repeated nowhere but in the JSON; of a user's own config they are config-as-read, and shown."""


def held(amount: int | None) -> str:
    """Memory in powers of 1024, "-" where it is not known."""
    return "-" if amount is None else format_bytes(amount)


def percent(share: float | None) -> str:
    """A share to three digits.

    >>> percent(0.015625), percent(1.0), percent(0.00002), percent(None)
    ('1.56 %', '100 %', '<0.01 %', '-')
    """
    if share is None:
        return "-"
    return "<0.01 %" if 0 < share < 0.0001 else f"{share * 100:.3g} %"


def yes(fits: bool | None) -> str:
    """A verdict in a table; empty where nobody asked."""
    return "" if fits is None else "yes" if fits else "no"


def fit_style(row: Answer) -> Style:
    """How a row of a table is shown: refused, not asked, fitting or not."""
    if row["total_bytes"] is None:
        return "dim"
    return "" if row["fits"] is None else "good" if row["fits"] else "bad"


def states_alone(answer: Answer) -> bool:
    """Whether a model's activations are not known, so that what fits are its states."""
    return any(note["rule"] == "states-alone" for note in answer["notes"])


def gpus(count: int) -> str:
    """A number of GPUs.

    >>> gpus(1), gpus(64)
    ('1 GPU', '64 GPUs')
    """
    return f"{count} GPU{'s' if count != 1 else ''}"


def whole(count: int) -> str:
    """A large count with its thousands apart."""
    return f"{count:,}"


def card(name: str, usable_bytes: int) -> str:
    """The card and its usable memory."""
    return f"{name} ({format_bytes(usable_bytes)} usable)"


def engine(profile: Answer) -> str:
    """Whose accounting: the profile's name and the release that was read."""
    release = "" if profile["framework_version"] == "any" else f" {profile['framework_version']}"
    return f"engine {profile['engine']} ({profile['framework']}{release})"


def degrees(plan: Answer, names: Sequence[str]) -> str:
    """The degrees that are not 1, in order.

    >>> degrees({"tp": 8, "pp": 1, "dp": 4}, ["tp", "pp", "dp"])
    'tp 8, dp 4'
    """
    return ", ".join(f"{name.replace('_', '-')} {plan[name]}" for name in names if plan[name] not in (1, None))


def busiest() -> Text:
    """What "sent/step" is of, under a table of plans."""
    return Text("sent/step: over all axes, per rank of the pipeline stage that sends most", "dim")


def beyond(tensors: str, verdict: str) -> Text:
    """Why a verdict may be no while the tensors are less than the card has."""
    more = "what the allocator leaves unused, context and communicators too, where the engine's account has them"
    return Text(f"{tensors}: tensors at the fullest place; {verdict}: {more}", "dim")


def batch(plan: Answer) -> str:
    """Sequences of the whole job in a step, and that it was one micro-batch a rank where nobody said.

    >>> batch({"gbs": 512, "mbs": 1, "dp": 2, "num_microbatches": 256})
    'gbs 512'
    >>> batch({"gbs": None, "mbs": 4, "dp": 2, "num_microbatches": 1})
    'gbs 8 (assumed: one micro-batch a rank)'
    """
    if plan["gbs"] is not None:
        return f"gbs {plan['gbs']}"
    count = plan["num_microbatches"]
    each = "one micro-batch" if count == 1 else f"{count} micro-batches"
    return f"gbs {plan['mbs'] * plan['dp'] * count} (assumed: {each} a rank)"


def ways(plan: Answer) -> str:
    """What of a plan is no degree: what is recomputed, and how it is run where that is not the ordinary way.

    >>> plan = {"recompute": "selective", "recompute_parts": ["mlp"], "recompute_layers": 0, "compile": "on"}
    >>> plain = {"loss": "eager", "loss_chunks": 0, "allocator": "expandable", "routing": "", "offload": []}
    >>> unsaid = dict.fromkeys(("cp_comm", "dropout", "overlap_comm"), "")
    >>> ways({**plan, **plain, **unsaid, "attention": "flash", "schedule": "1f1b"})
    'recompute selective (mlp), compile on, allocator expandable'
    """
    again = f"recompute {plan['recompute']}"
    if plan["recompute_parts"]:
        again += f" ({', '.join(plan['recompute_parts'])})"
    if plan["recompute_layers"]:
        again += f" of the first {plan['recompute_layers']} layers of each virtual stage"
    said = [f"{name} {plan[name]}" for name, ordinary in ORDINARY.items() if plan[name] not in ordinary]
    if plan["loss_chunks"]:
        said.append(f"loss-chunks {plan['loss_chunks']}")
    if plan["offload"]:
        said.append(f"offload {', '.join(plan['offload'])}")
    return ", ".join((again, *said)).replace("_comm", "-comm")


def plan_line(plan: Answer, chosen: str = "", axes: Sequence[str] = AXES) -> Text:
    """A plan in a line: its stage, its degrees by `axes`, and what else is `chosen`; unsaid, all that is."""
    split = degrees(plan, axes)
    said = chosen or ", ".join((plan["precision"], plan["optimizer"], f"seq {plan['seq']}", batch(plan), ways(plan)))
    return Text(f"plan: zero_stage {plan['zero_stage']}, {f'{split}, ' if split else ''}{said}")


def on_card(answer: Answer) -> Document:
    """The model, the cards it is asked about, the engine, the plan and its defaults; no plan where it has no words."""
    plan = answer["plan"]
    if plan is None:
        return [Text(f"{answer['model']}, {engine(answer['profile'])}"), *assumed(answer)]
    at = f" on {card(answer['accelerator'], answer['usable_bytes'])}" if answer["usable_bytes"] is not None else ""
    model = Text(f"{answer['model']} on {gpus(plan['gpus'])}{at}, {engine(answer['profile'])}")
    return [model, plan_line(plan), *assumed(answer)]


def on_ranks(answer: Answer, ran: str = "") -> Document:
    """The model, the ranks that `ran` it (unsaid, all of them), the engine, the plan and its defaults."""
    plan = answer["plan"]
    ranks = "1 rank" if answer["world_size"] == 1 else f"{answer['world_size']} ranks"
    words = f"{plan['precision']}, {plan['optimizer']}, seq {plan['seq']}, recompute {plan['recompute']}"
    model = Text(f"{answer['model']} on {ranks}{ran}, {engine(answer['profile'])}", "answer")
    return [model, plan_line(plan, words), *assumed(answer)]


def assumed(answer: Answer) -> Document:
    """The defaults that were applied."""
    chosen = ", ".join(f"{name} {value}" for name, value in answer["assumed"].items())
    return [Text(f"assumed: {chosen}", "dim")] if chosen else []


def notes(answer: Answer) -> Document:
    """What a reader should know, warnings first."""
    order = {"warn": 0, "advise": 1, "note": 2}
    shown = sorted((n for n in answer["notes"] if n["rule"] not in HIDDEN_NOTES), key=lambda n: order[n["severity"]])
    return [
        Text(f"{note['severity']}: [{note['rule']}] {note['message']}", "warn" if note["severity"] == "warn" else "dim")
        for note in shown
    ]


def change(found: Answer | None) -> Text:
    """The smallest change that makes a plan fit, and the plan that it makes."""
    if found is None:
        return Text("no single change that was tried makes one fit", "bad")
    plan = found["plan"]
    split = degrees({**plan, "dp": plan["dp_replicate"] * plan["dp_shard"]}, ("tp", "pp", "vpp", "cp", "ep", "dp"))
    names = f"{split}, zero {plan['zero_stage']}, mbs {plan['mbs']}, recompute {found['recompute']}".removeprefix(", ")
    turn = f"{found['knob']} from {found['before']} to {found['after']}"
    total = format_bytes(found["total_bytes"])
    return Text(f"smallest change that fits: {turn}, which makes the plan {names}, {total} allocated", "answer")
