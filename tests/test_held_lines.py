"""Lines of what is held: those at the peak add up to it, and a formula comes to the amount of its line."""

import math
import re

import numpy as np
import pytest

from strategies import plan_of, setting_of
from trainledger.account.ledger import entry
from trainledger.account.memory import Meter, alive_at, beside
from trainledger.account.memory.answers.breakdown import breakdown
from trainledger.account.peak import by_basis
from trainledger.facts.presets import load_preset
from trainledger.inventory.blocks import MANNERS, SOURCES
from trainledger.inventory.inventory import Inventory
from trainledger.lines import Line

PARTS = ("weights", "gradients", "optimizer", "saved", "working", "passing", "beside", "unused")
SIZE = re.compile(
    r"(?:(\d+) x )?([\d,]+) elements x ([\d.]+) B \(\w+\)(?: over (\d+))?, cut \w+(?:, ([\d,]+) elements)?"
)
KEPT = re.compile(r"(\d+) micro-batch(?:es)? in flight x (\d+) layers? x ([\d,]+) B(?: ([+-]) ([\d,]+) B)?")
STORAGES = re.compile(r"(?:(\d+) x )?([\d,]+) B(?:, ([\d,]+) B a token of ([\d,]+))?; ")


def held(engine: str, model: str = "llama-3-8b", *, recompute: str = "full", **plan: int) -> tuple[int, list[Line]]:
    """(what is allocated and lies beside it, the lines of what is held)."""
    inventory = Inventory(setting_of(load_preset(model), engine=engine, recompute=recompute))
    plans = plan_of(**plan)
    found = entry(inventory, plans)
    whole = found.peak.total_bytes + sum(one.amount for one in beside(inventory, plans))
    return whole, [line for line in found.lines if line.id.startswith("held/")]


@pytest.mark.parametrize("engine", ["paper", "pytorch", "torchtitan", "megatron", "deepspeed"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_lines_at_the_peak_sum_to_what_the_card_holds(engine: str, recompute: str, zero_stage: int) -> None:
    if engine == "torchtitan" and zero_stage == 1:
        return
    whole, lines = held(engine, recompute=recompute, tp=2, dp_shard=8, zero_stage=zero_stage, num_microbatches=4)
    assert sum(line.amount for line in lines if line.at_peak) == whole


LATE = {
    "the second block": ("olmo-2-7b", {"dp_shard": 1, "mbs": 2}),
    "the embedding of a pipeline": ("llama-3-8b", {"pp": 8, "dp_shard": 4}),
    "tensor parallel": ("gpt-neox-20b", {"tp": 2, "dp_shard": 2, "sp": 1}),
    "the output layer's are there": ("gpt2", {"dp_shard": 2}),
    "micro-batches": ("llama-3-8b", {"dp_shard": 2, "num_microbatches": 4}),
}


@pytest.mark.parametrize("name", LATE)
@pytest.mark.parametrize("zero_stage", [0, 2, 3])
@pytest.mark.parametrize("engine", ["torchtitan", "pytorch"])
def test_nothing_is_held_that_is_less_than_nothing(name: str, zero_stage: int, engine: str) -> None:
    """Gradients that are yet to come are taken off gradients, and not off what passes: lines, storages, bars, bases."""
    model, columns = LATE[name]
    inventory = Inventory(setting_of(load_preset(model), engine=engine, recompute="full"))
    plans = plan_of(**{"zero_stage": zero_stage, **columns})
    found = entry(inventory, plans)
    lines = [line for line in found.lines if line.id.startswith("held/")]
    whole = found.peak.total_bytes + sum(one.amount for one in beside(inventory, plans))
    assert [line.id for line in lines if line.amount < 0] == []
    assert sum(line.amount for line in lines if line.at_peak) == whole
    for index in range(len(found.stages.places)):
        for row in np.flatnonzero(found.stages.total(index)[0]).tolist():
            alive = alive_at(found.stages, index, row)
            assert min(one.amount for one in alive) > 0
            assert sum(one.amount for one in alive) == found.stages.total(index)[0, row]
    held = by_basis(inventory, plans, found.peak)
    assert (min(held.values()) > 0, sum(held.values())) == (True, found.peak.total_bytes)
    for stage in breakdown(found.stages, None, {"allocated": Meter(estimate=0, lower=0, upper=0)}):
        assert all(getattr(stage, part) >= 0 for part in PARTS)


def test_what_passes_is_listed_once() -> None:
    """FSDP2's gathered unit is part of what passes where most is held, and no line beside it."""
    _, lines = held("torchtitan", dp_shard=8, zero_stage=3)
    names = [line.id.split("/")[2] for line in lines if line.id.startswith("held/buffers/")]
    assert names == ["gathered and on its way", "workspaces"]


@pytest.mark.parametrize(("engine", "zero_stage"), [("pytorch", 3), ("megatron", 1), ("deepspeed", 2)])
def test_elements_times_bytes_over_ranks_are_the_amount(engine: str, zero_stage: int) -> None:
    _, lines = held(engine, dp_shard=8, zero_stage=zero_stage)
    checked = 0
    for line in lines:
        if found := SIZE.match(line.formula):
            copies, elements, width, over, most = (float((group or "1").replace(",", "")) for group in found.groups())
            share = elements / over if found[5] is None else min(elements / over, most)
            assert line.amount == pytest.approx(copies * share * width, rel=1e-6), line
            checked += 1
    assert checked >= 3


@pytest.mark.parametrize(("pp", "recompute"), [(1, "full"), (4, "none")])
def test_what_is_kept_is_layers_times_micro_batches_in_flight(pp: int, recompute: str) -> None:
    _, lines = held("megatron", recompute=recompute, pp=pp, dp_shard=8, zero_stage=1, num_microbatches=8)
    kept = next(line for line in lines if line.id.endswith("/saved for backward"))
    found = KEPT.match(kept.formula)
    assert found is not None, kept.formula
    batches, layers, each = (int(number.replace(",", "")) for number in found.group(1, 2, 3))
    assert (batches, layers) == (min(8, pp), 32 // pp)
    more = int((found[5] or "0").replace(",", "")) * (-1 if found[4] == "-" else 1)
    assert batches * layers * each + more == kept.amount


def test_a_storage_says_how_many_alike_and_of_how_many_bytes() -> None:
    _, lines = held("megatron", "llama-3-70b", recompute="none", tp=8, pp=4, dp_shard=2, num_microbatches=8)
    activations = [line for line in lines if line.id.startswith("held/activations/") and "saved" not in line.id]
    assert len(activations) > 3
    for line in activations:
        found = STORAGES.match(line.formula)
        assert found is not None, line.formula
        count, size, token, tokens = (int((number or "1").replace(",", "")) for number in found.groups())
        assert count * size == line.amount
        assert math.isclose(token * tokens, size) or found[3] is None
        assert line.cites == ("megatron", "te")


def test_communicators_say_their_counts() -> None:
    _, lines = held("megatron", tp=2, pp=2, dp_shard=8, zero_stage=1, num_microbatches=8)
    opened = next(line for line in lines if line.id.startswith("held/beside/communicators"))
    assert opened.formula.startswith("2 communicators of 688 MiB, 2 between two ranks of 544 MiB")
    context = next(line for line in lines if line.id == "held/beside/context")
    assert "measured from 400 MiB to 1024 MiB" in context.formula


def test_every_manner_of_running_a_model_says_where_it_was_read() -> None:
    assert set(SOURCES) == set(MANNERS)
