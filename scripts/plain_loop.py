"""A training loop as one would write it by hand on PyTorch, and what ranks do to compare the program with it.

The decoder is that of Llama at sizes that a CPU trains: the shapes of the program's, without anything else of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from trainledger.facts.families import model_from_config
from trainledger.runtime.batch import local_batches
from trainledger.runtime.observe.observation import Instant
from trainledger.runtime.observe.observer import Observer
from trainledger.runtime.program import Program
from trainledger.runtime.spec import RunSpec
from trainledger.runtime.watch import Unwatched, Watch
from trainledger.runtime.world import World

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
LONG: dict[str, Any] = {**CONFIG, "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8}
"""A model of which a step takes long enough to see what observing it costs."""
CPU = torch.device("cpu")
Step = Callable[[int], object]
TURNS = 4
"""Steps of each that are timed together: what else a machine does comes and goes."""
UNCOUNTED = 4
"""Steps before any is timed: DDP makes its buckets anew in the second, and optimizers their state in the first."""


def spec_of(config: dict[str, Any], zero_stage: int, seq: int, mbs: int) -> RunSpec:
    """A run on two data-parallel ranks, one micro-batch a step."""
    axes = dict.fromkeys(("tp", "pp", "vpp", "cp", "ep", "etp", "dp_replicate"), 1)
    plan = {**axes, "sp": 0, "dp_shard": 2, "zero_stage": zero_stage, "mbs": mbs, "num_microbatches": 1}
    model = model_from_config(config, name="bench", source="")
    return RunSpec(model=model, config=config, plan=plan, seq=seq)


class _Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.width = hidden // heads
        self.q = nn.Linear(hidden, heads * self.width, bias=False)
        self.k = nn.Linear(hidden, kv_heads * self.width, bias=False)
        self.v = nn.Linear(hidden, kv_heads * self.width, bias=False)
        self.out = nn.Linear(heads * self.width, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (layer(x).view(batch, length, -1, self.width).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = q * cos + _half_turned(q) * sin, k * cos + _half_turned(k) * sin
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


def _half_turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class _Layer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, wide, eps = config["hidden_size"], config["intermediate_size"], config["rms_norm_eps"]
        self.before = nn.RMSNorm(hidden, eps=eps)
        self.attention = _Attention(hidden, config["num_attention_heads"], config["num_key_value_heads"])
        self.between = nn.RMSNorm(hidden, eps=eps)
        self.gate = nn.Linear(hidden, wide, bias=False)
        self.up = nn.Linear(hidden, wide, bias=False)
        self.down = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.before(x), cos, sin)
        y = self.between(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class _Llama(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, config: dict[str, Any], seq: int) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.table = nn.Embedding(config["vocab_size"], hidden)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(hidden, eps=config["rms_norm_eps"])
        self.head = nn.Linear(hidden, config["vocab_size"], bias=False)
        width = hidden // config["num_attention_heads"]
        rates = torch.exp(torch.arange(0, width, 2) * (-math.log(config["rope_theta"]) / width))
        angles = torch.outer(torch.arange(seq), rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x))


class PlainLoop:
    """DDP, or FSDP2 around the program's units, and AdamW."""

    def __init__(self, spec: RunSpec, world: World) -> None:
        torch.manual_seed(spec.seed)
        self.spec, self.place = spec, world.place
        model: nn.Module = _Llama(spec.config, spec.seq)
        if spec.plan["zero_stage"] == 0:
            model = DistributedDataParallel(model)
        else:
            assert isinstance(model, _Llama)
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            units: list[list[nn.Module]] = [
                [model.table],
                *([layer] for layer in model.layers),
                [model.norm, model.head],
            ]
            for unit in units:
                fully_shard(unit, mesh=mesh, reshard_after_forward=True)
            fully_shard(model, mesh=mesh, reshard_after_forward=True)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=spec.learning_rate, foreach=True)

    def step(self, index: int) -> float:
        """One optimizer step of one micro-batch."""
        ((tokens, labels),) = local_batches(self.spec, self.place, index)
        loss = functional.cross_entropy(self.model(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


def both_s(rank: int, spec: RunSpec, pairs: int) -> list[tuple[float, float]]:
    """Seconds of TURNS steps of (the program, the plain loop), step by step in turns, as often as `pairs`."""
    del rank
    world = World(spec, CPU)
    steps = Program(spec, world).step, PlainLoop(spec, world).step
    for index in range(UNCOUNTED):
        for step in steps:
            step(index)
    return [_in_turns(steps, range(TURNS * pair, TURNS * (pair + 1))) for pair in range(pairs)]


def _in_turns(steps: tuple[Step, Step], indices: range) -> tuple[float, float]:
    """Seconds of each; whoever was second is first in the next turn."""
    seconds = [0.0, 0.0]
    for index in indices:
        for which in (0, 1) if index % 2 else (1, 0):
            seconds[which] += _timed(steps[which], index)
    return seconds[0], seconds[1]


def _timed(step: Step, index: int, now: Callable[[], float] = time.perf_counter) -> float:
    """Seconds from when all ranks are there to when all are done."""
    dist.barrier()
    start = now()
    step(index)
    dist.barrier()
    return now() - start


class _Switch:
    """Hands a program's words to an observer, or to nobody."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self.heard: Watch = Unwatched()

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self.heard.phase(name)

    def instant(self, instant: Instant, named: Iterable[tuple[str, str, Tensor]]) -> None:
        self.heard.instant(instant, named)

    def labelled(self, category: str, name: str) -> AbstractContextManager[None]:
        return self.heard.labelled(category, name)

    def group(self, name: str, tensors: Iterable[Tensor]) -> None:
        self.heard.group(name, tensors)

    @contextmanager
    def on(self) -> Generator[None]:
        """Within, the step is observed as that of a proof is."""
        self.heard = self.observer
        try:
            with self.observer.watching(), self.observer.observing():
                yield
        finally:
            self.heard = Unwatched()


class Cost(NamedTuple):
    """CPU seconds of (an observed step, a step that nobody watches) in turns, and how many operations are observed."""

    pairs_s: list[tuple[float, float]]
    operations: int


def observed_s(rank: int, least_s: float, pairs: int) -> Cost:
    """The cost of observing a step of at least `least_s`: of one micro-batch, with as many sequences as that takes.

    What is paid is paid for each operation, so that a step of many small ones costs a larger part of itself. It is work
    of the rank's own, hence measured as such: what a step waits for does not change.
    """
    del rank
    mbs = 1
    while True:
        spec = spec_of(LONG, 3, seq=512, mbs=mbs)
        world = World(spec, CPU)
        switch = _Switch(Observer(world.names))
        program = Program(spec, world, switch)
        took = torch.tensor(min(_timed(program.step, index, time.process_time) for index in range(3)))
        dist.all_reduce(took, dist.ReduceOp.MIN)
        if took >= least_s:
            break
        mbs = math.ceil(1.3 * mbs * least_s / float(took))
    program.group_gathered()
    with _Counting() as counting:
        program.step(0)
    found: list[tuple[float, float]] = []
    for index in range(pairs + 1):
        times = [_timed(_stepped(program, within), index, time.process_time) for within in (switch.on(), nullcontext())]
        found.append((times[0], times[1]))
    return Cost(found[1:], counting.operations)


class _Counting(TorchDispatchMode):
    operations = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        self.operations += 1
        return func(*args, **(kwargs or {}))


def _stepped(program: Program, within: AbstractContextManager[None]) -> Step:
    def step(index: int) -> None:
        with within:
            program.step(index)

    return step
