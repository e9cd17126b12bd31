"""What many families read in the same way: rotary positions, attention, the plain Llama block."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from trainledger.facts.model import Attention as Facts
from trainledger.facts.model import Model
from trainledger.facts.semantics import AttentionRule, MlpRule, NormRule, RotaryRule, Scaling, Semantics
from trainledger.runtime.model.config import Config


def each_layer(model: Model) -> list[Facts]:
    """The attention facts of every layer in order."""
    found = {layer: block.attention for block in model.blocks for layer in block.layers}
    return [facts for layer in range(model.num_layers) if (facts := found[layer]) is not None]


def attention_of(facts: Facts, **more: object) -> AttentionRule:
    """The rule of a layer with the usual names: scores over the root of the head size."""
    made = AttentionRule(
        heads=facts.heads,
        head_dim=facts.qk_head_dim,
        group=facts.heads // facts.kv_heads,
        scale=facts.qk_head_dim**-0.5,
        window=facts.window,
    )
    return msgspec.structs.replace(made, **more)


def attentions(model: Model, **more: object) -> tuple[AttentionRule, ...]:
    """The rule of every layer, where they differ in their window at most."""
    return tuple(attention_of(facts, **more) for facts in each_layer(model))


def rms(config: Config, default: float = 1e-6) -> NormRule:
    """RMSNorm with the config's epsilon."""
    return NormRule(eps=config.number("rms_norm_eps", default))


def layer_norm(config: Config, key: str, default: float = 1e-5) -> NormRule:
    """LayerNorm with the epsilon under `key`."""
    return NormRule(kind="layer", eps=config.number(key, default))


def rope_values(
    config: Config,
    *,
    theta: float = 10000.0,
    fraction: float = 1.0,
    label: str = "",
    theta_key: str = "rope_theta",
    older: bool = True,
) -> dict[str, Any]:
    """The rotary settings of one kind of layer, whichever of the config's spellings holds them.

    Newer configs have `rope_parameters`, by kind of layer (`label`) where kinds differ; older ones rope_theta and
    rope_scaling, of which the latter is left alone without `older`.
    """
    found, scaling = config.entries("rope_parameters"), config.entries("rope_scaling")
    nested = isinstance(found.get("full_attention"), Mapping) or isinstance(found.get("sliding_attention"), Mapping)
    values: dict[str, Any] = {**(scaling if older else {}), **(found.get(label) or {} if nested else found)}
    values.setdefault("rope_theta", config.number(theta_key, theta))
    values.setdefault("partial_rotary_factor", config.number("partial_rotary_factor", fraction))
    values.setdefault("rope_type", values.get("type", "default"))
    return values


def rotary(
    config: Config,
    values: Mapping[str, Any],
    head_dim: int,
    model: Model,
    *,
    interleaved: bool = False,
    fp32: bool = False,
) -> RotaryRule:
    """The rotary rule of heads of `head_dim` features from what `rope_values` found."""
    dim = int(head_dim * float(values["partial_rotary_factor"]))
    scaling, amplitude = _scaling(config, values, dim, model)
    return RotaryRule(
        dim=dim,
        theta=float(values["rope_theta"]),
        interleaved=interleaved,
        amplitude=amplitude,
        fp32=fp32,
        scaling=scaling,
    )


def _scaling(config: Config, values: Mapping[str, Any], dim: int, model: Model) -> tuple[Scaling | None, float]:
    """How frequencies are stretched, and the factor on cosine and sine."""
    kind = values["rope_type"]
    readers: dict[str, Callable[[], tuple[Scaling | None, float]]] = {
        "default": lambda: (None, 1.0),
        "linear": lambda: (Scaling(kind="linear", factor=float(values["factor"])), 1.0),
        "llama3": lambda: (_llama3(values, _original(config, values, model)), 1.0),
        "yarn": lambda: _yarn(values, _original(config, values, model)),
        "longrope": lambda: _longrope(config, values, dim, model),
    }
    if kind not in readers:
        raise config.refuse("rope_type", kind, " or ".join(readers))
    try:
        return readers[kind]()
    except KeyError as error:
        raise config.refuse(str(error.args[0]), None, f"a number, which rope_type {kind} needs,") from error


def _original(config: Config, values: Mapping[str, Any], model: Model) -> int:
    """Positions of pre-training; the key of the whole config comes first, as in `standardize_rope_params`."""
    key = "original_max_position_embeddings"
    found = config.whole(key, int(values.get(key) or model.max_positions or 0))
    if not found:
        raise KeyError(key)
    return found


def _llama3(values: Mapping[str, Any], original: int) -> Scaling:
    low, high = float(values["low_freq_factor"]), float(values["high_freq_factor"])
    return Scaling(kind="llama3", factor=float(values["factor"]), original=original, low=low, high=high)


def mscale(factor: float, strength: float = 1.0) -> float:
    """YaRN's growth of attention with the factor. [transformers 5.24.0: modeling_rope_utils.py get_mscale]"""
    return 1.0 if factor <= 1 else 0.1 * strength * math.log(factor) + 1.0


def _yarn(values: Mapping[str, Any], original: int) -> tuple[Scaling, float]:
    factor = float(values["factor"])
    given, one, every = (values.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        amplitude = float(given)
    elif one and every:
        amplitude = mscale(factor, float(one)) / mscale(factor, float(every))
    else:
        amplitude = mscale(factor)
    scaling = Scaling(
        kind="yarn",
        factor=factor,
        original=original,
        low=float(values.get("beta_slow") or 1),
        high=float(values.get("beta_fast") or 32),
        truncate=bool(values.get("truncate", True)),
    )
    return scaling, amplitude


def _longrope(config: Config, values: Mapping[str, Any], dim: int, model: Model) -> tuple[Scaling, float]:
    original = _original(config, values, model)
    short, long = tuple(map(float, values["short_factor"])), tuple(map(float, values["long_factor"]))
    if len(short) != dim // 2 or len(long) != dim // 2:
        raise config.refuse("short_factor", len(short), f"{dim // 2} numbers, one for each pair of features,")
    factor, amplitude = values.get("factor"), values.get("attention_factor")
    if factor is None:
        factor = (model.max_positions or original) / original
    if amplitude is None:
        amplitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return Scaling(kind="longrope", factor=float(factor), original=original, short=short, long=long), float(amplitude)


def llama_like(
    model: Model,
    config: Config,
    *,
    theta: float = 10000.0,
    fraction: float = 1.0,
    eps: float = 1e-6,
    fp32: bool = False,
    **attention: object,
) -> Semantics:
    """RMSNorms, rotary positions in each head, a network gated by SiLU."""
    head_dim = each_layer(model)[0].qk_head_dim
    values = rope_values(config, theta=theta, fraction=fraction)
    return Semantics(
        norm=rms(config, eps),
        attention=attentions(model, **attention),
        rotary={"rotary": rotary(config, values, head_dim, model, fp32=fp32)},
        mlp=MlpRule(activation=config.activation("silu", "hidden_act")),
    )
