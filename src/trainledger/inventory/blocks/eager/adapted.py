"""The low rank beside a frozen matrix, as PEFT's modules run it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from trainledger.dtypes import bytes_of

if TYPE_CHECKING:
    from trainledger.inventory.blocks.eager.ops import Ops, Sheet


def adapted(ops: Ops, name: str, x: Sheet, made: Sheet) -> Sheet:
    """A low rank of x beside a frozen matrix, scaled and added to what that gives. [peft-lora]

    What x is cast to, and what is left of it by dropout, is the adapter's own; where it is neither it keeps x
    itself. Beside a 4-bit matrix nothing is cast but by autocast, and what that gives is copied first.
    """
    frozen, program = ops.frozen, ops.program
    if frozen.quantised:
        made = ops.clone(f"{name}: copy", made)
    program.hold(made.value)
    taken = x if frozen.quantised else ops.cast(f"{name}: input in {frozen.adapter}", x, frozen.adapter)
    program.hold(taken.value)
    kept = _dropped(ops, f"{name}: dropout", taken) if frozen.drops else taken
    kept = ops.cast(f"{name}: input of the adapter", kept, ops.dtype)
    low, high = ((ops.rank * (sheet.width + 0 * sheet.rows)) for sheet in (x, made))
    value, sides = kept.value, ((f"{name}: A", low, ops.rank), (f"{name}: B", high, made.width))
    for side, count, width in sides:
        value = program.op(
            side,
            value,
            bytes_of(x.rows * width, ops.dtype),
            keeps=(value,),
            made={"weight cast": bytes_of(count, ops.dtype) * (frozen.adapter != ops.dtype)},
            weights={side: bytes_of(count, ops.dtype)},
        )
    scaled = ops.scale(f"{name}: scaled", msgspec.structs.replace(made, value=value, dtype=ops.dtype))
    both = ops.add(f"{name}: both", made, scaled)
    program.drop(made.value, taken.value)
    return both


def _dropped(ops: Ops, name: str, x: Sheet) -> Sheet:
    """Dropout keeps a byte for each element. [torch: native_dropout]"""
    mask = {"mask": bytes_of(x.rows * x.width, "uint8")}
    return msgspec.structs.replace(x, value=ops.program.op(name, x.value, x.bytes(), made=mask))
