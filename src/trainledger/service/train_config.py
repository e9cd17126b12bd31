"""CONFIG files: a PLAN file with the tables [data] and [run], laid under the flags of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import msgspec

from trainledger.errors import BadInput, UnknownName
from trainledger.runtime.data.token_file import BYTES
from trainledger.service.plan_file import CONFIG_TABLES, SUFFIX, merged, read_config
from trainledger.service.train_limits import check_named
from trainledger.service.train_request import Request
from trainledger.service.typed import request_from

FILES = ("text", "tokens", "held_out_tokens", "tokenizer")
"""Flags that name what is read: in a CONFIG their paths start at its folder, as those of a PLAN file do."""


def configured(request: Request) -> Request:
    """The request with what it leaves open taken from its CONFIG, where it names one."""
    path = request.model
    if path is None or not path.endswith(SUFFIX):
        return request
    plan, tables = read_config(path)
    if plan.model is None:
        raise BadInput(f'{path} names no model: add model = "...", such as a preset of `trainledger list models`')
    if plan.model.endswith(SUFFIX):
        raise BadInput(f"{path}: model is {plan.model!r}, another CONFIG; name the model itself")
    values = {key: value for name in CONFIG_TABLES for key, value in _checked(path, name, tables.get(name, {})).items()}
    said = request_from(Request, values, path)
    check_named(said)
    beside = _placed(said, Path(path).parent)
    return merged(plan, merged(beside, msgspec.structs.replace(request, model=None)))


def keys_of(table: str) -> tuple[str, ...]:
    """What a table of a CONFIG may say.

    >>> keys_of("data")
    ('text', 'tokenizer', 'held-out', 'tokens', 'held-out-tokens')
    """
    fields = msgspec.structs.fields(Request)
    return tuple(field.encode_name for field in fields if get_args(field.type)[1].extra["group"].lower() == table)


def _checked(path: str, table: str, values: dict[str, Any]) -> dict[str, Any]:
    """The values of a table, once it has them all to itself."""
    for key in values:
        if key not in keys_of(table):
            other = next((name for name in CONFIG_TABLES if key in keys_of(name)), None)
            hint = f"{key} belongs into [{other}]" if other else "keys are the flags without their dashes"
            raise UnknownName(f"key of [{table}] ({path})", key, keys_of(table), hint)
    return values


def _placed(given: Request, folder: Path) -> Request:
    """The request with the files that it names looked for from a folder."""

    def placed(name: str) -> str:
        return name if name == BYTES or name.startswith("~") else str(folder / name)

    found: dict[str, Any] = {}
    for field in FILES:
        value = getattr(given, field)
        found[field] = tuple(map(placed, value)) if isinstance(value, tuple) else value and placed(value)
    return msgspec.structs.replace(given, **found)
