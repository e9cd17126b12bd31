"""Peaks of the zero-bubble fork of Megatron-LM: eight printed ones, in whole 1e9 bytes, and what its layers keep."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import pytest

from trainledger.account.memory import StageMemory, stage_memory
from trainledger.facts.families import model_from_config
from trainledger.facts.model import Model
from trainledger.facts.workload import Workload
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Scenario, make_plans
from trainledger.plans.setting import make_setting

SEQ = 1024


class Printed(NamedTuple):
    """Table 4 of [zero-bubble]: most over stages. within: half a unit is what rounding hides.

    Of ZB-1p 0.4 GB more than that is not explained: it would be met if a weight waited until after the next forward.
    """

    size: str
    schedule: str
    vpp: int
    peak: int
    within: float


ROWS = (
    Printed("1.5B", "1f1b", 1, 30, 0.5),
    Printed("1.5B", "interleaved", 3, 40, 0.5),
    Printed("1.5B", "zb-1p", 1, 32, 0.95),
    Printed("1.5B", "zb-2p", 1, 59, 0.5),
    Printed("6.2B", "1f1b", 1, 39, 0.5),
    Printed("6.2B", "interleaved", 4, 48, 0.5),
    Printed("6.2B", "zb-1p", 1, 42, 0.95),
    Printed("6.2B", "zb-2p", 1, 70, 0.5),
)
SIZES = {"1.5B": (2304, 22, 24, 6), "6.2B": (4096, 30, 32, 3)}
"""Hidden size, layers, heads, sequences of a micro-batch."""


def gpt(hidden: int, layers: int, heads: int) -> Model:
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": SEQ, "vocab_size": 50304}
    return model_from_config({"model_type": "gpt2", **sizes}, name="gpt", source="tests")


def peak(size: str, schedule: str, vpp: int = 1, *, num_microbatches: int = 24, **words: object) -> StageMemory:
    hidden, layers, heads, mbs = SIZES[size]
    fork = Scenario(engine="megatron", framework_version="zero-bubble", precision="fp16", recompute="none")
    scenario = msgspec.structs.replace(fork, attention="eager", schedule=schedule, **words)
    setting = make_setting(gpt(hidden, layers, heads), Workload(seq=SEQ), scenario)
    plans = make_plans({"pp": 8, "vpp": vpp, "mbs": mbs, "num_microbatches": num_microbatches})
    return stage_memory(Inventory(setting), plans)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.size}-{row.schedule}")
def test_printed_peaks(row: Printed) -> None:
    found = peak(row.size, row.schedule, row.vpp)
    assert abs(int(found.allocated[0]) / 1e9 - row.peak) < row.within
    assert found.pp_stage[0, found.where()[1]] == 1


def test_a_layer_keeps_what_the_closed_form_says() -> None:
    hidden, _, heads, mbs = SIZES["1.5B"]
    one, two = (int(peak("1.5B", "1f1b", num_microbatches=n).saved[0, 1]) for n in (1, 2))
    sbh = SEQ * mbs * hidden
    # 34 s b h + 5 a s^2 b, and 4 bytes a token for mean and deviation of each norm instead of none
    assert two - one == 3 * (34 * sbh + 5 * heads * SEQ**2 * mbs + 16 * SEQ * mbs)


def test_what_waits_for_its_weights_keeps_factors_alone() -> None:
    hidden, _, _, mbs = SIZES["1.5B"]
    piped, late = peak("1.5B", "1f1b"), peak("1.5B", "zb-1p")
    rows = {int(stage): row for row, stage in enumerate(late.pp_stage[0])}
    middle = {int(stage): row for row, stage in enumerate(piped.pp_stage[0])}
    assert int(late.saved[0, rows[1]] - piped.saved[0, middle[1]]) == 3 * 32 * SEQ * mbs * hidden


def test_recomputing_the_scores_keeps_none_of_them() -> None:
    _, _, heads, mbs = SIZES["1.5B"]
    none, core = (
        int(peak("1.5B", "1f1b", recompute=word, num_microbatches=1).saved[0, 1]) for word in ("none", "selective")
    )
    assert none - core == 3 * 5 * heads * SEQ**2 * mbs


def test_one_buffer_for_all_scores_stays() -> None:
    found = peak("1.5B", "1f1b")
    rest = next(place for place in found.places if place.label == "between steps")
    _, _, heads, mbs = SIZES["1.5B"]
    assert set(rest.kept[0].tolist()) == {2 * heads * SEQ**2 * mbs}
