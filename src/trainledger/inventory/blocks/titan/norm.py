"""RMS norms: one kernel, several kernels in fp32, or inside a compiled block."""

from __future__ import annotations

from trainledger.arrays import IntArray
from trainledger.dtypes import bytes_of
from trainledger.inventory.blocks.titan.builder import Builder, Bytes
from trainledger.inventory.tape import Value


def norm(build: Builder, name: str, x: Value, nbytes: IntArray, rows: IntArray, width: IntArray | int) -> Value:
    """A norm of x: `rows` times `width` elements of `nbytes`."""
    if build.compiled or build.rules.norm == "fused":
        roots = {"inverse root": bytes_of(rows, "fp32")}
        return build.program.op(name, x, nbytes, keeps=(x,), made=roots, weights=_weight(build, name, width))
    return _by_steps(build, name, x, nbytes, rows, width)


def _weight(build: Builder, name: str, width: IntArray | int) -> dict[str, Bytes]:
    return {f"{name}: weight": build.weight(width)}


def _by_steps(build: Builder, name: str, x: Value, nbytes: IntArray, rows: IntArray, width: IntArray | int) -> Value:
    """A copy in fp32, its inverse root mean square, their product, and a weight.

    own      torchtitan's module multiplies by the weight after the cast back [torchtitan: models/norms.py]
    steps    rms_norm of ATen multiplies before it [torch: aten/src/ATen/native/layer_norm.cpp]
    """
    program, wide = build.program, build.fp32(nbytes)
    copy = program.op(f"{name}: in fp32", x, wide)
    each, weight = bytes_of(rows, "fp32"), _weight(build, name, width)
    root = program.op(f"{name}: inverse root", copy, each, keeps=(copy,), keeps_output=True, work=wide)
    normed = program.op(f"{name}: product", (copy, root), wide, keeps=(copy, root), back_work=wide)
    if build.rules.norm == "own":
        cast = program.op(f"{name}: in {build.sizes.dtype}", normed, nbytes)
        return program.op(f"{name}: times weight", cast, nbytes, keeps=(cast,), weights=weight, back_work=nbytes)
    scaled = program.op(f"{name}: times weight", normed, wide, keeps=(normed,), weights=weight, back_work=wide)
    return program.op(f"{name}: in {build.sizes.dtype}", scaled, nbytes)
