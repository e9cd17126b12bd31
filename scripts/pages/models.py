"""The page of models: the presets with their totals, and the kinds of config.json that can be read."""

from __future__ import annotations

from pages.hardware import table
from trainledger.facts.families import FAMILY_FILES, model_types
from trainledger.facts.model import Model
from trainledger.facts.presets import load_preset, other_names, preset_config, preset_names

INTRO = """# Models

{count} presets, each the keys of a published `config.json` that decide shapes. Counts are sums over tensors, a tied
embedding once; multi-token-prediction layers are not part of a total. "active": without the routed experts that a token
does not visit. `trainledger model NAME` prints every tensor, and `--set KEY=VALUE` changes a key before it is read.

"""

FAMILIES = """
## Kinds of config.json

{count} values of `model_type` are read, by one file each under `src/trainledger/facts/families`. A key that decides a
shape and that the file does not know is refused; a missing key takes the default of the config class and is reported
as a note.

"""

ALIAS_TEXT = """
## Other names

Releases with the same shapes, in any case.

"""


def render() -> str:
    """The whole page."""
    names = preset_names()
    parts = [INTRO.format(count=len(names)), table(_HEAD, map(_row, names)), ALIAS_TEXT]
    return "".join([*parts, _aliases(), FAMILIES.format(count=len(model_types())), _families()])


_HEAD = ("preset", "family", "parameters", "active", "layers", "hidden", "vocabulary", "head", "shapes from")


def _row(name: str) -> list[str]:
    model = load_preset(name)
    return [
        name,
        model.family,
        f"{model.total_params:,}",
        "all" if model.active_params == model.total_params else f"{model.active_params:,}",
        _layers(model),
        str(model.hidden_size),
        str(model.vocab_size),
        "tied" if model.tied else "own",
        str(preset_config(name)["_source"]),
    ]


def _layers(model: Model) -> str:
    """How many layers, and of which kinds where they differ."""
    routed = sum(len(block.layers) for block in model.blocks if block.moe is not None)
    return f"{model.num_layers} ({routed} with experts)" if routed else str(model.num_layers)


def _aliases() -> str:
    return table(("preset", "also"), [(preset, ", ".join(names)) for preset, names in sorted(other_names().items())])


def _families() -> str:
    return table(("file", "model_type"), [(f"{file}.py", ", ".join(types)) for file, types in FAMILY_FILES])
