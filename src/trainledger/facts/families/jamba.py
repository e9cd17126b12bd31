"""Jamba: Mamba-1 mixers with a layer of attention in each period, before a network or, in every second layer, experts.

A Mamba-1 mixer projects the state's B, C and time step out of its own width, with an RMSNorm over each. How TP cuts
it, and what it keeps for the backward, is not accounted for.
"""

from __future__ import annotations

from trainledger.facts.families.common import (
    DECODER_KEYS,
    attention,
    blocks_of,
    gated_mlp,
    linear,
    norm,
    read_heads,
    stack,
)
from trainledger.facts.families.experts import check_top_k, router
from trainledger.facts.families.keys import Family, Key, Parts, Values, keys, names, without
from trainledger.facts.model import Block, Mlp, Moe, Tensor

MAMBA1 = "Mamba-1 mixers"
"""What `Model.unaccounted` calls them."""
_CHANNELS_PER_STEP = 16
"""Of "auto": the rank of the time step is a sixteenth of the hidden size."""


def _mixer(values: Values, hidden: int) -> tuple[Tensor, ...]:
    width, state = values.dim("mamba_expand") * hidden, values.dim("mamba_d_state")
    given, base = values.items["mamba_dt_rank"], "mamba"
    if isinstance(given, str) and given != "auto":
        raise values.refuse("mamba_dt_rank", 'it takes a whole number or "auto"', "--set mamba_dt_rank=auto")
    rank = -(-hidden // _CHANNELS_PER_STEP) if isinstance(given, str) else int(given)
    bias = (Tensor(name=f"{base}.conv1d.bias", shape=(width,), role="ssm"),) if values.flag("mamba_conv_bias") else ()
    whole = values.flag("mamba_proj_bias")
    return (
        Tensor(name=f"{base}.A_log", shape=(width, state), role="ssm"),
        Tensor(name=f"{base}.D", shape=(width,), role="ssm"),
        Tensor(name=f"{base}.conv1d.weight", shape=(width, 1, values.dim("mamba_d_conv")), role="ssm"),
        *bias,
        *linear(f"{base}.in_proj", 2 * width, hidden, "ssm", bias=whole),
        *linear(f"{base}.x_proj", rank + 2 * state, width, "ssm"),
        *linear(f"{base}.dt_proj", width, rank, "ssm", bias=True),
        *linear(f"{base}.out_proj", hidden, width, "ssm", bias=whole),
        *norm(f"{base}.dt_layernorm", rank),
        *norm(f"{base}.b_layernorm", state),
        *norm(f"{base}.c_layernorm", state),
    )


def _experts(values: Values, hidden: int, width: int) -> tuple[tuple[Tensor, ...], Moe]:
    experts = values.dim("num_experts")
    tensors = (
        *router("feed_forward.router", experts, hidden),
        *gated_mlp("feed_forward.experts.{e}", hidden, width, role="expert", copies=experts),
    )
    top_k = check_top_k(values, experts, "num_experts_per_tok")
    return tensors, Moe(experts=experts, top_k=top_k, intermediate=width, gated=True)


def build(values: Values) -> Parts:
    """Blocks of a Jamba: what mixes tokens and what follows it go by their own periods."""
    heads = read_heads(values)
    hidden, width, mixer = heads.hidden, values.dim("intermediate_size"), _mixer(values, heads.hidden)
    attending, routing = (
        (values.dim(f"{what}_layer_period"), values.items[f"{what}_layer_offset"]) for what in ("attn", "expert")
    )
    for what, (period, offset) in (("attn", attending), ("expert", routing)):
        if offset >= period:
            rule = f"it must be below {what}_layer_period={period}, or no layer would have it"
            raise values.refuse(f"{what}_layer_offset", rule, f"--set {what}_layer_offset=N")
    kinds = [
        (index % attending[0] == attending[1], values.dim("num_experts") > 1 and index % routing[0] == routing[1])
        for index in range(values.dim("num_hidden_layers"))
    ]

    def block(kind: tuple[bool, bool], at: tuple[int, ...]) -> Block:
        (attends, routed), moe = kind, None
        if routed:
            network, moe = _experts(values, hidden, width)
        else:
            network = gated_mlp("feed_forward", hidden, width)
        return Block(
            kind=f"{'moe' if routed else 'dense'}{'' if attends else '-mamba'}",
            layers=at,
            tensors=(
                *(attention("self_attn", heads) if attends else mixer),
                *network,
                *norm("input_layernorm", hidden),
                *norm("pre_ff_layernorm", hidden),
            ),
            norms=2,
            attention=heads.attention() if attends else None,
            mlp=None if routed else Mlp(intermediate=width, gated=True),
            moe=moe,
        )

    mixed = any(not attends for attends, _ in kinds)
    return stack(
        values,
        blocks_of(kinds, block),
        last=norm("model.final_layernorm", hidden),
        unaccounted=(MAMBA1,) if mixed else (),
    )


FAMILIES = (
    Family(
        name="jamba",
        config_class="JambaConfig",
        architectures=("JambaForCausalLM",),
        keys=keys(
            without(DECODER_KEYS, "head_dim"),
            vocab_size=65536,
            intermediate_size=14336,
            num_key_value_heads=8,
            num_experts=Key(16, aliases=("num_local_experts",)),
            num_experts_per_tok=Key(2),
            attn_layer_period=Key(8),
            attn_layer_offset=Key(4, "count"),
            expert_layer_period=Key(2),
            expert_layer_offset=Key(1, "count"),
            mamba_d_state=Key(16),
            mamba_d_conv=Key(4),
            mamba_expand=Key(2),
            mamba_dt_rank=Key("auto", "dim or text"),
            mamba_conv_bias=Key(True, "flag"),
            mamba_proj_bias=Key(False, "flag"),
        ),
        build=build,
        ignored=names(
            "mamba_inner_layernorms num_logits_to_keep output_router_logits router_aux_loss_coef use_mamba_kernels "
            "use_mambapy use_associative_scan layers_block_type layer_types"
        ),
        fixed={"sliding_window": (None,), "attention_bias": (False,), "mlp_bias": (False,)},
    ),
)
