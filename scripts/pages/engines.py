"""The page of engine profiles: what each keeps and sends, printed from the profiles themselves."""

from __future__ import annotations

from trainledger.inventory.buffers import BUCKET
from trainledger.profiles import PROFILES, engine_names, read_profile
from trainledger.profiles.profile import OutsideRow, Profile, StateRow

INTRO = """# What each engine keeps

A row is one kind of buffer: under which `zero_stage` it exists, from which it is divided over the ranks that share it
(dense tensors: data x context parallel ranks; routed experts: their own group), how it is cut and padded, and when it
is alive. Where an engine differs from the ZeRO paper, the engine's own source wins.

Cuts: `none` every tensor whole; `even` one exact share; `dim0` rows of each tensor, every shard padded to the first;
`tensor` each tensor flattened and padded; `flat` one buffer padded to twice the ranks; `bucket` Megatron's buffer,
each tensor aligned to 64 elements and the end to lcm(ranks, 128); `unit` rows padded to the ranks, unit by unit;
`flat_unit` one tensor for each unit, in which every other begins at 16 bytes, padded to the ranks.
"""


def render() -> str:
    """The whole page."""
    profiles = [read_profile(engine, name) for engine in engine_names() for name in PROFILES[engine]]
    return "\n".join([INTRO, *map(_section, profiles)])


def _section(profile: Profile) -> str:
    parts = [
        f"## {profile.name} ({profile.framework} {profile.framework_version})",
        "",
        f"Source: {profile.source}.",
        "",
        f"- zero stages: {', '.join(map(str, profile.zero_stages))}; axes: {', '.join(profile.axes) or 'data only'}",
        f"- optimizers: {', '.join(profile.optimizers)}",
        f"- pipeline split: {profile.split}; vocabulary padded to {profile.vocab_multiple or 1} x tp",
        *[f"- {note.text}" for note in profile.notes],
        "",
        "| recipe | weights | gradients | master | gathered | reduced |",
        "|---|---|---|---|---|---|",
    ]
    for name, recipe in profile.precision.items():
        cells = (name, recipe.weight, recipe.grad, recipe.master or "none", recipe.gathered, recipe.reduce)
        parts.append("| " + " | ".join(cells) + " |")
    parts += ["", "| state | buffer | dtype | zero | divided from | cut | alive | only if | basis |", "|---" * 9 + "|"]
    parts += [_row(row) for row in profile.state]
    if profile.outside:
        parts += ["", "| outside the step | when | memory | of a | zero | of | basis |", "|---" * 7 + "|"]
        parts += [_outside(row) for row in profile.outside]
    return "\n".join(parts) + "\n"


def _row(row: StateRow) -> str:
    divided = "never" if row.sharded_from > 3 else str(row.sharded_from)
    later = " (accumulating: loss)" if row.accumulates else ""
    alive = "always" if len(row.alive) == 4 else ", ".join(row.alive) + later
    cells = (
        row.category,
        row.what,
        row.dtype,
        ", ".join(map(str, row.zero)),
        divided,
        row.cut,
        alive,
        _conditions(row) or "-",
        row.basis,
    )
    return "| " + " | ".join(cells) + " |"


def _outside(row: OutsideRow) -> str:
    whole = "of the whole model" if row.whole else "of a rank"
    every = ", on every rank of a node" if row.every else ""
    held = " + ".join(f"{part.what} in {part.dtype}, cut {part.cut}" for part in row.parts)
    zero = ", ".join(map(str, row.zero))
    cells = (row.what, row.when, row.place, row.per, zero, f"{held}, {whole}{every}", row.basis)
    return "| " + " | ".join(cells) + " |"


def _conditions(row: StateRow) -> str:
    said = [
        f"recipe {', '.join(row.precision)}" if row.precision else "",
        f"gradients {', '.join(row.grad)}" if row.grad else "",
        f"not {', '.join(row.not_optimizer)}" if row.not_optimizer else "",
        f"pp {row.pp}" if row.pp else "",
        "several micro-batches" if row.only_accumulating else "",
        f"wrapped: {row.wrapped}" if row.wrapped else "",
        f"{row.offload} offloaded" if row.offload else "",
        f"{row.not_offload} not offloaded" if row.not_offload else "",
        "" if row.non_tn is None else f"FP8 GEMMs {'in every layout' if row.non_tn else 'in one layout'}",
        "in host memory" if row.place == "host" else "",
        "page-locked" if row.pinned else "",
        "made before the first step" if row.eager else "",
        "at most a bucket" if row.cap == BUCKET else f"at most {row.cap:,} elements" if row.cap else "",
        row.select.replace("_", " ") if row.select not in ("trainable", "all") else "",
    ]
    return "; ".join(part for part in said if part)
