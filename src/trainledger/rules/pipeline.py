"""Rules about pipeline stages: which layers they hold, and in what order they may work."""

from __future__ import annotations

import numpy as np

from trainledger.arrays import ceil_div
from trainledger.plans.plan import TURNS, Plans
from trainledger.plans.setting import Setting
from trainledger.plans.split import EMPTY, layers_per_chunk, layout_fault
from trainledger.rules.rule import Mask, Rule
from trainledger.rules.shape import choices


def _layers(setting: Setting, plans: Plans) -> Mask | bool:
    """More stages than layers, or a split that the engine refuses."""
    chunks = plans.pp * plans.vpp
    if setting.scenario.pp_layout:
        return False
    if setting.profile.split == "divisible":
        return setting.model.num_layers % plans.pp != 0
    if setting.profile.split in EMPTY:
        sizes, index = np.unique(chunks, return_inverse=True)
        counts = (layers_per_chunk(setting.model.num_layers, size, setting.profile.split) for size in sizes.tolist())
        return np.array([min(count) < 1 for count in counts])[index] & (chunks > 1)
    return (chunks > _most_chunks(setting)) & (chunks > 1)


def _most_chunks(setting: Setting) -> int:
    """One layer in each stage; where the first and last take fewer than others, they may do without."""
    ends = 2 if setting.profile.split in ("less_ends", "padded") else 0
    return setting.model.num_layers + ends


def _virtual_layers(setting: Setting, plans: Plans) -> Mask | bool:
    """Each stage's layers must divide over its virtual stages, with those that fill it up where an engine does that.

    [megatron: arguments.py 971-972] [zero-bubble-fork]
    """
    if setting.scenario.pp_layout or setting.profile.split not in ("divisible", "padded"):
        return False
    layers = setting.model.num_layers
    fits = (layers % plans.pp == 0) | (setting.profile.split == "padded")
    return fits & (ceil_div(layers, plans.pp) % plans.vpp != 0)


def _virtual_layers_sentence(setting: Setting, row: dict[str, int]) -> str:
    share = -(-setting.model.num_layers // row["pp"])
    return (
        f"the {share} layers of each of pp={row['pp']} stages do not divide over vpp={row['vpp']} "
        f"(remainder {share % row['vpp']}); use one of {choices(share)}, or give --pp-layout"
    )


def uneven_layout(layers: int, pp: int) -> str:
    """A --pp-layout of stages that layers do not divide over: embedding and output count as a layer each.

    >>> uneven_layout(94, 4), uneven_layout(3, 4)
    ('23,24,24,23', '')
    """
    layout = layers_per_chunk(layers, pp, "less_ends")
    return ",".join(map(str, layout)) if min(layout) > 0 else ""


def _example(layers: int, row: dict[str, int]) -> str:
    layout = uneven_layout(layers, row["pp"]) if row["vpp"] == 1 else ""
    return f" {layout}" if layout else ""


def _layers_sentence(setting: Setting, row: dict[str, int]) -> str:
    layers, chunks = setting.model.num_layers, row["pp"] * row["vpp"]
    if setting.profile.split == "divisible":
        return (
            f"{layers} layers do not divide over pp={row['pp']} stages (remainder {layers % row['pp']}); "
            f"use one of {choices(layers)}, or give --pp-layout{_example(layers, row)}"
        )
    if setting.profile.split in EMPTY:
        return (
            f"{layers} layers on pp x vpp = {chunks} stages: {setting.profile.name} fills one after the other, and "
            "some would be left empty; change --pp, or give --pp-layout"
        )
    most = _most_chunks(setting)
    return f"pp x vpp = {chunks} stages for {layers} layers: some would be empty; use at most {most}"


def _layout(setting: Setting, plans: Plans) -> Mask | bool:
    layout = setting.scenario.pp_layout
    if not layout:
        return False
    return (plans.pp * plans.vpp != len(layout)) | (sum(layout) != setting.model.num_layers) | (min(layout) < 0)


def _layout_sentence(setting: Setting, row: dict[str, int]) -> str:
    return layout_fault(setting.model.num_layers, row["pp"] * row["vpp"], setting.scenario.pp_layout)


def _vpp(setting: Setting, plans: Plans) -> Mask:
    return (plans.vpp > 1) & ((plans.pp == 1) | (setting.scenario.schedule not in TURNS))


def _vpp_sentence(setting: Setting, row: dict[str, int]) -> str:
    turns = " or ".join(name for name in setting.profile.schedules if name in TURNS)
    have = f"vpp={row['vpp']} with pp={row['pp']}"
    if not turns:
        return f"{have}: {setting.profile.name} has no schedule that takes turns among virtual stages; set vpp to 1"
    return f"{have}: virtual stages need pp > 1 and --schedule {turns}; set both, or vpp to 1"


def _one_chunk(setting: Setting, plans: Plans) -> Mask:
    """Megatron interleaves where there are several chunks; torchtitan asks them of all turns. [megatron: schedules.py]

    [torchtitan: pipeline_parallel.py 252-257]
    """
    needs = TURNS if setting.profile.name == "torchtitan" else ("interleaved",)
    return (plans.pp > 1) & (plans.vpp == 1) & (setting.scenario.schedule in needs)


def _one_chunk_sentence(setting: Setting, row: dict[str, int]) -> str:
    return (
        f"--schedule {setting.scenario.schedule} with vpp={row['vpp']}: {setting.profile.name} takes turns among a "
        "rank's virtual stages only where it has several; use --vpp 2, or --schedule 1f1b"
    )


def _interleaved(setting: Setting, plans: Plans) -> Mask:
    """Megatron: micro-batches in groups of pp; a remainder below pp is refused. [megatron: schedules.py 1160-1177]"""
    uneven = plans.num_microbatches % plans.pp
    return (plans.vpp > 1) & (uneven != 0) & (uneven < plans.pp)


def _rounds(setting: Setting, plans: Plans) -> Mask:
    """PyTorch: as many rounds as pp goes into the micro-batches, all of the same length.

    [torch: distributed/pipelining/schedules.py ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble]
    """
    rounds = np.maximum(plans.num_microbatches // plans.pp, 1)
    turns = setting.scenario.schedule in TURNS
    return (plans.pp > 1) & turns & (plans.num_microbatches % rounds != 0)


def _rounds_sentence(setting: Setting, row: dict[str, int]) -> str:
    batches, rounds = row["num_microbatches"], row["num_microbatches"] // row["pp"]
    return (
        f"{batches} micro-batches for pp={row['pp']} stages make {rounds} rounds that are not equal, which --schedule "
        f"{setting.scenario.schedule} needs; change --gbs or --mbs, or use --schedule 1f1b"
    )


def _recomputed_again(setting: Setting, plans: Plans) -> Mask:
    """Gradients of weights are an autograd call for each set of them, and a checkpoint recomputes for each call.

    [torch: distributed/pipelining/_backward.py stage_backward_weight, utils/checkpoint.py]
    """
    zero_bubble = setting.scenario.schedule == "zero-bubble" and setting.recomputes_all
    return (plans.pp > 1) & zero_bubble


def _schedule(setting: Setting, plans: Plans) -> bool:
    return setting.scenario.schedule not in setting.profile.schedules


def _schedule_sentence(setting: Setting, row: dict[str, int]) -> str:
    return (
        f"--schedule {setting.scenario.schedule} is not something {setting.profile.name} has; "
        f"use one of {', '.join(setting.profile.schedules)}, or another --engine"
    )


RULES: tuple[Rule, ...] = (
    Rule(
        "pp-layout-adds-up",
        "refuse",
        "plan",
        "Megatron-Core pipeline_parallel_layer_layout.py",
        _layout,
        _layout_sentence,
    ),
    Rule(
        "layers-divisible-by-pp",
        "refuse",
        "plan",
        "Megatron-LM arguments.py 968-997 at d98e8a6",
        _layers,
        _layers_sentence,
    ),
    Rule(
        "layers-divisible-by-pp-vpp",
        "refuse",
        "plan",
        "Megatron-LM arguments.py 971-972 at d98e8a6",
        _virtual_layers,
        _virtual_layers_sentence,
    ),
    Rule(
        "engine-schedule",
        "refuse",
        "engine",
        "the engine's profile",
        _schedule,
        _schedule_sentence,
    ),
    Rule(
        "vpp-needs-interleaved",
        "refuse",
        "plan",
        "Megatron-LM arguments.py 1001-1008 at d98e8a6",
        _vpp,
        _vpp_sentence,
    ),
    Rule(
        "interleaved-needs-vpp",
        "refuse",
        "plan",
        "Megatron-Core pipeline_parallel/schedules.py at d98e8a6; torchtitan pipeline_parallel.py 252-257 at b5bcd76",
        _one_chunk,
        _one_chunk_sentence,
        ("megatron", "paper", "torchtitan"),
    ),
    Rule(
        "interleaved-microbatches",
        "refuse",
        "plan",
        "Megatron-Core pipeline_parallel/schedules.py 1160-1177",
        _interleaved,
        (
            "{num_microbatches} micro-batches do not come in groups of pp={pp}, which the interleaved schedule needs; "
            "change --gbs or --mbs, or set vpp to 1"
        ),
        ("megatron", "paper"),
    ),
    Rule(
        "equal-rounds",
        "refuse",
        "plan",
        "PyTorch distributed/pipelining/schedules.py at 2.13.0",
        _rounds,
        _rounds_sentence,
        ("pytorch", "torchtitan"),
    ),
    Rule(
        "zero-bubble-recompute",
        "refuse",
        "plan",
        "PyTorch distributed/pipelining/_backward.py and utils/checkpoint.py at 2.13.0",
        _recomputed_again,
        (
            "--schedule zero-bubble with --recompute full: PyTorch would run each block again for its input and "
            "once more for each of its weights; use --recompute none, or --schedule interleaved"
        ),
        ("pytorch", "torchtitan"),
    ),
)
