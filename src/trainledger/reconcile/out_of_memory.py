"""A failed request and the storages of a plan: which of them it was, or what would make it of the size that was asked.

PyTorch prints what its allocator would take from the device, which is a request rounded up; so a storage answers if
its own size or what the allocator makes of it prints as the message does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from trainledger.account.memory.answers.stored import Stored
from trainledger.account.memory.reserved.allocator import (
    LARGE_SEGMENT,
    LARGE_STEP,
    OWN_SEGMENT_FROM,
    SMALL,
    SMALL_SEGMENT,
    UNIT,
)
from trainledger.adapters.out_of_memory import OutOfMemory, Span
from trainledger.errors import UnknownName

EXACT = ("cpu", "xla")
"""Where an allocator asks for what a tensor takes: not PyTorch's steps of 2 MiB."""
MOST_CANDIDATES = 12
MOST_INVERSIONS = 4
NEAREST = 3

KNOBS: dict[str, str] = {
    "logits": "--mbs or --seq; --tp or --cp; --loss, in chunks or fused where the engine has it",
    "scores": "--attention flash; --mbs or --seq; --tp or --cp",
    "activations": "--mbs or --seq; --tp with --sp, or --cp; --recompute full",
    "gradients": "--zero 2 or 3 with more GPUs; --tp or --pp",
    "weights": "--zero 3 with more GPUs; --tp or --pp; --offload parameters",
    "optimizer": "--zero 1 or higher with more GPUs; --offload optimizer; an --optimizer of 8 bits",
    "buffers": "--zero and more GPUs; --tp or --pp",
    "gathered": "--tp, which cuts a unit; more GPUs do not make it smaller",
    "bucket": "--reduce-bucket",
    "copies": "load the model divided, so that no rank holds it whole; --tp or --pp; more GPUs where it is a share",
}

HINTS: dict[str, tuple[str, ...]] = {
    "logits": ("logits", "lm_head", "cross_entropy", "log_softmax", "loss_function(", "loss_fn("),
    "scores": ("softmax(attn", "attention_scores", "attn_weights", "baddbmm", "attention_probs"),
    "optimizer": (
        "exp_avg",
        "initialize_optimizer_states",
        "single_partition_of_fp32_groups",
        "fp32_partitioned_groups",
    ),
    "copies": ("flatten_dense_tensors", "load_state_dict", "from_pretrained", "_load_state_dict_into_model"),
    "gathered": ("all_gather_into_tensor", "unshard(", "reduce_scatter_tensor"),
}
"""Words of the line of the program that asked, and the family of storages that it asks for."""


PHASES: dict[str, tuple[str, ...]] = {
    "forward": ("return forward_call(", "in forward\n"),
    "backward": ("run_backward(", "autograd.backward(", "loss.backward("),
    "optimizer": ("optimizer.step(", "exp_avg_sq", "initialize_optimizer_states", "_multi_tensor_adam"),
}
"""Words of a traceback, and the part of a step that runs there: a phase that has the word in it."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A storage of the plan that has the size asked for; `off` is what is granted for it, over the print, less 1.

    also   how many others of the same size, family and phase there are
    """

    name: str
    family: str
    amount: int
    pp_stages: tuple[int, ...]
    phase: str
    formula: str
    knob: str
    in_plan: bool
    place: str
    off: float
    also: int = 0


class Inversion(msgspec.Struct, frozen=True, kw_only=True):
    """What would make a storage of the size asked for: tokens of a micro-batch on one rank, and what gives them.

    mbs, seq    sequences of the plan's length; length of the plan's micro-batch
    vocabulary  entries on one rank at the plan's tokens, for logits
    """

    name: str
    family: str
    per_token: int
    tokens_at_least: int
    tokens_at_most: int
    mbs: float
    seq: int
    vocabulary: int | None
    planned_tokens: int


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """A part of what the device was full of."""

    what: str
    amount: int


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """What a message comes to under a plan; `named`: the family that flag or traceback name, "" without."""

    candidates: tuple[Candidate, ...]
    nearest: tuple[Candidate, ...]
    inversions: tuple[Inversion, ...]
    named: str


def explain(
    message: OutOfMemory, found: Sequence[Stored], *, tensor: str = "", tokens: int, mbs: int, cp: int, seq: int
) -> Explained:
    """The candidates, those that are named first; of storages that are named and do not match, what would give them."""
    wanted = _wanted(found, tensor) if tensor else None
    hint = _hint(message.before + "\n" + message.text)
    rows = [(one, off) for one in found if (off := _off(message, one)) is not None]
    if wanted is not None:
        rows = [(one, off) for one, off in rows if one in wanted]
    host, phase = message.device == "cpu", _phase(message.before + "\n" + message.text)
    rows.sort(
        key=lambda row: (
            row[0].family != hint,
            (row[0].place == "host") != host,
            not row[0].in_plan,
            phase not in row[0].phase,
            abs(row[1]),
        )
    )
    candidates = _grouped(rows)[:MOST_CANDIDATES]
    asked = wanted if wanted is not None else [one for one in found if one.family == (hint or "logits")]
    met = any(one.family == hint for one in candidates) if hint and wanted is None else bool(candidates)
    invertible = [] if met else [one for one in asked if one.per_token]
    return Explained(
        candidates=tuple(candidates),
        nearest=() if candidates else tuple(_nearest(message, wanted or found)),
        inversions=_inverted(message.requested, invertible, tokens=tokens, mbs=mbs, cp=cp, seq=seq),
        named=tensor or hint,
    )


def granted(nbytes: int) -> int:
    """What PyTorch's allocator asks the device for on behalf of a request. [torch: CUDACachingAllocator.cpp]

    >>> granted(100 << 20) >> 20, granted((64 << 20) + 1) >> 20, granted(5 << 20) >> 20, granted(4096) >> 20
    (100, 66, 20, 2)
    """
    size = -(-nbytes // UNIT)
    if size <= SMALL:
        return SMALL_SEGMENT * UNIT
    if size < OWN_SEGMENT_FROM:
        return LARGE_SEGMENT * UNIT
    return -(-size // LARGE_STEP) * LARGE_STEP * UNIT


def full_of(message: OutOfMemory) -> tuple[Share, ...]:
    """What the device held at that moment, as far as the message says."""
    parts: list[tuple[str, int | None]] = [
        ("tensors", message.allocated),
        ("kept by PyTorch's allocator, unused", message.unused),
        ("of this process, outside PyTorch's allocator", message.outside),
        ("other processes", message.others),
    ]
    known = sum(amount or 0 for _, amount in parts)
    if message.outside is None and message.total is not None and message.reserved is not None:
        free = message.free or 0
        rest = message.total - free - known
        parts.append(("outside PyTorch's allocator, and other processes", rest if message.free is not None else None))
    parts.append(("free", message.free))
    return tuple(Share(what=what, amount=amount) for what, amount in parts if amount is not None and amount > 0)


def _wanted(found: Sequence[Stored], tensor: str) -> list[Stored]:
    """The storages whose name or family holds the text."""
    text = tensor.lower()
    chosen = [one for one in found if text in one.name.lower() or text == one.family]
    if not chosen:
        names = dict.fromkeys([one.family for one in found] + [one.name for one in found])
        raise UnknownName("tensor of this plan (--tensor)", tensor, names)
    return chosen


def _hint(text: str) -> str:
    """The family that the traceback speaks of last."""
    found = {family: max(text.rfind(word) for word in words) for family, words in HINTS.items()}
    family = max(found, key=lambda name: found[name])
    return family if found[family] >= 0 else ""


def _phase(text: str) -> str:
    """The part of a step that the traceback ends in; "" where it does not say."""
    found = {phase: max(text.rfind(word) for word in words) for phase, words in PHASES.items()}
    phase = max(found, key=lambda name: found[name])
    return phase if found[phase] >= 0 else ""


def _off(message: OutOfMemory, one: Stored) -> float | None:
    """How far what is granted for a storage is from the print; None where it would be printed otherwise."""
    # a storage that shares a segment of the least size tells nothing of itself
    alone = message.device in EXACT or one.amount < OWN_SEGMENT_FROM * UNIT
    sizes = (one.amount,) if alone else (granted(one.amount), one.amount)
    for span in message.requested:
        for size in sizes:
            if span.at_least <= size <= span.at_most:
                return size / span.middle - 1 if span.middle else 0.0
    return None


def _grouped(rows: Iterable[tuple[Stored, float]]) -> list[Candidate]:
    """Storages that answer alike as one; what the plan makes stands for what it would make otherwise."""
    groups: dict[tuple[object, ...], list[tuple[Stored, float]]] = {}
    planned: set[tuple[str, int]] = set()
    for one, off in rows:
        if not one.in_plan and (one.family, one.amount) in planned:
            continue
        if one.in_plan:
            planned.add((one.family, one.amount))
        groups.setdefault((one.family, one.amount, one.phase.partition(":")[0], one.in_plan), []).append((one, off))
    return [_candidate(*members[0], also=len(members) - 1) for members in groups.values()]


def _candidate(one: Stored, off: float, also: int = 0) -> Candidate:
    return Candidate(
        name=one.name,
        family=one.family,
        amount=one.amount,
        pp_stages=one.pp_stages,
        phase=one.phase,
        formula=one.formula,
        knob=KNOBS[one.family],
        in_plan=one.in_plan,
        place=one.place,
        off=off,
        also=also,
    )


def _nearest(message: OutOfMemory, found: Iterable[Stored]) -> list[Candidate]:
    """The storages nearest in size."""
    asked = max(message.requested[0].middle, 1)
    ranked = sorted(found, key=lambda one: (abs(math.log(one.amount / asked)), not one.in_plan))
    return _grouped((one, one.amount / asked - 1) for one in ranked[: 4 * NEAREST])[:NEAREST]


def _inverted(
    requested: Sequence[Span], found: Iterable[Stored], *, tokens: int, mbs: int, cp: int, seq: int
) -> tuple[Inversion, ...]:
    """Of each number of bytes a token once, what a plan's tokens scale with."""
    made: dict[int, Inversion] = {}
    planned: set[int] = set()
    span = requested[0]
    for one in sorted(found, key=lambda one: not one.name.startswith(one.family)):
        least, most = -(-span.at_least // one.per_token), span.at_most // one.per_token
        if one.in_plan:
            planned.add(one.per_token)
        if one.per_token in made or most < 1:
            continue
        middle = span.middle / one.per_token
        element = _element(one)
        made[one.per_token] = Inversion(
            name=one.name,
            family=one.family,
            per_token=one.per_token,
            tokens_at_least=min(least, most),
            tokens_at_most=max(least, most),
            mbs=middle * cp / seq,
            seq=round(middle * cp / mbs),
            vocabulary=round(span.middle / (tokens * element)) if one.family == "logits" else None,
            planned_tokens=tokens,
        )
    # what the plan makes, and of that the least far from it, first
    ranked = sorted(
        made.values(),
        key=lambda one: (one.per_token not in planned, abs(math.log(one.tokens_at_most / tokens))),
    )
    return tuple(ranked[:MOST_INVERSIONS])


def _element(one: Stored) -> int:
    """Bytes of an element, as the formula of logits ends."""
    return int(one.formula.removesuffix(" B").rpartition(" x ")[2])
