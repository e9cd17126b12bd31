"""One rank's training run: from the newest checkpoint, or from nothing, to its last step or to a reason to end."""

from __future__ import annotations

import math
import statistics
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from trainledger.errors import BadInput
from trainledger.runtime.checkpoint.checkpoints import Checkpoints, Loaded
from trainledger.runtime.checkpoint.folders import name_of
from trainledger.runtime.observe.observer import Observer
from trainledger.runtime.observe.tensors import local_part
from trainledger.runtime.program import Program, Stepped
from trainledger.runtime.progress import Progress
from trainledger.runtime.train.agree import Agreed, agree_on, most, total
from trainledger.runtime.train.casts import Casts
from trainledger.runtime.train.data import data_of
from trainledger.runtime.train.journal import Journal
from trainledger.runtime.train.memory import held_bytes, meter_of
from trainledger.runtime.train.metrics import Line
from trainledger.runtime.train.result import Trained, Written
from trainledger.runtime.train.resume import finished
from trainledger.runtime.train.schedule import learning_rate
from trainledger.runtime.train.spec import CHECKPOINTS, REPORT, STOP, TrainSpec
from trainledger.runtime.train.state import State, begun, state_from
from trainledger.runtime.train.stop import Diverged, Spikes, StopRequest
from trainledger.runtime.watch import Unwatched
from trainledger.runtime.world import World, device_here

OBSERVED = 3
"""The step of a process that is observed: DDP is settled from it on, and those after it are not slowed by looking."""


def train(spec: TrainSpec, progress: Progress) -> Trained:
    """Train on this rank; needs an initialised process group.

    Diverged where the numbers of the run are of no use any more, BadInput for what it cannot begin with: on all ranks.
    """
    with ExitStack() as stack:
        return _Training(spec, progress, stack).run()


class _Training:
    """All that a run has while it runs."""

    def __init__(self, spec: TrainSpec, progress: Progress, stack: ExitStack) -> None:
        self.spec = spec
        self.progress = progress
        self.rank = dist.get_rank()
        self.world = World(spec.run, device_here())
        self.stop = StopRequest(Path(spec.out) / STOP, looks=self.rank == 0)
        synchronize = torch.cuda.synchronize if self.world.device.type == "cuda" else None
        self.observer = Observer(self.world.names, synchronize)
        self.watching = stack.enter_context(ExitStack())
        self.watching.enter_context(self.observer.watching())
        self.watched = True
        self.program = Program(spec.run, self.world, self.observer)
        # instants of a step that is not observed would be looked at for nothing
        self.program.watch = Unwatched()
        self.casts = Casts(spec.fp8, self.program)
        self.checkpoints = self._checkpoints(stack)
        self.loaded = self.checkpoints.load() if spec.resume else None
        self.state = self._begun()
        self.first = self.state.step
        self.program.source, self.held_out = data_of(spec, self.program, self.state)
        self.spikes = Spikes(spec.spike_factor, spec.spike_window, self.state.losses)
        self.journal = Journal(spec, self.first, writes=self.rank == 0)
        stack.callback(self.journal.close)
        self.written: list[Written] = []
        self.speeds: list[float] = []
        self.said: list[str] = []
        self.observed_step = 0
        self.most_bytes = 0

    def _checkpoints(self, stack: ExitStack) -> Checkpoints:
        made = Checkpoints(
            Path(self.spec.out) / CHECKPOINTS,
            self.program,
            keep_last=self.spec.keep_last,
            asynchronous=self.spec.asynchronous,
        )
        stack.callback(made.close)
        return made

    def _begun(self) -> State:
        """What the checkpoint says that was loaded, or the beginning."""
        if self.loaded is None:
            return begun(self.spec)
        state = state_from(self.loaded.state, self.spec, str(self.loaded.path))
        done = finished(state, self.spec, self.loaded.path)
        if done:
            raise BadInput(done)
        self.program.precision.load_state_dict(state.precision, self.program.parameters)
        self.program.precision.weights_changed()
        return state

    def run(self) -> Trained:
        """Step until the last, or until somebody asks for the end."""
        steps = self.spec.run.steps
        look_at = min(self.first + OBSERVED, steps)
        asked = False
        while self.state.step < steps and not asked:
            asked = self._advance(observed=self.state.step + 1 == look_at)
            if self.state.step == look_at:
                self._unwatch()
        self.checkpoints.wait()
        return self._result()

    def _unwatch(self) -> None:
        """Let the program run as it does when nobody looks."""
        self.program.watch = self.program.data.watch = Unwatched()
        self.watching.close()
        self.watched = False

    def _advance(self, *, observed: bool) -> bool:
        """One optimizer step and all that follows from it; whether somebody asks for the end."""
        program, index = self.program, self.state.step
        rate = _rate(self.spec, index)
        program.set_learning_rate(rate)
        self.casts.begin(index + 1, quiet=observed)
        if observed:
            # what checkpoints copy into is no part of the step
            self.checkpoints.release()
            program.watch, self.observed_step = self.observer, index + 1
            program.group_gathered()
        begin = time.monotonic()
        with self.observer.observing() if observed else nullcontext():
            stepped = program.step(index)
        own_bytes = held_bytes(self.world.device)
        agreed = agree_on(stepped, asked=self.stop.asked(), held_bytes=own_bytes)
        took_s = time.monotonic() - begin
        self.most_bytes = max(self.most_bytes, own_bytes)
        found = self.casts.end()
        self.said += found.said
        tokens = self.spec.run.sequences_per_step * self.spec.run.seq
        if not self.watched:
            self.speeds.append(tokens / took_s)
        line = Line(
            step=index + 1,
            loss=agreed.loss if math.isfinite(agreed.loss) else None,
            learning_rate=rate,
            tokens=self.state.tokens + tokens,
            step_s=took_s,
            tokens_per_s=tokens / took_s,
            memory_bytes=agreed.held_bytes,
            norm=stepped.norm,
            scale=stepped.scale,
            skipped=stepped.skipped,
            fp8=found.lost,
            said=found.said,
        )
        self._follow(line, self._trouble(stepped, agreed, found.trouble), asked=agreed.asked)
        return agreed.asked

    def _trouble(self, stepped: Stepped, agreed: Agreed, beyond: str) -> str:
        """Why the run must end, or ""; on all ranks alike."""
        if wrong := self.spikes.judge(agreed.loss):
            return wrong
        if stepped.norm is not None and not math.isfinite(stepped.norm) and not stepped.skipped:
            return f"the norm of the gradients is {stepped.norm}"
        return beyond

    def _follow(self, line: Line, trouble: str, *, asked: bool) -> None:
        """Evaluate and save where it is time to, and write the line; or end the run."""
        spec, last = self.spec, line.step == self.spec.run.steps
        saves = last or asked or (spec.checkpoint_every and line.step % spec.checkpoint_every == 0)
        if not trouble and saves and not self._finite():
            trouble = "a weight is not finite"
        if trouble:
            self.journal.write(msgspec.structs.replace(line, said=(*line.said, trouble)))
            raise Diverged(self._ended(line.step, trouble))
        self.state = self.state.after(line, spec)
        self.spikes.losses.append(line.loss or 0.0)
        if self.held_out is not None and (last or (spec.eval_every and line.step % spec.eval_every == 0)):
            line = msgspec.structs.replace(line, held_out=self.held_out.loss())
            self.state = msgspec.structs.replace(self.state, held_out=line.held_out)
        if saves:
            line = msgspec.structs.replace(line, checkpoint=True, blocked_s=self._save())
        self.journal.write(line)
        self.progress(line.step, spec.run.steps, _told(line, spec.run.steps))

    def _save(self) -> float:
        """Begin a checkpoint; how long training waited for it."""
        precision = self.program.precision.state_dict()
        self.state = msgspec.structs.replace(self.state, precision=precision)
        saved = self.checkpoints.save(self.state.step, msgspec.to_builtins(self.state))
        blocked_s = most(round(saved.blocked_s * 1e6)) / 1e6
        self.written.append(Written(step=self.state.step, bytes=total(saved.bytes), blocked_s=blocked_s))
        return blocked_s

    def _finite(self) -> bool:
        """Whether all weights of the job are; a checkpoint of others would be of no use."""
        own = sum(int(not local_part(kept.parameter.detach()).isfinite().all()) for kept in self.program.parameters)
        return total(own) == 0

    def _ended(self, step: int, trouble: str) -> str:
        """The message of a run that diverged."""
        kept = self.written[-1].step if self.written else self.first
        where = Path(self.spec.out)
        go_on = (
            f"the newest checkpoint, {where / CHECKPOINTS / name_of(kept)}, is from before; go on from it with "
            "--resume and a lower --learning-rate"
            if kept
            else "no checkpoint had been saved; start anew with a lower --learning-rate or a longer --warmup"
        )
        return f"step {step}: {trouble}; {go_on}; {where / REPORT} shows how it came to that"

    def _result(self) -> Trained:
        spec, state = self.spec, self.state
        observation = self.observer.result(self.rank, spec.digest, ()) if self.observed_step else None
        loaded = self.loaded
        return Trained(
            rank=self.rank,
            digest=spec.digest,
            how="finished" if state.step == spec.run.steps else "stopped",
            first=self.first,
            steps=state.step,
            tokens=state.tokens,
            loss=state.loss,
            held_out=state.held_out,
            held_out_sequences=self.held_out.sequences if self.held_out is not None else 0,
            tokens_per_s=statistics.median(self.speeds) if self.speeds else None,
            skipped=state.skipped,
            scale=self.program.precision.scale,
            resumed_from=str(loaded.path) if loaded is not None else "",
            passed_over=_passed_over(loaded),
            checkpoints=tuple(self.written),
            share=self.casts.share(),
            ran=self.casts.ran,
            lost=self.casts.lost,
            fallen=self.casts.fallen,
            said=tuple(self.said),
            memory_bytes=self.most_bytes,
            meter=meter_of(self.world.device),
            observed_step=self.observed_step,
            observation=observation,
            torch_version=str(torch.__version__),
        )


def _rate(spec: TrainSpec, index: int) -> float:
    run = spec.run
    return learning_rate(index, run.steps, run.learning_rate, warmup=spec.warmup_steps, least=spec.min_learning_rate)


def _passed_over(loaded: Loaded | None) -> tuple[tuple[str, str], ...]:
    return tuple((str(path), why) for path, why in loaded.skipped) if loaded is not None else ()


def _told(line: Line, steps: int) -> str:
    """A step in a few words, for whoever waits."""
    scale = "" if line.scale is None else f", scale {line.scale:g}"
    held_out = "" if line.held_out is None else f", held-out {line.held_out:.4g}"
    lost = "" if line.fp8 is None else f", FP8 saturated {line.fp8.saturated:.2%} flushed {line.fp8.flushed:.2%}"
    loss = "-" if line.loss is None else f"{line.loss:.4g}"
    memory = f"{line.memory_bytes / 2**30:.2f} GiB"
    return f"step {line.step}/{steps}: loss {loss}{held_out}, {line.tokens_per_s:,.0f} tokens/s, {memory}{scale}{lost}"
