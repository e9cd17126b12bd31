"""What the server imports once, so that a rank is forked with torch in memory.

Nothing here may start a thread (no tensor arithmetic, no backward): a fork would inherit its locks, held.
"""

from __future__ import annotations

import gc
import importlib
import os
import warnings

from trainledger.runtime.launch.environment import QUIET

MODULES = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed._composable.replicate_with_fsdp",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.experimental",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch.utils.checkpoint",
    "torch.utils.flop_counter",
    "trainledger.runtime.spec",
    "trainledger.runtime.observe.observation",
)


def load() -> None:
    """Import all of them; then keep what they made out of the collector, so that ranks share its pages."""
    os.environ.update(QUIET)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in MODULES:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


load()
