"""From a request to what every rank is told: defaults, the rules of the plan, the text made tokens, and the run folder.

Whatever would end a run in its first step is refused here, before a process is started.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from trainledger.errors import BadInput, UsageError
from trainledger.runtime.checkpoint.folders import published
from trainledger.runtime.data.check import check_data
from trainledger.runtime.data.prepare import HELD_OUT, prepare
from trainledger.runtime.data.token_file import BYTES, TokenFile
from trainledger.runtime.data.tokenizer import open_tokenizer
from trainledger.runtime.spec import RunSpec, Scaling
from trainledger.runtime.train.resume import check_resume
from trainledger.runtime.train.spec import CHECKPOINTS, TOLD, DataSpec, Fp8Spec, TrainSpec
from trainledger.service.no_effect import check_held_out
from trainledger.service.plan_file import SUFFIX
from trainledger.service.prove_plan import Planned, planned
from trainledger.service.prove_request import Request as ProveRequest
from trainledger.service.train_config import configured
from trainledger.service.train_limits import check_limits, check_named
from trainledger.service.train_request import Request

RUNS = "runs"
TOKENS = "tokens"
"""Where in a run folder text that was made tokens lies."""
HELD_OUT_SHARE = 0.05
TENTH = 10


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A run that everything has passed that can be asked before it starts.

    request   with all that its CONFIG says
    plan      its plan, at full size
    spec      what every rank is told
    assumed   defaults that were applied, by flag
    """

    request: Request
    plan: Planned
    spec: TrainSpec
    assumed: dict[str, str | int]


def ready(request: Request) -> Ready:
    """The run that a request asks for; nothing is started, and torch is not imported."""
    check_named(request)
    name = request.model or "custom"
    request = configured(request)
    stem = Path(name).stem if name.endswith(SUFFIX) else name.replace("/", "-")
    out = Path(RUNS) / stem if request.out is None else Path(request.out)
    if request.steps is None:
        raise UsageError("train needs the number of its steps: --steps N, or steps in [run] of the CONFIG")
    check_limits(request)
    fields = {field: getattr(request, field) for field in _shared()}
    plan = planned(ProveRequest(**fields, full_size=True))
    run = _run(request, plan.spec)
    _check_folder(out, resume=request.resume or False)
    data = _data(request, run, out)
    spec = TrainSpec(run=run, data=data, out=str(out.absolute()), **_chosen(request, run))
    if spec.resume:
        check_resume(spec)
    assumed = {**plan.run.assumed, **_assumed(request, spec)}
    return Ready(request=request, plan=dataclasses.replace(plan, spec=run), spec=spec, assumed=assumed)


def _shared() -> Iterator[str]:
    """Fields of a plan; steps, which a proof counts in another way, are not among them."""
    own = set(Request.__struct_fields__) - {"steps", "timeout"}
    return (field for field in ProveRequest.__struct_fields__ if field in own)


def _run(request: Request, spec: RunSpec) -> RunSpec:
    """The spec of the plan, with what is learned how fast."""
    scaling = {
        "initial": request.initial_scale,
        "growth_interval": request.scale_growth_interval,
        "minimum": request.minimum_scale,
    }
    given: dict[str, Any] = {
        "steps": request.steps,
        "learning_rate": request.learning_rate,
        "weight_decay": request.weight_decay,
        "scaling": Scaling(**_given(scaling)),
    }
    return msgspec.structs.replace(spec, **_given(given))


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _chosen(request: Request, run: RunSpec) -> dict[str, Any]:
    """The fields of a TrainSpec that say how it runs."""
    often = -(-run.steps // TENTH)
    fp8 = {
        "saturated_limit": request.fp8_saturated,
        "flushed_limit": request.fp8_flushed,
        "action": request.fp8_action,
        "every": request.fp8_every,
    }
    return {
        "eval_every": often,
        "checkpoint_every": often,
        "min_learning_rate": run.learning_rate / TENTH,
        **_given(
            {
                "warmup_steps": request.warmup,
                "min_learning_rate": request.min_learning_rate,
                "eval_every": request.eval_every,
                "checkpoint_every": request.checkpoint_every,
                "keep_last": request.keep_last,
                "asynchronous": request.asynchronous,
                "resume": request.resume,
                "spike_factor": request.spike_factor,
                "spike_window": request.spike_window,
            }
        ),
        "fp8": Fp8Spec(**_given(fp8)),
    }


def _assumed(request: Request, spec: TrainSpec) -> dict[str, str | int]:
    """Defaults of this verb that decide what is learned."""
    used: dict[str, tuple[object, str | int]] = {
        "learning-rate": (request.learning_rate, f"{spec.run.learning_rate:g}"),
        "eval-every": (request.eval_every, spec.eval_every),
        "checkpoint-every": (request.checkpoint_every, spec.checkpoint_every),
    }
    return {name: value for name, (given, value) in used.items() if given is None}


def _check_folder(out: Path, *, resume: bool) -> None:
    """Refuse to begin where another run has left something, and to go on where none has."""
    there = [one.path for one in published(out / CHECKPOINTS)]
    if there and not resume:
        raise BadInput(
            f"{out} has {len(there)} checkpoints of a run, the newest {there[0].name}; go on from it with --resume, or "
            "name another folder with --out"
        )
    if resume and not there and not (out / TOLD).exists():
        raise BadInput(f"{out} has no run to go on with; check --out, or leave --resume out to begin one")


def _data(request: Request, run: RunSpec, out: Path) -> DataSpec:
    """The token files of a run, made of text where that is given, once they are fit for it."""
    train, held_out = _files(request, out)
    if held_out is None:
        check_held_out(request)
    tokenizer = None if request.tokenizer is None else open_tokenizer(request.tokenizer)
    wanted = request.eval_sequences or 0
    check_data(run, train, held_out, eval_sequences=wanted, tokenizer=tokenizer)
    return DataSpec(
        train=str(train.path.absolute()),
        held_out="" if held_out is None else str(held_out.path.absolute()),
        digest=train.facts.sha256,
        held_out_digest="" if held_out is None else held_out.facts.sha256,
        eval_sequences=wanted,
    )


def _files(request: Request, out: Path) -> tuple[TokenFile, TokenFile | None]:
    if (request.text is None) == (request.tokens is None):
        both = "both are given" if request.text else "neither is given"
        raise UsageError(f"train learns from --text or from --tokens, and {both}; name one of them")
    if request.tokens is not None:
        if request.held_out is not None:
            raise UsageError("--held-out is a share of --text; of --tokens name the file with --held-out-tokens")
        beside = Path(request.tokens).with_name(HELD_OUT)
        held_out = request.held_out_tokens or (str(beside) if beside.exists() else None)
        train = TokenFile.open(Path(request.tokens)).verify()
        return train, None if held_out is None else TokenFile.open(Path(held_out)).verify()
    if request.held_out_tokens is not None:
        raise UsageError("--held-out-tokens is for --tokens; of --text a share is held out with --held-out")
    share = HELD_OUT_SHARE if request.held_out is None else request.held_out
    texts, tokenizer = [Path(text) for text in request.text or ()], request.tokenizer or BYTES
    key = _key([(str(path.absolute()), _seen(path)) for path in (*texts, Path(tokenizer))], share)
    prepared = prepare(texts, tokenizer, out / TOKENS / key, held_out=share)
    return prepared.train, prepared.held_out


def _key(*said: object) -> str:
    """A name for what is made of a text: another text, tokenizer or share goes beside it, and not in its place."""
    return hashlib.sha256(repr(said).encode()).hexdigest()[:12]


def _seen(path: Path) -> tuple[int, int] | None:
    """Size and time of a file, by which one that was written anew is told; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
