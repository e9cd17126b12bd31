"""DeepSpeed's JSON: which plan it makes, what a trainer is to fill in, and what DeepSpeed itself would refuse.

[deepspeed: runtime/config.py, runtime/zero/config.py; transformers: integrations/deepspeed.py, trainer_config_process]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from trainledger.adapters.deepspeed_batch import Batch, batch_of
from trainledger.adapters.deepspeed_keys import (
    IDLE,
    IDLE_TABLES,
    KNOWN,
    MEASURED,
    OFFLOAD,
    READ,
    TABLES,
    UNCOUNTED,
    UNCOUNTED_TABLES,
)
from trainledger.adapters.settings import Conflict, Settings, Unused, Used, Values, flattened, nearest
from trainledger.checklist.check import Evidence
from trainledger.errors import BadInput
from trainledger.facts.model import Model
from trainledger.units import format_bytes

KIND = "DeepSpeed JSON"
SIGNS = ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""Keys at the top by which such a file is known."""

ZERO = "zero_optimization."
OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd", "adam8bit": "adamw-8bit", "adamw8bit": "adamw-8bit"}
"""optimizer.type -> --optimizer."""
DTYPES = ("fp32", "fp16", "bf16")
STAGES = 3
STRICT = ("zero_optimization", "bf16", "fp16", "optimizer", f"{ZERO}offload_optimizer", f"{ZERO}offload_param")
"""Keys that are tables."""
SMALL_BUCKET = 50_000_000
"""A bucket of a tenth of DeepSpeed's own: its collectives are many, and each costs its latency."""
CONFIG = "DeepSpeed runtime/config.py at edaa722"
ZERO_CONFIG = "DeepSpeed runtime/zero/config.py at edaa722"


def is_deepspeed(config: Mapping[str, Any]) -> bool:
    """Whether an object of JSON is DeepSpeed's settings.

    >>> is_deepspeed({"train_batch_size": 8}), is_deepspeed({"model_type": "llama"})
    (True, False)
    """
    return any(sign in config for sign in SIGNS)


def read_deepspeed(where: str, config: Mapping[str, Any], given: Mapping[str, Any], model: Model) -> Settings:
    """The plan of a file; `given` are fields of a plan that flags say, from which "auto" is filled."""
    values = Values(where, _spelled(flattened(config)))
    _refuse_uncounted(values)
    plan: dict[str, Any] = {"engine": "deepspeed", "zero": _stage(values), "offload": _offload(values)}
    plan["precision"], precision_conflicts = _precision(values, given)
    plan |= _rest(values, model)
    batch = batch_of(values, given, plan)
    plan |= batch.plan
    _refuse_unfilled(where, batch.lacking, values, given)
    conflicts = (*precision_conflicts, *batch.conflicts, *_conflicts(values, plan, model), *_unknown(values))
    return Settings(
        path=where,
        kind=KIND,
        plan={name: value for name, value in plan.items() if value is not None},
        told=_told(values, plan),
        used=tuple(_used(values, plan, batch)),
        unused=tuple(_unused(values, plan, model)),
        conflicts=conflicts,
    )


def _spelled(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Each key by one name: with stage3_ or without it, and bf16 by its older name. [populate_by_name]"""
    out: dict[str, Any] = {}
    for key, value in flat.items():
        name = key.replace("bfloat16.", "bf16.", 1) if key.startswith("bfloat16.") else key
        longer = name.replace(ZERO, f"{ZERO}stage3_", 1)
        out[longer if name not in KNOWN and longer in KNOWN else name] = value
    return out


def _refuse_uncounted(values: Values) -> None:
    """Refuse what changes what is held, and is counted by no account here."""
    for table in STRICT:
        value = values.flat.get(table)
        if value not in (None, {}) and not (table == "zero_optimization" and isinstance(value, bool)):
            raise values.wrong(table, "keys in braces")
    for table, what in UNCOUNTED_TABLES.items():
        if any(key == table or key.startswith(f"{table}.") for key in values.flat if values.has(key)):
            raise BadInput(f"{values.where}: {table} is {what}, which no account counts; leave it out to see the rest")
    for key, what in UNCOUNTED.items():
        if values.switch(key):
            raise BadInput(
                f"{values.where}: {key} is true, and no account here counts {what}; set it to false to see the rest"
            )
    ratio = values.number(f"{ZERO}offload_optimizer.ratio")
    if ratio is not None and ratio < 1 and values.flat.get(f"{ZERO}offload_optimizer.device") == "cpu":
        raise BadInput(
            f"{values.where}: {ZERO}offload_optimizer.ratio is {ratio:g}, and an optimizer is counted on the host as a "
            "whole; set it to 1, or give --offload none for the upper bound"
        )
    shards = values.whole(f"{ZERO}mics_shard_size", least=-1)
    if shards is not None and shards > 0:
        raise BadInput(
            f"{values.where}: {ZERO}mics_shard_size is {shards}, and MiCS is not counted; leave it out, and give "
            f"--dp-shard {shards} with --engine pytorch for what shards of that size hold"
        )


def _stage(values: Values) -> int:
    if isinstance(values.flat.get("zero_optimization"), bool):
        return int(values.flat["zero_optimization"])
    stage = values.whole(f"{ZERO}stage") or 0
    if stage > STAGES:
        raise values.wrong(f"{ZERO}stage", "0, 1, 2 or 3")
    return stage


def _offload(values: Values) -> tuple[str, ...]:
    """What goes to the host; a disk is refused, for nothing here counts what lies in front of it."""
    found: list[str] = []
    older = {"optimizer": "cpu_offload", "parameters": "cpu_offload_param"}
    for what, table in (("optimizer", "offload_optimizer"), ("parameters", "offload_param")):
        key = f"{ZERO}{table}.device"
        device = values.word(key, ("none", "cpu", "nvme"))
        if device == "nvme":
            raise BadInput(_of_disks(values, table))
        if device == "cpu" or (device is None and values.switch(f"{ZERO}{older[what]}")):
            found.append(what)
    return tuple(found)


def _of_disks(values: Values, table: str) -> str:
    count = values.whole(f"{ZERO}{table}.buffer_count")
    size = values.whole(f"{ZERO}{table}.buffer_size")
    # [deepspeed: swap_tensor/partitioned_param_swapper.py: buffers of 16 bits, pinned]
    pinned = f"; its {count} buffers alone are {format_bytes(count * size * 2)} of pinned host memory" if (
        count and size and table == "offload_param"
    ) else ""  # fmt: skip
    return (
        f"[nvme-buffers] {values.where}: {ZERO}{table}.device is nvme, and what a disk keeps is not counted{pinned}; "
        "write cpu to see what the card holds, which is the same"
    )


def _precision(values: Values, given: Mapping[str, Any]) -> tuple[str | None, tuple[Conflict, ...]]:
    """The recipe, as DeepSpeed takes it: both switches off is fp32. None where it is left to the trainer."""
    on = {name: values.switch(f"{name}.enabled") for name in ("bf16", "fp16")}
    if on["bf16"] and on["fp16"]:
        evidence = tuple(Evidence(line=f"{name}.enabled", amount=1, unit="") for name in on)
        return "bf16", (
            Conflict(
                id="ds-fp16-bf16-both",
                severity="refuse",
                message="bf16.enabled and fp16.enabled are both true, and DeepSpeed takes one",
                knob="set one of them to false",
                evidence=evidence,
                source=f"{CONFIG}, get_bfloat16_config",
            ),
        )
    chosen = next((name for name, state in on.items() if state), None)
    if chosen is not None:
        return chosen, ()
    left = any(values.auto(f"{name}.enabled") for name in on)
    said = any(values.has(f"{name}.enabled") for name in on)
    if left or (given.get("precision") is not None and not said):
        return given.get("precision"), ()
    return "fp32", ()


def _rest(values: Values, model: Model) -> dict[str, Any]:
    """What no other field decides: buckets, dtypes, the optimizer and degrees."""
    kind = values.word("optimizer.type")
    name = None if kind is None else OPTIMIZERS.get(kind.lower(), kind)
    if name == "sgd" and (values.number("optimizer.params.momentum") or 0) > 0:
        name = "sgd-momentum"
    bucket = values.whole(f"{ZERO}reduce_bucket_size", least=1)
    if values.auto(f"{ZERO}reduce_bucket_size"):
        # [transformers: integrations/deepspeed.py, trainer_config_finalize]
        bucket = _hidden(values, model) ** 2
    overlap = values.switch(f"{ZERO}overlap_comm")
    sequence = values.whole("sequence_parallel_size", least=1)
    return {
        "optimizer": name,
        "reduce_bucket": bucket,
        "overlap_comm": None if overlap is None else "on" if overlap else "off",
        "grad_dtype": values.word("data_types.grad_accum_dtype", DTYPES),
        "tp": values.whole("tensor_parallel.autotp_size") or None,
        "cp": sequence if sequence and sequence > 1 else None,
        "cp_comm": "all_to_all" if sequence and sequence > 1 else None,
        "pp": values.whole("pipeline.stages") or None,
    }


def _hidden(values: Values, model: Model) -> int:
    if model.params_only:
        raise BadInput(
            f'{values.where}: {ZERO}reduce_bucket_size is "auto", which is the hidden size squared, and a parameter '
            "count has none; name a model with shapes, or write a number"
        )
    return model.hidden_size


def _refuse_unfilled(where: str, lacking: tuple[str, ...], values: Values, given: Mapping[str, Any]) -> None:
    """Refuse "auto" that no flag fills: who trains has said it elsewhere."""
    left = list(lacking)
    if given.get("precision") is None and not any(values.switch(f"{name}.enabled") for name in ("bf16", "fp16")):
        auto = [name for name in ("bf16.enabled", "fp16.enabled") if values.auto(name)]
        left += [f"{' and '.join(auto)}: --precision bf16, fp16 or fp32"] if auto else []
    if left:
        raise BadInput(
            f'{where}: "auto" is what the trainer is told beside this file; give it as flags: {"; ".join(left)}'
        )


def _told(values: Values, plan: Mapping[str, Any]) -> dict[str, float | bool]:
    """What rules of numbers ask."""
    told: dict[str, float | bool] = {}
    rate = values.number("optimizer.params.lr")
    if rate is not None:
        told["learning_rate"] = rate
    if plan["precision"] == "fp16":
        told["loss_scaling"] = True
        fixed, power = values.number("fp16.loss_scale"), values.number("fp16.initial_scale_power")
        if fixed:
            told["initial_scale"] = fixed
        elif power is not None and power < math.log2(float(1 << 62)):
            told["initial_scale"] = 2.0**power
    return told


def _conflicts(values: Values, plan: Mapping[str, Any], model: Model) -> Iterator[Conflict]:
    """What DeepSpeed asserts of the file itself, and what is known to go wrong."""
    if values.word("gradient_allreduce_op") == "sum" and plan["zero"] == 3:
        yield Conflict(
            id="ds-gradient-allreduce-sum",
            severity="refuse",
            message='gradient_allreduce_op is "sum" at zero_optimization.stage 3, which DeepSpeed refuses',
            knob='write "mean", or a lower stage',
            source=f"{CONFIG}, _do_error_check",
        )
    if plan["offload"] == ("parameters",):
        return
    quantised = values.switch(f"{ZERO}zero_quantized_weights") or values.switch(f"{ZERO}zero_quantized_gradients")
    secondary = values.whole(f"{ZERO}zero_hpz_partition_size") or 1
    if plan["offload"] and (quantised or secondary > 1):
        yield Conflict(
            id="zeropp-with-offload",
            severity="warn",
            message="ZeRO++ keys beside offload: reports have losses that do not fall with both",
            knob="leave out zero_hpz_partition_size and zero_quantized_*, or the offload",
            evidence=(Evidence(line="zero_hpz_partition_size", amount=secondary, unit=""),),
            source="DeepSpeed runtime/zero/partition_parameters.py at edaa722",
        )
    gathered = values.whole(f"{ZERO}allgather_bucket_size")
    if plan["zero"] in (1, 2) and gathered is not None and gathered < min(SMALL_BUCKET, model.total_params):
        yield Conflict(
            id="ds-allgather-bucket-small",
            severity="advise",
            message=(
                f"allgather_bucket_size is {gathered:,}: weights of {model.total_params:,} parameters are gathered in "
                f"{math.ceil(model.total_params / max(gathered, 1)):,} pieces after each step"
            ),
            knob="5e8, DeepSpeed's own, where memory allows",
            evidence=(Evidence(line="allgather_bucket_size", amount=gathered, unit="elements"),),
            source=f"{ZERO_CONFIG}: 5e8 unless told",
        )


def _unknown(values: Values) -> Iterator[Conflict]:
    """Keys that DeepSpeed's own models of its tables forbid. [config_utils.py: extra = "forbid"]"""
    for key in values.flat:
        table, _, name = key.rpartition(".")
        strict = table in ("bf16", "fp16") or f"{table}.".startswith(ZERO)
        if not strict or key in KNOWN or table in IDLE_TABLES or _under(key) is not None:
            continue
        known = [other.rpartition(".")[2] for other in KNOWN if other.rpartition(".")[0] == table]
        yield Conflict(
            id="ds-unknown-key",
            severity="refuse",
            message=f"{key} is no key of DeepSpeed's {table or 'settings'}, which refuses others{nearest(name, known)}",
            knob="correct its spelling, or leave it out",
            source="DeepSpeed runtime/config_utils.py at edaa722, DeepSpeedConfigModel",
        )


def _under(key: str) -> str | None:
    """Why a key of a table that is not read is not."""
    return next((why for table, why in IDLE_TABLES.items() if key == table or key.startswith(f"{table}.")), None)


def _used(values: Values, plan: Mapping[str, Any], batch: Batch) -> Iterator[Used]:
    """Each key that decided something, and what one would have typed."""
    flags = {
        "zero_optimization": f"--zero {plan['zero']}",
        f"{ZERO}stage": f"--zero {plan['zero']}",
        f"{ZERO}reduce_bucket_size": f"--reduce-bucket {plan.get('reduce_bucket')}",
        f"{ZERO}overlap_comm": f"--overlap-comm {plan.get('overlap_comm')}",
        "bf16.enabled": f"--precision {plan['precision']}",
        "fp16.enabled": f"--precision {plan['precision']}",
        "fp16.loss_scale": "--initial-scale" if values.number("fp16.loss_scale") else "--loss-scaling on",
        "fp16.initial_scale_power": "--initial-scale",
        "optimizer.type": f"--optimizer {plan['optimizer']}",
        "optimizer.params.lr": "--learning-rate",
        "data_types.grad_accum_dtype": f"--grad-dtype {plan['grad_dtype']}",
        "tensor_parallel.autotp_size": f"--tp {plan['tp']}",
        "sequence_parallel_size": f"--cp {plan['cp']} --cp-comm all_to_all",
        "pipeline.stages": f"--pp {plan['pp']}",
        **batch.flags,
    }
    for table, what in (("offload_optimizer", "optimizer"), ("offload_param", "parameters")):
        flags[f"{ZERO}{table}.device"] = f"--offload {what if what in plan['offload'] else 'none'}"
    flags[f"{ZERO}cpu_offload"] = "--offload optimizer" if "optimizer" in plan["offload"] else "--offload none"
    flags[f"{ZERO}cpu_offload_param"] = "--offload parameters" if "parameters" in plan["offload"] else "--offload none"
    for key in values.flat:
        if key in flags and not _idle_read(values, key, plan):
            yield Used(key=key, value=values.shown(key), flag=flags[key])


def _idle_read(values: Values, key: str, plan: Mapping[str, Any]) -> bool:
    """Whether a key that is read decides nothing in this file: a scale without fp16, a rate that is auto."""
    if key.startswith("fp16.") and key != "fp16.enabled":
        fixed = key == "fp16.initial_scale_power" and bool(values.number("fp16.loss_scale"))
        return fixed or plan["precision"] != "fp16"
    left = key == f"{ZERO}overlap_comm" and values.auto(key)
    return left or (key == "optimizer.params.lr" and values.number(key) is None)


def _unused(values: Values, plan: Mapping[str, Any], model: Model) -> Iterator[Unused]:
    """Every other key of the file, and why it changes nothing."""
    for key, value in values.flat.items():
        if key in READ or (key == "zero_optimization" and isinstance(value, bool)):
            if key in ("communication_data_type", "gradient_allreduce_op") or _idle_read(values, key, plan):
                yield Unused(key=key, value=values.shown(key), why=_of_read(key))
            continue
        yield Unused(key=key, value=values.shown(key), why=_why(values, key, value, model))


def _of_read(key: str) -> str:
    if key == "communication_data_type":
        return "what is sent is counted in the dtype that the engine's account has"
    return "decides nothing beside the others" if key != "optimizer.params.lr" else "is the trainer's: --learning-rate"


def _why(values: Values, key: str, value: object, model: Model) -> str:
    if key in IDLE:
        return IDLE[key]
    if key in UNCOUNTED:
        return "is off"
    if key in MEASURED:
        own = MEASURED[key]
        return "is what the account takes" if value == own else f"is not read: the account takes {own:,}"
    if key == f"{ZERO}zero_hpz_partition_size":
        return _of_secondary(values, model)
    if key.rpartition(".")[2] in OFFLOAD and key.startswith(f"{ZERO}offload_"):
        return "is of pinned memory, as the engine rounds it" if key.endswith("pin_memory") else "is of disks"
    under = _under(key)
    if under is not None:
        return under
    table = key.rpartition(".")[0]
    if table in TABLES and table:
        return "is read by nothing here"
    return f"is no key of DeepSpeed, which reads past it{nearest(key, KNOWN)}"


def _of_secondary(values: Values, model: Model) -> str:
    ranks = values.whole(f"{ZERO}zero_hpz_partition_size") or 1
    if ranks <= 1:
        return "is what the account takes"
    return f"keeps the weights a second time over {ranks} ranks: {format_bytes(model.total_params * 2 // ranks)} more"
