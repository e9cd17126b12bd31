"""Tensors that many families share: attention, feed-forward networks, norms, embeddings, Mamba mixers.

Every name is what stands in the state dict after the block's prefix. The TP cuts are those of Megatron-LM and
torchtitan: column-parallel layers (q, k, v, gate, up, the vocabulary) on the output features, row-parallel layers
(o, down) on the input features with their bias whole, norms and routers whole.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import msgspec

from trainledger.facts.families.keys import Key, Parts, Values, one_of
from trainledger.facts.model import Attention, Block, Role, Score, Ssm, Tensor

T = TypeVar("T", bound=Hashable)

DECODER_KEYS: dict[str, Key] = {
    "vocab_size": Key(32000),
    "hidden_size": Key(4096),
    "intermediate_size": Key(11008),
    "num_hidden_layers": Key(32),
    "num_attention_heads": Key(32),
    "num_key_value_heads": Key(None, nullable=True),
    "head_dim": Key(None, nullable=True),
    "max_position_embeddings": Key(None, nullable=True),
    "tie_word_embeddings": Key(False, "flag"),
}
"""What nearly every family reads, with the defaults of LlamaConfig. `max_position_embeddings` changes no shape under
rotary embeddings, so a config that does not say it is not given its class's default: the model then has none."""


class Heads(msgspec.Struct, frozen=True):
    """The widths of an attention layer."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Features of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Features of all key heads together."""
        return self.kv_heads * self.head_dim

    def attention(
        self, *, window: int | None = None, qk_norm: bool = False, scores: tuple[Score, ...] = ()
    ) -> Attention:
        """The layer as the accounts see it."""
        return Attention(
            heads=self.heads,
            kv_heads=self.kv_heads,
            qk_head_dim=self.head_dim,
            v_head_dim=self.head_dim,
            window=window,
            qk_norm=qk_norm,
            scores=scores,
        )


def even_heads(values: Values, hidden_key: str, heads_key: str) -> int:
    """Head size where the class takes hidden size over heads, which must be whole."""
    hidden, heads = values.dim(hidden_key), values.dim(heads_key)
    if hidden % heads:
        raise values.refuse(
            heads_key,
            f"the heads must divide {hidden_key}={hidden}, since the config gives no head_dim",
            f"--set {heads_key}=N with N a divisor of {hidden}"
            + (", or --set head_dim=N" if "head_dim" in values.items else ""),
        )
    return hidden // heads


def read_heads(values: Values) -> Heads:
    """Heads from the usual keys: no KV heads means as many as heads, no head_dim means hidden size over heads."""
    heads = values.dim("num_attention_heads")
    kv_heads = values.maybe("num_key_value_heads")
    if kv_heads is None:
        kv_heads = heads
    head_dim = values.maybe("head_dim")
    if head_dim is None:
        head_dim = even_heads(values, "hidden_size", "num_attention_heads")
    if heads % kv_heads:
        raise values.refuse(
            "num_key_value_heads",
            f"it must divide num_attention_heads={heads}, since each KV head serves a group of heads",
            f"--set num_key_value_heads=N with N a divisor of {heads}",
        )
    return Heads(values.dim("hidden_size"), heads, kv_heads, head_dim)


def linear(
    name: str,
    out_features: int,
    in_features: int,
    role: Role,
    *,
    bias: bool = False,
    tp_dim: int | None = None,
    tp_units: int = 0,
    copies: int = 1,
) -> tuple[Tensor, ...]:
    """A `[out, in]` matrix and its bias, which is cut only when the output features are."""
    weight = Tensor(
        name=f"{name}.weight",
        shape=(out_features, in_features),
        role=role,
        tp_dim=tp_dim,
        tp_units=tp_units,
        copies=copies,
        linear=True,
    )
    if not bias:
        return (weight,)
    cut = tp_dim == 0
    added = Tensor(
        name=f"{name}.bias",
        shape=(out_features,),
        role=role,
        tp_dim=0 if cut else None,
        tp_units=tp_units if cut else 0,
        copies=copies,
    )
    return (weight, added)


def fused_qkv(
    name: str, heads: Heads, *, out: str, qkv_bias: bool = False, out_bias: bool = False
) -> tuple[Tensor, ...]:
    """q, k and v in one matrix, and the output projection; TP cuts the fused one between groups of KV heads."""
    width = heads.width + 2 * heads.kv_width
    return (
        *linear(name, width, heads.hidden, "attention", bias=qkv_bias, tp_dim=0, tp_units=heads.kv_heads),
        *linear(out, heads.hidden, heads.width, "attention", bias=out_bias, tp_dim=1, tp_units=heads.heads),
    )


def norm(name: str, width: int, *, bias: bool = False) -> tuple[Tensor, ...]:
    """An RMSNorm, or with a bias a LayerNorm; every TP rank keeps it whole."""
    weight = Tensor(name=f"{name}.weight", shape=(width,), role="norm")
    return (weight, Tensor(name=f"{name}.bias", shape=(width,), role="norm")) if bias else (weight,)


def qk_norms(heads: Heads) -> tuple[Tensor, ...]:
    """RMSNorms over the head size of q and of k, one weight for all heads."""
    return (*norm("self_attn.q_norm", heads.head_dim), *norm("self_attn.k_norm", heads.head_dim))


def wide_norms(heads: Heads) -> tuple[Tensor, ...]:
    """RMSNorms over all heads of q and over all of k, which TP cuts with the heads."""
    return (
        Tensor(name="self_attn.q_norm.weight", shape=(heads.width,), role="norm", tp_dim=0, tp_units=heads.heads),
        Tensor(name="self_attn.k_norm.weight", shape=(heads.kv_width,), role="norm", tp_dim=0, tp_units=heads.kv_heads),
    )


def attention(
    prefix: str,
    heads: Heads,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    out: str = "o_proj",
    order: str = "qkvo",
) -> tuple[Tensor, ...]:
    """Separate q, k, v and output projections, in the order that the layer registers them."""
    built = {
        "q": linear(
            f"{prefix}.q_proj", heads.width, heads.hidden, "attention", bias=qkv_bias, tp_dim=0, tp_units=heads.heads
        ),
        "o": linear(
            f"{prefix}.{out}", heads.hidden, heads.width, "attention", bias=out_bias, tp_dim=1, tp_units=heads.heads
        ),
    }
    for letter in "kv":
        built[letter] = linear(
            f"{prefix}.{letter}_proj",
            heads.kv_width,
            heads.hidden,
            "attention",
            bias=qkv_bias,
            tp_dim=0,
            tp_units=heads.kv_heads,
        )
    return tuple(tensor for letter in order for tensor in built[letter])


def gated_mlp(
    prefix: str,
    hidden: int,
    intermediate: int,
    *,
    bias: bool = False,
    role: Role = "mlp",
    copies: int = 1,
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> tuple[Tensor, ...]:
    """Gate, up and down: gate and up are cut along the intermediate size, and so is down's input."""
    gate, up, down = parts
    return (
        *linear(f"{prefix}.{gate}", intermediate, hidden, role, bias=bias, tp_dim=0, copies=copies),
        *linear(f"{prefix}.{up}", intermediate, hidden, role, bias=bias, tp_dim=0, copies=copies),
        *linear(f"{prefix}.{down}", hidden, intermediate, role, bias=bias, tp_dim=1, copies=copies),
    )


def plain_mlp(
    up: str,
    down: str,
    hidden: int,
    intermediate: int,
    *,
    bias: bool = False,
    role: Role = "mlp",
    copies: int = 1,
) -> tuple[Tensor, ...]:
    """Up and down, without a gate."""
    return (
        *linear(up, intermediate, hidden, role, bias=bias, tp_dim=0, copies=copies),
        *linear(down, hidden, intermediate, role, bias=bias, tp_dim=1, copies=copies),
    )


def embedding(name: str, vocab: int, width: int) -> tuple[Tensor, ...]:
    """A table of token vectors, cut along the vocabulary at any row."""
    return (Tensor(name=f"{name}.weight", shape=(vocab, width), role="embedding", tp_dim=0),)


def positions(name: str, rows: int, width: int) -> tuple[Tensor, ...]:
    """A table of learned positions; every TP rank keeps it whole."""
    return (Tensor(name=f"{name}.weight", shape=(rows, width), role="position"),)


def head(vocab: int, width: int, *, tied: bool, bias: bool = False, name: str = "lm_head") -> tuple[Tensor, ...]:
    """The output layer; tied, its weight is the embedding and only its bias is new."""
    built = linear(name, vocab, width, "head", bias=bias, tp_dim=0)
    return built[1:] if tied else built


def mamba2(
    prefix: str,
    hidden: int,
    ssm: Ssm,
    *,
    intermediate: int,
    bias: bool,
    conv_bias: bool,
    out_bias: bool | None = None,
    norm_weight: bool = True,
) -> tuple[Tensor, ...]:
    """A Mamba-2 mixer: z, x, B, C and dt from one projection, a short convolution over x, B and C, a gated norm.

    `out_bias` is `bias` unless given.

    Everything is cut by groups, since the heads of a group share B and C. Order: parameters held by the mixer itself
    come before its submodules.
    """
    conv = intermediate + 2 * ssm.groups * ssm.state
    cut = ssm.groups
    per_head = tuple(
        Tensor(name=f"{prefix}.{name}", shape=(ssm.heads,), role="ssm", tp_dim=0, tp_units=cut)
        for name in ("dt_bias", "A_log", "D")
    )
    kernel = (
        Tensor(name=f"{prefix}.conv1d.weight", shape=(conv, 1, ssm.conv_kernel), role="ssm", tp_dim=0, tp_units=cut),
        *(
            (Tensor(name=f"{prefix}.conv1d.bias", shape=(conv,), role="ssm", tp_dim=0, tp_units=cut),)
            if conv_bias
            else ()
        ),
    )
    gated = Tensor(name=f"{prefix}.norm.weight", shape=(intermediate,), role="norm", tp_dim=0, tp_units=cut)
    return (
        *per_head,
        *kernel,
        *linear(f"{prefix}.in_proj", intermediate + conv + ssm.heads, hidden, "ssm", bias=bias, tp_dim=0, tp_units=cut),
        *((gated,) if norm_weight else ()),
        *linear(
            f"{prefix}.out_proj",
            hidden,
            intermediate,
            "ssm",
            bias=bias if out_bias is None else out_bias,
            tp_dim=1,
            tp_units=cut,
        ),
    )


def group_layers(kinds: Sequence[T]) -> dict[T, tuple[int, ...]]:
    """Layer indices of each distinct kind, in order of first appearance.

    >>> group_layers(["dense", "moe", "moe"])
    {'dense': (0,), 'moe': (1, 2)}
    """
    found: dict[T, list[int]] = {}
    for index, kind in enumerate(kinds):
        found.setdefault(kind, []).append(index)
    return {kind: tuple(layers) for kind, layers in found.items()}


def blocks_of(kinds: Sequence[T], build: Callable[[T, tuple[int, ...]], Block]) -> tuple[Block, ...]:
    """One block for each distinct kind of layer, built from the kind and the layers that are of it."""
    return tuple(build(kind, layers) for kind, layers in group_layers(kinds).items())


def stack(
    values: Values,
    blocks: tuple[Block, ...],
    *,
    prefix: str = "model.layers.{i}.",
    first: tuple[Tensor, ...] | None = None,
    last: tuple[Tensor, ...] | None = None,
    head_bias: bool = False,
    head_name: str = "lm_head",
    hidden_key: str = "hidden_size",
    max_positions: int | None = None,
    bounded: bool = True,
    mtp: Block | None = None,
    mtp_depths: int = 0,
    unaccounted: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
) -> Parts:
    """The frame around the blocks; without `prefix`, `first` and `last` it is Llama's: embed_tokens, layers, norm."""
    hidden, vocab = values.dim(hidden_key), values.dim("vocab_size")
    tied = values.flag("tie_word_embeddings")
    if bounded and max_positions is None:
        max_positions = values.maybe("max_position_embeddings")
    return Parts(
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=sum(len(block.layers) for block in blocks),
        max_positions=max_positions,
        layer_prefix=prefix,
        embedding=embedding("model.embed_tokens", vocab, hidden) if first is None else first,
        blocks=blocks,
        final=(
            *(norm("model.norm", hidden) if last is None else last),
            *head(vocab, hidden, tied=tied, bias=head_bias, name=head_name),
        ),
        tied=tied,
        mtp=mtp,
        mtp_depths=mtp_depths,
        unaccounted=unaccounted,
        notes=notes,
    )


def windows(
    values: Values, layers: int, default: Callable[[int], bool], *, used: bool = True
) -> tuple[int | None, ...]:
    """Window of each layer, from `layer_types` when given, else sliding where `default` says; none unless `used`."""
    given = values.words("layer_types")
    size = (values.maybe("sliding_window") or None) if used else None
    if given is None:
        return tuple(size if default(index) else None for index in range(layers))
    check_length(values, "layer_types", len(given), layers)
    one_of(values, "layer_types", given, ("full_attention", "sliding_attention"))
    return tuple(size if word == "sliding_attention" else None for word in given)


def check_length(values: Values, key: str, length: int, layers: int) -> None:
    """A list with an entry for each layer must have as many as there are layers."""
    if length != layers:
        raise values.refuse(
            key,
            f"its {length} entries are not the {layers} layers of num_hidden_layers",
            f"--set {key}=null to take the pattern of {values.family.config_class}, or give {layers} entries",
        )


def label(kind: str, window: int | None) -> str:
    """Name of a block: the kind, marked when its attention is windowed."""
    return kind if window is None else f"{kind}-window"
