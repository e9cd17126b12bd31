"""Mamba-2: a stack of Mamba-2 mixers, each behind one RMSNorm, without attention and without feed-forward network."""

from __future__ import annotations

from trainledger.facts.families.common import blocks_of, embedding, mamba2, norm, stack
from trainledger.facts.families.keys import Family, Key, Parts, Values, names
from trainledger.facts.model import Block, Ssm


def build(values: Values) -> Parts:
    """Blocks of a Mamba-2; the heads together must be `expand` times the hidden size."""
    hidden, width = values.dim("hidden_size"), values.dim("expand") * values.dim("hidden_size")
    ssm = Ssm(
        heads=values.dim("num_heads"),
        head_dim=values.dim("head_dim"),
        groups=values.dim("n_groups"),
        state=values.dim("state_size"),
        conv_kernel=values.dim("conv_kernel"),
    )
    if ssm.heads * ssm.head_dim != width:
        raise values.refuse(
            "num_heads",
            f"num_heads x head_dim ({ssm.head_dim}) must be expand x hidden_size = {width}",
            "--set num_heads=N or --set head_dim=N",
        )
    tensors = (
        *norm("norm", hidden),
        *mamba2(
            "mixer",
            hidden,
            ssm,
            intermediate=width,
            bias=values.flag("use_bias"),
            conv_bias=values.flag("use_conv_bias"),
        ),
    )

    def block(_kind: str, at: tuple[int, ...]) -> Block:
        return Block(kind="mamba", layers=at, tensors=tensors, norms=1, ssm=ssm)

    return stack(
        values,
        blocks_of(["mamba"] * values.dim("num_hidden_layers"), block),
        prefix="backbone.layers.{i}.",
        first=embedding("backbone.embeddings", values.dim("vocab_size"), hidden),
        last=norm("backbone.norm_f", hidden),
    )


FAMILIES = (
    Family(
        name="mamba2",
        config_class="Mamba2Config",
        architectures=("Mamba2ForCausalLM",),
        keys={
            "vocab_size": Key(32768),
            "hidden_size": Key(4096),
            "num_hidden_layers": Key(64),
            "num_heads": Key(128),
            "head_dim": Key(64),
            "state_size": Key(128),
            "expand": Key(2),
            "conv_kernel": Key(4),
            "n_groups": Key(8),
            "use_bias": Key(False, "flag"),
            "use_conv_bias": Key(True, "flag"),
            "tie_word_embeddings": Key(False, "flag"),
        },
        build=build,
        ignored=names(
            "residual_in_fp32 time_step_rank time_step_min time_step_max time_step_floor time_step_limit "
            "rescale_prenorm_residual chunk_size rms_norm norm_before_gate"
        ),
    ),
)
