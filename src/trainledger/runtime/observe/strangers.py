"""Tensors that no watched operation was seen to make: those of another thread, or over memory from elsewhere.

A dispatch mode sees the operations of its own thread. But every tensor that Python can reach is among the objects of
its collector, whoever made it.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import torch

# private: nothing public tells whether tensors are fake
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

UNSEEN = "unseen"
"""The operation that a stranger is said to be born in."""


class Strangers:
    """Tensors that are not from before this was made."""

    def __init__(self) -> None:
        self._before = [weakref.ref(tensor.untyped_storage()) for tensor in _living()]

    def found(self) -> Iterator[torch.Tensor]:
        """Every tensor since, those that were seen among them."""
        # private: the address, which is what a storage is told apart by while it lives
        before = {storage._cdata for ref in self._before if (storage := ref()) is not None}
        return (tensor for tensor in _living() if tensor.untyped_storage()._cdata not in before)


def _living() -> list[torch.Tensor]:
    """All tensors with memory of their own; a wrapper's is that of the tensors that it wraps.

    Among fake tensors real ones are the constants that some of the fake ones remember.
    """
    kind = torch.Tensor if detect_fake_mode() is None else FakeTensor
    # by type(), since some objects answer isinstance() by running code of theirs
    tensors = (thing for thing in gc.get_objects() if issubclass(type(thing), kind))
    return [tensor for tensor in tensors if not is_traceable_wrapper_subclass_type(type(tensor)) and not tensor.is_meta]
