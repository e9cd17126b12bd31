"""Context parallelism: every rank has a part of each sequence, and keys and values go round.

PyTorch's context_parallel() has no rule for the CPU kernels, so its ring-attention template is called here, by an
autograd function of our own. What travels are the grouped key and value heads, not their repetition for each query
head: the CPU kernels and the CUDA kernels take grouped heads forward and backward. [torch:
distributed/tensor/experimental/_context_parallel/_attention.py, aten/src/ATen/native/transformers/cuda/flash_attn]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

# private: the public context_parallel() fails on CPU, and nothing else offers the template
from torch.distributed.tensor.experimental._context_parallel import _attention as template

from trainledger.errors import Refused
from trainledger.runtime.model import Decoder
from trainledger.runtime.model.attention import Attention
from trainledger.runtime.spec import RunSpec
from trainledger.runtime.world import World

_SEQUENCE = 2
"""Dimension of the tokens in q, k and v [batch, heads, tokens, head_dim]."""

_ROTATIONS = {"ring": template._RotateMethod.ALL_TO_ALL, "all_gather": template._RotateMethod.ALL_GATHER}
"""How keys and values travel, by the word of --cp-comm; their gradients go hop by hop under both."""


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """A flash kernel and its backward; `extras` names what the one returns last and the other asks for."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    extras: tuple[str, ...] = ()


_ATEN = torch.ops.aten
_KERNELS = {
    "cpu": _Kernel(
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default,
    ),
    "cuda": _Kernel(
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_flash_attention_backward.default,
        ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset"),
    ),
}


class _Context(Protocol):
    """What the backward finds of its forward."""

    saved_tensors: tuple[torch.Tensor, ...]
    ring: Ring
    extras: dict[str, Any]

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...


class _RingAttention(torch.autograd.Function):
    """Causal attention of this rank's queries to the whole sequence's keys and values."""

    @staticmethod
    def forward(ctx: _Context, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ring: Ring) -> torch.Tensor:
        kernel = _KERNELS[query.device.type]
        with _rotating(ring.rotation):
            out, logsumexp, *rest = template._templated_ring_attention(
                ring.group, _SEQUENCE, kernel.forward, query, key, value, is_causal=True, scale=ring.scale
            )
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.ring, ctx.extras = ring, dict(zip(kernel.extras, rest, strict=False))
        return out

    @staticmethod
    def backward(ctx: _Context, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, logsumexp = ctx.saved_tensors
        with _rotating(ctx.ring.rotation):
            found = template._templated_ring_attention_backward(
                ctx.ring.group,
                _SEQUENCE,
                _KERNELS[query.device.type].backward,
                grad_out=grads[0].contiguous(),
                grad_out_name="grad_out",
                query=query,
                key=key,
                value=value,
                out=out,
                logsumexp=logsumexp,
                is_causal=True,
                dropout_p=0.0,
                scale=ctx.ring.scale,
                **ctx.extras,
            )
        return *found[:3], None


@contextmanager
def _rotating(rotation: str) -> Generator[None]:
    """The template reads how to rotate from one object of its module: set for a call, then put back."""
    options = template._cp_options
    before = options.rotate_method, options.enable_load_balance
    options.rotate_method, options.enable_load_balance = _ROTATIONS[rotation], True
    try:
        yield
    finally:
        options.rotate_method, options.enable_load_balance = before


@dataclasses.dataclass(frozen=True)
class Ring:
    """Attention of one layer to a whole sequence, of which each rank of `group` has what `split_sequence` gives it.

    rotation   a word of --cp-comm
    scale      factor on q k^T
    """

    group: dist.ProcessGroup
    rotation: str
    scale: float

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Q [B, H, S, D], k and v [B, KV, S, D] of this rank's tokens to [B, H, S, D]."""
        assert mask is None, "layers with a mask of their own were refused"
        return cast("torch.Tensor", _RingAttention.apply(q, k, v, self))


def parallelize_context(decoder: Decoder, world: World, spec: RunSpec) -> None:
    """Let every attention layer see the keys of all ranks of its sequence, and tell the decoder how long that is."""
    group = world.group("cp")
    if group is None:
        return
    _check(decoder, world, spec)
    decoder.length = spec.seq
    for module in decoder.modules():
        if isinstance(module, Attention):
            module.attend = Ring(group, spec.cp_comm, module.rule.scale)


def _check(decoder: Decoder, world: World, spec: RunSpec) -> None:
    """Refuse what a ring cannot do: its template knows no mask but the causal one, and only flash kernels."""
    cp, model = spec.plan["cp"], spec.model
    if world.device.type == "cuda" and spec.precision == "fp32":
        raise Refused("cp-flash", f"cp={cp} runs on flash kernels, which have no fp32 on CUDA; use --precision bf16")
    for name, module in decoder.named_modules():
        if isinstance(module, Attention) and not module.plain_up_to(spec.seq):
            raise Refused(
                "cp-causal",
                f"cp={cp} sends keys round a ring that knows no mask but the causal one, and {name} of {model.name} "
                f"has a window below --seq {spec.seq}, a soft cap, sinks or ALiBi; use --cp 1",
            )


def split_sequence(tensor: torch.Tensor, dim: int, cp_rank: int, cp: int) -> torch.Tensor:
    """The part of a sequence that one rank has: of 2 cp equal pieces the cp_rank-th from the front and from the back.

    A causal query of the front sees few keys and one of the back many; the pair is as much work on every rank.

    >>> [split_sequence(torch.arange(8), 0, rank, 2).tolist() for rank in range(2)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    if cp == 1:
        return tensor
    assert tensor.size(dim) % (2 * cp) == 0, "the rule cp-seq lets only whole pieces pass"
    pieces = tensor.chunk(2 * cp, dim)
    return torch.cat([pieces[cp_rank], pieces[-1 - cp_rank]], dim)
