"""Activations that are computed again in the backward, by the ledger's names: none, full."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from trainledger.errors import BadInput
from trainledger.runtime.spec import RunSpec

RECOMPUTE = ("none", "full")


def recomputed(spec: RunSpec) -> Callable[[nn.Module], nn.Module]:
    """What a block becomes: itself, or a checkpoint around it that keeps only its input.

    Without `early_stop` the whole block runs again; with it the second run ends at the last tensor that the backward
    asks for, so the block's last matmul and reduction are spared. [torch: utils/checkpoint.py, set_checkpoint_early_stop]
    """
    match spec.recompute:
        case "none":
            return lambda block: block
        case "full":
            return partial(
                checkpoint_wrapper,
                checkpoint_impl=CheckpointImpl.NO_REENTRANT,
                preserve_rng_state=False,
                early_stop=spec.early_stop,
            )
        case _:
            raise BadInput(f"--recompute {spec.recompute}: the program knows {', '.join(RECOMPUTE)}")
