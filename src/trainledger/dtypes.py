"""How many bits one element takes: the only place that knows, so a planted factor scales every byte.

Block-quantised and 4-bit formats carry their scales as entries of their own.
"""

from __future__ import annotations

from trainledger.arrays import IntArray, ceil_div
from trainledger.errors import UnknownName

BITS: dict[str, int] = {
    "int64": 64,
    "fp32": 32,
    "int32": 32,
    "bf16": 16,
    "fp16": 16,
    "int16": 16,
    "fp8": 8,
    "uint8": 8,
    "nf4": 4,
    "fp4": 4,
}


def bits(dtype: str) -> int:
    """Bits of one element of `dtype`."""
    try:
        return BITS[dtype]
    except KeyError:
        raise UnknownName("dtype", dtype, BITS) from None


def bytes_of(elements: IntArray, dtype: str) -> IntArray:
    """Bytes that hold `elements` of `dtype`; 4-bit elements are packed two to a byte.

    >>> import numpy as np
    >>> bytes_of(np.array([3]), "bf16").tolist(), bytes_of(np.array([3]), "nf4").tolist()
    ([6], [2])
    """
    width = bits(dtype)
    if width % 8 == 0:
        return elements * (width // 8)
    return ceil_div(elements * width, 8)


def block_scaled_bytes(elements: IntArray, dtype: str, block: int, scale_dtype: str) -> IntArray:
    """Bytes of tensors stored in `dtype` with one scale per `block`, the last one begun included.

    >>> import numpy as np
    >>> block_scaled_bytes(np.array([4096, 4097]), "uint8", 256, "fp32").tolist()
    [4160, 4165]
    """
    return bytes_of(elements, dtype) + bytes_of(ceil_div(elements, block), scale_dtype)


NF4_BLOCK, NF4_NESTED_BLOCK = 64, 256
"""QLoRA: one 8-bit scale per 64 weights, one fp32 scale per 256 of those. [qlora-paper: section 3]"""


def nf4_bytes(elements: IntArray) -> IntArray:
    """Bytes of weights in 4 bits with their doubly quantised scales.

    >>> import numpy as np
    >>> nf4_bytes(np.array([64 * 256])).tolist()
    [8452]
    """
    scales = ceil_div(elements, NF4_BLOCK)
    nested = bytes_of(ceil_div(scales, NF4_NESTED_BLOCK), "fp32")
    return bytes_of(elements, "nf4") + bytes_of(scales, "uint8") + nested


def kept_bytes(elements: IntArray, dtype: str) -> IntArray:
    """Bytes of weights as they are stored and travel in `dtype`: 4-bit ones with their scales.

    >>> import numpy as np
    >>> [kept_bytes(np.array([64 * 256]), dtype).tolist() for dtype in ("bf16", "nf4")]
    [[32768], [8452]]
    """
    return nf4_bytes(elements) if dtype == "nf4" else bytes_of(elements, dtype)
