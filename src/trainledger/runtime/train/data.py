"""The tokens of a run: what it learns from, and what it is judged by."""

from __future__ import annotations

from pathlib import Path

from trainledger.errors import BadInput
from trainledger.runtime.data.source import Position, Tokens
from trainledger.runtime.data.token_file import TokenFile
from trainledger.runtime.program import Program
from trainledger.runtime.train.evaluate import HeldOut
from trainledger.runtime.train.spec import TrainSpec
from trainledger.runtime.train.state import State


def data_of(spec: TrainSpec, program: Program, state: State) -> tuple[Tokens, HeldOut | None]:
    """What a run goes on with; BadInput where the files of this rank are not those that it was told of."""
    train = _file(spec.data.train, spec.data.digest)
    start = Position(step=state.step, sequences=state.sequences)
    source = Tokens(train, spec.run, program.world.place, start)
    if not spec.data.held_out:
        return source, None
    held_out = _file(spec.data.held_out, spec.data.held_out_digest)
    return source, HeldOut(held_out, program, spec.data.eval_sequences)


def _file(path: str, digest: str) -> TokenFile:
    found = TokenFile.open(Path(path))
    if found.facts.sha256 != digest:
        raise BadInput(
            f"{path} has tokens of SHA-256 {found.facts.sha256[:12]} on this machine, and {digest[:12]} where the run "
            "was started; give every machine the same files"
        )
    return found
