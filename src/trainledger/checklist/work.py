"""What a plan's activations, its recomputation and its stages cost, and what another choice would."""

from __future__ import annotations

import numpy as np

from trainledger.account.flop import step_flop
from trainledger.account.memory.answers.breakdown import breakdown
from trainledger.account.memory.meters import uneven_bytes
from trainledger.checklist.account import Account
from trainledger.checklist.check import Check, Evidence, Found, held
from trainledger.errors import BadInput
from trainledger.inventory.blocks.sizes import Sizes
from trainledger.profiles import releases
from trainledger.rules.rule import Severity
from trainledger.units import format_bytes

LOGITS = ("logits", "softmax", "log-likelihood", "output layer")
"""How storages of the width of the vocabulary are named."""
LOGITS_SHARE = 0.25
"""Of what is allocated: so much of the width of the vocabulary is worth a sentence."""
ACTIVE_SHARE = 0.5
"""Of what is allocated: so much that more data-parallel GPUs do not lower is worth a sentence."""
LEAN_LOSSES = ("chunked", "fused")
UNEVEN = 1.15
"""The fullest pipeline stage over the leanest: beyond it another split pays."""
RELEASED_SHARE = 0.05
"""Of what is allocated: so much that one copy of the logits takes, and the release decides over the peak."""
ROUTED_SHARE = 0.05
"""Of what is allocated: so much more on the rank whose experts all choose is worth a sentence."""
SPARED_SHARE = 0.1
"""Of what is saved: less that a recomputation spares is not worth it."""


def _logits(account: Account) -> Found | None:
    alive = [
        one
        for one in account.memory.alive
        if one.category == "activations" and any(word in one.name for word in LOGITS)
    ]
    taken, allocated = sum(one.amount for one in alive), account.memory.meters["allocated"].estimate
    if taken < LOGITS_SHARE * allocated:
        return None
    memory = account.setting.profile.memory
    ways = [word for word in LEAN_LOSSES if word in (memory.loss, *memory.losses)]
    lean = f"--loss {ways[0]}, " if ways and account.setting.scenario.loss not in LEAN_LOSSES else ""
    return Found(
        message=f"tensors as wide as the vocabulary are {format_bytes(taken)} of {format_bytes(allocated)} at the peak",
        knob=f"{lean}a lower --mbs or --seq, --cp, or --tp where it cuts the vocabulary",
        evidence=tuple(held(f"held/activations/{one.name}", one.amount) for one in alive[:4]),
    )


def _releases(account: Account) -> Found | None:
    """Releases of an engine cast and keep logits otherwise, which moves the peak where these are large."""
    setting = account.setting
    ways = {
        (one.framework_version, one.memory.loss, one.memory.compiled_loss, one.memory.cut_loss)
        for one in releases(setting.profile.name)
    }
    if len({way[1:] for way in ways}) < 2 or setting.model.states_alone or not setting.profile.activations:
        return None
    chunks = setting.loss_chunks if setting.loss_of(cut=account.row["tp"] > 1) == "chunked" else 1
    taken = int(Sizes(setting, account.plans).logits("fp32")[0]) // chunks
    allocated = account.memory.meters["allocated"].estimate
    if taken < RELEASED_SHARE * allocated:
        return None
    read = ", ".join(sorted(way[0] for way in ways))
    return Found(
        message=(
            f"logits in fp32 are {format_bytes(taken)} of {format_bytes(allocated)}, and releases of "
            f"{setting.profile.name} differ in which copies of them they keep"
        ),
        knob=f"name your release by --framework-version; those that were read: {read}",
        evidence=(held("logits in fp32", taken), held("allocated", allocated)),
    )


def _scores(account: Account) -> Found | None:
    setting = account.setting
    heads = max((block.attention.heads for block in setting.model.blocks if block.attention is not None), default=0)
    if setting.scenario.attention != "eager" or not heads or setting.model.states_alone:
        return None
    row, seq = account.row, setting.workload.seq
    each = row["mbs"] * (heads // row["tp"]) * seq * (seq // row["cp"]) * 2
    return Found(
        message=(
            f"attention scores are held in memory: {format_bytes(each)} in 16 bits for each tensor of that kind in a "
            "layer, which grows with the square of --seq"
        ),
        knob="--attention flash, with a kernel that never holds them",
        evidence=(held("scores of one layer", each, f"mbs x heads / tp x seq x seq / cp x 2 B, {heads} heads"),),
    )


def _unshared(account: Account) -> Found | None:
    row = account.row
    if row["mbs"] > 1 or row["cp"] > 1 or account.setting.scenario.recompute != "full":
        return None
    alive = [one for one in account.memory.alive if one.category == "activations"]
    taken, allocated = sum(one.amount for one in alive), account.memory.meters["allocated"].estimate
    if taken < ACTIVE_SHARE * allocated:
        return None
    return Found(
        message=(
            f"activations of one sequence are {format_bytes(taken)} of {format_bytes(allocated)}, with all layers "
            "recomputed: more data-parallel GPUs do not lower them"
        ),
        knob="--cp, --tp with --sp, or a shorter --seq",
        evidence=tuple(held(f"held/activations/{one.name}", one.amount) for one in alive[:3]),
    )


def _flop(account: Account) -> float | None:
    try:
        return float(np.sum(list(step_flop(account.inventory, account.plans).values()), axis=0).max())
    except BadInput:
        return None


def _spared(account: Account, other: Account, way: str) -> tuple[str, tuple[Evidence, ...]]:
    """(how much less is computed, in words; the figures), nothing where arithmetic is not counted."""
    now, then = _flop(account), _flop(other)
    if not now or not then:
        return "", ()
    figures = (("done in a step", now), (f"done in a step with recompute {way}", then))
    evidence = tuple(Evidence(line=line, amount=amount, unit="FLOP") for line, amount in figures)
    return f" and compute {1 - then / now:.0%} less", evidence


def _needless(account: Account) -> Found | None:
    """Whether the plan has room to recompute less."""
    setting = account.setting
    if setting.scenario.recompute != "full" or setting.model.states_alone or account.usable is None:
        return None
    ways = ("none", "selective") if setting.profile.memory.recomputes else ("none",)
    for way in ways:
        other = account.instead({"recompute": way, "recompute_layers": 0})
        if other is None or not other.roomy:
            continue
        less, flop = _spared(account, other, way)
        would, have = format_bytes(other.device), format_bytes(account.usable)
        return Found(
            message=f"--recompute {way} would hold {would} of {have}{less}",
            knob=f"--recompute {way}",
            evidence=(held(f"device with recompute {way}", other.device), held("device", account.device), *flop),
        )
    return None


def _core_attention(account: Account) -> Found | None:
    """Flash attention keeps no scores, so running it again spares its output alone."""
    setting = account.setting
    parts = setting.recomputed_parts
    if "core_attn" not in parts or setting.scenario.attention != "flash" or setting.model.states_alone:
        return None
    rest = tuple(part for part in parts if part != "core_attn")
    other = account.instead({"recompute": "selective", "recompute_parts": rest} if rest else {"recompute": "none"})
    if other is None:
        return None
    now, then = int(account.stages.saved.max()), int(other.stages.saved.max())
    if then - now > SPARED_SHARE * then:
        return None
    again = f"--recompute-parts {','.join(rest)}" if rest else "--recompute none"
    return Found(
        message=(
            f"core_attn is computed again under flash attention, which keeps no scores: it spares "
            f"{format_bytes(max(then - now, 0))} of {format_bytes(then)}"
        ),
        knob=again,
        evidence=(held("saved for backward", now), held(f"saved for backward with {again}", then)),
    )


def _edges(account: Account) -> Found | None:
    if account.row["pp"] == 1:
        return None
    stages = breakdown(account.stages, account.usable, account.memory.meters)
    fullest, leanest = (of(stages, key=lambda stage: stage.device) for of in (max, min))
    if fullest.device < UNEVEN * leanest.device:
        return None
    return Found(
        message=(
            f"pp_stage {fullest.pp_stage} holds {format_bytes(fullest.device)} and pp_stage {leanest.pp_stage} "
            f"{format_bytes(leanest.device)}: embedding, output layer and micro-batches in flight are not spread evenly"
        ),
        knob="--pp-layout, with fewer layers on that stage",
        evidence=tuple(held(f"device of pp_stage {one.pp_stage}", one.device, one.place) for one in stages),
    )


def _uneven_experts(account: Account) -> Found | None:
    allocated, usable = account.memory.meters["allocated"].estimate, account.usable
    more = uneven_bytes(account.inventory, account.plans, allocated)
    if more < ROUTED_SHARE * allocated:
        return None
    decides = usable is not None and account.device <= usable < account.device + more
    severity: Severity = "warn" if decides and account.row["ep"] > 1 else "advise"
    return Found(
        message=(
            f"experts are taken to be visited alike; where all tokens choose those of one rank it holds "
            f"{format_bytes(more)} more"
        ),
        knob="balance the routing, cap it, or see the worst by --routing worst",
        evidence=(held("allocated", allocated), held("allocated under the worst routing", allocated + more)),
        severity=severity,
    )


def _fp8(account: Account) -> Found | None:
    setting = account.setting
    if not setting.recipe.fp8 or "bf16" not in setting.profile.precision or setting.model.states_alone:
        return None
    other = account.instead({"precision": "bf16"})
    if other is None or account.device < other.device:
        return None
    return Found(
        message=(
            f"--precision {setting.scenario.precision} holds {format_bytes(account.device)}, bf16 "
            f"{format_bytes(other.device)}: it is not what saves memory"
        ),
        knob="choose FP8 for its speed; for memory --zero, --recompute or a leaner --optimizer",
        evidence=(held("device", account.device), held("device with precision bf16", other.device)),
    )


CHECKS: tuple[Check, ...] = (
    Check(id="logits-dominate", severity="advise", source="the account", judge=_logits, meters=True),
    Check(
        id="version-dependent-logits",
        severity="advise",
        source="the engine's profiles, release by release",
        judge=_releases,
        meters=True,
    ),
    Check(
        id="eager-attention", severity="advise", source="Korthikanti et al. 2022, section 4.1: 5 a s / h", judge=_scores
    ),
    Check(id="activations-not-sharded", severity="advise", source="the account", judge=_unshared, meters=True),
    Check(
        id="full-recompute-cost",
        severity="advise",
        source="Korthikanti et al. 2022, section 5: a forward more",
        judge=_needless,
        meters=True,
    ),
    Check(
        id="core-attn-recompute-with-flash",
        severity="advise",
        source="Dao et al. 2022, section 3.1: the backward recomputes the scores itself",
        judge=_core_attention,
        meters=True,
    ),
    Check(id="pp-edge-stages", severity="advise", source="the account, stage by stage", judge=_edges, meters=True),
    Check(
        id="ep-imbalance",
        severity="warn",
        source="the account under --routing worst",
        judge=_uneven_experts,
        meters=True,
    ),
    Check(
        id="fp8-memory-up",
        severity="advise",
        source="TransformerEngine pytorch/module/linear.py 467-489 at d0067d0",
        judge=_fp8,
    ),
)
