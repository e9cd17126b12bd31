"""Attention of torchtitan's models: grouped queries, and latent attention."""

from __future__ import annotations

import numpy as np

from trainledger.arrays import IntArray
from trainledger.dtypes import bytes_of
from trainledger.facts.model import Attention
from trainledger.inventory.blocks.titan.builder import Builder
from trainledger.inventory.blocks.titan.norm import norm
from trainledger.inventory.tape import Value


def attention(build: Builder, shape: Attention, x: Value) -> Value:
    """From an input that is whole to partial sums of a whole tensor."""
    q, k, v = _latent(build, shape, x) if shape.kind == "mla" else _grouped(build, shape, x)
    out = _attend(build, shape, q, k, v)
    sizes = build.sizes
    weight = build.weight(sizes.hidden_size * shape.heads * shape.v_head_dim) // sizes.tp
    return build.matrix("output projection", out, sizes.hidden, weight)


def _grouped(build: Builder, shape: Attention, x: Value) -> tuple[Value, Value, Value]:
    sizes, program = build.sizes, build.program
    kv = sizes.kv_heads(shape)
    queries, keys = sizes.heads(shape) * shape.qk_head_dim, kv * shape.qk_head_dim
    values = kv * shape.v_head_dim
    q, k, v = _projected(build, x, queries, keys, values)
    if shape.qk_norm:
        q = norm(build, "query norm", q, sizes.wide(queries), sizes.tokens * sizes.heads(shape), shape.qk_head_dim)
        k = norm(build, "key norm", k, sizes.wide(keys), sizes.tokens * kv, shape.qk_head_dim)
    q = rotated(build, "query, rotated", q, sizes.wide(queries))
    copied = build.rules.copies_kv and shape.kv_heads != shape.heads
    if copied:
        wide, deep = sizes.heads(shape) * shape.qk_head_dim, sizes.heads(shape) * shape.v_head_dim
        if build.compiled:
            k = program.op("keys, rotated and one for each query head", k, sizes.wide(wide))
        else:
            k = rotated(build, "keys, rotated", k, sizes.wide(keys))
            k = program.op("keys, one for each query head", k, sizes.wide(wide))
        v = program.op("values, one for each query head", v, sizes.wide(deep))
    else:
        k = rotated(build, "keys, rotated", k, sizes.wide(keys))
    return q, k, v


def _projected(
    build: Builder, x: Value, queries: IntArray, keys: IntArray, values: IntArray
) -> tuple[Value, Value, Value]:
    """Queries, keys and values of so many features on this rank: three matrices, or one whose result is taken apart.

    Then each is copied out, inside the next operation where that is compiled. [torchtitan: models/common/attention.py]
    """
    sizes, hidden = build.sizes, build.sizes.hidden_size
    if not build.rules.fused_qkv:
        q = build.matrix("query projection", x, sizes.wide(queries), build.weight(hidden * queries))
        k = build.matrix("key projection", x, sizes.wide(keys), build.weight(hidden * keys))
        return q, k, build.matrix("value projection", x, sizes.wide(values), build.weight(hidden * values))
    whole = queries + keys + values
    mixed = build.matrix("query, key and value projection", x, sizes.wide(whole), build.weight(hidden * whole))
    parts = {"query": sizes.wide(queries), "keys": sizes.wide(keys), "values": sizes.wide(values)}
    views = build.program.split("query, keys and values", mixed, parts)
    copied = [
        view if build.compiled and name != "values" else build.program.op(f"{name}, copied out", view, nbytes)
        for view, (name, nbytes) in zip(views, parts.items(), strict=True)
    ]
    return copied[0], copied[1], copied[2]


def rotated(build: Builder, name: str, x: Value, nbytes: IntArray) -> Value:
    """Rotary positions, multiplied as complex numbers in fp32; factors want no gradient, so nothing is kept."""
    if build.compiled:
        return build.program.op(name, x, nbytes)
    wide = build.program.op(f"{name}: in fp32", x, build.fp32(nbytes))
    turned = build.program.op(f"{name}: turned", wide, build.fp32(nbytes))
    return build.program.op(name, turned, nbytes)


def _latent(build: Builder, shape: Attention, x: Value) -> tuple[Value, Value, Value]:
    """[torchtitan: models/deepseek_v3/model.py]"""
    sizes, program = build.sizes, build.program
    hidden, heads, rope = sizes.hidden_size, sizes.heads(shape), shape.rope_head_dim
    nope = shape.qk_head_dim - rope
    queries = sizes.wide(heads * shape.qk_head_dim)
    if shape.q_lora_rank:
        rank = sizes.wide(shape.q_lora_rank)
        low = build.matrix("query down-projection", x, rank, build.weight(hidden * shape.q_lora_rank))
        low = norm(build, "query latent norm", low, rank, sizes.tokens, shape.q_lora_rank)
        read, width = low, shape.q_lora_rank
    else:
        read, width = x, hidden
    raw = build.matrix("query projection", read, queries, build.weight(width * heads * shape.qk_head_dim))
    q = _joined(build, "query", raw, sizes.wide(heads * rope), queries)
    both = shape.kv_lora_rank + rope
    mixed = build.matrix("key and value down-projection", x, sizes.wide(both), build.weight(hidden * both))
    low, turning = program.split(
        "key and value latent", mixed, {"latent": sizes.wide(shape.kv_lora_rank), "rotary keys": sizes.wide(rope)}
    )
    turned = rotated(build, "rotary keys, rotated", turning, sizes.wide(rope))
    rank = shape.kv_lora_rank
    low = norm(build, "key and value latent norm", low, sizes.wide(rank), sizes.tokens, rank)
    each = heads * (nope + shape.v_head_dim)
    wide = build.matrix("key and value projection", low, sizes.wide(each), build.weight(rank * each))
    still, v = program.split(
        "keys and values", wide, {"keys": sizes.wide(heads * nope), "values": sizes.wide(heads * shape.v_head_dim)}
    )
    k = program.op("keys, joined", (still, turned), sizes.wide(heads * shape.qk_head_dim))
    return q, k, v


def _joined(build: Builder, name: str, raw: Value, turning: IntArray, whole: IntArray) -> Value:
    """The part of a head that has positions is rotated, and joined with the part that has none."""
    if build.compiled:
        return build.program.op(f"{name}, rotated and joined", raw, whole)
    still, part = build.program.split(f"{name} parts", raw, {"still": whole - turning, "turning": turning})
    turned = rotated(build, f"{name}, rotated", part, turning)
    return build.program.op(f"{name}, joined", (still, turned), whole)


def _attend(build: Builder, shape: Attention, q: Value, k: Value, v: Value) -> Value:
    """Flash attention, whose backward sums the gradient of q in fp32; over ranks of cp keys and values are gathered.

    [torch: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp]
    """
    sizes, heads = build.sizes, build.sizes.heads(shape)
    per_head = bytes_of(sizes.tokens * heads, "fp32")
    sums = bytes_of(sizes.tokens * heads * shape.qk_head_dim, "fp32")
    whole = sizes.plans.cp * (np.asarray(k.nbytes) + np.asarray(v.nbytes)) if build.ringed else 0
    return build.program.op(
        "attention",
        (q, k, v),
        sizes.wide(heads * shape.v_head_dim),
        keeps=(q, k, v),
        keeps_output=True,
        made={"log-sum-exp": per_head},
        work=whole,
        back_work=(whole, sums, per_head),
        pinned=build.pins(build.attention_kernel),
    )
