"""What a proof is made of: every model in every layout, plans drawn at random, planted faults, dry runs at full size.

A cell is one call of `trainledger prove`, as a person could type it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from trainledger.errors import TrainledgerError
from trainledger.service.prove_plan import planned
from trainledger.service.prove_request import Request

Kind = Literal["run", "fault", "dry"]
Flags = Mapping[str, Any]
"""Fields of the Request of `prove`, without the model."""

RANDOM_PLANS = 20
MOST_RANKS = 8
"""Of a plan drawn at random."""
LAYERS, EXPERTS, WIDTH = 4, 4, 16
"""What tests/parity.py trains has so many layers at most, experts in a layer, and rows in the narrowest of them."""
DRY_TIMEOUT_S = 7200


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to prove.

    id       row/column: the model as the page calls it, and the layout
    model    as `prove` is given it
    parity   what tests/parity.py calls a model of this kind; "" where gradients are not compared
    fault    what is planted before the observed step
    """

    id: str
    kind: Kind
    model: str
    flags: dict[str, Any]
    parity: str = ""
    fault: str = ""

    @property
    def request(self) -> Request:
        """What `prove` is asked."""
        return Request(model=self.model, **self.flags)

    @property
    def words(self) -> str:
        """The flags as they are typed.

        >>> flags = {"dp": 2, "cp_comm": "ring", "sp": False, "dry": True, "set": ("a=1",)}
        >>> Cell(id="", kind="run", model="gpt2", flags=flags).words
        '--dp 2 --cp-comm ring --no-sp --dry --set a=1'
        """
        return " ".join(word for name, value in self.flags.items() for word in _typed(name.replace("_", "-"), value))


def _typed(name: str, value: object) -> Iterator[str]:
    if isinstance(value, bool):
        yield f"--{name}" if value else f"--no-{name}"
        return
    for one in value if isinstance(value, tuple) else (value,):
        yield f"--{name} {one}"


class Subject(NamedTuple):
    """A model of the proof: its name on the page, what `prove` is given, and what tests/parity.py calls its kind."""

    name: str
    model: str
    flags: Flags
    parity: str
    routed: bool = False


SUBJECTS: tuple[Subject, ...] = (
    Subject("llama-3-8b", "llama-3-8b", {}, "llama"),
    Subject("qwen2.5-0.5b", "qwen2.5-0.5b", {}, "qwen-tied"),
    Subject("qwen2.5-7b", "qwen2.5-7b", {}, "qwen"),
    Subject("mixtral-8x7b", "mixtral-8x7b", {}, "mixtral", routed=True),
    Subject("deepseek-v2", "deepseek-v2", {}, "latent", routed=True),
    Subject("deepseek-v2-full-q", "deepseek-v2", {"set": ("q_lora_rank=null",)}, "latent-full-q", routed=True),
)
"""Untied, tied, untied with biases, routed, routed with compressed attention, and that with queries left whole."""

LATE: Flags = {"recompute": "full", "early_stop": False}
HALF: Flags = {"precision": "bf16"}
EIGHT_BITS = ("adamw-8bit", "adamw-fp8")


def _data() -> Iterator[tuple[str, Flags]]:
    """Data parallelism alone: every stage, with and without accumulation, on ranks that divide sizes and on three."""
    for zero in range(4):
        for ranks in (2, 3, 4):
            for batches in (1, 2):
                yield f"dp{ranks}-zero{zero}-mb{batches}", {"dp": ranks, "zero": zero, "gbs": ranks * batches}
    for zero in (1, 2, 3):
        yield f"dp2x2-zero{zero}", {"dp_replicate": 2, "dp_shard": 2, "zero": zero}


def _model_parallel() -> Iterator[tuple[str, Flags]]:
    """Tensor, pipeline and context parallelism, alone and under data parallelism."""
    yield "tp2-no-sp", {"tp": 2, "sp": False}
    yield "tp2", {"tp": 2}
    yield "tp2-dp2-zero3", {"tp": 2, "dp": 2, "zero": 3}
    yield "pp2-1f1b", {"pp": 2, "schedule": "1f1b"}
    yield "pp2-interleaved", {"pp": 2, "vpp": 2, "schedule": "interleaved"}
    yield "pp2-zero-bubble", {"pp": 2, "schedule": "zero-bubble"}
    yield "cp2-ring", {"cp": 2, "cp_comm": "ring"}
    yield "cp2-all-gather", {"cp": 2, "cp_comm": "all_gather"}
    yield "pp2-tp2-dp2-zero3", {"pp": 2, "tp": 2, "dp": 2, "zero": 3}
    yield "cp2-tp2-dp2-zero3", {"cp": 2, "tp": 2, "dp": 2, "zero": 3}


def _experts() -> Iterator[tuple[str, Flags]]:
    """Experts owned by ranks: by one rank each, and shared by two."""
    for ranks, stages in ((2, (0, 3)), (4, range(4))):
        for zero in stages:
            yield f"ep2-dp{ranks}-zero{zero}", {"ep": 2, "dp": ranks, "zero": zero}


def _again() -> Iterator[tuple[str, Flags]]:
    """Blocks computed twice: until the last tensor that is needed, or to the end."""
    yield "dp2-zero3-recompute", {"dp": 2, "zero": 3, "recompute": "full"}
    yield "dp2-zero3-recompute-late", {"dp": 2, "zero": 3, **LATE}
    yield "tp2-recompute", {"tp": 2, "recompute": "full"}
    yield "tp2-recompute-late", {"tp": 2, **LATE}
    yield "pp2-1f1b-recompute", {"pp": 2, "recompute": "full"}


def _half() -> Iterator[tuple[str, Flags]]:
    """bf16, whose gradients have no exact counterpart to be compared with."""
    yield "dp2-zero0-bf16", {"dp": 2, "zero": 0, **HALF}
    yield "dp2-zero3-bf16", {"dp": 2, "zero": 3, **HALF}
    yield "tp2-dp2-zero3-bf16", {"tp": 2, "dp": 2, "zero": 3, **HALF}


def _narrow() -> Iterator[tuple[str, Flags]]:
    """A scaled loss, products in FP8 and moments in 8 bits, each where something of it is gathered, cut or sent."""
    yield "dp2-zero3-fp16", {"dp": 2, "zero": 3, "precision": "fp16"}
    yield "tp2-fp16", {"tp": 2, "precision": "fp16"}
    yield "pp2-1f1b-fp16", {"pp": 2, "precision": "fp16"}
    yield "dp2-zero3-fp8-tensorwise", {"dp": 2, "zero": 3, "precision": "fp8-tensorwise"}
    yield "dp2-zero3-fp8-rowwise", {"dp": 2, "zero": 3, "precision": "fp8-rowwise"}
    yield "dp2-zero2-fp8-forward", {"dp": 2, "zero": 2, "precision": "fp8-forward"}
    yield "dp2-zero3-adamw-8bit", {"dp": 2, "zero": 3, "optimizer": "adamw-8bit"}


def _saved() -> Iterator[tuple[str, Flags]]:
    """Checkpoints: of parts that are divided, of replicas and both ends of a pipeline, of moments that are decoded."""
    yield "dp2-zero3-checkpoint", {"dp": 2, "zero": 3, "checkpoint": True}
    yield "pp2-tp2-dp2-zero1-checkpoint", {"pp": 2, "tp": 2, "dp": 2, "zero": 1, "checkpoint": True}
    yield "dp2-zero3-adamw-8bit-checkpoint", {"dp": 2, "zero": 3, "optimizer": "adamw-8bit", "checkpoint": True}


def matrix() -> Iterator[Cell]:
    """Every model in every layout that it can have."""
    for subject in SUBJECTS:
        groups = (_data, _model_parallel, *((_experts,) if subject.routed else ()), _again, _half, _narrow, _saved)
        for group in groups:
            for layout, flags in group():
                yield _cell(subject, layout, flags)


def _cell(subject: Subject, layout: str, flags: Flags) -> Cell:
    # gradients are those of fp32, in layouts and not in what is kept of them
    compared = not {"precision", "checkpoint"} & flags.keys() and flags.get("optimizer") not in EIGHT_BITS
    return Cell(
        id=f"{subject.name}/{layout}",
        kind="run",
        model=subject.model,
        flags={**subject.flags, **flags},
        parity=subject.parity if compared else "",
    )


def drawn(seed: int, count: int = RANDOM_PLANS) -> Iterator[Cell]:
    """Plans drawn at random that no rule of `prove` refuses, the same for the same seed."""
    chosen = random.Random(seed)  # noqa: S311 - the same plans for the same seed
    seen: set[str] = set()
    while len(seen) < count:
        cell = _cell(chosen.choice(SUBJECTS), f"random-{seed}-{len(seen)}", _flags(chosen))
        key = f"{cell.model} {cell.words}"
        if key not in seen and _legal(cell):
            seen.add(key)
            yield cell


_DEGREES: Mapping[str, tuple[int, ...]] = {
    "tp": (1, 1, 2),
    "pp": (1, 1, 2, 4),
    "vpp": (1, 2),
    "cp": (1, 1, 2, 4),
    "ep": (1, 1, 2, 4),
    "dp_replicate": (1, 1, 2),
    "dp_shard": (1, 2, 3, 4),
    "zero": (0, 1, 2, 3),
    "mbs": (1, 2),
}
"""What is drawn, 1 more often than another: most products would be too large."""


def _flags(chosen: random.Random) -> dict[str, Any]:
    """Flags of a plan of 2 to MOST_RANKS ranks, and how it is run."""
    while True:
        degrees = {name: chosen.choice(values) for name, values in _DEGREES.items()}
        data = degrees["dp_replicate"] * degrees["dp_shard"]
        ranks = degrees["tp"] * degrees["pp"] * degrees["cp"] * data
        if 2 <= ranks <= MOST_RANKS and _comparable(degrees):
            break
    flags: dict[str, Any] = {name: degree for name, degree in degrees.items() if degree > 1}
    flags["gbs"] = chosen.choice((1, 2, 3, 4)) * degrees["mbs"] * data
    flags["optimizer"] = chosen.choice(("adamw", "adamw-fused", "sgd", "sgd-momentum"))
    flags |= chosen.choice(({}, {"recompute": "full"}, LATE))
    if degrees["tp"] > 1:
        flags |= {"sp": chosen.choice((True, False)), "loss_parallel": chosen.choice((True, False))}
    if degrees["pp"] > 1:
        flags["schedule"] = chosen.choice(("1f1b", "interleaved", "zero-bubble"))
    if degrees["cp"] > 1:
        flags["cp_comm"] = chosen.choice(("ring", "all_gather"))
    return flags


def _comparable(degrees: Mapping[str, int]) -> bool:
    """Whether a model of tests/parity.py can be cut so: layers over stages, experts or their rows over ranks."""
    experts, sharing = EXPERTS // degrees["ep"], degrees["dp_shard"] * degrees["cp"] // degrees["ep"]
    return degrees["pp"] * degrees["vpp"] <= LAYERS and (sharing <= experts or WIDTH % sharing == 0)


def _legal(cell: Cell) -> bool:
    try:
        planned(cell.request)
    except TrainledgerError:
        return False
    return True


FAULTS: Mapping[str, str] = {
    "extra-buffer": "aten::zeros",
    "doubled-all-gather": "moved/all_gather/fp32:",
    "bf16-moment": "held/optimizer/model.embed_tokens.weight:exp_avg",
    "dropped-collective": "moved/all_reduce/fp32:",
}
"""How whatever a comparison blames for a planted fault begins."""


def faults() -> Iterator[Cell]:
    """Runs that must not be proven."""
    for fault in FAULTS:
        yield Cell(id=f"fault/{fault}", kind="fault", model="llama-3-8b", flags={"dp": 2, "zero": 3}, fault=fault)


FULL: Flags = {"dry": True, "full_size": True, "seq": 8192, "timeout": DRY_TIMEOUT_S, **HALF}
DRY_PLANS: Mapping[str, Flags] = {
    "dp64-zero3": {"dp": 64, "zero": 3, "gbs": 64},
    "tp8-dp8-zero3": {"tp": 8, "dp": 8, "zero": 3, "gbs": 8},
}
DRY_RECOMPUTE: Mapping[str, Flags] = {"": {}, "-recompute": {"recompute": "full"}, "-recompute-late": LATE}
LARGE = ("dp64-zero3-recompute", "tp8-dp8-zero3", "tp8-dp8-zero3-recompute-late")
"""What is tried of the 70B model, which takes ten times as long."""


def dry() -> Iterator[Cell]:
    """64 ranks of models at full size, with fake tensors."""
    for model in ("llama-3-8b", "llama-3-70b"):
        for plan, flags in DRY_PLANS.items():
            for suffix, more in DRY_RECOMPUTE.items():
                layout = plan + suffix
                if model == "llama-3-8b" or layout in LARGE:
                    yield Cell(id=f"dry/{model}/{layout}", kind="dry", model=model, flags={**flags, **more, **FULL})


def every(seed: int) -> tuple[Cell, ...]:
    """The whole proof, what takes longest last."""
    return (*faults(), *matrix(), *drawn(seed), *dry())
