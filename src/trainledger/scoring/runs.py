"""The peak memory of a measured run, from the inputs of its row alone."""

from __future__ import annotations

from collections.abc import Mapping

from trainledger.account.memory import Memory, memory_of
from trainledger.errors import BadInput, Refused, UsageError
from trainledger.facts.workload import Workload
from trainledger.inventory.inventory import Inventory
from trainledger.plans.limits import check_countable
from trainledger.plans.plan import make_plans
from trainledger.plans.setting import make_setting
from trainledger.rules import REFUSALS, require
from trainledger.scoring.cells import Cells
from trainledger.scoring.prediction import Bounds, Prediction, RunMemory, Unsupported
from trainledger.scoring.run_card import card_of
from trainledger.scoring.run_engine import EngineReading, engine_of, unread_release
from trainledger.scoring.run_layout import layout_of
from trainledger.scoring.run_model import model_of
from trainledger.scoring.run_scenario import scenario_of
from trainledger.scoring.run_told import told
from trainledger.scoring.words import Unclear


def predict_run(inputs: Mapping[str, str]) -> Prediction:
    """The prediction for one row of a table of runs, from its inputs."""
    try:
        reading = engine_of(Cells(inputs))
        return Prediction(status="predicted", reason=reading.reason, memory=_memory(Cells(inputs), reading))
    except (Unclear, UsageError) as reason:
        return Prediction(status="incomplete", reason=str(reason))
    except (Unsupported, Refused, BadInput) as reason:
        return Prediction(status="unsupported", reason=str(reason))


def _memory(cells: Cells, reading: EngineReading) -> RunMemory:
    model = model_of(cells, reading.plain)
    layout = layout_of(cells, reading)
    said = told(cells, reading)
    card = card_of(cells)
    unread = unread_release(cells, reading)
    assumed = [*([unread] if unread else []), *layout.assumed, *said.assumed]
    scenario = scenario_of(said, reading, layout, model, assumed)
    workload = Workload(seq=layout.seq, gbs=layout.gbs)
    setting = make_setting(model, workload, scenario, accelerator=card)
    plans = make_plans(layout.columns)
    check_countable(model, workload, scenario, layout.columns)
    require(REFUSALS, setting, plans)
    memory = memory_of(Inventory(setting), plans)
    return RunMemory(
        meters=_meters(memory),
        pp_stage=memory.pp_stage,
        place=memory.place,
        profile=setting.profile.name,
        framework_version=setting.profile.framework_version,
        usable_bytes=card.usable_bytes if card is not None else None,
        assumed=tuple(assumed),
    )


def _meters(memory: Memory) -> dict[str, Bounds]:
    return {
        name: Bounds(estimate=meter.estimate, lower=meter.lower, upper=meter.upper)
        for name, meter in memory.meters.items()
    }
