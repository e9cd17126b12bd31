"""Accelerate's YAML, which `accelerate launch` reads: ranks, precision, and DeepSpeed or FSDP with its settings.

[accelerate: commands/config/config_args.py, utils/dataclasses.py at 16cb6eb8]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trainledger.adapters.command_line import one_of
from trainledger.adapters.deepspeed import read_deepspeed
from trainledger.adapters.settings import Conflict, Settings, Unused, Used, Values, flattened, nearest
from trainledger.checklist.check import Evidence
from trainledger.errors import BadInput
from trainledger.facts.model import Model
from trainledger.units import format_bytes

KIND = "accelerate YAML"
SIGNS = ("distributed_type", "compute_environment")
"""Keys at the top by which such a file is known."""

TYPES = ("no", "multi_gpu", "multi_cpu", "deepspeed", "fsdp", "megatron_lm", "tpu", "xla", "multi_xpu", "multi_npu")
COUNTED = ("no", "multi_gpu", "deepspeed", "fsdp")
STRATEGIES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}
"""FSDP_SHARDING_STRATEGY, whose numbers begin at 1 -> zero_stage."""
PRECISIONS = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
LAUNCH = "is of the launcher"
IDLE: dict[str, str] = {
    **dict.fromkeys(
        (
            "compute_environment", "debug", "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend",
            "main_training_function", "same_network", "gpu_ids", "use_cpu", "tpu_env", "tpu_use_cluster",
            "tpu_use_sudo", "tpu_name", "tpu_zone", "commands", "command_file", "enable_cpu_affinity",
            "deepspeed_config.deepspeed_multinode_launcher", "deepspeed_config.deepspeed_hostfile",
        ),
        LAUNCH,
    ),
    "downcast_bf16": "is of TPUs",
    "dynamo_backend": "--compile says it, where the engine's account has it",
    "deepspeed_config.gradient_clipping": "changes numbers, not what is held",
    "deepspeed_config.zero3_save_16bit_model": "is of checkpoints",
    "deepspeed_config.deepspeed_moe_layer_cls_names": "leaf modules are counted as the model's blocks",
    **dict.fromkeys(
        (
            "parallelism_config.parallelism_config_cp_comm_strategy",
            "parallelism_config.parallelism_config_cp_backend",
            "parallelism_config.parallelism_config_sp_backend",
            "parallelism_config.parallelism_config_sp_seq_length",
            "parallelism_config.parallelism_config_sp_seq_length_is_variable",
            "parallelism_config.parallelism_config_sp_attn_implementation",
        ),
        "the account takes the engine's own",
    ),
    "fsdp_config.fsdp_backward_prefetch": "the account takes BACKWARD_PRE",
    "fsdp_config.fsdp_backward_prefetch_policy": "the account takes BACKWARD_PRE",
    "fsdp_config.fsdp_forward_prefetch": "the account takes false",
    "fsdp_config.fsdp_cpu_ram_efficient_loading": "is of loading, which the account takes from the engine",
    "fsdp_config.fsdp_sync_module_states": "is of loading",
    "fsdp_config.fsdp_use_orig_params": "the account takes true",
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": "the account wraps each block",
    "fsdp_config.fsdp_state_dict_type": "is of checkpoints",
    "fsdp_config.fsdp_min_num_params": "the account wraps each block",
}  # fmt: skip
READ = (
    "distributed_type", "mixed_precision", "num_processes", "num_machines", "deepspeed_config.zero_stage",
    "deepspeed_config.offload_optimizer_device", "deepspeed_config.offload_param_device",
    "deepspeed_config.gradient_accumulation_steps", "deepspeed_config.zero3_init_flag",
    "deepspeed_config.deepspeed_config_file", "deepspeed_config.offload_optimizer_nvme_path",
    "deepspeed_config.offload_param_nvme_path", "fsdp_config.fsdp_version", "fsdp_config.fsdp_sharding_strategy",
    "fsdp_config.fsdp_reshard_after_forward", "fsdp_config.fsdp_offload_params",
    "fsdp_config.fsdp_activation_checkpointing", "fsdp_config.fsdp_auto_wrap_policy",
)  # fmt: skip
DS, FSDP = "deepspeed_config.", "fsdp_config."

DEGREES = {
    "tp_size": "tp",
    "cp_size": "cp",
    "sp_size": "cp",
    "dp_replicate_size": "dp_replicate",
    "dp_shard_size": "dp_shard",
}
"""Sizes of parallelism_config -> a field of a plan."""
MESH = "parallelism_config.parallelism_config_"
PREFIXES = {"use_deepspeed": "deepspeed_config", "use_fsdp": "fsdp_config"}
"""Switches of `accelerate launch` -> the table that its other flags make."""
MAPPINGS = ("deepspeed_config", "fsdp_config", "parallelism_config")
"""Tables that are read."""
TABLES = ("dynamo_config", "fp8_config", "ipex_config", "mpirun_config", "megatron_lm_config")
"""Tables that are not read: of the launcher, or of what is refused by its switch."""

Loaded = Callable[[str], Mapping[str, Any]]
"""Reads the JSON that a file names, from beside it."""


def is_accelerate(config: Mapping[str, Any]) -> bool:
    """Whether a mapping is accelerate's settings."""
    return any(sign in config for sign in SIGNS)


def launched(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that `accelerate launch` is told by flags in place of a file.

    >>> launched({"use_fsdp": True, "fsdp_offload_params": "true", "mixed_precision": "bf16", "bf16": True})
    {'mixed_precision': 'bf16', 'distributed_type': 'FSDP', 'fsdp_config': {'fsdp_offload_params': True}}
    """
    said = {name: plain(flags[name]) for name in ("mixed_precision",) if name in flags}
    for switch, table in PREFIXES.items():
        if switch in flags:
            keys = {key.removeprefix(f"{table}.") for key in (*READ, *IDLE) if key.startswith(f"{table}.")}
            said["distributed_type"] = switch.removeprefix("use_").upper()
            said[table] = {name: plain(value) for name, value in flags.items() if name in keys}
    mesh = {name: plain(value) for name, value in flags.items() if name.startswith("parallelism_config_")}
    return said | ({"parallelism_config": mesh} if mesh else {})


def plain(value: object) -> object:
    """A word of a command as YAML would have it."""
    words: dict[str, object] = {"true": True, "false": False}
    text = str(one_of(value))
    return int(text) if text.isdigit() else words.get(text.lower(), text)


def read_accelerate(
    where: str, config: Mapping[str, Any], given: Mapping[str, Any], model: Model, loaded: Loaded
) -> Settings:
    """The plan of a file."""
    values = spelled(where, config)
    for table in MAPPINGS:
        if values.flat.get(table) not in (None, {}, ""):
            raise values.wrong(table, "its keys on lines below it, indented")
    # a plain NO is false to YAML
    off = values.flat.get("distributed_type") is False
    kind = "no" if off else values.word("distributed_type", TYPES) or "no"
    if kind not in COUNTED:
        raise BadInput(
            f"{where}: distributed_type is {values.shown('distributed_type')}, which is not read from this file; give "
            "the plan as flags, or one of MULTI_GPU, DEEPSPEED, FSDP"
        )
    plan: dict[str, Any] = {
        "gpus": values.whole("num_processes", least=1),
        "precision": _precision(values, kind, given),
    }
    plan |= _mesh(values)
    if kind == "deepspeed":
        return _of_deepspeed(values, plan, given, model, loaded)
    alone = (plan["gpus"] or given.get("gpus")) == 1
    if kind == "fsdp" and not alone:
        plan |= fsdp_of(values)
    else:
        # FSDP of one rank is NO_SHARD, whatever it is told [torch: fsdp/_init_utils.py]
        plan |= {"engine": "pytorch", "zero": 0}
    return _settings(values, plan, tuple(wrapping(values, plan, model)) if kind == "fsdp" else ())


def spelled(where: str, config: Mapping[str, Any]) -> Values:
    """Keys of fsdp_config by their newer name, which begins with fsdp_."""
    out: dict[str, Any] = {}
    for key, value in flattened(config).items():
        longer = key.replace(FSDP, f"{FSDP}fsdp_", 1)
        out[longer if key not in READ and longer in (*READ, *IDLE) else key] = value
    return Values(where, out)


def _precision(values: Values, kind: str, given: Mapping[str, Any]) -> str | None:
    value = values.flat.get("mixed_precision")
    if value is None:
        return None
    word = "no" if value is False else values.word("mixed_precision", (*PRECISIONS, "fp8"))
    if word == "fp8":
        recipe = str(given.get("precision"))
        if recipe.startswith(("fp8", "mxfp8")):
            return recipe
        raise BadInput(
            f"{values.where}: mixed_precision is fp8, which says no recipe; give --precision fp8-rowwise or "
            "fp8-tensorwise"
        )
    # under DeepSpeed "no" leaves the dtype to DeepSpeed's own settings
    return None if word == "no" and kind == "deepspeed" else PRECISIONS[word or "no"]


def _of_deepspeed(
    values: Values, plan: dict[str, Any], given: Mapping[str, Any], model: Model, loaded: Loaded
) -> Settings:
    """The same as DeepSpeed's own file, which accelerate makes of these keys or is given."""
    said = {**{name: value for name, value in plan.items() if value is not None}, **_without_none(given)}
    file = values.word(f"{DS}deepspeed_config_file")
    inner = loaded(file) if file is not None else _made(values, plan)
    where = file if file is not None else values.where
    made = read_deepspeed(where, inner, said, model)
    own = _settings(values, plan | ({} if file is not None else made.plan), tuple(_of_init(values, made.plan)))
    if file is None:
        return _merged(own, made, used=(), unused=())
    return _merged(own, made, used=made.used, unused=made.unused)


def _made(values: Values, plan: Mapping[str, Any]) -> dict[str, Any]:
    """What accelerate writes for DeepSpeed. [accelerate: utils/dataclasses.py, DeepSpeedPlugin]"""
    zero: dict[str, Any] = {"stage": 2 if values.whole(f"{DS}zero_stage") is None else values.whole(f"{DS}zero_stage")}
    for table in ("offload_optimizer", "offload_param"):
        zero[table] = {"device": values.word(f"{DS}{table}_device") or "none"}
    made: dict[str, Any] = {"zero_optimization": zero}
    precision = plan.get("precision")
    if precision in ("bf16", "fp16"):
        made[precision] = {"enabled": True}
    steps = values.whole(f"{DS}gradient_accumulation_steps", least=1)
    return made if steps is None else {**made, "gradient_accumulation_steps": steps}


def _of_init(values: Values, plan: Mapping[str, Any]) -> Iterator[Conflict]:
    if plan.get("zero") == 3 and values.switch(f"{DS}zero3_init_flag") is False:
        yield Conflict(
            id="model-not-built-under-zero-init",
            severity="warn",
            message="zero3_init_flag is false at zero_stage 3: each rank builds the whole model before it is divided",
            knob="zero3_init_flag: true",
            source="accelerate utils/dataclasses.py at 16cb6eb8, DeepSpeedPlugin",
        )


def _mesh(values: Values) -> dict[str, Any]:
    """Degrees of the ranks. [accelerate: parallelism_config.py]"""
    sizes = {name: values.whole(f"{MESH}{name}", least=1) or 1 for name in DEGREES}
    plan: dict[str, Any] = {DEGREES[name]: size for name, size in sizes.items() if size > 1}
    if sizes["sp_size"] > 1:
        plan["cp_comm"] = "all_to_all"
    return plan


def fsdp_of(values: Values) -> dict[str, Any]:
    """The plan of fsdp_config, with which a trainer's own may be read as well."""
    version = values.whole(f"{FSDP}fsdp_version", least=1) or 1
    strategy = _strategy(values)
    plan: dict[str, Any] = {"engine": "pytorch" if version >= 2 else "fsdp1", "zero": STRATEGIES[strategy]}
    if version >= 2:
        reshard = values.switch(f"{FSDP}fsdp_reshard_after_forward")
        plan["zero"] = 2 if reshard is False else 3
    elif strategy == "NO_SHARD":
        plan["engine"] = "pytorch"
    machines = values.whole("num_machines", least=1) or 1
    if strategy.startswith("HYBRID") and version == 1:
        plan["dp_replicate"] = machines
    if values.switch(f"{FSDP}fsdp_offload_params"):
        plan["offload"] = ("parameters",)
    if values.switch(f"{FSDP}fsdp_activation_checkpointing"):
        plan["recompute"] = "full"
    return plan


def _strategy(values: Values) -> str:
    """The strategy by its name; it is written as a name or as its number."""
    key = f"{FSDP}fsdp_sharding_strategy"
    value = values.flat.get(key)
    if value is None and isinstance(values.flat.get(f"{FSDP}fsdp_reshard_after_forward"), str):
        value = values.flat[f"{FSDP}fsdp_reshard_after_forward"]
    names = tuple(STRATEGIES)
    if value is None:
        return names[0]
    text = str(value).upper()
    if text.isdigit() and 1 <= int(text) <= len(names):
        return names[int(text) - 1]
    if text not in names:
        raise values.wrong(key, " or ".join(names))
    return text


def wrapping(values: Values, plan: Mapping[str, Any], model: Model) -> Iterator[Conflict]:
    """Units other than a block: with none the model is one unit, which each rank gathers whole."""
    policy = values.word(f"{FSDP}fsdp_auto_wrap_policy")
    if policy is None or policy.upper() == "TRANSFORMER_BASED_WRAP" or plan["zero"] == 0:
        return
    whole = model.total_params * (4 if plan.get("precision") == "fp32" else 2)
    one = policy.upper() == "NO_WRAP"
    much = f"one unit: each rank gathers all of it at once, {format_bytes(whole)}" if one else "cut into other units"
    yield Conflict(
        id="fsdp-wrap",
        severity="warn",
        message=f"fsdp_auto_wrap_policy is {policy}: the model is {much}, and the account gathers a block at a time",
        knob="fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
        evidence=(Evidence(line="the whole model, gathered", amount=whole, unit="B"),),
        source="PyTorch fsdp/fully_sharded_data_parallel.py at 2.13.0, auto_wrap_policy",
    )


def _settings(values: Values, plan: Mapping[str, Any], conflicts: tuple[Conflict, ...]) -> Settings:
    return Settings(
        path=values.where,
        kind=KIND,
        plan={name: value for name, value in plan.items() if value is not None},
        told={},
        used=tuple(_used(values, plan)),
        unused=tuple(_unused(values)),
        conflicts=conflicts,
    )


def _merged(own: Settings, made: Settings, *, used: tuple[Used, ...], unused: tuple[Unused, ...]) -> Settings:
    """Accelerate's file and what DeepSpeed reads."""
    return Settings(
        path=own.path,
        kind=own.kind,
        plan={**own.plan, **made.plan},
        told=made.told,
        used=(*own.used, *used),
        unused=(*own.unused, *unused),
        conflicts=(*own.conflicts, *made.conflicts),
    )


def _used(values: Values, plan: Mapping[str, Any]) -> Iterator[Used]:
    offload = ",".join(plan.get("offload") or ()) or "none"
    engine, zero = f"--engine {plan.get('engine', 'deepspeed')}", f"--zero {plan.get('zero')}"
    flags = {
        "distributed_type": engine,
        "mixed_precision": f"--precision {plan.get('precision')}",
        "num_processes": f"--gpus {plan.get('gpus')}",
        f"{DS}zero_stage": zero,
        f"{DS}offload_optimizer_device": f"--offload {offload}",
        f"{DS}offload_param_device": f"--offload {offload}",
        f"{DS}gradient_accumulation_steps": f"--gbs {plan['gbs']}" if "gbs" in plan else "one micro-batch a rank",
        f"{DS}zero3_init_flag": "the rule model-not-built-under-zero-init",
        f"{DS}deepspeed_config_file": "its keys below",
        f"{FSDP}fsdp_version": engine,
        f"{FSDP}fsdp_sharding_strategy": zero,
        f"{FSDP}fsdp_reshard_after_forward": zero,
        f"{FSDP}fsdp_offload_params": f"--offload {offload}",
        f"{FSDP}fsdp_activation_checkpointing": "--recompute full",
        f"{FSDP}fsdp_auto_wrap_policy": "the rule fsdp-wrap",
        **{f"{MESH}{name}": f"--{field.replace('_', '-')} {plan.get(field, 1)}" for name, field in DEGREES.items()},
    }
    for key in values.flat:
        if key in flags and values.has(key) and not _silent(values, key, plan):
            yield Used(key=key, value=values.shown(key), flag=flags[key])


def _silent(values: Values, key: str, plan: Mapping[str, Any]) -> bool:
    """Whether a key that is read decides nothing here."""
    if key == f"{FSDP}fsdp_activation_checkpointing":
        return values.switch(key) is not True
    return key == "mixed_precision" and plan.get("precision") is None


def _unused(values: Values) -> Iterator[Unused]:
    for key in values.flat:
        if key in READ:
            if key == f"{FSDP}fsdp_activation_checkpointing" and values.switch(key) is not True:
                yield Unused(key=key, value=values.shown(key), why="is off: the trainer's own says it, as --recompute")
            elif key == "num_machines":
                yield Unused(key=key, value=values.shown(key), why="--cluster says how many ranks a node has")
            continue
        if key.removeprefix(MESH) in DEGREES and values.has(key):
            continue
        why = "is not read from this file" if key.partition(".")[0] in TABLES else IDLE.get(key)
        if why is None and values.flat[key] in ({}, None, ""):
            why = "is empty"
        if why is None:
            why = f"is no key that accelerate is known to have{nearest(key, (*READ, *IDLE))}"
        yield Unused(key=key, value=values.shown(key), why=why)


def _without_none(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}
