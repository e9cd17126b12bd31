"""Printed figures of memory other than states: activations of a layer or a stage, the largest model, what lies at rest.

Which kind asks what, and which account answers for its source, stands in data/measured/exact_memory.toml.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Literal

import msgspec

from trainledger.account.memory import stage_memory
from trainledger.account.memory.answers.limits import most_params
from trainledger.errors import BadInput, Refused, UnknownName, UsageError
from trainledger.facts.by_hand import model_by_hand, model_from_count
from trainledger.facts.load import load_toml
from trainledger.facts.model import Model
from trainledger.facts.workload import Workload
from trainledger.inventory.blocks import parts_of
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Plans, Scenario, make_plans
from trainledger.plans.setting import Setting, make_setting
from trainledger.profiles import load_profile
from trainledger.rules import REFUSALS, require
from trainledger.scoring.prediction import Figure, Prediction
from trainledger.scoring.printed import read_unit
from trainledger.scoring.recipe import scenario_of
from trainledger.scoring.table import MEASURED, whole_number
from trainledger.scoring.words import Source, Unclear

Asks = Literal["layer", "stage", "scores", "saved_share", "params", "rest", ""]
Words = Literal["tensor", "sequence", "selective", "full", "alone"]

VOCABULARY = 1024
"""Stands for the vocabulary where a figure is of layers alone, which do not depend on it."""
_CAPACITY = re.compile(r"([0-9]+(?:\.[0-9]+)?) GB")


class Reading(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a kind of figure from a source asks, and who answers: see exact_memory.toml."""

    kind: str
    source: str
    asks: Asks = ""
    engine: str = ""
    framework_version: str = ""
    measured: bool = False
    reason: str = ""
    cite: str = ""
    refused: str = ""


class Shape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shapes that a source gives in another table."""

    source: str
    model: tuple[str, ...]
    hidden: int
    heads: int
    layers: int
    vpp: int
    cite: str


class Readings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of exact_memory.toml."""

    figure: tuple[Reading, ...]
    words: dict[Words, tuple[str, ...]]
    shape: tuple[Shape, ...]


@lru_cache(maxsize=1)
def readings() -> Readings:
    """How printed figures are read."""
    return msgspec.convert(load_toml(MEASURED / "exact_memory.toml"), Readings)


def reading_of(inputs: Mapping[str, str]) -> Reading | None:
    """The first that fits a row's kind and source; None for states and what nobody knows."""
    kind, source = inputs.get("kind", ""), inputs.get("source", "")
    found = (one for one in readings().figure if kind.startswith(one.kind) and source.startswith(one.source))
    return next(found, None)


def predict_figure(inputs: Mapping[str, str], reading: Reading) -> Prediction:
    """The prediction for one row, from its inputs."""
    if reading.refused:
        return Prediction(status="unsupported", reason=f"kind {inputs['kind']!r}: {reading.refused}")
    try:
        return Prediction(status="predicted", reason=reading.reason, figure=_figure(inputs, reading))
    except (UnknownName, Refused) as reason:
        return Prediction(status="unsupported", reason=str(reason))
    except (Unclear, UsageError, BadInput) as reason:
        return Prediction(status="incomplete", reason=str(reason))


def _figure(inputs: Mapping[str, str], reading: Reading) -> Figure:
    unit = inputs.get("unit", "")
    match reading.asks:
        case "params":
            value = Fraction(_params(inputs, reading), _count_unit(unit))
        case "scores":
            value = Fraction(_layer(inputs, reading, "none") - _layer(inputs, reading, "selective"), _hidden(inputs))
        case "saved_share":
            value = 100 - Fraction(100 * _layer(inputs, reading, "selective"), _layer(inputs, reading, "none"))
        case "layer":
            value = Fraction(_layer(inputs, reading), read_unit(unit).size)
        case "stage":
            value = Fraction(_stage(inputs, reading), read_unit(unit).size)
        case _:
            value = Fraction(_rest(inputs, reading), read_unit(unit).size)
    profile = load_profile(reading.engine, reading.framework_version)
    return Figure(
        value=value,
        unit=unit,
        profile=profile.name,
        framework_version=profile.framework_version,
        measured=reading.measured,
    )


def _count_unit(text: str) -> int:
    """How many parameters one printed unit is."""
    match = re.match(r"1e([0-9]{1,2})\b", text)
    if match is None:
        raise Unclear(f"unit {text!r} does not say how many parameters it is; write 1e9 params")
    return 10 ** int(match[1])


def _number(inputs: Mapping[str, str], column: str, default: int | None = None) -> int:
    value = whole_number(inputs.get(column, ""))
    value = default if value is None else value
    if value is None:
        raise Unclear(f"{column} is blank: the figure depends on it")
    return value


def _shape(inputs: Mapping[str, str]) -> Shape | None:
    """What the source says of a model elsewhere."""
    source, model = inputs.get("source", ""), inputs.get("model", "")
    return next((one for one in readings().shape if source.startswith(one.source) and model in one.model), None)


def _sized(inputs: Mapping[str, str], column: str) -> int:
    """A size of the row, or of its model in the source's own table."""
    known = _shape(inputs)
    return _number(inputs, column, getattr(known, column) if known is not None else None)


def _hidden(inputs: Mapping[str, str]) -> int:
    """Elements of a hidden tensor of one micro-batch."""
    return _number(inputs, "seq_len") * _number(inputs, "mbs", 1) * _sized(inputs, "hidden")


def _said(inputs: Mapping[str, str]) -> set[Words]:
    """What `recompute` says of layout and recomputation."""
    text = inputs.get("recompute", "").lower()
    words = readings().words.items()
    said: set[Words] = {word for word, phrases in words if any(phrase in text for phrase in phrases)}
    if text and not said:
        raise Unclear(f"recompute {text!r} says nothing that is known: {', '.join(readings().words)}")
    return said


def _gpt(inputs: Mapping[str, str]) -> Model:
    hidden = _sized(inputs, "hidden")
    return model_by_hand(
        hidden=hidden,
        layers=_sized(inputs, "layers"),
        heads=_sized(inputs, "heads"),
        ffn=_number(inputs, "ffn", 4 * hidden),
        vocab=_number(inputs, "vocab", VOCABULARY),
        gated=False,
    )


def _setting(inputs: Mapping[str, str], reading: Reading, recompute: str, schedule: str) -> Setting:
    scenario = Scenario(
        engine=reading.engine, precision="fp16", attention="eager", recompute=recompute, schedule=schedule
    )
    return make_setting(_gpt(inputs), Workload(seq=_number(inputs, "seq_len")), scenario)


def _recompute(said: set[Words]) -> str:
    return "selective" if "selective" in said else "full" if "full" in said else "none"


def _layer(inputs: Mapping[str, str], reading: Reading, recompute: str = "") -> int:
    """Bytes that one layer saves of one micro-batch; with `recompute` in place of what the row says, on one rank."""
    said = _said(inputs)
    tp = 1 if recompute or "alone" in said else _number(inputs, "tp")
    setting = _setting(inputs, reading, recompute or _recompute(said), "1f1b")
    plans = make_plans({"tp": tp, "sp": int("sequence" in said and tp > 1), "mbs": _number(inputs, "mbs", 1)})
    require(REFUSALS, setting, plans)
    return int(parts_of(Inventory(setting), plans).blocks[0].saved[0])


def _stage(inputs: Mapping[str, str], reading: Reading) -> int:
    """Bytes that the first stage saves at the turn, the loss of a single stage left out, a pipeline kept full."""
    said, pp = _said(inputs), _number(inputs, "pp")
    known = _shape(inputs)
    if known is None and pp > 1:
        raise Unclear("no column has the virtual stages, on which micro-batches in flight depend")
    vpp = known.vpp if known is not None else 1
    setting = _setting(inputs, reading, _recompute(said), "interleaved" if vpp > 1 else "1f1b")
    plans = make_plans(
        {
            "tp": _number(inputs, "tp"),
            "sp": int("sequence" in said),
            "pp": pp,
            "vpp": vpp,
            "mbs": _number(inputs, "mbs", 1),
            "num_microbatches": 4 * pp,
        }
    )
    require(REFUSALS, setting, plans)
    inventory = Inventory(setting)
    memory, counts = stage_memory(inventory, plans), inventory.stage_counts(plans)[0]
    losses = inventory.losses(counts) * parts_of(inventory, plans).final.saved[:, None]
    return int((memory.saved - losses)[0, 0])


def _params(inputs: Mapping[str, str], reading: Reading) -> int:
    """The most parameters; the card's memory is what its name says, in the paper's GB."""
    capacity = _CAPACITY.search(inputs.get("kind", ""))
    if capacity is None:
        raise Unclear(f"kind {inputs.get('kind', '')!r} names no memory of a card, such as 32 GB")
    source = Source(
        kind=(reading.kind,),
        source=reading.source,
        engine=reading.engine,
        framework_version="any",
        instant="rest",
        reason=reading.reason,
        cite=reading.cite,
    )
    setting = make_setting(model_from_count(1), Workload(), scenario_of(inputs.get("precision", ""), source, ()))
    degrees = {"tp": _number(inputs, "tp", 1), "pp": _number(inputs, "pp", 1), "dp_shard": _number(inputs, "dp")}
    zero = whole_number(inputs.get("zero_stage", ""), 0)
    if zero is None:
        raise Unclear("zero_stage is blank: it decides which states are divided")
    return most_params(setting, make_plans({**degrees, "zero_stage": zero}), int(Fraction(capacity[1]) * 10**9))


def _rest(inputs: Mapping[str, str], reading: Reading) -> int:
    """What is allocated between steps on the rank that holds most."""
    sp = whole_number(inputs.get("sequence_parallel", ""), 0)
    scenario = Scenario(
        engine=reading.engine,
        framework_version=reading.framework_version,
        precision=inputs.get("precision", "") or "bf16",
        recompute=inputs.get("recompute", "") or "none",
    )
    model = model_by_hand(
        hidden=_number(inputs, "hidden"),
        layers=_number(inputs, "layers"),
        heads=_number(inputs, "heads"),
        ffn=_number(inputs, "ffn"),
        vocab=_number(inputs, "vocab"),
        tied="tied" in inputs.get("model", ""),
    )
    stated = whole_number(inputs.get("n_params", ""))
    if stated is not None and abs(model.total_params / stated - 1) > NEAR:
        raise Unclear(f"n_params is {stated} and the shapes have {model.total_params} parameters")
    setting = make_setting(model, Workload(seq=_number(inputs, "seq_len")), scenario)
    plans = _plans(inputs, sp or 0)
    require(REFUSALS, setting, plans)
    memory = stage_memory(Inventory(setting), plans)
    idle = [index for index, place in enumerate(memory.places) if place.states == "rest"]
    return int(memory.total(idle[0]).max())


NEAR = 0.001
"""Shapes and a stated count may differ by so much: norms and biases that a description leaves out."""


def _plans(inputs: Mapping[str, str], sp: int) -> Plans:
    tp = _number(inputs, "tp", 1)
    return make_plans(
        {
            "tp": tp,
            "sp": sp if tp > 1 else 0,
            "pp": _number(inputs, "pp", 1),
            "dp_shard": _number(inputs, "dp"),
            "mbs": _number(inputs, "mbs", 1),
            "zero_stage": _number(inputs, "zero_stage"),
        }
    )
