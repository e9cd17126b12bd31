"""Ranks over gloo against what was predicted of each: every line equal, and nothing left over."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from model_cases import CASES, LENGTH, facts
from strategies import plan_of, setting_of
from trainledger.account.rank import rank_lines
from trainledger.facts.workload import Workload
from trainledger.inventory.inventory import Inventory
from trainledger.reconcile.proof import proof
from trainledger.reconcile.verdict import Proof
from trainledger.runtime.launch import run_local
from trainledger.runtime.spec import RunSpec

Run = tuple[str, dict[str, object], dict[str, Any]]
"""A case, the columns of a plan, and what else a RunSpec is told."""


def proven(case: str, columns: dict[str, object], told: dict[str, Any]) -> Proof:
    """A run of a case and its predictions."""
    plans = plan_of(**columns)
    spec = RunSpec(model=facts(case), config=CASES[case], plan=plans.row(0), seq=LENGTH)
    spec = msgspec.structs.replace(spec, **told)
    names = ("precision", "optimizer", "recompute", "schedule", "cp_comm")
    scenario = {name: getattr(spec, name) for name in names}
    inventory = Inventory(setting_of(spec.model, Workload(seq=spec.seq), engine="pytorch", **scenario))
    seen = run_local(spec, timeout_s=120)
    return proof([(rank_lines(inventory, plans, one.rank), one) for one in seen])


def check(run: Run) -> None:
    found = proven(*run)
    assert [line for line in found.lines if line.verdict in ("differs", "missing")] == []
    assert found.unexplained.items == ()
    assert found.verdict == "proven"


QUICK: list[Run] = [
    ("llama", {"dp_shard": 3, "zero_stage": 1, "num_microbatches": 2}, {"precision": "bf16", "recompute": "full"}),
    ("mixtral", {"dp_shard": 2, "ep": 2, "etp": 1, "zero_stage": 0, "num_microbatches": 2}, {}),
]

PROOF: list[Run] = [
    *(
        ("llama", {"dp_shard": 3, "zero_stage": zero_stage, "num_microbatches": 2}, {"precision": precision})
        for zero_stage in (0, 1, 2, 3)
        for precision in ("fp32", "bf16")
    ),
    ("llama", {"dp_shard": 1, "zero_stage": 2, "num_microbatches": 2}, {"precision": "bf16"}),
    ("llama", {"dp_shard": 1, "zero_stage": 1, "num_microbatches": 2}, {"optimizer": "sgd"}),
    ("llama", {"dp_shard": 2, "dp_replicate": 2, "zero_stage": 3}, {"optimizer": "sgd-momentum"}),
    ("llama", {"dp_replicate": 2, "zero_stage": 1}, {"precision": "bf16", "optimizer": "adamw-fused"}),
    ("llama", {"dp_shard": 2, "cp": 2, "zero_stage": 2, "num_microbatches": 2}, {"recompute": "full"}),
    ("llama", {"cp": 3, "zero_stage": 0}, {"cp_comm": "all_gather"}),
    ("llama", {"tp": 2, "sp": 1, "dp_shard": 3, "zero_stage": 3}, {}),
    ("gemma", {"dp_shard": 3, "zero_stage": 3, "num_microbatches": 2}, {}),
    ("opt", {"dp_shard": 2, "zero_stage": 3, "num_microbatches": 2}, {}),
    ("stablelm-parallel-qk-norm", {"dp_shard": 3, "zero_stage": 3}, {}),
    ("gpt_oss", {"dp_shard": 8, "zero_stage": 3}, {}),
    ("gpt_oss", {"dp_shard": 2, "dp_replicate": 2, "ep": 2, "etp": 1, "zero_stage": 1}, {"precision": "bf16"}),
    ("deepseek_v3", {"dp_shard": 4, "ep": 2, "etp": 1, "zero_stage": 3}, {"recompute": "full"}),
    ("llama", {"pp": 3, "zero_stage": 3, "num_microbatches": 4}, {"precision": "bf16", "recompute": "full"}),
    ("gemma", {"pp": 2, "dp_shard": 2, "zero_stage": 3, "num_microbatches": 2}, {}),
]


@pytest.mark.parametrize("run", QUICK, ids=str)
def test_every_line_of_every_rank_is_as_predicted(run: Run) -> None:
    check(run)


@pytest.mark.proof
@pytest.mark.parametrize("run", PROOF, ids=str)
def test_every_line_of_every_rank_is_as_predicted_under_every_wrapping(run: Run) -> None:
    check(run)
