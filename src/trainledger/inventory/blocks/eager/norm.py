"""Norms. PyTorch's rms_norm has no kernel of its own on a CPU and runs as the operations that it is defined by."""

from __future__ import annotations

import msgspec
import numpy as np

from trainledger.dtypes import bytes_of
from trainledger.facts.semantics import NormRule
from trainledger.inventory.blocks.eager.ops import Count, Ops, Sheet


def norm(
    ops: Ops, name: str, rule: NormRule, x: Sheet, *, weight: bool, bias: bool = False, each: bool = False
) -> Sheet:
    """A norm over the width of x; `each`: every head has a weight of its own, multiplied apart."""
    if each:
        plain = _plain(ops, name, rule, x, weight=False, bias=False)
        return _weighted(ops, f"{name}: weight", plain)
    return _plain(ops, name, rule, x, weight=weight, bias=bias)


def _plain(ops: Ops, name: str, rule: NormRule, x: Sheet, *, weight: bool, bias: bool) -> Sheet:
    if rule.kind == "layer":
        return _layer(ops, name, x, weight=weight, bias=bias)
    return root_mean_square(ops, name, x, weight=weight, plus_one=rule.plus_one)


def root_mean_square(ops: Ops, name: str, x: Sheet, *, weight: bool, plus_one: bool = False) -> Sheet:
    """rms_norm in fp32. [torch: aten/src/ATen/native/layer_norm.cpp rms_norm_composite]"""
    wide = ops.cast(f"{name}: in fp32", x, "fp32")
    squared = ops.square(f"{name}: square", wide)
    ops.program.hold(squared.value)
    mean = ops.new(f"{name}: mean", squared, width=1)
    root = ops.from_output(f"{name}: inverse root", mean)
    ops.program.drop(squared.value)
    both = (wide.value, root.value)
    # the gradient of the root is summed from one of the whole shape
    value = ops.program.op(f"{name}: division", both, wide.bytes(), keeps=both, back_work=wide.bytes())
    normed = msgspec.structs.replace(wide, value=value)
    if ops.modules and weight and not plus_one:
        return _weighted(ops, f"{name}: weight", ops.cast(f"{name}: in {x.dtype}", normed, x.dtype))
    if weight:
        normed = _weighted(ops, f"{name}: weight", normed, made=wide.width if plus_one else 0)
    return ops.cast(f"{name}: in {x.dtype}", normed, x.dtype)


def _weighted(ops: Ops, name: str, x: Sheet, *, made: Count = 0) -> Sheet:
    """X times a weight [width]: keeps x; the weight's gradient is summed from one of the whole shape.

    made   elements of a weight that is computed first, and so kept: the offset from one
    """
    width = x.width + np.zeros_like(x.rows)
    weight = bytes_of(width, ops.dtype)
    value = ops.program.op(
        name,
        x.value,
        x.bytes(),
        keeps=() if ops.rank else (x.value,),
        made={"offset from one": bytes_of(made + 0 * width, ops.dtype)},
        weights=ops.trained({name: weight}),
        back_work=x.bytes(),
    )
    return msgspec.structs.replace(x, value=value)


def _layer(ops: Ops, name: str, x: Sheet, *, weight: bool, bias: bool) -> Sheet:
    """native_layer_norm keeps its input, mean and reciprocal deviation."""
    one = bytes_of(x.width + np.zeros_like(x.rows), ops.dtype)
    weights = {f"{name}: weight": one} if weight else {}
    if bias:
        weights[f"{name}: bias"] = one
    statistics = {"mean and deviation": 2 * bytes_of(x.rows, x.dtype)}
    value = ops.program.op(name, x.value, x.bytes(), keeps=(x.value,), made=statistics, weights=ops.trained(weights))
    return msgspec.structs.replace(x, value=value)
