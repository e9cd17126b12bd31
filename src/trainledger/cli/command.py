"""A Request type as a cyclopts command: one flag per field, declared nowhere else."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin

import msgspec
from cyclopts import Parameter

from trainledger.cli.flags import Flag, flags
from trainledger.service.typed import item, items, number, whole_number

JSON = "json"
EXAMPLE = "8"


def command(request: type[msgspec.Struct], act: Callable[[Any, bool], int]) -> Callable[..., int]:
    """A function with a parameter per field and --json, which builds the Request and hands it to `act`."""
    fields = flags(request)

    def run(*values: object, **given: object) -> int:
        as_json = bool(given.pop(JSON, False))
        positional = (field.name for field in fields if field.positional)
        given |= dict(zip(positional, values, strict=False))
        return act(
            request(**{field.name: _value(field, given.get(field.name, field.default)) for field in fields}), as_json
        )

    plain = Annotated[bool, Parameter(name="--json", negative=())]
    json_flag = inspect.Parameter(JSON, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=plain)
    ordered = sorted(fields, key=lambda field: not field.positional)
    run.__signature__ = inspect.Signature([*(_parameter(field) for field in ordered), json_flag])  # pyright: ignore[reportFunctionMemberAccess]
    run.__doc__ = request.__doc__
    return run


def _parameter(field: Flag) -> inspect.Parameter:
    kind = inspect.Parameter.POSITIONAL_ONLY if field.positional else inspect.Parameter.KEYWORD_ONLY
    typed: Any = field.type
    if get_origin(typed) is tuple:
        typed = list[str] if field.repeat else str
    if typed in (int, float):
        # cyclopts reads 1.5 as 2 and 0x10 as 16
        typed = str
    if field.default is None:
        typed = typed | None
    shown = Parameter(
        name=None if field.positional else f"--{field.option}",
        negative=None if field.type is bool else (),
        allow_leading_hyphen=field.hyphen,
    )
    return inspect.Parameter(field.name, kind, default=field.default, annotation=Annotated[typed, shown])


def _value(field: Flag, value: object) -> object:
    """The field's value from what was typed; cyclopts passes on numbers and lists as text."""
    if value is None or not isinstance(value, str | list):
        return value
    flag = f"--{field.option}"
    if field.type is int:
        return whole_number(flag, str(value), EXAMPLE)
    if field.type is float:
        return number(flag, str(value))
    if get_origin(field.type) is not tuple:
        return value
    element = get_args(field.type)[0]
    if isinstance(value, list):
        return tuple(item(flag, element, part, field.value) for part in value)
    return items(flag, element, value, field.value)
