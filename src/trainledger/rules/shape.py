"""Rules about a model's shapes against the degrees that cut them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from trainledger.arrays import IntArray, divisors, ints
from trainledger.facts.model import Attention, Model, Moe
from trainledger.plans.plan import Plans, make_plans
from trainledger.plans.setting import Setting
from trainledger.rules.rule import Mask, Rule

MOST_TP = 64
"""The largest degree of tensor parallelism that a sentence offers: beyond it no scale-up domain reaches today."""
MEGATRON_CONFIG = "Megatron-Core transformer_config.py at d98e8a6"


def choices(number: int, most: int = 64) -> str:
    """The divisors of a number up to `most`, for the "use one of" of a sentence.

    >>> choices(96, 16)
    '1, 2, 3, 4, 6, 8, 12, 16'
    """
    return ", ".join(str(d) for d in divisors(number) if d <= most)


def _undivided(sizes: Iterable[int], over: IntArray) -> Mask:
    """Where some size is not a multiple of the degree that cuts it."""
    broken = np.zeros(len(over), dtype=np.bool_)
    for size in sizes:
        broken |= size % over != 0
    return broken


def attentions(model: Model) -> list[Attention]:
    """The attention of every distinct block that has one."""
    return [block.attention for block in model.blocks if block.attention is not None]


def _moes(model: Model) -> list[Moe]:
    return [block.moe for block in model.blocks if block.moe is not None]


def _uneven_heads(setting: Setting, attention: Attention, tp: IntArray) -> Mask:
    """Query heads must divide; KV heads too, or be copied whole where the engine does that. MLA has no KV heads."""
    broken = attention.heads % tp != 0
    if attention.kind == "mla":
        return broken
    uneven = attention.kv_heads % tp != 0
    if setting.profile.kv_replication:
        uneven &= tp % attention.kv_heads != 0
    return broken | uneven


def _heads(setting: Setting, plans: Plans) -> Mask:
    broken = np.zeros(len(plans), dtype=bool)
    for attention in attentions(setting.model):
        broken |= _uneven_heads(setting, attention, plans.tp)
    return broken


def _legal_tp(setting: Setting) -> str:
    """Degrees of tensor parallelism that both heads and widths allow, for the "use one of" of a sentence."""
    degrees = make_plans({"tp": np.arange(1, MOST_TP + 1)})
    legal = ~(_heads(setting, degrees) | _widths_broken(setting, degrees))
    return ", ".join(map(str, degrees.tp[legal].tolist()))


def _heads_sentence(setting: Setting, row: dict[str, int]) -> str:
    tp = row["tp"]
    attention = next(a for a in attentions(setting.model) if _uneven_heads(setting, a, ints(tp)).any())
    if attention.heads % tp:
        heads = attention.heads
        rule = f"tp={tp} does not divide the model's {heads} attention heads (remainder {heads % tp})"
    elif setting.profile.kv_replication:
        rule = f"tp={tp} and {attention.kv_heads} KV heads: tp must divide them or be a multiple of them"
    else:
        framework = setting.profile.framework
        rule = f"tp={tp} and {attention.kv_heads} KV heads: tp must divide them, for {framework} does not copy KV heads"
    return f"{rule}; use one of {_legal_tp(setting)}"


def _widths(model: Model) -> dict[str, int]:
    widths: dict[str, int] = {}
    for block in model.blocks:
        if block.mlp is not None:
            widths["the MLP width"] = block.mlp.intermediate
        if block.moe is not None and block.moe.shared_intermediate:
            widths["the shared experts' width"] = block.moe.shared_intermediate
        if block.ssm is not None:
            widths["the SSM groups"] = block.ssm.groups
    return widths


def _widths_broken(setting: Setting, plans: Plans) -> Mask:
    return _undivided(_widths(setting.model).values(), plans.tp)


def _widths_sentence(setting: Setting, row: dict[str, int]) -> str:
    what, width = next((k, v) for k, v in _widths(setting.model).items() if v % row["tp"])
    rest = width % row["tp"]
    return f"tp={row['tp']} does not divide {what}, {width} (remainder {rest}); use one of {_legal_tp(setting)}"


def _experts(setting: Setting, plans: Plans) -> Mask:
    return _undivided((moe.experts for moe in _moes(setting.model)), plans.ep)


def _experts_sentence(setting: Setting, row: dict[str, int]) -> str:
    experts = next(moe.experts for moe in _moes(setting.model) if moe.experts % row["ep"])
    return (
        f"ep={row['ep']} does not divide the model's {experts} routed experts (remainder {experts % row['ep']}); "
        f"use one of {choices(experts, 512)}"
    )


def _expert_width(setting: Setting, plans: Plans) -> Mask:
    return _undivided((moe.intermediate for moe in _moes(setting.model)), plans.etp)


def _expert_width_sentence(setting: Setting, row: dict[str, int]) -> str:
    width = next(moe.intermediate for moe in _moes(setting.model) if moe.intermediate % row["etp"])
    return f"etp={row['etp']} does not divide the experts' width, {width}; use one of {choices(width)}"


def _no_experts(setting: Setting, plans: Plans) -> Mask:
    return (plans.ep > 1) & (not _moes(setting.model))


def _needs_shapes(setting: Setting, plans: Plans) -> Mask:
    cut = (plans.tp > 1) | (plans.pp > 1) | (plans.cp > 1) | (plans.ep > 1)
    return cut & setting.model.params_only


def _unaccounted(setting: Setting, plans: Plans) -> Mask:
    return ((plans.tp > 1) | (plans.cp > 1)) & bool(setting.model.unaccounted)


def _unaccounted_sentence(setting: Setting, row: dict[str, int]) -> str:
    has = " and ".join(setting.model.unaccounted)
    degrees = " and ".join(f"{axis}={row[axis]}" for axis in ("tp", "cp") if row[axis] > 1)
    return (
        f"{setting.model.name} has {has}, and how {degrees} divides them is not known; set tp and cp to 1 and divide "
        "by pp, ep and --zero"
    )


def _matrix_optimizer(setting: Setting, plans: Plans) -> bool:
    by_shape = any(m.layout == "factored" or m.select != "all" for m in setting.optimizer.moments)
    return setting.model.params_only and by_shape


def _weight_copies(setting: Setting, plans: Plans) -> Mask:
    """Copies of weight matrices in another format, of a model whose matrices are not known."""
    rows = [row for row in setting.profile.state if row.select == "linear"]
    stages = [s for row in rows if setting.scenario.precision in row.precision for s in row.zero]
    return np.isin(plans.zero_stage, stages) & (setting.model.params_only and not setting.model.blocks)


def _largest_layer(setting: Setting, plans: Plans) -> Mask:
    stages = [stage for row in setting.profile.state if row.select == "largest_module" for stage in row.zero]
    unknown = setting.model.params_only and not setting.largest_module_params
    return np.isin(plans.zero_stage, stages) & unknown


RULES: tuple[Rule, ...] = (
    Rule(
        id="shapes-known",
        severity="refuse",
        scope="model",
        source="a parameter count says nothing about heads, layers or experts",
        broken=_needs_shapes,
        sentence=(
            "{model} are a count without shapes, so tp={tp}, pp={pp}, cp={cp}, ep={ep} cannot be told apart; "
            "give a config.json, or leave those degrees at 1"
        ),
    ),
    Rule(
        id="layers-accounted",
        severity="refuse",
        scope="model",
        source="the model's family, which has no account of what some of its layers keep and send",
        broken=_unaccounted,
        sentence=_unaccounted_sentence,
    ),
    Rule(
        id="optimizer-needs-shapes",
        severity="refuse",
        scope="model",
        source="Adafactor, Muon and block-quantised moments depend on each tensor's shape",
        broken=_matrix_optimizer,
        sentence=(
            "--optimizer {optimizer} keeps state by tensor shape, and {model} are a count without shapes; "
            "give a config.json, or use adamw"
        ),
    ),
    Rule(
        id="precision-needs-shapes",
        severity="refuse",
        scope="model",
        source="TransformerEngine pytorch/module/linear.py 467-489 at d0067d0: copies of weight matrices alone",
        broken=_weight_copies,
        sentence=(
            "--precision {precision} keeps copies of the weight matrices, and {model} are a count without shapes; "
            "give a config.json, or use bf16"
        ),
    ),
    Rule(
        id="largest-layer-known",
        severity="refuse",
        scope="model",
        source="DeepSpeed estimate_zero3_model_states_mem_needs asks for the largest layer",
        broken=_largest_layer,
        sentence=(
            "{engine} at --zero {zero_stage} needs the largest layer, and {model} are a count without shapes; "
            "give --largest-layer or a config.json, or another --engine"
        ),
    ),
    Rule(
        id="heads-divisible-by-tp",
        severity="refuse",
        scope="model",
        source=MEGATRON_CONFIG,
        broken=_heads,
        sentence=_heads_sentence,
    ),
    Rule(
        id="width-divisible-by-tp",
        severity="refuse",
        scope="model",
        source="Megatron-Core tensor_parallel/layers.py divide()",
        broken=_widths_broken,
        sentence=_widths_sentence,
    ),
    Rule(
        id="ep-needs-experts",
        severity="refuse",
        scope="model",
        source="Megatron-LM arguments.py at d98e8a6",
        broken=_no_experts,
        sentence="ep={ep} but {model} has no routed experts; set ep to 1",
    ),
    Rule(
        id="experts-divisible-by-ep",
        severity="refuse",
        scope="model",
        source="Megatron-Core transformer/moe/moe_layer.py; torchtitan models/common/decoder.py",
        broken=_experts,
        sentence=_experts_sentence,
    ),
    Rule(
        id="expert-width-divisible-by-etp",
        severity="refuse",
        scope="model",
        source="Megatron-Core tensor_parallel/layers.py divide()",
        broken=_expert_width,
        sentence=_expert_width_sentence,
    ),
)
