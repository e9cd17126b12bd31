"""How an engine cuts tensors into shards: exact element counts, padding included.

Every function maps arrays to arrays. `over` is the number of ranks that share; with `over` = 1 each returns what an
unsharded rank stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

import numpy as np

from trainledger.arrays import IntArray, ceil_div, round_up

MEGATRON_PARAM_ALIGN = 64
MEGATRON_BUCKET_ALIGN = 128
MEGATRON_BUSBW_ALIGN = 1 << 16
FLAT_PARAM_ALIGN = 8
"""Elements of 16 bits in the 16 bytes that parameters begin at in FSDP's flat ones. [fsdp1]"""
CHUNK_FACTOR_LIMIT = 1 << 28
"""Row sizes without common factors would ask Megatron-FSDP for padding beyond any memory; it is not followed there."""


def by_units(length: IntArray | int, units: IntArray | int, over: IntArray) -> IntArray:
    """What the fullest rank holds of a dimension that is cut between indivisible units (heads); 0: at any place.

    >>> by_units(1024, 8, np.array([1, 3, 16])).tolist()
    [1024, 384, 128]
    """
    units = np.where(units == 0, length, units)
    return ceil_div(units, over) * (length // np.maximum(units, 1))


def dim0(rows: IntArray, rest: IntArray, over: IntArray) -> IntArray:
    """Elements one rank stores of tensors chunked along dimension 0, every chunk padded to the first. [fsdp2]

    >>> dim0(np.array([3]), np.array([4]), np.array([8])).tolist()
    [4]
    """
    return ceil_div(rows, over) * rest


def per_tensor(numel: IntArray, over: IntArray) -> IntArray:
    """Elements one rank stores of tensors flattened and padded one by one. [deepspeed: ZeRO-3]

    >>> per_tensor(np.array([10]), np.array([4])).tolist()
    [3]
    """
    return ceil_div(numel, over)


def flat(total: IntArray, over: IntArray, align: int = 2) -> IntArray:
    """Elements one rank stores of one flat buffer padded to `align` x `over`. [deepspeed: ZeRO-1/2, align 2]

    >>> flat(np.array([1001]), np.array([8])).tolist()
    [126]
    """
    return round_up(total, align * over) // over


def flat_unit(numel: IntArray, copies: IntArray, over: IntArray) -> IntArray:
    """Elements of FSDP's flat parameter of tensors [plans, T]: each aligned, the whole a multiple of the ranks. [fsdp1]

    >>> flat_unit(np.array([[10, 3]]), np.array([[2, 1]]), np.array([4])).tolist()
    [36]
    """
    aligned = (round_up(numel, FLAT_PARAM_ALIGN) * copies).sum(axis=1)
    last = numel[:, -1]
    return round_up(aligned - (round_up(last, FLAT_PARAM_ALIGN) - last), over)


def bucket_padded(aligned_total: IntArray, over: IntArray) -> IntArray:
    """Elements of a Megatron buffer that is one bucket: rounded up to lcm(over, 128). [megatron: param_layout]

    `aligned_total` is the sum of the parameters' sizes, each rounded up to 64 elements.

    >>> bucket_padded(np.array([101248]), np.array([24])).tolist()
    [101376]
    """
    return round_up(aligned_total, np.lcm(over, MEGATRON_BUCKET_ALIGN))


def of_rank(total: IntArray, chunk: IntArray, rank: IntArray) -> IntArray:
    """Elements that rank number `rank` really holds of `total` cut into chunks, padding not counted.

    With rows and ceil(rows / ranks) this is torch.chunk; with the elements of a flat buffer and one rank's share, the
    last ranks hold the padding.

    >>> of_rank(np.array(10), np.array(3), np.arange(5)).tolist()
    [3, 3, 3, 1, 0]
    """
    return np.clip(total - rank * chunk, 0, chunk)


def dim0_of_rank(rows: IntArray, rest: IntArray, over: IntArray, rank: IntArray) -> IntArray:
    """Elements of a tensor chunked along dimension 0 that belong to one rank. [fsdp2]"""
    return of_rank(rows, ceil_div(rows, over), rank) * rest


def per_tensor_of_rank(numel: IntArray, over: IntArray, rank: IntArray) -> IntArray:
    """Elements of a flattened tensor that belong to one rank. [deepspeed: ZeRO-3]"""
    return of_rank(numel, per_tensor(numel, over), rank)


def flat_of_rank(total: IntArray, over: IntArray, rank: IntArray, align: int = 2) -> IntArray:
    """Elements of one flat buffer that belong to one rank. [deepspeed: ZeRO-1/2]"""
    return of_rank(total, flat(total, over, align), rank)


def bucket_of_rank(sizes: Sequence[int], over: int, rank: int, *, bucket_size: int | None = None) -> int:
    """Elements of parameters, gaps and padding not counted, in one rank's share of every bucket. [megatron]

    >>> [bucket_of_rank([1000, 65, 7, 100000], 8, rank) for rank in (0, 7)]
    [12656, 12480]
    """
    starts, ranges, _ = megatron_places(sizes, over, bucket_size=bucket_size)
    held = 0
    for start, end in ranges:
        share = (end - start) // over
        low, high = start + rank * share, start + (rank + 1) * share
        held += sum(max(0, min(at + size, high) - max(at, low)) for at, size in zip(starts, sizes, strict=True))
    return held


def chunk_factor(rest: IntArray, numel: IntArray) -> IntArray:
    """[plans]: elements that one bucket of Megatron-FSDP is cut into, for the tensors [plans, T] that share it.

    From the longest rows down: a row size joins by the least common multiple, unless it divides what is there and the
    tensor fills whole chunks, or the tensor is smaller than a chunk. [megatron-fsdp: _get_parameter_groups]

    >>> chunk_factor(np.array([[28672, 8192, 1]]), np.array([[28672 * 8192, 8192 * 8192, 8192]])).tolist()
    [57344]
    """
    order = np.argsort(-rest, axis=1, kind="stable")
    rest, numel = np.take_along_axis(rest, order, axis=1), np.take_along_axis(numel, order, axis=1)
    factor = rest[:, 0]
    for row, size in zip(rest.T[1:], numel.T[1:], strict=True):
        fits = (row == factor) | ((factor % row == 0) & (size % factor == 0)) | (size < factor)
        joined = np.minimum(factor // np.gcd(factor, row) * row, CHUNK_FACTOR_LIMIT)
        factor = np.where(fits, factor, joined)
    return factor


def megatron_layout(
    sizes: Sequence[int],
    over: int,
    *,
    bucket_size: int | None = None,
    shared: Sequence[int] = (),
    high_busbw: bool = False,
) -> tuple[list[tuple[int, int]], list[int]]:
    """Bucket ranges and unpadded lengths of a Megatron gradient buffer with the distributed optimizer.

    `sizes` are element counts in registration order (the buffer runs in reverse); `shared` lists the indices of
    shared embeddings, which sit alone in a bucket. A bucket closes once it holds at least `bucket_size` elements.
    [megatron: param_layout.py, distrib_optimizer.py at core 0.20]

    >>> megatron_layout([1000, 65, 7, 100000], 8, bucket_size=2000)
    ([(0, 100096), (100096, 101376)], [100000, 1192])
    """
    _, ranges, unpadded = megatron_places(sizes, over, bucket_size=bucket_size, shared=shared, high_busbw=high_busbw)
    return ranges, unpadded


def megatron_places(
    sizes: Sequence[int],
    over: int,
    *,
    bucket_size: int | None = None,
    shared: Sequence[int] = (),
    high_busbw: bool = False,
) -> tuple[list[int], list[tuple[int, int]], list[int]]:
    """Where each parameter begins, in registration order, and what `megatron_layout` says."""
    end_align = lcm(over, MEGATRON_BUCKET_ALIGN)
    if high_busbw:
        end_align = lcm(end_align, MEGATRON_BUSBW_ALIGN)
    starts = [0] * len(sizes)
    ranges: list[tuple[int, int]] = []
    unpadded: list[int] = []
    start = cursor = 0

    def close() -> None:
        nonlocal start, cursor
        unpadded.append(cursor - start)
        cursor = -(-cursor // end_align) * end_align
        ranges.append((start, cursor))
        start = cursor

    for index in reversed(range(len(sizes))):
        alone = index in shared
        cursor = -(-cursor // MEGATRON_PARAM_ALIGN) * MEGATRON_PARAM_ALIGN
        if alone and cursor > start:
            close()
        starts[index] = cursor
        cursor += sizes[index]
        if alone or (bucket_size is not None and cursor - start >= bucket_size):
            close()
    if cursor > start:
        close()
    return starts, ranges, unpadded


def ddp_bucket_count(sizes_bytes: Sequence[int], cap_bytes: int = 25 << 20, first_bytes: int = 1 << 20) -> int:
    """All-reduces that DistributedDataParallel issues for gradients of these sizes, in registration order.

    A bucket closes once it reaches its limit: 1 MiB for the first, 25 MiB for the rest. [torch: reducer.hpp]

    >>> ddp_bucket_count([2 << 20, 30 << 20, 512])
    2
    """
    buckets = 0
    held = 0
    limit = first_bytes
    for size in reversed(sizes_bytes):
        held += size
        if held >= limit:
            buckets += 1
            held = 0
            limit = cap_bytes
    return buckets + (held > 0)
