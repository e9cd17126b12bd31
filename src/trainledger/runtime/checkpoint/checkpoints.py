"""The checkpoints of one run: save, wait, load the newest good one."""

from __future__ import annotations

import base64
import json
import time
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

import msgspec
import torch
import torch.distributed as dist

from trainledger.errors import BadInput
from trainledger.runtime.checkpoint import folders
from trainledger.runtime.checkpoint.identity import model_digest
from trainledger.runtime.checkpoint.manifest import STATE, Manifest
from trainledger.runtime.checkpoint.parts import parts_of, states_of
from trainledger.runtime.checkpoint.read import Candidate, candidates, read
from trainledger.runtime.checkpoint.saver import Saver, Staging
from trainledger.runtime.checkpoint.write import Save, write
from trainledger.runtime.program import Program


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """What a save took of the training.

    blocked_s   the training thread did not train; under `asynchronous` the copy to host memory, and the wait for a
                save before that had not ended
    waited_s    of that, the wait for the save before
    copied_s    of that, the copy to host memory, about 0 unless asynchronous
    bytes       values of this rank's parts
    """

    blocked_s: float
    waited_s: float
    copied_s: float
    bytes: int


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """What was loaded.

    path      of the checkpoint
    step      optimizer steps that were taken when it was saved
    state     what the caller gave to `save`
    skipped   newer checkpoints that could not be loaded, and why
    """

    path: Path
    step: int
    state: dict[str, Any]
    skipped: tuple[tuple[Path, str], ...]


class Checkpoints:
    """Saves and loads the weights and optimizer states of a program, and a state of its caller.

    folder         one that all ranks see; it is made, and what a dead run left in it is cleared
    keep_last      so many good checkpoints are kept, of those of this model
    asynchronous   saves are written while training goes on

    Every rank makes one, between steps, and makes the same calls at the same steps. Needs an initialised process
    group. Close it, so that the last save is whole.
    """

    def __init__(self, folder: Path, program: Program, *, keep_last: int = 3, asynchronous: bool = True) -> None:
        if keep_last < 1:
            raise BadInput(f"keep-last is {keep_last}; at least 1 checkpoint is kept: raise it")
        self.folder = Path(folder)
        self._program = program
        self._keep_last = keep_last
        self._asynchronous = asynchronous
        self._digest = model_digest(program.spec.model, program.spec.config)
        self._refused: set[int] = set()
        self._saver = Saver()
        self._staging = Staging()
        self._lock: IO[bytes] | None = None
        refusal = next(filter(None, self._saver.told(self._open() if dist.get_rank() == 0 else "")), "")
        if refusal:
            raise BadInput(refusal)

    def save(self, step: int, state: Mapping[str, Any] | None = None) -> Saved:
        """Save after `step` steps, with a state that JSON can hold; collective.

        Under `asynchronous` this returns once everything is copied, and an error of the save is raised by the next
        call of any kind; it is a SaveFailed, and the checkpoints before it are as they were.
        """
        begin = time.monotonic()
        self.wait()
        waited_s = time.monotonic() - begin
        parts = parts_of(self._program)
        amount = sum(part.values.nbytes for part in parts)
        copied = time.monotonic()
        if self._asynchronous:
            parts = self._staging.copy(parts)
        copied_s = time.monotonic() - copied
        save = Save(
            folder=self.folder,
            step=step,
            parts=parts,
            state=_encoded(self._program, state or {}),
            manifest=self._manifest(step),
            generators=_generators(),
            keep_last=self._keep_last,
            refused=frozenset(self._refused),
        )
        self._saver.start(partial(write, save, self._saver))
        if not self._asynchronous:
            self.wait()
        return Saved(blocked_s=time.monotonic() - begin, waited_s=waited_s, copied_s=copied_s, bytes=amount)

    def wait(self) -> None:
        """Until the last save is published; its error is raised here."""
        self._saver.wait()

    def release(self) -> None:
        """Wait for the last save, and let go of the memory that copies were made in; the next save takes it anew."""
        self.wait()
        self._staging = Staging()

    def load(self, which: Path | None = None) -> Loaded | None:
        """Put the newest good checkpoint into the program, or the one that is named; collective.

        Damaged ones and those of another model are passed over and listed in the answer. None where there is no
        checkpoint at all; BadInput where there are some and none can be loaded, or the one that is named cannot.
        """
        self.wait()
        (found, *_) = self._saver.told(candidates(self.folder, which) if dist.get_rank() == 0 else [])
        skipped: list[tuple[Path, str]] = []
        for one in found:
            why = read(one, self._program, self._digest, self._saver)
            if not why:
                step, state = self._restore(one)
                return Loaded(path=one.path, step=step, state=state, skipped=tuple(skipped))
            skipped.append((one.path, why))
            if one.manifest is not None:
                self._refused.add(one.manifest.sequence)
        if skipped:
            raise BadInput(
                f"no checkpoint of {which or self.folder} can be loaded: {folders.why_none(skipped)}; "
                "name another one, or start anew in another folder"
            )
        return None

    def close(self) -> None:
        """Wait for the last save and let other runs have the folder."""
        try:
            self._saver.close()
        finally:
            if self._lock is not None:
                self._lock.close()

    def _open(self) -> str:
        """Make the folder, take it and clear it; why that cannot be done, or ""."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = folders.lock(self.folder)
            folders.clear(self.folder)
        except BadInput as error:
            return str(error)
        except OSError as error:
            return f"checkpoints cannot be saved in {self.folder} ({error.strerror}); name a folder that can be written"
        return ""

    def _manifest(self, step: int) -> Manifest:
        """What is known before anything is written."""
        from trainledger import __version__

        spec = self._program.spec
        return Manifest(
            format=1,
            step=step,
            sequence=0,
            model=spec.model.name,
            model_digest=self._digest,
            precision=spec.precision,
            optimizer=spec.optimizer,
            states=states_of(self._program),
            layout=dict(spec.plan),
            versions={"torch": str(torch.__version__), "trainledger": __version__},
            files={},
        )

    def _restore(self, one: Candidate) -> tuple[int, dict[str, Any]]:
        """Step and state, from a file that has been verified; and the generators of random numbers."""
        content = json.loads((one.path / STATE).read_bytes())
        _set_generators(content["generators"], self._program.spec.seed, content["step"])
        return content["step"], content["state"]


def _encoded(program: Program, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state as it is now, and the config.json that an export needs."""
    return msgspec.to_builtins({"state": dict(state), "config": dict(program.spec.config)})


def _generators() -> dict[str, str]:
    """The states of this rank's generators of random numbers, by device."""
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    return {device: base64.b64encode(state.numpy().tobytes()).decode() for device, state in found.items()}


def _set_generators(saved: list[dict[str, str]], seed: int, step: int) -> None:
    """Each rank its own where there are as many as were saved; else one of its own, from seed, step and rank."""
    rank = dist.get_rank()
    if len(saved) != dist.get_world_size():
        torch.manual_seed(zlib.crc32(f"{seed}/{step}/{rank}".encode()))
        return
    for device, state in saved[rank].items():
        numbers = torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8)
        if device == "cpu":
            torch.set_rng_state(numbers)
        elif torch.cuda.is_available():
            torch.cuda.set_rng_state(numbers)
