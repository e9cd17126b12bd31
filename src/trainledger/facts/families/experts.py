"""Routed experts that several families share, their router, and a multi-token-prediction depth around a layer.

The TP cuts are those of `common`: each expert is cut like a dense network, the router is whole.
"""

from __future__ import annotations

import msgspec

from trainledger.facts.families.common import gated_mlp, linear, norm
from trainledger.facts.families.keys import Values
from trainledger.facts.model import Block, Moe, Tensor


def router(name: str, experts: int, hidden: int, *, bias: bool = False) -> tuple[Tensor, ...]:
    """The matrix that scores the experts; every TP rank keeps it whole."""
    return linear(name, experts, hidden, "router", bias=bias)


def check_top_k(values: Values, experts: int, top_k_key: str) -> int:
    """Experts that a token visits: not more than there are."""
    top_k = values.dim(top_k_key)
    if top_k > experts:
        raise values.refuse(top_k_key, f"a token cannot visit more than the {experts} experts", f"--set {top_k_key}=N")
    return top_k


def experts_beside_shared(values: Values, hidden: int, *, bias: bool = False) -> tuple[tuple[Tensor, ...], Moe]:
    """DeepSeek's network: routed experts, their router, and the shared ones as one network, which may have a bias."""
    experts, width = values.dim("n_routed_experts"), values.dim("moe_intermediate_size")
    shared = width * (values.maybe("n_shared_experts") or 0)
    tensors = (
        *gated_mlp("mlp.experts.{e}", hidden, width, role="expert", copies=experts),
        *router("mlp.gate", experts, hidden),
        *(gated_mlp("mlp.shared_experts", hidden, shared, bias=bias, role="shared_expert") if shared else ()),
    )
    top_k = check_top_k(values, experts, "num_experts_per_tok")
    return tensors, Moe(experts=experts, top_k=top_k, intermediate=width, gated=True, shared_intermediate=shared)


def stacked_experts(prefix: str, hidden: int, width: int, experts: int, *, bias: bool = False) -> tuple[Tensor, ...]:
    """Experts that the state dict stacks, `[experts, in, out]`, gate and up in one tensor.

    One tensor here is one expert's slice, `copies` counts the slices, and the name, which has no `{e}`, is the stack's.
    """

    def slices(name: str, shape: tuple[int, ...], tp_dim: int | None, tp_units: int = 0) -> Tensor:
        return Tensor(
            name=f"{prefix}.{name}",
            shape=shape,
            role="expert",
            tp_dim=tp_dim,
            tp_units=tp_units,
            copies=experts,
            linear=len(shape) == 2,
        )

    up, down = slices("gate_up_proj", (hidden, 2 * width), 1, width), slices("down_proj", (width, hidden), 0)
    if not bias:
        return up, down
    return up, slices("gate_up_proj_bias", (2 * width,), 0, width), down, slices("down_proj_bias", (hidden,), None)


def mtp_block(block: Block, hidden: int, layers: int) -> Block:
    """One multi-token-prediction depth as DeepSeek-V3's checkpoint holds it, after the last layer.

    Two norms, the projection of [embedding; hidden state], a whole decoder layer, a norm before the output layer. The
    embedding and the output layer are those of the model: the checkpoint's second copies are not counted.
    Source: DeepSeek-V3 report (arXiv:2412.19437), section 2.2, and README_WEIGHTS.md of deepseek-ai/DeepSeek-V3.
    """
    return msgspec.structs.replace(
        block,
        kind="mtp",
        layers=(layers,),
        tensors=(
            *norm("enorm", hidden),
            *norm("hnorm", hidden),
            *linear("eh_proj", hidden, 2 * hidden, "mtp"),
            *block.tensors,
            *norm("shared_head.norm", hidden),
        ),
        norms=block.norms + 3,
    )
