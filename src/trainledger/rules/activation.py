"""Rules about how a loss is computed and what is recomputed: what the engine has words for."""

from __future__ import annotations

from trainledger.plans.plan import Plans
from trainledger.plans.setting import Setting
from trainledger.profiles import engine_names, load_profile
from trainledger.rules.rule import Rule


def _loss(setting: Setting, plans: Plans) -> bool:
    chosen, memory = setting.scenario.loss, setting.profile.memory
    return bool(chosen) and chosen not in (memory.loss, *memory.losses)


def _loss_sentence(setting: Setting, row: dict[str, int]) -> str:
    memory = setting.profile.memory
    have = ", ".join(word for word in (memory.loss, *memory.losses) if word)
    hint = f"use one of {have}, or leave it out" if have else "leave it out"
    return f"--loss {setting.scenario.loss} is not how {setting.profile.framework} computes a loss; {hint}"


def _selective(setting: Setting, plans: Plans) -> bool:
    return setting.scenario.recompute == "selective" and not setting.profile.memory.recomputes


def _selective_sentence(setting: Setting, row: dict[str, int]) -> str:
    have = ", ".join(name for name in engine_names() if load_profile(name).memory.recomputes)
    return (
        f"--recompute selective is not accounted for in {setting.profile.name}; use none or full, "
        f"or --engine with one of {have}"
    )


def _parts(setting: Setting, plans: Plans) -> bool:
    scenario = setting.scenario
    unknown = set(scenario.recompute_parts) - set(setting.profile.memory.recomputes)
    return bool(scenario.recompute_parts) and (scenario.recompute != "selective" or bool(unknown))


def _parts_sentence(setting: Setting, row: dict[str, int]) -> str:
    scenario = setting.scenario
    given = ",".join(scenario.recompute_parts)
    if scenario.recompute != "selective":
        return (
            f"--recompute-parts {given} with --recompute {scenario.recompute}: parts are chosen by selective "
            "recomputation; use --recompute selective, or leave the parts out"
        )
    have = ", ".join(setting.profile.memory.recomputes)
    return f"--recompute-parts {given}: {setting.profile.name} can recompute {have or 'no part by itself'}; name those"


def _layers(setting: Setting, plans: Plans) -> bool:
    scenario = setting.scenario
    chosen = scenario.recompute_layers
    possible = scenario.recompute == "full" and setting.profile.memory.recompute_layers
    return chosen < 0 or (chosen > 0 and not possible)


def _layers_sentence(setting: Setting, row: dict[str, int]) -> str:
    scenario = setting.scenario
    chosen = scenario.recompute_layers
    if chosen < 0:
        return f"--recompute-layers is {chosen}: it counts layers from the first; write 0 for all of them, or more"
    if scenario.recompute != "full":
        return (
            f"--recompute-layers {chosen} with --recompute {scenario.recompute}: it says how many layers full "
            "recomputation takes; use --recompute full, or leave it out"
        )
    have = ", ".join(name for name in engine_names() if load_profile(name).memory.recompute_layers)
    return (
        f"--recompute-layers {chosen}: {setting.profile.name} recomputes all layers or none; leave it out, "
        f"or use --engine with one of {have}"
    )


RULES: tuple[Rule, ...] = (
    Rule(
        id="engine-loss",
        severity="refuse",
        scope="engine",
        source="the engine's profile",
        broken=_loss,
        sentence=_loss_sentence,
    ),
    Rule(
        id="engine-selective",
        severity="refuse",
        scope="engine",
        source="the engine's profile",
        broken=_selective,
        sentence=_selective_sentence,
    ),
    Rule(
        id="recompute-parts",
        severity="refuse",
        scope="engine",
        source="the engine's profile; Megatron core/transformer/transformer_config.py at d98e8a64dd, recompute_modules",
        broken=_parts,
        sentence=_parts_sentence,
    ),
    Rule(
        id="recompute-layers",
        severity="refuse",
        scope="engine",
        source="Megatron core/recompute.py at d98e8a64dd, method block",
        broken=_layers,
        sentence=_layers_sentence,
    ),
)
