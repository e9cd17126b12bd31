"""Rules about how blocks run, how a loss is computed and what is recomputed: what the engine has words for."""

from __future__ import annotations

from trainledger.facts.model import routed
from trainledger.plans.plan import Plans
from trainledger.plans.setting import EVERY, MOST_DIGITS, UNIFORM, Setting
from trainledger.profiles import engine_names, load_profile, releases
from trainledger.rules.rule import Mask, Rule

WORDS = ("none", "full", "selective")
"""What --recompute may say; of the last each engine says itself whether it has it, and of every N-th layer."""


HALF = "blocks of attention or a network alone"
"""What only stacks of state-space models are made of: an engine that lacks the one has no code for the other."""


def _lacking(setting: Setting) -> list[str]:
    """What some block of the model has and the engine lacks."""
    blocks, lacks = setting.model.blocks, setting.profile.lacks
    has = {
        "experts": any(block.moe is not None for block in blocks),
        "latent attention": any(block.attention is not None and block.attention.kind == "mla" for block in blocks),
        "state-space mixers": any(block.ssm is not None for block in blocks),
    }
    found = [part for part in lacks if has[part]]
    found += setting.model.unaccounted if "state-space mixers" in lacks and not found else ()
    half = any(block.attention is None or (block.mlp is None and block.moe is None) for block in blocks)
    alone = half and not setting.model.states_alone and "state-space mixers" in lacks and not has["state-space mixers"]
    return [*found, HALF] if alone else found


def _model_sentence(setting: Setting, row: dict[str, int]) -> str:
    return (
        f"{setting.model.name} has {' and '.join(_lacking(setting))}, which {setting.profile.framework} has no code "
        "for at this release; choose another model, or another --engine"
    )


def _loss(setting: Setting, plans: Plans) -> bool:
    chosen, memory = setting.scenario.loss, setting.profile.memory
    return bool(chosen) and chosen not in (memory.loss, *memory.losses)


def _loss_sentence(setting: Setting, row: dict[str, int]) -> str:
    memory = setting.profile.memory
    have = ", ".join(word for word in (memory.loss, *memory.losses) if word)
    hint = f"use one of {have}, or leave it out" if have else "leave it out"
    return f"--loss {setting.scenario.loss} is not how {setting.profile.framework} computes a loss; {hint}"


def _chunks(setting: Setting, plans: Plans) -> bool:
    scenario = setting.scenario
    return scenario.loss_chunks < 0 or (scenario.loss_chunks > 0 and scenario.loss != "chunked")


def _chunks_sentence(setting: Setting, row: dict[str, int]) -> str:
    chunks = setting.scenario.loss_chunks
    if chunks < 0:
        return f"--loss-chunks is {chunks}: a loss has at least 1 chunk; write a larger number, or leave it out"
    return f"--loss-chunks {chunks} says how a chunked loss is cut; add --loss chunked, or leave it out"


def _compile(setting: Setting, plans: Plans) -> bool:
    return bool(setting.scenario.compile) and not setting.profile.memory.compile


def _compile_sentence(setting: Setting, row: dict[str, int]) -> str:
    have = ", ".join(name for name in engine_names() if load_profile(name).memory.compile)
    return (
        f"--compile {setting.scenario.compile}: {setting.profile.name} is accounted for in one way of running its "
        f"blocks; leave it out, or use --engine with one of {have}"
    )


def _recompute(setting: Setting, plans: Plans) -> bool:
    word = setting.scenario.recompute
    if word in WORDS:
        return False
    memory = setting.profile.memory
    for prefix, possible in ((EVERY, memory.recompute_every), (UNIFORM, memory.recompute_uniform)):
        count = word.removeprefix(prefix) if word.startswith(prefix) else ""
        if count.isascii() and count.isdigit() and len(count) <= MOST_DIGITS and int(count) > 1:
            return not possible
    return True


def _recompute_sentence(setting: Setting, row: dict[str, int]) -> str:
    have = ", ".join(
        f"--engine {name} --framework-version {profile.framework_version}"
        for name in engine_names()
        if (profile := next((one for one in releases(name) if one.memory.recompute_every), None)) is not None
    )
    memory = setting.profile.memory
    words = [word for word in WORDS if word != "selective" or memory.recomputes]
    every = "every-2 and so on" + ("" if memory.recompute_every else f" with {have}")
    words += ["uniform-2 and so on"] if memory.recompute_uniform else []
    return (
        f"--recompute {setting.scenario.recompute} is not something {setting.profile.name} does; use "
        f"{', '.join(words)}, or {every}"
    )


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


def _regions(setting: Setting, plans: Plans) -> Mask:
    """Regions of several layers that are not all of one kind, or longer than a virtual stage."""
    size, kinds = setting.recomputed_region, len(setting.model.blocks) + int(setting.workload.mtp)
    longer = size > setting.model.num_layers // (plans.pp * plans.vpp)
    return (size > 1) & ((kinds > 1) | longer)


def _regions_sentence(setting: Setting, row: dict[str, int]) -> str:
    size, stages = setting.recomputed_region, row["pp"] * row["vpp"]
    if len(setting.model.blocks) + int(setting.workload.mtp) > 1:
        return (
            f"--recompute {setting.scenario.recompute}: {setting.model.name} has layers of several kinds, and "
            "regions of them are not accounted for; use --recompute full"
        )
    return (
        f"--recompute {setting.scenario.recompute}: a region of {size} layers is more than the "
        f"{setting.model.num_layers // stages} of a virtual stage; write a smaller number, or use --recompute full"
    )


def _offloads(setting: Setting) -> bool:
    return "activations" in setting.scenario.offload


def _offload_pipeline(setting: Setting, plans: Plans) -> Mask:
    return (plans.pp > 1) & _offloads(setting)


def _offload_recompute(setting: Setting, plans: Plans) -> bool:
    return _offloads(setting) and setting.scenario.recompute != "none"


ALLOCATORS = ("default", "expandable")


def _allocator(setting: Setting, plans: Plans) -> bool:
    chosen = setting.scenario.allocator
    return bool(chosen) and (chosen not in ALLOCATORS or (chosen == "expandable" and not setting.maps_memory))


def _allocator_sentence(setting: Setting, row: dict[str, int]) -> str:
    chosen = setting.scenario.allocator
    if chosen not in ALLOCATORS:
        return f"--allocator {chosen} is not one of {', '.join(ALLOCATORS)}; write one of those, or leave it out"
    return "--allocator expandable: ROCm's caching allocator has no expandable segments; write default, or leave it out"


def _dropout(setting: Setting, plans: Plans) -> bool:
    return bool(setting.scenario.dropout) and not setting.profile.memory.dropout


def _dropout_sentence(setting: Setting, row: dict[str, int]) -> str:
    have = ", ".join(name for name in engine_names() if load_profile(name).memory.dropout)
    return (
        f"--dropout {setting.scenario.dropout}: the account of {setting.profile.name} has no dropout; leave it out, or "
        f"use --engine with one of {have}"
    )


ROUTINGS = ("balanced", "worst")


def _routing(setting: Setting, plans: Plans) -> bool:
    chosen = setting.scenario.routing
    return bool(chosen) and (chosen not in ROUTINGS or not routed(setting.model))


def _routing_sentence(setting: Setting, row: dict[str, int]) -> str:
    chosen = setting.scenario.routing
    if chosen not in ROUTINGS:
        return f"--routing {chosen} is not one of {', '.join(ROUTINGS)}; write one of those, or leave it out"
    return f"--routing {chosen}: {setting.model.name} has no routed experts; leave it out"


RULES: tuple[Rule, ...] = (
    Rule(
        id="recompute-regions",
        severity="refuse",
        scope="engine",
        source="Megatron core/transformer/transformer_config.py at d98e8a64dd, recompute_num_layers",
        broken=_regions,
        sentence=_regions_sentence,
    ),
    Rule(
        id="offload-activations-pp",
        severity="refuse",
        scope="engine",
        source="Megatron core/transformer/transformer_config.py at d98e8a64dd, cpu_offloading",
        broken=_offload_pipeline,
        sentence=(
            "--offload activations with pp={pp}: what several micro-batches keep is not offloaded; set pp to 1, or "
            "leave activations out"
        ),
    ),
    Rule(
        id="mg-offload-recompute",
        severity="refuse",
        scope="engine",
        source="Megatron core/transformer/transformer_config.py at d98e8a64dd, cpu_offloading",
        broken=_offload_recompute,
        sentence=lambda setting, row: (
            f"--offload activations with --recompute {setting.scenario.recompute}: Megatron offloads nothing where "
            "anything is recomputed; use --recompute none, or leave activations out"
        ),
        engines=("megatron",),
    ),
    Rule(
        id="engine-dropout",
        severity="refuse",
        scope="engine",
        source="Megatron megatron/training/arguments.py at d98e8a64dd, attention_dropout and hidden_dropout",
        broken=_dropout,
        sentence=_dropout_sentence,
    ),
    Rule(
        id="routing",
        severity="refuse",
        scope="model",
        source="what a router decides",
        broken=_routing,
        sentence=_routing_sentence,
    ),
    Rule(
        id="allocator",
        severity="refuse",
        scope="engine",
        source="PyTorch's CUDACachingAllocator.cpp, read at 2.9",
        broken=_allocator,
        sentence=_allocator_sentence,
    ),
    Rule(
        id="engine-model",
        severity="refuse",
        scope="engine",
        source="the engine's profile",
        broken=lambda setting, plans: bool(_lacking(setting)),
        sentence=_model_sentence,
    ),
    Rule(
        id="engine-compile",
        severity="refuse",
        scope="engine",
        source="the engine's profile",
        broken=_compile,
        sentence=_compile_sentence,
    ),
    Rule(
        id="loss-chunks",
        severity="refuse",
        scope="engine",
        source="torchtitan components/loss.py at b5bcd76c66, ChunkedLossWrapper",
        broken=_chunks,
        sentence=_chunks_sentence,
    ),
    Rule(
        id="engine-recompute",
        severity="refuse",
        scope="engine",
        source="the engine's profile",
        broken=_recompute,
        sentence=_recompute_sentence,
    ),
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
