"""PLAN files: TOML whose keys are the flags, laid under the flags of the command line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from trainledger.errors import BadInput, UnknownName, UsageError
from trainledger.facts.load import load_toml
from trainledger.facts.presets import find_preset
from trainledger.service.requests import ModelRequest, PlanRequest
from trainledger.service.typed import items

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
        tables = {key: _typed(key, value) for key, value in tables.items()}
        return _placed(msgspec.convert(tables, PlanRequest), Path(path).parent)
    except UsageError as error:
        raise BadInput(f"{path}: {error}") from None
    except msgspec.ValidationError as error:
        raise BadInput(f"{path}: {_complaint(str(error), tables)}") from None


def _typed(key: str, value: object) -> object:
    """The value of a key; a list may be the text that the command line takes, with commas."""
    field = next(field for field in msgspec.structs.fields(PlanRequest) if field.encode_name == key)
    parts = [part for part in get_args(get_args(field.type)[0]) if get_origin(part) is tuple]
    if not parts or not isinstance(value, str):
        return value
    if get_args(field.type)[1].extra["repeat"]:
        return [value]
    return list(items(key, get_args(parts[0])[0], value, get_args(field.type)[1].extra["value"]))


def _placed(given: PlanRequest, folder: Path) -> PlanRequest:
    """The request with the paths that it names taken from the folder of its file."""
    found = {name: _path(getattr(given, name), folder) for name in ("cluster", "gpu")}
    model = _path(given.model, folder)
    if model is not None and model == given.model and find_preset(model) is None and _beside(folder, model):
        model = str(folder / model)
    found["model"] = model
    return msgspec.structs.replace(given, **found)


def _path(name: str | None, folder: Path) -> str | None:
    """What can only be a file by its path, any other name as it is.

    >>> _path("sub/config.json", Path("plans")), _path("llama-3-8b", Path("plans"))
    ('plans/sub/config.json', 'llama-3-8b')
    """
    if name is None or name.startswith(("/", "~")):
        return name
    only_a_file = name.endswith((".json", SUFFIX)) or name.startswith(("./", "../"))
    return str(folder / name) if only_a_file else name


def _beside(folder: Path, name: str) -> bool:
    """Whether a model's name is a path below the folder, or a directory in it that has a config."""
    path = folder / name
    try:
        return path.exists() if "/" in name else (path / "config.json").is_file()
    except OSError:
        return False


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
