"""Attention over projected heads: the flash kernel for CPUs, its ring, and what is multiplied plainly."""

from __future__ import annotations

import msgspec

from trainledger.arrays import IntArray
from trainledger.dtypes import bytes_of
from trainledger.inventory.blocks.eager.layer import Layer
from trainledger.inventory.blocks.eager.ops import Ops, Sheet
from trainledger.inventory.tape import Value


def mix(ops: Ops, layer: Layer, q: Sheet, k: Sheet, v: Sheet) -> Sheet:
    """q, k and v as rows of heads to the same of q, by whichever way the layer has. [runtime/model/attend.py]"""
    rule = layer.rule
    # autocast hands attention, and products of scores, what they are given in 16 bits
    q, k, v = (ops.cast(f"{name} in {ops.dtype}", x, ops.dtype) for name, x in (("q", q), ("k", k), ("v", v)))
    if rule.softcap is not None or rule.sinks or layer.plainly:
        return _scored(ops, layer, q, k, v)
    if rule.alibi:
        return _plain(ops, layer, q, k, v)
    if ops.modules:
        return _on_card(ops, layer, q, k, v)
    if layer.sizes.rings:
        return _ring(ops, layer, q, k, v)
    return _flash(ops, layer, q, k, v)


def _flash(ops: Ops, layer: Layer, q: Sheet, k: Sheet, v: Sheet) -> Sheet:
    """Keeps what it was given and gave, and a mask as numbers. [torch: scaled_dot_product_attention, attention.cpp]"""
    rule, length = layer.rule, layer.length
    made = {"log-sum-exp": bytes_of(q.rows, "fp32")}
    if rule.window is not None and rule.window < layer.sizes.setting.workload.seq:
        made["mask"] = bytes_of(length * length, q.dtype)
    inputs = (q.value, k.value, v.value)
    out = msgspec.structs.replace(q, width=v.width)
    value = ops.program.op("attention", inputs, out.bytes(), keeps=inputs, keeps_output=True, made=made)
    return msgspec.structs.replace(out, value=value)


def _on_card(ops: Ops, layer: Layer, q: Sheet, k: Sheet, v: Sheet) -> Sheet:
    """Flash attention, whose backward sums the gradient of q in fp32; keys and values of a group may be copied first.

    With ranks of cp each has all tokens of some heads meanwhile: four exchanges, each into a new tensor.
    [transformers: integrations/sdpa_attention.py; torch: aten native/transformers/cuda/flash_attn/flash_api.cpp;
    deepspeed: sequence/layer.py]
    """
    rules, ringed = layer.sizes.setting.profile.memory, layer.sizes.rings
    if rules.copies_kv and layer.rule.group > 1:
        k, v = (ops.new(f"{name}, one for each query head", x, rows=q.rows) for name, x in (("keys", k), ("values", v)))
    if ringed:
        q, k, v = (ops.new(f"{name}, by heads", x) for name, x in (("queries", q), ("keys", k), ("values", v)))
    each = bytes_of(q.rows, "fp32")
    inputs = (q.value, k.value, v.value)
    out = msgspec.structs.replace(q, width=v.width)
    made, work = {"log-sum-exp": each}, (q.bytes("fp32"), each)
    value = ops.program.op("attention", inputs, out.bytes(), keeps=inputs, keeps_output=True, made=made, back_work=work)
    out = msgspec.structs.replace(out, value=value)
    return ops.new("attention, by tokens", out) if ringed else out


def _ring(ops: Ops, layer: Layer, q: Sheet, k: Sheet, v: Sheet) -> Sheet:
    """Attention to keys that go round; what it keeps is the same, and what it gives is copied where parts were joined.

    Forward: keys and values in order and joined, what arrives, and a step's result, added up in fp32. Backward, in the
    second step: the gradient in order, keys and values in order and joined and what arrives, sums of all gradients in
    fp32, of those of keys and values a copy in order and joined, the first step's gradients and half of the next's.
    [torch: distributed/tensor/experimental/_context_parallel/_attention.py]
    """
    plans = layer.sizes.plans
    kv, sums = k.bytes() + v.bytes(), k.bytes("fp32") + v.bytes("fp32")
    gathers = layer.sizes.setting.cp_comm == "all_gather"
    arriving = kv * plans.cp if gathers else kv
    out = msgspec.structs.replace(q, width=v.width)
    inputs = (q.value, k.value, v.value)
    value = ops.program.op(
        "attention",
        inputs,
        out.bytes(),
        keeps=inputs,
        keeps_output=True,
        made={"log-sum-exp": bytes_of(q.rows, "fp32")},
        work=(kv, kv, arriving, out.bytes("fp32")),
        back_work=(out.bytes(), kv, kv, arriving, q.bytes("fp32"), sums, sums, sums, q.bytes() // 2),
    )
    return msgspec.structs.replace(out, value=value)


def _scores(layer: Layer, q: Sheet) -> IntArray:
    """[plans]: elements of the scores of a micro-batch: a key for each query of a sequence."""
    return q.rows * layer.length


def _product(ops: Ops, name: str, a: Value, b: Value, nbytes: IntArray) -> Value:
    """A batched product, which keeps both factors."""
    return ops.program.op(name, (a, b), nbytes, keeps=(a, b))


def _scored(ops: Ops, layer: Layer, q: Sheet, k: Sheet, v: Sheet) -> Sheet:
    """Scores with a cap or a sink, one operation after the other; the mask's opposite waits in each layer."""
    rule, program, length = layer.rule, ops.program, layer.length
    if rule.group > 1:
        q = ops.clone("q: heads of a group together", q)
    elements = _scores(layer, q)
    raw = _product(ops, "scores", q.value, k.value, bytes_of(elements, q.dtype))
    scores = ops.scale("scores scaled", Sheet(raw, q.rows, length, q.dtype))
    if rule.softcap is not None:
        over = ops.scale("scores over the cap", scores)
        scores = ops.scale("scores capped", ops.from_output("scores: tanh", over))
    hidden = {"mask": bytes_of(length * length, "uint8")}
    value = program.op("scores masked", scores.value, scores.bytes(), made=hidden)
    scores = msgspec.structs.replace(scores, value=value)
    if rule.sinks:
        wider = msgspec.structs.replace(scores, width=length + 1)
        value = program.op("scores and sinks", scores.value, wider.bytes(), passes=True)
        scores = msgspec.structs.replace(wider, value=value)
    wide = msgspec.structs.replace(scores, dtype="fp32")
    work = scores.bytes("fp32") if scores.dtype != "fp32" else 0
    value = program.op("attention: softmax", scores.value, wide.bytes(), keeps_output=True, back_work=work)
    weights = ops.cast("attention: weights", msgspec.structs.replace(wide, value=value), v.dtype)
    if rule.sinks:
        weights = ops.slice("attention: weights of keys", weights, length)
    out = msgspec.structs.replace(q, width=v.width)
    value = _product(ops, "attention", weights.value, v.value, out.bytes())
    return msgspec.structs.replace(out, value=value)


def _plain(ops: Ops, layer: Layer, q: Sheet, k: Sheet, v: Sheet) -> Sheet:
    """What no kernel has, such as a mask for each head: in fp32, q and k scaled alike before they are multiplied.

    [torch: aten/src/ATen/native/transformers/attention.cpp _scaled_dot_product_attention_math]
    """
    wide = [ops.cast(f"{name} in fp32", x, "fp32") for name, x in (("q", q), ("k", k), ("v", v))]
    scaled = [ops.scale(f"{name} scaled", x) for name, x in zip("qk", wide, strict=False)]
    elements = _scores(layer, q)
    raw = _product(ops, "scores", scaled[0].value, scaled[1].value, bytes_of(elements, "fp32"))
    scores = Sheet(raw, q.rows, layer.length, "fp32")
    masked = msgspec.structs.replace(
        scores, value=ops.program.op("scores and mask", scores.value, scores.bytes(), passes=True)
    )
    weights = ops.from_output("attention: softmax", masked)
    out = msgspec.structs.replace(wide[0], width=v.width)
    value = _product(ops, "attention", weights.value, wide[2].value, out.bytes())
    return ops.cast("attention cast", msgspec.structs.replace(out, value=value), q.dtype)
