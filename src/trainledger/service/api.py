"""The verbs as functions, the flags of the command line as their arguments: what `import trainledger` offers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from trainledger.errors import UnknownName, UsageError
from trainledger.facts.families import model_from_config
from trainledger.facts.model import Model
from trainledger.service import ledger as ledger_verb
from trainledger.service import plan as plan_verb
from trainledger.service import states as states_verb
from trainledger.service.requests import ModelRequest, PlanRequest, RunRequest
from trainledger.service.typed import request_from

Request = TypeVar("Request", bound=RunRequest)


def states(model: str | Mapping[str, object] | Model, **flags: object) -> states_verb.Response:
    """The training states of one GPU under every zero_stage of an engine: a row each, in bytes.

    `model` is what the command line takes as MODEL, a config.json as a dict, or a Model; `flags` are those of
    `trainledger states`, with underscores. What is wrong with them raises a TrainledgerError.

    >>> [row.total_bytes for row in states("70e9", gpus=64).rows]
    [1120000000000, 293125000000, 155312500000, 17500000000]
    """
    request, built = _asked("states", states_verb.Request, model, flags)
    return states_verb.run(request, model=built)


def ledger(model: str | Mapping[str, object] | Model, **flags: object) -> ledger_verb.Response:
    """The account of one plan: every line it holds and moves, its memory and its traffic, in bytes.

    `model` and `flags` as for `states`; the flags are those of a PLAN file.

    >>> account = ledger("llama-3-8b", gpus=8, zero=3)
    >>> account.memory.by_category["optimizer"], account.memory.fits
    (12045391872, None)
    """
    request, built = _asked("ledger", PlanRequest, model, flags)
    return ledger_verb.account(request, model=built)


def plan(model: str | Mapping[str, object] | Model, **flags: object) -> plan_verb.Response:
    """The best plans for a number of GPUs, what rejects the others, and the smallest change where nothing fits.

    `model` and `flags` as for `states`; a degree that is given is fixed.

    >>> found = plan("llama-3-8b", gpus=16, gpu="h100", engine="megatron", top=1)
    >>> found.evaluated == found.accepted + sum(found.rejected.values()), found.plans[0].plan["tp"]
    (True, 8)
    """
    request, built = _asked("plan", plan_verb.Request, model, flags)
    return plan_verb.run(request, model=built)


def _asked(name: str, kind: type[Request], model: object, flags: Mapping[str, object]) -> tuple[Request, Model | None]:
    """The request that the arguments make, and the model where it is built already."""
    for flag in flags:
        if flag not in kind.__struct_fields__:
            raise UnknownName(f"flag of {name}()", flag, kind.__struct_fields__)
    values = {flag.replace("_", "-"): value for flag, value in flags.items()}
    if isinstance(model, Mapping):
        called = model.get("_name_or_path") or model.get("name_or_path")
        model = model_from_config(
            dict(model), name=called if isinstance(called, str) else "config", source="a config that was handed over"
        )
    if not isinstance(model, Model):
        return request_from(kind, {**values, "model": model}, f"{name}()"), None
    idle = [flag for flag in flags if flag in ModelRequest.__struct_fields__]
    if idle:
        raise UsageError(f"{name}(): {', '.join(idle)} would not change a Model that is built; leave it out")
    return request_from(kind, values, f"{name}()"), model
