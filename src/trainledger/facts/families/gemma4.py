"""The text decoder of Gemma 4: heads twice as wide in layers that see everything, where keys may stand for values.

The last `num_kv_shared_layers` layers borrow k and v, and may have networks twice as wide. A small one has embeddings
for each layer, as Gemma 3n has; a mixture of experts runs its experts beside the network. `layer_scalar` is a buffer
and is not counted. What layers keep whose keys are values, or borrowed, is not accounted for.
"""

from __future__ import annotations

from typing import NamedTuple

from trainledger.facts.families.common import (
    DECODER_KEYS,
    Heads,
    attention,
    blocks_of,
    check_length,
    embedding,
    gated_mlp,
    linear,
    norm,
    positions,
    stack,
)
from trainledger.facts.families.experts import check_top_k
from trainledger.facts.families.keys import Family, Key, Parts, Values, keys, names, one_of
from trainledger.facts.model import Block, Mlp, Moe, Tensor

SHARING = "layers whose keys are values or borrowed"
"""What `Model.unaccounted` calls them."""
_PERIOD = 6
"""By default every sixth layer sees everything."""


class _Kind(NamedTuple):
    """Whether a layer sees everything, and whether it borrows k and v."""

    full: bool
    borrows: bool


def _kinds(values: Values, layers: int) -> list[_Kind]:
    """The last layer sees everything, whatever the list says."""
    given, own = values.words("layer_types"), layers - values.items["num_kv_shared_layers"]
    words = tuple("sliding_attention" if (i + 1) % _PERIOD else "full_attention" for i in range(layers))
    if given is not None:
        check_length(values, "layer_types", len(given), layers)
        one_of(values, "layer_types", given, ("full_attention", "sliding_attention"))
        words = given
    return [_Kind(word == "full_attention" or i == layers - 1, i >= own) for i, word in enumerate(words)]


def _heads(values: Values, *, full: bool) -> Heads:
    heads, kv = values.dim("num_attention_heads"), values.dim("num_key_value_heads")
    fewer = values.maybe("num_global_key_value_heads") if full and values.flag("attention_k_eq_v") else None
    width = values.dim("global_head_dim") if full else values.dim("head_dim")
    return Heads(values.dim("hidden_size"), heads, kv if fewer is None else fewer, width)


def _attention(values: Values, heads: Heads, kind: _Kind) -> tuple[Tensor, ...]:
    bias = values.flag("attention_bias")
    made = {letter: attention("self_attn", heads, qkv_bias=bias, out_bias=bias, order=letter) for letter in "qkvo"}
    query = (*made["q"], *norm("self_attn.q_norm", heads.head_dim))
    if kind.borrows:
        return (*query, *made["o"])
    value = () if kind.full and values.flag("attention_k_eq_v") else made["v"]
    return (*query, *norm("self_attn.k_norm", heads.head_dim), *made["k"], *value, *made["o"])


def _experts(values: Values, hidden: int, shared: int) -> tuple[tuple[Tensor, ...], Moe]:
    experts, width = values.dim("num_experts"), values.dim("moe_intermediate_size")
    top_k = check_top_k(values, experts, "top_k_experts")
    norms = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")
    tensors = (
        Tensor(name="router.scale", shape=(hidden,), role="router"),
        Tensor(name="router.per_expert_scale", shape=(experts,), role="router"),
        *linear("router.proj", experts, hidden, "router"),
        Tensor(
            name="experts.gate_up_proj", shape=(2 * width, hidden), role="expert", tp_dim=0, copies=experts, linear=True
        ),
        Tensor(name="experts.down_proj", shape=(hidden, width), role="expert", tp_dim=1, copies=experts, linear=True),
        *(tensor for name in norms for tensor in norm(name, hidden)),
    )
    return tensors, Moe(experts=experts, top_k=top_k, intermediate=width, gated=True, shared_intermediate=shared)


def _block(values: Values, kind: _Kind, at: tuple[int, ...]) -> Block:
    heads, own = _heads(values, full=kind.full), values.items["hidden_size_per_layer_input"]
    hidden, routed = heads.hidden, values.flag("enable_moe_block")
    width = values.dim("intermediate_size") * (2 if kind.borrows and values.flag("use_double_wide_mlp") else 1)
    experts, moe = _experts(values, hidden, width) if routed else ((), None)
    around = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    layered = (
        *linear("per_layer_input_gate", own, hidden, "mlp"),
        *linear("per_layer_projection", hidden, own, "mlp"),
        *norm("post_per_layer_input_norm", hidden),
    )
    words = ("moe" if routed else "dense", "full" if kind.full else "window", "borrowing" if kind.borrows else "")
    return Block(
        kind="-".join(word for word in words if word),
        layers=at,
        tensors=(
            *_attention(values, heads, kind),
            *gated_mlp("mlp", hidden, width, role="shared_expert" if routed else "mlp"),
            *(tensor for name in around for tensor in norm(name, hidden)),
            *(layered if own else ()),
            *experts,
        ),
        norms=4 + 3 * routed,
        attention=heads.attention(window=None if kind.full else values.maybe("sliding_window"), qk_norm=True),
        mlp=None if routed else Mlp(intermediate=width, gated=True),
        moe=moe,
    )


def build(values: Values) -> Parts:
    """Blocks of a Gemma 4: by what they see, and by whether k and v are borrowed."""
    hidden, layers = values.dim("hidden_size"), values.dim("num_hidden_layers")
    each = values.items["hidden_size_per_layer_input"]
    own = (
        *positions("model.embed_tokens_per_layer", values.dim("vocab_size_per_layer_input"), layers * each),
        *linear("model.per_layer_model_projection", layers * each, hidden, "mlp"),
        *norm("model.per_layer_projection_norm", each),
    )
    return stack(
        values,
        blocks_of(_kinds(values, layers), lambda kind, at: _block(values, kind, at)),
        first=(*embedding("model.embed_tokens", values.dim("vocab_size"), hidden), *(own if each else ())),
        unaccounted=(SHARING,),
    )


FAMILIES = (
    Family(
        name="gemma4_text",
        config_class="Gemma4TextConfig",
        architectures=("Gemma4ForCausalLM",),
        keys=keys(
            DECODER_KEYS,
            vocab_size=262144,
            hidden_size=2304,
            intermediate_size=9216,
            num_hidden_layers=30,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=256,
            tie_word_embeddings=True,
            attention_bias=Key(False, "flag"),
            attention_k_eq_v=Key(False, "flag"),
            global_head_dim=Key(512),
            num_global_key_value_heads=Key(None, nullable=True),
            sliding_window=Key(512, "count", nullable=True),
            layer_types=Key(None, "words", nullable=True),
            vocab_size_per_layer_input=Key(262144),
            hidden_size_per_layer_input=Key(256, "count"),
            num_kv_shared_layers=Key(0, "count"),
            use_double_wide_mlp=Key(False, "flag"),
            enable_moe_block=Key(False, "flag"),
            num_experts=Key(None, nullable=True),
            top_k_experts=Key(None, nullable=True),
            moe_intermediate_size=Key(None, nullable=True, aliases=("expert_intermediate_size",)),
        ),
        build=build,
        ignored=names("final_logit_softcapping use_bidirectional_attention"),
    ),
)
