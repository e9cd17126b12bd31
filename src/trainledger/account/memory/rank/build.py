"""The units and the parts of one rank's stages, from its own shares of every tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

from trainledger.account.memory.rank.fully_shard import FullyShard, Knobs
from trainledger.account.memory.rank.piece import Piece
from trainledger.account.memory.rank.tally import Tally
from trainledger.account.memory.rank.units import DataParallel, Unit
from trainledger.account.own import Part, RankShares
from trainledger.arrays import ints
from trainledger.dtypes import kept_bytes
from trainledger.facts.semantics import Semantics
from trainledger.inventory.blocks.eager import Eager
from trainledger.inventory.blocks.sizes import Sizes
from trainledger.inventory.tape import Split, Tape, retained, walk
from trainledger.plans import sharding
from trainledger.plans.split import layers_of, layers_per_chunk

ENTRY, EXIT, BOTH = "embedding", "final", "embedding+final"
"""Units at the ends of a model; one where they share a weight on the same rank. [account/own.py]"""
EXPERTS = " experts"


def size(count: int, dtype: str) -> int:
    """Bytes of so many elements."""
    return int(kept_bytes(ints(count), dtype)[0])


def units_of(of: RankShares) -> dict[str, Unit]:
    """Every unit of a rank by its name, in the order of its modules."""
    names = dict.fromkeys(part.unit for part in of.parts)
    return {name: _unit(of, name, [part for part in of.parts if part.unit == name]) for name in names}


def _unit(of: RankShares, name: str, parts: Sequence[Part]) -> Unit:
    setting = of.inventory.setting
    # gradients come in the dtype that is computed in, which is not that of weights in FP8
    given, reduced = setting.recipe.activation, setting.dtype("unsharded_grad")
    width = [size(1, of.gathered_as(part)) for part in parts]
    sharded = of.plan["zero_stage"] > 0
    cuts = [of.cut(part, sharded=sharded) for part in parts]
    stored = [cut.stored for cut in cuts]
    cast = [count * each for count, each in zip(stored, width, strict=True)]
    whole = sum(cut.stored * cut.ranks for cut in cuts)
    numel = [part.numel for part in parts]
    alone = cuts[0].ranks == 1
    within = [part.numel for part, cut in zip(parts, cuts, strict=True) if part.copies and cut.ranks > part.copies]
    return Unit(
        name=name,
        whole=sum(bytes_ * cut.ranks for bytes_, cut in zip(cast, cuts, strict=True)),
        cast=sum(cast) * setting.casts,
        largest=max(cast) * setting.casts,
        fresh=size(sum(numel), given),
        widened=size(sum(numel), reduced),
        widest=size(max(numel), reduced),
        reduced=size(whole, reduced),
        shard=size(sum(stored), reduced),
        last=size(numel[-1], given),
        tied=size(numel[0], given) if name == BOTH else 0,
        joined=size(sum(within), given),
        # the experts' gradients are divided by a number of their own, which takes a copy where nothing is sent
        divided=size(whole, reduced) if alone and name.endswith(EXPERTS) else 0,
        alone=alone,
        whole_pass=name in (ENTRY, BOTH),
    )


def data_parallel(of: RankShares, tally: Tally, units: Sequence[Unit]) -> DataParallel:
    """What wraps these units. In a pipeline they stay gathered and are reduced when all micro-batches are done."""
    if not of.inventory.setting.casts and not sharding.wrapped(of.own.plans, "unit")[0]:
        return DataParallel(tally)
    zero, piped = of.plan["zero_stage"], of.plan["pp"] > 1
    knobs = Knobs(
        forward_keeps=zero != 3 or piped,
        backward_keeps=zero in (1, 2) or piped,
        every=zero in (2, 3) and not piped,
        replicas=of.plan["dp_replicate"] > 1,
    )
    return FullyShard(tally, units, knobs)


class Parts:
    """Builds the pieces of each chunk.

    split   with a backward for inputs alone
    """

    def __init__(self, of: RankShares, rules: Semantics, units: dict[str, Unit], *, split: bool) -> None:
        self.of = of
        self.units = units
        self.model = of.inventory.setting.model
        sizes, end = Sizes(of.inventory.setting, of.own.plans), of.place.cp == of.plan["cp"] - 1
        self.eager: Eager[Tape] = Eager(sizes, rules, partial(walk, anew=True), ring_end=end, emulates=True)
        self.for_inputs: Eager[Split] | None = None
        if split:
            self.for_inputs = Eager(sizes, rules, partial(retained, anew=True), ring_end=end, emulates=True)
        self.kinds = {layer: block for block in self.model.blocks for layer in block.layers}

    def layers(self, chunk: int) -> range:
        """The layers of a chunk."""
        setting, plan = self.of.inventory.setting, self.of.plan
        chunks = plan["pp"] * plan["vpp"]
        split, layout = setting.profile.split, setting.scenario.pp_layout
        return layers_of(chunk, layers_per_chunk(self.model.num_layers, chunks, split, layout))

    def of_chunk(self, chunk: int) -> list[Piece]:
        """The pieces of a chunk in forward order."""
        first, last = chunk == 0, chunk == self.of.plan["pp"] * self.of.plan["vpp"] - 1
        made = [
            *([self._entry()] if first else []),
            *map(self._layer, self.layers(chunk)),
            *(self._exit() if last else []),
        ]
        if not first:
            made[0] = dataclasses.replace(made[0], lent=True)
        if not last:
            made[-1] = dataclasses.replace(made[-1], lent_back=True)
        return made

    def _entry(self) -> Piece:
        other = self.for_inputs
        return Piece(
            label="embedding",
            tape=self.eager.embedding(),
            inputs=None if other is None else other.embedding(),
            unit=self.units.get(BOTH) or self.units[ENTRY],
            closes=BOTH not in self.units,
        )

    def _layer(self, layer: int) -> Piece:
        name, block, other = (
            self.model.layer_prefix.replace("{i}", str(layer)).rstrip("."),
            self.kinds[layer],
            self.for_inputs,
        )
        return Piece(
            label=f"layer {layer}",
            tape=self.eager.layer(block, layer),
            inputs=None if other is None else other.layer(block, layer),
            unit=self.units[name],
            inner=self.units.get(name + EXPERTS),
        )

    def _exit(self) -> list[Piece]:
        other = self.for_inputs
        output = Piece(
            label="output layer",
            tape=self.eager.output(),
            inputs=None if other is None else other.output(),
            unit=self.units.get(BOTH) or self.units[EXIT],
            opens=BOTH not in self.units,
        )
        loss = Piece(label="loss", tape=self.eager.loss(), inputs=None if other is None else other.loss())
        return [output, loss]
