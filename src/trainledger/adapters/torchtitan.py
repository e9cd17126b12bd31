"""torchtitan's TOML, as its releases until 2026 read it: degrees, batch, recomputation, precision and the model's name.

Keys are known by their own name, whatever table they stood in: they moved from [training] and [experimental] to
[parallelism] between releases. [torchtitan: config_manager.py and config/job_config.py, releases of 2024-10 to 2025-12]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainledger.adapters.settings import Settings, Unused, Used, Values, flattened
from trainledger.errors import BadInput

KIND = "torchtitan TOML"
SIGNS = ("parallelism", "training", "activation_checkpoint", "job")
"""Tables by which such a file is known; a PLAN file has none."""

MODELS: dict[tuple[str, str], str] = {
    ("llama3", "8B"): "llama-3-8b",
    ("llama3", "70B"): "llama-3-70b",
    ("llama3", "405B"): "llama-3.1-405b",
    ("llama2", "7B"): "llama-2-7b",
    ("llama2", "13B"): "llama-2-13b",
    ("llama2", "70B"): "llama-2-70b",
    ("deepseek_v3", "16B"): "deepseek-v2-lite",
    ("deepseek_v3", "671B"): "deepseek-v3",
    ("qwen3", "0.6B"): "qwen3-0.6b",
    ("qwen3", "1.7B"): "qwen3-1.7b",
    ("qwen3", "4B"): "qwen3-4b",
    ("qwen3", "8B"): "qwen3-8b",
    ("qwen3", "14B"): "qwen3-14b",
    ("qwen3", "32B"): "qwen3-32b",
    ("qwen3", "30B-A3B"): "qwen3-30b-a3b",
}
"""(name, flavor) -> the preset of the same shapes."""

DEGREES = {
    "tensor_parallel_degree": "tp",
    "pipeline_parallel_degree": "pp",
    "context_parallel_degree": "cp",
    "expert_parallel_degree": "ep",
    "expert_tensor_parallel_degree": "etp",
    "data_parallel_replicate_degree": "dp_replicate",
    "data_parallel_shard_degree": "dp_shard",
    "data_parallel_degree": "dp_shard",
}
BATCH = {"local_batch_size": "mbs", "batch_size": "mbs", "global_batch_size": "gbs", "seq_len": "seq"}
SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved",
    "interleavedzerobubble": "zero-bubble",
}
RECIPES = ("float8.recipe_name", "quantize.linear.float8.recipe_name")
FLOAT8 = "float8.enable_float8_linear"
"""What releases before converters had."""
RESHARD = ("default", "always", "never")
OPTIMIZERS = {"adamw": "adamw", "adam": "adamw"}
RENAMED = {"training.batch_size": "2025-04-02", "training.compile": "2025-07-28"}
"""Keys that later releases name otherwise -> the newest profile before: 2025-06-05 and 2025-08-20."""
LAST = "2026-01-27"
"""The newest profile before 2026-02-23, when settings became Python."""
TABLES = ("training", "parallelism", "experimental", "model", "float8", "mx", "quantize", "activation_checkpoint")
"""Tables in which keys are known by their own name: those of validation have the same."""
OWN: dict[str, Any] = {"mbs": 8, "seq": 2048, "recompute": "every-2"}
"""What it takes where a file says nothing."""
UNCOUNTED = {
    "parallelism.disable_loss_parallel": "logits that each rank has whole",
    "experimental.disable_loss_parallel": "logits that each rank has whole",
    "training.disable_loss_parallel": "logits that each rank has whole",
    "optimizer.early_step_in_backward": "gradients that are gone before the backward is over",
    "fault_tolerance.enable": "what TorchFT keeps for replicas that come and go",
}
"""Switches that change what is held, and that no account here counts."""
LAYOUT = (
    "pipeline_parallel_layers_per_stage", "pipeline_parallel_split_points", "module_fqns_per_model_part",
    "pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers",
)  # fmt: skip
"""Keys of the layers of a pipeline stage."""
IDLE = "changes nothing that is counted, or is taken as the engine's own"


def is_torchtitan(tables: Mapping[str, Any]) -> bool:
    """Whether the tables of a TOML file are torchtitan's."""
    return any(isinstance(tables.get(sign), dict) for sign in SIGNS)


def read_torchtitan(where: str, tables: Mapping[str, Any], given: Mapping[str, Any]) -> Settings:
    """The plan of a file; -1 is what the other degrees leave of the GPUs."""
    flat = flattened(tables)
    named = {key.rpartition(".")[2]: key for key in flat if key.partition(".")[0] in TABLES}
    values = Values(where, flat)
    for key, what in UNCOUNTED.items():
        if values.switch(key):
            raise BadInput(
                f"{where}: {key} is true, and no account here counts {what}; set it to false to see the rest"
            )
    plan: dict[str, Any] = {"engine": "torchtitan"}
    flags: dict[str, str] = {}
    for name, field in (*DEGREES.items(), *BATCH.items()):
        _take(values, named, name, field, plan, flags)
    for field, own in OWN.items():
        if given.get(field) is None:
            plan.setdefault(field, own)
    _microbatches(values, named, given, plan, flags)
    _shards(values, named, plan, flags)
    _recompute(values, named, plan, flags)
    _precision(values, named, plan, flags)
    _others(values, named, plan, flags)
    _model(values, given, plan, flags)
    if given.get("framework_version") is None:
        _release(values, plan, flags)
    return Settings(
        path=where,
        kind=KIND,
        plan=plan,
        told={},
        used=tuple(Used(key=key, value=values.shown(key), flag=flag) for key, flag in flags.items()),
        unused=tuple(_unused(values, flags)),
        conflicts=(),
    )


def _take(
    values: Values, named: Mapping[str, str], name: str, field: str, plan: dict[str, Any], flags: dict[str, str]
) -> None:
    """A number that is a flag; -1, and 0 of batches, are what follows from the others."""
    key = named.get(name)
    if key is None:
        return
    number = values.whole(key, least=-1)
    if number is None or number < 1:
        return
    plan[field] = number
    flags[key] = f"--{field.replace('_', '-')} {number}"


def _microbatches(
    values: Values, named: Mapping[str, str], given: Mapping[str, Any], plan: dict[str, Any], flags: dict[str, str]
) -> None:
    """Pipeline stages take a local batch in parts. [torchtitan: distributed/pipeline_parallel.py, build_schedule]"""
    local = plan.get("mbs")
    if plan.get("pp", 1) == 1 or local is None:
        return
    size, parts = (
        None if key is None else values.whole(key, least=1)
        for key in (named.get("pipeline_parallel_microbatch_size"), named.get("pipeline_parallel_microbatches"))
    )
    if size is None and parts is None and "batch_size" in named:
        raise BadInput(
            f"{values.where}: releases that have {named['batch_size']} part it over pipeline stages by their number or "
            "by one sequence; write pipeline_parallel_microbatches or pipeline_parallel_microbatch_size"
        )
    plan["mbs"] = size if size is not None else max(local // (parts or local), 1)
    if "gbs" not in plan and given.get("gbs") is None:
        others = plan["pp"] * plan.get("tp", 1) * plan.get("cp", 1)
        shards = plan.get("dp_replicate", 1) * plan.get("dp_shard", 1)
        gpus = given.get("gpus")
        plan["gbs"] = local * (max(gpus // others, 1) if gpus is not None else shards)
    batch = "" if "gbs" not in plan else f" --gbs {plan['gbs']}"
    names = ("local_batch_size", "batch_size", "pipeline_parallel_microbatch_size", "pipeline_parallel_microbatches")
    flags |= {named[name]: f"--mbs {plan['mbs']}{batch}" for name in names if name in named}


def _shards(values: Values, named: Mapping[str, str], plan: dict[str, Any], flags: dict[str, str]) -> None:
    """The stage of ZeRO: one shard is DDP, and with pipeline stages weights stay after a forward unless told."""
    key = named.get("fsdp_reshard_after_forward")
    word = values.word(key, RESHARD) if key is not None else None
    if plan.get("dp_shard") == 1 and plan.get("cp", 1) == 1:
        plan["zero"] = 0
    else:
        kept = word == "never" or (word in (None, "default") and plan.get("pp", 1) > 1)
        plan["zero"] = 2 if kept else 3
    if key is not None:
        flags[key] = f"--zero {plan['zero']}"


def _recompute(values: Values, named: Mapping[str, str], plan: dict[str, Any], flags: dict[str, str]) -> None:
    key = "activation_checkpoint.mode"
    mode = values.word(key, ("none", "selective", "full", "memory_budget"))
    if mode is None:
        return
    if mode == "memory_budget":
        raise BadInput(f"{values.where}: {key} is memory_budget, which no account counts; give --recompute instead")
    option_key = named.get("selective_ac_option", "")
    option = str(values.flat.get(option_key, "2"))
    layers = option.isdigit() and mode == "selective"
    plan["recompute"] = f"every-{option}" if layers else mode
    flags[key] = f"--recompute {plan['recompute']}"
    if option_key and mode == "selective":
        flags[option_key] = f"--recompute {plan['recompute']}"


def _precision(values: Values, named: Mapping[str, str], plan: dict[str, Any], flags: dict[str, str]) -> None:
    """bf16 around fp32 weights unless told, and the recipe of the converter that is asked for."""
    plan["precision"] = "bf16"
    for key, word, recipe in (
        (named.get("mixed_precision_param"), "float32", "fp32"),
        ("training.dtype", "bfloat16", "bf16-pure"),
    ):
        if key is not None and values.word(key, ("bfloat16", "float32")) == word:
            plan["precision"] = recipe
            flags[key] = f"--precision {recipe}"
    key = named.get("converters")
    asked = values.flat.get(key, ()) if key is not None else ()
    if key is not None and not isinstance(asked, str | list):
        raise values.wrong(key, "names in quotes, in brackets")
    converters = (asked,) if isinstance(asked, str) else tuple(asked)
    if any("mx" in str(one) for one in converters):
        plan["precision"] = "mxfp8"
    elif any("float8" in str(one) for one in converters):
        recipe = next((values.flat[name] for name in RECIPES if values.has(name)), "tensorwise")
        plan["precision"] = "fp8-rowwise" if "rowwise" in str(recipe) else "fp8-tensorwise"
    elif values.switch(FLOAT8):
        plan["precision"] = "fp8-tensorwise"
        flags[FLOAT8] = "--precision fp8-tensorwise"
    if key is not None and converters:
        flags[key] = f"--precision {plan['precision']}"


def _others(values: Values, named: Mapping[str, str], plan: dict[str, Any], flags: dict[str, str]) -> None:
    """Switches and words."""
    for key in ("compile.enable", "training.compile"):
        state = values.switch(key)
        if state is not None:
            plan["compile"] = "on" if state else "off"
            flags[key] = f"--compile {plan['compile']}"
    key = named.get("enable_cpu_offload")
    if key is not None and values.switch(key):
        plan["offload"] = ("parameters",)
        flags[key] = "--offload parameters"
    key = named.get("pipeline_parallel_schedule")
    if key is not None and plan.get("pp", 1) > 1:
        word = (values.word(key) or "").lower()
        if word not in SCHEDULES:
            raise values.wrong(key, " or ".join(SCHEDULES))
        plan["schedule"] = SCHEDULES[word]
        flags[key] = f"--schedule {plan['schedule']}"
    if values.has("optimizer.name"):
        word = values.word("optimizer.name") or ""
        plan["optimizer"] = OPTIMIZERS.get(word.lower(), word)
        flags["optimizer.name"] = f"--optimizer {plan['optimizer']}"


def _model(values: Values, given: Mapping[str, Any], plan: dict[str, Any], flags: dict[str, str]) -> None:
    """The preset of the same shapes, unless --model names the model."""
    if given.get("model") is not None or not values.has("model.name"):
        return
    name, flavor = str(values.flat["model.name"]), str(values.flat.get("model.flavor", ""))
    preset = MODELS.get((name, flavor))
    if preset is None:
        raise BadInput(f"{values.where}: no preset has the shapes of model {name} {flavor}; give --model")
    plan["model"] = preset
    flags["model.name"] = f"--model {preset}"
    if values.has("model.flavor"):
        flags["model.flavor"] = f"--model {preset}"


def _release(values: Values, plan: dict[str, Any], flags: dict[str, str]) -> None:
    """The newest release that was read and has these keys. [torchtitan: 8570415c3, 08b8b244f, 9810191bb]"""
    key = next((one for one in RENAMED if values.has(one)), "")
    plan["framework_version"] = RENAMED.get(key, LAST)
    if key:
        flags[key] = f"{flags.get(key, '')} --framework-version {RENAMED[key]}".lstrip()


def _unused(values: Values, flags: Mapping[str, str]) -> Iterator[Unused]:
    for key in values.flat:
        if key not in flags:
            yield Unused(key=key, value=values.shown(key), why=_why(key))


def _why(key: str) -> str:
    name = key.rpartition(".")[2]
    if name in DEGREES or name in BATCH:
        return "is what the other sizes leave"
    if name in LAYOUT:
        return "is not read: give --vpp and --pp-layout"
    if name == "context_parallel_rotate_method":
        return "is not read: the account takes the engine's own"
    return IDLE
