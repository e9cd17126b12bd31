"""The manner of this package's own program: every operation that PyTorch runs eagerly, on CPU kernels."""

from trainledger.inventory.blocks.eager.model import Eager, unlike

__all__ = ["Eager", "unlike"]
