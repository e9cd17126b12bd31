"""DeepSeek-V2, V3 and V3.2: latent attention, dense layers, routed experts. Kimi K2 is V3; GLM has two of its shapes.

Latent attention (MLA): q through a rank `q_lora_rank` (null: one full matrix), k and v through a rank `kv_lora_rank`
with one rotary key for all heads. The down-projections and their norms are whole on every TP rank, the up-projections
are cut by heads. V3's router bias `e_score_correction_bias` is a buffer and is not counted. V3's checkpoint holds
multi-token-prediction layers after the last one: `Model.mtp`.

V3.2 and GLM-5 choose the keys of each query with an indexer of its own weights, which some layers of a GLM-5.2 borrow
from a layer before them. What it keeps for the backward depends on how it is trained, and is not accounted for.
"""

from __future__ import annotations

import msgspec

from trainledger.facts.families.common import DECODER_KEYS, blocks_of, check_length, gated_mlp, linear, norm, stack
from trainledger.facts.families.experts import experts_beside_shared, mtp_block
from trainledger.facts.families.keys import Family, Key, Parts, Values, keys, names, one_of, without
from trainledger.facts.model import Attention, Block, Mlp, Tensor


def _attention(values: Values, hidden: int) -> tuple[tuple[Tensor, ...], Attention]:
    heads, bias = values.dim("num_attention_heads"), values.flag("attention_bias")
    nope, rope, value = values.dim("qk_nope_head_dim"), values.dim("qk_rope_head_dim"), values.dim("v_head_dim")
    q_rank, kv_rank = values.maybe("q_lora_rank"), values.dim("kv_lora_rank")
    if q_rank is None:
        query = linear("self_attn.q_proj", heads * (nope + rope), hidden, "attention", tp_dim=0, tp_units=heads)
    else:
        query = (
            *linear("self_attn.q_a_proj", q_rank, hidden, "attention", bias=bias),
            *norm("self_attn.q_a_layernorm", q_rank),
            *linear("self_attn.q_b_proj", heads * (nope + rope), q_rank, "attention", tp_dim=0, tp_units=heads),
        )
    tensors = (
        *query,
        *linear("self_attn.kv_a_proj_with_mqa", kv_rank + rope, hidden, "attention", bias=bias),
        *norm("self_attn.kv_a_layernorm", kv_rank),
        *linear("self_attn.kv_b_proj", heads * (nope + value), kv_rank, "attention", tp_dim=0, tp_units=heads),
        *linear("self_attn.o_proj", hidden, heads * value, "attention", bias=bias, tp_dim=1, tp_units=heads),
    )
    return tensors, Attention(
        heads=heads,
        kv_heads=heads,
        qk_head_dim=nope + rope,
        v_head_dim=value,
        kind="mla",
        q_lora_rank=q_rank or 0,
        kv_lora_rank=kv_rank,
        rope_head_dim=rope,
    )


SPARSE = "layers of sparse attention with an indexer"
"""What `Model.unaccounted` calls the attention of DeepSeek-V3.2."""


def _indexer(values: Values, hidden: int) -> tuple[Tensor, ...]:
    heads, width, q_rank = values.dim("index_n_heads"), values.dim("index_head_dim"), values.dim("q_lora_rank")
    return (
        *linear("self_attn.indexer.wq_b", heads * width, q_rank, "attention"),
        *linear("self_attn.indexer.wk", width, hidden, "attention"),
        *norm("self_attn.indexer.k_norm", width, bias=True),
        *linear("self_attn.indexer.weights_proj", heads, hidden, "attention"),
    )


def _sparse(values: Values) -> Parts:
    """DeepSeek-V3.2: an indexer in every layer that does not borrow what one before it has chosen."""
    layers = values.dim("num_hidden_layers")
    own = [word == "full" for word in _indexers(values, layers)]
    parts = _build(values, _routed_layers(values, layers), own)
    return msgspec.structs.replace(parts, unaccounted=(SPARSE,))


def _indexers(values: Values, layers: int) -> tuple[str, ...]:
    """Whether each layer is "full" or "shared": listed, as letters, or by a period behind an offset."""
    words, pattern = values.words("indexer_types"), values.items.get("index_topk_pattern")
    if words is None and pattern is not None:
        one_of(values, "index_topk_pattern", pattern, ("F", "S"))
        words = tuple({"F": "full", "S": "shared"}[letter] for letter in pattern)
        check_length(values, "index_topk_pattern", len(words), layers)
    if words is None:
        every, offset = values.maybe("index_topk_freq") or 1, values.maybe("index_skip_topk_offset")
        start = 2 if offset is None else offset
        words = tuple("full" if max(i - start + 1, 0) % every == 0 else "shared" for i in range(layers))
    check_length(values, "indexer_types", len(words), layers)
    one_of(values, "indexer_types", words, ("full", "shared"))
    return words


def _routed_layers(values: Values, layers: int) -> list[bool]:
    """Which layers have routed experts: those that `mlp_layer_types` names, else all behind the first dense ones."""
    words = values.words("mlp_layer_types")
    if words is None:
        dense = values.maybe("first_k_dense_replace") or 0
        return [index >= dense for index in range(layers)]
    check_length(values, "mlp_layer_types", len(words), layers)
    one_of(values, "mlp_layer_types", words, ("dense", "sparse"))
    return [word == "sparse" for word in words]


def build(values: Values) -> Parts:
    """Blocks of a DeepSeek: the first `first_k_dense_replace` layers dense, the rest routed."""
    return _build(values, _routed_layers(values, values.dim("num_hidden_layers")))


def _flash(values: Values) -> Parts:
    """The first layer is dense, unless the config names the network of each."""
    layers, words = values.dim("num_hidden_layers"), values.words("mlp_layer_types")
    return _build(values, [i > 0 for i in range(layers)] if words is None else _routed_layers(values, layers))


def _build(values: Values, routed_layers: list[bool], indexers: list[bool] | None = None) -> Parts:
    """`indexers`: which layers have one of their own; None: it is no model with sparse attention."""
    hidden, layers = values.dim("hidden_size"), len(routed_layers)
    width = values.dim("intermediate_size")
    mlp_bias = values.flag("mlp_bias")
    projections, mla = _attention(values, hidden)

    def block(kind: tuple[bool, bool], at: tuple[int, ...]) -> Block:
        (routed, indexed), moe = kind, None
        if routed:
            network, moe = experts_beside_shared(values, hidden, bias=mlp_bias)
        else:
            network = gated_mlp("mlp", hidden, width, bias=mlp_bias)
        return Block(
            kind=("moe" if routed else "dense") + ("" if indexed or indexers is None else "-borrowing"),
            layers=at,
            tensors=(
                *projections,
                *(_indexer(values, hidden) if indexed else ()),
                *network,
                *norm("input_layernorm", hidden),
                *norm("post_attention_layernorm", hidden),
            ),
            norms=2,
            attention=mla,
            mlp=None if routed else Mlp(intermediate=width, gated=True),
            moe=moe,
        )

    depths = values.maybe("num_nextn_predict_layers") or 0
    blocks = blocks_of(list(zip(routed_layers, indexers or [False] * layers, strict=True)), block)
    mtp = mtp_block(blocks[-1], hidden, layers) if depths else None
    return stack(values, blocks, mtp=mtp, mtp_depths=depths)


_KEYS = keys(
    without(DECODER_KEYS, "num_key_value_heads", "head_dim"),
    vocab_size=102400,
    attention_bias=Key(False, "flag"),
    first_k_dense_replace=Key(0, "count", nullable=True),
    kv_lora_rank=Key(512),
    q_lora_rank=Key(1536, nullable=True),
    qk_nope_head_dim=Key(128),
    qk_rope_head_dim=Key(64),
    v_head_dim=Key(128),
    n_routed_experts=Key(64, aliases=("num_experts",)),
    n_shared_experts=Key(2, "count", nullable=True),
    num_experts_per_tok=Key(None, nullable=True),
    moe_intermediate_size=Key(1407),
)

_IGNORED = names(
    "num_key_value_heads head_dim qk_head_dim n_group topk_group topk_method norm_topk_prob routed_scaling_factor "
    "scoring_func aux_loss_alpha seq_aux ep_size output_router_logits router_aux_loss_coef "
)

# The published modeling files skip layers by moe_layer_freq; the library's classes do not: only 1 is the same in both.
_FIXED: dict[str, tuple[object, ...]] = {"moe_layer_freq": (1,)}

_SPARSE_KEYS = keys(
    _KEYS,
    n_shared_experts=1,
    n_routed_experts=Key(256, aliases=("num_local_experts", "num_experts")),
    num_experts_per_tok=8,
    moe_intermediate_size=2048,
    first_k_dense_replace=3,
    mlp_layer_types=Key(None, "words", nullable=True),
    index_head_dim=Key(128),
    index_n_heads=Key(64),
    num_nextn_predict_layers=Key(None, "count", nullable=True, aliases=("num_mtp_layers",)),
)

_INDEXED = names("index_topk index_share_for_mtp_iteration indexer_rope_interleave layer_types moe_router_dtype")

FAMILIES = (
    Family(
        name="deepseek_v2",
        config_class="DeepseekV2Config",
        architectures=("DeepseekV2ForCausalLM",),
        keys=keys(_KEYS, mlp_bias=Key(False, "flag")),
        build=build,
        ignored=_IGNORED,
        fixed=_FIXED,
    ),
    Family(
        name="deepseek_v3",
        config_class="DeepseekV3Config",
        architectures=("DeepseekV3ForCausalLM",),
        model_types=("kimi_k2",),
        keys=keys(
            _KEYS,
            vocab_size=129280,
            hidden_size=7168,
            intermediate_size=18432,
            moe_intermediate_size=2048,
            num_hidden_layers=61,
            num_attention_heads=128,
            n_shared_experts=1,
            n_routed_experts=Key(256, aliases=("num_local_experts",)),
            num_experts_per_tok=8,
            first_k_dense_replace=3,
            num_nextn_predict_layers=Key(1, "count", nullable=True, aliases=("num_mtp_layers",)),
        ),
        build=build,
        ignored=_IGNORED,
        fixed={**_FIXED, "mlp_bias": (False,)},
    ),
    Family(
        name="deepseek_v32",
        config_class="DeepseekV32Config",
        architectures=("DeepseekV32ForCausalLM",),
        keys=keys(
            _SPARSE_KEYS,
            vocab_size=129280,
            hidden_size=7168,
            intermediate_size=18432,
            num_hidden_layers=61,
            num_attention_heads=128,
            index_n_heads=64,
        ),
        build=_sparse,
        ignored=_IGNORED | _INDEXED,
        fixed={**_FIXED, "mlp_bias": (False,)},
    ),
    Family(
        name="glm_moe_dsa",
        config_class="GlmMoeDsaConfig",
        architectures=("GlmMoeDsaForCausalLM",),
        keys=keys(
            _SPARSE_KEYS,
            vocab_size=154880,
            hidden_size=6144,
            intermediate_size=12288,
            num_hidden_layers=78,
            num_attention_heads=64,
            q_lora_rank=2048,
            qk_nope_head_dim=192,
            v_head_dim=256,
            index_n_heads=32,
            indexer_types=Key(None, "words", nullable=True),
            index_topk_pattern=Key(None, "text", nullable=True),
            index_topk_freq=Key(None, nullable=True),
            index_skip_topk_offset=Key(None, "count", nullable=True),
        ),
        build=_sparse,
        ignored=_IGNORED | _INDEXED,
        fixed={**_FIXED, "mlp_bias": (False,)},
    ),
    Family(
        name="glm4_moe_lite",
        config_class="Glm4MoeLiteConfig",
        architectures=("Glm4MoeLiteForCausalLM",),
        keys=keys(
            without(_KEYS, "first_k_dense_replace"),
            vocab_size=154880,
            hidden_size=2048,
            intermediate_size=10240,
            moe_intermediate_size=1536,
            num_hidden_layers=47,
            num_attention_heads=20,
            n_shared_experts=1,
            n_routed_experts=Key(64, aliases=("num_local_experts",)),
            num_experts_per_tok=4,
            q_lora_rank=768,
            qk_nope_head_dim=192,
            v_head_dim=256,
            mlp_layer_types=Key(None, "words", nullable=True),
            num_nextn_predict_layers=Key(None, "count", nullable=True),
        ),
        build=_flash,
        ignored=_IGNORED,
        fixed={**_FIXED, "mlp_bias": (False,), "first_k_dense_replace": (1,)},
    ),
)
