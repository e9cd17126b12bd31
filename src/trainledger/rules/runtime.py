"""What this package's own program on PyTorch can run: asked before `prove` starts a process, and of nothing else.

An account under `--engine pytorch` speaks of what PyTorch can do; the program does part of that, and these rules are
the part. The ledger, a search and the states never ask them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trainledger.facts.model import Attention, Model, Tensor
from trainledger.plans.plan import Plans
from trainledger.plans.setting import Setting
from trainledger.rules import cards, dry, recipes
from trainledger.rules.rule import Mask, Rule
from trainledger.rules.shape import attentions, choices

ENGINE = "pytorch"
PRECISIONS = ("fp32", "bf16", "fp16", "fp8-tensorwise", "fp8-rowwise", "fp8-forward")
OPTIMIZERS = ("adamw", "adamw-fused", "adamw-8bit", "adamw-fp8", "sgd", "sgd-momentum")
RECOMPUTE = ("none", "full")
"""The words of runtime/spec.py and runtime/parallelize/recompute.py, which this layer does not see; a test compares."""

MOST_LOCAL = 64
"""Ranks that are forked on one machine: each is a process with torch in memory, and all share its cores."""

FORKED = ("runtime-ranks",)
"""Rules that bind only ranks that are forked here."""
STARTED = tuple(rule.id for rule in cards.RULES)
"""Rules that bind only ranks that torchrun starts, which compute on cards where there are some."""
DRY = tuple(rule.id for rule in dry.RULES)
"""Rules that bind only dry runs."""

SPEC = "trainledger runtime/spec.py"
SCHEDULES = "PyTorch distributed/pipelining/schedules.py at 2.13.0"
_JOINED = {
    "gpt2": "keeps q, k and v one after the other in one matrix",
    "phi3": "keeps q, k and v one after the other in one matrix",
    "llama4_text": "keeps gate and up one after the other in one matrix",
}
"""Families of which a plain cut would give a rank q without k and v, or gate without up."""
_SCORES = {"alibi": "ALiBi", "sinks": "attention sinks", "soft-cap": "a soft cap on scores"}


def _copies(setting: Setting, plans: Plans) -> bool:
    return setting.workload.ema or setting.workload.frozen_copy > 0


def _state_space(setting: Setting, plans: Plans) -> bool:
    return any(block.ssm is not None for block in setting.model.blocks)


def _interleaved(setting: Setting, plans: Plans) -> Mask:
    return (plans.vpp < 2) & (setting.scenario.schedule == "interleaved")


def _few_microbatches(setting: Setting, plans: Plans) -> Mask:
    return (plans.pp > 1) & (plans.num_microbatches < plans.pp) & (setting.scenario.schedule == "1f1b")


def _idle(layout: tuple[int, ...], pp: int) -> list[int]:
    """Pipeline ranks that a layout leaves without a layer, and that have neither end of the model.

    >>> _idle((2, 0, 0, 1, 0, 1), 3), _idle((2, 0, 1), 3)
    ([1], [1])
    """
    return [rank for rank in range(1, pp - 1) if not sum(layout[rank::pp])]


def _idle_stage(setting: Setting, plans: Plans) -> Mask | bool:
    layout = setting.scenario.pp_layout
    return bool(layout) and np.array([bool(_idle(layout, pp)) for pp in plans.pp.tolist()])


def _idle_sentence(setting: Setting, row: dict[str, int]) -> str:
    layout = setting.scenario.pp_layout
    given, rank = ",".join(map(str, layout)), _idle(layout, row["pp"])[0]
    return f"--pp-layout {given} gives pipeline rank {rank} of pp={row['pp']} nothing to train; give it a layer"


def _etp(setting: Setting, plans: Plans) -> Mask:
    return plans.etp != np.where(plans.ep == 1, plans.tp, 1)


def _etp_sentence(setting: Setting, row: dict[str, int]) -> str:
    legal = row["tp"] if row["ep"] == 1 else 1
    return (
        f"etp={row['etp']} with tp={row['tp']} and ep={row['ep']}: the program cuts experts as it cuts the rest, by tp "
        f"without expert parallelism and not at all with it; use --etp {legal}, or leave it out"
    )


def _cut_by_tp(model: Model) -> Iterator[tuple[Tensor, int]]:
    """(tensor, indivisible parts along its cut) of everything that tp cuts; experts have a rule of their own."""
    inside = (tensor for block in model.blocks for tensor in block.tensors)
    for tensor in (*model.embedding, *inside, *model.final):
        if tensor.tp_dim is not None and tensor.role != "expert":
            yield tensor, tensor.tp_units or tensor.shape[tensor.tp_dim]


def _uneven(setting: Setting, plans: Plans) -> Mask:
    broken = np.zeros(len(plans), dtype=np.bool_)
    for parts in {parts for _, parts in _cut_by_tp(setting.model)}:
        broken |= parts % plans.tp != 0
    return broken


def _uneven_sentence(setting: Setting, row: dict[str, int]) -> str:
    tp = row["tp"]
    tensor, parts = next((tensor, parts) for tensor, parts in _cut_by_tp(setting.model) if parts % tp)
    knob = f"use one of {choices(parts)}"
    if tensor.role in ("embedding", "head"):
        knob += f", or --set vocab_size={-(-parts // tp) * tp}"
    return f"tp={tp} does not divide the {parts} parts of {tensor.name}, and the program cuts evenly only; {knob}"


def _uncut(model: Model) -> str:
    """What a cut into equal parts in order would get wrong; "" where it is right."""
    norms = [tensor for block in model.blocks for tensor in block.tensors if tensor.role == "norm"]
    if any(tensor.copies > 1 for tensor in norms):
        return "has a norm of its own for each head"
    if any(tensor.tp_dim == 0 and len(tensor.shape) == 1 for tensor in norms):
        return "normalises q and k over all heads at once"
    return _JOINED.get(model.family, "")


def learned_positions(model: Model) -> int | None:
    """The longest sequence that a table of learned positions takes; None where there is none."""
    learned = any(tensor.role == "position" for tensor in model.embedding)
    return model.max_positions if learned else None


def _beyond_positions(setting: Setting, plans: Plans) -> bool:
    most = learned_positions(setting.model)
    return most is not None and setting.workload.seq > most


def _hidden_keys(attention: Attention, seq: int) -> str:
    """Why a query does not simply see every key before it; "" where it does."""
    if attention.window is not None and attention.window < seq:
        return f"a window of {attention.window} tokens"
    return " and ".join(_SCORES[score] for score in attention.scores)


def _masked(setting: Setting, plans: Plans) -> Mask:
    seq = setting.workload.seq
    return (plans.cp > 1) & any(_hidden_keys(found, seq) for found in attentions(setting.model))


def _masked_sentence(setting: Setting, row: dict[str, int]) -> str:
    seq = setting.workload.seq
    reason = next(filter(None, (_hidden_keys(found, seq) for found in attentions(setting.model))))
    return (
        f"cp={row['cp']} and {setting.model.name} has {reason} at --seq {seq}: ring attention knows the causal mask "
        "alone; set cp to 1"
    )


def _misaligned(setting: Setting, plans: Plans) -> Mask:
    """Rows of experts that do not start where grouped products want them. [torch: native/GroupedMMUtils.h 25-32]"""
    broken = np.zeros(len(plans), dtype=np.bool_)
    each = _per_row(setting)
    for block in setting.model.blocks:
        if block.moe is not None:
            broken |= (block.moe.intermediate // plans.etp % each != 0) | (setting.model.hidden_size % each != 0)
    return broken


def _per_row(setting: Setting) -> int:
    """Elements in 16 bytes, of which a row must be a multiple."""
    return 4 if setting.scenario.precision == "fp32" else 8


def _misaligned_sentence(setting: Setting, row: dict[str, int]) -> str:
    each = _per_row(setting)
    width = next(block.moe.intermediate for block in setting.model.blocks if block.moe is not None) // row["etp"]
    return (
        f"experts of hidden size {setting.model.hidden_size} and width {width} on a rank: grouped products want "
        f"multiples of {each}, 16 bytes in {setting.scenario.precision}; change them with --set, or lower --tp"
    )


def _tied_bias(setting: Setting, plans: Plans) -> Mask:
    model = setting.model
    bias = any(tensor.role == "head" and len(tensor.shape) == 1 for tensor in model.final)
    return (plans.pp > 1) & (model.tied and bias)


def _unknown(flag: str, value: str, known: tuple[str, ...]) -> str:
    return f"--{flag} {value} is not something the program runs; use one of {', '.join(known)}"


RULES: tuple[Rule, ...] = (
    Rule(
        id="runtime-engine",
        severity="refuse",
        scope="runtime",
        source=SPEC,
        broken=lambda setting, plans: setting.profile.name != ENGINE,
        sentence="--engine {engine}: what is run is this package's own program on PyTorch; use --engine pytorch",
    ),
    Rule(
        id="runtime-ssm",
        severity="refuse",
        scope="runtime",
        source="trainledger runtime/model",
        broken=_state_space,
        sentence="{model} has state-space layers, and the program runs attention and networks only; name another model",
    ),
    Rule(
        id="runtime-precision",
        severity="refuse",
        scope="runtime",
        source=SPEC,
        broken=lambda setting, plans: setting.scenario.precision not in PRECISIONS,
        sentence=lambda setting, row: _unknown("precision", setting.scenario.precision, PRECISIONS),
    ),
    Rule(
        id="runtime-optimizer",
        severity="refuse",
        scope="runtime",
        source=SPEC,
        broken=lambda setting, plans: setting.scenario.optimizer not in OPTIMIZERS,
        sentence=lambda setting, row: _unknown("optimizer", setting.scenario.optimizer, OPTIMIZERS),
    ),
    Rule(
        id="runtime-recompute",
        severity="refuse",
        scope="runtime",
        source="trainledger runtime/parallelize/recompute.py",
        broken=lambda setting, plans: setting.scenario.recompute not in RECOMPUTE,
        sentence=lambda setting, row: _unknown("recompute", setting.scenario.recompute, RECOMPUTE),
    ),
    Rule(
        id="runtime-attention",
        severity="refuse",
        scope="runtime",
        source="PyTorch scaled_dot_product_attention",
        broken=lambda setting, plans: setting.scenario.attention != "flash",
        sentence="--attention eager: the program attends with fused kernels, which keep no scores; leave it out",
    ),
    Rule(
        id="runtime-adapters",
        severity="refuse",
        scope="runtime",
        source=SPEC,
        broken=lambda setting, plans: setting.workload.lora_rank > 0,
        sentence="--lora-rank {lora_rank}: the program trains every weight and knows no adapters; leave it out",
    ),
    Rule(
        id="runtime-copies",
        severity="refuse",
        scope="runtime",
        source=SPEC,
        broken=_copies,
        sentence="--ema or --frozen-copy: the program holds one copy of the model; leave them out",
    ),
    Rule(
        id="runtime-mtp",
        severity="refuse",
        scope="runtime",
        source="trainledger runtime/model",
        broken=lambda setting, plans: setting.workload.mtp,
        sentence="--mtp: the program trains no multi-token-prediction layers; leave the flag out",
    ),
    Rule(
        id="runtime-offload",
        severity="refuse",
        scope="runtime",
        source=SPEC,
        broken=lambda setting, plans: bool(setting.scenario.offload),
        sentence="--offload {offload}: the program keeps everything on its device; leave it out",
    ),
    Rule(
        id="runtime-interleaved",
        severity="refuse",
        scope="runtime",
        source=SCHEDULES,
        broken=_interleaved,
        sentence="--schedule interleaved with vpp={vpp}: it takes turns among a rank's stages; use --vpp 2, or 1f1b",
    ),
    Rule(
        id="runtime-microbatches",
        severity="refuse",
        scope="runtime",
        source=SCHEDULES,
        broken=_few_microbatches,
        sentence=(
            "{num_microbatches} micro-batches for pp={pp} stages: PyTorch's 1F1B needs one per stage at least; "
            "raise --gbs or lower --mbs"
        ),
    ),
    Rule(
        id="runtime-idle-stage",
        severity="refuse",
        scope="runtime",
        source="PyTorch optim/optimizer.py at 2.13.0: an optimizer of no parameters is an error",
        broken=_idle_stage,
        sentence=_idle_sentence,
    ),
    Rule(
        id="runtime-experts-tp",
        severity="refuse",
        scope="runtime",
        source="trainledger runtime/parallelize/expert.py",
        broken=lambda setting, plans: (plans.ep > 1) & (plans.tp > 1),
        sentence="ep={ep} with tp={tp}: the program runs expert parallelism without tensor parallelism; set one to 1",
    ),
    Rule(
        id="runtime-etp",
        severity="refuse",
        scope="runtime",
        source="trainledger runtime/parallelize/tensor.py",
        broken=_etp,
        sentence=_etp_sentence,
    ),
    Rule(
        id="runtime-even-tp",
        severity="refuse",
        scope="runtime",
        source="trainledger runtime/parallelize/tensor.py",
        broken=_uneven,
        sentence=_uneven_sentence,
    ),
    Rule(
        id="runtime-contiguous-tp",
        severity="refuse",
        scope="runtime",
        source="trainledger runtime/parallelize/tensor.py",
        broken=lambda setting, plans: (plans.tp > 1) & bool(_uncut(setting.model)),
        sentence=lambda setting, row: (
            f"tp={row['tp']} and {setting.model.name} {_uncut(setting.model)}, which the program does not cut; "
            "set tp to 1"
        ),
    ),
    Rule(
        id="runtime-expert-rows",
        severity="refuse",
        scope="runtime",
        source="PyTorch ATen/native/GroupedMMUtils.h 25-32 at 2.13.0",
        broken=_misaligned,
        sentence=_misaligned_sentence,
    ),
    Rule(
        id="tied-head-bias",
        severity="refuse",
        scope="runtime",
        source="trainledger runtime/model/decoder.py",
        broken=_tied_bias,
        sentence=(
            "pp={pp} and {model} ties an output layer that has a bias, which is not cut over pipeline stages; "
            "set pp to 1, or --set tie_word_embeddings=false"
        ),
    ),
    Rule(
        id="runtime-positions",
        severity="refuse",
        scope="runtime",
        source="the model's table of learned positions",
        broken=_beyond_positions,
        sentence=lambda setting, row: (
            f"--seq {setting.workload.seq} and {setting.model.name} has learned only "
            f"{learned_positions(setting.model)} positions; lower --seq"
        ),
    ),
    Rule(
        id="cp-causal",
        severity="refuse",
        scope="runtime",
        source="PyTorch _context_parallel/_attention.py at 2.13.0: causal or no mask",
        broken=_masked,
        sentence=_masked_sentence,
    ),
    Rule(
        id="runtime-ranks",
        severity="refuse",
        scope="runtime",
        source="trainledger runtime/launch/fork.py",
        broken=lambda setting, plans: plans.gpus > MOST_LOCAL,
        sentence=(
            f"--gpus {{gpus}}: at most {MOST_LOCAL} ranks are forked on one machine; lower a degree, use --dry, or "
            "start them on several machines with --cluster-args"
        ),
    ),
    *recipes.RULES,
    *cards.RULES,
)
