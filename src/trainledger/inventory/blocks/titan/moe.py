"""Routed experts as torchtitan runs them: rows gathered by expert, exchanged, padded, multiplied in groups, put back.

The dispatch is not compiled; what experts compute is, with the rest. Routing is taken to be balanced: a rank processes
top_k rows for each of its tokens. [torchtitan: models/moe/moe.py, distributed/expert_parallel.py]
"""

from __future__ import annotations

import numpy as np

from trainledger.arrays import IntArray, ceil_div
from trainledger.dtypes import bytes_of
from trainledger.facts.model import Moe
from trainledger.inventory.blocks.titan.builder import Builder
from trainledger.inventory.blocks.titan.mlp import network
from trainledger.inventory.tape import Value


def moe(build: Builder, shape: Moe, x: Value) -> Value:
    """From an input that is whole to partial sums of a whole tensor; scores multiply what experts give."""
    program, sizes = build.program, build.sizes
    scores = _router(build, shape, x)
    over = np.where(sizes.plans.etp < sizes.tp, sizes.tp, 1)
    rows = ceil_div(sizes.tokens * shape.top_k, over)
    each = bytes_of(rows * sizes.hidden_size, sizes.dtype)
    routed = program.op("rows by expert", x, each)
    given = _experts(build, shape, routed, rows, each)
    weighed = (_batched if build.rules.experts_batched else _added)(build, given, scores, each)
    if not shape.shared_intermediate:
        return weighed
    shared = network(build, x, shape.shared_intermediate, sizes.tp, name="shared ")
    return program.op("shared and routed", (shared, weighed), sizes.hidden, passes=True)


def _router(build: Builder, shape: Moe, x: Value) -> Value:
    """Scores in fp32 of all experts, of which the best are gathered. [torchtitan: models/moe/moe.py]"""
    program, sizes = build.program, build.sizes
    logits = build.matrix(
        "router", x, sizes.wide(shape.experts), build.weight(sizes.hidden_size * shape.experts), counted=False
    )
    wide = sizes.wide(shape.experts, "fp32")
    scores = program.op("router scores", logits, wide, keeps_output=True, back_work=wide)
    chosen = {"chosen experts": sizes.wide(shape.top_k, "int64"), "order of rows": sizes.wide(shape.top_k, "int64")}
    return program.op("best scores", scores, sizes.wide(shape.top_k, "fp32"), made=chosen)


def _experts(build: Builder, shape: Moe, routed: Value, rows: IntArray, each: IntArray) -> Value:
    """Three products in groups; each exchange and each padding is a copy of the rows."""
    program, sizes, pinned = build.program, build.sizes, build.pins("all_to_all")
    sent, rows = each, sizes.arriving(rows, shape)
    each = bytes_of(rows * sizes.hidden_size, sizes.dtype)
    arrived = program.op("rows sent to experts", routed, each, pinned=pinned) if build.exchanged else routed
    padded = program.op("rows padded by expert", arrived, each, back_work=each)
    over = np.maximum(sizes.plans.etp, 1)
    inner = ceil_div(bytes_of(rows * shape.intermediate, sizes.dtype), over)
    owned = ceil_div(shape.experts, sizes.plans.ep)
    weight = build.weight(owned * sizes.hidden_size * shape.intermediate) // over
    gate = build.matrix("experts' gate projection", padded, inner, weight, counted=False)
    up = build.matrix("experts' up projection", padded, inner, weight, counted=False)
    gated = program.op("experts' gated", (gate, up), inner, keeps=(gate, up), first_over=build.compiled)
    down = build.matrix("experts' down projection", gated, each, weight, counted=False)
    plain = program.op("rows without padding", down, each)
    return program.op("rows sent back", plain, sent, pinned=pinned) if build.exchanged else plain


def _batched(build: Builder, given: Value, scores: Value, each: IntArray) -> Value:
    """Rows put in the order of tokens, in fp32: a batched product of a token's rows and scores keeps both."""
    whole = build.sizes.hidden
    back = build.program.op("rows by token", given, each)
    floats = build.program.op("rows in fp32", back, build.fp32(each))
    both = (floats, scores)
    return build.program.op("weighed sum", both, whole, keeps=both, back_work=build.fp32(whole))


def _added(build: Builder, given: Value, scores: Value, each: IntArray) -> Value:
    """Rows in fp32 times their scores, cast back and added up by token: no kernel does two of these at once.

    The product's backward makes one more product of rows, which is summed into the gradients of scores.
    """
    program, wide = build.program, build.fp32(each)
    floats = program.op("rows in fp32", given, wide)
    both = (floats, scores)
    product = program.op("rows times scores", both, wide, keeps=both, back_work=wide)
    cast = program.op(f"rows times scores in {build.sizes.dtype}", product, each)
    return program.op("rows added up by token", cast, build.sizes.hidden)
