"""The rules of a forward pass as shapes and the family tell them: those of LLaMA, where they tell nothing.

A config says more (runtime/model/read.py): how far positions turn a head, how a router weighs, what is clamped.
A Model has no config, and what it costs in memory follows from its tensors, their names and its family but for little.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from trainledger.facts.model import Attention, Block, Mlp, Model, Moe, Tensor
from trainledger.facts.semantics import (
    AttentionRule,
    BlockRule,
    EntryRule,
    ExitRule,
    MlpRule,
    MoeRule,
    NormRule,
    RotaryRule,
    Semantics,
)

TURNS, LATENT_TURNS = "rotary", "rotary of latents"
THETA = 10_000.0
LAYERED = frozenset({"cohere", "cohere2", "mpt"})
"""Families whose norms subtract the mean, though they have no bias."""
OFFSET = frozenset({"gemma", "gemma2", "gemma3_text"})
"""Families whose norms' weights are offsets from one."""
PARTLY = frozenset({"glm", "glm4", "glm4_moe", "gpt_neox", "gptj", "phi", "stablelm"})
"""Families that turn a part of each head: how large it is changes little, and it is taken to be half."""
RELU = frozenset({"opt"})
"""Families whose networks keep what their activation gives."""
CHOSEN_IN_FP32 = frozenset({"deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite"})
"""Families whose routers multiply in fp32."""
CLAMPED = frozenset({"gpt_oss"})
"""Families whose experts interleave gate and up, and clamp both."""
FUSED, GATED = 2, 3
"""Matrices of an attention that multiplies once for q, k and v; of a gated network that multiplies twice before."""


def presumed(model: Model) -> Semantics:
    """The rules of a model, a multi-token-prediction depth among its layers."""
    first = model.blocks[0]
    plain = first.norms > 0 and not _norms(first.tensors)
    biased = any(tensor.name.endswith(".bias") for block in model.blocks for tensor in _norms(block.tensors))
    learned = any(tensor.role == "position" for tensor in model.embedding)
    deeper = () if model.mtp is None else (model.mtp,)
    rules = [(block, _attention(block, turns=not learned)) for block in (*model.blocks, *deeper)]
    kinds = {layer: rule for block, rule in rules for layer in block.layers}
    dense = next((block for block in model.blocks if block.mlp is not None), None)
    sparse = next((block for block in model.blocks if block.moe is not None), None)
    return Semantics(
        norm=NormRule(
            kind="layer" if plain or biased or model.family in LAYERED else "rms", plus_one=model.family in OFFSET
        ),
        attention=tuple(kinds[layer] for layer in sorted(kinds)),
        rotary=_tables(model),
        block=_block(first),
        mlp=_mlp(model, dense.tensors, dense.mlp) if dense and dense.mlp else MlpRule(),
        moe=_moe(model, sparse, sparse.moe) if sparse and sparse.moe else None,
        entry=_entry(model),
        exit=_exit(model, plain=plain),
    )


def _module(name: str) -> str:
    """The module that a tensor belongs to.

    >>> _module("self_attn.q_proj.weight")
    'self_attn.q_proj'
    """
    return name.rpartition(".")[0]


def _path(tensors: Sequence[Tensor]) -> str:
    """The module around the modules of these tensors."""
    return _module(_module(tensors[0].name)) if tensors else ""


def _last(tensor: Tensor) -> str:
    return _module(tensor.name).rpartition(".")[2]


def _linear(tensors: Sequence[Tensor], role: str) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.role == role and tensor.linear]


def _norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.role == "norm"]


def _attention(block: Block, *, turns: bool) -> AttentionRule:
    facts = block.attention
    if facts is None:
        return AttentionRule(heads=1, head_dim=1, scale=1.0, rotary=None)
    path = _path(_linear(block.tensors, "attention"))
    inside = [tensor for tensor in _norms(block.tensors) if tensor.name.startswith(f"{path}.")]
    own = [_module(tensor.name).removeprefix(f"{path}.").replace("{e}", "*") for tensor in inside]
    rule = AttentionRule(
        path=path,
        heads=facts.heads,
        head_dim=facts.qk_head_dim,
        group=facts.heads // facts.kv_heads,
        rotary=TURNS if turns and "alibi" not in facts.scores else None,
        scale=1.0,
        window=facts.window,
        softcap=1.0 if "soft-cap" in facts.scores else None,
        sinks="sinks" in facts.scores,
        alibi=1.0 if "alibi" in facts.scores else 0.0,
    )
    if facts.kind == "mla":
        return _latent(rule, facts)
    rule = _with_matrices(rule, _linear(block.tensors, "attention"))
    if not facts.qk_norm:
        return rule
    wide = any(tensor.copies == 1 and tensor.shape == (facts.heads * facts.qk_head_dim,) for tensor in inside)
    return msgspec.structs.replace(
        rule,
        qk_norm="wide" if wide else "head",
        q_norm=next((name for name in own if name.startswith("q")), rule.q_norm),
        k_norm=next((name for name in own if name.startswith("k")), rule.k_norm),
    )


def _latent(rule: AttentionRule, facts: Attention) -> AttentionRule:
    return msgspec.structs.replace(
        rule,
        kind="mla",
        q="q_b_proj" if facts.q_lora_rank else "q_proj",
        rotary=LATENT_TURNS,
        nope=facts.qk_head_dim - facts.rope_head_dim,
        rope=facts.rope_head_dim,
        value=facts.v_head_dim,
    )


def _with_matrices(rule: AttentionRule, matrices: Sequence[Tensor]) -> AttentionRule:
    """The rule with the names of its matrices: of two, the larger gives q, k and v."""
    if len(matrices) == FUSED:
        fused, out = sorted(matrices, key=lambda tensor: tensor.numel, reverse=True)
        return msgspec.structs.replace(rule, qkv="rows", fused=_last(fused), out=_last(out))
    names = {_last(tensor)[:1]: _last(tensor) for tensor in matrices}
    q, k, v = (names.pop(letter, f"{letter}_proj") for letter in "qkv")
    return msgspec.structs.replace(rule, q=q, k=k, v=v, out=next(iter(names.values()), rule.out))


def _tables(model: Model) -> dict[str, RotaryRule]:
    """The rotary tables that layers may name."""
    found: dict[str, RotaryRule] = {}
    for block in model.blocks:
        if block.attention is not None:
            whole = block.attention.qk_head_dim
            found[TURNS] = RotaryRule(dim=whole // 2 if model.family in PARTLY else whole, theta=THETA)
            if block.attention.rope_head_dim:
                found[LATENT_TURNS] = RotaryRule(dim=block.attention.rope_head_dim, theta=THETA)
    return found


def _network(matrices: Sequence[Tensor], gated: bool) -> MlpRule:
    """A feed-forward network of two or three matrices, in the order in which they are used."""
    names = [_last(tensor) for tensor in matrices]
    path, activation = _path(matrices), "silu" if gated else "gelu"
    if len(names) == GATED:
        gate, up, down = names
        return MlpRule(path=path, kind="gated", activation=activation, gate=gate, up=up, down=down)
    up, down = (names[0], names[-1]) if names else ("up_proj", "down_proj")
    return MlpRule(path=path, kind="fused" if gated else "plain", activation=activation, up=up, down=down)


def _mlp(model: Model, tensors: Sequence[Tensor], facts: Mlp) -> MlpRule:
    rule = _network(_linear(tensors, "mlp"), facts.gated)
    return msgspec.structs.replace(rule, activation="relu") if model.family in RELU else rule


def _moe(model: Model, block: Block, facts: Moe) -> MoeRule:
    """Routed experts, their router and who is beside them."""
    tensors, clamped = block.tensors, model.family in CLAMPED
    experts = [tensor for tensor in tensors if tensor.role == "expert"]
    routers = [tensor for tensor in tensors if tensor.role == "router" and tensor.linear]
    shared = _linear(tensors, "shared_expert")
    inside = [tensor for tensor in routers if "shared" not in tensor.name]
    path = _path(inside)
    beside = _network(shared, facts.gated) if facts.shared_intermediate else None
    if beside is not None:
        beside = msgspec.structs.replace(beside, path=beside.path.removeprefix(f"{path}."))
    return MoeRule(
        path=path,
        gate=_last(inside[0]) if inside else "gate",
        top_k=facts.top_k,
        fp32=model.family in CHOSEN_IN_FP32,
        renormalise=True,
        stacked="interleaved" if clamped else "halves" if _in_one(experts) else "no",
        limit=1.0 if clamped else 0.0,
        shared=beside,
        shared_gate=next((_last(tensor) for tensor in routers if "shared" in tensor.name), None),
    )


def _in_one(experts: Sequence[Tensor]) -> bool:
    """Whether a tensor has all experts."""
    return any("{e}" not in tensor.name for tensor in experts)


def _block(block: Block) -> BlockRule:
    """Norms in the order in which they are registered; the defaults stand for those without a weight."""
    names = [_module(tensor.name) for tensor in _norms(block.tensors) if tensor.name.endswith(".weight")]
    names = [name for name in names if "." not in name]
    default = BlockRule()
    if block.parallel:
        first, second = (*names, *names[-1:], *names[-1:])[:2] if names else (default.before_attention,) * 2
        return BlockRule(residual="parallel", before_attention=first, before_network=second)
    match names:
        case [before, after, ahead, behind]:
            return BlockRule(before_attention=before, after_attention=after, before_network=ahead, after_network=behind)
        case [first, second] if block.keeps_end:
            return BlockRule(before_attention="", after_attention=first, before_network="", after_network=second)
        case [first, second]:
            return BlockRule(before_attention=first, before_network=second)
        case _:
            return default if block.norms else BlockRule(before_attention="", before_network="")


def _entry(model: Model) -> EntryRule:
    tokens = next(tensor for tensor in model.embedding if tensor.role == "embedding")
    learned = next((_module(tensor.name) for tensor in model.embedding if tensor.role == "position"), "")
    norms = [_module(tensor.name) for tensor in _norms(model.embedding)]
    project = next((_module(t.name) for t in model.embedding if t.linear and t.role != "embedding"), "")
    narrow = tokens.shape[-1] != model.hidden_size
    return EntryRule(
        tokens=_module(tokens.name),
        positions=learned,
        project=project if narrow else "",
        norm=norms[0] if norms else "",
    )


def _exit(model: Model, *, plain: bool) -> ExitRule:
    """Who squashes the scores of attention squashes logits too; plain: norms have no weight, this one included."""
    norms = [_module(tensor.name) for tensor in _norms(model.final)]
    head = next((_module(tensor.name) for tensor in model.final if tensor.role == "head"), "lm_head")
    tokens = next(tensor for tensor in model.embedding if tensor.role == "embedding")
    project = next((_module(t.name) for t in model.final if t.linear and t.role != "head"), "")
    narrow = tokens.shape[-1] != model.hidden_size
    capped = any(block.attention is not None and "soft-cap" in block.attention.scores for block in model.blocks)
    return ExitRule(
        norm=norms[0] if norms else "norm" if plain else "",
        project=project if narrow else "",
        head=head,
        softcap=1.0 if capped else None,
    )
