"""Whether the card and the host hold a plan, by how much, and what of its memory is nobody's."""

from __future__ import annotations

from trainledger.checklist.account import MARGIN, STATES, Account
from trainledger.checklist.check import Check, Evidence, Found, held, lines_as
from trainledger.rules.rule import Severity
from trainledger.units import format_bytes

MOST_DOUBLINGS = 11
"""Of a job's GPUs: a plan that needs a thousand times as many is another one."""
UNUSED_SHARE = 0.1
"""Of what is allocated: so much more that is reserved is worth a sentence."""
OUTSIDE_SHARE = 0.05
"""Of usable memory: so much that communicators take is worth a sentence."""
FIRST_SHARE = 0.8
"""Of what later steps hold: a first step that holds more than this misleads nobody."""
TRANSIENT_SHARE = 0.05
"""Of usable memory: so much that the optimizer step takes for itself is worth a sentence."""


def _turn(account: Account) -> str:
    """The smallest change that makes the plan fit."""
    change = account.change
    if change is None:
        return "no single change that was tried makes it fit: take larger cards, or a smaller model"
    flag = {"zero_stage": "zero"}.get(change.knob, change.knob)
    return f"--{flag} {change.after} in place of {change.before}"


def _sharing(account: Account) -> str:
    """The lowest zero_stage, or else the fewest GPUs, whose states the card holds."""
    stages = [stage for stage in account.setting.profile.zero_stages if stage > account.row["zero_stage"]]
    for stage in stages:
        other = account.instead(zero_stage=stage) if account.shards > 1 else None
        if other is not None and other.overfull is None:
            return f"--zero {stage}"
    highest = max((*stages, account.row["zero_stage"]))
    for times in (2**power for power in range(1, MOST_DOUBLINGS)):
        other = account.instead(zero_stage=highest, dp_shard=account.row["dp_shard"] * times)
        if other is not None and other.overfull is None:
            return f"--zero {highest} on {int(other.plans.gpus[0])} GPUs"
    return "--tp and --pp, which cut what --zero leaves whole; a leaner --optimizer; --offload"


def _states(account: Account) -> Found | None:
    if account.overfull is None or account.usable is None:
        return None
    phase, instant = account.overfull
    parts = {category: account.held(category, instant) for category in STATES}
    return Found(
        message=(
            f"weights, gradients and optimizer alone take {format_bytes(account.states(instant))} and the card has "
            f"{format_bytes(account.usable)}: it runs out in {phase}"
        ),
        knob=_sharing(account),
        evidence=(
            *(held(f"held/{category}", amount) for category, amount in parts.items() if amount),
            held("usable", account.usable),
        ),
    )


def _fits(account: Account) -> Found | None:
    usable = account.usable
    if usable is None or account.fits:
        return None
    meter = account.memory.meters.get("device", account.memory.meters["allocated"])
    alive = account.memory.alive[:3]
    return Found(
        message=(
            f"{format_bytes(meter.estimate)} are needed in the {account.memory.place} of pp_stage "
            f"{account.memory.pp_stage}, and the card has {format_bytes(usable)}"
        ),
        knob=_turn(account),
        evidence=(
            held("device", meter.estimate, f"{meter.lower} to {meter.upper}"),
            held("usable", usable),
            *(held(f"held/{one.category}/{one.name}", one.amount) for one in alive),
        ),
        severity="refuse" if meter.lower > usable else "warn",
    )


def _margin(account: Account) -> Found | None:
    usable = account.usable
    if usable is None or not account.fits or account.device <= usable * (1 - MARGIN):
        return None
    free = usable - account.device
    return Found(
        message=f"{format_bytes(free)} of {format_bytes(usable)} are left, {free / usable:.1%}: less than {MARGIN:.0%}",
        knob="lower --mbs or --seq, recompute more, or divide more by --zero, --tp or --pp",
        evidence=(held("device", account.device), held("usable", usable)),
    )


def _unused(account: Account) -> Found | None:
    meters = account.memory.meters
    if "reserved" not in meters:
        return None
    allocated, reserved = meters["allocated"].estimate, meters["reserved"].estimate
    growing = account.setting.allocator(int(account.plans.gpus[0])) == "expandable"
    if growing or reserved - allocated < UNUSED_SHARE * allocated:
        return None
    usable, beside = account.usable, sum(line.amount for line in account.memory.beside)
    decides = usable is not None and reserved + beside > usable >= allocated + beside
    knob = "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which --allocator expandable predicts"
    return Found(
        message=(
            f"PyTorch's allocator reserves {format_bytes(reserved)} for {format_bytes(allocated)} that are allocated: "
            f"{format_bytes(reserved - allocated)} lie in pieces"
        ),
        knob=knob if account.setting.maps_memory else "lower --mbs, or make shapes alike",
        evidence=(held("allocated", allocated), held("reserved", reserved)),
        severity="warn" if decides else "advise",
    )


def _communicators(account: Account) -> Found | None:
    lines = account.lines("held/beside/communicators")
    taken, usable = sum(line.amount for line in lines), account.usable
    if usable is None or taken < OUTSIDE_SHARE * usable:
        return None
    return Found(
        message=f"communicators take {format_bytes(taken)} of the card outside PyTorch's allocator",
        knob="use fewer kinds of parallelism at once: each axis has a communicator of its own",
        evidence=lines_as(lines),
    )


def _foreach(account: Account) -> Found | None:
    lines = account.lines("held/buffers/", "foreach step")
    taken, usable = sum(line.amount for line in lines), account.usable
    if not taken or usable is None or "adamw-fused" not in account.setting.profile.optimizers:
        return None
    highest = account.memory.instant == "step"
    if not highest and taken < TRANSIENT_SHARE * usable:
        return None
    severity: Severity = "warn" if highest and account.device > usable >= account.device - taken else "advise"
    return Found(
        message=(
            f"AdamW's foreach step makes {format_bytes(taken)} for itself, four bytes for each fp32 weight of a shard"
            + (": the plan holds most just then" if highest else "")
        ),
        knob="--optimizer adamw-fused",
        evidence=lines_as(lines),
        severity=severity,
    )


def _step_one(account: Account) -> Found | None:
    first = account.first
    allocated = account.memory.meters["allocated"].estimate
    if first is None or first.amount > FIRST_SHARE * allocated:
        return None
    return Found(
        message=(
            f"the first forward and backward hold {format_bytes(first.amount)} and later steps "
            f"{format_bytes(allocated)}: moments are made in the first step"
        ),
        knob="read meters after the second step",
        evidence=(
            Evidence(line=first.line.id, amount=first.amount, unit="B", note=first.formula),
            held("allocated", allocated),
        ),
    )


def _host(account: Account) -> tuple[int, int | None]:
    """(host bytes of a rank, its share of the node's memory: None where it is not known)."""
    cluster, gpus = account.setting.cluster, int(account.plans.gpus[0])
    return account.entry.peak.host_bytes, cluster.host_share_bytes(gpus) if cluster is not None else None


def _host_unknown(account: Account) -> Found | None:
    taken, share = _host(account)
    if not taken or share is not None:
        return None
    return Found(
        message=f"offloading holds {format_bytes(taken)} of host memory per GPU, and the host's is not known",
        knob="name a --cluster that states it",
        evidence=lines_as(line for line in account.entry.lines if line.id.endswith("@host")),
    )


def _host_full(account: Account) -> Found | None:
    taken, share = _host(account)
    if share is None or taken <= share:
        return None
    return Found(
        message=(
            f"offloading holds {format_bytes(taken)} of host memory per GPU, and a GPU's share of its node is "
            f"{format_bytes(share)}"
        ),
        knob="use more nodes, or offload less",
        evidence=(*lines_as(line for line in account.entry.lines if line.id.endswith("@host")), held("share", share)),
    )


CHECKS: tuple[Check, ...] = (
    Check(id="states-do-not-fit", severity="refuse", source="Rajbhandari et al. 2020, section 3", judge=_states),
    Check(
        id="does-not-fit",
        severity="refuse",
        source="the account, with the bounds of its meters",
        judge=_fits,
        meters=True,
    ),
    Check(
        id="margin<10%",
        severity="warn",
        source="residuals of published runs: docs/accuracy.md",
        judge=_margin,
        meters=True,
    ),
    Check(id="host-ram-unknown", severity="warn", source="the cluster's data file", judge=_host_unknown),
    Check(id="host-memory", severity="warn", source="the cluster's data file", judge=_host_full),
    Check(
        id="fragmentation",
        severity="warn",
        source="PyTorch's CUDACachingAllocator.cpp, read at 2.9",
        judge=_unused,
        meters=True,
    ),
    Check(
        id="nccl-memory", severity="advise", source="NVIDIA/nccl issue 964: 544 to 688 MiB each", judge=_communicators
    ),
    Check(
        id="foreach-transient",
        severity="warn",
        source="PyTorch optim/adamw.py: foreach is the default on CUDA",
        judge=_foreach,
        meters=True,
    ),
    Check(
        id="read-after-step-2",
        severity="advise",
        source="the engine's optimizer makes its moments lazily",
        judge=_step_one,
        meters=True,
    ),
)
