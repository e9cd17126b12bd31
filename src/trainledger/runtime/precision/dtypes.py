"""The dtypes of each recipe, by the ledger's words."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from trainledger.runtime.spec import Precision

_ACTIVATIONS: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def activation_dtype(precision: Precision) -> torch.dtype:
    """What layers hand on, and what travels between pipeline stages; an FP8 recipe casts inside its layers only.

    >>> activation_dtype("fp16"), activation_dtype("fp8-rowwise")
    (torch.float16, torch.bfloat16)
    """
    return _ACTIVATIONS.get(precision, torch.bfloat16)


def mixed_precision(precision: Precision) -> MixedPrecisionPolicy:
    """What FSDP2 gathers weights as, and reduces gradients in: always fp32."""
    if precision == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=activation_dtype(precision), reduce_dtype=torch.float32)
