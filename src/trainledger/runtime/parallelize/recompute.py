"""Activations that are computed again in the backward, by the ledger's names: none, full."""

from __future__ import annotations

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from trainledger.runtime.spec import RunSpec


def recomputed(block: nn.Module, spec: RunSpec) -> nn.Module:
    """What a block becomes: itself, or under recompute full a checkpoint around it that keeps only its input.

    Without `early_stop` the whole block runs again; with it the second run ends at the last tensor that the backward
    asks for, so the block's last matmul and reduction are spared.
    [torch: utils/checkpoint.py, set_checkpoint_early_stop]
    """
    if spec.recompute == "none":
        return block
    return checkpoint_wrapper(
        block,
        checkpoint_impl=CheckpointImpl.NO_REENTRANT,
        preserve_rng_state=False,
        early_stop=spec.early_stop,
    )
