"""The traffic of a pipeline and what a schedule holds at once, as PyTorch's schedules were seen to work."""

from __future__ import annotations

import numpy as np
import pytest

from strategies import Call, calls_of, dense, one_call, plan_of, setting_of
from trainledger.account.shares import shares
from trainledger.account.traffic import all_traffic, wire_totals
from trainledger.facts.workload import Workload
from trainledger.inventory.inventory import Inventory
from trainledger.schedules import find_schedule

HIDDEN, VOCAB, SEQ = 64, 250, 1024
WORK = Workload(seq=SEQ)
X = SEQ * HIDDEN * 2
"""Bytes of one boundary tensor of one sequence."""

SCHEDULES = [("1f1b", 1), ("interleaved", 1), ("interleaved", 2), ("zero-bubble", 1), ("zero-bubble", 2)]


def boundary(schedule: str, stage: int, layout: tuple[int, ...] = (), **columns: int) -> dict[str, Call]:
    """What a stage sends and receives, as `send output` and the like."""
    setting = setting_of(
        dense(layers=8, vocab=VOCAB), WORK, engine="pytorch", schedule=schedule, recompute="none", pp_layout=layout
    )
    calls = [call for call in calls_of(setting, stage, **columns) if call.group == "pp"]
    return {f"{call.op} {call.what}": call for call in calls}


@pytest.mark.parametrize(("schedule", "vpp"), SCHEDULES)
def test_a_schedule_decides_when_and_not_how_often_a_stage_sends(schedule: str, vpp: int) -> None:
    """m = 8 micro-batches: m vpp over every boundary, m (vpp - 1) from the last stage round to the first."""
    whole, wrapped = 8 * vpp, 8 * (vpp - 1)
    for stage, forward, backward in ((0, whole, wrapped), (1, whole, whole), (3, wrapped, whole)):
        found = boundary(schedule, stage, pp=4, vpp=vpp, num_microbatches=8, mbs=2)
        expected = {
            "send output": forward,
            "recv output": backward,
            "send input gradient": backward,
            "recv input gradient": forward,
        }
        assert {what: call.count for what, call in found.items()} == {k: v for k, v in expected.items() if v}
        sent = [call.in_bytes for what, call in found.items() if what.startswith("send")]
        assert sum(sent) == (forward + backward) * 2 * X


def test_a_stage_without_layers_passes_everything_on() -> None:
    found = boundary("1f1b", 1, (4, 0, 4), pp=3, num_microbatches=4)
    assert {what: call.count for what, call in found.items()} == {
        "send output": 4,
        "recv output": 4,
        "send input gradient": 4,
        "recv input gradient": 4,
    }


@pytest.mark.parametrize(("engine", "rows"), [("pytorch", -(-VOCAB // 8)), ("torchtitan", VOCAB)])
@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_pytorch_sums_the_shard_of_a_tied_embedding(engine: str, rows: int, zero_stage: int) -> None:
    """250 rows over dp 4 x cp 2: 32 rows a rank, the last of which are padding."""
    rows = rows if zero_stage else VOCAB
    model = dense(tied=True, vocab=VOCAB)
    setting = setting_of(model, WORK, engine=engine)
    columns = {"pp": 2, "cp": 2, "dp_shard": 4, "zero_stage": zero_stage, "num_microbatches": 2}
    for stage in (0, 1):
        shared = one_call(calls_of(setting, stage, **columns), "all_reduce", "embedding")
        assert (shared.count, shared.ranks, shared.in_bytes) == (1, 2, rows * HIDDEN * 4)


def test_totals_of_many_plans_see_how_an_embedding_is_sharded() -> None:
    """Model-parallel traffic is worked out once for plans that differ in nothing that it depends on."""
    setting = setting_of(dense(tied=True, vocab=VOCAB), WORK, engine="pytorch")
    inventory = Inventory(setting)
    plans = plan_of(pp=2, dp_shard=[2, 4, 4], zero_stage=[2, 2, 0], num_microbatches=2)
    _, _, model = wire_totals(inventory, plans)
    for index in range(len(plans)):
        own = shares(inventory, plans.take(slice(index, index + 1)))
        groups = ("pp", "embedding")
        apart = sum(c.wire_bytes() for c in all_traffic(inventory, own) if c.group in groups)
        assert model[index].tolist() == np.asarray(apart)[0].tolist()


@pytest.mark.parametrize(
    ("schedule", "vpp", "batches", "held"),
    [
        ("1f1b", 1, 8, [4, 3, 2, 1]),
        ("interleaved", 1, 8, [7, 5, 3, 1]),
        ("interleaved", 2, 8, [11, 9, 7, 5]),
        ("interleaved", 2, 10, [12, 10, 8, 6]),
        ("zero-bubble", 1, 8, [4, 4, 4, 4]),
        ("zero-bubble", 2, 8, [8, 8, 8, 8]),
        ("zero-bubble", 2, 2, [4, 4, 4, 4]),
    ],
)
def test_chunks_held_at_once_are_those_of_pytorchs_orders(
    schedule: str, vpp: int, batches: int, held: list[int]
) -> None:
    """Counted in the orders that PyTorch 2.13 makes for 4 stages, from a forward to the gradients of its weights."""
    plans = plan_of(pp=4, vpp=vpp, num_microbatches=batches)
    assert find_schedule(schedule).in_flight(plans, np.arange(4)[np.newaxis])[0].tolist() == held
