"""Nemotron-H: each layer is one mixer behind one RMSNorm: Mamba-2 (M), attention (*), network (-) or experts (E).

Networks and experts are squared-ReLU without a gate. The library's own class now calls the trunk `model`; the names
here are those of the checkpoints, `backbone`. The router bias `e_score_correction_bias` is a buffer and not counted.
"""

from __future__ import annotations

from trainledger.facts.families.common import (
    attention,
    blocks_of,
    embedding,
    linear,
    mamba2,
    norm,
    plain_mlp,
    read_heads,
    stack,
)
from trainledger.facts.families.experts import check_top_k, router
from trainledger.facts.families.keys import Family, Key, Parts, Values, names, one_of
from trainledger.facts.model import Block, Mlp, Moe, Ssm, Tensor

_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_WORDS = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}
_DEFAULT = ("mamba", "moe", "attention", "mlp")
"""What NemotronHConfig takes when the config gives no layers."""


def _kinds(values: Values) -> tuple[str, ...]:
    pattern, words = values.items["hybrid_override_pattern"], values.words("layers_block_type")
    kinds = _DEFAULT
    if words is not None:
        one_of(values, "layers_block_type", words, tuple(_WORDS))
        kinds = tuple(_WORDS[word] for word in words)
    if pattern is not None:
        one_of(values, "hybrid_override_pattern", pattern, tuple(_LETTERS))
        from_pattern = tuple(_LETTERS[letter] for letter in pattern)
        if words is not None and from_pattern != kinds:
            raise values.refuse(
                "hybrid_override_pattern",
                "layers_block_type lists other layers",
                "remove one with --set hybrid_override_pattern=null",
            )
        kinds = from_pattern
    count = values.maybe("num_hidden_layers")
    if not kinds or (count is not None and count != len(kinds)):
        raise values.refuse(
            "num_hidden_layers",
            f"the layers are those of the pattern, which has {len(kinds)}",
            "--set hybrid_override_pattern=... with a letter of M*-E for each layer",
        )
    return kinds


def _ssm(values: Values) -> Ssm:
    return Ssm(
        heads=values.dim("mamba_num_heads"),
        head_dim=values.dim("mamba_head_dim"),
        groups=values.dim("n_groups"),
        state=values.dim("ssm_state_size"),
        conv_kernel=values.dim("conv_kernel"),
    )


def _experts(values: Values, hidden: int, bias: bool) -> tuple[tuple[Tensor, ...], Moe]:
    experts, width = values.dim("n_routed_experts"), values.dim("moe_intermediate_size")
    shared, latent = values.dim("moe_shared_expert_intermediate_size"), values.maybe("moe_latent_size")
    base = "mixer.experts.{e}"
    tensors = (
        *plain_mlp(f"{base}.up_proj", f"{base}.down_proj", latent or hidden, width, role="expert", copies=experts),
        *router("mixer.gate", experts, hidden),
        *plain_mlp(
            "mixer.shared_experts.up_proj",
            "mixer.shared_experts.down_proj",
            hidden,
            shared,
            bias=bias,
            role="shared_expert",
        ),
    )
    if latent is not None:
        tensors += linear("mixer.fc1_latent_proj", latent, hidden, "shared_expert", bias=bias)
        tensors += linear("mixer.fc2_latent_proj", hidden, latent, "shared_expert", bias=bias)
    top_k = check_top_k(values, experts, "num_experts_per_tok")
    return tensors, Moe(experts=experts, top_k=top_k, intermediate=width, gated=False, shared_intermediate=shared)


def _block(values: Values, kind: str, at: tuple[int, ...]) -> Block:
    hidden = values.dim("hidden_size")
    first = norm("norm", hidden)
    bias = values.flag("mlp_bias")
    if kind == "mamba":
        ssm = _ssm(values)
        mixer = mamba2(
            "mixer",
            hidden,
            ssm,
            intermediate=ssm.heads * ssm.head_dim,
            bias=values.flag("use_bias"),
            conv_bias=values.flag("use_conv_bias"),
        )
        return Block(kind=kind, layers=at, tensors=(*first, *mixer), norms=1, ssm=ssm)
    if kind == "attention":
        heads = read_heads(values)
        return Block(
            kind=kind,
            layers=at,
            tensors=(*first, *attention("mixer", heads)),
            norms=1,
            attention=heads.attention(),
        )
    if kind == "mlp":
        width = values.dim("intermediate_size")
        network = plain_mlp("mixer.up_proj", "mixer.down_proj", hidden, width, bias=bias)
        return Block(
            kind=kind, layers=at, tensors=(*first, *network), norms=1, mlp=Mlp(intermediate=width, gated=False)
        )
    network, moe = _experts(values, hidden, bias)
    return Block(kind=kind, layers=at, tensors=(*first, *network), norms=1, moe=moe)


def build(values: Values) -> Parts:
    """Blocks of a Nemotron-H, one for each letter that the pattern uses."""
    hidden = values.dim("hidden_size")
    depths = values.maybe("num_nextn_predict_layers") or 0
    return stack(
        values,
        blocks_of(_kinds(values), lambda kind, at: _block(values, kind, at)),
        prefix="backbone.layers.{i}.",
        first=embedding("backbone.embeddings", values.dim("vocab_size"), hidden),
        last=norm("backbone.norm_f", hidden),
        notes=(f"{depths} multi-token-prediction depth(s) in the config are not modelled for this family",)
        if depths
        else (),
    )


FAMILIES = (
    Family(
        name="nemotron_h",
        config_class="NemotronHConfig",
        architectures=("NemotronHForCausalLM",),
        keys={
            "vocab_size": Key(131072),
            "hidden_size": Key(4096),
            "num_hidden_layers": Key(None, nullable=True),
            "hybrid_override_pattern": Key(None, "text", nullable=True),
            "layers_block_type": Key(None, "words", nullable=True, aliases=("layer_types",)),
            "num_attention_heads": Key(32),
            "num_key_value_heads": Key(8, nullable=True),
            "head_dim": Key(128, aliases=("attention_head_dim",)),
            "max_position_embeddings": Key(None, nullable=True),
            "intermediate_size": Key(21504),
            "mlp_bias": Key(False, "flag"),
            "ssm_state_size": Key(128),
            "mamba_num_heads": Key(128),
            "mamba_head_dim": Key(64),
            "n_groups": Key(8, aliases=("mamba_n_groups",)),
            "conv_kernel": Key(4, aliases=("mamba_d_conv",)),
            "use_bias": Key(False, "flag"),
            "use_conv_bias": Key(True, "flag", aliases=("mamba_conv_bias",)),
            "n_routed_experts": Key(8, aliases=("num_local_experts",)),
            "num_experts_per_tok": Key(2),
            "moe_intermediate_size": Key(7688),
            "moe_shared_expert_intermediate_size": Key(7688),
            "moe_latent_size": Key(None, nullable=True),
            "num_nextn_predict_layers": Key(0, "count", nullable=True),
        },
        build=build,
        ignored=names(
            "chunk_size expand mamba_hidden_act mlp_hidden_act mamba_proj_bias mamba_ssm_cache_dtype mamba_dt_max "
            "mamba_dt_min mamba_dt_limit mamba_dt_init_floor mamba_expand mamba_chunk_size moe_shared_expert_overlap "
            "mtp_layers_block_type mtp_hybrid_override_pattern n_group n_shared_experts norm_topk_prob "
            "output_router_logits rescale_prenorm_residual residual_in_fp32 routed_scaling_factor ssm_conv_bias "
            "time_step_floor time_step_limit time_step_max time_step_min time_step_rank topk_group "
            "use_mamba_kernels use_mem_eff_path num_query_groups"
        ),
        # the published modeling file and the library's class disagree on these unless they are off
        fixed={"attention_bias": (False,), "sliding_window": (None,), "tie_word_embeddings": (False,)},
    ),
)
