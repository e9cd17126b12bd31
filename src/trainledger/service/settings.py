"""Files of an engine's or a launcher's own settings in place of a PLAN file, under flags that agree with them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from trainledger.adapters.accelerate import is_accelerate, read_accelerate
from trainledger.adapters.command_line import flags_of, said_otherwise
from trainledger.adapters.deepspeed import is_deepspeed, read_deepspeed
from trainledger.adapters.megatron import is_megatron, read_megatron
from trainledger.adapters.settings import Settings
from trainledger.adapters.torchtitan import is_torchtitan, read_torchtitan
from trainledger.adapters.trainer import is_trainer, model_of, read_trainer
from trainledger.adapters.trainer_keys import MODEL
from trainledger.adapters.yaml_text import parse_yaml
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
SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch", ".txt")
"""How names of files end that may have a launch command."""
COMMAND = "the command"
SHAPES = ("model_type", "architectures", "hidden_size", "n_embd", "d_model")
"""Keys of a model's config."""
NOT_READ: dict[str, tuple[str, ...]] = {
    "GPT-NeoX": ("pipe_parallel_size",),
    "GPT-NeoX (in its older spelling)": ("pipe-parallel-size",),
    "LLM Foundry": ("max_duration", "device_train_microbatch_size"),
    "nanotron": ("data_stages", "parallelism"),
}
"""Programs whose settings have these keys, and are not read."""
SAME = {"engine": ALIASES, "optimizer": OPTIMIZER_ALIASES}
"""Fields whose values have several names."""


def names_settings(given: str) -> bool:
    """Whether it is a file of settings or a launch command, read here or not, and no PLAN file, log or model."""
    try:
        return bool(_program(given, _tables(given)))
    except BadInput:
        return False


def is_model(path: str) -> bool:
    """Whether a file is a model's config; BadInput where it is not even JSON, YAML or TOML."""
    return any(key in _tables(path) for key in SHAPES)


def with_settings(request: PlanRequest, given: str, *, model: Model | None = None) -> tuple[PlanRequest, Settings]:
    """The plan of settings under the flags; a flag that says something else than they do is refused."""
    flags = _flags(request)
    tables = _tables(given)
    program, where = _program(given, tables), given if _is_file(given) else COMMAND
    if program in NOT_READ:
        raise BadInput(f"{where} is {program}'s, whose settings are not read; give what it says as flags")
    if program == "torchtitan":
        settings = read_torchtitan(where, tables, flags)
    elif program == "Megatron":
        named = request.model is not None or request.hidden is not None
        found = model if model is not None or not named else find_model(request)
        settings = read_megatron(where, tables, flags, found)
    else:
        settings = _of_launchers(program, where, tables, request, model)
    _refuse_several(given, settings)
    _refuse_contradicted(settings, flags)
    known = request.__struct_fields__
    filled = {name: value for name, value in settings.plan.items() if name not in flags and name in known}
    return msgspec.structs.replace(request, **filled), settings


def _flags(request: PlanRequest) -> dict[str, Any]:
    """The fields that flags say."""
    return {name: getattr(request, name) for name in request.__struct_fields__ if getattr(request, name) is not None}


def _of_launchers(
    program: str, where: str, tables: dict[str, Any], request: PlanRequest, model: Model | None
) -> Settings:
    """Settings some of whose values follow from the model, which a trainer's alone name."""
    flags = _flags(request)
    if model is None and request.model is None and request.hidden is None:
        named = model_of(tables) if program == "trainer" else None
        if named is None:
            said = [f"{name} {tables[name]}" for name in MODEL if tables.get(name)] if program == "trainer" else []
            what = f"says {said[0]}, which is no model that comes with the package" if said else "names no model"
            raise UsageError(f"{where} {what}; give --model, such as --model llama-3-8b, or its config.json")
        request = msgspec.structs.replace(request, model=named)
    found = model if model is not None else find_model(request)
    folder = Path() if where == COMMAND else Path(where).parent

    def loaded(name: str) -> Mapping[str, Any]:
        file = Path(name).expanduser()
        found = file if file.is_absolute() or not (folder / file).exists() else folder / file
        if not found.is_file():
            raise BadInput(f"{where}: {name} is named there, and is no file; check the path, or leave it out")
        return _tables(str(found))

    if program == "DeepSpeed":
        return read_deepspeed(where, tables, flags, found)
    if program == "accelerate":
        return read_accelerate(where, tables, flags, found, loaded)
    return read_trainer(where, tables, flags, found, loaded)


def _program(given: str, tables: Mapping[str, Any]) -> str:
    """Whose settings these are, by suffix and keys; "" where that is not known."""
    suffix = Path(given).suffix if _is_file(given) else ""
    if suffix == SUFFIX:
        return "torchtitan" if is_torchtitan(tables) else ""
    if suffix == ".json":
        return "DeepSpeed" if is_deepspeed(tables) else ""
    mapping = suffix in SUFFIXES
    if mapping and is_accelerate(tables):
        return "accelerate"
    if not mapping and is_megatron(tables):
        return "Megatron"
    if is_trainer(tables):
        return "trainer"
    return next((name for name, keys in NOT_READ.items() if mapping and all(key in tables for key in keys)), "")


def _is_file(given: str) -> bool:
    """Whether it names a file; a command is longer than a name can be, or has flags."""
    try:
        return Path(given).is_file()
    except (OSError, ValueError):
        return False


def _tables(given: str) -> dict[str, Any]:
    """The object at the top of a JSON, YAML or TOML file, or the flags of a command."""
    command = _command(given)
    if command is not None:
        return flags_of(command)
    suffix = Path(given).suffix
    if suffix == SUFFIX:
        return load_toml(Path(given))
    if suffix == ".json":
        return load_config(given)
    return parse_yaml(_text(given), where=given) if suffix in SUFFIXES else {}


def _command(given: str) -> str | None:
    """A command as it is given, or the text of a script; None for other files."""
    suffix = Path(given).suffix
    if _is_file(given):
        return _text(given) if suffix in SCRIPTS else None
    return given if suffix not in SUFFIXES or " --" in given else None


def _text(given: str) -> str:
    try:
        return Path(given).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadInput(f"{given} cannot be read ({error.strerror}); check the path and its permissions") from None
    except UnicodeDecodeError:
        raise BadInput(f"{given} is not UTF-8 text; save it as UTF-8") from None


def _refuse_several(given: str, settings: Settings) -> None:
    """An argument of two values is of two runs, or of a branch that was not taken; none can be chosen."""
    command = _command(given)
    several = {} if command is None else said_otherwise(command)
    for used in settings.used:
        one, other = several.get(used.key.lstrip("-").replace("-", "_"), (None, None))
        if one != other:
            raise BadInput(
                f"{settings.path}: {used.key} stands there as {one} and as {other}; give the command of one run alone"
            )


def _refuse_contradicted(settings: Settings, given: Mapping[str, Any]) -> None:
    """As transformers' trainer does of its own arguments: two values of one thing are refused."""
    for name, value in settings.plan.items():
        # what a file calls its model may be a folder of anything
        if name == "model" or name not in given or _same(name, value, given[name]):
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
