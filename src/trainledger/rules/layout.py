"""Rules about how degrees, batch and sequence fit together and onto the cluster."""

from __future__ import annotations

import numpy as np

from trainledger.facts.model import Attention
from trainledger.plans import sharding
from trainledger.plans.plan import Plans, make_plans
from trainledger.plans.setting import Setting
from trainledger.rules.rule import Mask, Rule
from trainledger.rules.shape import attentions

CP_LEAST_TOKENS = 4096
"""Below this a rank's piece of the sequence is short; Llama 3 gave each of 16 ranks 8,192. [llama3: table 4]"""


def _multiples(value: int, of: int) -> str:
    """The multiples on both sides of a value.

    >>> _multiples(16, 6), _multiples(2, 6)
    ('12 or 18', '6')
    """
    below = value // of * of
    return f"{below} or {below + of}" if below else str(of)


def _batch(setting: Setting, plans: Plans) -> Mask | bool:
    gbs = setting.workload.gbs
    return gbs is not None and gbs % (plans.mbs * plans.dp) != 0


def _remainder(setting: Setting, row: dict[str, int]) -> tuple[str, int, str]:
    """(mbs x dp, what remains of the global batch, the batches that fit) for a sentence."""
    gbs, dp = setting.workload.gbs or 0, row["dp_replicate"] * row["dp_shard"]
    share = row["mbs"] * dp
    return f"mbs x dp = {row['mbs']} x {dp} = {share}", gbs % share, _multiples(gbs, share)


def _batch_sentence(setting: Setting, row: dict[str, int]) -> str:
    product, rest, near = _remainder(setting, row)
    return (
        f"--gbs {setting.workload.gbs} is not a multiple of {product} (remainder {rest}); "
        f"use --gbs {near}, or change --mbs or a degree"
    )


def _batch_identity_sentence(setting: Setting, row: dict[str, int]) -> str:
    product, rest, near = _remainder(setting, row)
    return (
        f"--gbs {setting.workload.gbs} is not mbs x accumulation x dp with {product}, as DeepSpeed asks of "
        f"train_batch_size (remainder {rest}); use --gbs {near}, or change --mbs or a degree"
    )


def _fills_pipeline(setting: Setting, plans: Plans) -> Mask:
    """Without a global batch the number of micro-batches is nobody's choice, so nothing is said of it."""
    return (plans.num_microbatches < plans.pp) & (setting.workload.gbs is not None)


def _cp_seq(setting: Setting, plans: Plans) -> Mask:
    """Load balancing cuts each sequence into 2 cp pieces; all-to-all deals out heads, and needs cp equal pieces.

    [megatron: arguments.py 1335-1338; deepspeed: ulysses_sp.py 698]
    """
    return (plans.cp > 1) & (setting.workload.seq % (_pieces(setting) * plans.cp) != 0)


def _pieces(setting: Setting) -> int:
    return 1 if setting.cp_comm == "all_to_all" else 2


def _cp_seq_sentence(setting: Setting, row: dict[str, int]) -> str:
    cp, seq = row["cp"], setting.workload.seq
    pieces = _pieces(setting) * cp
    fits = seq // pieces * pieces or pieces
    return (
        f"--seq {seq} is not a multiple of {pieces}, the pieces that cp={cp} cuts it into (remainder {seq % pieces}); "
        f"use --seq {fits} or {fits + pieces}, or another --cp"
    )


def _sp_seq(setting: Setting, plans: Plans) -> Mask:
    return (plans.sp == 1) & (setting.workload.seq // plans.cp % plans.tp != 0)


def _sp_tp(setting: Setting, plans: Plans) -> Mask:
    return (plans.sp == 1) & (plans.tp == 1)


def _expert_world(setting: Setting, plans: Plans) -> Mask | bool:
    """The experts' grid is laid over the ranks of one pipeline stage. [megatron: parallel_state.py 883]"""
    if "ep" not in setting.profile.axes:
        return False
    stage = plans.tp * plans.cp * plans.dp
    return (plans.ep > 1) & (stage % (plans.etp * plans.ep) != 0)


def _expert_replicas(setting: Setting, plans: Plans) -> Mask:
    uneven = sharding.expert_group(plans) % plans.dp_replicate != 0
    return (plans.ep > 1) & (plans.dp_replicate > 1) & uneven


def _replicas(setting: Setting, plans: Plans) -> Mask:
    return (plans.dp_replicate > 1) & (plans.zero_stage == 0)


def _undealt(attention: Attention, plans: Plans) -> Mask:
    """Where all-to-all cannot deal out the heads; KV heads may be copied. [deepspeed: ulysses_sp.py 146-149]"""
    kv_heads = np.maximum(attention.kv_heads // plans.tp, 1)
    uneven = (attention.heads // plans.tp) % plans.cp != 0
    return uneven | ((kv_heads % plans.cp != 0) & (plans.cp % kv_heads != 0))


def _ulysses(setting: Setting, plans: Plans) -> Mask | bool:
    broken = np.zeros(len(plans), dtype=np.bool_)
    for attention in attentions(setting.model):
        broken |= _undealt(attention, plans)
    return (_pieces(setting) == 1) & broken


def _ulysses_sentence(setting: Setting, row: dict[str, int]) -> str:
    found = next(a for a in attentions(setting.model) if _undealt(a, make_plans(row)).any())
    return (
        f"cp={row['cp']} by all-to-all deals out heads, and does not divide {found.heads} / tp={row['tp']} of them, or "
        f"fits {found.kv_heads} / tp={row['tp']} KV heads neither way; lower --cp or --tp"
    )


def _nothing_to_share(setting: Setting, plans: Plans) -> Mask:
    """Alone a rank shares nothing; but offloading asks for a zero_stage, and pays on one rank too."""
    return (plans.zero_stage > 0) & (plans.dp_shard * plans.cp == 1) & (not setting.scenario.offload)


def _scale_up(setting: Setting, plans: Plans) -> Mask | bool:
    if setting.cluster is None:
        return False
    return plans.tp > setting.cluster.scale_up_domain


def _short_pieces(setting: Setting, plans: Plans) -> Mask:
    return (plans.cp > 1) & (setting.workload.seq // plans.cp < CP_LEAST_TOKENS)


def _short_pieces_sentence(setting: Setting, row: dict[str, int]) -> str:
    return (
        f"cp={row['cp']} cuts --seq {setting.workload.seq} into pieces below {CP_LEAST_TOKENS} tokens, "
        "too short to hide their exchange; lower --cp"
    )


def _whole_nodes(setting: Setting, plans: Plans) -> Mask | bool:
    if setting.cluster is None:
        return False
    node = setting.cluster.gpus_per_node
    return (plans.gpus > node) & (plans.gpus % node != 0)


RULES: tuple[Rule, ...] = (
    Rule(
        "batch-identity",
        "refuse",
        "plan",
        "DeepSpeed runtime/config.py 925-937 at edaa722",
        _batch,
        _batch_identity_sentence,
        ("deepspeed",),
    ),
    Rule(
        "gbs-divisible",
        "refuse",
        "plan",
        "Megatron-Core num_microbatches_calculator.py 381 at d98e8a6; torchtitan trainer.py 419 at b5bcd76",
        _batch,
        _batch_sentence,
    ),
    Rule(
        "cp-seq",
        "refuse",
        "plan",
        "Megatron-LM arguments.py 1335-1338 at d98e8a6",
        _cp_seq,
        _cp_seq_sentence,
    ),
    Rule(
        "sp-needs-tp",
        "refuse",
        "plan",
        "Megatron-LM arguments.py 1430-1442 at d98e8a6",
        _sp_tp,
        "--sp with tp={tp} does nothing: the engine turns it off; leave it out, or raise --tp",
    ),
    Rule(
        "sp-seq",
        "refuse",
        "plan",
        "Megatron-Core tensor_parallel/mappings.py",
        _sp_seq,
        "--sp cuts seq / cp = {seq} / {cp} tokens over tp={tp} ranks and it does not divide; change one of them",
    ),
    Rule(
        "expert-world",
        "refuse",
        "plan",
        "Megatron-Core parallel_state.py 883 at d98e8a6",
        _expert_world,
        (
            "the ranks of a pipeline stage, tp x cp x dp = {tp} x {cp} x {dp}, are not a multiple of "
            "etp x ep = {etp} x {ep}; lower --ep or --etp"
        ),
    ),
    Rule(
        "expert-replicas",
        "refuse",
        "plan",
        "Megatron-Core parallel_state.py at d98e8a6",
        _expert_replicas,
        (
            "dp_replicate={dp_replicate} does not divide the {expert_group} ranks that hold the same experts, "
            "tp x cp x dp / (etp x ep); lower --dp-replicate, or --ep"
        ),
    ),
    Rule(
        "dp-replicate-needs-zero",
        "refuse",
        "plan",
        "PyTorch HSDP: replicas of sharded groups",
        _replicas,
        (
            "dp_replicate={dp_replicate} at --zero 0: nothing is sharded, so all ranks are replicas; "
            "leave it out, or raise --zero"
        ),
    ),
    Rule(
        "ulysses-heads",
        "refuse",
        "plan",
        "DeepSpeed runtime/sequence_parallel/ulysses_sp.py 146-149 at edaa722",
        _ulysses,
        _ulysses_sentence,
    ),
    Rule(
        "pp-bubble",
        "warn",
        "plan",
        "Narayanan et al. 2021, section 2.2: the bubble is (pp - 1) / micro-batches",
        _fills_pipeline,
        (
            "{num_microbatches} micro-batches for pp={pp} stages leave the pipeline idle most of the time; "
            "raise --gbs or lower --mbs"
        ),
    ),
    Rule(
        "zero-with-dp1",
        "warn",
        "plan",
        "Rajbhandari et al. 2020, section 5: states are divided over data-parallel ranks",
        _nothing_to_share,
        (
            "--zero {zero_stage} with dp x cp = 1: there is nobody to share with, so it saves nothing; "
            "use --zero 0, or lower another degree"
        ),
    ),
    Rule(
        "tp-inside-scale-up",
        "warn",
        "plan",
        "Narayanan et al. 2021, takeaway 1",
        _scale_up,
        "tp={tp} reaches beyond the {domain} ranks that fast links join; lower --tp",
    ),
    Rule(
        "cp-short-pieces",
        "warn",
        "plan",
        "Llama 3 herd, table 4: cp=16 at 131,072 tokens, none at 8,192",
        _short_pieces,
        _short_pieces_sentence,
    ),
    Rule(
        "whole-nodes",
        "advise",
        "plan",
        "a partial node is still paid for",
        _whole_nodes,
        "--gpus {gpus} does not fill the last node of {node}; use a multiple of {node}",
    ),
)
