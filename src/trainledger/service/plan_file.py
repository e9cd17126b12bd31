"""PLAN files: TOML whose keys are the flags, laid under the flags of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from trainledger.errors import BadInput, UnknownName
from trainledger.facts.load import load_toml
from trainledger.facts.presets import find_preset
from trainledger.service.requests import ModelRequest, PlanRequest
from trainledger.service.typed import request_from

SUFFIX = ".toml"
CONFIG_TABLES = ("data", "run")
"""What a CONFIG has beside the keys of a plan."""
OWN = "pytorch"
"""The engine that is this package's own program."""

Request = TypeVar("Request", bound=ModelRequest)


def read_config(path: str) -> tuple[PlanRequest, dict[str, Any]]:
    """The flags of a PLAN file, and the tables that it has beside them where it is a CONFIG.

    An unknown key is refused with the nearest, a wrong type with what fits.
    """
    tables = load_toml(Path(path))
    for name in CONFIG_TABLES:
        if name in tables and not isinstance(tables[name], dict):
            raise BadInput(
                f"{path}: {name} is no table of keys; write [{name}] on a line of its own, and its keys below"
            )
    beside = {name: tables.pop(name) for name in CONFIG_TABLES if name in tables}
    return _plan_of(path, tables), beside


def _plan_of(path: str, tables: dict[str, Any]) -> PlanRequest:
    known = PlanRequest.__struct_encode_fields__
    for key in tables:
        if key not in known:
            hint = "keys are the flags without their dashes"
            raise UnknownName(
                f"key of a PLAN file ({path})",
                key,
                (*known, *CONFIG_TABLES),
                hint,
                listed="trainledger ledger --help",
            )
    return _placed(request_from(PlanRequest, tables, path), Path(path).parent)


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
    >>> _path("config.json:text_config", Path("plans"))
    'plans/config.json:text_config'
    """
    if name is None or name.startswith(("/", "~")):
        return name
    only_a_file = name.partition(":")[0].endswith((".json", SUFFIX)) or name.startswith(("./", "../"))
    return str(folder / name) if only_a_file else name


def _beside(folder: Path, name: str) -> bool:
    """Whether a model's name is a path below the folder, or a directory in it that has a config."""
    path = folder / name
    try:
        return path.exists() if "/" in name else (path / "config.json").is_file()
    except OSError:
        return False


def overlay(request: Request) -> Request:
    """The request with what it leaves open taken from its PLAN file, where MODEL names one.

    Keys that the verb has no flag for are not its business: `states` shows every zero_stage, whatever `zero` says, and
    the tables of a CONFIG are for `train`; they say that the plan is run by this package's own program.
    """
    if request.model is None or not request.model.endswith(SUFFIX):
        return request
    given, tables = read_config(request.model)
    if tables and given.engine is None:
        given = msgspec.structs.replace(given, engine=OWN)
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
