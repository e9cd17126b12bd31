"""Frozen matrices and the adapters beside them: what their products need, keep and are given.

4 bits     a product casts what it is given and unpacks its matrix, forward and backward, scales first: the doubly
           quantised ones into fp32; what it gives is cast back. Before release 0.43.2 it kept what it multiplies, in an
           attribute of its node in the graph, which the backward does not clear: it stays as long as the loss does.
           [bitsandbytes: autograd/_functions.py MatMul4Bit, functional.py dequantize_4bit, nn/modules.py Linear4bit]
autocast   a matrix in fp32 that is frozen is cast for each product, and the copy waits for its backward: only what
           trains is cast once. Adapters are in fp32, so peft casts what they are given, and autocast casts it back.
           [torch: aten/src/ATen/autocast_mode.cpp cached_cast; peft-lora]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from trainledger.arrays import IntArray, ceil_div
from trainledger.dtypes import NF4_BLOCK, bytes_of
from trainledger.plans.setting import Setting


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """How a model's matrices are multiplied that do not train; without a rank all of them do.

    rank, targets  of adapters, and the last parts of the names of those that have one
    drops          a share of what an adapter is given is dropped
    adapter        dtype of what it is given, by its own weights; "": as it comes
    quantised      the matrices of layers are in 4 bits
    keeps          such a product keeps what it multiplies, for a "step" or, the loss being held, for two, "steps"
    wide           those of the output layer are in fp32 and cast for each product
    """

    rank: int = 0
    targets: tuple[str, ...] = ()
    drops: bool = False
    adapter: str = ""
    quantised: bool = False
    keeps: str = ""
    wide: bool = False

    def adapts(self, module: str) -> bool:
        """Whether a module, by the last part of its name, has an adapter."""
        return self.rank > 0 and module != "" and (self.targets == ("all-linear",) or module in self.targets)

    def unpacked(self, module: str, elements: IntArray, dtype: str) -> tuple[IntArray, ...]:
        """Bytes of a 4-bit matrix while it is multiplied: its scales, and the matrix."""
        if not (self.quantised and module):
            return ()
        return bytes_of(ceil_div(elements, NF4_BLOCK), "fp32"), bytes_of(elements, dtype)

    def keeps_input(self, module: str) -> bool:
        """Whether a product waits with what it multiplies although its matrix does not train."""
        return self.quantised and self.keeps != "" and module != ""

    def gives_back(self, module: str) -> bool:
        """Whether what it gives is cast to the dtype of what it was given, whatever it multiplied in."""
        return self.quantised and module != ""

    def cast_weight(self, module: str, elements: IntArray, dtype: str) -> Mapping[str, IntArray]:
        """The copy of an fp32 matrix that waits for its backward."""
        return {"matrix cast": bytes_of(elements, dtype)} if self.wide and not module else {}


def frozen_of(setting: Setting) -> Frozen:
    """By workload, recipe and engine."""
    workload, rules = setting.workload, setting.profile.memory
    if not workload.lora_rank:
        return Frozen()
    return Frozen(
        rank=workload.lora_rank,
        targets=workload.lora_targets,
        drops=workload.lora_dropout > 0,
        adapter=setting.dtype("weight") if rules.autocast else setting.recipe.activation,
        quantised=workload.qlora,
        keeps=rules.keeps_4bit_input,
        wide=setting.stream != setting.recipe.activation,
    )
