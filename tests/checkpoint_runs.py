"""What ranks do in the tests of checkpoints: train a small model that learns one batch by heart, save, die, go on.

Every step has the same tokens, so that the loss falls and tells states apart that a step has changed.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from parity import MODELS
from trainledger.account.memory.outside.disk import on_disk
from trainledger.facts.model_load import load_with_config
from trainledger.facts.workload import Workload
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Scenario, make_plans
from trainledger.plans.ranks import world_size
from trainledger.plans.setting import make_setting
from trainledger.runtime.batch import Batch, local_batches
from trainledger.runtime.checkpoint import folders, saver, write
from trainledger.runtime.checkpoint.checkpoints import Checkpoints
from trainledger.runtime.checkpoint.manifest import STATE
from trainledger.runtime.checkpoint.storage import HashedFile
from trainledger.runtime.launch.fork import run_forked
from trainledger.runtime.program import Program
from trainledger.runtime.spec import RunSpec
from trainledger.runtime.world import World

CPU = torch.device("cpu")
STEPS = 6
TOLERANCE = 1e-5
"""Of a loss, relative."""


class Ask(NamedTuple):
    """What ranks are to do.

    load        go on from the newest checkpoint, if there is one
    saves       the steps after which to save
    die         (a moment of MOMENTS, how often it is let pass, the rank that dies there)
    """

    spec: RunSpec
    folder: Path
    load: bool = False
    saves: tuple[int, ...] = ()
    asynchronous: bool = True
    keep_last: int = 3
    die: tuple[str, int, int] | None = None


class Ran(NamedTuple):
    """What a rank saw: the losses of the steps it took, from `begun` on, and what was passed over."""

    losses: list[float]
    begun: int = 0
    state: Mapping[str, Any] = {}
    skipped: tuple[tuple[Path, str], ...] = ()


@cache
def spec_of(kind: str = "llama", plan: str = "dp_shard2 zero_stage3", sizes: str = "", **fields: Any) -> RunSpec:  # noqa: ANN401  # any field of it
    """A RunSpec of 4 sequences in a step, by the columns of a plan that are not 1 and by changed keys of a config."""
    name, small = MODELS[kind]
    overrides = {**small, "num_hidden_layers": 2, **dict(pair.split("=") for pair in sizes.split())}
    config, model = load_with_config(name, overrides={key: str(value) for key, value in overrides.items()})
    columns = {word.rstrip("0123456789"): int(word[len(word.rstrip("0123456789")) :]) for word in plan.split()}
    row = make_plans(columns).row(0)
    sequences = row["dp_replicate"] * row["dp_shard"]
    row["num_microbatches"] = max(row["num_microbatches"], row["pp"])
    row["mbs"] = 4 // sequences // row["num_microbatches"]
    fields = {"learning_rate": 1e-2, **fields}
    return RunSpec(model=model, config=config, plan=row, seq=16, **fields)


def ran(ask: Ask, steps: int = STEPS) -> Ran:
    """What every rank saw alike."""
    seen = run_forked(world_size(ask.spec.plan), trained, ask, steps, timeout_s=60)
    assert all(one == seen[0] for one in seen)
    return seen[0]


def predicted_bytes(spec: RunSpec) -> int:
    """What the ledger says that the tensors of a checkpoint take."""
    scenario = Scenario(engine="pytorch", precision=spec.precision, optimizer=spec.optimizer, recompute="none")
    (line,) = on_disk(Inventory(make_setting(spec.model, Workload(seq=spec.seq), scenario)))
    return line.amount


def program_of(spec: RunSpec) -> Program:
    """The program on one batch."""
    world = World(spec, CPU)

    def same(step: int) -> list[Batch]:
        del step
        return local_batches(spec, world.place, 0)

    return Program(spec, world, source=same)


def trained(rank: int, ask: Ask, steps: int) -> Ran:
    """Train up to so many steps."""
    program = program_of(ask.spec)
    kept = Checkpoints(ask.folder, program, keep_last=ask.keep_last, asynchronous=ask.asynchronous)
    loaded = kept.load() if ask.load else None
    begun = 0 if loaded is None else loaded.step
    if ask.die is not None and ask.die[2] == rank:
        die_at(*ask.die[:2])
    losses: list[float] = []
    for index in range(begun, steps):
        losses.append(stepped(program, index))
        if index + 1 in ask.saves:
            kept.save(index + 1, {"at": index + 1})
    kept.close()
    if loaded is None:
        return Ran(losses)
    return Ran(losses, begun, loaded.state, loaded.skipped)


def stepped(program: Program, index: int) -> float:
    """The loss of a step over all ranks that compute one."""
    loss = program.step(index).loss
    total = torch.tensor([0.0, 0.0] if loss is None else [loss, 1.0], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total[0] / total[1])


def die_at(moment: str, passes: int) -> None:
    """Kill this process at a moment of a save, once it has come so often."""
    left = [passes]

    def due() -> bool:
        left[0] -= 1
        return left[0] < 0

    MOMENTS[moment](due)


def die() -> None:
    """As `kill -9` does: nothing is flushed, closed or tidied up."""
    os.kill(os.getpid(), signal.SIGKILL)


def _before(module: Any, name: str) -> Callable[[Callable[[], bool]], None]:  # noqa: ANN401  # a module or a class
    """Die when a function is called."""

    def install(due: Callable[[], bool]) -> None:
        inside = getattr(module, name)

        def deadly(*given: Any, **named: Any) -> Any:  # noqa: ANN401  # it hands all on
            if due():
                die()
            return inside(*given, **named)

        setattr(module, name, deadly)

    return install


def _while_writing(suffix: str) -> Callable[[Callable[[], bool]], None]:
    """Die in the middle of a write to a file, half of which is on disk."""

    def install(due: Callable[[], bool]) -> None:
        inside = HashedFile.write

        def deadly(self: HashedFile, data: Any) -> int:  # noqa: ANN401  # as in the class
            if self.path.name.endswith(suffix) and due():
                inside(self, memoryview(data).cast("B")[: memoryview(data).nbytes // 2])
                os.fsync(self.fileno())
                die()
            return inside(self, data)

        HashedFile.write = deadly

    return install


def _while_writing_json(due: Callable[[], bool]) -> None:
    def deadly(path: Path, content: object) -> None:
        path.write_text(str(content)[:20])
        die()

    inside = write.write_json

    def chosen(path: Path, content: object) -> Any:  # noqa: ANN401  # it hands all on
        return deadly(path, content) if path.name == STATE and due() else inside(path, content)

    write.write_json = chosen


MOMENTS: dict[str, Callable[[Callable[[], bool]], None]] = {
    "the copy to host memory": _before(saver.Staging, "_room"),
    "the folder is made": _before(write, "_make"),
    "the parts are planned": _before(write, "save_parts"),
    "a shard is written": _while_writing(".distcp"),
    "the index is written": _while_writing(".metadata.tmp"),
    "the state is written": _while_writing_json,
    "the manifest is written": _before(write, "write_manifest"),
    "it is published": _before(folders, "publish"),
    "it is published, before the rename": _before(folders, "sync"),
    "old ones are removed": _before(folders, "prune"),
    "an old one is being removed": _before(shutil, "rmtree"),
}
"""Moments of a save by name: each makes the process die there."""


def writes_counted(rank: int, ask: Ask) -> int:
    """How often this rank writes to its shards in a run."""
    counted = [0]

    def never() -> bool:
        counted[0] += 1
        return False

    MOMENTS["a shard is written"](never)
    trained(rank, ask, STEPS)
    return counted[0]
