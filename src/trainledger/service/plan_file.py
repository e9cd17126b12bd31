"""PLAN files: TOML whose keys are the flags, laid under the flags of the command line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from trainledger.errors import BadInput, UnknownName
from trainledger.facts.load import load_toml
from trainledger.service.requests import ModelRequest, PlanRequest

SUFFIX = ".toml"

Request = TypeVar("Request", bound=ModelRequest)

_AT = re.compile(r" - at `\$\.?(.*)`$")


def read_plan_file(path: str) -> PlanRequest:
    """The flags that a PLAN file gives; an unknown key is refused with the nearest, a wrong type with what fits."""
    tables = load_toml(Path(path))
    known = PlanRequest.__struct_encode_fields__
    for key in tables:
        if key not in known:
            raise UnknownName(f"key of a PLAN file ({path})", key, known, "keys are the flags without their dashes")
    try:
        return msgspec.convert(tables, PlanRequest)
    except msgspec.ValidationError as error:
        raise BadInput(f"{path}: {_complaint(str(error), tables)}") from None


def _complaint(message: str, tables: dict[str, Any]) -> str:
    """The message of msgspec with the key in front, the value that was seen, and the words that would do.

    >>> _complaint("Expected `int | null`, got `str` - at `$.gpus`", {"gpus": "many"})
    "gpus is 'many': expected `int`, got `str`"
    >>> _complaint("Invalid enum value 'cpu' - at `$.offload[0]`", {"offload": ["cpu"]})
    "offload is ['cpu']: invalid enum value 'cpu'; write optimizer or parameters"
    """
    where = _AT.search(message)
    key = where[1].partition("[")[0] if where else ""
    text = _AT.sub("", message).replace(" | null", "")
    words = " or ".join(_choices(key)) if text.startswith("Invalid enum") else ""
    return f"{key} is {tables.get(key)!r}: {text[0].lower()}{text[1:]}{f'; write {words}' if words else ''}"


def _choices(key: str) -> tuple[str, ...]:
    """The words that a key may be, or its items."""
    hints = [field.type for field in msgspec.structs.fields(PlanRequest) if field.encode_name == key]
    while hints:
        hint = hints.pop()
        if get_origin(hint) is Literal:
            return get_args(hint)
        hints += [part for part in get_args(hint) if get_args(part)]
    return ()


def overlay(request: Request) -> Request:
    """The request with what it leaves open taken from its PLAN file, where MODEL names one.

    Keys that the verb has no flag for are not its business: `states` shows every zero_stage, whatever `zero` says.
    """
    if request.model is None or not request.model.endswith(SUFFIX):
        return request
    given = read_plan_file(request.model)
    if given.model is not None and given.model.endswith(SUFFIX):
        raise BadInput(f"{request.model}: model is {given.model!r}, another PLAN file; name the model itself")
    return merged(given, msgspec.structs.replace(request, model=None))


def merged(under: ModelRequest, over: Request) -> Request:
    """The request `over` with every field that is None taken from `under`."""
    have = under.__struct_fields__
    fields = {name: getattr(over, name) for name in over.__struct_fields__}
    for name, value in fields.items():
        if value is None and name in have:
            fields[name] = getattr(under, name)
    return type(over)(**fields)
