"""A decoder model as shapes: the tensors of each distinct block, and which layers use it.

A family (`facts/families/`) turns a Hugging Face config.json into a Model. Nothing above this file reads a config.
Shapes are those of the Hugging Face state dict, in registration order, weights as `[out_features, in_features]`
unless the family's own layers differ (GPT-2 keeps `[in, out]`). Counts are elements, never bytes.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Literal

import msgspec

Score = Literal["alibi", "sinks", "soft-cap"]
"""What changes attention scores beside the causal mask: a slope by distance, a learned sink per head, a squashing."""

Role = Literal[
    "embedding", "position", "norm", "attention", "mlp", "router", "expert", "shared_expert", "ssm", "mtp", "head"
]

PRODUCT_LIMIT = 2**62
"""A Model whose element count times 64 bytes passes this could overflow int64 somewhere: refused at build."""


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter tensor of a block (or of the embedding or the head).

    name     state-dict name after the block's prefix; `{e}` stands for the expert index
    shape    full, unsharded
    tp_dim   dimension that tensor parallelism cuts; None: every TP rank keeps the whole tensor
    tp_units how many indivisible units lie along tp_dim (heads, KV heads, groups); 0: any split
    copies   tensors of this shape and role in one block (the routed experts), else 1
    linear   the weight of a matrix multiplication: what LoRA adapts, Muon orthogonalises and FP8 covers
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    tp_dim: int | None = None
    tp_units: int = 0
    copies: int = 1
    linear: bool = False

    @property
    def numel(self) -> int:
        """Elements of one copy."""
        return math.prod(self.shape)

    @property
    def projection(self) -> bool:
        """A weight matrix inside a block, routers apart: what FP8 recipes, 4-bit storage and Muon cover."""
        return self.linear and self.role not in ("head", "embedding", "router")


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    """Softmax attention. `qk_head_dim` is that of q and k (MLA: nope + rope), `v_head_dim` that of v.

    kind         "mha" (also GQA and MQA) or "mla"
    window       keys a query sees at most; None: all before it
    q_lora_rank, kv_lora_rank, rope_head_dim   MLA only, else 0
    scores       what changes scores beside the causal mask and the window
    """

    heads: int
    kv_heads: int
    qk_head_dim: int
    v_head_dim: int
    kind: Literal["mha", "mla"] = "mha"
    window: int | None = None
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    rope_head_dim: int = 0
    qk_norm: bool = False
    scores: tuple[Score, ...] = ()


class Mlp(msgspec.Struct, frozen=True, kw_only=True):
    """A feed-forward network: two matrices, or three when gated (SwiGLU, GeGLU)."""

    intermediate: int
    gated: bool


class Moe(msgspec.Struct, frozen=True, kw_only=True):
    """Routed experts; `shared_intermediate` is the width of all shared experts together (0: none)."""

    experts: int
    top_k: int
    intermediate: int
    gated: bool
    shared_intermediate: int = 0


class Ssm(msgspec.Struct, frozen=True, kw_only=True):
    """A Mamba-2 mixer."""

    heads: int
    head_dim: int
    groups: int
    state: int
    conv_kernel: int


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """One distinct kind of layer; `layers` are the indices that use it.

    norms     normalisations over the hidden size in the block
    parallel  attention and MLP read the same normalised input and share one residual add
    keeps_end something after the block's last matrix keeps what it gives for the backward: a norm, a gate, a factor
    """

    kind: str
    layers: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    norms: int
    attention: Attention | None = None
    mlp: Mlp | None = None
    moe: Moe | None = None
    ssm: Ssm | None = None
    parallel: bool = False
    keeps_end: bool = False

    @property
    def numel(self) -> int:
        """Elements of one layer of this kind, all experts included."""
        return sum(t.numel * t.copies for t in self.tensors)


def routed(model: Model) -> bool:
    """Whether some layer has routed experts."""
    return any(block.moe is not None for block in model.blocks)


class Model(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A decoder-only model.

    embedding, final   tensors before the first block and after the last; names are complete
    layer_prefix       prefix of a block's tensor names, with `{i}` for the layer, such as "model.layers.{i}."
    tied               the output layer is the embedding: it is counted once, and `final` has no output weight
    mtp                one multi-token-prediction depth (DeepSeek-V3 style), not part of total_params, or None
    params_only        built from a parameter count alone: no shapes, so nothing but states can be said
    unaccounted        kinds of layer of which it is not known what they keep for the backward, in the plural
    notes              what a reader should know of how the config was read
    """

    name: str
    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_positions: int | None
    layer_prefix: str
    embedding: tuple[Tensor, ...]
    blocks: tuple[Block, ...]
    final: tuple[Tensor, ...]
    tied: bool
    mtp: Block | None = None
    mtp_depths: int = 0
    params_only: bool = False
    unaccounted: tuple[str, ...] = ()
    source: str = ""
    notes: tuple[str, ...] = ()

    @property
    def states_alone(self) -> bool:
        """Whether nothing can be said of what its layers keep: there are no shapes, or no account of some layers."""
        return self.params_only or bool(self.unaccounted)

    @cached_property
    def total_params(self) -> int:
        """All parameters, a tied embedding once, MTP layers not counted."""
        outer = sum(t.numel * t.copies for t in (*self.embedding, *self.final))
        return outer + sum(b.numel * len(b.layers) for b in self.blocks)

    @cached_property
    def active_params(self) -> int:
        """total_params minus the routed experts that a token does not visit."""
        idle = 0
        for block in self.blocks:
            if block.moe is None:
                continue
            routed = sum(t.numel * t.copies for t in block.tensors if t.role == "expert")
            idle += len(block.layers) * (routed - routed // block.moe.experts * block.moe.top_k)
        return self.total_params - idle
