"""Files of an engine's or a launcher's own settings in place of a PLAN file, under flags that agree with them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from trainledger.adapters.accelerate import is_accelerate, read_accelerate
from trainledger.adapters.deepspeed import is_deepspeed, read_deepspeed
from trainledger.adapters.plain_yaml import parse_yaml
from trainledger.adapters.settings import Settings
from trainledger.adapters.torchtitan import is_torchtitan, read_torchtitan
from trainledger.errors import BadInput, UsageError
from trainledger.facts.load import load_toml
from trainledger.facts.model import Model
from trainledger.facts.model_load import load_config
from trainledger.profiles import ALIASES, OPTIMIZER_ALIASES
from trainledger.service.models import find_model
from trainledger.service.plan_file import SUFFIX
from trainledger.service.requests import PlanRequest

SUFFIXES = (".json", ".yaml", ".yml", SUFFIX)
"""How names of such files end."""
SHAPES = ("model_type", "architectures", "hidden_size", "n_embd", "d_model")
"""Keys of a model's config."""
NOT_READ: dict[str, tuple[str, ...]] = {
    "axolotl": ("base_model", "micro_batch_size"),
    "GPT-NeoX": ("pipe_parallel_size",),
    "GPT-NeoX (in its older spelling)": ("pipe-parallel-size",),
    "LLM Foundry": ("max_duration", "device_train_microbatch_size"),
    "nanotron": ("data_stages", "parallelism"),
    "transformers' trainer or LLaMA-Factory": ("model_name_or_path",),
}
"""Programs whose settings have these keys, and are not read."""
SAME = {"engine": ALIASES, "optimizer": OPTIMIZER_ALIASES}
"""Fields whose values have several names."""


def names_settings(path: str) -> bool:
    """Whether a file has settings, read here or not, and is no PLAN file, no log and no model."""
    if Path(path).suffix not in SUFFIXES:
        return False
    try:
        return bool(_program(path, _tables(path)))
    except BadInput:
        return False


def is_model(path: str) -> bool:
    """Whether a file is a model's config; BadInput where it is not even JSON, YAML or TOML."""
    return any(key in _tables(path) for key in SHAPES)


def with_settings(request: PlanRequest, path: str, *, model: Model | None = None) -> tuple[PlanRequest, Settings]:
    """The plan of a file of settings under the flags; a flag that says something else than the file is refused."""
    given = {name: getattr(request, name) for name in request.__struct_fields__ if getattr(request, name) is not None}
    tables = _tables(path)
    program = _program(path, tables)
    if program in NOT_READ:
        raise BadInput(f"{path} is {program}'s, whose settings are not read; give what it says as flags")
    if program == "torchtitan":
        settings = read_torchtitan(path, tables, given)
    else:
        settings = _of_launchers(path, tables, request, given, model)
    _refuse_contradicted(settings, given)
    filled = {name: value for name, value in settings.plan.items() if name not in given}
    return msgspec.structs.replace(request, **filled), settings


def _of_launchers(
    path: str, tables: dict[str, Any], request: PlanRequest, given: dict[str, Any], model: Model | None
) -> Settings:
    """DeepSpeed's JSON and accelerate's YAML, which name no model: some of their values follow from it."""
    if model is None and request.model is None and not any(given.get(size) for size in ("hidden", "layers")):
        raise UsageError(f"{path} names no model; give --model, such as --model llama-3-8b")
    found = model if model is not None else find_model(request)
    if Path(path).suffix == ".json":
        return read_deepspeed(path, tables, given, found)
    folder = Path(path).parent

    def loaded(name: str) -> Mapping[str, Any]:
        file = Path(name).expanduser()
        return load_config(file if file.is_absolute() or not (folder / file).exists() else folder / file)

    return read_accelerate(path, tables, given, found, loaded)


def _program(path: str, tables: Mapping[str, Any]) -> str:
    """Whose settings a file has, by its suffix and its keys; "" where that is not known."""
    suffix = Path(path).suffix
    if suffix == SUFFIX:
        return "torchtitan" if is_torchtitan(tables) else ""
    if suffix == ".json" and is_deepspeed(tables):
        return "DeepSpeed"
    if suffix != ".json" and is_accelerate(tables):
        return "accelerate"
    return next((name for name, keys in NOT_READ.items() if all(key in tables for key in keys)), "")


def _tables(path: str) -> dict[str, Any]:
    """The object at the top of a JSON, YAML or TOML file."""
    suffix = Path(path).suffix
    if suffix == SUFFIX:
        return load_toml(Path(path))
    if suffix == ".json":
        return load_config(path)
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}); check the path and its permissions") from None
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not UTF-8 text; save it as UTF-8") from None
    return parse_yaml(text, where=path)


def _refuse_contradicted(settings: Settings, given: Mapping[str, Any]) -> None:
    """As transformers' trainer does of its own arguments: two values of one thing are refused."""
    for name, value in settings.plan.items():
        if name not in given or _same(name, value, given[name]):
            continue
        key = next((used for used in settings.used if used.flag.startswith(f"--{name.replace('_', '-')} ")), None)
        source = f"{key.key} {key.value}" if key is not None else settings.kind
        flag = name.replace("_", "-")
        raise UsageError(
            f"{settings.path}: {source} is --{flag} {_typed(value)}, and --{flag} {_typed(given[name])} is given; "
            "leave the flag out, or change the file"
        )


def _same(name: str, one: object, other: object) -> bool:
    names = SAME.get(name, {})

    def plain(value: object) -> object:
        return names.get(value.lower(), value.lower()) if isinstance(value, str) and names else value

    return plain(one) == plain(other)


def _typed(value: object) -> str:
    return ",".join(map(str, cast("tuple[object, ...]", value))) or "none" if isinstance(value, tuple) else str(value)
