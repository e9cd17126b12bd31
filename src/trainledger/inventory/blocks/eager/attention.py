"""Attention with grouped heads and with a latent, as the program's modules run it."""

from __future__ import annotations

import msgspec
import numpy as np

from trainledger.arrays import IntArray, ceil_div
from trainledger.dtypes import bytes_of
from trainledger.inventory.blocks.eager.kernels import mix
from trainledger.inventory.blocks.eager.layer import Layer
from trainledger.inventory.blocks.eager.norm import norm, root_mean_square
from trainledger.inventory.blocks.eager.ops import Ops, Sheet
from trainledger.inventory.blocks.eager.rotary import rotated


def attention(ops: Ops, layer: Layer, hidden: Sheet) -> Sheet:
    """Hidden [tokens, hidden] to [tokens, hidden]."""
    if layer.rule.kind == "mla":
        from trainledger.inventory.blocks.eager.latent import latent

        return latent(ops, layer, hidden)
    q, k, v = _projected(ops, layer, hidden)
    mixed = mix(ops, layer, *positioned(ops, layer, q, k), v)
    return finish(ops, layer, mixed, hidden.width)


def _projected(ops: Ops, layer: Layer, hidden: Sheet) -> tuple[Sheet, Sheet, Sheet]:
    """q, k and v as rows of heads."""
    rule, tokens = layer.rule, layer.tokens
    heads = {rule.q: layer.heads, rule.k: layer.kv_heads, rule.v: layer.kv_heads}
    if rule.qkv == "separate":
        made = [
            ops.linear(f"{name} projection", hidden, count * rule.head_dim, bias=layer.has(name), module=name)
            for name, count in heads.items()
        ]
        if rule.qk_norm == "wide":
            made[:2] = [_normed(ops, layer, name, x) for name, x in zip((rule.q_norm, rule.k_norm), made, strict=False)]
        if rule.clip is not None:
            made = [ops.from_input(f"{name}: clamped", x) for name, x in zip(heads, made, strict=True)]
        parts = zip(heads.items(), made, strict=True)
        q, k, v = (ops.view(f"{name}: heads", x, tokens * count, rule.head_dim) for (name, count), x in parts)
    else:
        q, k, v = _split(ops, layer, hidden)
    if rule.qk_norm == "head":
        q, k = _normed(ops, layer, rule.q_norm, q), _normed(ops, layer, rule.k_norm, k)
    return q, k, v


def _normed(ops: Ops, layer: Layer, name: str, x: Sheet) -> Sheet:
    weight, bias = layer.has(name, "weight"), layer.has(name)
    return norm(ops, name, layer.rules.norm, x, weight=weight, bias=bias, each=layer.each(name))


def _split(ops: Ops, layer: Layer, hidden: Sheet) -> tuple[Sheet, Sheet, Sheet]:
    """One matrix for all three: views of its result, of which q is copied where its heads lie apart."""
    rule, tokens = layer.rule, layer.tokens
    q, kv = layer.heads * rule.head_dim, layer.kv_heads * rule.head_dim
    together = ops.linear(f"{rule.fused} projection", hidden, q + 2 * kv, bias=layer.has(rule.fused), module=rule.fused)
    parts = ops.chunks("q, k and v", together, {"q": q, "k": kv, "v": kv})
    made = [
        ops.view(f"{name}: heads", part, tokens * heads, rule.head_dim)
        for name, part, heads in zip("qkv", parts, (layer.heads, layer.kv_heads, layer.kv_heads), strict=True)
    ]
    if rule.qkv == "groups" and rule.group > 1 and bool(np.any(layer.kv_heads > 1)):
        made[0] = ops.clone("q: heads together", made[0])
    return made[0], made[1], made[2]


def positioned(ops: Ops, layer: Layer, q: Sheet, k: Sheet) -> tuple[Sheet, Sheet]:
    """Q and k turned by their positions; what they were stays with the caller meanwhile."""
    rule, before = layer.rule, (q, k)
    for x in before:
        ops.program.hold(x.value)
    if rule.rotary is not None:
        table = layer.rules.rotary[rule.rotary]
        turned = rotated(ops, "q turned", q, table)
        ops.program.hold(turned.value)
        k = rotated(ops, "k turned", k, table)
        ops.program.drop(turned.value)
        q = turned
    if rule.qk_norm == "after_rotary":
        q, k = (root_mean_square(ops, f"{name} norm", x, weight=False) for name, x in (("q", q), ("k", k)))
    if rule.temperature is not None:
        wide = msgspec.structs.replace(q, dtype="fp32")
        steps = {"steps": bytes_of(layer.length, "fp32")}
        product = ops.program.op("q: temperature", q.value, wide.bytes(), made=steps)
        q = ops.cast("q: temperature, cast", msgspec.structs.replace(wide, value=product), q.dtype)
    ops.program.drop(*(x.value for x in before))
    return q, k


def finish(ops: Ops, layer: Layer, mixed: Sheet, width: int | IntArray) -> Sheet:
    """The output projection; heads that do not lie side by side are copied first."""
    rule = layer.rule
    if layer.in_order:
        mixed = ops.clone("attention: heads side by side", mixed)
    features = ceil_div(mixed.rows * mixed.width, layer.tokens)
    rows = ops.view("attention: rows", mixed, layer.tokens, features)
    return ops.linear(f"{rule.out} projection", rows, width, bias=layer.has(rule.out), module=rule.out)
