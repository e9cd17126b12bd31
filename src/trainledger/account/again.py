"""What of a layer runs forward again under selective recomputation: matrices, attention, exchanges.

Parts of a layer (Megatron-Core's recompute_modules)
  core_attn        attention's products, and what context parallelism exchanges around them
  mlp              the matrices of a dense network and its tensor-parallel exchanges
  moe              router, experts and shared experts, with all that they exchange
  shared_experts   the matrices of the shared experts and their tensor-parallel exchanges
  mla_up_proj      the up projections of latent attention; the latents that they gather again are not counted
  layernorm, moe_act   neither a matrix nor an exchange
[megatron: core/transformer/transformer_layer.py, core/transformer/moe/moe_layer.py, multi_latent_attention.py]

Operations, one by one ("ops", torchtitan)
  kept are the results of every second matrix that is no router's and no routed expert's, from the first on, and those
  that the release lists; everything else runs again, gathers included
  [torchtitan: distributed/activation_checkpoint.py]
"""

from __future__ import annotations

from trainledger.facts.model import Block, Tensor
from trainledger.plans.setting import Setting

OPS = "ops"
COUNTED = ("attention", "mlp", "shared_expert")
"""Roles of the matrices of which a checkpoint that chooses by operation keeps every second."""


def parts_again(setting: Setting) -> tuple[str, ...]:
    """What selective recomputation takes; () under any other."""
    return setting.recomputed_parts if setting.scenario.recompute == "selective" else ()


def attention_again(setting: Setting) -> bool:
    """Whether attention's kernel, or its plain products, run again."""
    parts = parts_again(setting)
    return "core_attn" in parts or (OPS in parts and not _kept(setting, setting.attention_kernel))


def context_again(setting: Setting) -> bool:
    """Whether keys and values are exchanged again: a gather's result is not kept."""
    parts = parts_again(setting)
    return "core_attn" in parts or OPS in parts


def experts_again(setting: Setting, exchange: str) -> bool:
    """Whether an exchange of routed tokens, all_to_all, all_gather or reduce_scatter, is done again."""
    parts = parts_again(setting)
    return "moe" in parts or (OPS in parts and not _kept(setting, exchange))


def networks_again(setting: Setting, block: Block, *, routed: bool) -> int:
    """Tensor-parallel regions of a block that run again with a part: that of its network, or none.

    routed   experts are cut like a dense network, and share the region of the shared ones
    """
    parts = parts_again(setting)
    if block.mlp is not None:
        return int("mlp" in parts)
    if block.moe is None:
        return 0
    shared = block.moe.shared_intermediate > 0
    return int(("moe" in parts and (shared or routed)) or ("shared_experts" in parts and shared))


def reductions_again(setting: Setting, exchange: str) -> bool:
    """Whether operations run again one by one, and the sums of tensor-parallel ranks, made by `exchange`, with them."""
    return OPS in parts_again(setting) and not _kept(setting, exchange)


def matrices_again(setting: Setting, block: Block) -> tuple[str, ...]:
    """Names of the matrices of a block that run again."""
    parts = parts_again(setting)
    linear = [tensor for tensor in block.tensors if tensor.linear]
    if OPS in parts:
        return _not_kept(setting, block, linear)
    roles: set[str] = set()
    for part, taken in (
        ("mlp", ("mlp",)),
        ("moe", ("router", "expert", "shared_expert")),
        ("shared_experts", ("shared_expert",)),
    ):
        roles |= set(taken) if part in parts else set()
    latent = block.attention is not None and block.attention.kind == "mla" and "mla_up_proj" in parts
    return tuple(
        tensor.name
        for tensor in linear
        if tensor.role in roles or (latent and tensor.role == "attention" and tensor.tp_dim == 0)
    )


def _not_kept(setting: Setting, block: Block, linear: list[Tensor]) -> tuple[str, ...]:
    """Those of a block in which each operation is chosen; what makes queries, keys and values may be one of them."""
    counted = [tensor for tensor in linear if tensor.role in COUNTED and tensor.shape[0] > 1]
    units = [[tensor.name] for tensor in counted]
    if setting.profile.memory.fused_qkv and block.attention is not None and block.attention.kind != "mla":
        projections = [tensor.name for tensor in counted if tensor.role == "attention" and tensor.tp_dim == 0]
        units = [projections, *(unit for unit in units if unit[0] not in projections)]
    chosen = [name for unit in units[1::2] for name in unit]
    chosen += [tensor.name for tensor in linear if tensor.role in ("router", "expert")]
    # a compiled block makes nothing that no backward reads; experts are compiled apart from their checkpoint
    stops = not setting.profile.traffic.recompute_reruns_last or (setting.compiled and block.moe is None)
    return tuple(name for name in chosen if not (stops and name == spared_matrix(block)))


def _kept(setting: Setting, what: str) -> bool:
    return what in setting.profile.memory.selective_keeps


def spared_matrix(block: Block) -> str:
    """The last matrix of a block, where nothing after it is kept for the backward; "" where something is.

    A checkpoint that stops early ends with the last tensor that the backward asks for. A matrix product keeps its
    input, so the last one does not run again, unless what follows keeps its result. Routed experts come before the
    shared network, and what they give is kept. [torch: utils/checkpoint.py, set_checkpoint_early_stop]

    >>> from trainledger.facts.model_load import load_model
    >>> [spared_matrix(load_model(name).blocks[-1]) for name in ("llama-3-8b", "mixtral-8x7b", "deepseek-v3")]
    ['mlp.down_proj.weight', '', 'mlp.shared_experts.down_proj.weight']
    """
    if block.keeps_end or (block.moe is not None and not block.moe.shared_intermediate):
        return ""
    role = "shared_expert" if block.moe is not None else "mlp" if block.mlp is not None else "attention"
    return [tensor.name for tensor in block.tensors if tensor.linear and tensor.role == role][-1]
