"""Families of decoder models: a Hugging Face config.json becomes a Model.

One file holds one family or a group of close cousins. `FAMILY_FILES` lists the files and the model_types each one
reads; a file is imported when a config asks for it. `common`, `experts` and `keys` are shared, not families.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

import msgspec

from trainledger.errors import BadInput, UnknownName
from trainledger.facts.families.keys import RELEASE, Family, Parts, read, shown
from trainledger.facts.model import PRODUCT_LIMIT, Model, Tensor

FAMILY_FILES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("apertus", ("apertus",)),
    ("bloom", ("bloom",)),
    ("cohere", ("cohere", "cohere2")),
    ("deepseek", ("deepseek_v2", "deepseek_v3", "kimi_k2", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite")),
    ("ernie4_5_moe", ("ernie4_5_moe",)),
    ("exaone4", ("exaone4",)),
    ("falcon", ("falcon",)),
    ("falcon_h1", ("falcon_h1",)),
    ("gemma", ("gemma", "gemma2", "gemma3_text")),
    ("gemma3n", ("gemma3n_text",)),
    ("gemma4", ("gemma4_text",)),
    ("glm", ("glm", "glm4")),
    ("glm4_moe", ("glm4_moe",)),
    ("gpt2", ("gpt2",)),
    ("gpt_bigcode", ("gpt_bigcode",)),
    ("gpt_neo", ("gpt_neo",)),
    ("gpt_neox", ("gpt_neox",)),
    ("gpt_oss", ("gpt_oss",)),
    ("gptj", ("gptj",)),
    ("granite", ("granitemoe", "granitemoeshared", "granitemoehybrid")),
    ("hunyuan_moe", ("hunyuan_v1_moe", "hunyuan")),
    ("jamba", ("jamba",)),
    ("lfm2", ("lfm2", "lfm2_moe")),
    (
        "llama",
        (
            "llama",
            "mistral",
            "granite",
            "ministral3",
            "internlm3",
            "ernie4_5",
            "seed_oss",
            "smollm3",
            "hunyuan_v1_dense",
        ),
    ),
    ("llama4", ("llama4_text",)),
    ("mamba2", ("mamba2",)),
    ("minimax", ("minimax", "minimax_text_01", "minimax_m1")),
    ("minimax_m2", ("minimax_m2",)),
    ("mixtral", ("mixtral",)),
    ("mpt", ("mpt",)),
    ("nemotron", ("nemotron", "arcee")),
    ("nemotron_h", ("nemotron_h",)),
    ("olmo", ("olmo", "olmo2", "olmo3", "olmoe")),
    ("opt", ("opt",)),
    ("phi", ("phi",)),
    ("phi3", ("phi3",)),
    ("qwen", ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text")),
    ("qwen_next", ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")),
    ("stablelm", ("stablelm",)),
    ("starcoder2", ("starcoder2",)),
)
"""Each family file and the model_type strings it reads."""

_FILE_OF = {model_type: file for file, model_types in FAMILY_FILES for model_type in model_types}

_OF_DEEPSPEED = ("zero_optimization", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""Keys that a model's config has none of, and DeepSpeed's settings have."""

_BYTES_PER_ELEMENT = 64
"""What `PRODUCT_LIMIT` allows for each element: more than any mix of states keeps."""


def model_types() -> tuple[str, ...]:
    """Every model_type that can be read, sorted."""
    return tuple(sorted(_FILE_OF))


def family_of(model_type: str) -> Family:
    """The family that reads configs of this model_type; the file that holds it is imported here."""
    module = importlib.import_module(f"{__name__}.{_FILE_OF[model_type]}")
    for family in module.FAMILIES:
        if model_type == family.name or model_type in family.model_types:
            return family
    raise AssertionError(f"{_FILE_OF[model_type]} lists no family for {model_type}")


def model_from_config(config: Mapping[str, Any], *, name: str, source: str, where: str = "") -> Model:
    """Build a Model from a config.json that was loaded as a dict.

    `name` goes into the Model, `source` says where the config came from, `where` names it in errors (else `name`).

    >>> tiny = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 10, "n_positions": 4}
    >>> model_from_config(tiny, name="tiny", source="").total_params
    1872
    """
    where = where or name
    family = family_for(config, where)
    values = read(family, config, where)
    parts = family.build(values)
    check_size(parts, where)
    notes = (*_notes(family, config, values.filled), *parts.notes)
    return assembled(parts, name=name, family=family.name, source=source, notes=notes)


def assembled(
    parts: Parts, *, name: str, family: str, source: str, notes: tuple[str, ...], params_only: bool = False
) -> Model:
    """The Model of parts whose size has been checked, with what they do not say."""
    same = msgspec.structs.asdict(msgspec.structs.replace(parts, notes=notes))
    return Model(name=name, family=family, source=source, params_only=params_only, **same)


def _notes(family: Family, config: Mapping[str, Any], filled: tuple[str, ...]) -> tuple[str, ...]:
    notes: list[str] = []
    if filled:
        notes.append(f"not in the config, so the default of {RELEASE} {family.config_class}: {', '.join(filled)}")
    if config.get("quantization_config"):
        notes.append("quantization_config is not read: the shapes are those of the weights before quantization")
    classes = config.get("architectures") or ()
    if isinstance(classes, list) and classes and not set(classes) & set(family.architectures):
        notes.append(f"architectures is {shown(classes)}: read as {family.architectures[0]}, with an output layer")
    return tuple(notes)


def family_for(config: Mapping[str, Any], name: str) -> Family:
    """The family that reads this config, by its model_type or else by its class; `name` is for error messages."""
    model_type = config.get("model_type")
    if model_type is None:
        return _family_by_class(config, name)
    if not isinstance(model_type, str):
        raise BadInput(f'{name}: model_type is {shown(model_type)}; it takes a string; write one, such as "llama"')
    if model_type in _FILE_OF:
        return family_of(model_type)
    raise _unreadable(config, name, model_type)


def _family_by_class(config: Mapping[str, Any], name: str) -> Family:
    classes = config.get("architectures")
    for wanted in classes if isinstance(classes, list) else ():
        for model_type in model_types():
            family = family_of(model_type)
            if wanted in family.architectures:
                return family
    if any(key in config for key in _OF_DEEPSPEED):
        raise BadInput(
            f"{name} is DeepSpeed's settings and no model's config; `trainledger check {name} --model MODEL` reads it, "
            "with --gpus and what the trainer is told"
        )
    raise BadInput(
        f"{name}: there is no model_type, and architectures ({shown(classes)}) names no class that is known; "
        f'add "model_type": one of {", ".join(model_types())}, or --set model_type=NAME'
    )


_WITHOUT = "or give its number of parameters as MODEL, such as 7B, which is enough for states"
"""What is left to someone whose config is not read."""


def _unreadable(config: Mapping[str, Any], name: str, model_type: str) -> BadInput:
    inner = config.get("text_config")
    inner_type = inner.get("model_type") if isinstance(inner, Mapping) else None
    if isinstance(inner_type, str) and inner_type in _FILE_OF:
        return BadInput(
            f"{name}: model_type {model_type!r} wraps a text decoder with other parts, and only decoders are read; "
            f"give {name}:text_config (model_type {inner_type!r}) for the decoder alone"
        )
    if config.get("is_encoder_decoder"):
        return BadInput(
            f"{name}: model_type {model_type!r} is an encoder-decoder, and only decoders are read; "
            f"give a config of one of {', '.join(model_types())}; {_WITHOUT}"
        )
    parts = [key for key in ("text_config", "vision_config", "audio_config") if config.get(key)]
    if parts:
        return BadInput(
            f"{name}: model_type {model_type!r} has {' and '.join(parts)}, and only text decoders are read; "
            f"give a config of one of {', '.join(model_types())}; {_WITHOUT}"
        )
    near = difflib.get_close_matches(model_type.lower(), model_types(), cutoff=0.4)
    known = f"all known: {', '.join(model_types())}; " if near else ""
    knob = "if its blocks are those of one of them, --set model_type=NAME"
    return UnknownName(f"model_type ({name})", model_type, model_types(), f"{known}{knob}, {_WITHOUT}")


def check_size(parts: Parts, name: str) -> None:
    """Refuse a model whose element count could overflow 64-bit integers once multiplied out."""
    limit = PRODUCT_LIMIT // _BYTES_PER_ELEMENT

    def too_big(what: str, count: int) -> BadInput:
        return BadInput(
            f"{name}: {what} has about 10**{len(str(count)) - 1} elements; x {_BYTES_PER_ELEMENT} bytes passes 2**62, "
            "which is more than can be counted; check the sizes in the config, or lower one with --set KEY=N"
        )

    def check(tensor: Tensor) -> None:
        if tensor.numel * tensor.copies >= limit:
            copies = f" x {tensor.copies}" if tensor.copies > 1 else ""
            raise too_big(f"{tensor.name} {list(tensor.shape)}{copies}", tensor.numel * tensor.copies)

    total = 0
    for tensor in (*parts.embedding, *parts.final):
        check(tensor)
        total += tensor.numel * tensor.copies
    for block in (*parts.blocks, *((parts.mtp,) if parts.mtp else ())):
        for tensor in block.tensors:
            check(tensor)
        size = block.numel * len(block.layers)
        if size >= limit:
            raise too_big(f"{block.kind} block x {len(block.layers)} layers", size)
        total += size
    if total >= limit:
        raise too_big("the whole model", total)
