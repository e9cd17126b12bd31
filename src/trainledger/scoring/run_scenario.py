"""From what a row says of its run to the categories of a plan: the Scenario of the engine that it is read as.

What the engine's profile or the accounts have no word for is Unsupported, and says which.
"""

from __future__ import annotations

from trainledger.facts.model import Model, routed
from trainledger.plans.plan import Scenario
from trainledger.plans.setting import EVERY
from trainledger.plans.split import layers_per_chunk
from trainledger.profiles import load_profile
from trainledger.profiles.profile import Precision, Profile
from trainledger.scoring.prediction import Unsupported
from trainledger.scoring.run_engine import EngineReading
from trainledger.scoring.run_layout import RunLayout
from trainledger.scoring.run_told import Recompute, Told
from trainledger.scoring.words import Unclear

ENDS = ("less_ends", "filled_ends", "padded")
"""Splits of plans/split.py that leave the first and the last stage a layer less of their own accord."""

APART = ("async-tp", "fp8-gather")
"""Flags that change memory in ways that no account tells."""


def scenario_of(told: Told, reading: EngineReading, layout: RunLayout, model: Model, assumed: list[str]) -> Scenario:
    """The scenario of a run; what was taken for granted is added to `assumed`."""
    profile = load_profile(reading.engine, reading.framework_version)
    precision = _precision(told, profile)
    _refuse_unaccounted(told)
    assumed += _alike(told)
    recompute, parts, blocks = _recompute(told.recompute, profile, assumed)
    return Scenario(
        engine=reading.engine,
        framework_version=reading.framework_version,
        precision=precision,
        grad_dtype=_gradients(told, profile.precision[precision]),
        optimizer=told.optimizer,
        recompute=recompute,
        recompute_parts=parts,
        recompute_layers=blocks,
        loss="chunked" if told.loss_chunks else told.loss,
        loss_chunks=told.loss_chunks,
        allocator=told.allocator,
        routing="balanced" if told.routing in ("balanced", "capacity") and routed(model) else "",
        compile=_compile(told, profile),
        schedule=_schedule(told, layout),
        attention=told.attention,
        cp_comm=told.cp_comm,
        offload=told.offload,
        pp_layout=_layout(told, layout, model, profile, assumed),
    )


def _refuse_unaccounted(told: Told) -> None:
    if "activations" in told.offload:
        raise Unsupported("overlap_flags: activations that wait in host memory are not accounted for")


def _alike(told: Told) -> list[str]:
    """What a row says and the accounts do not tell apart: listed, for it is not what makes a prediction."""
    found = [f"overlap_flags: {word} makes no difference here" for word in told.flags if word in APART]
    if told.covers:
        found.append(f"precision covers {told.covers} alone: all matrices are taken to be covered")
    if told.routing == "natural":
        found.append("moe_routing is natural: experts are taken to get equal shares")
    return found


def _precision(told: Told, profile: Profile) -> str:
    """The recipe of the profile that a row's words come to."""
    wanted = f"{told.precision}-pure" if told.weights == "pure" else told.precision
    if told.weights == "fp8":
        raise Unsupported(f"param_dtype: no recipe of {profile.name} keeps its weights in 8 bits")
    if wanted not in profile.precision:
        known = ", ".join(profile.precision)
        raise Unsupported(f"precision {wanted} is not a recipe of {profile.name}; it has {known}")
    return wanted


def _gradients(told: Told, recipe: Precision) -> str:
    """The dtype of gradients where it is not the recipe's own."""
    said = recipe.activation if told.gradients == "16-bit" else told.gradients
    return "" if said == recipe.grad else said


def _recompute(recompute: Recompute, profile: Profile, assumed: list[str]) -> tuple[str, tuple[str, ...], int]:
    """(--recompute, --recompute-parts, --recompute-layers)."""
    if recompute.every:
        return f"{EVERY}{recompute.every}", (), 0
    if recompute.how == "selective" and not recompute.parts and profile.memory.selective:
        assumed.append(f"recompute is selective: {' and '.join(profile.memory.selective)}, as {profile.name} does")
    return recompute.how, recompute.parts, recompute.blocks


def _compile(told: Told, profile: Profile) -> str:
    """--compile, where the engine has it: what another one compiles for itself is no choice of the run."""
    if told.compiled is None or not profile.memory.compile:
        return ""
    return "on" if told.compiled else "off"


def _schedule(told: Told, layout: RunLayout) -> str:
    """The order of a pipeline; 1F1B with virtual stages is interleaved, whether a row says so or not."""
    said = told.schedule or "1f1b"
    return "interleaved" if said == "1f1b" and layout.columns["vpp"] > 1 else said


def _layout(told: Told, layout: RunLayout, model: Model, profile: Profile, assumed: list[str]) -> tuple[int, ...]:
    """Layers of each virtual stage; () where the engine's own rule decides.

    An engine that wants equal stages and cannot have them counts the embedding and the output layer as a layer each.
    """
    chunks = layout.columns["pp"] * layout.columns["vpp"]
    if layout.columns["pp"] == 1:
        return ()
    if told.layout[:1].isdigit():
        return _numbers(told.layout, chunks, model.num_layers)
    if told.layout == "ends" and profile.split in ENDS:
        return ()
    uneven = profile.split == "divisible" and model.num_layers % chunks != 0
    if told.layout == "ends" or (not told.layout and uneven and (model.num_layers + 2) % chunks == 0):
        if not told.layout:
            assumed.append("pp_layout is blank: embedding and output layer count as a layer each")
        return layers_per_chunk(model.num_layers, chunks, "less_ends")
    if uneven and not told.layout:
        raise Unclear(f"pp_layout is blank, and {model.num_layers} layers do not divide over {chunks} stages")
    return ()


def _numbers(text: str, chunks: int, num_layers: int) -> tuple[int, ...]:
    counts = tuple(int(part) for part in text.replace(",", " ").split())
    if len(counts) != chunks or sum(counts) != num_layers:
        have = f"it has {len(counts)} stages and {sum(counts)} layers"
        raise Unclear(f"pp_layout is {text!r}: {have}, not {chunks} and {num_layers}")
    return counts
