"""Messages of memory that ran out, of all releases of PyTorch and its neighbours, read into bytes.

The wordings, oldest first [torch: c10/cuda/CUDACachingAllocator.cpp, CUDAMallocAsyncAllocator.cpp;
c10/core/CPUAllocator.cpp; aten/src/ATen/mps/MPSAllocator.mm]:

  (GPU 0; 15.75 GiB total capacity; 14.30 GiB already allocated; 12.88 MiB free; 80.31 MiB cached)
  (GPU 0; ...; 14.42 GiB reserved in total by PyTorch)
  GPU 0 has a total capacty of 79.15 GiB of which 2.10 GiB is free. Including non-PyTorch memory, this process has ...
      in use. Of the allocated memory ... is allocated by PyTorch, and ... is reserved by PyTorch but unallocated.
  Currently allocated : ...  Requested : ...  Device limit : ...  Free (according to CUDA): ...
  DefaultCPUAllocator: can't allocate memory: you tried to allocate 123 bytes.
  MPS backend out of memory (MPS allocated: 17.00 GB, other allocations: ..., max allowed: ...). Tried to allocate ...

CUDA becomes HIP, XPU, NPU or another device, and whoever retells a message may write MB for MiB. Those of XLA,
TensorFlow, CuPy and others beside PyTorch are read where they state the size of one request (wordings.py).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from typing import NamedTuple

import msgspec

from trainledger.adapters.wordings import COLOURS, ELSEWHERE, REQUESTS, SHAPED, SIZE, SIZELESS, TYPE_BYTES, XLA
from trainledger.errors import BadInput

CONTEXT = 4000
"""Characters of a log before a message that are looked through for the line of the program that asked."""

REACH = 1500
"""Characters that a message is at most."""

MOST_FURTHER = 8
"""Sizes after the first that are answered."""

_DEVICE = re.compile(
    r"\b(CUDA|HIP|XPU|NPU|MLU|MUSA|MPS|DefaultCPUAllocator)\b|\b(cuda|hip)(?=Malloc|Error)|HIP_(?=ERROR)|(cupy)"
)
_INDEX = re.compile(r"\b(?:GPU|NPU|XPU|MLU|device)\s+([0-9]{1,4})\b")
_FACTS: dict[str, tuple[str, ...]] = {
    "total": (rf"{SIZE}\s+total\s+capacity", rf"total\s+capac\w*\s+of\s+{SIZE}", rf"Device\s+limit\s*:\s*{SIZE}"),
    "free": (rf"according\s+to\s+CUDA\)\s*:\s*{SIZE}", rf"of\s+which\s+{SIZE}\s+is\s+free", rf"{SIZE}\s+free"),
    "allocated": (
        rf"{SIZE}\s+already\s+allocated",
        rf"{SIZE}\s+is\s+allocated\s+by\s+PyTorch",
        rf"Currently\s+allocated\s*:\s*{SIZE}",
        rf"MPS\s+allocated\s*:\s*{SIZE}",
    ),
    "reserved": (rf"{SIZE}\s+reserved\s+in\s+total",),
    # until release 1.4, cached was what tensors had left
    "unused": (rf"{SIZE}\s+is\s+reserved\s+by\s+PyTorch\s+but\s+unallocated", rf"{SIZE}\s+cached"),
    "process": (rf"this\s+process\s+has\s+{SIZE}\s+memory\s+in\s+use",),
    "allowed": (rf"{SIZE}\s+allowed", rf"max\s+allowed\s*:\s*{SIZE}"),
}
_OTHERS = re.compile(rf"Process\s+[0-9]+\s+has\s+{SIZE}\s+memory\s+in\s+use")
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes that a printed size stands for, the ends included; `text` as it is printed."""

    text: str
    at_least: int
    at_most: int

    @property
    def middle(self) -> int:
        """What the digits say."""
        return (self.at_least + self.at_most) // 2


class OutOfMemory(msgspec.Struct, frozen=True, kw_only=True):
    """One message. Sizes are bytes, None where it does not state them.

    text       the message on one line
    before     the lines of the log above it, from the last traceback on
    device     cuda, hip, xpu, npu, mlu, musa, mps, xla or cpu
    index      which device of the machine
    requested  what was asked for: one reading of its digits, or two where GB may be 1e9 bytes or 2^30
    total, free                  of the device
    allocated, reserved, unused  tensors; what PyTorch's allocator has taken from the device; the difference
    process    of this process, what is not PyTorch's included
    others     of other processes
    allowed    a limit that was set below the device's own
    """

    text: str
    before: str
    device: str
    index: int | None
    requested: tuple[Span, ...]
    total: int | None
    free: int | None
    allocated: int | None
    reserved: int | None
    unused: int | None
    process: int | None
    others: int | None
    allowed: int | None

    @property
    def outside(self) -> int | None:
        """Of this process, what PyTorch's allocator does not know: context, communicators, libraries."""
        if self.process is None or self.reserved is None:
            return None
        return max(self.process - self.reserved, 0)


class Further(msgspec.Struct, frozen=True, kw_only=True):
    """A message after the first of a log that asks for another size; `times` that this one is there."""

    message: OutOfMemory
    times: int


class Log(msgspec.Struct, frozen=True, kw_only=True):
    """The first message of a text, how often it is repeated, and those that ask for another size, in their order."""

    first: OutOfMemory
    repeats: int
    further: tuple[Further, ...]


def read_message(text: str) -> OutOfMemory:
    """The first message in a text, which may be a whole log; BadInput where none states a size.

    >>> found = read_message("CUDA out of memory. Tried to allocate 786.00 MiB (GPU 0; 31.74 GiB total capacity)")
    >>> found.requested[0].middle, found.device, found.total
    (824180736, 'cuda', 34080565493)
    """
    return read_log(text).first


def asks_for_memory(text: str) -> bool:
    """Whether a text has a message with a size."""
    return next(_requests(COLOURS.sub("", text)), None) is not None


def read_log(text: str) -> Log:
    """Every message of a text; BadInput where none states a size."""
    text = COLOURS.sub("", text)
    asked = tuple(_requests(text))
    if not asked:
        raise BadInput(_unreadable(text))
    first = _message(text, asked[0])
    if not any(span.at_most for span in first.requested):
        raise BadInput(
            f"the message asks for {first.requested[0].text}, which no tensor has: the card itself could not be used; "
            "look at it with nvidia-smi, or give the line of another rank"
        )
    times = Counter((one.digits, one.unit) for one in asked)
    earliest: dict[tuple[str, str], _Request] = {}
    for one in asked:
        earliest.setdefault((one.digits, one.unit), one)
    size, *others = earliest
    further = tuple(Further(message=_message(text, earliest[key]), times=times[key]) for key in others[:MOST_FURTHER])
    return Log(first=first, repeats=times[size] - 1, further=further)


class _Request(NamedTuple):
    """Where a size stands in a text, and the size."""

    start: int
    end: int
    digits: str
    unit: str


def _requests(text: str) -> Iterator[_Request]:
    """Every request with a size, in the order of the text; of two readings of one place that of the exact bytes."""
    found: dict[int, _Request] = {}
    for pattern in REQUESTS:
        for match in pattern.finditer(text):
            found[match.start()] = _Request(match.start(), match.end(), match[1].replace(",", ""), match[2])
    for match in SHAPED.finditer(text):
        nbytes = math.prod(map(int, match[1].split(","))) * TYPE_BYTES[match[2].lower()]
        found[match.start()] = _Request(match.start(), match.end(), str(nbytes), "bytes")
    last = -1
    for start in sorted(found):
        # one wording may begin inside another
        if start >= last:
            yield found[start]
            last = found[start].end


def _message(text: str, asked: _Request) -> OutOfMemory:
    """What stands around a request, up to the next one of the same log, which has capacities of its own."""
    start, reach = _start(text, asked.start), asked.end + REACH
    after = [match.start() for pattern in REQUESTS if (match := pattern.search(text, asked.end, reach)) is not None]
    message = text[start : min([*after, reach])]
    facts = {name: _fact(patterns, message) for name, patterns in _FACTS.items()}
    others = [_bytes(*found) for found in _OTHERS.findall(message)]
    if facts["reserved"] is None and facts["allocated"] is not None and facts["unused"] is not None:
        facts["reserved"] = facts["allocated"] + facts["unused"]
    if facts["unused"] is None and facts["allocated"] is not None and facts["reserved"] is not None:
        facts["unused"] = max(facts["reserved"] - facts["allocated"], 0)
    index = _INDEX.search(message)
    return OutOfMemory(
        text=" ".join(_sentence(message).split()),
        before=_before(text, start),
        device=_device(message, text[max(0, start - REACH) : start]),
        index=int(index[1]) if index else None,
        requested=_spans(asked.digits, asked.unit),
        others=sum(others) if others else None,
        **facts,
    )


def _start(text: str, at: int) -> int:
    """Where the message begins: its line, or the line that a table of figures stands under."""
    table = text.rfind("would exceed allowed memory", max(0, at - REACH), at)
    line = text.rfind("\n", 0, at if table < 0 else table) + 1
    return max(line, at - REACH)


def _unreadable(text: str) -> str:
    """Why a text tells nothing."""
    shown = " ".join(text.split())[:60]
    for advice, pattern in ELSEWHERE.items():
        if pattern.search(text):
            return f"the message {shown!r} {advice}"
    if SIZELESS.search(text):
        return (
            f"the message {shown!r} says that memory ran out and not how much was asked for; give the line with "
            "'Tried to allocate ...', or the whole log"
        )
    return (
        f"{shown!r} holds no out-of-memory message with a size; give the text of the error, such as 'CUDA out of "
        "memory. Tried to allocate 16.83 GiB ...', or a file with it"
    )


def _sentence(message: str) -> str:
    """The message up to its own end: advice that follows its figures, and what a log prints next, left out."""
    ends = [message.find(stop) for stop in ("\n\n", "If reserved", "See documentation", "\nTraceback", "\n[")]
    found = [end for end in ends if end > 0]
    return message[: min(found)] if found else message


def _before(text: str, start: int) -> str:
    lines = text[max(0, start - CONTEXT) : start]
    return lines[max(lines.rfind("Traceback"), 0) :]


def _device(message: str, before: str) -> str:
    found = _DEVICE.search(message) or _DEVICE.search(before)
    if found is not None and found[1] is None:
        # functions of the runtime, and CuPy, which has CUDA alone
        return "cuda" if found[2] == "cuda" or found[3] else "hip"
    if found is None and (XLA.search(message) or XLA.search(before)):
        return "xla"
    if found is None:
        # numpy, and whoever retells: a message that knows no device is of the host where it counts bytes
        return "cuda" if "GPU" in message or "PyTorch" in message else "cpu"
    return "cpu" if found[1] == "DefaultCPUAllocator" else found[1].lower()


def _fact(patterns: tuple[str, ...], message: str) -> int | None:
    for pattern in patterns:
        found = re.search(pattern, message, re.IGNORECASE)
        if found is not None:
            return _bytes(found[1], found[2])
    return None


def _bytes(digits: str, unit: str) -> int:
    """What PyTorch means by a size: its GB, where it writes that, are 2^30 bytes."""
    return int(Decimal(digits) * 1024 ** _POWERS[_prefix(unit)])


def _prefix(unit: str) -> str:
    return "" if unit.lower() in ("bytes", "b") else unit[0].upper()


def _spans(digits: str, unit: str) -> tuple[Span, ...]:
    """All bytes that are printed so; a size without decimals may have lost them, rounded or cut."""
    prefix, text = _prefix(unit), f"{digits} {unit}"
    if not prefix:
        count = int(Decimal(digits))
        return (Span(text=text, at_least=count, at_most=count),)
    _, point, decimals = digits.partition(".")
    off = Decimal(1).scaleb(-len(decimals)) / (2 if point else 1)
    binary, decimal = 1024 ** _POWERS[prefix], 1000 ** _POWERS[prefix]
    return tuple(
        Span(
            text=text,
            at_least=max(int((Decimal(digits) - off) * size), 0),
            at_most=math.ceil((Decimal(digits) + off) * size),
        )
        for size in ((binary,) if unit[1:2].lower() == "i" else (binary, decimal))
    )
