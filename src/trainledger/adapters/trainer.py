"""What transformers' Trainer is told, and programs around it: a command, or YAML of LLaMA-Factory, TRL and axolotl.

[transformers: training_args.py; LLaMA-Factory: hparams; axolotl: utils/schemas; trl: trainer/sft_config.py]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainledger.adapters.accelerate import (
    FSDP,
    PREFIXES,
    STRATEGIES,
    Loaded,
    fsdp_of,
    launched,
    plain,
    read_accelerate,
    spelled,
    wrapping,
)
from trainledger.adapters.command_line import FALSE, RANKS, one_of, preset_of, ranks_of, typed
from trainledger.adapters.deepspeed import read_deepspeed
from trainledger.adapters.deepspeed_batch import MICRO
from trainledger.adapters.settings import Conflict, Settings, Unused, Used, Values
from trainledger.adapters.swift import PRESETS, SIGNS, accumulation, is_swift, precision_of
from trainledger.adapters.trainer_keys import (
    ATTENTION,
    BITS,
    COUNTED,
    DEGREES,
    FACTORY,
    KINDS,
    MBS,
    MODEL,
    NOT_COUNTED,
    OPTIMIZERS,
    OWN_MBS,
    RANK,
    REFUSED,
    ROLLOUTS,
    SEQ,
    STAGES,
    TARGETS,
    TRUE,
)
from trainledger.errors import BadInput
from trainledger.facts.model import Model

KIND = "trainer arguments"


def is_trainer(told: Mapping[str, Any]) -> bool:
    """Whether these are arguments of such a trainer."""
    own = is_swift(told) or "per_device_train_batch_size" in told or "model_name_or_path" in told
    return own or ("base_model" in told and ("micro_batch_size" in told or "sequence_len" in told))


def model_of(told: Mapping[str, Any]) -> str | None:
    """The preset that the arguments name."""
    return next((preset for name in MODEL if (preset := preset_of(told.get(name))) is not None), None)


def read_trainer(
    where: str, told: Mapping[str, Any], given: Mapping[str, Any], model: Model, loaded: Loaded
) -> Settings:
    """The plan of the arguments; settings of DeepSpeed that they name are read beside them."""
    asked = _Told(where, told, given)
    _refuse_uncounted(asked)
    file = told.get("config_file")
    launcher = {**(loaded(file) if isinstance(file, str) else {}), **launched(told)}
    name, config = ("", {}) if launcher else _deepspeed(asked, loaded)
    asked.micro, asked.ranks = config.get(MICRO), launcher.get("num_processes")
    for part in (_batch, _precision, _adapters, _rest):
        part(asked)
    if launcher:
        asked.used |= {name: "its keys below" for name in ("config_file", *PREFIXES, "mixed_precision") if name in told}
        explicit = {name: value for name, value in asked.plan.items() if name != "precision" or _explicit(asked)}
        where = file if isinstance(file, str) else where
        made = read_accelerate(where, launcher, {**explicit, **given}, model, loaded)
        return _settings(asked, {**asked.plan, **made.plan, **explicit}, made)
    if name:
        made = read_deepspeed(name, config, {**asked.plan, **given}, model)
        asked.conflicts += _mismatches(asked, made)
        return _settings(asked, {**asked.plan, **made.plan}, made)
    _sharding(asked, model, loaded)
    return _settings(asked, asked.plan, None)


def _refuse_uncounted(asked: _Told) -> None:
    """Refuse what changes what is held and has no flag, and what trains nothing."""
    for name, what in REFUSED.items():
        value = one_of(asked.told.get(name))
        if value is not None and str(value).lower() not in FALSE:
            raise BadInput(
                f"{asked.where}: {name} changes {what}, and no account here counts it; leave it out to see the rest"
            )
    if "do_train" not in asked.told and asked.told.get("do_predict") is not None and asked.on("do_predict"):
        raise BadInput(f"{asked.where}: do_predict without do_train trains nothing; give the settings of the training")


def _deepspeed(asked: _Told, loaded: Loaded) -> tuple[str, Mapping[str, Any]]:
    """(where they stand, DeepSpeed's settings) that the arguments name or hold; "" where there are none."""
    file = asked.told.get("deepspeed")
    key = "deepspeed"
    if isinstance(file, Mapping) and file:
        asked.used[key] = "its keys below"
        return asked.where, file
    if file is True or (file is None and "deepspeed_config" in asked.told):
        key, file = "deepspeed_config", asked.told.get("deepspeed_config")
        asked.used |= {"deepspeed": "its settings below"} if "deepspeed" in asked.told else {}
    if isinstance(file, str) and file.lower() not in FALSE:
        asked.used[key] = "its keys below"
        return file, (PRESETS.get(file) if is_swift(asked.told) else None) or loaded(file)
    if file is not None and not isinstance(file, str | bool | Mapping):
        raise BadInput(f"{asked.where}: deepspeed is {typed(file)}: name its JSON, or write its keys below")
    if file is None and (asked.told.get("deepspeed") or "zero_stage" in asked.told):
        raise BadInput(
            f"{asked.where}: the program makes DeepSpeed's settings itself, of arguments that are not read; give "
            "--engine deepspeed with --zero, --offload and --precision, or its JSON"
        )
    return "", {}


def _explicit(asked: _Told) -> bool:
    """Whether a switch of the trainer says the precision."""
    return any(name in asked.used for name in ("bf16", "fp16", "pure_bf16"))


def _mismatches(asked: _Told, made: Settings) -> Iterator[Conflict]:
    """What the trainer compares and refuses. [transformers: integrations/deepspeed.py, fill_match]"""
    keys = {one.flag.partition(" ")[0]: one for one in made.used}
    for name in ("mbs", "gbs", "precision"):
        mine, other = asked.plan.get(name), made.plan.get(name)
        said = keys.get(f"--{name}")
        if mine is None or other is None or mine == other or said is None:
            continue
        file = f"{said.key} {said.value} of {made.path} is --{name} {other}"
        yield Conflict(
            id="ds-trainer-mismatch",
            severity="refuse",
            message=f"{file}, and the trainer's own arguments are {mine}",
            knob=f'set {said.key} to "auto", or change the argument',
            source="transformers integrations/deepspeed.py at 02348331, HfTrainerDeepSpeedConfig",
        )


class _Told:
    """Arguments as they are taken, and the plan as it grows."""

    def __init__(self, where: str, told: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        self.where = where
        self.told = told
        self.given = given
        self.plan: dict[str, Any] = {}
        self.used: dict[str, str] = {}
        self.conflicts: list[Conflict] = []
        self.micro: object = None
        self.ranks: object = None

    def first(self, names: tuple[str, ...]) -> str | None:
        """The first of these arguments that is there and says something."""
        return next((name for name in names if self.told.get(name) not in (None, "")), None)

    def whole(self, name: str) -> int:
        """A whole number of at least 1."""
        value = one_of(self.told[name])
        if isinstance(value, str) and value.startswith("$"):
            raise BadInput(f"{self.where}: {name} is {value}, and nothing here assigns it one value; write the number")
        if isinstance(value, str) and value.isdigit():
            value = int(value)
        return Values(self.where, {name: value}).whole(name, least=1) or 1

    def on(self, name: str) -> bool:
        """Whether a switch is there and not off; auto is on where the card has it."""
        value = one_of(self.told.get(name))
        if value is None or isinstance(value, bool):
            return bool(value)
        text = str(value).lower()
        if text in FALSE:
            return False
        if text in TRUE:
            return True
        raise BadInput(f"{self.where}: {name} is {value!r}: write true or false")

    def take(self, name: str, field: str, value: object, flag: str = "") -> None:
        """Have a flag from an argument."""
        self.plan[field] = value
        shown = ",".join(value) if isinstance(value, tuple) else value
        self.used[name] = flag or f"--{field.replace('_', '-')} {shown}"


def _batch(asked: _Told) -> None:
    """Sizes; how many ranks there are, which a file leaves to the launcher."""
    gpus = ranks_of(asked.told, asked.where)
    if gpus is not None:
        asked.plan["gpus"] = gpus
        asked.used |= {name: f"--gpus {gpus}" for name in RANKS if name in asked.told}
    for names, field in ((MBS, "mbs"), (SEQ, "seq")):
        name = asked.first(names)
        if name is not None:
            asked.take(name, field, asked.whole(name))
    for name, field in DEGREES.items():
        if asked.told.get(name) is not None and asked.whole(name) > 1:
            asked.take(name, field, asked.whole(name))
    if asked.first(MBS) is None and asked.given.get("mbs") is None:
        own = OWN_MBS if "model_name_or_path" in asked.told and not is_swift(asked.told) else 1
        # a script that is no Trainer has DeepSpeed's own
        asked.plan["mbs"] = asked.micro if isinstance(asked.micro, int) else own
    gpus = gpus or asked.given.get("gpus") or asked.ranks
    if not isinstance(gpus, int):
        return
    mbs = asked.plan.get("mbs") or asked.given["mbs"]
    ranks = max(gpus // (asked.plan.get("tp", 1) * asked.plan.get("cp", 1)), 1)
    steps = "gradient_accumulation_steps"
    if asked.told.get(steps) is not None:
        asked.take(steps, "gbs", mbs * asked.whole(steps) * ranks)
    elif is_swift(asked.told):
        asked.plan["gbs"] = mbs * accumulation(mbs, ranks) * ranks


def _precision(asked: _Told) -> None:
    """fp32 unless a switch says otherwise; a whole model in 16 bits is its own recipe."""
    if is_swift(asked.told) and not asked.on("bf16") and not asked.on("fp16"):
        asked.plan["precision"], name = precision_of(asked.told)
        if name:
            asked.take(name, "precision", asked.plan["precision"])
    elif asked.told.get("pure_bf16") is not None and asked.on("pure_bf16"):
        asked.take("pure_bf16", "precision", "bf16-pure")
    elif asked.on("bf16"):
        asked.take("bf16", "precision", "bf16-pure" if _in_bf16(asked) else "bf16")
    elif asked.on("fp16"):
        asked.take("fp16", "precision", "fp16")
    else:
        asked.plan["precision"] = "fp32"
    if asked.on("fp8") and str(asked.given.get("precision")).startswith(("fp8", "mxfp8")):
        asked.take("fp8", "precision", asked.given["precision"])
    elif asked.on("fp8"):
        raise BadInput(f"{asked.where}: fp8 says no recipe; give --precision fp8-rowwise or fp8-tensorwise")


def _in_bf16(asked: _Told) -> bool:
    """Whether AdamW trains weights of 16 bits, as axolotl loads them; sharded ones have copies in fp32.

    [axolotl: utils/config/__init__.py, resolve_dtype]
    """
    copied = any(asked.told.get(name) for name in ("adapter", "deepspeed", "fsdp", "fsdp_config"))
    return "base_model" in asked.told and not copied


def _adapters(asked: _Told) -> None:
    """LoRA and QLoRA, with each program's own names and defaults."""
    key = asked.first(KINDS)
    kind = "" if key is None else str(one_of(asked.told[key])).lower()
    if key is not None and kind not in COUNTED:
        raise BadInput(f"{asked.where}: {key} is {kind!r}, and only {', '.join(COUNTED)} are counted")
    if key is not None and kind == "full":
        asked.used[key] = "all weights are trained"
    name = asked.first(RANK)
    if asked.on("load_in_8bit") or any(str(asked.told.get(bits, "")) == "8" for bits in BITS):
        raise BadInput(f"{asked.where}: weights of 8 bits are counted by no account here; load_in_4bit is --qlora")
    if kind not in ("lora", "qlora", "dora") and not asked.on("use_peft") and not asked.on("use_lora"):
        return
    asked.plan["lora_rank"] = asked.whole(name) if name is not None else 8
    said = (*RANK, *KINDS, "use_peft", "use_lora")
    asked.used |= {one: f"--lora-rank {asked.plan['lora_rank']}" for one in said if one in asked.told}
    wanted = asked.first(TARGETS)
    if asked.on("lora_target_linear"):
        asked.take("lora_target_linear", "lora_targets", ("all-linear",))
    elif wanted is not None:
        asked.take(wanted, "lora_targets", _targets(asked.told[wanted]))
    for one in ("load_in_4bit", *BITS, "quantized", "q_lora"):
        if one in asked.told and (str(asked.told[one]) == "4" or asked.on(one)):
            asked.take(one, "qlora", value=True, flag="--qlora")


def _targets(value: object) -> tuple[str, ...]:
    if isinstance(value, list):
        return tuple(map(str, value))
    text = str(value)
    return ("all-linear",) if text in ("all", "all-linear", "all_linear") else tuple(text.replace(",", " ").split())


def _rest(asked: _Told) -> None:
    """Recomputation, attention, the optimizer, a reference model."""
    checkpointing = "gradient_checkpointing"
    if asked.on("disable_gradient_checkpointing"):
        asked.take("disable_gradient_checkpointing", "recompute", "none")
    elif checkpointing in asked.told:
        asked.take(checkpointing, "recompute", "full" if asked.on(checkpointing) else "none")
    else:
        asked.plan["recompute"] = "full" if any(sign in asked.told for sign in (*FACTORY, *SIGNS)) else "none"
    name = asked.first(ATTENTION)
    if name is not None:
        word = str(asked.told[name]).lower()
        asked.take(name, "attention", "eager" if word in ("eager", "disabled", "false", "no") else "flash")
    name = asked.first(("optim", "optimizer"))
    if name is not None:
        word = str(asked.told[name])
        asked.take(name, "optimizer", OPTIMIZERS.get(word, word))
    key = asked.first(STAGES)
    if key is not None and str(one_of(asked.told[key])) == "dpo":
        if "lora_rank" not in asked.plan:
            asked.take(key, "frozen_copy", 1)
        asked.conflicts.append(_pairs(asked))


def _pairs(asked: _Told) -> Conflict:
    return Conflict(
        id="dpo-doubles-batch",
        severity="advise",
        message=f"a preference loss runs chosen and rejected answers at once: mbs={asked.plan.get('mbs', 1)} are pairs",
        knob="for what is held, double the micro-batch in the file",
        source="trl trainer/dpo_trainer.py concatenated_forward",
    )


def _sharding(asked: _Told, model: Model, loaded: Loaded) -> None:
    """FSDP where it is asked for, else every rank keeps the model whole."""
    value = asked.told.get("fsdp")
    words = [str(word) for word in value] if isinstance(value, list) else str(value or "").replace(",", " ").split()
    words = [word.upper() for word in words if word.lower() not in FALSE]
    config = asked.told.get("fsdp_config")
    if isinstance(value, Mapping) or not isinstance(config, str | bool | Mapping | None):
        raise BadInput(f"{asked.where}: fsdp takes words and fsdp_config keys or a file; write them so")
    inner = loaded(config) if isinstance(config, str) and config else config if isinstance(config, Mapping) else {}
    alone = (asked.plan.get("gpus") or asked.given.get("gpus")) == 1
    if alone or (not words and not inner):
        # FSDP of one rank is NO_SHARD, whatever it is told [torch: fsdp/_init_utils.py]
        asked.plan |= {"engine": "pytorch", "zero": 0}
        asked.used |= {name: "--engine pytorch --zero 0" for name in ("fsdp", "fsdp_config") if asked.told.get(name)}
        return
    values = spelled(asked.where, {"fsdp_config": {**_of_words(words), **inner, **_of_version(asked)}})
    if any("HYBRID" in str(word).upper() for word in (*words, values.flat.get(f"{FSDP}fsdp_sharding_strategy"))):
        raise BadInput(f"{asked.where}: fsdp is a hybrid; give --engine pytorch --zero 3 with --dp-replicate")
    plan = fsdp_of(values)
    asked.plan |= plan
    asked.conflicts += wrapping(values, asked.plan, model)
    offload = " --offload parameters" if "offload" in plan else ""
    flags = f"--engine {plan['engine']} --zero {plan['zero']}{offload}"
    asked.used |= {name: flags for name in ("fsdp", "fsdp_config", "fsdp_version") if name in asked.told}


def _of_words(words: list[str]) -> dict[str, Any]:
    """The words of --fsdp, as fsdp_config has them. [transformers: training_args.py, FSDPOption]"""
    strategies = [word for word in words if word in STRATEGIES]
    made: dict[str, Any] = {"fsdp_sharding_strategy": strategies[0]} if strategies else {}
    made |= {"fsdp_auto_wrap_policy": "NO_WRAP"} if strategies and "AUTO_WRAP" not in words else {}
    return made | ({"fsdp_offload_params": True} if "OFFLOAD" in words else {})


def _of_version(asked: _Told) -> dict[str, Any]:
    version = asked.told.get("fsdp_version")
    return {} if version is None else {"fsdp_version": plain(version)}


def _settings(asked: _Told, plan: Mapping[str, Any], made: Settings | None) -> Settings:
    rate = asked.told.get("learning_rate")
    numeric: dict[str, float | bool] = {}
    try:
        if rate is not None:
            numeric["learning_rate"] = float(rate)
            asked.used["learning_rate"] = "--learning-rate"
    except (TypeError, ValueError):
        raise Values(asked.where, asked.told).wrong("learning_rate", "a number") from None
    model = model_of(asked.told)
    if model is not None and asked.given.get("model") is None:
        asked.used |= {name: f"--model {model}" for name in MODEL if preset_of(asked.told.get(name)) == model}
        plan = {"model": model, **plan}
    used = tuple(Used(key=key, value=typed(asked.told[key]), flag=flag) for key, flag in asked.used.items())
    return Settings(
        path=asked.where,
        kind=KIND,
        plan=dict(plan),
        told={**numeric, **({} if made is None else made.told)},
        used=(*used, *(() if made is None else made.used)),
        unused=(*_unused(asked), *(() if made is None else made.unused)),
        conflicts=(*asked.conflicts, *(() if made is None else made.conflicts)),
    )


def _unused(asked: _Told) -> Iterator[Unused]:
    for key, value in asked.told.items():
        if key not in asked.used:
            off = str(value).lower() in FALSE
            why = "is off" if off else NOT_COUNTED.get(key, "is of the run, or taken as it is usual")
            if key in STAGES and str(one_of(value)) in ROLLOUTS:
                why = "has other models and makes answers beside the step, which are not counted: a lower bound"
            elif key == "gradient_accumulation_steps" and not off:
                why = "is of a number of GPUs that nothing says: give --gpus"
            elif key in MODEL:
                why = "is no model that comes with the package: the model that is given stands for it"
            yield Unused(key=key, value=typed(value), why=why)
