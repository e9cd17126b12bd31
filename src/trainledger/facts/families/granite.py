"""Granite's mixtures of experts, and Granite 4: layers of attention or of Mamba-2, each before experts or a network.

The state dict stacks the experts of a layer, `[experts, out, in]`, gate and up in one tensor; the shared network has
them in one matrix too. GraniteMoeHybrid without experts keeps that network alone. Multipliers of embeddings, residuals,
scores and logits change no shape.
"""

from __future__ import annotations

from trainledger.facts.families.common import (
    DECODER_KEYS,
    attention,
    blocks_of,
    check_length,
    linear,
    mamba2,
    norm,
    read_heads,
    stack,
)
from trainledger.facts.families.experts import check_top_k, router
from trainledger.facts.families.keys import Family, Key, Parts, Values, keys, names, one_of
from trainledger.facts.model import Block, Mlp, Moe, Role, Ssm, Tensor


def _stacked(name: str, out_features: int, in_features: int, copies: int, tp_dim: int) -> Tensor:
    """One expert's slice of a stack."""
    shape, base = (out_features, in_features), "block_sparse_moe"
    return Tensor(name=f"{base}.{name}", shape=shape, role="expert", tp_dim=tp_dim, copies=copies, linear=True)


def _experts(values: Values, hidden: int) -> tuple[tuple[Tensor, ...], Moe]:
    experts, width = values.dim("num_local_experts"), values.dim("intermediate_size")
    tensors = (
        *router("block_sparse_moe.router.layer", experts, hidden),
        _stacked("input_linear.weight", 2 * width, hidden, experts, 0),
        _stacked("output_linear.weight", hidden, width, experts, 1),
    )
    top_k = check_top_k(values, experts, "num_experts_per_tok")
    shared = values.maybe("shared_intermediate_size") or 0
    return tensors, Moe(experts=experts, top_k=top_k, intermediate=width, gated=True, shared_intermediate=shared)


def _shared(hidden: int, width: int, role: Role) -> tuple[Tensor, ...]:
    return (
        *linear("shared_mlp.input_linear", 2 * width, hidden, role, tp_dim=0, tp_units=width),
        *linear("shared_mlp.output_linear", hidden, width, role, tp_dim=1),
    )


def mamba_sizes(values: Values, width: int) -> Ssm:
    """A Mamba-2 mixer of this width from the keys that begin with mamba_; the size of its heads may be "auto"."""
    heads, given = values.dim("mamba_n_heads"), values.items["mamba_d_head"]
    if width % heads:
        raise values.refuse("mamba_n_heads", f"it must divide the mixer's width, {width}", "--set mamba_n_heads=N")
    if given not in ("auto", width // heads):
        rule = f'the mixer is {width} wide, which makes {width // heads} of each of {heads} heads, or "auto"'
        raise values.refuse("mamba_d_head", rule, "--set mamba_d_head=auto")
    return Ssm(
        heads=heads,
        head_dim=width // heads,
        groups=values.dim("mamba_n_groups"),
        state=values.dim("mamba_d_state"),
        conv_kernel=values.dim("mamba_d_conv"),
    )


def _mixers(values: Values, layers: int) -> tuple[str, ...]:
    """What each layer mixes tokens with: "mamba" or "attention"."""
    words = {"mamba": "mamba", "linear_attention": "mamba", "attention": "attention", "full_attention": "attention"}
    given = values.words("layer_types")
    if "layer_types" not in values.items:
        return ("attention",) * layers
    if given is None:
        return ("mamba",) * layers
    check_length(values, "layer_types", len(given), layers)
    one_of(values, "layer_types", given, tuple(words))
    return tuple(words[word] for word in given)


def build(values: Values) -> Parts:
    """Blocks of a Granite with experts: those of attention and those of Mamba-2, if it has both."""
    heads = read_heads(values)
    hidden, bias = heads.hidden, values.flag("attention_bias")
    shared = values.maybe("shared_intermediate_size") or 0
    routed = values.items["num_local_experts"] > 0

    def block(mixer: str, at: tuple[int, ...]) -> Block:
        moe, mlp, network = None, None, ()
        if routed:
            network, moe = _experts(values, hidden)
        else:
            mlp = Mlp(intermediate=shared, gated=True)
        ssm = mamba_sizes(values, values.dim("mamba_expand") * hidden) if mixer == "mamba" else None
        if ssm is None:
            mixing = attention("self_attn", heads, qkv_bias=bias, out_bias=bias)
        else:
            mixing = mamba2(
                "mamba",
                hidden,
                ssm,
                intermediate=ssm.heads * ssm.head_dim,
                bias=values.flag("mamba_proj_bias"),
                conv_bias=values.flag("mamba_conv_bias"),
            )
        own = _shared(hidden, shared, "shared_expert" if routed else "mlp") if shared else ()
        norms = (*norm("input_layernorm", hidden), *norm("post_attention_layernorm", hidden))
        return Block(
            kind=f"{'moe' if routed else 'dense'}{'' if ssm is None else '-mamba'}",
            layers=at,
            tensors=_ordered(values, mixing, norms, network, own),
            norms=2,
            attention=heads.attention() if ssm is None else None,
            ssm=ssm,
            mlp=mlp,
            moe=moe,
        )

    return stack(values, blocks_of(_mixers(values, values.dim("num_hidden_layers")), block))


def _ordered(
    values: Values,
    mixing: tuple[Tensor, ...],
    norms: tuple[Tensor, ...],
    network: tuple[Tensor, ...],
    shared: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    """In the order in which the class registers them."""
    if values.family.name == "granitemoehybrid":
        return (*norms, *network, *shared, *mixing)
    return (*mixing, *norms, *network, *shared)


_KEYS = keys(
    DECODER_KEYS,
    attention_bias=Key(False, "flag"),
    num_local_experts=Key(8),
    num_experts_per_tok=Key(2),
)

_IGNORED = names(
    "attention_multiplier embedding_multiplier logits_scaling normalization_function position_embedding_type "
    "output_router_logits residual_multiplier router_aux_loss_coef init_method"
)

FAMILIES = (
    Family(
        name="granitemoe",
        config_class="GraniteMoeConfig",
        architectures=("GraniteMoeForCausalLM",),
        keys=_KEYS,
        build=build,
        ignored=_IGNORED,
    ),
    Family(
        name="granitemoeshared",
        config_class="GraniteMoeSharedConfig",
        architectures=("GraniteMoeSharedForCausalLM",),
        keys=keys(_KEYS, shared_intermediate_size=Key(0, "count")),
        build=build,
        ignored=_IGNORED,
    ),
    Family(
        name="granitemoehybrid",
        config_class="GraniteMoeHybridConfig",
        architectures=("GraniteMoeHybridForCausalLM",),
        keys=keys(
            _KEYS,
            num_local_experts=Key(8, "count"),
            num_experts_per_tok=Key(2, "count"),
            shared_intermediate_size=Key(1024),
            layer_types=Key(None, "words", nullable=True, aliases=("layers_block_type",)),
            mamba_n_heads=Key(128),
            mamba_n_groups=Key(1),
            mamba_d_state=Key(256),
            mamba_d_conv=Key(4),
            mamba_d_head=Key("auto", "dim or text"),
            mamba_expand=Key(2),
            mamba_conv_bias=Key(True, "flag"),
            mamba_proj_bias=Key(False, "flag"),
        ),
        build=build,
        ignored=_IGNORED | names("mamba_chunk_size time_step_limit"),
    ),
)
