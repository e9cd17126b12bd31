"""The model states that a printed figure is about, by the account of the engine that its source speaks of."""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm

from trainledger.account.states import StateAccount, state_account
from trainledger.errors import BadInput, Refused, UsageError
from trainledger.facts.by_hand import model_from_count
from trainledger.facts.workload import Workload
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import DEGREE_LIMIT, Plans, data_parallel_degree, make_plans
from trainledger.plans.setting import make_setting
from trainledger.profiles import load_profile
from trainledger.profiles.profile import CATEGORIES, Category, Instant
from trainledger.rules import REFUSALS, require
from trainledger.scoring.prediction import Prediction, States, Unsupported
from trainledger.scoring.printed import Unit, read_unit
from trainledger.scoring.recipe import PROBE_PARAMS, scenario_of
from trainledger.scoring.table import whole_number
from trainledger.scoring.words import (
    Quantity,
    Source,
    Unclear,
    read_count,
    read_largest_layer,
    read_quantity,
    readings,
)

NO_SHAPES = "shapes-known"
PROBE_SHARD = 1 << 12
"""Elements that a probe's shards are multiples of: no engine pads them, and no block of an optimizer is cut short."""

UNUSED = 1
"""The largest layer where no buffer of the account depends on it: a count without shapes has to name one."""


def predict_states(inputs: Mapping[str, str]) -> Prediction:
    """The prediction for one row of a table of exact figures, from its inputs."""
    try:
        source = _source(inputs)
        return Prediction(status="predicted", reason=source.reason, states=_states(inputs, source))
    except Unsupported as reason:
        return Prediction(status="unsupported", reason=str(reason))
    except (Unclear, UsageError) as reason:
        return Prediction(status="incomplete", reason=str(reason))
    except Refused as refusal:
        return Prediction(status="incomplete" if refusal.rule == NO_SHAPES else "unsupported", reason=str(refusal))
    except BadInput as reason:
        return Prediction(status="unsupported", reason=str(reason))


def _source(inputs: Mapping[str, str]) -> Source:
    """The first reading that fits the row's kind, source and address."""
    kind, source, url = (inputs.get(column, "") for column in ("kind", "source", "source_url"))
    known = readings().source
    kinds = dict.fromkeys(kind for reading in known for kind in reading.kind)
    if kind not in kinds:
        asked = ", ".join(kinds)
        raise Unsupported(f"kind {kind!r} does not ask for model states; the kinds that do are: {asked}")
    for reading in known:
        if kind in reading.kind and source.startswith(reading.source) and reading.url in url:
            return reading
    sources = ", ".join(dict.fromkeys(reading.source for reading in known if kind in reading.kind))
    raise Unsupported(f"no account is known for the source {source!r}; for {kind!r} they begin with: {sources}")


def _states(inputs: Mapping[str, str], source: Source) -> States:
    quantity = read_quantity(inputs.get("quantity", ""))
    if quantity.host:
        raise Unsupported(f"quantity {inputs['quantity']!r} is host memory, and what is accounted for is one device's")
    if source.offloads is not None and quantity.offload not in source.offloads:
        raise Unsupported(f"{source.engine} prints no case that offloads {' and '.join(quantity.offload)} alone")
    plans = _plans(inputs)
    unit = read_unit(inputs.get("unit", ""))
    params = _params(inputs, unit, plans)
    setting = make_setting(
        model_from_count(params),
        Workload(),
        scenario_of(inputs.get("precision", ""), source, quantity.offload),
        largest_module_params=_largest_layer(inputs, source, int(plans.zero_stage[0])),
    )
    require(REFUSALS, setting, plans)
    held = _held(state_account(Inventory(setting), plans), source.instant, quantity)
    return States(
        value=unit.of(sum(held.values()), params),
        unit=unit.text,
        by_category=held,
        num_params=params,
        profile=setting.profile.name,
        framework_version=setting.profile.framework_version,
        instant=source.instant,
    )


def _held(account: StateAccount, instant: Instant, quantity: Quantity) -> dict[Category, int]:
    """Bytes of the categories asked for, on the stage that holds most of them."""
    held: dict[Category, int] = {category: int(account.held[category, instant].max()) for category in CATEGORIES}
    if not quantity.categories:
        return held
    if held["buffers"]:
        raise Unclear(
            f"quantity asks for {' and '.join(quantity.categories)} alone, and the account has buffers that belong to "
            "no category; ask for all states"
        )
    return {category: held[category] for category in quantity.categories}


def _number(inputs: Mapping[str, str], column: str) -> int | None:
    return whole_number(inputs.get(column, ""))


def _plans(inputs: Mapping[str, str]) -> Plans:
    """The row's layout as a Plans of length one; dp from gpus where only that is stated."""
    stage = _number(inputs, "zero_stage")
    for column in ("zero_stage", "tp", "pp", "dp", "gpus"):
        if (_number(inputs, column) or 0) > DEGREE_LIMIT:
            raise BadInput(f"{column} is {inputs[column]}: at most {DEGREE_LIMIT} ranks are counted")
    tp, pp = (_number(inputs, column) or 1 for column in ("tp", "pp"))
    dp, gpus = _number(inputs, "dp"), _number(inputs, "gpus")
    if stage is None:
        raise Unclear("zero_stage is blank: it decides which states are divided")
    if dp is not None and gpus is not None and dp * tp * pp != gpus:
        raise Unclear(f"gpus is {gpus} and dp x tp x pp is {dp} x {tp} x {pp}: they contradict each other")
    if dp is None:
        dp = data_parallel_degree(gpus, tp, pp, 1) if gpus else None
    if dp is None and stage > 0:
        raise Unclear(f"dp is blank: at zero_stage {stage} the states are divided over it")
    return make_plans({"zero_stage": stage, "tp": tp, "pp": pp, "dp_shard": dp or 1})


def _params(inputs: Mapping[str, str], unit: Unit, plans: Plans) -> int:
    """The row's parameter count; where it asks for bytes per parameter and states none, that of a probe."""
    stated = _number(inputs, "n_params") or read_count(inputs.get("model", ""))
    if stated:
        return stated
    if not unit.per_param:
        raise Unclear("n_params is blank, and model names no single count such as 7.5B")
    return lcm(PROBE_PARAMS, PROBE_SHARD * int(plans.dp[0]))


def _largest_layer(inputs: Mapping[str, str], source: Source, zero_stage: int) -> int:
    """Parameters of the largest layer, where the engine's account asks for them at this zero_stage."""
    stated = next((n for column in ("model", "quantity") if (n := read_largest_layer(inputs.get(column, "")))), 0)
    profile = load_profile(source.engine, source.framework_version)
    asked = any(row.select == "largest_module" and zero_stage in row.zero for row in profile.state)
    if asked and not stated:
        raise Unclear(
            f"model names no largest layer, such as 't5-3b (2851M, largest layer 32M)', which {profile.name} adds at "
            f"zero_stage {zero_stage}"
        )
    return stated or UNUSED
