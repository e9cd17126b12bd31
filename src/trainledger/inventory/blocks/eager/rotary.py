"""Turning q and k by their positions, one operation after the other."""

from __future__ import annotations

import msgspec

from trainledger.facts.semantics import RotaryRule
from trainledger.inventory.blocks.eager.ops import Ops, Sheet


def rotated(ops: Ops, name: str, x: Sheet, rule: RotaryRule) -> Sheet:
    """X [rows of heads, head], of which the features beyond the rule's pass. Tables belong to the whole forward."""
    if rule.dim < x.width:
        turned = ops.slice(f"{name}: turned part", x, rule.dim)
        rest = ops.slice(f"{name}: rest", x, x.width - rule.dim)
        return ops.join(f"{name}: joined", rotated(ops, name, turned, rule), rest)
    half = rule.dim // 2
    negated = ops.new(f"{name}: negated half", ops.slice(f"{name}: second half", x, half))
    partner = ops.join(f"{name}: partner", negated, ops.slice(f"{name}: first half", x, half))
    wide = "fp32" if rule.fp32 else x.dtype
    left = _times(ops, f"{name}: cosine", x, wide)
    right = _times(ops, f"{name}: sine", partner, wide)
    return ops.cast(f"{name}: in {x.dtype}", ops.add(f"{name}: sum", left, right), x.dtype)


def _times(ops: Ops, name: str, x: Sheet, dtype: str) -> Sheet:
    """X times a table in `dtype`; in a wider one the product is wider, and its gradient is cast back."""
    made = msgspec.structs.replace(x, dtype=dtype)
    work = made.bytes() if dtype != x.dtype else 0
    return msgspec.structs.replace(made, value=ops.program.op(name, x.value, made.bytes(), back_work=work))
