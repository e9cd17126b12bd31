"""Megatron-LM's arguments: degrees, batch, recomputation, precision, the distributed optimizer and the model's sizes.

[megatron: megatron/training/arguments.py at d98e8a64dd]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainledger.adapters.command_line import RANKS, number, preset_of, ranks_of, typed
from trainledger.adapters.megatron_words import UNTIE, on, refuse_uncounted, sizes_of, words_of
from trainledger.adapters.settings import Settings, Unused, Used
from trainledger.adapters.swift import kind_of
from trainledger.errors import BadInput
from trainledger.facts.model import Model

KIND = "Megatron arguments"
SIGNS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
"""Flags by which a command is known to be Megatron's."""

NUMBERS = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
    "num_virtual_stages_per_pipeline_rank": "vpp",
    "micro_batch_size": "mbs",
    "global_batch_size": "gbs",
    "seq_length": "seq",
    "max_length": "seq",
}
SIZES = {
    "num_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "num_query_groups": "kv_heads",
    "ffn_hidden_size": "ffn",
    "vocab_size": "vocab",
    "padded_vocab_size": "vocab",
}
"""Of a model, where no --model names one."""
NEEDED = ("layers", "hidden", "heads", "ffn", "vocab")
STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""--data-parallel-sharding-strategy of Megatron-FSDP -> zero_stage."""
RECIPES = {"delayed": "fp8-delayed", "tensorwise": "fp8-tensorwise", "blockwise": "fp8-blockwise", "mxfp8": "mxfp8"}
OPTIMIZERS = {"adam": "adamw", "sgd": "sgd-momentum", "muon": "muon"}
SWIFT = ("load_safetensors", "save_safetensors", "train_type", "split_dataset_ratio", "merge_lora", "padding_free")
"""Arguments that ms-swift alone has."""


def is_megatron(flags: Mapping[str, Any]) -> bool:
    """Whether the flags are Megatron's."""
    return any(sign in flags for sign in SIGNS)


def read_megatron(
    where: str, flags: Mapping[str, Any], given: Mapping[str, Any], model: Model | None = None
) -> Settings:
    """The plan of a command; `model` where flags name one, whose sizes the command may say and must not deny."""
    refuse_uncounted(where, flags, given)
    if kind_of(flags) not in ("", "full"):
        raise BadInput(
            f"{where}: {kind_of(flags)} is trained by Megatron, whose adapters have no account; the same of --engine "
            "pytorch is asked for with --lora-rank"
        )
    plan: dict[str, Any] = {"engine": "megatron"}
    used: dict[str, str] = {}
    for name, field in NUMBERS.items():
        if name in flags:
            plan[field] = number(flags, name, where)
            used[name] = f"--{field} {plan[field]}"
    for part in (_world, _shards, _precision, _recompute, _words):
        part(where, flags, plan, used)
    more, said = words_of(where, flags)
    plan |= more
    used |= said
    _virtual(where, flags, plan, used)
    if model is None:
        _model(where, flags, plan, used, given.get("vocab"))
    else:
        used |= dict.fromkeys(sizes_of(where, flags, model), "as the model has it")
    return Settings(
        path=where,
        kind=KIND,
        plan=plan,
        told={},
        used=tuple(Used(key=_key(flags, key), value=typed(flags[key]), flag=flag) for key, flag in used.items()),
        unused=tuple(_unused(flags, used)),
        conflicts=(),
    )


def _swift(flags: Mapping[str, Any]) -> bool:
    """Whether ms-swift hands the arguments on, whose defaults are other ones. [ms-swift: megatron/arguments]"""
    return any(sign in flags for sign in SWIFT)


def _world(where: str, flags: Mapping[str, Any], plan: dict[str, Any], used: dict[str, str]) -> None:
    gpus = ranks_of(flags, where)
    if gpus is not None:
        plan["gpus"] = gpus
        used |= {name: f"--gpus {gpus}" for name in RANKS if name in flags}
    if plan.get("tp", 1) > 1:
        plan["sp"] = on(flags, "sequence_parallel")
        if "sequence_parallel" in flags:
            used["sequence_parallel"] = "--sp" if plan["sp"] else "--no-sp"


def _shards(where: str, flags: Mapping[str, Any], plan: dict[str, Any], used: dict[str, str]) -> None:
    """Without the distributed optimizer every rank keeps all of it."""
    if on(flags, "use_torch_fsdp2"):
        raise BadInput(
            f"{where}: --use-torch-fsdp2 is another engine inside Megatron, which has no account; leave it out"
        )
    plan["zero"] = int(_swift(flags) and "use_distributed_optimizer" not in flags)
    if on(flags, "use_distributed_optimizer"):
        plan["zero"] = 1
        used["use_distributed_optimizer"] = "--zero 1"
    if on(flags, "use_megatron_fsdp") or on(flags, "use_custom_fsdp"):
        word = str(flags.get("data_parallel_sharding_strategy", "no_shard"))
        if word not in STRATEGIES:
            known = " or ".join(STRATEGIES)
            raise BadInput(f"{where}: --data-parallel-sharding-strategy is {word!r}: write {known}")
        plan["zero"] = STRATEGIES[word]
        names = ("use_megatron_fsdp", "use_custom_fsdp", "data_parallel_sharding_strategy")
        used |= {name: f"--zero {plan['zero']}" for name in names if name in flags}
    if on(flags, "optimizer_cpu_offload"):
        plan["offload"] = ("optimizer",)
        used["optimizer_cpu_offload"] = "--offload optimizer"
    if on(flags, "grad_reduce_in_bf16"):
        plan["grad_dtype"] = "bf16"
        used["grad_reduce_in_bf16"] = "--grad-dtype bf16"


def _precision(where: str, flags: Mapping[str, Any], plan: dict[str, Any], used: dict[str, str]) -> None:
    plan["precision"] = next(
        (name for name in ("bf16", "fp16") if on(flags, name)), "bf16" if _swift(flags) else "fp32"
    )
    used |= {name: f"--precision {plan['precision']}" for name in ("bf16", "fp16") if on(flags, name)}
    if "fp8_format" in flags or on(flags, "fp8_hybrid"):
        recipe = str(flags.get("fp8_recipe", "delayed"))
        if recipe not in RECIPES:
            raise BadInput(f"{where}: --fp8-recipe is {recipe!r}: write {' or '.join(RECIPES)}")
        plan["precision"] = RECIPES[recipe]
        used |= {
            name: f"--precision {RECIPES[recipe]}"
            for name in ("bf16", "fp8_format", "fp8_hybrid", "fp8_recipe")
            if name in flags
        }


def _recompute(where: str, flags: Mapping[str, Any], plan: dict[str, Any], used: dict[str, str]) -> None:
    """Nothing is computed again unless it is told."""
    granularity = str(flags.get("recompute_granularity", ""))
    if on(flags, "recompute_activations") or granularity == "selective":
        plan["recompute"] = "selective"
        parts = flags.get("recompute_modules")
        if parts is not None and parts is not True:
            plan["recompute_parts"] = tuple(parts) if isinstance(parts, list) else tuple(str(parts).split(","))
            used["recompute_modules"] = f"--recompute-parts {','.join(plan['recompute_parts'])}"
    elif granularity == "full":
        layers = number(flags, "recompute_num_layers", where) if "recompute_num_layers" in flags else 1
        block = flags.get("recompute_method") == "block"
        plan["recompute"] = "full" if block or layers == 1 else f"uniform-{layers}"
        if block:
            plan["recompute_layers"] = layers
    else:
        plan["recompute"] = "selective" if _swift(flags) and not granularity else "none"
    beside = f" --recompute-layers {plan['recompute_layers']}" if "recompute_layers" in plan else ""
    names = ("recompute_granularity", "recompute_activations", "recompute_method", "recompute_num_layers")
    used |= {name: f"--recompute {plan['recompute']}{beside}" for name in names if name in flags}


def _words(_where: str, flags: Mapping[str, Any], plan: dict[str, Any], used: dict[str, str]) -> None:
    if "optimizer" in flags:
        plan["optimizer"] = OPTIMIZERS.get(str(flags["optimizer"]), str(flags["optimizer"]))
        used["optimizer"] = f"--optimizer {plan['optimizer']}"
    backend = str(flags.get("attention_backend", ""))
    if backend in ("unfused", "local"):
        plan["attention"] = "eager"
    elif backend or on(flags, "use_flash_attn"):
        plan["attention"] = "flash"
    used |= {
        name: f"--attention {plan['attention']}"
        for name in ("attention_backend", "use_flash_attn")
        if name in flags and "attention" in plan
    }
    if on(flags, "cross_entropy_loss_fusion"):
        native = flags.get("cross_entropy_fusion_impl", "native") == "native"
        plan["loss"] = "native-fused" if native else "fused"
        used |= {
            name: f"--loss {plan['loss']}"
            for name in ("cross_entropy_loss_fusion", "cross_entropy_fusion_impl")
            if name in flags
        }


def _virtual(where: str, flags: Mapping[str, Any], plan: dict[str, Any], used: dict[str, str]) -> None:
    """Layers of a virtual stage -> virtual stages; both interleave."""
    name = "num_layers_per_virtual_pipeline_stage"
    if name in flags and "num_layers" not in flags:
        raise BadInput(f"{where}: --{name} without --num-layers says no number of stages; give --num-layers as well")
    if name in flags:
        each, layers = number(flags, name, where), number(flags, "num_layers", where)
        stages = each * plan.get("pp", 1)
        if each < 1 or layers % stages:
            raise BadInput(f"{where}: --{name} {each} x pp {plan.get('pp', 1)} does not divide {layers} layers")
        plan["vpp"] = layers // stages
        used[name] = f"--vpp {plan['vpp']} --schedule interleaved"
    if plan.get("vpp", 1) > 1:
        plan["schedule"] = "interleaved"


def _model(where: str, flags: Mapping[str, Any], plan: dict[str, Any], used: dict[str, str], vocab: object) -> None:
    """A name, or sizes of a model with a gated feed-forward network; another kind has to be named."""
    named = next((name for name in ("model", "load") if preset_of(flags.get(name)) is not None), None)
    if named is not None:
        plan["model"] = preset_of(flags[named])
        used[named] = f"--model {plan['model']}"
        return
    if "num_experts" not in flags and not any(name in flags for name in SIZES):
        raise BadInput(f"{where}: it names no model that comes with the package, and no sizes of one; give --model")
    if "num_experts" in flags or not on(flags, "swiglu"):
        what = "experts" if "num_experts" in flags else "no --swiglu"
        raise BadInput(
            f"{where}: a model with {what} is not made from sizes; give --model, such as --model mixtral-8x7b"
        )
    for name, field in SIZES.items():
        if name in flags and field not in plan:
            plan[field] = number(flags, name, where)
            used[name] = f"--{field.replace('_', '-')} {plan[field]}"
    if not on(flags, "group_query_attention"):
        plan.pop("kv_heads", None)
        used.pop("num_query_groups", None)
    if "vocab" not in plan and vocab is not None:
        plan["vocab"] = vocab
    lacking = [f"--{name.replace('_', '-')}" for name, field in SIZES.items() if field in NEEDED and field not in plan]
    if lacking:
        flag = "" if NEEDED[-1] in plan else " or --vocab, which the tokenizer says"
        raise BadInput(f"{where}: the model has no {' or '.join(lacking)}; give --model{flag}, or the sizes")
    if not on(flags, UNTIE) and not _swift(flags):
        raise BadInput(
            f"{where}: without --{UNTIE.replace('_', '-')} the output layer is the embedding, and a model that is made "
            "from sizes has both; give --model, or add the argument if the model has both"
        )
    used |= {UNTIE: "a model of sizes has both"} if UNTIE in flags else {}
    plan["model"] = "custom"


def _unused(flags: Mapping[str, Any], used: Mapping[str, str]) -> Iterator[Unused]:
    for name, value in flags.items():
        if name not in used:
            yield Unused(
                key=_key(flags, name), value=typed(value), why="is not read: it is of the run, or the engine's own"
            )


def _key(flags: Mapping[str, Any], name: str) -> str:
    """An argument as its program writes it: ms-swift with underscores."""
    return f"--{name}" if _swift(flags) else f"--{name.replace('_', '-')}"
