"""Blocks of fused kernels that keep the inputs of their matrices and little else: the first account of a plan.

Saved per token and block, in widths of an activation: h (norm input), h (input of the projections), q, k, v, the
attention's output and its log-sum-exp, h, h (input of the network), its inner tensors. With GPT's shapes and eager
attention that is s b (34 h + 5 a s), and without what a recomputed attention keeps 34 s b h. [korthikanti: table 2]
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np

from trainledger.arrays import IntArray, ceil_div
from trainledger.dtypes import bytes_of
from trainledger.facts.model import Attention, Block, Mlp, Moe, Ssm
from trainledger.inventory.blocks.parts import Parts
from trainledger.inventory.blocks.sizes import Sizes
from trainledger.inventory.inventory import Inventory
from trainledger.inventory.tape import Program, Tape, Value, walk

EAGER_SCORES = {"probabilities": "bf16", "dropout mask": "uint8", "dropped": "bf16"}
"""Softmax output, dropout mask, dropout output. [korthikanti: section 4.1]"""


def parts(inventory: Inventory, sizes: Sizes) -> Parts:
    """The parts of a model under a Setting; with recompute full a block is one region."""
    scenario = inventory.setting.scenario
    return Parts(
        embedding=_embedding(sizes),
        blocks=tuple(block(each, sizes, recomputed=scenario.recompute == "full") for _, each in inventory.layers),
        final=_final(sizes, inventory.setting.profile.loss_dtypes),
    )


def _embedding(sizes: Sizes) -> Tape:
    program = Program()
    return walk(program, program.op("embedding", (), sizes.residual))


def _final(sizes: Sizes, dtypes: Sequence[str]) -> Tape:
    """The loss: per logit one tensor of each of the engine's dtypes, alive together at the turn."""
    program = Program()
    hidden = program.input("hidden", sizes.residual)
    kept = {f"logits, {i}": sizes.logits(dtype) for i, dtype in enumerate(dtypes)}
    program.op("output layer and loss", hidden, 0, made=kept)
    return walk(program, None)


def block(kind: Block, sizes: Sizes, *, recomputed: bool) -> Tape:
    """A layer of a kind; `recomputed`: it is one region."""
    program = Program()
    x = program.input("input of the layer", sizes.residual)
    if recomputed:
        with program.recomputed(early_stop=False):
            return walk(program, _layer(program, kind, sizes, x))
    return walk(program, _layer(program, kind, sizes, x))


def _layer(program: Program, block: Block, sizes: Sizes, x: Value) -> Value:
    branches = [part for part in (block.attention, block.ssm, block.mlp, block.moe) if part is not None]
    before = 1 if block.parallel else len(branches)
    norms = block.norms
    stream, source = x, x
    for index, part in enumerate(branches):
        if not block.parallel or index == 0:
            source = _norm(program, f"norm {index}", stream, sizes) if norms > index else stream
        branch = _branch(program, part, sizes, source, dropout=block.attention is not None)
        for more in range(before + index, norms, len(branches)):
            branch = _norm(program, f"norm {more}", branch, sizes)
        stream = program.op(f"residual {index}", (stream, branch), sizes.residual, passes=True)
    return stream


def _norm(program: Program, name: str, x: Value, sizes: Sizes) -> Value:
    return program.op(name, x, sizes.residual, keeps=(x,))


def _branch(program: Program, part: Attention | Mlp | Moe | Ssm, sizes: Sizes, x: Value, *, dropout: bool) -> Value:
    whole = _gathered(program, x, sizes)
    match part:
        case Attention():
            return _attention(program, part, sizes, whole)
        case Mlp():
            return _mlp(program, part, sizes, whole, dropout=dropout)
        case Moe():
            return _moe(program, part, sizes, whole)
        case Ssm():
            return _ssm(program, part, sizes, whole)


def _gathered(program: Program, x: Value, sizes: Sizes) -> Value:
    """What a tensor-parallel region reads: Megatron keeps its slice and gathers again, DTensor keeps it gathered."""
    if sizes.setting.profile.traffic.tp_style == "megatron":
        return program.op("input", x, sizes.hidden, keeps=(x,), passes=True)
    return program.op("input", x, sizes.hidden, keeps_output=True, passes=True)


def _attention(program: Program, attention: Attention, sizes: Sizes, x: Value) -> Value:
    tp, heads = sizes.tp, attention.heads
    each = attention.qk_head_dim + attention.v_head_dim
    kv = sizes.kv_heads(attention) * tp * each
    latent = attention.q_lora_rank + attention.kv_lora_rank + attention.rope_head_dim
    if latent:
        x = program.op("latent projections", x, sizes.wide(latent), keeps_output=True)
    mixed = program.op("projections", x, sizes.cut(heads * attention.qk_head_dim + kv, tp))
    if sizes.setting.scenario.attention == "eager":
        scores = sizes.tokens * sizes.setting.workload.seq * sizes.heads(attention)
        made = {name: bytes_of(scores, dtype) for name, dtype in EAGER_SCORES.items()}
    else:
        made = {"log-sum-exp": bytes_of(sizes.tokens * sizes.heads(attention), "fp32")}
    again = "core_attn" in sizes.setting.recomputed_parts
    with program.recomputed(early_stop=False) if again else nullcontext():
        width = sizes.cut(heads * attention.v_head_dim, tp)
        out = program.op("attention", mixed, width, keeps=(mixed,), keeps_output=True, made=made)
    return program.op("output projection", out, sizes.residual, keeps=(out,))


def _mlp(program: Program, mlp: Mlp, sizes: Sizes, x: Value, *, dropout: bool) -> Value:
    wide = mlp.intermediate * (2 if mlp.gated else 1)
    up = program.op("up", x, sizes.cut(wide, sizes.tp))
    act = program.op("activation", up, sizes.cut(mlp.intermediate, sizes.tp), keeps=(up,))
    # the two dropout masks of the GPT recipe, after attention and after the network
    masks = {"dropout masks": 2 * sizes.cut(sizes.hidden_size, sizes.plans.sp_ranks, "uint8")}
    made = masks if dropout and not mlp.gated else None
    return program.op("down", act, sizes.residual, keeps=(act,), made=made)


def _moe(program: Program, moe: Moe, sizes: Sizes, x: Value) -> Value:
    """Every token is processed top_k times, wherever its experts live: by equal shares, or all on one rank."""
    plans = sizes.plans
    over = np.maximum(plans.tp, plans.etp)
    inner = moe.intermediate * (2 if moe.gated else 1)
    program.op("router", x, 0, made={"scores": sizes.wide(moe.experts, "fp32")})
    count = sizes.arriving(sizes.tokens * moe.top_k, moe)

    def cut(width: int) -> IntArray:
        return ceil_div(bytes_of(count * width, sizes.dtype), over)

    rows = program.op("dispatch", x, cut(sizes.hidden_size))
    up = program.op("experts up", rows, cut(inner), keeps=(rows,))
    act = program.op("experts activation", up, cut(moe.intermediate), keeps=(up,))
    down = program.op("experts down", act, cut(sizes.hidden_size), keeps=(act,))
    out = program.op("combine", down, sizes.residual, keeps=(down,))
    if not moe.shared_intermediate:
        return out
    shared = _mlp(program, Mlp(intermediate=moe.shared_intermediate, gated=moe.gated), sizes, x, dropout=False)
    return program.op("shared and routed", (out, shared), sizes.residual, passes=True)


def _ssm(program: Program, ssm: Ssm, sizes: Sizes, x: Value) -> Value:
    inner = ssm.heads * ssm.head_dim
    mixed = inner + 2 * ssm.groups * ssm.state
    projected = program.op("in projection", x, sizes.cut(inner + mixed + ssm.heads, sizes.tp))
    convolved = program.op("convolution", projected, sizes.cut(mixed, sizes.tp), keeps=(projected,))
    scanned = program.op("scan", convolved, sizes.cut(inner, sizes.tp), keeps=(convolved,), keeps_output=True)
    gated = program.op("gated norm", scanned, sizes.cut(inner, sizes.tp))
    return program.op("out projection", gated, sizes.residual, keeps=(gated,))
