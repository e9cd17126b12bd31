"""A Request type as a cyclopts command: one flag per field, declared nowhere else."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from cyclopts import Parameter

from trainledger.cli.flags import Flag, flags
from trainledger.errors import UsageError

JSON = "json"


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
    if field.default is None:
        typed = typed | None
    shown = Parameter(
        name=None if field.positional else f"--{field.option}",
        negative=None if field.type is bool else (),
    )
    return inspect.Parameter(field.name, kind, default=field.default, annotation=Annotated[typed, shown])


def _value(field: Flag, value: object) -> object:
    """The field's value; a tuple from its text with commas."""
    if value is None or get_origin(field.type) is not tuple:
        return value
    parts = value if isinstance(value, list) else [part.strip() for part in str(value).split(",")]
    element = get_args(field.type)[0]
    return tuple(_element(field, element, part) for part in parts)


def _element(field: Flag, element: object, part: str) -> int | str:
    if element is int:
        if not (part.isascii() and part.isdigit() and len(part) < 20):
            raise UsageError(f"--{field.option}: {part!r} is not a whole number; write {field.value}, such as 9,8,8,7")
        return int(part)
    if get_origin(element) is Literal and part not in get_args(element):
        raise UsageError(f"--{field.option}: {part!r} is not one of {', '.join(get_args(element))}")
    if not part:
        raise UsageError(f"--{field.option}: a value is empty; write {field.value}")
    return part
