"""DeepSeek's multi-head latent attention: q, k and v through low ranks, one rotary key for all heads."""

from __future__ import annotations

from trainledger.inventory.blocks.eager.attention import finish, positioned
from trainledger.inventory.blocks.eager.kernels import mix
from trainledger.inventory.blocks.eager.layer import Layer
from trainledger.inventory.blocks.eager.norm import norm
from trainledger.inventory.blocks.eager.ops import Count, Ops, Sheet


def latent(ops: Ops, layer: Layer, hidden: Sheet) -> Sheet:
    """Hidden [tokens, hidden] to the same. v is padded to the width of q and k for the kernel, and cut again."""
    rule, tokens, heads = layer.rule, layer.tokens, layer.heads
    q = ops.view("q: heads", _query(ops, layer, hidden), tokens * heads, rule.head_dim)
    q_pass, q_turn = ops.chunks("q: parts", q, {"q passing": rule.nope, "q turning": rule.rope})
    down = _linear(ops, layer, "latent projection", hidden, layer.facts.kv_lora_rank + rule.rope, "kv_a_proj_with_mqa")
    low, k_turn = ops.chunks("latent: parts", down, {"latent": layer.facts.kv_lora_rank, "k turning": rule.rope})
    normed = norm(ops, "latent norm", layer.rules.latent_norm or layer.rules.norm, low, weight=True)
    up = _linear(ops, layer, "k and v projection", normed, heads * (rule.nope + rule.value), "kv_b_proj")
    both = ops.view("k and v: heads", up, tokens * heads, rule.nope + rule.value)
    k_pass, v = ops.chunks("k and v: parts", both, {"k passing": rule.nope, "v": rule.value})
    q_turn, k_turn = positioned(ops, layer, q_turn, k_turn)
    q = ops.join("q", q_pass, q_turn)
    k = ops.join("k", k_pass, ops.spread("k turned for all heads", k_turn, tokens * heads))
    wide = rule.head_dim - rule.value
    if wide < 0:
        q, k = (ops.padded(f"{name}: padded", x, rule.value) for name, x in (("q", q), ("k", k)))
    elif wide > 0:
        v = ops.padded("v: padded", v, rule.head_dim)
    mixed = mix(ops, layer, q, k, v)
    if wide > 0:
        mixed = ops.slice("attention: value part", mixed, rule.value)
    return finish(ops, layer, mixed, hidden.width)


def _query(ops: Ops, layer: Layer, hidden: Sheet) -> Sheet:
    """Q [tokens, heads x head]."""
    rule, width = layer.rule, layer.heads * layer.rule.head_dim
    if rule.q == "q_proj":
        return _linear(ops, layer, "q projection", hidden, width, "q_proj")
    low = _linear(ops, layer, "q latent projection", hidden, layer.facts.q_lora_rank, "q_a_proj")
    normed = norm(ops, "q latent norm", layer.rules.latent_norm or layer.rules.norm, low, weight=True)
    return _linear(ops, layer, "q projection", normed, width, "q_b_proj")


def _linear(ops: Ops, layer: Layer, name: str, x: Sheet, width: Count, module: str) -> Sheet:
    return ops.linear(name, x, width, bias=layer.has(module), module=module)
