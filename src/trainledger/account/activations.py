"""Activations that one micro-batch keeps for its backward: the first form, closed forms per block.

Basis modelled. Per token and block, in bytes (w is the width of an activation element):
  attention  w (h + q + k + v + out), flash adds the log-sum-exp, eager adds 5 B per score [korthikanti: table 2]
  mlp        w (h + f + f), gated w (h + 3 f); ungated blocks count the two dropout masks of the GPT recipe
  norms      w h each
With GPT's shapes and eager attention that is s b (34 h + 5 a s). Full recompute keeps each block's input and works
through one block at a time.
"""

from __future__ import annotations

import numpy as np

from trainledger.arrays import IntArray, ceil_div
from trainledger.dtypes import bytes_of
from trainledger.facts.model import Attention, Block, Mlp, Moe, Ssm
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Plans
from trainledger.plans.setting import Setting

EAGER_SCORE_BYTES = ("bf16", "uint8", "bf16")
"""Softmax output, dropout mask, dropout output. [korthikanti: section 4.1]"""


class _Tokens:
    """Sizes of one micro-batch on one rank: arrays [plans]."""

    def __init__(self, setting: Setting, plans: Plans) -> None:
        self.plans = plans
        self.seq = setting.workload.seq
        self.count = plans.tokens(self.seq)
        sharded = plans.sp_ranks
        # Megatron saves the local slice of a linear's input and gathers it again; DTensor keeps the gathered one
        self.input_over = sharded if setting.profile.traffic.tp_style == "megatron" else np.ones_like(sharded)
        self.norm_over = sharded
        self.dtype = setting.recipe.activation
        self.eager = setting.scenario.attention == "eager"

    def width(self, elements: IntArray | int) -> IntArray:
        return bytes_of(self.count * elements, self.dtype)

    def input(self, hidden: int) -> IntArray:
        return ceil_div(self.width(hidden), self.input_over)

    def norm(self, hidden: int) -> IntArray:
        return ceil_div(self.width(hidden), self.norm_over)


def block_saved(block: Block, hidden: int, tokens: _Tokens) -> IntArray:
    """[plans]: bytes one block keeps for one micro-batch on one rank, nothing recomputed."""
    saved = block.norms * tokens.norm(hidden)
    if block.attention is not None:
        saved = saved + _attention(block.attention, hidden, tokens)
    if block.mlp is not None:
        saved = saved + _mlp(block.mlp, hidden, tokens, dropout=block.attention is not None)
    if block.moe is not None:
        saved = saved + _moe(block.moe, hidden, tokens)
    if block.ssm is not None:
        saved = saved + _ssm(block.ssm, hidden, tokens)
    return saved


def _attention(attention: Attention, hidden: int, tokens: _Tokens) -> IntArray:
    tp = tokens.plans.tp
    heads = attention.heads
    kv_heads = np.maximum(ceil_div(attention.kv_heads, tp), 1) * tp
    inner = heads * (attention.qk_head_dim + attention.v_head_dim)
    inner = inner + kv_heads * (attention.qk_head_dim + attention.v_head_dim)
    latent = attention.q_lora_rank + attention.kv_lora_rank + attention.rope_head_dim
    saved = tokens.input(hidden) + tokens.width(latent) + ceil_div(tokens.width(inner), tp)
    if tokens.eager:
        scores = tokens.count * tokens.seq * ceil_div(heads, tp)
        return saved + sum(bytes_of(scores, dtype) for dtype in EAGER_SCORE_BYTES)
    return saved + bytes_of(tokens.count * ceil_div(heads, tp), "fp32")


def _mlp(mlp: Mlp, hidden: int, tokens: _Tokens, *, dropout: bool) -> IntArray:
    inner = ceil_div(tokens.width(mlp.intermediate * (3 if mlp.gated else 2)), tokens.plans.tp)
    masks = 2 * ceil_div(bytes_of(tokens.count * hidden, "uint8"), tokens.norm_over) if dropout and not mlp.gated else 0
    return tokens.input(hidden) + inner + masks


def _moe(moe: Moe, hidden: int, tokens: _Tokens) -> IntArray:
    """Balanced routing: every token is processed top_k times, wherever its experts live."""
    plans = tokens.plans
    over = np.maximum(plans.tp, plans.etp)
    matrices = 3 if moe.gated else 2
    per_visit = 2 * hidden + matrices * moe.intermediate
    routed = ceil_div(tokens.width(moe.top_k * per_visit), over)
    router = bytes_of(tokens.count * moe.experts, "fp32")
    shared = ceil_div(tokens.width(moe.shared_intermediate * matrices), plans.tp)
    return tokens.input(hidden) + router + routed + shared


def _ssm(ssm: Ssm, hidden: int, tokens: _Tokens) -> IntArray:
    inner = ssm.heads * ssm.head_dim
    mixed = inner + 2 * ssm.groups * ssm.state
    per_token = (inner + mixed + ssm.heads) + mixed + 2 * inner
    return tokens.input(hidden) + ceil_div(tokens.width(per_token), tokens.plans.tp)


def in_flight_chunks(plans: Plans, pp_stage: IntArray, schedule: str) -> IntArray:
    """[plans, rows]: chunk-micro-batches whose activations a stage holds at once. [narayanan: 2.2, 2.3] [zero-bubble]

    1F1B: min(m, p - i), each of all the stage's layers. The others take turns in rounds of r = p micro-batches, or as
    many as make the rounds equal: interleaved min(m v, 2 (p - i - 1) + (v - 1) r + 1) chunks; zero-bubble min(m v,
    (v - 1) r + p) on every stage, for a chunk is held until the gradients of its weights are there.
    """
    pp, vpp, batches = plans.pp[:, None], plans.vpp[:, None], plans.num_microbatches[:, None]
    if schedule == "1f1b":
        return np.minimum(batches, pp - pp_stage) * vpp
    turns = (vpp - 1) * (batches // np.maximum(batches // pp, 1))
    if schedule == "zero-bubble":
        return np.minimum(batches * vpp, turns + pp + np.zeros_like(pp_stage))
    return np.minimum(batches * vpp, 2 * (pp - pp_stage - 1) + turns + 1)


COLUMNS = ("tp", "sp", "pp", "vpp", "cp", "ep", "etp", "mbs", "num_microbatches")


def activation_bytes(inventory: Inventory, plans: Plans) -> IntArray:
    """[plans, rows]: bytes of activations at their peak on each distinct stage, all micro-batches in flight.

    Computed once per distinct combination of the columns they depend on.
    """
    distinct, index = plans.distinct(COLUMNS)
    return _by_stage(inventory, distinct)[index]


def _by_stage(inventory: Inventory, plans: Plans) -> IntArray:
    setting = inventory.setting
    model = setting.model
    counts, pp_stage = inventory.stage_counts(plans)
    if model.params_only or not setting.profile.activations:
        return np.zeros_like(pp_stage)
    tokens = _Tokens(setting, plans)
    whole = np.stack([block_saved(block, model.hidden_size, tokens) for _, block in inventory.layers], axis=1)
    chunks = in_flight_chunks(plans, pp_stage, setting.scenario.schedule)
    blocks = counts[:, :, [slot for slot, _ in inventory.layers]]
    if setting.scenario.recompute == "full":
        kept = blocks.sum(axis=2) * tokens.norm(model.hidden_size)[:, None]
        working = np.max(np.where(blocks > 0, whole[:, None, :], 0), axis=2)
    else:
        kept = np.einsum("uk,urk->ur", whole, blocks)
        working = np.zeros_like(kept)
    logits = ceil_div(tokens.count * model.vocab_size, plans.tp)
    loss = sum(bytes_of(logits, dtype) for dtype in setting.profile.loss_dtypes)
    losses = inventory.losses(counts)
    saved = ceil_div(kept * chunks, plans.vpp[:, None]) + working + losses * np.asarray(loss)[..., None]
    return saved + _received(inventory, plans, counts) if setting.profile.traffic.keeps_received else saved


def _received(inventory: Inventory, plans: Plans, counts: IntArray) -> IntArray:
    """[plans, rows]: what boundary tensors are received into: per micro-batch one for each chunk's input and gradient.

    The first chunk of all receives no input, the last no gradient. [torch: distributed/pipelining/stage.py]
    """
    setting, at = inventory.setting, inventory.table.at
    ends = (counts[:, :, at.embedding] > 0).astype(np.int64) + (counts[:, :, at.final] > 0)
    boundaries = (2 * plans.vpp[:, None] - ends) * (counts.sum(axis=2) > 0) * (plans.pp > 1)[:, None]
    hidden = ceil_div(plans.tokens(setting.workload.seq) * setting.model.hidden_size, plans.sp_ranks)
    return boundaries * (plans.num_microbatches * bytes_of(hidden, setting.recipe.activation))[:, None]
