"""Predicted arithmetic against what PyTorch's operations are called with, in every family."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.experimental._context_parallel import _attention as template
from torch.nn import functional

from model_cases import CASES, LENGTH, decoder_of, facts, tokens_of
from strategies import dense, plan_of, routed, setting_of
from trainledger.account.flop import OPERATIONS, attention_pairs, step_flop
from trainledger.errors import BadInput
from trainledger.facts.model import Model
from trainledger.facts.model_load import load_model
from trainledger.facts.workload import Workload
from trainledger.inventory.inventory import Inventory
from trainledger.runtime.observe.dispatch import watching
from trainledger.runtime.observe.flop import FlopCounter
from trainledger.runtime.parallelize.recompute import recomputed
from trainledger.runtime.spec import Recompute, RunSpec

UNLIKE = {"gemma2-no-caps"}
"""A config that turns the soft cap of scores off, which facts.Model does not say."""


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("case", sorted(CASES.keys() - UNLIKE))
def test_every_family_multiplies_what_is_predicted(case: str, recompute: Recompute) -> None:
    setting = setting_of(facts(case), Workload(seq=LENGTH), engine="pytorch", precision="fp32", recompute=recompute)
    plans = plan_of(mbs=2)
    decoder = decoder_of(case)
    spec = RunSpec(model=facts(case), config=CASES[case], plan=plans.row(0), seq=LENGTH, recompute=recompute)
    for path in decoder.block_paths.values():
        decoder.set_submodule(path, recomputed(decoder.get_submodule(path), spec))
    tokens, counter = tokens_of(case), FlopCounter()
    with watching(counter):
        functional.cross_entropy(decoder(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
    found = {name: int(array[0, 0]) for name, array in step_flop(Inventory(setting), plans).items()}
    assert {name: amount for name, amount in found.items() if amount} == counter.flop


def _still(*_arguments: object, **_named: object) -> SimpleNamespace:
    """A rotater that gives back what it is handed."""
    handed: list[torch.Tensor] = []
    return SimpleNamespace(exchange_buffers=handed.append, next_buffer=lambda: handed[-1])


def _always(number: int) -> Callable[[object], int]:
    return lambda _group: number


def _group(rank: int, size: int) -> dist.ProcessGroup:
    """One without a backend, which nothing is sent over."""
    return dist.ProcessGroup(rank, size)  # pyright: ignore[reportCallIssue]  # the stub knows one constructor of two


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_ring_attention_is_called_on_the_pieces_that_are_counted(cp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own template, with a kernel that notes how many queries meet how many keys."""
    seq, pairs = 4 * cp * 3, list[int]()

    def kernel(query: torch.Tensor, key: torch.Tensor, *_rest: object, **_named: object) -> tuple[torch.Tensor, ...]:
        pairs.append(query.shape[2] * key.shape[2])
        return query, query[..., 0]

    monkeypatch.setattr(template, "_create_rotater", _still)
    monkeypatch.setattr(dist, "get_world_size", _always(cp))
    own = torch.zeros(1, 1, seq // cp, 2)
    for rank in range(cp):
        monkeypatch.setattr(dist, "get_rank", _always(rank))
        pairs.clear()
        template._templated_ring_attention(_group(rank, cp), 2, kernel, own, own, own, is_causal=True)
        assert sum(pairs) == attention_pairs(seq, np.array([cp]), "ring")[0]


def flop_of(
    model: Model, engine: str = "pytorch", recompute: str = "none", /, **columns: object
) -> dict[str, list[int]]:
    """By operation, the FLOP of each distinct stage."""
    setting = setting_of(model, Workload(seq=64), engine=engine, recompute=recompute)
    found = step_flop(Inventory(setting), plan_of(**columns))
    return {name: [int(amount) for amount in array[0]] for name, array in found.items()}


def test_operations_are_all_there_and_parallelism_divides_them() -> None:
    whole = flop_of(routed())
    assert set(whole) == set(OPERATIONS)
    cut = flop_of(routed(), tp=2, etp=2)
    assert cut["grouped_matmul"] == [amount // 2 for amount in whole["grouped_matmul"]]
    assert cut["attention_forward"] == [amount // 2 for amount in whole["attention_forward"]]
    batches = flop_of(routed(), num_microbatches=3, mbs=2)
    assert batches == {name: [6 * amount for amount in amounts] for name, amounts in whole.items()}
    staged = flop_of(routed(), pp=2, num_microbatches=2)
    assert sum(staged["matmul"]) == 2 * whole["matmul"][0]
    assert flop_of(routed(), ep=2, dp_shard=2)["grouped_matmul"] == whole["grouped_matmul"]


def test_a_checkpoint_that_does_not_stop_early_runs_the_last_matrix_again() -> None:
    model = dense()
    down = 2 * 64 * 96 * 64 * model.num_layers
    early, late = (flop_of(model, engine, "full")["matmul"][0] for engine in ("pytorch", "torchtitan"))
    assert late - early == down


def test_what_does_not_fit_an_integer_is_given_in_floating_point() -> None:
    setting = setting_of(load_model("llama-3-70b"), Workload(seq=8192), engine="pytorch")
    once, often = (
        step_flop(Inventory(setting), plan_of(num_microbatches=batches))["matmul"] for batches in (1, 1 << 20)
    )
    assert (once.dtype, often.dtype) == (np.int64, np.float64)
    assert often[0, 0] == pytest.approx(float(once[0, 0]) * 2**20)


def test_state_space_mixers_are_refused() -> None:
    with pytest.raises(BadInput, match="state-space"):
        step_flop(Inventory(setting_of(load_model("nemotron-h-56b"), engine="pytorch")), plan_of())
