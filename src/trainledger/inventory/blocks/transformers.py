"""The parts of a model of transformers, run eagerly on a card: what DeepSpeed and accelerate wrap.

Operation by operation as in this package's own program, but for three things. A norm is a module of its own, which
casts back before it multiplies by its weight. Attention is one kernel of the card, for which older releases copy keys
and values for each query head. And the loss is computed inside the model, on logits in fp32.
[transformers: models/llama/modeling_llama.py, integrations/sdpa_attention.py, loss/loss_utils.py]
"""

from __future__ import annotations

from collections.abc import Callable

from trainledger.arrays import IntArray
from trainledger.inventory.blocks.eager.ends import Ends
from trainledger.inventory.blocks.eager.model import Eager
from trainledger.inventory.blocks.eager.ops import Ops, Sheet
from trainledger.inventory.blocks.eager.parts import layers
from trainledger.inventory.blocks.frozen import frozen_of
from trainledger.inventory.blocks.loss import Logits, cross_entropy
from trainledger.inventory.blocks.parts import Parts
from trainledger.inventory.blocks.sizes import Sizes
from trainledger.inventory.inventory import Inventory
from trainledger.inventory.tape import Program, Tape, walk


class Modules(Ops):
    """Operations of transformers' modules."""

    modules = True


class Given(Ends):
    """The ends of a model that gives its loss together with its logits."""

    def loss(self, logits: Sheet) -> None:
        """By the word of the release."""
        elements, several = logits.rows * logits.width, self.sizes.plans.mbs > 1
        of = Logits(rows=logits.rows, elements=elements, dtype=logits.dtype, several=several)
        cross_entropy(self.ops.program, self.sizes.setting.loss_of(cut=False), logits.value, of)


class Transformers(Eager[Tape]):
    """The parts of a model under a Setting on one rank of each plan."""

    def _walked(self, build: Callable[[Ops], Sheet | None]) -> Tape:
        ops = Modules(Program(), self.sizes.dtype, frozen_of(self.sizes.setting))
        given = build(ops)
        return self.walk(ops.program, None if given is None else given.value)

    def _ends(self, ops: Ops) -> Ends:
        return Given(ops, self.model, self.rules, self.sizes)


def parts(inventory: Inventory, sizes: Sizes) -> Parts:
    """The parts under a Setting."""
    made = Transformers(sizes, inventory.presumed, walk)
    return Parts(
        embedding=made.embedding(),
        blocks=layers(inventory, made),
        final=made.final(),
        beside=_outputs(sizes),
    )


def _outputs(sizes: Sizes) -> IntArray:
    """[plans]: logits that a variable of the loop holds, until those of the next micro-batch take their place."""
    setting = sizes.setting
    given = "fp32" if setting.loss_of(cut=False) == "shifted" else sizes.dtype
    return sizes.logits(given) * setting.profile.memory.outputs_held
