"""Arithmetic of one optimizer step on one rank of each pipeline stage: FLOP by kind of operation.

A multiply-add is two FLOP. A matrix is multiplied three times per token: forward, for the gradient of its input (the
embedding is trained, so the first block's input has one too), for its own gradient; one that runs forward again, with
its block or by itself (account/again.py), four times. Attention counts every pair of a query and a key that its kernels
are called with, whether the causal mask hides it or not: two products forward and five backward, which forms the scores
again. Norms, activations, routing and the loss are not counted. This is what torch.utils.flop_counter counts. [torch:
utils/flop_counter.py, sdpa_flop_count, sdpa_backward_flop_count]
"""

from __future__ import annotations

import dataclasses

import numpy as np

from trainledger.account.again import attention_again, matrices_again, spared_matrix
from trainledger.account.shares import Shares, shares
from trainledger.account.traffic.step import Step
from trainledger.arrays import FloatArray, IntArray, ceil_div
from trainledger.errors import BadInput
from trainledger.facts.model import Attention
from trainledger.inventory.inventory import Inventory
from trainledger.inventory.tensors import BoolArray
from trainledger.plans.plan import Plans

OPERATIONS = ("matmul", "grouped_matmul", "attention_forward", "attention_backward")
"""grouped_matmul: the matrices of routed experts; under expert parallelism what balanced routing makes of them."""

Flop = dict[str, "IntArray | FloatArray"]

EXACT = 2**62
"""What passes this is given in floating point."""


class _Pass(Step):
    """The sizes of a step, the kinds of layer by slot, and the shares of what runs forward again alone."""

    def __init__(self, inventory: Inventory, own: Shares) -> None:
        super().__init__(inventory, own)
        self.kinds = inventory.layers
        counts = np.zeros_like(own.counts)
        counts[:, :, [slot for slot, _ in inventory.layers]] = self.again
        self.repeated = dataclasses.replace(own, counts=counts)


def step_flop(inventory: Inventory, plans: Plans) -> Flop:
    """FLOP of one optimizer step by operation, [plans, rows]; the rows are those of `shares`.

    >>> from trainledger.facts.model_load import load_model
    >>> from trainledger.facts.workload import Workload
    >>> from trainledger.plans.plan import Scenario, make_plans
    >>> from trainledger.plans.setting import make_setting
    >>> scenario = Scenario(engine="pytorch", recompute="full")
    >>> for name in ("llama-3-8b", "llama-3-70b"):
    ...     setting = make_setting(load_model(name), Workload(seq=8192), scenario)
    ...     int(step_flop(Inventory(setting), make_plans({"dp_shard": 64, "zero_stage": 3}))["matmul"][0, 0])
    452431854960640
    4229786872315904
    """
    return flop_of(inventory, shares(inventory, plans))


def flop_of(inventory: Inventory, own: Shares) -> Flop:
    """The same of shares already worked out."""
    blocks = [block for _, block in inventory.layers]
    unaccounted = inventory.setting.model.unaccounted
    if unaccounted:
        raise BadInput(
            f"{inventory.setting.model.name} has {' and '.join(unaccounted)}, whose arithmetic is not counted; "
            "choose a model whose blocks have attention"
        )
    without = sorted({block.kind for block in blocks if block.ssm is not None})
    if without:
        raise BadInput(
            f"{inventory.setting.model.name} has blocks of kind {', '.join(without)}: the arithmetic of state-space "
            "mixers is not counted; choose a model whose blocks have attention"
        )
    step = _Pass(inventory, own)
    passes = step.tokens[:, None] * step.batches
    forward, backward = _attention(step)
    plain_forward, plain_backward = _attention(step, plain=True)
    per_token = {"matmul": _dense(step), "grouped_matmul": _routed(step)}
    found: Flop = {name: _product(2 * amount, passes) for name, amount in per_token.items()}
    batches = step.batches * np.ones_like(passes)
    found["matmul"] = found["matmul"] + _product(plain_forward + plain_backward, batches)
    found["attention_forward"] = _product(forward, batches)
    found["attention_backward"] = _product(backward, batches)
    return found


def _product(amount: IntArray, times: IntArray) -> IntArray | FloatArray:
    """Amount x times: exact, or in floating point where some row would not fit."""
    if float(amount.max()) * float(times.max()) < EXACT:
        return amount * times
    return amount.astype(np.float64) * times


def _dense(step: _Pass) -> IntArray:
    """[plans, rows]: multiply-adds per token and micro-batch with matrices that every token meets."""
    own, table = step.own, step.own.table
    elements = own.few.numel * own.few.copies
    met = table.multiplied & ~table.expert
    inside = (table.slots != table.at.embedding) & (table.slots != table.at.final)
    forward = own.total_few(elements * met) + _borrowed_heads(step, elements)
    trained = own.total_few(elements * (met & table.trainable)) + _borrowed_heads(step, elements)
    again = step.repeated.total_few(elements * (met & inside & ~_spared(step)))
    return 2 * forward + trained + again + own.total_few(elements * (met & _selected(step)))


def _borrowed_heads(step: _Pass, elements: IntArray) -> IntArray:
    """[plans, rows]: elements of output layers that are not counted as their own tensor, each time they are used.

    A tied one is the embedding, or on the last pipeline stage the copy of it; a multi-token-prediction depth uses the
    model's own.
    """
    own, table = step.own, step.own.table
    counts = own.counts[:, :, table.at.final] * int(step.model.tied) + own.counts[:, :, table.at.mtp]
    heads = table.vocab & (table.multiplied if not step.model.tied else table.slots == table.at.embedding)
    return counts * (elements * heads).sum(axis=1)[own.kind][:, None]


def _routed(step: _Pass) -> IntArray:
    """[plans, rows]: multiply-adds per token and micro-batch with matrices of routed experts, of which it visits top_k.

    A block that is recomputed whole runs all of them again: what experts give is kept for the gradient of the router's
    weights.
    """
    own, table = step.own, step.own.table
    visits = np.zeros(len(table.names), dtype=np.int64)
    for slot, block in step.kinds:
        if block.moe is not None:
            visits[table.slots == slot] = block.moe.top_k
    met = table.multiplied & table.expert
    forward = own.total_few(own.few.numel * visits * met)
    trained = own.total_few(own.few.numel * visits * (met & table.trainable))
    again = step.repeated.total_few(own.few.numel * visits * met)
    return 2 * forward + again + own.total_few(own.few.numel * visits * (met & _selected(step))) + trained


def _selected(step: _Pass) -> BoolArray:
    """[T]: matrices that selective recomputation multiplies again."""
    table = step.own.table
    chosen = np.zeros(len(table.names), dtype=bool)
    for slot, block in step.kinds:
        names = tuple(f".{name.replace('{e}', '*')}" for name in matrices_again(step.setting, block))
        chosen |= (table.slots == slot) & np.array([own.endswith(names) for own in table.names])
    return chosen


def _spared(step: _Pass) -> BoolArray:
    """[T]: matrices that a recomputed block does not multiply again, for its checkpoint stops before them."""
    table = step.own.table
    spared = np.zeros(len(table.names), dtype=bool)
    if step.rules.recompute_reruns_last:
        return spared
    for slot, block in step.kinds:
        name = spared_matrix(block)
        if name:
            spared |= (table.slots == slot) & np.array([own.endswith(name) for own in table.names])
    if step.setting.recipe.fp8 and not step.setting.compiled:
        # torchao's layer is one function of autograd, which keeps its inputs once it has run [torchao]
        spared &= ~table.linear | table.expert
    return spared


def _attention(step: _Pass, *, plain: bool = False) -> tuple[IntArray, IntArray]:
    """([plans, rows] forward, backward) FLOP of attention per micro-batch; `plain`: of layers that no kernel runs.

    Plain arithmetic keeps its scores and forms none again.
    """
    plans, setting = step.plans, step.setting
    kind = "ring" if step.rules.rotates_kv else setting.cp_comm
    pairs = plans.mbs * attention_pairs(setting.workload.seq, plans.cp, kind)
    forward = np.zeros_like(step.own.pp_stage)
    backward = np.zeros_like(forward)
    for index, block in enumerate(step.layers):
        attention = block.attention
        if attention is None or is_plain(attention) != plain:
            continue
        key, value = head_dims(attention)
        met = (pairs * ceil_div(attention.heads, plans.tp))[:, None]
        each = step.blocks[:, :, index] * met
        again = step.also(attention_again(setting))[:, :, index] * met
        forward = forward + (each + again) * 2 * (key + value)
        backward = backward + each * 2 * (2 * (key + value) if plain else 3 * key + 2 * value)
    return forward, backward


def is_plain(attention: Attention) -> bool:
    """Whether scores are formed by plain matrix products: no fused kernel changes them and has a gradient for that."""
    return bool(attention.scores)


def head_dims(attention: Attention) -> tuple[int, int]:
    """Widths of a head of q and k, and of v as a kernel meets it: latent attention pads the narrower to the wider.

    >>> from trainledger.facts.model_load import load_model
    >>> [head_dims(load_model(name).blocks[-1].attention) for name in ("llama-3-8b", "deepseek-v3")]
    [(128, 128), (192, 192)]
    """
    key, value = attention.qk_head_dim, attention.v_head_dim
    wide = max(key, value)
    return (wide, wide) if attention.kind == "mla" else (key, value)


def attention_pairs(seq: int, cp: IntArray, kind: str) -> IntArray:
    """[plans]: pairs of query and key per head and sequence that a rank's kernels are called with.

    ring         all own queries with all own keys, then for each other rank half of such a square: all queries with
                 the first half of its keys, or the second half of the queries with all of them, so that every rank has
                 as much to do. Whether keys hop or are gathered at once changes no call.
                 [torch: _context_parallel/_attention.py, _templated_ring_attention]
    all_gather   all own queries with all keys
    all_to_all   all queries with all keys, of 1 / cp of the heads

    >>> [attention_pairs(8, np.array([1, 2, 4]), kind).tolist() for kind in ("ring", "all_gather")]
    [[64, 24, 10], [64, 32, 16]]
    """
    if kind == "ring":
        own = ceil_div(seq, cp)
        return own * own + (cp - 1) * (own * own // 2)
    return ceil_div(seq * seq, cp)
