"""The training program: one rank's models, cut as the plan says, its optimizer, and one optimizer step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from trainledger.plans.split import chunks_of, layers_of, layers_per_chunk
from trainledger.runtime.batch import Batch, Drawn, Source
from trainledger.runtime.model import Decoder, build_decoder, init_weights
from trainledger.runtime.optimize import build_optimizer, clip_gradients, cut_by
from trainledger.runtime.parallelize.context import parallelize_context, split_sequence
from trainledger.runtime.parallelize.data import DataParallel
from trainledger.runtime.parallelize.expert import parallelize_experts
from trainledger.runtime.parallelize.loss import loss_of
from trainledger.runtime.parallelize.pipeline import Pipeline, reduce_tied_embedding
from trainledger.runtime.parallelize.recompute import recomputed
from trainledger.runtime.parallelize.tensor import parallelize_tensor, reduce_partial_gradients
from trainledger.runtime.precision.recipe import Recipe
from trainledger.runtime.spec import RunSpec
from trainledger.runtime.tensors import Kept, Named, gathered_units, kept_parameters, kept_tensors, value_of
from trainledger.runtime.watch import Unwatched, Watch
from trainledger.runtime.world import World


class Stepped(NamedTuple):
    """What one rank knows of an optimizer step.

    loss      mean over this rank's tokens, before the step; None where this rank computes none
    norm      of all gradients of the job before they were clipped; None where nothing is clipped
    skipped   the optimizer did not step, on any rank, for a scaled gradient was not finite
    scale     what the loss was multiplied by; None without loss scaling
    """

    loss: float | None
    norm: float | None = None
    skipped: bool = False
    scale: float | None = None


class Program:
    """What one rank runs.

    source       where its tokens come from; unless given, they are drawn
    precision    what it casts and scales
    decoders     the (virtual) pipeline stages of this rank, in order
    kept         tensors held beside those of the plan: none, unless a fault was planted
    sums_norm    whether clipping sums the norm over the job: always, unless a fault was planted
    """

    def __init__(self, spec: RunSpec, world: World, watch: Watch | None = None, source: Source | None = None) -> None:
        self.spec = spec
        self.world = world
        self.source: Source = source or Drawn(spec, world.place)
        self.watch: Watch = watch or Unwatched()
        self.kept: list[torch.Tensor] = []
        self.sums_norm = True
        self.precision = Recipe(spec, world)
        self.data = DataParallel(spec, world, self.watch)
        chunks = chunks_of(world.place.pp, spec.plan["pp"], spec.plan["vpp"])
        self.decoders = [self._cut(self._decoder(chunk)) for chunk in chunks]
        self.modules = [self.data.wrap(decoder) for decoder in self.decoders]
        self.pipeline = self._pipeline() if spec.plan["pp"] > 1 else None
        self.parameters: list[Kept] = [kept for module in self.modules for kept in kept_parameters(module)]
        self.optimizer = build_optimizer((kept.parameter for kept in self.parameters), spec)
        self.precision.weights_changed()

    def _decoder(self, chunk: int) -> Decoder:
        spec = self.spec
        chunks = spec.plan["pp"] * spec.plan["vpp"]
        per_chunk = layers_per_chunk(spec.model.num_layers, chunks, "front", spec.pp_layout)
        layers = layers_of(chunk, per_chunk)
        with self.world.device:
            decoder = build_decoder(spec.model, spec.config, layers=layers, first=chunk == 0, last=chunk == chunks - 1)
        init_weights(decoder, spec.seed)
        self.precision.convert(decoder)
        return decoder

    def _cut(self, decoder: Decoder) -> Decoder:
        """Every axis but data and pipeline, innermost first."""
        spec, world = self.spec, self.world
        if spec.plan["tp"] > 1:
            parallelize_tensor(decoder, world.tp_mesh, spec)
        if spec.plan["ep"] > 1:
            parallelize_experts(decoder, world, spec)
        if spec.plan["cp"] > 1:
            parallelize_context(decoder, world, spec)
        for path in decoder.block_paths.values():
            decoder.set_submodule(path, recomputed(decoder.get_submodule(path), spec))
        return decoder

    def _pipeline(self) -> Pipeline:
        positions = self._positions()
        every = torch.arange(self.spec.seq, device=self.world.device)
        return Pipeline(
            self.modules, self.spec, self.world, self._scaled_loss, every if positions is None else positions
        )

    def named_tensors(self) -> Iterator[Named]:
        """Everything the plan lets this rank keep, at this moment."""
        yield from (Named("buffers", name, ranks) for name, ranks in self.world.rank_maps.items())
        yield from kept_tensors(self.parameters, self.optimizer)
        yield from self.precision.named(self.parameters)
        if self.pipeline is not None:
            yield Named("buffers", "positions", self.pipeline.positions)
            yield from self.pipeline.received()

    def step(self, index: int) -> Stepped:
        """One optimizer step on batch `index`."""
        watch = self.watch
        batches = [self._own_tokens(batch) for batch in self.source(index)]
        loss = self._piped(batches) if self.pipeline else self._accumulated(batches)
        del batches
        with watch.phase("backward"):
            self._finish_gradients()
        watch.instant("backward", self.named_tensors())
        with watch.phase("clip"):
            scale = self.precision.scale
            self.precision.unscale(self.optimizer)
            norm = self._clip() if self.spec.clip_norm else None
        with watch.phase("optimizer"):
            skipped = self.precision.step(self.optimizer, self.parameters)
            self.optimizer.zero_grad()
            self.data.after_step()
            self.precision.weights_changed()
        watch.instant("rest", self.named_tensors())
        return Stepped(loss, norm, skipped, scale)

    def evaluate(self, batches: Iterable[Batch], count: int | None = None) -> float | None:
        """Mean loss of the first `count` sequences of these micro-batches [mbs, seq], without gradients.

        All ranks call it with as many micro-batches, sequences whole; what lies beyond `count` (None: nothing) only
        fills the last one up. None where this rank computes no loss, and 0.0 over no sequences.
        """
        losses: list[torch.Tensor] = []
        with torch.no_grad():
            for tokens, labels in map(self._own_tokens, batches):
                logits = self._forward(tokens)
                if logits is not None:
                    # sequence by sequence, so that those that fill up a micro-batch can be left out
                    losses += [self._loss(*pair) for pair in zip(logits.split(1), labels.split(1), strict=True)]
            self.data.after_step()
        if self.pipeline is not None and not self.pipeline.is_last:
            return None
        counted = losses[:count]
        return value_of(torch.stack(counted).mean()) if counted else 0.0

    def _forward(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Logits of one micro-batch; None where they are another stage's."""
        if self.pipeline is not None:
            return self.pipeline.forward(tokens)
        (module,) = self.modules
        return module(tokens, self._positions())

    def set_learning_rate(self, rate: float) -> None:
        """What the optimizer's next step multiplies its direction by."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def group_gathered(self) -> None:
        """Tell the watch what is gathered together; FSDP2 makes those storages in the first step."""
        for module in self.modules:
            for name, tensors in gathered_units(module):
                self.watch.group(name, tensors)

    def _own_tokens(self, batch: Batch) -> Batch:
        """The part of each sequence that this context-parallel rank computes, on its device."""
        cp = self.spec.plan["cp"]
        tokens, labels = (part.to(self.world.device) for part in batch)
        if cp == 1:
            return tokens, labels
        return split_sequence(tokens, 1, self.world.place.cp, cp), split_sequence(labels, 1, self.world.place.cp, cp)

    def _positions(self) -> torch.Tensor | None:
        cp = self.spec.plan["cp"]
        every = torch.arange(self.spec.seq, device=self.world.device)
        return split_sequence(every, 0, self.world.place.cp, cp) if cp > 1 else None

    def _accumulated(self, batches: list[Batch]) -> float:
        """Forward and backward of each micro-batch in turn."""
        (module,), watch = self.modules, self.watch
        total = 0.0
        for index, (tokens, labels) in enumerate(batches):
            last = index == len(batches) - 1
            self.data.before_micro_batch(last=last)
            with watch.phase("forward"):
                loss = self._loss(module(tokens, self._positions()), labels) / len(batches)
            if last:
                watch.instant("loss", self.named_tensors())
            with watch.phase("backward"):
                self.precision.scaled(loss).backward()
            total += value_of(loss.detach())
            del loss
        return total

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean over the tokens of one micro-batch here."""
        return loss_of(logits, labels, self.spec, self.world.tp_mesh if self.spec.plan["tp"] > 1 else None)

    def _piped(self, batches: list[Batch]) -> float | None:
        """All micro-batches through the pipeline's schedule."""
        assert self.pipeline is not None
        tokens, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        with self.watch.phase("pipeline"):
            loss = self.pipeline.step(tokens, labels)
        return None if loss is None else value_of(loss) / (self.precision.scale or 1.0)

    def _scaled_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """What a pipeline runs backward from."""
        return self.precision.scaled(self._loss(logits, labels))

    def _finish_gradients(self) -> None:
        """What no backward sums: tensors that tp leaves whole beside a cut sequence, and an embedding at both ends."""
        if self.spec.plan["tp"] > 1:
            reduce_partial_gradients(*self.decoders)
        if (group := self.world.group("embedding")) is not None:
            reduce_tied_embedding(self.decoders, _embedding_names(self.spec), group)

    def _clip(self) -> float:
        """Scale gradients down to the limit; the norm before."""
        gradients = [
            (kept.parameter.grad, _copies(kept, self.spec, self.world))
            for kept in self.parameters
            if kept.parameter.grad is not None
        ]
        world = self.world.group("world") if self.sums_norm else None
        return clip_gradients(gradients, self.spec.clip_norm, world)


def _copies(kept: Kept, spec: RunSpec, world: World) -> int:
    """How many ranks of the job hold the part of a parameter that this one holds."""
    plan = spec.plan
    expert = plan["ep"] > 1 and ".*." in kept.name
    averaging = world.num_averaging // (plan["ep"] if expert else 1)
    copies = averaging if plan["zero_stage"] == 0 else plan["dp_replicate"]
    if not cut_by(kept.parameter, "tp"):
        copies *= plan["tp"]
    tied_ends = world.group("embedding") is not None and kept.name in _embedding_names(spec)
    return copies * 2 if tied_ends else copies


def _embedding_names(spec: RunSpec) -> set[str]:
    """The table of tokens, which both ends of a pipeline hold where it is tied."""
    return {tensor.name for tensor in spec.model.embedding if tensor.role == "embedding"}
