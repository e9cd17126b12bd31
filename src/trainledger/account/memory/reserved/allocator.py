"""PyTorch's caching allocator for CUDA, replayed: what a run keeps reserved for the tensors that it makes and drops.

Nothing in it is fitted. Freed memory is kept for later requests of the same stream and of the same class of size, so
what is reserved exceeds what is allocated by whatever the order of requests leaves unusable.
[torch: c10/cuda/CUDACachingAllocator.cpp; docs: notes/cuda, memory management]

  a request is rounded up to 512 B; requests up to 1 MiB and larger ones never share memory
  of the free blocks that are large enough the smallest is taken, of equal ones that at the lowest address
  what is left of a block becomes a free one: always in small and in expandable segments, else from above 1 MiB
  a block that is freed becomes one with free neighbours of its segment
  nothing fits: a new segment of 2 MiB for small requests, of 20 MiB for those below 10 MiB, else of the request
  in steps of 2 MiB; or, expandable, pages of 2 MiB (small) or 20 MiB mapped where the segment of the stream ends
  the device is full: whole free segments, or whole free pages, are given back, and the request is made again
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Literal

UNIT = 512
"""Bytes that every request is a multiple of; the model counts in these."""
SMALL = (1 << 20) // UNIT
SMALL_SEGMENT = (2 << 20) // UNIT
LARGE_SEGMENT = (20 << 20) // UNIT
OWN_SEGMENT_FROM = (10 << 20) // UNIT
LARGE_STEP = (2 << 20) // UNIT

ADDRESS_BITS = 60
ADDRESS = (1 << ADDRESS_BITS) - 1
ENDLESS = 1 << ADDRESS_BITS

Event = tuple[Literal["alloc", "free"], int, int, int]
"""(op, id, bytes, stream): an id is alive between its alloc and its free, which says neither bytes nor stream."""


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """Memory that the allocator got from the device: one call's, or all pages of an expandable segment."""

    stream: int
    small: bool
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """What a replay came to.

    max_allocated  the most bytes in blocks that were in use, as torch.cuda.max_memory_allocated counts them
    max_reserved   the most bytes in segments, as torch.cuda.max_memory_reserved counts them
    segments       those there are at the end
    refused        bytes of the request that ended the replay, because the limit left no room for it; 0: none
    """

    max_allocated: int
    max_reserved: int
    segments: tuple[Segment, ...]
    refused: int = 0

    def of_stream(self, stream: int) -> int:
        """Bytes that the segments of one stream have at the end."""
        return sum(segment.nbytes for segment in self.segments if segment.stream == stream)


def replay(
    events: Iterable[Event], *, expandable: bool, limit_bytes: int | None = None, enough_bytes: int | None = None
) -> Reserved:
    """Run requests through the allocator.

    limit_bytes    what the device can give; None: any amount
    enough_bytes   no more is asked than whether this is exceeded: the replay ends where it is; None: it never does

    A request of 12 MiB after one of 11 MiB was freed does not fit what is kept of it:

    >>> MIB = 1 << 20
    >>> events = [("alloc", 0, 11 * MIB, 0), ("free", 0, 0, 0), ("alloc", 1, 13 * MIB, 0)]
    >>> default, grown = (replay(events, expandable=way) for way in (False, True))
    >>> default.max_reserved // MIB, grown.max_reserved // MIB, grown.max_allocated // MIB
    (26, 20, 13)
    """
    device = _Device(expandable, *(ENDLESS if most is None else most // UNIT for most in (limit_bytes, enough_bytes)))
    pools = device.pools
    live: dict[int, tuple[_Pool, int, int]] = {}
    allocated = most = refused = 0
    for op, name, nbytes, stream in events:
        if op == "alloc":
            size = (nbytes + UNIT - 1) // UNIT
            small = size <= SMALL
            pool = pools.get((stream, small)) or device.pool(stream, small=small)
            start, size = pool.take(size) if size else (0, 0)
            if start < 0:
                refused = nbytes
                break
            live[name] = (pool, start, size)
            allocated += size
            if allocated > most:
                most = allocated
                if device.most > device.enough:
                    break
        else:
            pool, start, size = live.pop(name)
            allocated -= size
            if size:
                pool.give(start, size)
    return Reserved(
        max_allocated=most * UNIT,
        max_reserved=device.most * UNIT,
        segments=tuple(segment for pool in pools.values() for segment in pool.segments()),
        refused=refused,
    )


class _Device:
    """What the device has given, in units, and the pools that it went to."""

    def __init__(self, expandable: bool, limit: int, enough: int) -> None:
        self.expandable = expandable
        self.limit = limit
        self.enough = enough
        self.reserved = 0
        self.most = 0
        self.pools: dict[tuple[int, bool], _Pool] = {}

    def pool(self, stream: int, *, small: bool) -> _Pool:
        """The pool of a stream and a class of sizes, made when it is first asked for."""
        kind = _Expandable if self.expandable else _Pool
        return self.pools.setdefault((stream, small), kind(self, stream, small=small))

    def get(self, size: int) -> bool:
        """Ask the device for memory."""
        if self.reserved + size > self.limit:
            return False
        self.reserved += size
        self.most = max(self.most, self.reserved)
        return True

    def release(self) -> None:
        """Give back all that is wholly free, large blocks first."""
        for small in (False, True):
            for pool in list(self.pools.values()):
                if pool.small == small:
                    self.reserved -= pool.release()


class _Pool:
    """Free blocks of one stream and one class of sizes, in segments that are asked for one by one.

    free     size and address of each free block as one number, in order: the first that is large enough fits best
    sizes    size of the free block that starts at an address
    starts   start of the free block that ends at an address
    whole    size of the segment that starts at an address; an address in between keeps segments from touching
    """

    def __init__(self, device: _Device, stream: int, *, small: bool) -> None:
        self.device = device
        self.stream = stream
        self.small = small
        self.free: list[int] = []
        self.sizes: dict[int, int] = {}
        self.starts: dict[int, int] = {}
        self.whole: dict[int, int] = {}
        self.top = 0
        self.left_over = 0 if small else SMALL

    def segments(self) -> list[Segment]:
        """As they are now."""
        return [Segment(self.stream, self.small, size * UNIT) for size in self.whole.values()]

    def take(self, size: int) -> tuple[int, int]:
        """(address, size) of a block for a request, perhaps larger than it; address -1: the device is full."""
        where = self.best(size)
        if where < 0:
            start, have = self.grow(size)
            if start < 0:
                self.device.release()
                start, have = self.grow(size)
                if start < 0:
                    return -1, 0
        else:
            key = self.free.pop(where)
            start, have = key & ADDRESS, key >> ADDRESS_BITS
            del self.sizes[start]
            if have - size <= self.left_over:
                del self.starts[start + have]
                return start, have
            # what is left ends where the block did
            self.sizes[start + size] = have - size
            self.starts[start + have] = start + size
            insort(self.free, (have - size) << ADDRESS_BITS | start + size)
            return start, size
        if have - size > self.left_over:
            self.add(start + size, have - size)
            return start, size
        return start, have

    def best(self, size: int) -> int:
        """Index of the free block that a request of this size is given; -1: none is large enough."""
        where = bisect_left(self.free, size << ADDRESS_BITS)
        return where if where < len(self.free) else -1

    def give(self, start: int, size: int) -> None:
        """A block is free again: it and its free neighbours are one."""
        sizes, starts, free = self.sizes, self.starts, self.free
        end = start + size
        before = starts.pop(start, None)
        if before is not None:
            size = sizes[before]
            del free[bisect_left(free, size << ADDRESS_BITS | before)]
            start = before
        behind = sizes.pop(end, None)
        if behind is not None:
            del free[bisect_left(free, behind << ADDRESS_BITS | end)]
            end += behind
        size = end - start
        sizes[start], starts[end] = size, start
        insort(free, size << ADDRESS_BITS | start)

    def add(self, start: int, size: int) -> None:
        """Enter a free block."""
        self.sizes[start] = size
        self.starts[start + size] = start
        insort(self.free, size << ADDRESS_BITS | start)

    def remove(self, start: int) -> int:
        """Strike out the free block at an address; its size."""
        size = self.sizes.pop(start)
        del self.starts[start + size]
        del self.free[bisect_left(self.free, size << ADDRESS_BITS | start)]
        return size

    def grow(self, size: int) -> tuple[int, int]:
        """(address, size) of a new segment for a request; address -1: the device is full."""
        if self.small:
            whole = SMALL_SEGMENT
        elif size < OWN_SEGMENT_FROM:
            whole = LARGE_SEGMENT
        else:
            whole = -(-size // LARGE_STEP) * LARGE_STEP
        if not self.device.get(whole):
            return -1, 0
        start = self.top
        self.whole[start] = whole
        self.top = start + whole + 1
        return start, whole

    def release(self) -> int:
        """Give back the segments of which nothing is in use; their size."""
        unused = [start for start, size in self.whole.items() if self.sizes.get(start) == size]
        for start in unused:
            del self.whole[start]
        return sum(map(self.remove, unused))


class _Expandable(_Pool):
    """One segment that grows: addresses without end, with pages behind those that are mapped.

    unmapped   size of the stretch without pages that starts at an address; the last one has no end
    """

    def __init__(self, device: _Device, stream: int, *, small: bool) -> None:
        super().__init__(device, stream, small=small)
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.unmapped: dict[int, int] = {0: ENDLESS}
        self.left_over = 0
        self.mapped = 0

    def segments(self) -> list[Segment]:
        """As they are now."""
        return [Segment(self.stream, self.small, self.mapped * UNIT)] if self.mapped else []

    def best(self, size: int) -> int:
        """As of any pool, but a block counts as large as it could grow: the one at the end is taken last."""
        free = self.free
        where, last = bisect_left(free, size << ADDRESS_BITS), len(free) - 1
        if where > last:
            return -1
        if len(self.unmapped) == 1:
            key = free[where]
            at_end = (key & ADDRESS) + (key >> ADDRESS_BITS) in self.unmapped
            return where + 1 if at_end and where < last else where
        while where < last and self._could_be(free[where + 1]) < self._could_be(free[where]):
            where += 1
        return where

    def _could_be(self, key: int) -> int:
        size = key >> ADDRESS_BITS
        return size + self.unmapped.get((key & ADDRESS) + size, 0)

    def grow(self, size: int) -> tuple[int, int]:
        """Map pages from the lowest address on at which free blocks and pages that are not mapped have room."""
        start = self._room(size)
        have = self.remove(start) if start in self.sizes else 0
        while have < size:
            # what lies behind a free block is not mapped, or else both would be one
            mapped = self._map(start + have, size - have)
            if not mapped:
                if have:
                    self.add(start, have)
                return -1, 0
            have += mapped
            if start + have in self.sizes:
                have += self.remove(start + have)
        return start, have

    def _room(self, size: int) -> int:
        for gap in sorted(self.unmapped):
            start = end = self.starts.get(gap, gap)
            while end - start < size:
                more = self.unmapped.get(end) or self.sizes.get(end)
                if more is None:
                    break
                end += more
            else:
                return start
        raise AssertionError("the last stretch of addresses has no end")

    def _map(self, start: int, size: int) -> int:
        """Put pages behind the first `size` units of an unmapped stretch, or behind all of it; how much they hold."""
        there = self.unmapped[start]
        pages = min(-(-size // self.page) * self.page, there)
        if not self.device.get(pages):
            return 0
        del self.unmapped[start]
        if there > pages:
            self.unmapped[start + pages] = there - pages
        self.mapped += pages
        return pages

    def release(self) -> int:
        """Give back the pages in which nothing is in use; their size."""
        back = 0
        for key in list(self.free):
            start, size = key & ADDRESS, key >> ADDRESS_BITS
            first, end = -(-start // self.page) * self.page, (start + size) // self.page * self.page
            if first >= end:
                continue
            self.remove(start)
            if first > start:
                self.add(start, first - start)
            if start + size > end:
                self.add(end, start + size - end)
            back += end - first
            self._unmap(first, end)
        self.mapped -= back
        return back

    def _unmap(self, first: int, end: int) -> None:
        for start, size in list(self.unmapped.items()):
            if start + size == first:
                del self.unmapped[start]
                first = start
        size = end - first + self.unmapped.pop(end, 0)
        self.unmapped[first] = size
