"""Megatron's arguments beside degrees: sizes that a named model must have, and those that change what is held.

[megatron: megatron/training/arguments.py; core/transformer/transformer_config.py, core/optimizer/optimizer_config.py]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trainledger.adapters.command_line import FALSE, number, one_of, typed
from trainledger.errors import BadInput
from trainledger.facts.model import Model

UNTIE = "untie_embeddings_and_output_weights"
LAYOUT = "the layers of each pipeline stage"
UNCOUNTED = {
    "account_for_embedding_in_pipeline_split": (LAYOUT, "pp_layout"),
    "account_for_loss_in_pipeline_split": (LAYOUT, "pp_layout"),
    "decoder_first_pipeline_num_layers": (LAYOUT, "pp_layout"),
    "decoder_last_pipeline_num_layers": (LAYOUT, "pp_layout"),
    "pipeline_model_parallel_layout": (LAYOUT, "pp_layout"),
    "cpu_offloading": ("which activations wait in host memory", "offload"),
    "cpu_offloading_num_layers": ("which activations wait in host memory", "offload"),
    "fine_grained_activation_offloading": ("which activations wait in host memory", ""),
    "cuda_graph_impl": ("memory, for graphs have pools of their own", ""),
    "deepspeed": ("the engine, to DeepSpeed inside Megatron", ""),
    "defer_embedding_wgrad_compute": ("what waits for the gradients of the output layer", ""),
    "distribute_saved_activations": ("which part of a recomputed layer's input each rank keeps", ""),
    "enable_cuda_graph": ("memory, for graphs have pools of their own", ""),
    "external_cuda_graph": ("memory, for graphs have pools of their own", ""),
    "fp4_format": ("the dtype of products", "precision"),
    "fp8_param_gather": ("the dtype that weights are kept in", ""),
    "moe_expert_capacity_factor": ("how many tokens an expert is given", ""),
    "mtp_num_layers": ("the model, by layers that predict further tokens", ""),
    "rlhf_type": ("the run, by models beside the one that is trained", ""),
    "tp_comm_overlap": ("memory, for its buffers stand beside activations", ""),
}
"""Argument -> (what it changes, the field of a plan that can say so instead; "": none does)."""

COMMUNICATES = {"p2p": "ring", "a2a": "all_to_all", "all_gather": "all_gather", "allgather": "all_gather"}
MOMENTS = {"fp32": "adamw-remainder", "bf16": "adamw-bf16", "fp8": "adamw-fp8"}
"""Both moments' dtype under the precision-aware optimizer -> --optimizer."""


def on(flags: Mapping[str, Any], name: str) -> bool:
    """Whether a switch is given and not switched off."""
    return name in flags and str(one_of(flags[name])).lower() not in FALSE


def refuse_uncounted(where: str, flags: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """An argument that changes what is held, and that neither the account nor a flag of the plan has."""
    for name, (what, field) in UNCOUNTED.items():
        if not on(flags, name) or field in given:
            continue
        said = f"say so by --{field.replace('_', '-')}" if field else "take it out of the command for an answer without"
        raise BadInput(f"{where}: {_typed(flags, name)} changes {what}, and is not read; {said}")
    if str(flags.get("transformer_impl", "")) == "local":
        raise BadInput(
            f"{where}: --transformer-impl local runs layers that were not read; the account is of transformer_engine"
        )


def words_of(where: str, flags: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """(fields of a plan, how they are typed by argument) of what has a flag of another name."""
    plan: dict[str, Any] = {}
    used: dict[str, str] = {}
    if "num_distributed_optimizer_instances" in flags:
        plan["dp_replicate"] = number(flags, "num_distributed_optimizer_instances", where)
        used["num_distributed_optimizer_instances"] = f"--dp-replicate {plan['dp_replicate']}"
    if "cp_comm_type" in flags:
        word = str(one_of(flags["cp_comm_type"]))
        if word not in COMMUNICATES:
            known = " or ".join(COMMUNICATES)
            raise BadInput(f"{where}: --cp-comm-type is {word!r}, which is not counted; write {known}")
        plan["cp_comm"] = COMMUNICATES[word]
        used["cp_comm_type"] = f"--cp-comm {plan['cp_comm']}"
    drops = {name: str(one_of(flags[name])) for name in ("attention_dropout", "hidden_dropout") if name in flags}
    if drops:
        plan["dropout"] = _dropout(where, drops)
        used |= dict.fromkeys(drops, f"--dropout {plan['dropout']}")
    if on(flags, "use_precision_aware_optimizer"):
        plan["optimizer"], names = _moments(where, flags)
        used |= dict.fromkeys(names, f"--optimizer {plan['optimizer']}")
    if on(flags, "optimizer_cpu_offload") and str(flags.get("optimizer_offload_fraction", "1.0")) not in ("1", "1.0"):
        raise BadInput(
            f"{where}: {_typed(flags, 'optimizer_offload_fraction')} leaves a part of the optimizer on the card, and "
            "--offload optimizer leaves none; write 1.0"
        )
    return plan, used


def _dropout(where: str, drops: Mapping[str, str]) -> str:
    """On or off for both: an account of one alone there is none."""
    chosen: set[str] = set()
    for name, value in {"attention_dropout": "0.1", "hidden_dropout": "0.1", **drops}.items():
        try:
            chosen.add("off" if float(value) == 0 else "on")
        except ValueError:
            raise BadInput(f"{where}: --{name.replace('_', '-')} is {value!r}: write a share, such as 0.1") from None
    if len(chosen) > 1:
        raise BadInput(
            f"{where}: one of --attention-dropout and --hidden-dropout (0.1 unless given) is 0 and one is not, and the "
            "account has both or neither; give both"
        )
    return chosen.pop()


def _moments(where: str, flags: Mapping[str, Any]) -> tuple[str, list[str]]:
    """--optimizer for the dtypes that are given, and the arguments that were read for it."""
    kept = {"main_params_dtype": "fp32", "main_grads_dtype": "fp32"}
    for name, dtype in kept.items():
        if str(flags.get(name, dtype)) != dtype:
            raise BadInput(f"{where}: {_typed(flags, name)} is not counted; the account has {dtype}")
    moments = {str(flags.get(name, "fp32")) for name in ("exp_avg_dtype", "exp_avg_sq_dtype")}
    found = next((MOMENTS[dtype] for dtype in MOMENTS if moments == {dtype}), None)
    if found is None:
        said, known = " and ".join(sorted(moments)), " or ".join(MOMENTS)
        raise BadInput(f"{where}: moments in {said} are not counted; both may be in {known}")
    names = ("use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype", *kept)
    return found, [name for name in names if name in flags]


def sizes_of(where: str, flags: Mapping[str, Any], model: Model) -> list[str]:
    """The arguments that say the sizes of a named model; one that says another size is refused."""
    found: list[str] = []
    for name, sizes in _sizes(flags, model):
        if name not in flags:
            continue
        if sizes and number(flags, name, where) not in sizes:
            has = " or ".join(map(str, sorted(sizes)))
            raise BadInput(
                f"{where}: {_typed(flags, name)}, and {model.name} has {has}; name the model that the command trains, "
                "or leave --model out"
            )
        found.append(name)
    if not model.states_alone and "num_layers" in flags:
        for name, has, what in _switches(model):
            if on(flags, name) != has:
                said = f"the command is {'without' if has else 'with'} --{name.replace('_', '-')}"
                raise BadInput(
                    f"{where}: {said}, and {model.name} {what}; name the model that the command trains, or change it"
                )
            found += [name] * (name in flags)
    return found


def _switches(model: Model) -> Iterable[tuple[str, bool, str]]:
    """(argument, whether the model has it, in words): of a command that says what its model is."""
    yield (
        UNTIE,
        not model.tied,
        "ties its embeddings" if model.tied else "does not tie its embeddings",
    )
    dense = {block.mlp.gated for block in model.blocks if block.mlp is not None}
    if dense == {False}:
        yield "swiglu", False, "has no gated feed-forward network"
    experts = any(block.moe is not None for block in model.blocks)
    yield "num_experts", experts, "has experts" if experts else "has no experts"


def _sizes(flags: Mapping[str, Any], model: Model) -> Iterable[tuple[str, set[int]]]:
    """(argument, the sizes that layers of the model have by that name); none where there is nothing to compare."""
    blocks = model.blocks
    attention = [block.attention for block in blocks if block.attention is not None]
    experts = [block.moe for block in blocks if block.moe is not None]
    widths = {block.mlp.intermediate for block in blocks if block.mlp is not None}
    yield "num_layers", {model.num_layers} - {0}
    yield "hidden_size", {model.hidden_size} - {0}
    yield "vocab_size", {model.vocab_size} - {0}
    yield "num_attention_heads", {each.heads for each in attention}
    yield "num_query_groups", {each.kv_heads for each in attention if each.kind == "mha"}
    yield "ffn_hidden_size", widths or {each.intermediate for each in experts}
    yield "num_experts", {each.experts for each in experts}
    yield "moe_ffn_hidden_size", {each.intermediate for each in experts}
    yield "moe_router_topk", {each.top_k for each in experts}
    if "num_attention_heads" in flags and not on(flags, "group_query_attention"):
        yield "num_attention_heads", {each.kv_heads for each in attention if each.kind == "mha"}
    yield "group_query_attention", set()


def _typed(flags: Mapping[str, Any], name: str) -> str:
    """An argument as it was typed."""
    return f"--{name.replace('_', '-')} {typed(flags[name])}".strip()
