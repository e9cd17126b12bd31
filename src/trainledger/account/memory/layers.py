"""Layers of a stage as they wait: in regions that are recomputed together, and on the host where they are offloaded.

What a layer keeps is copied to the host as the next one runs forward, and back as that runs backward, so that what two
layers keep is on the card. [te-offload, trl-offload]
"""

from __future__ import annotations

import numpy as np

from trainledger.arrays import IntArray, ceil_div
from trainledger.plans.setting import Setting

ON_CARD = 2
"""Layers whose kept tensors are on the card: the one that runs, and the one on its way."""


def regions(layers: IntArray, vpp: IntArray, size: int) -> IntArray:
    """[plans, rows]: regions of `size` layers each on all virtual stages, the last of each perhaps of fewer.

    >>> regions(np.array([[12]]), np.array([[2]]), 4).tolist()
    [[4]]
    """
    return layers if size == 1 else ceil_div(ceil_div(layers, vpp), size) * vpp


def offloads(setting: Setting) -> bool:
    """Whether what layers keep waits on the host."""
    return "activations" in setting.scenario.offload


def inputs_stay(setting: Setting) -> bool:
    """Whether what recomputed layers were given, and its gradients, stay on the card until the backward is over.

    FSDP reshards a flat parameter that does not train by a hook on the inputs of its module, which it keeps until then.
    A reentrant checkpoint around that module gives it leaves, which keep their gradients.
    [fsdp1: _register_post_backward_reshard_only_hook, torch.utils.checkpoint: CheckpointFunction.backward]
    """
    frozen = setting.workload.lora_rank > 0 and setting.profile.memory.passing == "fsdp1"
    return frozen and setting.profile.memory.reentrant and setting.scenario.recompute == "full"


def on_card(setting: Setting, layers: IntArray) -> IntArray:
    """[plans, rows]: of these layers those whose kept tensors wait on the card."""
    return np.minimum(layers, ON_CARD) if offloads(setting) else layers
