"""One number of a plan varied: the rows of `ledger --sweep`."""

from __future__ import annotations

from typing import get_args

import msgspec

from trainledger.account.memory import device_bytes
from trainledger.account.peak import single_peak
from trainledger.account.traffic import wire_totals
from trainledger.errors import TrainledgerError, UnknownName, UsageError
from trainledger.facts.model import Model
from trainledger.service.common import Run, prepared
from trainledger.service.models import find_model
from trainledger.service.requests import ModelRequest, PlanRequest
from trainledger.service.typed import whole_number

NUMBERS = tuple(
    field.encode_name
    for field in msgspec.structs.fields(PlanRequest)
    if field.name not in ModelRequest.__struct_fields__ and int in get_args(get_args(field.type)[0])
)
"""Flags that can be swept: every number but the sizes of a model by hand."""

MOST_VALUES = 64


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The totals at one value, on the stage that holds most; null where a rule refuses the value.

    wire_bytes   over all axes, per step and rank of the stage that sends most, which need not be pp_stage
    """

    value: int
    gpus: int | None
    dp: int | None
    total_bytes: int | None
    states_bytes: int | None
    activations_bytes: int | None
    wire_bytes: int | None
    fits: bool | None
    pp_stage: int | None
    instant: str | None
    refused: str | None = None


def sweep_values(text: str) -> tuple[str, tuple[int, ...]]:
    """The flag and its values: `a..b` doubles from a while it is not above b, `a,b,c` takes each.

    >>> sweep_values("gpus=8..64"), sweep_values("mbs=1,2,3")
    (('gpus', (8, 16, 32, 64)), ('mbs', (1, 2, 3)))
    """
    name, equals, values = text.partition("=")
    if not equals:
        raise UsageError(f"--sweep {text}: write FLAG=VALUES, such as gpus=8..4096 or mbs=1,2,4")
    if name not in NUMBERS:
        raise UnknownName("number to sweep", name, NUMBERS)
    low, dots, high = values.partition("..")
    numbers = [
        whole_number(f"--sweep {text}", part, f"{name}=8..4096 or {name}=1,2,4")
        for part in ((low, high) if dots else values.split(","))
    ]
    if not dots:
        chosen = tuple(dict.fromkeys(numbers))
    elif not 1 <= numbers[0] <= numbers[1]:
        raise UsageError(f"--sweep {text}: a doubling range rises from at least 1, such as {name}=8..4096")
    else:
        steps = (numbers[1] // numbers[0]).bit_length()
        chosen = tuple(numbers[0] << step for step in range(steps))
    if len(chosen) > MOST_VALUES:
        raise UsageError(f"--sweep {text}: {len(chosen)} values; give at most {MOST_VALUES}")
    return name, chosen


def sweep_rows(request: PlanRequest, name: str, values: tuple[int, ...]) -> tuple[tuple[Row, ...], Run]:
    """One row per value, and a run of the last that worked; raises the first refusal where none does."""
    model = find_model(request)
    rows: list[Row] = []
    errors: list[TrainledgerError] = []
    worked: Run | None = None
    for value in values:
        changed = msgspec.structs.replace(request, **{name.replace("-", "_"): value})
        try:
            worked, row = _row(changed, model, value)
        except TrainledgerError as error:
            errors.append(error)
            blank = dict.fromkeys(Row.__struct_fields__[1:-1])
            row = Row(value=value, **blank, refused=str(error))  # pyright: ignore[reportArgumentType]
        rows.append(row)
    if worked is None:
        raise errors[0]
    return tuple(rows), worked


def _row(request: PlanRequest, model: Model, value: int) -> tuple[Run, Row]:
    run, plans, inventory = prepared(request, model=model)
    peak = single_peak(inventory, plans)
    _, data, parallel = wire_totals(inventory, plans)
    return run, Row(
        value=value,
        gpus=run.gpus,
        dp=int(plans.dp[0]),
        total_bytes=peak.total_bytes,
        states_bytes=peak.states_bytes,
        activations_bytes=None if model.states_alone else peak.activations_bytes,
        wire_bytes=round(float((data + parallel).max())),
        fits=run.fits(device_bytes(inventory, plans), peak.host_bytes),
        pp_stage=peak.pp_stage,
        instant=peak.instant,
    )
