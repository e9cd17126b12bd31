"""One rank's optimizer step in the order in which PyTorch's program runs it, and the most that is ever alive in it.

What is alive between steps is known line by line (account/rank.py). On top of it, in turn: tokens and labels, what each
part of the model keeps and needs forward and backward, what data parallelism gathers and reduces, what a pipeline holds
to send, and what the optimizer works with.
"""

from __future__ import annotations

import msgspec

from trainledger.account.memory.rank.build import EXPERTS, Parts, data_parallel, size, units_of
from trainledger.account.memory.rank.pipeline import Chunk, OneByOne, Planned
from trainledger.account.memory.rank.runs import run_backward, run_forward
from trainledger.account.memory.rank.tally import Tally
from trainledger.account.own import Part, RankShares
from trainledger.account.traffic.tensor import partial_tensors
from trainledger.facts.semantics import Semantics
from trainledger.schedules import find_schedule

EIGHT_BITS = ("adamw-8bit", "adamw-fp8")
"""Optimizers that decode the moments of one tensor after the other. [torchao 0.18.0: optim/adam.py]"""
STEPPING = 24
"""Bytes an element of such a step: weight, both moments, their quotient and two results on the way, all in fp32."""
CODING = 53
"""The same as the second moment is coded: weight and moments, what is scaled, codes and those above in 64 bits, the
values of both, how far from the lower, which is nearer, and the codes that are chosen. [torchao 0.18.0:
optim/quant_utils.py, quantize_8bit_with_qmap]"""


class Alive(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one rank.

    saved   kept for the backward when the last loss is there; None in a pipeline, where micro-batches overlap
    peak    the most that is alive at any time of a step, and where that is
    """

    saved: int | None
    peak: int
    where: str


class RankStep:
    """One rank's step.

    rest    bytes that are alive between steps
    clips   gradients are clipped
    dry     requests hold nothing that they send
    """

    def __init__(self, of: RankShares, rules: Semantics, rest: int, *, clips: bool, dry: bool) -> None:
        self.of = of
        self.rules = rules
        self.clips = clips
        self.dry = dry
        self.setting = of.inventory.setting
        self.tally = Tally(rest)
        self.units = units_of(of)
        split = self.setting.scenario.schedule == "zero-bubble" and of.plan["pp"] > 1
        self.parts = Parts(of, rules, self.units, split=split)
        self.length = self.setting.workload.seq // of.plan["cp"]
        self.saved: int | None = None

    def run(self) -> Alive:
        """Run it."""
        with self.tally.during("tokens and labels", self._batch()):
            if self.of.plan["pp"] > 1:
                self._piped()
            else:
                self._accumulated()
            self._sum_partial()
        self._optimize()
        return Alive(saved=self.saved, peak=self.tally.most, where=self.tally.where)

    def _accumulated(self) -> None:
        """Forward and backward of each micro-batch in turn. [runtime/program.py]"""
        tally, count = self.tally, self.of.plan["num_microbatches"]
        pieces, data = self.parts.of_chunk(0), data_parallel(self.of, self.tally, list(self.units.values()))
        shared, loss = self._shared([*self.of.layers]), 2 * size(1, "fp32")
        for index in range(count):
            data.micro_batch(last=index == count - 1)
            with tally.during("rotary tables", shared):
                with tally.during("positions", 0 if self._recomputed else self._positions):
                    run_forward(tally, data, pieces)
                self.saved = sum(piece.saved for piece in pieces) + shared + loss + self._batch()
                with tally.during("loss", loss):
                    run_backward(tally, data, pieces)
            data.finish()

    def _piped(self) -> None:
        """All micro-batches through the pipeline's schedule, of this rank's tokens and labels joined."""
        plan, schedule = self.of.plan, self.setting.scenario.schedule
        count = plan["num_microbatches"]
        chunks = {chunk: self._chunk(chunk) for chunk in self.of.chunks}
        ops = find_schedule(schedule).ops(plan["pp"], plan["vpp"], count, self.of.place.pp)
        with self.tally.during("tokens and labels joined", 2 * size(plan["mbs"] * count * self.length, "int64")):
            if schedule == "1f1b":
                OneByOne(self.tally, chunks[self.of.place.pp], held=not self.dry).run(ops)
            else:
                Planned(self.tally, chunks, count, held=not self.dry).run(ops)

    def _chunk(self, chunk: int) -> Chunk:
        pieces = self.parts.of_chunk(chunk)
        own = {unit.name: unit for piece in pieces for unit in piece.all_units}
        data = data_parallel(self.of, self.tally, [unit for name, unit in self.units.items() if name in own])
        data.micro_batch(last=False)
        return Chunk(self.tally, data, pieces, self._shared([*self.parts.layers(chunk)]))

    @property
    def _recomputed(self) -> bool:
        return self.setting.scenario.recompute == "full"

    @property
    def _positions(self) -> int:
        """Bytes of the positions of a micro-batch."""
        return size(self.length, "int64")

    def _shared(self, layers: list[int]) -> int:
        """Bytes that all layers of a forward share and some keep: rotary tables; positions too where they run again."""
        names = {name for layer in layers if (name := self.rules.attention[layer].rotary) is not None}
        tables = (self.rules.rotary[name] for name in names)
        # a pipeline has the positions for the whole run
        positions = self._positions if self._recomputed and self.of.plan["pp"] == 1 else 0
        dtype = self.setting.recipe.activation
        return positions + sum(2 * size(self.length * rule.dim, "fp32" if rule.fp32 else dtype) for rule in tables)

    def _batch(self) -> int:
        """Bytes of tokens and labels of a step: the whole job's, or each rank's part where sequences are divided.

        A single sequence with the token after it is in order as it is, and both look into it. [runtime/batch.py]
        """
        plan, seq = self.of.plan, self.setting.workload.seq
        own = plan["mbs"] * plan["num_microbatches"]
        if plan["cp"] > 1:
            return 2 * size(own * self.length, "int64")
        sequences = own * plan["dp_replicate"] * plan["dp_shard"]
        return size(seq + 1 if sequences == 1 else 2 * sequences * seq, "int64")

    @property
    def _held(self) -> list[tuple[Part, int]]:
        """Each tensor with the elements that this rank holds of it."""
        sharded = self.of.plan["zero_stage"] > 0
        return [(part, self.of.cut(part, sharded=sharded).held) for part in self.of.parts]

    def _sum_partial(self) -> None:
        """Gradients that tensor-parallel ranks add up are joined first. [runtime/parallelize/tensor.py]"""
        if self.of.plan["tp"] > 1:
            inside, outside = partial_tensors(self.of.table, self.setting.model.layer_prefix)
            rows = inside | outside if self.of.plan["sp"] else inside
            total = sum(held for part, held in self._held if rows[part.row])
            self.tally.reach("partial gradients joined", size(total, self.setting.dtype("grad")))

    def _optimize(self) -> None:
        """Clipping squares one gradient after the other; AdamW by lists takes all square roots of a list at once.

        Experts that have ranks of their own are a list of their own. [runtime/optimize.py] [torch-foreach]
        """
        if self.clips:
            self.tally.reach("square of a gradient", size(max(held for _, held in self._held), "fp32"))
        if self.setting.scenario.optimizer == "adamw":
            lists = {True: 0, False: 0}
            for part, held in self._held:
                lists[part.unit.endswith(EXPERTS)] += held
            self.tally.reach("square roots of the step", size(max(lists.values()), self.setting.dtype("weight")))
        if self.setting.scenario.optimizer in EIGHT_BITS:
            most = max(held * self._stepped(held) for _, held in self._held)
            self.tally.reach("step of a tensor on decoded moments", most)

    def _stepped(self, held: int) -> int:
        """Bytes an element of a tensor of which a rank holds so much takes while it is stepped by itself, on a copy."""
        moment = self.setting.optimizer.moments[0]
        coded = held >= moment.least and held % moment.block == 0
        return CODING if coded and self.setting.scenario.optimizer == "adamw-8bit" else STEPPING
