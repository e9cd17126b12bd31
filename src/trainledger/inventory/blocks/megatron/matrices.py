"""The weight matrices of a model as Megatron-Core holds them: query, key and value in one, gate and up in one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from trainledger.arrays import IntArray, ceil_div
from trainledger.facts.model import Attention, Block
from trainledger.inventory.blocks.megatron.model import vocab_of_rank
from trainledger.inventory.blocks.sizes import Sizes
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Plans


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Matrix:
    """One rank's part of a matrix, [plans]; slots: where in a model it stands."""

    slots: tuple[int, ...]
    rows: IntArray
    columns: IntArray


def matrices(inventory: Inventory, plans: Plans) -> list[Matrix]:
    """The matrices of layers that TransformerEngine multiplies, and the output layer; routers are Megatron's own."""
    sizes = Sizes(inventory.setting, plans)
    found = [matrix for slot, block in inventory.layers for matrix in _of_block(slot, block, sizes)]
    at = inventory.table.at
    return [*found, _matrix((at.final, at.mtp), vocab_of_rank(sizes), sizes.hidden_size, sizes)]


def _matrix(slots: tuple[int, ...], rows: IntArray | int, columns: IntArray | int, sizes: Sizes) -> Matrix:
    ones = np.ones_like(sizes.tp)
    return Matrix(slots, rows * ones, columns * ones)


def _of_block(slot: int, block: Block, sizes: Sizes) -> Iterator[Matrix]:
    hidden, tp, plans = sizes.hidden_size, sizes.tp, sizes.plans
    shapes: list[tuple[IntArray | int, IntArray | int]] = []
    if block.attention is not None:
        shapes += _of_attention(block.attention, sizes)
    for mlp in (block.mlp,) if block.mlp is not None else ():
        inner = ceil_div(mlp.intermediate, tp)
        shapes += [(inner * (2 if mlp.gated else 1), hidden), (hidden, inner)]
    for moe in (block.moe,) if block.moe is not None else ():
        twice = 2 if moe.gated else 1
        inner = ceil_div(moe.intermediate, plans.etp)
        shapes += [(inner * twice, hidden), (hidden, inner)]
        if moe.shared_intermediate:
            shared = ceil_div(moe.shared_intermediate, tp)
            shapes += [(shared * twice, hidden), (hidden, shared)]
    for ssm in (block.ssm,) if block.ssm is not None else ():
        inner = ssm.heads * ssm.head_dim
        mixed = 2 * inner + 2 * ssm.groups * ssm.state + ssm.heads
        shapes += [(ceil_div(mixed, tp), hidden), (hidden, ceil_div(inner, tp))]
    yield from (_matrix((slot,), rows, columns, sizes) for rows, columns in shapes)


def _of_attention(of: Attention, sizes: Sizes) -> list[tuple[IntArray | int, IntArray | int]]:
    hidden, heads = sizes.hidden_size, sizes.heads(of)
    out = (hidden, heads * of.v_head_dim)
    if of.kind != "mla":
        kv = sizes.kv_heads(of) * (of.qk_head_dim + of.v_head_dim)
        return [(heads * of.qk_head_dim + kv, hidden), out]
    plain = of.qk_head_dim - of.rope_head_dim
    joint = [(of.kv_lora_rank + of.rope_head_dim, hidden), (heads * (plain + of.v_head_dim), of.kv_lora_rank)]
    if not of.q_lora_rank:
        return [(heads * of.qk_head_dim, hidden), *joint, out]
    return [(of.q_lora_rank, hidden), (heads * of.qk_head_dim, of.q_lora_rank), *joint, out]
