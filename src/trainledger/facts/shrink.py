"""A config with the same blocks at smaller sizes: every key that a shape hangs on, by its name in each family.

What must stay divisible is handed in as a Demand. Nothing here grows: where a floor would pass the size that the config
has, that size stays, since it is legal already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import lcm
from typing import Any

import msgspec

from trainledger.facts.families import family_for, model_from_config
from trainledger.facts.families.keys import Family, read
from trainledger.facts.model import Attention, Model

HEAD_DIM = 8
"""Features of a head: an even number turns under a rotary fraction of a quarter, a half or the whole."""
MOST_HEADS = 16
LEAST_WIDTH = 32
MULTIPLE = 8
"""Of every width: grouped products of 16-bit numbers want rows of 16 bytes. [torch: native/GroupedMMUtils.h 25-32]"""
MOST_VOCAB = 512

LAYERS = ("num_hidden_layers", "n_layer")
HIDDEN = ("hidden_size", "n_embd")
HEADS = ("num_attention_heads", "n_head")
KV_HEADS = ("num_key_value_heads", "num_kv_heads")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
WIDTHS = (
    "intermediate_size",
    "intermediate_size_mlp",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "moe_latent_size",
    "n_inner",
    "ffn_dim",
    "ffn_hidden_size",
)
RANKS = ("q_lora_rank", "kv_lora_rank")
WINDOWS = ("sliding_window", "attention_chunk_size")
POSITIONS = ("n_positions", "max_position_embeddings")
EACH_LAYER = (
    "layer_types",
    "layers_block_type",
    "no_rope_layers",
    "hybrid_override_pattern",
    "mlp_layer_types",
    "indexer_types",
    "attn_type_list",
)
"""One entry for each layer."""
SOME_LAYERS = ("moe_layers", "mlp_only_layers")
"""Indices of layers."""
EDGES = ("first_k_dense_replace", "max_window_layers")
"""Layers of one kind before the others begin."""
FRACTIONS = ("partial_rotary_factor", "rotary_pct", "rope_pct")
_TABLES = ("rope_parameters", "rope_scaling")
_PER_FREQUENCY = ("short_factor", "long_factor")
ROTARY_DIM = 64
"""Default of GPTJConfig's rotary_dim, which changes no shape, so the family does not read it. [transformers 5.24.0]"""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What the plan asks of sizes.

    tp           divides heads, KV heads, widths and vocabulary
    ep           divides the experts
    least        layers at least
    local        experts that every expert-parallel rank has at least
    rows         divides the rows of each expert: 1 where they are not cut
    multiple     of every side of a matrix that a rank has, where the recipe asks for more than MULTIPLE
    seq, before  the shrunken sequence, and what it was
    """

    tp: int = 1
    ep: int = 1
    least: int = 1
    local: int = 1
    rows: int = 1
    multiple: int = MULTIPLE
    seq: int
    before: int


def shrink_config(config: Mapping[str, Any], model: Model, demand: Demand) -> dict[str, Any]:
    """The config of a model with the same kinds of blocks, fewer layers and smaller sizes."""
    family = family_for(config, model.name)
    layered = _fewer_layers(config, family, model, demand.least)
    sizes = _Sizes(read(family, layered, model.name).items, model, demand)
    found = sizes.smaller(config)
    small = _with(layered, family, found)
    now = _attention(model_from_config(small, name=model.name, source=""))
    return {**small, **_unread(small, family, sizes.attention, now)}


def shorten_config(config: Mapping[str, Any], model: Model, demand: Demand) -> dict[str, Any]:
    """The config with windows and learned positions for the shrunken sequence, and nothing else changed."""
    family = family_for(config, model.name)
    sizes = _Sizes(read(family, config, model.name).items, model, demand)
    return _with(config, family, sizes.over_the_sequence())


def _with(config: Mapping[str, Any], family: Family, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The config with keys changed, each under the spelling that it has."""
    out = dict(config)
    for name, value in changes.items():
        spellings = (name, *family.keys[name].aliases) if name in family.keys else (name,)
        given = [spelling for spelling in spellings if spelling in out]
        for spelling in given or [name]:
            out[spelling] = value
    return out


def _fewer_layers(config: Mapping[str, Any], family: Family, model: Model, least: int) -> dict[str, Any]:
    """The first layers of a config: the fewest, from `least` on, that have every kind of block."""
    kinds = {block.kind for block in model.blocks}
    for edge in (1, model.num_layers):
        for count in range(min(least, model.num_layers), model.num_layers + 1):
            cut = _first_layers(config, family, count, edge)
            if {block.kind for block in model_from_config(cut, name=model.name, source="").blocks} == kinds:
                return cut
    raise AssertionError(f"{model.name} with all its layers has the kinds {kinds}")


def _first_layers(config: Mapping[str, Any], family: Family, count: int, edge: int) -> dict[str, Any]:
    values = read(family, config, family.name).items
    changes: dict[str, Any] = {key: count for key in LAYERS if values.get(key) is not None}
    changes |= {key: values[key][:count] for key in EACH_LAYER if values.get(key)}
    changes |= {key: [at for at in values[key] if at < count] for key in SOME_LAYERS if values.get(key)}
    changes |= {key: min(values[key], edge) for key in EDGES if values.get(key)}
    return _with(config, family, changes)


class _Sizes:
    """The smaller size of every key of one config; `values` are all that its family reads."""

    def __init__(self, values: Mapping[str, Any], model: Model, demand: Demand) -> None:
        self.values = values
        self.demand = demand
        self.before = model.hidden_size
        self.attention = _attention(model)
        self.learned = any(tensor.role == "position" for tensor in model.embedding)
        self.heads, self.kv_heads = self._fewer_heads()

    def smaller(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """New values of the keys that the family reads."""
        head_dim, hidden = self._head_dim_and_hidden(_fractions(config))
        found: dict[str, Any] = dict.fromkeys(self._has(HIDDEN), hidden)
        found |= dict.fromkeys(self._has(HEADS), self.heads)
        found |= dict.fromkeys(self._has(KV_HEADS), self.kv_heads)
        found |= dict.fromkeys(self._has(("head_dim",)), head_dim)
        if self.attention.kind == "mla":
            found |= self._latent_dims(head_dim)
        multiple = lcm(self.demand.multiple * self.demand.tp, self.demand.rows * self.demand.tp)
        found |= {key: self._scaled(key, hidden, multiple) for key in self._has(WIDTHS)}
        found |= {key: self._scaled(key, hidden, self.demand.multiple) for key in self._has(RANKS)}
        narrow = ("word_embed_proj_dim",)
        found |= {key: min(hidden, self._scaled(key, hidden, MULTIPLE)) for key in self._has(narrow)}
        vocab = min(self._scaled("vocab_size", hidden, 1), MOST_VOCAB)
        found["vocab_size"] = min(_up(vocab, MULTIPLE * self.demand.tp), self.values["vocab_size"])
        found |= {key: self._fewer_experts(config) for key in self._has(EXPERTS)}
        return found | self.over_the_sequence()

    def _has(self, keys: tuple[str, ...]) -> Iterator[str]:
        """Those of the keys that the config or the defaults of its class set."""
        return (key for key in keys if self.values.get(key) is not None)

    def _scaled(self, key: str, hidden: int, multiple: int) -> int:
        """A width divided as the hidden size is, rounded up to a multiple."""
        value = int(self.values[key])
        return min(value, _up(_ceil(value * hidden, self.before), multiple))

    def _fewer_heads(self) -> tuple[int, int]:
        """(heads, KV heads): multiples of tp, in the ratio that they have where that makes few enough."""
        heads, kv_heads, tp = self.attention.heads, self.attention.kv_heads, self.demand.tp
        if heads == kv_heads:
            count = min(heads, _up(4, tp))
            return count, count
        kv = min(kv_heads, _up(2, tp))
        return kv * min(heads // kv_heads, max(2, MOST_HEADS // kv)), kv

    def _head_dim_and_hidden(self, fractions: tuple[float, ...]) -> tuple[int, int]:
        """(features of a head of q, or of MLA's those without positions; hidden size), in the ratio that they have."""
        whole, value_dim = self.attention.qk_head_dim - self.attention.rope_head_dim, self.attention.v_head_dim
        tied = self.before == self.attention.heads * value_dim
        step = lcm(HEAD_DIM, self.demand.multiple)
        for size in range(step, whole, step):
            width = self.heads * size * value_dim // whole
            hidden = width if tied else self._hidden_for(width)
            even = all(int(size * fraction) % 2 == 0 for fraction in fractions)
            if even and hidden % self.demand.rows == 0:
                return size, min(hidden, self.before)
        return whole, self.heads * value_dim if tied else self.before

    def _hidden_for(self, width: int) -> int:
        """The hidden size that stands to the width of all heads as it did."""
        wide = self.attention.heads * self.attention.v_head_dim
        return _up(
            max(LEAST_WIDTH, _ceil(width * self.before, wide)),
            lcm(2 * MULTIPLE, self.demand.rows, self.demand.multiple),
        )

    def _latent_dims(self, nope: int) -> dict[str, int]:
        """MLA: features with positions, an even number, and those of v, in the ratio to those without positions."""
        whole = self.attention.qk_head_dim - self.attention.rope_head_dim
        even = 2 if self.demand.multiple == MULTIPLE else self.demand.multiple
        rope = min(self.attention.rope_head_dim, _up(_ceil(self.attention.rope_head_dim * nope, whole), even))
        value = min(self.attention.v_head_dim, _ceil(self.attention.v_head_dim * nope, whole))
        return {"qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": value}

    def _fewer_experts(self, config: Mapping[str, Any]) -> int:
        """Enough for every rank, for the choice of a token, and for DeepSeek's groups of them; the choice stays."""
        (experts,) = {int(self.values[key]) for key in self._has(EXPERTS)}
        top_k = int(self.values["num_experts_per_tok"])
        groups = int(config.get("n_group") or 1)
        in_group = max(2, _ceil(top_k, int(config.get("topk_group") or groups))) if groups > 1 else 1
        least = max(self.demand.ep * self.demand.local, top_k + 1, groups * in_group)
        return min(experts, _up(least, lcm(self.demand.ep, groups)))

    def over_the_sequence(self) -> dict[str, int]:
        """Windows that the sequence passes, and tables of learned positions, shortened as the sequence is."""
        before, after = self.demand.before, self.demand.seq
        found: dict[str, int] = {}
        for key in self._has(WINDOWS):
            if 0 < self.values[key] < before:
                found[key] = max(after // 8, self.values[key] * after // before, 1)
        if self.learned:
            found |= {key: max(after, self.values[key] * after // before) for key in self._has(POSITIONS)}
        return found


def _unread(config: Mapping[str, Any], family: Family, before: Attention, now: Attention) -> dict[str, Any]:
    """Keys that no shape hangs on and that speak of heads and their features all the same."""
    found: dict[str, Any] = {}
    sizes = {
        "num_key_value_heads": (before.kv_heads, now.kv_heads),
        "qk_head_dim": (before.qk_head_dim, now.qk_head_dim),
        "head_dim": (before.rope_head_dim, now.rope_head_dim),
    }
    for key, (was, size) in sizes.items():
        if key not in family.keys and config.get(key) == was:
            found[key] = size
    turning = config.get("rotary_dim") or (ROTARY_DIM if family.name == "gptj" else 0)
    if turning:
        found["rotary_dim"] = min(turning, max(2, _up(turning * now.qk_head_dim // before.qk_head_dim, 2)))
    half = int(now.qk_head_dim * min((1.0, *_fractions(config)))) // 2
    for key in _TABLES:
        if isinstance(table := config.get(key), Mapping):
            found[key] = {k: v[:half] if k in _PER_FREQUENCY and isinstance(v, list) else v for k, v in table.items()}
    return found


def _attention(model: Model) -> Attention:
    """What the attention of all layers has in common."""
    found = [block.attention for block in model.blocks if block.attention is not None]
    if not found:
        raise AssertionError(f"{model.name} has no attention, which the rule runtime-ssm refuses")
    return found[0]


def _fractions(config: Mapping[str, Any]) -> tuple[float, ...]:
    """Shares of a head that turn with the position, wherever a config says them."""
    inner = [value for key in _TABLES if isinstance(value := config.get(key), Mapping)]
    inner += [value for table in inner for value in table.values() if isinstance(value, Mapping)]
    return tuple(float(table[key]) for table in (config, *inner) for key in FRACTIONS if table.get(key) is not None)


def _ceil(amount: int, over: int) -> int:
    return -(-amount // over)


def _up(amount: int, multiple: int) -> int:
    return _ceil(amount, multiple) * multiple
