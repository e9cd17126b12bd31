"""Rules about how degrees, batch and sequence fit together and onto the cluster."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from trainledger.errors import Refused
from trainledger.plans.plan import Plans
from trainledger.plans.setting import Setting
from trainledger.plans.split import layers_per_chunk
from trainledger.rules.rule import Mask, Rule
from trainledger.rules.shape import divisors

CP_LEAST_TOKENS = 4096
"""Below this a rank's piece of the sequence is short; Llama 3 gave each of 16 ranks 8,192. [llama3: table 4]"""


def _never(plans: Plans) -> Mask:
    return np.zeros(len(plans), dtype=bool)


def _text(text: str) -> Callable[[Setting, dict[str, int]], str]:
    def sentence(setting: Setting, row: dict[str, int]) -> str:
        shard = row["dp_replicate"] * row["dp_shard"] * row["mbs"]
        return text.format(
            dp=row["dp_replicate"] * row["dp_shard"],
            share=shard,
            near=_multiples(setting.workload.gbs or 0, shard),
            rest=(setting.workload.gbs or 0) % shard,
            seq=setting.workload.seq,
            gbs=setting.workload.gbs,
            layers=setting.model.num_layers,
            framework=setting.profile.framework,
            domain=setting.cluster.scale_up_domain if setting.cluster is not None else 0,
            **row,
        )

    return sentence


def _multiples(value: int, of: int) -> str:
    """The multiples on both sides of a value.

    >>> _multiples(16, 6), _multiples(2, 6)
    ('12 or 18', '6')
    """
    below = value // of * of
    return f"{below} or {below + of}" if below else str(of)


def _layers(setting: Setting, plans: Plans) -> Mask:
    """More stages than layers, or a split that the engine refuses."""
    chunks = plans.pp * plans.vpp
    if setting.scenario.pp_layout:
        return _never(plans)
    if setting.profile.split == "divisible":
        return setting.model.num_layers % plans.pp != 0
    return (chunks > _most_chunks(setting)) & (chunks > 1)


def _most_chunks(setting: Setting) -> int:
    """One layer in each stage; where embedding and output count as layers, the first and last may do without."""
    ends = 2 if setting.profile.split == "less_ends" else 0
    return setting.model.num_layers + ends


def _virtual_layers(setting: Setting, plans: Plans) -> Mask:
    """Each stage's layers must divide over its virtual stages."""
    if setting.scenario.pp_layout or setting.profile.split != "divisible":
        return _never(plans)
    layers = setting.model.num_layers
    return (layers % plans.pp == 0) & (layers // plans.pp % plans.vpp != 0)


def _virtual_layers_sentence(setting: Setting, row: dict[str, int]) -> str:
    share = setting.model.num_layers // row["pp"]
    return (
        f"the {share} layers of each of pp={row['pp']} stages do not divide over vpp={row['vpp']} "
        f"(remainder {share % row['vpp']}); use one of {divisors(share, 64)}, or give --pp-layout"
    )


def _layers_sentence(setting: Setting, row: dict[str, int]) -> str:
    layers, chunks = setting.model.num_layers, row["pp"] * row["vpp"]
    if setting.profile.split == "divisible":
        return (
            f"{layers} layers do not divide over pp={row['pp']} stages (remainder {layers % row['pp']}); "
            f"use one of {divisors(layers, 64)}, or give --pp-layout"
        )
    most = _most_chunks(setting)
    return f"pp x vpp = {chunks} stages for {layers} layers: some would be empty; use at most {most}"


def _layout(setting: Setting, plans: Plans) -> Mask:
    layout = setting.scenario.pp_layout
    if not layout:
        return _never(plans)
    return (plans.pp * plans.vpp != len(layout)) | (sum(layout) != setting.model.num_layers) | (min(layout) < 0)


def _layout_sentence(setting: Setting, row: dict[str, int]) -> str:
    try:
        layers_per_chunk(setting.model.num_layers, row["pp"] * row["vpp"], "front", setting.scenario.pp_layout)
    except Refused as refusal:
        return str(refusal).split("] ", 1)[1]
    raise AssertionError("pp-layout-adds-up and layers_per_chunk disagree")


def _vpp(setting: Setting, plans: Plans) -> Mask:
    return (plans.vpp > 1) & ((plans.pp == 1) | (setting.scenario.schedule != "interleaved"))


def _interleaved(setting: Setting, plans: Plans) -> Mask:
    """Megatron: micro-batches in groups of pp; a remainder below pp is refused. [megatron: schedules.py 1160-1177]"""
    uneven = plans.num_microbatches % plans.pp
    return (plans.vpp > 1) & (uneven != 0) & (uneven < plans.pp)


def _batch(setting: Setting, plans: Plans) -> Mask:
    if setting.workload.gbs is None or setting.profile.name == "deepspeed":
        return _never(plans)
    return _batch_remains(setting.workload.gbs, plans)


def _batch_identity(setting: Setting, plans: Plans) -> Mask:
    if setting.workload.gbs is None or setting.profile.name != "deepspeed":
        return _never(plans)
    return _batch_remains(setting.workload.gbs, plans)


def _batch_remains(gbs: int, plans: Plans) -> Mask:
    return gbs % (plans.mbs * plans.dp) != 0


def _fills_pipeline(setting: Setting, plans: Plans) -> Mask:
    """Without a global batch the number of micro-batches is nobody's choice, so nothing is said of it."""
    return (plans.num_microbatches < plans.pp) & (setting.workload.gbs is not None)


def _cp_seq(setting: Setting, plans: Plans) -> Mask:
    """Load balancing cuts each sequence into 2 cp pieces; all-to-all deals out heads, and needs cp equal pieces.

    [megatron: arguments.py 1335-1338; deepspeed: ulysses_sp.py 698]
    """
    return (plans.cp > 1) & (setting.workload.seq % (_pieces(setting) * plans.cp) != 0)


def _pieces(setting: Setting) -> int:
    return 1 if (setting.scenario.cp_comm or setting.profile.traffic.cp_comm) == "all_to_all" else 2


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


def _expert_world(setting: Setting, plans: Plans) -> Mask:
    """The experts' grid is laid over the ranks of one pipeline stage. [megatron: parallel_state.py 883]"""
    if "ep" not in setting.profile.axes:
        return _never(plans)
    stage = plans.tp * plans.cp * plans.dp
    return (plans.ep > 1) & (stage % (plans.etp * plans.ep) != 0)


def _expert_replicas(setting: Setting, plans: Plans) -> Mask:
    group = plans.tp * plans.cp * plans.dp // (plans.etp * plans.ep)
    return (plans.ep > 1) & (plans.dp_replicate > 1) & (group % plans.dp_replicate != 0)


def _replicas(setting: Setting, plans: Plans) -> Mask:
    return (plans.dp_replicate > 1) & (plans.zero_stage == 0)


def _ulysses(setting: Setting, plans: Plans) -> Mask:
    """All-to-all context parallelism deals out heads; KV heads may be copied. [deepspeed: ulysses_sp.py 146-149]"""
    if _pieces(setting) == 2:
        return _never(plans)
    broken = _never(plans)
    for block in setting.model.blocks:
        if block.attention is not None:
            kv_heads = np.maximum(block.attention.kv_heads // plans.tp, 1)
            broken |= (block.attention.heads // plans.tp) % plans.cp != 0
            broken |= (kv_heads % plans.cp != 0) & (plans.cp % kv_heads != 0)
    return broken


def _nothing_to_share(setting: Setting, plans: Plans) -> Mask:
    """Alone a rank shares nothing; but offloading asks for a stage, and pays on one rank too."""
    return (plans.zero_stage > 0) & (plans.dp_shard * plans.cp == 1) & (not setting.scenario.offload)


def _scale_up(setting: Setting, plans: Plans) -> Mask:
    if setting.cluster is None:
        return _never(plans)
    return plans.tp > setting.cluster.scale_up_domain


def _short_pieces(setting: Setting, plans: Plans) -> Mask:
    return (plans.cp > 1) & (setting.workload.seq // plans.cp < CP_LEAST_TOKENS)


def _whole_nodes(setting: Setting, plans: Plans) -> Mask:
    if setting.cluster is None:
        return _never(plans)
    node = setting.cluster.gpus_per_node
    return (plans.gpus > node) & (plans.gpus % node != 0)


def _rule(
    rule: str,
    broken: Callable[[Setting, Plans], Mask],
    sentence: Callable[[Setting, dict[str, int]], str],
    source: str,
    severity: str = "refuse",
) -> Rule:
    return Rule(id=rule, severity=severity, scope="plan", source=source, broken=broken, sentence=sentence)  # type: ignore[arg-type]


RULES: tuple[Rule, ...] = (
    _rule("pp-layout-adds-up", _layout, _layout_sentence, "Megatron-Core pipeline_parallel_layer_layout.py"),
    _rule("layers-divisible-by-pp", _layers, _layers_sentence, "Megatron-LM arguments.py 968-997 at d98e8a6"),
    _rule(
        "layers-divisible-by-pp-vpp",
        _virtual_layers,
        _virtual_layers_sentence,
        "Megatron-LM arguments.py 971-972 at d98e8a6",
    ),
    _rule(
        "vpp-needs-interleaved",
        _vpp,
        _text("vpp={vpp} with pp={pp}: virtual stages need pp > 1 and --schedule interleaved; set both, or vpp to 1"),
        "Megatron-LM arguments.py 1001-1008 at d98e8a6",
    ),
    _rule(
        "gbs-divisible",
        _batch,
        _text(
            "--gbs {gbs} is not a multiple of mbs x dp = {mbs} x {dp} = {share} (remainder {rest}); "
            "use --gbs {near}, or change --mbs or a degree"
        ),
        "Megatron-Core num_microbatches_calculator.py 381 at d98e8a6; torchtitan trainer.py 419 at b5bcd76",
    ),
    _rule(
        "batch-identity",
        _batch_identity,
        _text(
            "--gbs {gbs} is not mbs x accumulation x dp with mbs x dp = {mbs} x {dp} = {share}, as DeepSpeed asks of "
            "train_batch_size (remainder {rest}); use --gbs {near}, or change --mbs or a degree"
        ),
        "DeepSpeed runtime/config.py 925-937 at edaa722",
    ),
    _rule(
        "interleaved-microbatches",
        _interleaved,
        _text(
            "{num_microbatches} micro-batches do not come in groups of pp={pp}, which the interleaved schedule needs; "
            "change --gbs or --mbs, or set vpp to 1"
        ),
        "Megatron-Core pipeline_parallel/schedules.py 1160-1177",
    ),
    _rule(
        "cp-seq",
        _cp_seq,
        _cp_seq_sentence,
        "Megatron-LM arguments.py 1335-1338 at d98e8a6",
    ),
    _rule(
        "sp-needs-tp",
        _sp_tp,
        _text("--sp with tp={tp} does nothing: the engine turns it off; leave it out, or raise --tp"),
        "Megatron-LM arguments.py 1430-1442 at d98e8a6",
    ),
    _rule(
        "sp-seq",
        _sp_seq,
        _text("--sp cuts seq / cp = {seq} / {cp} tokens over tp={tp} ranks and it does not divide; change one of them"),
        "Megatron-Core tensor_parallel/mappings.py",
    ),
    _rule(
        "expert-world",
        _expert_world,
        _text(
            "the ranks of a stage, tp x cp x dp = {tp} x {cp} x {dp}, are not a multiple of etp x ep = {etp} x {ep}"
            "; lower --ep or --etp"
        ),
        "Megatron-Core parallel_state.py 883 at d98e8a6",
    ),
    _rule(
        "expert-replicas",
        _expert_replicas,
        _text("dp_replicate={dp_replicate} does not divide the experts' data-parallel group; lower it, or --ep"),
        "Megatron-Core parallel_state.py at d98e8a6",
    ),
    _rule(
        "dp-replicate-needs-zero",
        _replicas,
        _text(
            "dp_replicate={dp_replicate} at --zero 0: nothing is sharded, so all ranks are replicas; "
            "leave it out, or raise --zero"
        ),
        "PyTorch HSDP: replicas of sharded groups",
    ),
    _rule(
        "ulysses-heads",
        _ulysses,
        _text(
            "cp={cp} by all-to-all deals out attention heads and does not divide heads / tp, or fits the KV heads "
            "neither way; lower --cp or --tp"
        ),
        "DeepSpeed runtime/sequence_parallel/ulysses_sp.py 146-149 at edaa722",
    ),
    _rule(
        "pp-bubble",
        _fills_pipeline,
        _text(
            "{num_microbatches} micro-batches for pp={pp} stages leave the pipeline idle most of the time; "
            "raise --gbs or lower --mbs"
        ),
        "Narayanan et al. 2021, section 2.2: the bubble is (pp - 1) / micro-batches",
        "warn",
    ),
    _rule(
        "zero-with-dp1",
        _nothing_to_share,
        _text(
            "--zero {zero_stage} with dp x cp = 1: there is nobody to share with, so it saves nothing; "
            "use --zero 0, or lower another degree"
        ),
        "Rajbhandari et al. 2020, section 5: states are divided over data-parallel ranks",
        "warn",
    ),
    _rule(
        "tp-inside-scale-up",
        _scale_up,
        _text("tp={tp} reaches beyond the {domain} ranks that fast links join; lower --tp"),
        "Narayanan et al. 2021, takeaway 1",
        "warn",
    ),
    _rule(
        "cp-short-pieces",
        _short_pieces,
        _text("cp={cp} cuts --seq {seq} into pieces below 4096 tokens, too short to hide their exchange; lower --cp"),
        "Llama 3 herd, table 4: cp=16 at 131,072 tokens, none at 8,192",
        "warn",
    ),
    _rule(
        "whole-nodes",
        _whole_nodes,
        _text("the job does not fill its last node; use a multiple of the node's GPUs"),
        "a partial node is still paid for",
        "advise",
    ),
)
