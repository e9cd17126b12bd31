"""The plans that a number of GPUs allows: every combination of degrees whose product is that number."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from trainledger.arrays import IntArray, divisors
from trainledger.errors import BadInput
from trainledger.plans.plan import TURNS, Plans, make_plans, num_microbatches
from trainledger.plans.setting import Setting

MICRO_BATCH_SIZES = (1, 2, 4, 8)
"""What is tried unless --mbs is given: larger ones only hold more."""
DEFAULT_SCALE_UP_DOMAIN = 8
"""Without a cluster: the GPUs of a DGX or HGX node."""
MOST_VIRTUAL = 16
"""Virtual stages per pipeline rank: each multiplies the messages between stages."""


def axis_values(setting: Setting, gpus: int, fixed: Mapping[str, int]) -> dict[str, list[int]]:
    """The values each searched column may take; a column in `fixed` takes that one.

    Tensor parallelism stays inside the scale-up domain. [narayanan: takeaway 1]
    """
    model, profile = setting.model, setting.profile
    domain = setting.cluster.scale_up_domain if setting.cluster is not None else DEFAULT_SCALE_UP_DOMAIN
    experts = max((b.moe.experts for b in model.blocks if b.moe is not None), default=1)
    axes = set(profile.axes) if not model.params_only else set()
    whole = divisors(gpus)
    values: dict[str, list[int]] = {
        "tp": [d for d in whole if d <= domain] if "tp" in axes else [1],
        "pp": [d for d in whole if d <= model.num_layers] if "pp" in axes else [1],
        "cp": [d for d in whole if setting.workload.seq % (2 * d) == 0 or d == 1] if "cp" in axes else [1],
        "ep": divisors(experts) if "ep" in axes else [1],
        "vpp": _virtual(setting) if "vpp" in axes else [1],
        "dp_replicate": whole if "dp_replicate" in axes else [1],
        "zero_stage": list(profile.zero_stages),
        "mbs": list(MICRO_BATCH_SIZES),
    }
    return {name: [fixed[name]] if name in fixed else choices for name, choices in values.items()}


def _virtual(setting: Setting) -> list[int]:
    if setting.scenario.schedule not in TURNS:
        return [1]
    return [d for d in divisors(setting.model.num_layers) if d <= MOST_VIRTUAL]


def grid(setting: Setting, gpus: int, fixed: Mapping[str, int]) -> Plans:
    """Every plan of `gpus` ranks; sp and etp follow the engine's default unless fixed.

    Raises BadInput where the fixed degrees leave no plan.
    """
    values = axis_values(setting, gpus, fixed)
    names = ("tp", "pp", "cp")
    mesh = _product([values[name] for name in names])
    mesh = mesh[:, gpus % mesh.prod(axis=0) == 0]
    if mesh.shape[1] == 0:
        raise _no_plan(gpus, fixed)
    columns = dict(zip(names, mesh, strict=True))
    rest = ("ep", "vpp", "dp_replicate", "zero_stage", "mbs")
    inner = _product([values[name] for name in rest])
    outer = np.repeat(np.arange(mesh.shape[1]), inner.shape[1])
    columns = {name: column[outer] for name, column in columns.items()}
    columns |= {name: np.tile(row, mesh.shape[1]) for name, row in zip(rest, inner, strict=True)}
    dp = gpus // (columns["tp"] * columns["pp"] * columns["cp"])
    keep = dp % columns["dp_replicate"] == 0
    keep &= (columns["vpp"] == 1) | (columns["pp"] > 1)
    keep &= (columns["dp_replicate"] == 1) | (columns["zero_stage"] > 0)
    if not keep.any():
        raise _no_plan(gpus, fixed)
    columns = {name: column[keep] for name, column in columns.items()}
    columns["dp_shard"] = dp[keep] // columns["dp_replicate"]
    return _complete(setting, columns, fixed)


def _no_plan(gpus: int, fixed: Mapping[str, int]) -> BadInput:
    chosen = ", ".join(f"{k}={v}" for k, v in fixed.items()) or "none"
    return BadInput(f"no degrees multiply to --gpus {gpus} with those given ({chosen}); change one of them")


def _complete(setting: Setting, columns: dict[str, IntArray], fixed: Mapping[str, int]) -> Plans:
    tp = columns["tp"]
    sp_possible = int("sp" in setting.profile.axes)
    columns["sp"] = np.full_like(tp, fixed["sp"]) if "sp" in fixed else (tp > 1) * sp_possible
    if "etp" in fixed:
        columns["etp"] = np.full_like(tp, fixed["etp"])
    else:
        columns["etp"] = setting.profile.default_etp(tp, columns["ep"])
    share = columns["mbs"] * columns["dp_replicate"] * columns["dp_shard"]
    columns["num_microbatches"] = num_microbatches(setting.workload.gbs, share)
    return make_plans(columns)


def _product(choices: list[list[int]]) -> IntArray:
    """[len(choices), n]: the Cartesian product as columns."""
    mesh = np.meshgrid(*[np.array(c, dtype=np.int64) for c in choices], indexing="ij")
    return np.stack([axis.ravel() for axis in mesh])
