"""Training a small decoder by SGD, whole or as the stages of a pipeline: what tests of pipelines compare.

SGD, because AdamW divides by the size of a gradient and so hides a factor in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallel_runs import CHECKED, GROUPED, Gradients, run_spec
from trainledger.facts.model_load import load_with_config
from trainledger.runtime.batch import global_batch
from trainledger.runtime.model import Decoder, build_decoder, init_weights
from trainledger.runtime.observe.clock import Clock
from trainledger.runtime.observe.collectives import CollectiveCounter
from trainledger.runtime.observe.dispatch import watching
from trainledger.runtime.observe.observation import Call
from trainledger.runtime.program import Program
from trainledger.runtime.spec import RunSpec
from trainledger.runtime.tensors import plain_name
from trainledger.runtime.world import World

COUNTED = (1, 2)
"""Steps whose collectives are counted; nothing may be exchanged in the first that is not in the second."""
RATE = 0.05


def spec_of(plan: Mapping[str, int], *, layers: int = 4, tied: bool = False, vocab: int = 67, **fields: str) -> RunSpec:
    """A RunSpec of a small decoder, with the columns of a plan that are not 1; 67 rows divide over no ranks evenly."""
    tie = str(tied).lower()
    sizes = {**GROUPED, "num_hidden_layers": layers, "vocab_size": vocab, "tie_word_embeddings": tie}
    config, model = load_with_config("llama-3-8b", overrides={key: str(value) for key, value in sizes.items()})
    columns = {"num_microbatches": 4, **plan, "etp": plan.get("tp", 1)}
    return run_spec(config, model, columns, **{"optimizer": "sgd", "learning_rate": RATE, "clip_norm": 0.0, **fields})


def enlarge(module: torch.nn.Module) -> None:
    """Make matrices large enough that attention matters."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)


def trained_whole(spec: RunSpec) -> dict[int, Gradients]:
    """Gradients of the checked steps of a single process, which accumulates micro-batches of one sequence."""
    decoder: Decoder = build_decoder(spec.model, spec.config)
    init_weights(decoder, spec.seed)
    enlarge(decoder)
    optimizer = torch.optim.SGD(decoder.parameters(), lr=RATE)
    found: dict[int, Gradients] = {}
    for step in range(1, CHECKED[-1] + 1):
        tokens, labels = global_batch(spec, step)
        for own, wanted in zip(tokens.split(1), labels.split(1), strict=True):
            logits = decoder(own).flatten(0, 1).float()
            (functional.cross_entropy(logits, wanted.flatten()) / len(tokens)).backward()
        if step in CHECKED:
            found[step] = _whole({name: p.grad for name, p in decoder.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return found


def _whole(gradients: Mapping[str, torch.Tensor]) -> Gradients:
    """Gradients by name, put together from the parts of all ranks."""
    joined = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}
    return {plain_name(name): gradient.numpy().copy() for name, gradient in joined.items()}


class Run:
    """One rank of a program; `gradients` are its own parts of the last step's."""

    def __init__(self, spec: RunSpec, world: World) -> None:
        self.program = Program(spec, world)
        self.names = world.names
        self.gradients: dict[str, torch.Tensor] = {}
        for decoder in self.program.decoders:
            enlarge(decoder)
        self.program.optimizer.register_step_pre_hook(self._keep)

    def _keep(self, *_: object) -> None:
        """At the end of the backward, before the optimizer steps."""
        for decoder in self.program.decoders:
            for name, parameter in decoder.named_parameters():
                assert parameter.grad is not None, name
                self.gradients[name] = parameter.grad.clone()

    def counted(self, index: int) -> tuple[float | None, tuple[Call, ...]]:
        """The loss of one optimizer step, and its collectives."""
        counter = CollectiveCounter(self.names, Clock())
        with watching(counter):
            loss = self.program.step(index).loss
        return loss, counter.calls()


class Seen(NamedTuple):
    """What one rank saw: gradients of the checked steps, collectives of the first two, losses, sizes of what it keeps
    to receive into, and how many of those have gradients left after the last step.
    """

    gradients: dict[int, Gradients]
    calls: dict[int, tuple[Call, ...]]
    losses: list[float | None]
    received_bytes: list[int]
    left: list[int]


def trained_stage(rank: int, specs: Sequence[RunSpec]) -> list[Seen]:
    """One rank of each spec's run."""
    del rank
    return [_trained(Run(spec, World(spec, torch.device("cpu")))) for spec in specs]


def _trained(run: Run) -> Seen:
    seen = Seen({}, {}, [], [], [])
    for step in range(1, CHECKED[-1] + 1):
        if step in COUNTED:
            loss, seen.calls[step] = run.counted(step)
        else:
            loss = run.program.step(step).loss
        seen.losses.append(loss)
        if step in CHECKED:
            seen.gradients[step] = _whole(run.gradients)
    assert run.program.pipeline is not None
    for kept in run.program.pipeline.received():
        if kept.name.startswith("received"):
            seen.received_bytes.append(kept.tensor.untyped_storage().nbytes())
            seen.left.append(int(kept.tensor.grad is not None))
    return seen


def replayed(_: int, cases: Sequence[tuple[RunSpec, int, int]]) -> list[dict[int, tuple[Call, ...]]]:
    """Collectives of one rank of a world by step, alone: on a process group and on tensors that hold nothing."""
    dist.destroy_process_group()
    return [_replayed(*case) for case in cases]


def _replayed(spec: RunSpec, rank: int, ranks: int) -> dict[int, tuple[Call, ...]]:
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    # a mesh is arithmetic on real numbers
    world = World(spec, torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        run = Run(spec, world)
        found = {step: run.counted(step)[1] for step in COUNTED}
    dist.destroy_process_group()
    return found


def worst(ranks: Sequence[Seen], whole: Mapping[int, Gradients]) -> tuple[float, int, str]:
    """(relative deviation, step, name) of the tensor that is furthest off, over all ranks of a pipeline."""
    every: list[tuple[float, int, str]] = []
    for step, right in whole.items():
        seen: set[str] = set()
        for rank in ranks:
            for name, gradient in rank.gradients[step].items():
                seen.add(name)
                deviation = np.abs(gradient - right[name]).max() / np.abs(right[name]).max()
                every.append((float(deviation), step, name))
        assert seen == right.keys(), seen ^ right.keys()
    return max(every)
