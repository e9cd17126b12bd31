"""Find a model by what a user calls it: a preset, an alias, a config.json, a directory, or an id on the Hub.

`config.json:text_config` is the decoder inside the config of a model that has other parts too. A config is JSON and
stays data: no pickle is opened and no code is run. `--set KEY=VALUE` changes keys of the config before it is read.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from trainledger.errors import BadInput, UnknownName
from trainledger.facts.families import family_for, model_from_config
from trainledger.facts.families.keys import IDLE, shown
from trainledger.facts.model import Model
from trainledger.facts.presets import aliases, find_preset, preset_config, preset_names, preset_source

_DEPTH_LIMIT = 100
"""A config nests two or three levels; beyond this a file is damaged or hostile."""

_BYTE_LIMIT = 16 * 2**20
"""A config is a few thousand bytes; beyond this a file is something else."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}")

_PART = re.compile(r"[a-z_]+_config")

_WEIGHT_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".safetensors", ".gguf", ".npz", ".h5")


class _Repeated(Exception):
    """A key stands twice in one object."""


class _Found(msgspec.Struct, frozen=True):
    """A config, what to call its model, where it comes from, what to call it in an error, and a note on all of it."""

    config: dict[str, Any]
    name: str
    source: str
    where: str
    note: str = ""


def load_model(name_or_path: str, *, overrides: Mapping[str, str] | None = None) -> Model:
    """The model of a preset, alias, config file, directory with a config.json, or id on the Hub.

    `overrides` are keys of the config with their new values as text, read as JSON where that is possible.

    >>> load_model("llama-3.1-8b", overrides={"num_hidden_layers": "2"}).num_layers
    2
    """
    return load_with_config(name_or_path, overrides=overrides)[1]


def load_with_config(name_or_path: str, *, overrides: Mapping[str, str] | None = None) -> tuple[dict[str, Any], Model]:
    """The config that `load_model` reads, with the overrides in it, and the model.

    >>> load_with_config("llama-3.1-8b", overrides={"num_hidden_layers": "2"})[0]["num_hidden_layers"]
    2
    """
    found = _find(name_or_path)
    changes = dict(overrides or {})
    config = _override(found.config, changes, found.where) if changes else found.config
    model = model_from_config(config, name=found.name, source=found.source, where=found.where)
    if found.note:
        model = msgspec.structs.replace(model, notes=(found.note, *model.notes))
    if not changes:
        return config, model
    notes = [f"set by hand: {', '.join(f'{key}={value}' for key, value in changes.items())}"]
    idle = sorted(set(changes) & family_for(config, found.where).ignored_keys - {"model_type", "architectures"})
    if idle:
        notes.append(f"{IDLE_NOTE}: {', '.join(idle)}")
    return config, msgspec.structs.replace(model, notes=(*notes, *model.notes))


def load_config(path: str | Path) -> dict[str, Any]:
    """The object in a config.json, or in the config.json of a directory."""
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
        if not file.is_file():
            raise BadInput(f"{path} is a directory without a config.json; give the file, or save the config there")
    if file.suffix.lower() in _WEIGHT_SUFFIXES:
        raise BadInput(f"{path} holds weights, and only a config is read; give the config.json beside it")
    try:
        if not file.is_file():
            raise BadInput(f"{path} is not a file; give a config.json")
        if file.stat().st_size > _BYTE_LIMIT:
            raise BadInput(f"{path} has {file.stat().st_size} bytes, too many for a config; give a config.json")
        raw = file.read_bytes()
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}); check the path and its permissions") from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text (byte {error.start}); give a config.json as text") from error
    return parse_config(text, where=str(path))


IDLE_NOTE = "set by hand, but no shape depends on it"
"""How the note begins on a change that only a run sees."""
SET_ALL_THE_SAME = frozenset(("model_type", "architectures", "initializer_range", "init_std", "init_method"))
"""Of the keys that change nothing in a forward pass, those that choose the family, or how a new model starts."""
INSTEAD: dict[str, tuple[str, ...]] = {
    "give --precision": ("torch_dtype", "dtype", "fp16", "bf16", "torch_dtype_str", "use_bfloat16"),
    "give --seq": ("seq_length", "max_sequence_length", "model_max_length", "max_length"),
    "give --recompute": ("gradient_checkpointing",),
    "give --attention": ("attn_implementation", "use_flash_attn", "flash_attn", "use_flash_attention"),
    "give --qlora": ("quantization_config", "is_quantized"),
}
"""Flags that say what such a key is believed to say."""


def parse_config(text: str, *, where: str) -> dict[str, Any]:
    """The object in the text of a config.json; no key twice, no deep nesting, nothing but an object at the top."""
    try:
        config = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        end = error.pos >= len(text.rstrip())
        reason = "the text ends there, as if cut off" if end else error.msg
        raise BadInput(
            f"{where}: line {error.lineno}, column {error.colno}: not JSON ({reason}); correct it or get it again"
        ) from error
    except _Repeated as error:
        raise BadInput(f"{where}: the key {error.args[0]!r} stands twice in one object; remove one") from error
    except RecursionError:
        raise BadInput(f"{where}: brackets nest too deeply for a config; get the file again") from None
    except ValueError as error:
        raise BadInput(f"{where}: a number has too many digits ({error}); correct it") from error
    if not isinstance(config, dict):
        raise BadInput(
            f"{where}: the top level is {_kind(config)}; a config is an object, in braces; give a config.json"
        )
    if _too_deep(config):
        raise BadInput(f"{where}: brackets nest deeper than {_DEPTH_LIMIT} levels; get the file again")
    return config


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise _Repeated(key)
        out[key] = value
    return out


def _kind(value: object) -> str:
    if isinstance(value, list):
        return "a list"
    return "null" if value is None else f"a single value ({shown(value)})"


def _too_deep(value: object) -> bool:
    level: list[Any] = [value]
    for _ in range(_DEPTH_LIMIT):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        if not inner:
            return False
        level = inner
    return True


def _inside(name: str) -> _Found | None:
    """The part of a config that a name such as config.json:text_config gives; None where it names no part."""
    whole, mark, part = name.rpartition(":")
    if not mark or not whole or not _PART.fullmatch(part) or _existing(name) is not None:
        return None
    found = _find(whole)
    inner = found.config.get(part)
    parts = [key for key, value in found.config.items() if isinstance(value, dict) and "model_type" in value]
    if not isinstance(inner, dict):
        have = f"give one of its parts, {', '.join(parts)}" if parts else "it is of one decoder, so give it by itself"
        raise BadInput(f"{found.where} has no {part}; {have}")
    note = f"{part} of the config alone: no weights of other parts are counted"
    return _Found(inner, found.name, f"{found.source}, its {part}", f"{found.where}:{part}", note)


def _find(name: str) -> _Found:
    inside = _inside(name)
    if inside is not None:
        return inside
    preset = find_preset(name)
    if preset is not None:
        config = preset_config(preset)
        return _Found(config, preset, preset_source(config, preset), f"preset {preset}")
    path = _existing(name)
    if path is not None:
        called = path.resolve().name if path.is_dir() else path.stem
        if called == "config":
            called = path.resolve().parent.name
        return _Found(load_config(path), called, str(path), str(path))
    if name.endswith(".json") or name.startswith((".", "~", "/")):
        raise BadInput(f"{name} does not exist; give the path of a config.json, or one of the names in `list models`")
    if _HUB_ID.fullmatch(name):
        return _Found(load_config(_from_hub(name)), name.split("/")[1], f"huggingface.co/{name}", name)
    raise UnknownName(
        "model",
        name,
        (*preset_names(), *aliases()),
        "or give a config.json, a directory that has one, or ORG/NAME",
        listed="trainledger list models",
    )


def _existing(name: str) -> Path | None:
    """The path that a name is, if there is something there."""
    try:
        path = Path(name).expanduser()
        return path if name.strip() and path.exists() else None
    except (OSError, ValueError, RuntimeError):
        return None


def _from_hub(repo: str) -> Path:
    """The config.json of a repository on the Hub: from its cache if it is there, else from the network."""
    try:
        download = importlib.import_module("huggingface_hub").hf_hub_download
        errors = importlib.import_module("huggingface_hub.errors")
    except ImportError as error:
        raise BadInput(
            f"{repo} looks like an id on the Hugging Face Hub, and huggingface_hub is not installed; "
            'pip install "trainledger[hf]", or download its config.json and give the path'
        ) from error
    by_path = "download its config.json and give the path"
    try:
        return Path(download(repo, "config.json", local_files_only=True))
    except errors.LocalEntryNotFoundError:
        pass
    except errors.HFValidationError as error:
        raise BadInput(f"{repo} is not an id of the Hugging Face Hub ({error}); write ORG/NAME") from error
    try:
        return Path(download(repo, "config.json"))
    except errors.LocalEntryNotFoundError as error:
        raise BadInput(
            f"{repo} is not in the cache and the Hugging Face Hub cannot be reached; connect, or {by_path}"
        ) from error
    except errors.GatedRepoError as error:
        raise BadInput(
            f"{repo} is gated: its terms must be accepted on its page; do that and `hf auth login`, or {by_path}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise BadInput(
            f"{repo} does not exist on the Hugging Face Hub, or is private; check the spelling, or `hf auth login`"
        ) from error
    except errors.EntryNotFoundError as error:
        raise BadInput(f"{repo} has no config.json; give a repository of a transformers model") from error
    except (errors.HfHubHTTPError, OSError) as error:
        raise BadInput(f"{repo} could not be fetched ({type(error).__name__}); try again, or {by_path}") from error


def _override(config: dict[str, Any], changes: Mapping[str, str], where: str) -> dict[str, Any]:
    """The config with keys changed. null takes a key away where the family has no use for null."""
    out = dict(config)
    if "model_type" in changes:
        out["model_type"] = _value(changes["model_type"])
    family = family_for(out, where)
    spellings = {alias: name for name, key in family.keys.items() for alias in (name, *key.aliases)}
    known = set(spellings) | family.ignored_keys | set(family.fixed_keys)
    for key, text in changes.items():
        _refuse_idle(key, text, config)
        if key not in known and key not in config:
            raise UnknownName(
                f"key of a {family.name} config, so --set cannot change it",
                key,
                spellings,
                f"{family.name} reads {', '.join(family.keys)}",
            )
        value = _value(text)
        name = spellings.get(key)
        if name is not None:
            for other in (name, *family.keys[name].aliases):
                out.pop(other, None)
        if value is None and (name is None or not family.keys[name].nullable):
            out.pop(key, None)
        else:
            out[key] = value
    return out


def _refuse_idle(key: str, text: str, config: Mapping[str, Any]) -> None:
    """Refuse a change that nothing reads, neither a shape nor a forward pass: who makes it believes that it counts."""
    if key not in IDLE - SET_ALL_THE_SAME or (text == "null" and key in config):
        return
    knob = next((flag for flag, keys in INSTEAD.items() if key in keys), "leave it out")
    raise BadInput(f"--set {key}={text} would change nothing: no shape and no forward pass here reads {key}; {knob}")


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
