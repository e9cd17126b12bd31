"""A model and a plan made small enough for the ranks of one machine, by one stated rule.

What a degree or a rule divides stays divisible, and what slides, repeats or is tied goes on doing so: a proof of the
small run speaks of the same tensors and the same collectives as the large one, at other sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import lcm
from typing import Any

import msgspec

from trainledger.facts.families import model_from_config
from trainledger.facts.model import Block, Model
from trainledger.facts.shrink import MULTIPLE, Demand, shorten_config, shrink_config
from trainledger.plans import sharding
from trainledger.plans.plan import make_plans
from trainledger.plans.setting import Setting

RULE = (
    "The family, every kind of block, the names of all tensors, all degrees and the experts of a token stay. Layers: "
    "the first ones, two at least, that show every kind and give each pipeline stage one, with one to spare where they "
    "did not divide. Heads become few and 8 features wide, KV heads in their ratio; hidden size, networks, low ranks "
    "and vocabulary are divided by one factor; experts become as few as the ranks and the router need. What tp, ep, cp "
    "or a cut of experts divides stays a multiple of it; under an FP8 recipe heads are 16 wide, and sides of matrices "
    "multiples of 16, of the ranks too that gather them in FP8. The sequence has 32 tokens or a few more, and windows "
    "and learned positions are shortened with it; a micro-batch has at most 2 sequences, and a step 2 micro-batches "
    "for each pipeline stage. A model of at most 2 million parameters keeps its sizes."
)
"""The rule, as answers say it."""

SMALL = 2_000_000
"""A model of at most so many parameters keeps its sizes."""
LAYERS = 2
"""One layer would not show what is counted for each."""
TOKENS = 32
MOST_MBS = 2


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A size, as it was and as it is now."""

    what: str
    before: int
    after: int


class Shrunken(msgspec.Struct, frozen=True, kw_only=True):
    """How a run was made smaller: the rule, by what the hidden size was divided, every size that changed."""

    rule: str
    factor: float
    changes: tuple[Change, ...]


class Small(msgspec.Struct, frozen=True, kw_only=True):
    """A run at smaller sizes: the config and what is built from it, and what of workload and plan changed with it."""

    config: dict[str, Any]
    model: Model
    seq: int
    mbs: int
    num_microbatches: int
    pp_layout: tuple[int, ...]


def shrink(config: Mapping[str, Any], setting: Setting, row: Mapping[str, int]) -> Small:
    """The run of a legal plan, given as the row of a Plans, at sizes that a test could use; see RULE."""
    model, workload = setting.model, setting.workload
    multiple = _multiple(setting, row)
    unit = lcm(2 * row["cp"] * row["tp"], row["cp"] * multiple if multiple > MULTIPLE else 1)
    seq = min(workload.seq, -(-TOKENS // unit) * unit)
    layout = _fewer(setting.scenario.pp_layout)
    demand = _demand(setting, row, seq, sum(layout))
    smaller = shorten_config if model.total_params <= SMALL else shrink_config
    small = smaller(config, model, demand)
    built = model_from_config(small, name=model.name, source=model.source)
    same = built.num_layers == model.num_layers
    return Small(
        config=small,
        model=built,
        seq=seq,
        mbs=row["mbs"] if multiple > MULTIPLE and seq % unit else min(row["mbs"], MOST_MBS),
        num_microbatches=min(row["num_microbatches"], max(2, 2 * row["pp"])),
        pp_layout=setting.scenario.pp_layout if same else _filled(layout, setting.scenario.pp_layout, built.num_layers),
    )


def _demand(setting: Setting, row: Mapping[str, int], seq: int, layers: int) -> Demand:
    """What the plan asks of the sizes; `layers` are those that a layout needs, 0 without one."""
    chunks, tp, ep = row["pp"] * row["vpp"], row["tp"], row["ep"]
    spare = int(chunks > 1 and setting.model.num_layers % chunks > 0)
    local = min((block.moe.experts // ep for block in setting.model.blocks if block.moe is not None), default=0)
    divided = local and row["zero_stage"]
    sharing = int(sharding.shard_group(make_plans(row), expert=True)[0]) if divided else 1
    return Demand(
        tp=tp,
        ep=ep,
        least=layers or max(LAYERS, chunks + spare),
        # as many as the ranks that share them, or their rows are cut, here as there
        local=1 if sharing > local else max(sharing, min(2, local)),
        rows=sharing if sharing > local else 1,
        multiple=_multiple(setting, row),
        seq=seq,
        before=setting.workload.seq,
    )


def _multiple(setting: Setting, row: Mapping[str, int]) -> int:
    """Of every side of a matrix on a rank: what rules ask of an FP8 recipe."""
    if setting.precision is None or not setting.precision.fp8:
        return MULTIPLE
    gathered = setting.recipe.gathered == "fp8" and row["zero_stage"]
    sharing = int(sharding.shard_group(make_plans(row), expert=False)[0]) if gathered else 1
    return lcm(setting.recipe.gemm_multiple, sharing)


def _fewer(layout: tuple[int, ...]) -> tuple[int, ...]:
    """Layers of each stage by rank among them, so that what held more still does.

    >>> _fewer((9, 8, 8, 0, 7))
    (3, 2, 2, 0, 1)
    """
    sizes = sorted(set(layout) | {0})
    return tuple(sizes.index(count) for count in layout)


def _filled(layout: tuple[int, ...], before: tuple[int, ...], layers: int) -> tuple[int, ...]:
    """The layout with layers added where most are missing, until there are as many as the model has."""
    out = list(layout)
    while out and sum(out) < layers:
        out[max(range(len(out)), key=lambda stage: before[stage] - out[stage])] += 1
    return tuple(out)


def shrunken(setting: Setting, row: Mapping[str, int], small: Small) -> Shrunken | None:
    """What became smaller of a run, the hidden size first; None where nothing did."""
    found = _changes(setting, row, small)
    factor = setting.model.hidden_size / small.model.hidden_size
    return Shrunken(rule=RULE, factor=factor, changes=found) if found else None


def _changes(setting: Setting, row: Mapping[str, int], small: Small) -> tuple[Change, ...]:
    pairs = [*_pairs(setting.model, small.model)]
    pairs += [
        ("seq", setting.workload.seq, small.seq),
        ("mbs", row["mbs"], small.mbs),
        ("micro-batches", row["num_microbatches"], small.num_microbatches),
        ("parameters", setting.model.total_params, small.model.total_params),
    ]
    return tuple(Change(what=what, before=a, after=b) for what, a, b in pairs if a != b)


def _pairs(before: Model, after: Model) -> Iterable[tuple[str, int, int]]:
    yield "hidden", before.hidden_size, after.hidden_size
    yield "layers", before.num_layers, after.num_layers
    yield "vocabulary", before.vocab_size, after.vocab_size
    seen: set[str] = set()
    blocks = {block.kind: block for block in after.blocks}
    for block in before.blocks:
        for name, one in _numbers(block):
            other = dict(_numbers(blocks[block.kind])).get(name, one)
            if name not in seen:
                seen.add(name)
                yield name, one, other


def _numbers(block: Block) -> list[tuple[str, int]]:
    """The sizes of a kind of block, in words."""
    found: list[tuple[str, int]] = []
    if (attention := block.attention) is not None:
        found += [("heads", attention.heads), ("KV heads", attention.kv_heads), ("head size", attention.qk_head_dim)]
        found += [("window", attention.window)] if attention.window else []
    if block.mlp is not None:
        found.append(("network", block.mlp.intermediate))
    if block.moe is not None:
        found += [("experts", block.moe.experts), ("expert width", block.moe.intermediate)]
    return found
