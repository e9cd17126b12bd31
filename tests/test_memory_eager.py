"""The ledger of this package's own program: no process is started, and what `prove` predicts for a rank is the same."""

from __future__ import annotations

from typing import Any

import pytest

from model_cases import CASES, LENGTH, facts
from strategies import plan_of, setting_of
from trainledger.account.memory.active import active
from trainledger.account.memory.reserved.replay import events_of
from trainledger.account.memory.stage import stage_memory
from trainledger.account.rank import rank_lines
from trainledger.account.rank_memory import PEAK, SAVED, with_memory
from trainledger.facts.model_load import load_model
from trainledger.facts.presumed import presumed
from trainledger.facts.semantics import Semantics
from trainledger.facts.workload import Workload
from trainledger.inventory.blocks.eager import Eager
from trainledger.inventory.blocks.sizes import Sizes
from trainledger.inventory.inventory import Inventory
from trainledger.inventory.tape import Tape, walk
from trainledger.plans.ranks import place_of, world_size
from trainledger.runtime.model.read import read_semantics
from trainledger.service.prove import check_runtime
from trainledger.service.prove_plan import planned
from trainledger.service.prove_request import Request

SHARDED: dict[str, Any] = {"dp": 2, "zero": 3}
LOSS = 2 * 4
"""Bytes of a loss, and of its share of a step's: the ledger counts neither, nor tokens and labels."""


class Both:
    """The same plan for `prove` and for the ledger."""

    def __init__(self, model: str, **flags: Any) -> None:  # noqa: ANN401 - of a Request
        self.plan = planned(Request(model=model, **flags))
        self.inventory, self.plans = Inventory(self.plan.run.setting), self.plan.plans
        self.rules = check_runtime(self.plan)

    def proven(self, line: str, rank: int = 0) -> int:
        found = rank_lines(self.inventory, self.plans, rank, clips=False)
        return with_memory(found, self.inventory, self.plans, self.rules, clips=False, dry=True).alive[line].amount

    @property
    def batch(self) -> int:
        """Tokens and labels of a step, of all ranks that divide its sequences."""
        plan = self.plan.spec.plan
        own = plan["mbs"] * plan["num_microbatches"] * plan["dp_shard"] * plan["dp_replicate"]
        return 2 * own * self.plan.spec.seq // plan["cp"] * 8

    @property
    def saved(self) -> int:
        return int(active(self.inventory, self.plans).saved.max())

    def held(self, rank: int) -> tuple[int, int]:
        """What a rank's stage has alive at most: by the places of a step, and as a run asks for it."""
        stages, pp_stage = stage_memory(self.inventory, self.plans), place_of(self.plan.spec.plan, rank).pp
        row = [*stages.pp_stage[0]].index(pp_stage)
        alive, most, sizes = 0, 0, dict[int, int]()
        for op, name, nbytes, _ in events_of(self.inventory, self.plans, row):
            alive += nbytes if op == "alloc" else -sizes.pop(name)
            if op == "alloc":
                sizes[name] = nbytes
            most = max(most, alive)
        return max(int(stages.total(index)[0, row]) for index in range(len(stages.places))), most


def test_a_multi_token_prediction_depth_keeps_as_much_as_a_layer_like_it() -> None:
    model = load_model("deepseek-v3")
    without, deeper = (
        active(Inventory(setting_of(model, Workload(seq=64, mtp=mtp), engine="pytorch", recompute="none")), plan_of())
        for mtp in (False, True)
    )
    assert deeper.saved.max() > without.saved.max()


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        ("llama-3-8b", SHARDED),
        ("llama-3-8b", {"dp": 2, "zero": 1}),
        ("llama-3-8b", {**SHARDED, "precision": "bf16"}),
        ("llama-3-8b", {"tp": 2, "dp": 2}),
        ("llama-3-8b", {"tp": 2, "sp": False, **SHARDED}),
        ("llama-3.2-1b", SHARDED),
        ("qwen2.5-0.5b", {"dp": 2, "zero": 0}),
        ("qwen3-8b", {**SHARDED, "precision": "bf16"}),
        ("mixtral-8x7b", SHARDED),
        ("mixtral-8x7b", {"dp": 2, "ep": 2, "zero": 3}),
        ("deepseek-v3", {**SHARDED, "precision": "bf16"}),
        ("gemma-2-2b", SHARDED),
        ("opt-125m", SHARDED),
    ],
)
def test_what_waits_for_the_backward_is_what_a_proof_expects(model: str, flags: dict[str, Any]) -> None:
    both = Both(model, **flags)
    assert both.saved == both.proven(SAVED) - both.batch - LOSS


def test_a_ring_keeps_as_much_on_every_rank_but_the_last_which_no_ledger_tells_apart() -> None:
    both = Both("llama-3-8b", cp=2)
    assert both.saved == both.proven(SAVED, 0) - both.batch - LOSS > both.proven(SAVED, 1)


def test_where_layers_run_again_positions_wait_for_them_which_a_ledger_does_not_count() -> None:
    both = Both("llama-3-8b", recompute="full", **SHARDED)
    assert both.saved == both.proven(SAVED) - both.batch - LOSS - 8 * both.plan.spec.seq


FULL: dict[str, Any] = {"dry": True, "full_size": True, "seq": 4096}


@pytest.mark.parametrize(
    ("flags", "rel"),
    [
        ({"dp": 8, "zero": 3, "gbs": 16, "precision": "bf16"}, 0.01),
        ({"dp": 8, "zero": 3, "gbs": 16, "precision": "bf16", "recompute": "full"}, 0.01),
        ({"dp": 8, "zero": 2, "gbs": 16}, 0.01),
        ({"dp": 8, "zero": 1, "gbs": 16}, 0.01),
        ({"dp": 8, "zero": 0, "gbs": 8, "precision": "bf16"}, 0.01),
        ({"tp": 8}, 0.01),
        ({"pp": 4, "gbs": 8, "schedule": "1f1b"}, 0.01),
        ({"pp": 2, "vpp": 2, "gbs": 8, "schedule": "interleaved"}, 0.01),
        # the places of a step count what waits for gradients of weights by whole chunks
        ({"pp": 2, "schedule": "zero-bubble"}, 0.02),
    ],
)
def test_a_run_of_full_size_has_as_much_alive_as_a_proof_expects(flags: dict[str, Any], rel: float) -> None:
    both = Both("llama-3-8b", **FULL, **flags)
    for rank in (0, world_size(both.plan.spec.plan) - 1):
        assert both.held(rank) == pytest.approx([both.proven(PEAK, rank)] * 2, rel=rel)


OFF = {"gemma2-no-caps": 1.37, "gpt2-by-layer": 1.1, "olmo": 0.89, "phi-qk-norm": 1.08}
"""Configs that differ from their family in what only a config says: caps, an activation, a clamp, how heads turn."""


@pytest.mark.parametrize("case", CASES)
def test_shapes_and_the_family_tell_what_a_forward_keeps(case: str) -> None:
    model = facts(case)
    sizes = Sizes(
        setting_of(model, Workload(seq=LENGTH), engine="pytorch", precision="bf16", recompute="none"), plan_of()
    )

    def kept(rules: Semantics) -> int:
        made: Eager[Tape] = Eager(sizes, rules, walk)
        layers = (made.layer(block, layer).saved for block in model.blocks for layer in block.layers)
        return int(sum(layers, made.embedding().saved + made.final().saved)[0])

    found = kept(presumed(model)) / kept(read_semantics(model, CASES[case]))
    assert found == pytest.approx(OFF.get(case, 1), abs=0.035 if case not in OFF else 0.01)
