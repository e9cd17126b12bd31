"""Llama and the families that keep its block.

RMSNorm, attention with separate projections, RMSNorm, SwiGLU. Mistral has no biases and a sliding window that its
config class sets unless the config says null; Granite only multiplies activations by constants; Ernie 4.5 has one
switch for all biases, Seed-OSS one of its own for the output projection's; SmolLM3 leaves out rotary embeddings in some
layers, which may slide; Hunyuan normalises heads of q and k after they are turned.
"""

from __future__ import annotations

from trainledger.facts.families.common import (
    DECODER_KEYS,
    attention,
    blocks_of,
    check_length,
    gated_mlp,
    label,
    norm,
    read_heads,
    stack,
    windows,
)
from trainledger.facts.families.keys import Family, Key, Parts, Values, keys, names
from trainledger.facts.model import Block, Mlp, Tensor


def build(values: Values) -> Parts:
    """Blocks of a Llama; a key that the family does not read counts as false or null."""
    window = values.maybe("sliding_window") or None
    return _build(values, (window,) * values.dim("num_hidden_layers"))


def _build(values: Values, kinds: tuple[int | None, ...], *, head_norms: tuple[str, ...] = ()) -> Parts:
    heads = read_heads(values)
    width = values.dim("intermediate_size")
    bias = values.flag("attention_bias") or values.flag("use_bias")
    out_bias = values.flag("attention_out_bias") if "attention_out_bias" in values.items else bias
    mlp_bias = values.flag("mlp_bias") or values.flag("use_bias")
    norms: tuple[Tensor, ...] = tuple(tensor for name in head_norms for tensor in norm(name, heads.head_dim))

    def block(window: int | None, layers: tuple[int, ...]) -> Block:
        return Block(
            kind=label("dense", window),
            layers=layers,
            tensors=(
                *attention("self_attn", heads, qkv_bias=bias, out_bias=out_bias),
                *norms,
                *gated_mlp("mlp", heads.hidden, width, bias=mlp_bias),
                *norm("input_layernorm", heads.hidden),
                *norm("post_attention_layernorm", heads.hidden),
            ),
            norms=2,
            attention=heads.attention(window=window, qk_norm=bool(norms)),
            mlp=Mlp(intermediate=width, gated=True),
        )

    return stack(values, blocks_of(kinds, block))


def _smollm3(values: Values) -> Parts:
    """The layers without rotary embeddings slide, where any do."""
    layers, every = values.dim("num_hidden_layers"), values.dim("no_rope_layer_interval")
    rotary = values.counts("no_rope_layers") or tuple(int((index + 1) % every != 0) for index in range(layers))
    check_length(values, "no_rope_layers", len(rotary), layers)
    used = values.flag("use_sliding_window")
    return _build(values, windows(values, layers, lambda index: not rotary[index], used=used))


def _internlm3(values: Values) -> Parts:
    if values.flag("attention_bias") != values.flag("mlp_bias"):
        knob = "give qkv_bias and bias the same value"
        raise values.refuse("attention_bias", "InternLM3Config takes the same for mlp_bias alone", knob)
    return build(values)


def _hunyuan(values: Values) -> Parts:
    kinds = (None,) * values.dim("num_hidden_layers")
    return _build(values, kinds, head_norms=("self_attn.query_layernorm", "self_attn.key_layernorm"))


_BIASES = {"attention_bias": Key(False, "flag"), "mlp_bias": Key(False, "flag")}

FAMILIES = (
    Family(
        name="llama",
        config_class="LlamaConfig",
        architectures=("LlamaForCausalLM",),
        keys=keys(DECODER_KEYS, **_BIASES),
        build=build,
    ),
    Family(
        name="mistral",
        config_class="MistralConfig",
        architectures=("MistralForCausalLM",),
        keys=keys(
            DECODER_KEYS,
            intermediate_size=14336,
            num_key_value_heads=8,
            sliding_window=Key(4096, "count", nullable=True),
        ),
        build=build,
        fixed={"attention_bias": (False,), "mlp_bias": (False,)},
    ),
    Family(
        name="granite",
        config_class="GraniteConfig",
        architectures=("GraniteForCausalLM",),
        keys=keys(DECODER_KEYS, **_BIASES),
        build=build,
        ignored=names("embedding_multiplier logits_scaling residual_multiplier attention_multiplier"),
    ),
    Family(
        name="ministral3",
        config_class="Ministral3Config",
        architectures=("Ministral3ForCausalLM",),
        keys=keys(
            DECODER_KEYS,
            vocab_size=131072,
            intermediate_size=14336,
            num_hidden_layers=34,
            num_key_value_heads=8,
            head_dim=128,
            sliding_window=Key(None, "count", nullable=True),
        ),
        build=build,
        fixed={"attention_bias": (False,), "mlp_bias": (False,)},
    ),
    Family(
        name="internlm3",
        config_class="InternLM3Config",
        architectures=("InternLM3ForCausalLM",),
        keys=keys(
            DECODER_KEYS,
            vocab_size=128512,
            intermediate_size=10240,
            num_hidden_layers=48,
            num_key_value_heads=2,
            head_dim=128,
            attention_bias=Key(False, "flag", aliases=("qkv_bias",)),
            mlp_bias=Key(False, "flag", aliases=("bias",)),
        ),
        build=_internlm3,
    ),
    Family(
        name="ernie4_5",
        config_class="Ernie4_5Config",
        architectures=("Ernie4_5ForCausalLM",),
        keys=keys(
            DECODER_KEYS,
            vocab_size=103424,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=18,
            num_attention_heads=16,
            num_key_value_heads=2,
            head_dim=128,
            tie_word_embeddings=True,
            use_bias=Key(False, "flag"),
        ),
        build=build,
    ),
    Family(
        name="seed_oss",
        config_class="SeedOssConfig",
        architectures=("SeedOssForCausalLM",),
        keys=keys(
            DECODER_KEYS,
            vocab_size=155136,
            intermediate_size=27648,
            num_hidden_layers=64,
            num_attention_heads=80,
            num_key_value_heads=8,
            head_dim=128,
            attention_bias=Key(True, "flag"),
            attention_out_bias=Key(False, "flag"),
            mlp_bias=Key(False, "flag"),
        ),
        build=build,
    ),
    Family(
        name="smollm3",
        config_class="SmolLM3Config",
        architectures=("SmolLM3ForCausalLM",),
        keys=keys(
            DECODER_KEYS,
            vocab_size=128256,
            hidden_size=2048,
            num_hidden_layers=36,
            num_attention_heads=16,
            num_key_value_heads=4,
            tie_word_embeddings=True,
            use_sliding_window=Key(False, "flag"),
            sliding_window=Key(None, "count", nullable=True),
            no_rope_layers=Key(None, "counts", nullable=True),
            no_rope_layer_interval=Key(4),
            layer_types=Key(None, "words", nullable=True),
            **_BIASES,
        ),
        build=_smollm3,
        ignored=names("max_window_layers"),
    ),
    Family(
        name="hunyuan_v1_dense",
        config_class="HunYuanDenseV1Config",
        architectures=("HunYuanDenseV1ForCausalLM",),
        keys=keys(DECODER_KEYS, vocab_size=290943, attention_bias=Key(False, "flag")),
        build=_hunyuan,
        ignored=names(
            "add_classification_head attention_head_dim cla_share_factor class_num dense_list eod_token_id im_end_id "
            "im_newline_id im_start_id mask_init_id norm_type org_vocab_size pad_id pool_type text_end_id "
            "text_start_id use_rotary_pos_emb"
        ),
        fixed={"mlp_bias": (False,), "use_cla": (False,), "use_qk_norm": (True,)},
    ),
)
