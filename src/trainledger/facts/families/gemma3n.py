"""The text decoder of Gemma 3n: four residual streams that AltUp predicts and corrects, and embeddings for each layer.

The last `num_kv_shared_layers` layers borrow k and v from one before them. A second table has a vector for each layer
and token, which every block adds through a gate. The projections of the streams before the first block count as part of
the embedding, those behind the last one as part of the end. What a block of streams keeps is not accounted for.
"""

from __future__ import annotations

from trainledger.facts.families.common import (
    DECODER_KEYS,
    Heads,
    attention,
    blocks_of,
    embedding,
    gated_mlp,
    linear,
    norm,
    positions,
    read_heads,
    stack,
    windows,
)
from trainledger.facts.families.keys import Family, Key, Parts, Values, keys, names
from trainledger.facts.model import Block, Mlp, Tensor

STREAMS = "layers with several residual streams"
"""What `Model.unaccounted` calls them."""
_PERIOD = 5
"""By default every fifth layer sees everything."""


def _attention(heads: Heads, *, bias: bool, borrows: bool) -> tuple[Tensor, ...]:
    tensors = {letter: attention("self_attn", heads, qkv_bias=bias, out_bias=bias, order=letter) for letter in "qkvo"}
    query = (*tensors["q"], *norm("self_attn.q_norm", heads.head_dim))
    if borrows:
        return (*query, *tensors["o"])
    return (*query, *tensors["k"], *tensors["v"], *norm("self_attn.k_norm", heads.head_dim), *tensors["o"])


def _around(values: Values, hidden: int) -> tuple[Tensor, ...]:
    """What a block has beside attention and network: norms, streams, a low-rank path, its own embedding's gate."""
    streams, rank, own = (
        values.dim("altup_num_inputs"),
        values.dim("laurel_rank"),
        values.dim("hidden_size_per_layer_input"),
    )
    norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    return (
        *(tensor for name in norms for tensor in norm(name, hidden)),
        Tensor(name="altup.correct_output_scale", shape=(hidden,), role="norm"),
        *linear("altup.correction_coefs", streams, streams, "mlp"),
        *linear("altup.prediction_coefs", streams * streams, streams, "mlp"),
        *linear("altup.modality_router", streams, hidden, "mlp"),
        *norm("altup.router_norm", hidden),
        *linear("laurel.linear_left", rank, hidden, "mlp"),
        *linear("laurel.linear_right", hidden, rank, "mlp"),
        *norm("laurel.post_laurel_norm", hidden),
        *linear("per_layer_input_gate", own, hidden, "mlp"),
        *linear("per_layer_projection", hidden, own, "mlp"),
        *norm("post_per_layer_input_norm", hidden),
    )


def _stream_projections(name: str, streams: int, hidden: int) -> tuple[Tensor, ...]:
    return tuple(tensor for i in range(streams - 1) for tensor in linear(f"model.{name}.{i}", hidden, hidden, "mlp"))


def build(values: Values) -> Parts:
    """Blocks of a Gemma 3n: by width, by window, and by whether k and v are borrowed."""
    heads = read_heads(values)
    hidden, layers = heads.hidden, values.dim("num_hidden_layers")
    bias, around = values.flag("attention_bias"), _around(values, hidden)
    own = layers - values.items["num_kv_shared_layers"]
    if own < 1:
        raise values.refuse(
            "num_kv_shared_layers", f"some of the {layers} layers must have k and v", "--set num_kv_shared_layers=N"
        )
    sees = windows(values, layers, lambda index: (index + 1) % _PERIOD != 0)
    kinds = list(
        zip(values.each("intermediate_size", layers) or (), sees, (i >= own for i in range(layers)), strict=True)
    )

    def block(kind: tuple[int, int | None, bool], at: tuple[int, ...]) -> Block:
        width, window, borrows = kind
        tensors = (*_attention(heads, bias=bias, borrows=borrows), *gated_mlp("mlp", hidden, width), *around)
        words = (f"dense-{width}", "window" if window else "full", "borrowing" if borrows else "")
        return Block(
            kind="-".join(word for word in words if word),
            layers=at,
            tensors=tensors,
            norms=8,
            attention=heads.attention(window=window, qk_norm=True),
            mlp=Mlp(intermediate=width, gated=True),
        )

    streams, each = values.dim("altup_num_inputs"), values.dim("hidden_size_per_layer_input")
    return stack(
        values,
        blocks_of(kinds, block),
        first=(
            *embedding("model.embed_tokens", values.dim("vocab_size"), hidden),
            *positions("model.embed_tokens_per_layer", values.dim("vocab_size_per_layer_input"), layers * each),
            *linear("model.per_layer_model_projection", layers * each, hidden, "mlp"),
            *norm("model.per_layer_projection_norm", each),
            *_stream_projections("altup_projections", streams, hidden),
        ),
        last=(*_stream_projections("altup_unembed_projections", streams, hidden), *norm("model.norm", hidden)),
        unaccounted=(STREAMS,),
    )


FAMILIES = (
    Family(
        name="gemma3n_text",
        config_class="Gemma3nTextConfig",
        architectures=("Gemma3nForCausalLM",),
        keys=keys(
            DECODER_KEYS,
            vocab_size=262400,
            hidden_size=2048,
            intermediate_size=Key(16384, "dim or dims"),
            num_hidden_layers=35,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=256,
            tie_word_embeddings=True,
            attention_bias=Key(False, "flag"),
            sliding_window=Key(512, "count", nullable=True),
            layer_types=Key(None, "words", nullable=True),
            vocab_size_per_layer_input=Key(262144),
            hidden_size_per_layer_input=Key(256),
            altup_num_inputs=Key(4),
            laurel_rank=Key(64),
            num_kv_shared_layers=Key(15, "count"),
        ),
        build=build,
        ignored=names(
            "activation_sparsity_pattern altup_active_idx altup_coef_clip altup_correct_scale altup_lr_multiplier "
            "final_logit_softcapping query_pre_attn_scalar"
        ),
    ),
)
