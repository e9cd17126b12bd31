"""Attention as Megatron builds it of TransformerEngine's modules, with and without context parallelism."""

from __future__ import annotations

import numpy as np

from trainledger.arrays import IntArray
from trainledger.dtypes import bytes_of
from trainledger.facts.model import Attention
from trainledger.inventory.blocks.megatron.modules import Modules
from trainledger.inventory.tape import Value


def attention(modules: Modules, of: Attention, x: Value, *, drops: bool) -> Value:
    """The branch from the residual stream to what is added to it, its norm included; `drops`: trained with dropout."""
    query, key, value = _latent(modules, of, x) if of.kind == "mla" else _grouped(modules, of, x)
    if modules.sizes.setting.scenario.attention == "eager":
        out = _eager(modules, of, query, key, value, drops=drops)
    else:
        out = _fused(modules, of, query, key, value)
    return modules.row("attention output projection", out, modules.sizes.hidden_size, original=True)


def _grouped(modules: Modules, of: Attention, x: Value) -> tuple[Value, Value, Value]:
    """One matrix gives all three; the queries of a group are copied together, and rotated ones are new.

    Scores are made of what the matrix gave as it lies, unless it has to be rotated before.
    """
    program, sizes = modules.program, modules.sizes
    query = modules.per_head(sizes.heads(of), of.qk_head_dim)
    key = modules.per_head(sizes.kv_heads(of), of.qk_head_dim)
    value = modules.per_head(sizes.kv_heads(of), of.v_head_dim)
    mixed = modules.normed_column("norm, query, key and value projection", x, sizes.hidden_size, query + key + value)
    parts = {"part of queries": query, "part of keys": key, "part of values": value}
    q, k, v = program.split("queries, keys and values", mixed, parts)
    if sizes.setting.scenario.attention == "eager" and of.heads == of.kv_heads and not _rotates(modules, of):
        return q, k, v
    return (
        program.op("queries", q, query, work=query),
        program.op("keys", k, key),
        program.op("values", v, value),
    )


def _rotates(modules: Modules, of: Attention) -> bool:
    """Whether positions are told by rotation: not by a table of the model's, nor by slopes."""
    table = any(tensor.role == "position" for tensor in modules.sizes.setting.model.embedding)
    return not table and "alibi" not in of.scores


def _latent(modules: Modules, of: Attention, x: Value) -> tuple[Value, Value, Value]:
    """Multi-head latent attention: down projections are whole on every rank, each norm is one with the matrix after it.

    Queries are rotated where they lie; keys and values are put together in new tensors.
    [megatron: core/transformer/multi_latent_attention.py]
    """
    program, sizes = modules.program, modules.sizes
    heads, plain = sizes.heads(of), of.qk_head_dim - of.rope_head_dim
    each, value = modules.per_head(heads, of.qk_head_dim), modules.per_head(heads, of.v_head_dim)
    with modules.discarded("layernorm"):
        normed = modules.norm("norm before attention", x, sizes.hidden_size)
    down = modules.duplicated("query down projection", normed, of.q_lora_rank) if of.q_lora_rank else normed
    joint = modules.duplicated("key and value down projection", normed, of.kv_lora_rank + of.rope_head_dim)
    parts = {"latent": modules.sharded(of.kv_lora_rank), "keys to rotate": modules.sharded(of.rope_head_dim)}
    latent, turned = program.split("latent and keys to rotate", joint, parts)
    with modules.discarded("mla_up_proj"):
        if of.q_lora_rank:
            query = modules.normed_column("query norm and up projection", down, of.q_lora_rank, each)
        else:
            query = modules.column("query projection", down, sizes.hidden_size, each)
        apart = program.op("latent by itself", latent, modules.sharded(of.kv_lora_rank))
        both = modules.per_head(heads, plain) + value
        mixed = modules.normed_column("key and value norm and up projection", apart, of.kv_lora_rank, both)
        halves = {"plain keys": modules.per_head(heads, plain), "part of values": value}
        k, v = program.split("keys and values", mixed, halves)
        return query, program.op("keys", (k, turned), each), program.op("values", v, value)


def _fused(modules: Modules, of: Attention, query: Value, key: Value, value: Value) -> Value:
    """Fused attention keeps what it reads, what it gives and one fp32 a query; its backward sums in fp32.

    Where heads are exchanged for tokens, both the exchanged result and the one before are kept.
    [te: pytorch/attention/dot_product_attention/context_parallel.py]
    """
    program, sizes = modules.program, modules.sizes
    out = modules.per_head(sizes.heads(of), of.v_head_dim)
    made = {"log-sum-exp": bytes_of(sizes.tokens * sizes.heads(of), "fp32")}
    sums = bytes_of(sizes.tokens * sizes.heads(of) * of.qk_head_dim, "fp32")
    given = out
    if sizes.setting.cp_comm == "all_to_all":
        given = _where_cp(modules, out)
        query, key, value = (_exchanged(modules, x) for x in (query, key, value))
    pair = np.asarray(key.nbytes) + np.asarray(value.nbytes)
    work, back_work = _hops(modules, np.asarray(query.nbytes), pair, out)
    with modules.recomputed("core_attn"):
        result = program.op(
            "attention",
            (query, key, value),
            given,
            keeps=(query, key, value),
            keeps_output=True,
            made=made,
            work=work,
            back_work=(sums, *back_work),
        )
        if sizes.setting.cp_comm == "all_to_all":
            result = program.op("attention's result, exchanged", result, out)
    return result


def _where_cp(modules: Modules, nbytes: IntArray) -> IntArray:
    return np.where(modules.sizes.plans.cp > 1, nbytes, 0)


def _exchanged(modules: Modules, x: Value) -> Value:
    """A tensor with fewer heads of more tokens, as many bytes."""
    return modules.program.op(f"{x.name}, exchanged", x, x.nbytes, work=_where_cp(modules, np.asarray(x.nbytes)))


def _hops(
    modules: Modules, query: IntArray, pair: IntArray, out: IntArray
) -> tuple[tuple[IntArray, ...], tuple[IntArray, ...]]:
    """What a ring, or a gather, of keys and values needs forward and backward beside what attention reads and gives.

    A ring keeps every pair that it receives, and every hop's result, until the last; backward two pairs and their
    gradients travel. A gather has all pairs at once, and backward their gradients.
    """
    sizes = modules.sizes
    cp, how = sizes.plans.cp, sizes.setting.cp_comm
    if how == "ring":
        return (
            (_where_cp(modules, cp * pair), _where_cp(modules, cp * out)),
            (_where_cp(modules, 4 * pair), _where_cp(modules, query)),
        )
    if how == "all_gather":
        return (_where_cp(modules, 2 * cp * pair),), (_where_cp(modules, 3 * cp * pair),)
    return (), ()


def _eager(modules: Modules, of: Attention, query: Value, key: Value, value: Value, *, drops: bool) -> Value:
    """Scores in 16 bits: softmax gives a new tensor, dropout another and a mask. [korthikanti: section 4.1]

    Dropout by a probability of 0 hands on what it got. [torch: aten/src/ATen/native/Dropout.cpp]
    """
    program, sizes = modules.program, modules.sizes
    every = sizes.tokens * sizes.setting.workload.seq * sizes.heads(of)
    scores = bytes_of(every, sizes.dtype)
    with modules.recomputed("core_attn"):
        raw = program.op("scores", (query, key), scores, keeps=(query, key))
        soft = program.op("softmax", raw, scores, keeps_output=True, passes=True)
        dropped = soft
        if drops:
            dropped = program.op("dropout of scores", soft, scores, made={"mask": bytes_of(every, "uint8")})
        out = modules.per_head(sizes.heads(of), of.v_head_dim)
        return program.op("values weighed", (dropped, value), out, keeps=(dropped, value))
