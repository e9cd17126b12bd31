"""Whether a run can go on with what its folder has: asked before a process is started. No torch here.

Ranks ask again, of every file and tensor; what manifests and states alone tell ends here, where it is cheap.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from trainledger.errors import BadInput
from trainledger.runtime.checkpoint.folders import Published, published, why_none
from trainledger.runtime.checkpoint.identity import STATES, model_digest, other_keys, other_states
from trainledger.runtime.checkpoint.manifest import MANIFEST, STATE, Damaged, Manifest, check_hashes, verify
from trainledger.runtime.train.spec import CHECKPOINTS, TrainSpec
from trainledger.runtime.train.state import State, state_from


class _Content(msgspec.Struct, frozen=True):
    """What a rank reads of state.json to go on."""

    config: dict[str, Any]
    state: dict[str, Any]


def check_resume(spec: TrainSpec) -> None:
    """Refuse to go on with checkpoints of another model or of other tokens, and with a run that is finished.

    The newest that is not damaged and of this model is the one that ranks will load. Damage that only reading all of a
    checkpoint would show is looked for where a run is about to be refused for what that checkpoint says.
    """
    folder = Path(spec.out) / CHECKPOINTS
    found = published(folder)
    digest = model_digest(spec.run.model, spec.run.config)
    passed_over: list[tuple[Path, str]] = []
    for one in found:
        why = _other(one, digest, spec)
        if not why:
            refusal = _refusal(one.path, spec)
            why = _damage(one.path) if refusal else ""
            if not refusal:
                return
            if not why:
                raise BadInput(refusal)
        passed_over.append((one.path, why))
    if found:
        raise BadInput(
            f"no checkpoint of {folder} can be loaded: {why_none(passed_over)}; name another one, or start anew in "
            "another folder"
        )


def finished(state: State, spec: TrainSpec, where: Path) -> str:
    """Why a run has no step left to take after a checkpoint, or ""."""
    if state.step < spec.run.steps:
        return ""
    return f"{where} has all of its {spec.run.steps} steps behind it; raise --steps to more than {state.step}"


def _other(one: Published, digest: str, spec: TrainSpec) -> str:
    """Why a checkpoint is damaged, as far as can be seen, or not of this run's model; "" where it is neither."""
    if one.why or one.manifest is None:
        return one.why
    try:
        content = _content(one.path, one.manifest)
    except Damaged as error:
        return str(error)
    run, found, where = spec.run, one.manifest, one.path / MANIFEST
    if found.model_digest != digest:
        what = other_keys(content.config, run.config) or "the tensors of other layers"
        return f"{where}: it is a checkpoint of {found.model} that is not this {run.model.name}: {what}"
    return other_states(where, found, run.optimizer, STATES[run.optimizer])


def _refusal(path: Path, spec: TrainSpec) -> str:
    """Why the run would not go on from a checkpoint of its model, whose state has been read before."""
    content = msgspec.convert(json.loads((path / STATE).read_bytes()), _Content)
    try:
        state = state_from(content.state, spec, str(path))
    except BadInput as error:
        return str(error)
    return finished(state, spec, path)


def _damage(path: Path) -> str:
    try:
        verify(path)
    except Damaged as error:
        return str(error)
    return ""


def _content(path: Path, manifest: Manifest) -> _Content:
    """What state.json says, once it is as it was written."""
    if STATE not in manifest.files:
        raise Damaged(f"{path / MANIFEST} lists no {STATE}")
    check_hashes(path, manifest, [STATE])
    try:
        return msgspec.convert(json.loads((path / STATE).read_bytes()), _Content)
    except (ValueError, msgspec.ValidationError) as error:
        raise Damaged(f"{path / STATE} is not what a checkpoint of a run says ({error})") from error
