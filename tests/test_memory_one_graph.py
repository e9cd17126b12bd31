"""A step that is one graph of operations: what its units ask for, in which order, all on one stream.

Units and parts are those of the tests of FSDP2, whose order this one differs from.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from strategies import llama, plan_of, routed
from test_memory_fsdp2_run import part, unit
from test_memory_replay import inventory_of, ratio
from trainledger.account.memory.reserved.engines.fsdp2 import Unit
from trainledger.account.memory.reserved.engines.one_graph import OneGraphRun
from trainledger.account.memory.reserved.replay import events_of
from trainledger.account.memory.reserved.run import COMPUTE, Requests
from trainledger.facts.model_load import load_model
from trainledger.inventory.blocks import parts_of

GRAPH = {"engine": "torchtitan", "framework_version": "graph-trainer"}


class Asked:
    """A run of parts with a unit each: what it asks for and lets go of, in bytes."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.layers = [part(key, 20 * 10**key, loss=key == len(units) - 1) for key in range(len(units))]
        self.requests = Requests()
        self.run = OneGraphRun(self.requests, dict(enumerate((u,) for u in units)))
        self.sizes: dict[int, int] = {}

    def since(self, start: int) -> list[int]:
        found: list[int] = []
        for op, name, nbytes, stream in self.requests.events[start:]:
            assert op == "free" or stream == COMPUTE
            self.sizes.setdefault(name, nbytes)
            found.append(nbytes if op == "alloc" else -self.sizes[name])
        return found

    def forward(self, key: int) -> list[int]:
        start = len(self.requests.events)
        self.run.before_forward(self.layers[key])
        self.run.after_forward(self.layers[key])
        return self.since(start)

    def backward(self, key: int) -> list[int]:
        start = len(self.requests.events)
        layer = self.layers[key]
        self.run.before_backward(layer)
        sizes = [nbytes for _, nbytes in layer.script.gradients]
        self.run.after_backward(layer, self.requests.alloc(sizes), last=True)
        return self.since(start)


def test_the_buffer_of_the_next_unit_is_there_before_this_one_is_copied_out() -> None:
    asked = Asked([unit(1), unit(10), unit(100, kept=True)])
    # own buffer, the next one's, two tensors, the buffer goes, and so do they
    assert asked.forward(0) == [2, 20, 1, 1, -2, -1, -1]
    assert asked.forward(1) == [200, 10, 10, -20, -10, -10]
    # nothing follows the last
    assert asked.forward(2) == [100, 100, -200]


def test_the_input_of_a_reduction_stays_until_the_next_has_begun() -> None:
    asked = Asked([unit(1), unit(10), unit(100)])
    for key in range(3):
        asked.forward(key)
    asked.backward(2)
    # the second's buffer is there, its gradient goes, its shard is made, and the third's buffer goes
    assert asked.backward(1)[-6:] == [-10, -10, 40, -200, 10, -400]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", ["8b", "3.2-1b"])
def test_a_replayed_run_has_alive_what_the_places_of_a_step_come_to(name: str, recompute: str) -> None:
    model = llama("8b") if name == "8b" else load_model(f"llama-{name}")
    inventory = inventory_of(model, seq=4096, recompute=recompute, **GRAPH)
    for columns in ({"dp_shard": 8}, {"dp_shard": 2, "num_microbatches": 2}):
        assert ratio(inventory, plan_of(zero_stage=3, **columns)) == pytest.approx(1, abs=2e-4)


def test_all_is_asked_for_on_one_stream() -> None:
    plans = plan_of(dp_shard=8, ep=4, zero_stage=3)
    streams = {
        release: {
            event[3]
            for event in events_of(inventory_of(routed(), engine="torchtitan", framework_version=release), plans, 0)
        }
        for release in ("graph-trainer", "2026-06")
    }
    assert streams["graph-trainer"] == {COMPUTE}
    assert len(streams["2026-06"]) == 3


def test_gradients_are_as_wide_as_their_reduction() -> None:
    plans = plan_of(dp_shard=8, zero_stage=3)
    widths = [
        parts_of(inventory_of(llama("8b"), recompute="full", engine="torchtitan", framework_version=release), plans)
        .blocks[0]
        .weight_gradients.max()
        for release in ("graph-trainer", "2026-06")
    ]
    assert widths[0] == 2 * widths[1]


def test_scores_multiply_what_experts_give_row_by_row_in_four_copies_in_fp32() -> None:
    """Rows, the gradient of their product, and the two gradients that its backward makes of it."""
    plans = plan_of(dp_shard=8, ep=4, zero_stage=3, mbs=64)
    alive = {}
    for release in ("2026-06", "2026-03", "2025-10"):
        inventory = inventory_of(routed(), engine="torchtitan", framework_version=release, recompute="none")
        tape = parts_of(inventory, plans).blocks[0]
        names = {name for _, name in tape.instants}
        at = tape.instants.index(("backward", "rows times scores" if "rows times scores" in names else "weighed sum"))
        rows = next(int(tape.bytes[i, 0]) for i, s in enumerate(tape.storages) if s.name == "rows in fp32")
        alive[release] = sum(nbytes == rows for _, _, nbytes in tape.at(at))
    assert alive == {"2026-06": 4, "2026-03": 2, "2025-10": 4}
