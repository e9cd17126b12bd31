"""The model of a measured run: a config by the row's name, with the row's own sizes written over it.

Which names speak of which family is data/measured/models.toml. A size that neither the row nor a config states is not
invented: the row is incomplete.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from trainledger.errors import BadInput
from trainledger.facts.families import family_for, model_from_config
from trainledger.facts.families.keys import Family
from trainledger.facts.load import load_toml
from trainledger.facts.model import Model
from trainledger.facts.presets import aliases, find_preset, load_preset, preset_config, preset_names
from trainledger.scoring.cells import Cells
from trainledger.scoring.table import MEASURED
from trainledger.scoring.words import Unclear

SIZES = ("hidden", "ffn", "layers", "heads", "kv_heads", "head_dim", "vocab")
EXPERTS = ("num_experts", "topk", "moe_ffn")
FFN_MULTIPLE = 4
"""Width of a network without a gate where no width is stated, in hidden sizes: GPT's. [korthikanti: section 4.1]"""


class NamedFamily(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a word in a model's name says of its layout."""

    holds: str
    glu: bool
    dense: str = ""
    routed: str = ""


class ModelReadings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of models.toml."""

    family: tuple[NamedFamily, ...]
    latent: dict[str, tuple[str, ...]]
    shape: dict[str, str]
    keys: dict[str, tuple[str, ...]]


@lru_cache(maxsize=1)
def model_readings() -> ModelReadings:
    """How a row's model is read."""
    return msgspec.convert(load_toml(MEASURED / "models.toml"), ModelReadings)


def model_of(cells: Cells, plain: str = "") -> Model:
    """The model that a row's name and sizes describe; Unclear where they leave a size open.

    plain   the model_type of one without a gate whose name speaks of no family, where an engine had its own

    >>> model_of(Cells({"model": "llama3-8b", "layers": "2"})).num_layers
    2
    """
    name = cells.text("model")
    preset = _preset(name, cells)
    config = dict(preset_config(preset)) if preset else {"model_type": _model_type(name, cells, plain)}
    family = family_for(config, name)
    _write_sizes(config, family, cells)
    if not preset:
        _complete(config, family, cells)
    source = f"preset {preset}, with the row's sizes" if preset else "the row's sizes"
    try:
        model = model_from_config(config, name=name or "model", source=source)
    except BadInput as error:
        raise Unclear(str(error)) from error
    _agree(model, cells)
    return model


def _plain(name: str) -> str:
    """Letters and digits of a name alone, in lower case."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _preset(name: str, cells: Cells) -> str | None:
    """The preset of a name however it is punctuated, or one of the same first word whose sizes are the row's."""
    if not name:
        return None
    found = find_preset(name) or _plain_names().get(_plain(name))
    if found:
        return found
    word = re.match(r"[a-z]*", name.lower())
    first = word[0] if word else ""
    if not first:
        return None
    candidates = [preset for preset in preset_names() if re.match(rf"{first}(?![a-z])", preset)]
    return next((preset for preset in candidates if _same_sizes(load_preset(preset), cells)), None)


@lru_cache(maxsize=1)
def _plain_names() -> dict[str, str]:
    return {_plain(other): preset for other, preset in (*aliases().items(), *((p, p) for p in preset_names()))}


def _same_sizes(model: Model, cells: Cells) -> bool:
    """Whether a model has the row's widths; its depth and vocabulary may differ. A row must state hidden and heads."""
    widths = {"hidden", *(set(SIZES) - {"layers", "vocab"}), *EXPERTS}
    stated = {column: cells.whole(column) for column in widths if cells.text(column)}
    have = _sizes(model)
    if not {"hidden", "heads"} <= stated.keys() or bool(stated.get("num_experts")) != bool(have.get("num_experts")):
        return False
    return all(have[column] == value for column, value in stated.items() if column in have)


def _sizes(model: Model) -> dict[str, int]:
    """The sizes of a model by their column; those that it has none of are left out."""
    sizes: dict[str, int] = {"hidden": model.hidden_size, "layers": model.num_layers, "vocab": model.vocab_size}
    for block in model.blocks:
        if block.attention is not None:
            sizes |= {"heads": block.attention.heads, "kv_heads": block.attention.kv_heads}
            if block.attention.kind == "mha":
                sizes["head_dim"] = block.attention.v_head_dim
        if block.mlp is not None:
            sizes["ffn"] = block.mlp.intermediate
        if block.moe is not None:
            moe = block.moe
            sizes |= {"num_experts": moe.experts, "topk": moe.top_k, "moe_ffn": moe.intermediate}
            sizes |= {"shared_ffn": moe.shared_intermediate, "moe_layers": 0}
    if "moe_layers" in sizes:
        sizes["moe_layers"] = sum(len(block.layers) for block in model.blocks if block.moe is not None)
    return sizes


def _model_type(name: str, cells: Cells, plain: str) -> str:
    """The model_type whose layout the row's sizes are read in."""
    readings, said = model_readings(), _plain(name)
    routed, gated = bool(cells.whole("num_experts", 0)), cells.flag("glu")
    if any(word in said for word in readings.latent["holds"]):
        raise Unclear(
            f"model {name!r}: its keys and values go through a low rank that no column states, and no config of that "
            "name and these sizes comes with the package"
        )
    if not cells.text("hidden"):
        raise Unclear(f"hidden is blank, and no model is known by the name {name!r}")
    for family in readings.family:
        model_type = family.routed if routed else family.dense
        if family.holds in said and model_type and gated in (None, family.glu):
            return model_type
    shape = _shape(name, cells, routed=routed, gated=gated)
    return plain if plain and shape == "plain" else readings.shape[shape]


def _shape(name: str, cells: Cells, *, routed: bool, gated: bool | None) -> str:
    if gated is None:
        raise Unclear(f"glu is blank, and the name {name!r} says of no network whether it has two matrices or three")
    if not routed:
        grouped = cells.whole("kv_heads") not in (None, cells.whole("heads"))
        return "gated" if gated else "plain_grouped" if grouped else "plain"
    if not gated:
        raise Unclear("glu is 0 and num_experts is stated: routed experts without a gate are of no family that is read")
    mixed = cells.whole("shared_experts", 0) or cells.whole("moe_layers") not in (None, cells.whole("layers"))
    return "routed_mixed" if mixed else "routed"


def _put(config: dict[str, Any], family: Family, size: str, value: object) -> bool:
    """Write a size under the first of its keys that the family reads, in place of every other spelling of it."""
    for spelling in model_readings().keys[size]:
        if spelling in family.read_keys:
            for key, meaning in family.keys.items():
                if spelling in (key, *meaning.aliases):
                    for other in (key, *meaning.aliases):
                        config.pop(other, None)
            config[spelling] = value
            return True
    return False


def _write_sizes(config: dict[str, Any], family: Family, cells: Cells) -> None:
    layers = cells.whole("layers")
    if layers:
        _cut_lists(config, family, layers)
    for column in (*SIZES, *EXPERTS, "shared_experts"):
        least = 0 if column in ("shared_experts", "num_experts", "topk", "moe_ffn") else 1
        value = cells.whole(column, least)
        if value or (value == 0 and column == "shared_experts"):
            _put(config, family, column, value)
    tied = cells.flag("tied_embeddings")
    if tied is not None:
        _put(config, family, "tied_embeddings", tied)
    _write_routed(config, family, cells)
    seq = cells.whole("seq_len")
    for spelling in model_readings().keys["positions"]:
        if seq and spelling in family.read_keys and int(config.get(spelling) or 0) < seq:
            _put(config, family, "positions", seq)
            break


def _cut_lists(config: dict[str, Any], family: Family, layers: int) -> None:
    """Drop what a config says of layers that a shortened model lacks."""
    before = next((int(config[key]) for key in model_readings().keys["layers"] if key in config), 0)
    for key, value in config.items():
        if isinstance(value, list) and key in family.read_keys and len(value) == before and layers < before:
            config[key] = value[:layers]


def _write_routed(config: dict[str, Any], family: Family, cells: Cells) -> None:
    """Which layers are routed, dense ones first, and the width of the shared experts."""
    layers, routed = cells.whole("layers"), cells.whole("moe_layers", 0)
    shared, width = cells.whole("shared_experts", 0), cells.whole("moe_ffn", 0)
    if shared and width:
        _put(config, family, "shared_ffn", shared * width)
    if not layers or not routed or routed > layers:
        return
    dense = layers - routed
    if not _put(config, family, "dense_first", dense) and not _put(config, family, "dense_list", list(range(dense))):
        _put(config, family, "routed_list", list(range(dense, layers)))


def _complete(config: dict[str, Any], family: Family, cells: Cells) -> None:
    """What a config made of a row's sizes still needs; the defaults of a family's class are not this row's."""
    needed = ["hidden", "layers", "heads", *(EXPERTS if cells.whole("num_experts", 0) else ())]
    if cells.whole("moe_layers", 0) in (None, 0) or cells.whole("moe_layers", 0) != cells.whole("layers"):
        needed.append("ffn")
    if family.name != "gpt2":
        needed.append("vocab")
    if family.name in ("gpt2", "bloom", "starcoder2") and not cells.text("ffn"):
        needed.remove("ffn")
        hidden = cells.whole("hidden")
        if hidden:
            _put(config, family, "ffn", FFN_MULTIPLE * hidden)
    missing = [column for column in needed if not cells.text(column)]
    if missing:
        raise Unclear(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} blank, which the model needs")
    if not cells.whole("moe_layers", 0):
        _put(config, family, "dense_first", 0)
    if not cells.text("kv_heads"):
        _put(config, family, "kv_heads", cells.whole("heads"))
    if "use_bias" in family.read_keys:
        config["use_bias"] = False
    if "num_nextn_predict_layers" in family.read_keys:
        config["num_nextn_predict_layers"] = 0


def _agree(model: Model, cells: Cells) -> None:
    """Raise Unclear where the model could not be given a size that the row states."""
    have = _sizes(model)
    stated: Mapping[str, int | None] = {c: cells.whole(c, 0) for c in (*SIZES, *EXPERTS, "moe_layers")}
    dense_alone = "num_experts" not in have
    for column, value in stated.items():
        if not value:
            continue
        if column in EXPERTS and dense_alone:
            raise Unclear(f"{column} is {value}, and {model.name} is read as a {model.family} without routed experts")
        if column in have and have[column] != value:
            raise Unclear(f"{column} is {value}, and a {model.family} of the row's other sizes has {have[column]}")
    shared, width = cells.whole("shared_experts", 0), have.get("moe_ffn", 0)
    if shared is not None and not dense_alone and have["shared_ffn"] != shared * width:
        raise Unclear(
            f"shared_experts is {shared}, and a {model.family} has shared experts of {have['shared_ffn']} features"
        )
