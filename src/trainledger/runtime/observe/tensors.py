"""What watchers ask of a tensor: the word for its dtype, its local part, its bytes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_WORDS = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}


_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Tensors that wrap no other."""


def dtype_word(dtype: torch.dtype) -> str:
    """The ledger's word: fp32, bf16, fp8 ...; integers keep PyTorch's (int64, uint8, bool).

    >>> dtype_word(torch.bfloat16), dtype_word(torch.int64)
    ('bf16', 'int64')
    """
    return _WORDS.get(dtype, str(dtype).removeprefix("torch."))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or what this rank holds of a DTensor; without the wrapper that gathers it in FP8."""
    # private: to_local() makes a view of a parameter, and a view of fake memory that FSDP2 has freed takes it up again
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return _unwrapped(local)


def _unwrapped(local: torch.Tensor) -> torch.Tensor:
    """What a tensor of torchao's keeps elements in: of a weight that is gathered in FP8, and of what was gathered.

    [torchao 0.18.0: float8/fsdp_utils.py, float8_training_tensor.py]
    """
    if type(local) in _PLAIN:
        return local
    inner = getattr(local, "_tensor", None)
    return getattr(local, "_data", local) if inner is None else inner


def stored_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """All plain tensors that a tensor's bytes are in: more than one where a moment in 8 bits has scales and codes."""
    local = local_part(tensor)
    if not is_traceable_wrapper_subclass(local):
        return [local]
    names, _ = local.__tensor_flatten__()
    return [part for name in names for part in stored_parts(getattr(local, name))]


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements, wherever they are stored."""
    return tensor.numel() * tensor.itemsize


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """All tensors of a value that an operation takes or gives: a tensor, nested lists of them, or something else."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)
