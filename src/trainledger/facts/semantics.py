"""What the forward pass of a decoder does beyond its shapes, as data.

A family's file in `runtime/model/families/` reads these rules from a config.json; the modules of the runtime follow
them, and so do the tapes of `inventory/blocks/eager`. Shapes and names of parameters are not here: they come from
facts.Model. Names of modules are those of the Hugging Face state dict. Dropout is never applied: the forward is that
of evaluation.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class NormRule(msgspec.Struct, frozen=True, kw_only=True):
    """A normalisation over the last dimension.

    kind      root mean square, or mean and variance
    plus_one  the weight is an offset from one (Gemma)
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    plus_one: bool = False


class Scaling(msgspec.Struct, frozen=True, kw_only=True):
    """How the frequencies of rotary positions are stretched. [transformers 5.24.0: modeling_rope_utils.py]

    original      positions of pre-training (llama3, yarn, longrope)
    low, high     frequency factors of llama3; beta_slow and beta_fast of yarn
    short, long   divisor of each frequency up to `original` positions, and beyond (longrope)
    """

    kind: Literal["linear", "llama3", "yarn", "longrope"]
    factor: float = 1.0
    original: int = 0
    low: float = 1.0
    high: float = 4.0
    truncate: bool = True
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()


class RotaryRule(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary positions of the first `dim` features of a head.

    interleaved  features 2i and 2i + 1 turn together; else i and i + dim / 2
    amplitude    factor on cosine and sine
    fp32         cosine and sine stay in fp32, so that heads of a narrower dtype are turned in fp32
    """

    dim: int
    theta: float
    interleaved: bool = False
    amplitude: float = 1.0
    fp32: bool = False
    scaling: Scaling | None = None


class AttentionRule(msgspec.Struct, frozen=True, kw_only=True):
    """The attention of one layer.

    kind         "mha" (also GQA and MQA) or "mla"
    path         the module, below the block
    qkv          separate: one matrix each; rows: all q, all k, all v one after the other in one matrix;
                 groups: for each KV head its queries, its k, its v
    heads        query heads of the whole model
    group        query heads of one KV head
    rotary       name of the rotary table; None: none
    scale        factor on q k^T
    window       keys that a query sees at most, itself included; with `chunked`, only those of its own chunk
    softcap      scores are squashed to this magnitude by tanh
    sinks        each head has one more score, a parameter `sinks`, whose weight is dropped
    alibi        factor on what ALiBi takes from the scores of keys far away; 0: none
    clip         q, k and v are clamped to this magnitude
    qk_norm      head: over each head; wide: over all heads at once; after_rotary: over each head, after rotary
    after_eps    epsilon of the norm after rotary, which has no weight
    temperature  (length, strength): q grows by strength * log(1 + (position + 1) // length) (Llama 4)
    nope, rope, value   MLA: features of a head of q and k without and with positions, and of v
    """

    kind: Literal["mha", "mla"] = "mha"
    path: str = "self_attn"
    qkv: Literal["separate", "rows", "groups"] = "separate"
    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    fused: str = "qkv_proj"
    out: str = "o_proj"
    heads: int
    head_dim: int
    group: int = 1
    rotary: str | None = "rotary"
    scale: float
    window: int | None = None
    chunked: bool = False
    softcap: float | None = None
    sinks: bool = False
    alibi: float = 0.0
    clip: float | None = None
    qk_norm: Literal["none", "head", "wide", "after_rotary"] = "none"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    after_eps: float = 1e-6
    temperature: tuple[float, float] | None = None
    nope: int = 0
    rope: int = 0
    value: int = 0


class MlpRule(msgspec.Struct, frozen=True, kw_only=True):
    """A feed-forward network.

    path    the module, below the block; empty: its matrices lie in the block itself
    kind    gated: down(act(gate) * up); fused: the same with gate and up in one matrix; plain: down(act(up))
    """

    path: str = "mlp"
    kind: Literal["gated", "fused", "plain"] = "gated"
    activation: str = "silu"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


class MoeRule(msgspec.Struct, frozen=True, kw_only=True):
    """Routed experts and their router.

    router       softmax: top k of the softmax; softmax_top: softmax over the scores of the top k; sigmoid: top k of
                 sigmoid plus a correction, the weights without it; sigmoid_top: sigmoid of the top k scores
    fp32         the router multiplies in fp32
    renormalise  the weights of a token are divided by their sum plus `floor`
    scaling      factor on the weights
    groups       experts lie in so many groups; only those of the best `top_groups` are eligible; a group counts as its
                 best expert, or as the sum of its best two (`group_of_two`)
    scale_input  weights multiply what an expert takes instead of what it gives
    stacked      the matrices are `[experts, in, out]`, gate and up in one: side by side, or interleaved
    limit, alpha clamp and slope of gpt-oss's gated activation; limit 0: the plain one
    shared       the network that every token visits, and the module of its gate
    """

    path: str = "mlp"
    router: Literal["softmax", "softmax_top", "sigmoid", "sigmoid_top"] = "softmax"
    gate: str = "gate"
    top_k: int
    fp32: bool = False
    renormalise: bool = False
    floor: float = 0.0
    scaling: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_of_two: bool = False
    scale_input: bool = False
    activation: str = "silu"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    stacked: Literal["no", "halves", "interleaved"] = "no"
    limit: float = 0.0
    alpha: float = 1.0
    shared: MlpRule | None = None
    shared_gate: str | None = None


class BlockRule(msgspec.Struct, frozen=True, kw_only=True):
    """Where a block normalises and adds; an empty name is a norm that is not there.

    residual      chain: x + attention, then x + network; parallel: both read x; after: the norms follow the adds
    before_*, after_*   norms before and after attention and network
    multiplier    factor on what attention and network add
    from_normed   the residual is what the norm gave (BLOOM's and Falcon's option)
    """

    residual: Literal["chain", "parallel", "after"] = "chain"
    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_network: str = "post_attention_layernorm"
    after_network: str = ""
    multiplier: float = 1.0
    from_normed: bool = False


class EntryRule(msgspec.Struct, frozen=True, kw_only=True):
    """From token ids to the first block: table, factor, projection, learned positions (from row `first_row`), norm.

    rounded   the factor is rounded to the dtype of the table first (Gemma)
    """

    tokens: str = "model.embed_tokens"
    multiplier: float = 1.0
    rounded: bool = False
    positions: str = ""
    first_row: int = 0
    project: str = ""
    norm: str = ""


class ExitRule(msgspec.Struct, frozen=True, kw_only=True):
    """From the last block to logits: norm, projection, output layer, factor, soft cap."""

    norm: str = "model.norm"
    project: str = ""
    head: str = "lm_head"
    multiplier: float = 1.0
    softcap: float | None = None


class Semantics(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `build_decoder` follows besides the tensors of a facts.Model.

    attention   one rule for each layer
    rotary      the tables that the layers name
    norm        of blocks, of q and k, of entry and exit; `latent_norm` inside MLA
    transposed  matrices are kept as [in, out] (GPT-2)
    """

    norm: NormRule
    attention: tuple[AttentionRule, ...]
    rotary: dict[str, RotaryRule] = {}
    latent_norm: NormRule | None = None
    block: BlockRule = BlockRule()
    mlp: MlpRule = MlpRule()
    moe: MoeRule | None = None
    entry: EntryRule = EntryRule()
    exit: ExitRule = ExitRule()
    transposed: bool = False
