"""What data parallelism divides and sends: more of it than a plan needs, or over links too slow for it."""

from __future__ import annotations

from trainledger.account.ledger import Moved
from trainledger.account.memory.outside import Outside
from trainledger.arrays import ints
from trainledger.checklist.account import Account
from trainledger.checklist.check import Check, Evidence, Found, held, lines_as
from trainledger.dtypes import bytes_of
from trainledger.plans import sharding
from trainledger.rules.rule import Severity
from trainledger.units import format_bytes

SLOW = 3
"""Times the arithmetic at the card's peak: traffic that takes longer cannot be hidden behind what cards reach."""
BUCKET_SHARE = 0.05
"""Of usable memory: so much that buckets take is worth a sentence."""
LIVE_ELEMENTS = 1_000_000_000
"""stage3_max_live_parameters and stage3_max_reuse_distance, unless they are set. [deepspeed: zero/config.py 113-246]"""
PADDED_SHARE = 0.005
"""Of a buffer: so much that is padding is worth a sentence."""
UNBUILT = "without zero.Init"
"""Marks the profile's line of a model that DeepSpeed divides only once every card has it whole."""
GROUPS = ("dp_shard", "expert_dp_shard")
"""Groups over which sharded states travel."""


def _sent(account: Account) -> list[Moved]:
    return [move for move in account.entry.traffic if move.group in GROUPS]


def _moved(moves: list[Moved], most: int = 3) -> tuple[Evidence, ...]:
    largest = sorted(moves, key=lambda move: -move.wire_bytes)[:most]
    return tuple(
        Evidence(
            line=f"moved/{move.collective}/{move.what}@{move.group}",
            amount=move.wire_bytes,
            unit="B",
            note=f"{move.count} calls over {move.ranks} ranks",
        )
        for move in largest
    )


def _lower_stage(account: Account) -> Found | None:
    """Whether a lower stage that still divides something leaves the margin."""
    setting, row = account.setting, account.row
    lower = [stage for stage in setting.profile.zero_stages if 0 < stage < 3]
    if row["zero_stage"] != 3 or account.shards == 1 or not lower or "parameters" in setting.scenario.offload:
        return None
    other = account.instead(zero_stage=max(lower))
    if other is None or not other.roomy:
        return None
    usable = other.usable or 0
    now, then = (sum(move.wire_bytes for move in _sent(one)) for one in (account, other))
    return Found(
        message=(
            f"memory is not tight: --zero {max(lower)} would hold {format_bytes(other.device)} of "
            f"{format_bytes(usable)}, where --zero 3 holds {format_bytes(account.device)}, and send "
            f"{then / 1e9:,.1f} GB a step in place of {now / 1e9:,.1f}"
        ),
        knob=f"--zero {max(lower)}",
        evidence=(
            held(f"device at zero_stage {max(lower)}", other.device),
            held("device", account.device),
            held("usable", usable),
            *_moved(_sent(account)),
        ),
    )


def _slow_link(account: Account) -> Found | None:
    """Against the arithmetic at the card's peak where the cluster says how fast its links are; else the bytes.

    Rings leave a node over the links of all its ranks that share, each with its part of what one rank sends.
    """
    moves = _sent(account)
    wire = sum(move.wire_bytes for move in moves)
    if account.row["zero_stage"] != 3 or account.shards == 1 or not account.nodes_crossed or not wire:
        return None
    said = f"--zero 3 sends {wire / 1e9:,.1f} GB a step and rank, and its ranks are on several nodes"
    knob = "--dp-replicate, so that a node has a copy of its own (hpZ, HSDP), --zero 2, or a larger --mbs"
    cluster, least = account.setting.cluster, account.least_step_s
    named = cluster is not None and bool({"inter.nics", "inter.one_way"} & set(cluster.facts))
    if cluster is None or least is None or not named:
        return Found(
            message=f"{said}, over links that nobody named", knob=knob, evidence=_moved(moves), severity="advise"
        )
    near = min(max(cluster.scale_up_domain // account.row["tp"], 1), account.shards)
    seconds = wire / (near * cluster.inter_bytes_per_s)
    if seconds < least:
        return None
    severity: Severity = "warn" if seconds > SLOW * least else "advise"
    return Found(
        message=(
            f"{said}: at least {seconds:.3g} s on the links between them, {seconds / least:.1f} times what the "
            "arithmetic takes at the card's peak"
        ),
        knob=knob,
        evidence=(
            *_moved(moves),
            Evidence(
                line="seconds on the links between nodes",
                amount=seconds,
                unit="s",
                note=f"{near} ranks of a node at {cluster.inter_bytes_per_s / 1e9:g} GB/s each; {cluster.inter.source}",
            ),
            Evidence(line="seconds of arithmetic at the card's peak", amount=least, unit="s"),
        ),
        severity=severity,
    )


def _owned(account: Account) -> int:
    """Parameters of this rank before data parallelism divides them."""
    own, where = account.entry.own, account.entry.where
    return int((own.shapes.numel[0] * own.shapes.copies[0] * own.held[0, where]).sum())


def _no_sync(account: Account) -> Found | None:
    """Gradients of all weights are kept whole between micro-batches where reductions wait for the last."""
    row, usable = account.row, account.usable
    batches = row["num_microbatches"]
    if row["zero_stage"] < 2 or batches < 2 or account.shards == 1 or usable is None:
        return None
    dtype = account.setting.dtype("reduce")
    whole = int(bytes_of(ints(_owned(account)), dtype)[0])
    more = whole - whole // account.shards
    reduced = [move for move in _sent(account) if move.collective == "reduce_scatter"]
    fits = account.device + more <= usable
    return Found(
        message=(
            f"gradients are reduced after each of {batches} micro-batches; kept whole until the last (no_sync) they "
            f"are {format_bytes(more)} more, which {'fits' if fits else 'does not fit'}"
        ),
        knob="a larger --mbs" if not fits else "a larger --mbs, or no_sync where the engine has it",
        evidence=(held(f"whole gradients in {dtype}", whole), held("usable", usable), *_moved(reduced)),
    )


def _buckets(account: Account) -> Found | None:
    lines = account.lines("held/buffers/", "reduce bucket")
    taken, usable = sum(line.amount for line in lines), account.usable
    if usable is None or taken < BUCKET_SHARE * usable:
        return None
    return Found(
        message=(
            f"the bucket takes {format_bytes(taken)} of {format_bytes(usable)}, whatever the size of the model and the "
            "number of GPUs"
        ),
        knob=f"--reduce-bucket {max(account.setting.model.hidden_size, 1) ** 2}, as auto of Hugging Face would",
        evidence=lines_as(lines),
    )


def _live(account: Account) -> Found | None:
    if account.row["zero_stage"] != 3:
        return None
    live = min(LIVE_ELEMENTS, _owned(account))
    width = account.setting.dtype("gathered")
    taken = int(bytes_of(ints(live), width)[0])
    counted = account.lines("held/buffers/gathered unit")
    beyond = taken - sum(line.amount for line in counted)
    usable = account.usable
    if usable is None or beyond < BUCKET_SHARE * usable:
        return None
    return Found(
        message=(
            f"up to {live:,} parameters may stay gathered, {format_bytes(taken)}, which is {format_bytes(beyond)} more "
            "than the units that are counted"
        ),
        knob="set stage3_max_live_parameters and stage3_max_reuse_distance to a layer or two",
        evidence=(held("parameters that may be live", taken), *lines_as(counted)),
    )


def _outside(line: Outside) -> Evidence:
    return Evidence(line=line.line.id, amount=line.amount, unit="B", note=line.formula)


def _ways(account: Account, place: str) -> list[Outside]:
    """How the run may load, but for a model that is built whole under ZeRO-3, which has a rule of its own."""
    ways = [line for line in account.outside if line.when == "load" and line.place == place]
    return [line for line in ways if UNBUILT not in line.what]


def _over(ways: list[Outside], have: int | None) -> list[Outside]:
    return [line for line in ways if have is not None and line.amount > have]


def _load(account: Account) -> Found | None:
    """A model that is whole somewhere before it is divided, where that is more than a card or a host has."""
    cluster = account.setting.cluster
    host = cluster.host_bytes if cluster is not None else None
    places = [(_ways(account, "host"), host)]
    if not account.setting.workload.qlora:
        places.append((_ways(account, "device"), account.usable))
    over = [line for ways, have in places for line in _over(ways, have)]
    if not over:
        return None
    worst = max(over, key=lambda line: line.amount)
    where = "a card" if worst.place == "device" else "a node"
    lost = any(ways and len(_over(ways, have)) == len(ways) for ways, have in places)
    other = "no other way is known that would do" if lost else "other ways do"
    return Found(
        message=f"loading by way of {worst.what!r} takes {format_bytes(worst.amount)}, more than {where} has; {other}",
        knob="build on the meta device and load shards, or let rank 0 read and broadcast (cpu_ram_efficient_loading)",
        evidence=tuple(map(_outside, over)),
        severity="warn" if lost else "advise",
    )


def _init(account: Account) -> Found | None:
    """The weights in 16 bits that a 4-bit model is made from."""
    over = _over(_ways(account, "device"), account.usable)
    if not account.setting.workload.qlora or not over:
        return None
    return Found(
        message=f"before it is quantised the model takes {format_bytes(over[0].amount)} of the card, which it has not",
        knob="quantise on the host or layer by layer, or load a checkpoint that is quantised",
        evidence=(*map(_outside, over), held("usable", account.usable or 0)),
    )


def _whole_first(account: Account) -> Found | None:
    """ZeRO-3 divides a model that was built whole on every card, unless it was built under zero.Init."""
    whole = next((line for line in account.outside if UNBUILT in line.what), None)
    if whole is None:
        return None
    rest = int(account.stages.states.at("rest").max())
    usable = account.usable
    if whole.amount <= rest or (usable is not None and whole.amount < usable / 4):
        return None
    return Found(
        message=(
            f"a model that is not built under zero.Init is whole on each card first, {format_bytes(whole.amount)}, "
            f"where all its states are {format_bytes(rest)}"
        ),
        knob="build it under deepspeed.zero.Init (HfDeepSpeedConfig before from_pretrained)",
        evidence=(_outside(whole), held("states between steps", rest)),
    )


def _save(account: Account) -> Found | None:
    cluster, rest = account.setting.cluster, int(account.stages.states.at("rest").max())
    host = cluster.host_bytes if cluster is not None else None
    over: list[Outside] = []
    for line in account.outside:
        have, beside = (account.usable, rest) if line.place == "device" else (host, 0)
        if line.when == "save" and have is not None and line.amount + beside > have:
            over.append(line)
    if not over:
        return None
    worst = max(over, key=lambda line: line.amount)
    return Found(
        message=f"saving by way of {worst.what!r} takes {format_bytes(worst.amount)}, more than is left",
        knob="save each rank's shards (SHARDED_STATE_DICT, distributed checkpoint), or gather on the host",
        evidence=tuple(map(_outside, over)),
    )


def _padding(account: Account) -> Found | None:
    lines = account.lines("held/weights/param_data")
    if not lines:
        return None
    stored, width = sum(line.amount for line in lines), account.setting.dtype("weight")
    exact = int(bytes_of(ints(_owned(account)), width)[0])
    if not 0 < stored - exact < stored or stored - exact < PADDED_SHARE * stored:
        return None
    ranks = int(sharding.shard_group(account.plans, expert=False)[0])
    return Found(
        message=(
            f"buckets are padded to a multiple of {ranks} ranks: {format_bytes(stored - exact)} of "
            f"{format_bytes(stored)} is padding"
        ),
        knob="a model of this size needs fewer shards: --dp-replicate, or fewer GPUs",
        evidence=(*lines_as(lines), held("without padding", exact)),
    )


DEEPSPEED = ("deepspeed",)
CHECKS: tuple[Check, ...] = (
    Check(
        id="zero3-when-tight",
        severity="advise",
        source="Rajbhandari et al. 2020, section 7: stage 3 sends half as much again",
        judge=_lower_stage,
        meters=True,
    ),
    Check(
        id="z3-over-slow-link", severity="warn", source="Wang et al. 2023 (ZeRO++), section 3.2: hpZ", judge=_slow_link
    ),
    Check(
        id="no-sync-memory",
        severity="advise",
        source="PyTorch fully_shard set_requires_gradient_sync at 2.13.0",
        judge=_no_sync,
        meters=True,
        engines=("pytorch", "torchtitan"),
    ),
    Check(
        id="ds-bucket-size",
        severity="advise",
        source="DeepSpeed runtime/zero/config.py 113-246 at edaa722",
        judge=_buckets,
        engines=DEEPSPEED,
    ),
    Check(
        id="ds-z3-live-params",
        severity="advise",
        source="DeepSpeed runtime/zero/partitioned_param_coordinator.py 634-664 at edaa722",
        judge=_live,
        engines=DEEPSPEED,
    ),
    Check(id="load-before-shard", severity="warn", source="the engine's profile: what it loads", judge=_load),
    Check(id="init-peak", severity="warn", source="the engine's profile: what it loads", judge=_init),
    Check(
        id="model-not-built-under-zero-init",
        severity="advise",
        source="DeepSpeed runtime/zero/partition_parameters.py at edaa722: Init",
        judge=_whole_first,
        engines=DEEPSPEED,
    ),
    Check(id="save-peak", severity="advise", source="the engine's profile: what it saves", judge=_save),
    Check(
        id="distopt-bucket-padding",
        severity="advise",
        source="Megatron-Core distributed/param_and_grad_buffer.py at d98e8a6",
        judge=_padding,
        engines=("megatron",),
    ),
)
