"""A checkpoint of one layout goes on in others, and in other recipes, with the same losses."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint_damage import copied
from checkpoint_runs import TOLERANCE, Ask, Ran, predicted_bytes, program_of, ran, spec_of, stepped
from trainledger.runtime.checkpoint.folders import name_of
from trainledger.runtime.checkpoint.measure import measured_bytes
from trainledger.runtime.checkpoint.parts import parts_of
from trainledger.runtime.launch.fork import run_forked
from trainledger.runtime.spec import RunSpec

SAVED_AT = 3


def resumed(saved: Path, tmp_path: Path, kind: str, plan: str, **fields: object) -> Ran:
    """The rest of the run in another layout."""
    folder = copied(saved, tmp_path / f"{kind} {plan} {fields}".replace(" ", "-"))
    found = ran(Ask(spec_of(kind, plan, **fields), folder, load=True))
    assert (found.begun, found.skipped) == (SAVED_AT, ())
    return found


LAYOUTS = {
    "llama": (
        "dp_shard4 zero_stage3",
        ("tp2 pp2", "dp_shard2 zero_stage1", "", "dp_shard2 zero_stage0", "dp_replicate2 dp_shard2 zero_stage2"),
    ),
    "qwen-tied": (
        "pp2 dp_shard2 zero_stage1",
        ("tp2 sp1", "dp_shard4 zero_stage3", "dp_shard2 tp2 zero_stage3", "cp2"),
    ),
    "mixtral": (
        "dp_shard4 ep2 zero_stage3",
        ("dp_shard4 ep4 zero_stage1", "pp2 dp_shard2 ep2 zero_stage2", "tp2", "", "dp_shard4 zero_stage3"),
    ),
}
"""Of a model: the layout that is saved, and those that go on."""


@pytest.mark.proof
@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_checkpoint_goes_on_in_every_layout(kind: str, tmp_path: Path) -> None:
    saving, others = LAYOUTS[kind]
    whole = ran(Ask(spec_of(kind, saving), tmp_path / "saved", saves=(SAVED_AT,)))
    assert whole.losses[-1] < 0.95 * whole.losses[0]
    for plan in (saving, *others):
        found = resumed(tmp_path / "saved", tmp_path, kind, plan)
        assert found.losses == pytest.approx(whole.losses[SAVED_AT:], rel=TOLERANCE), plan


BYTES: dict[str, tuple[str, dict[str, str]]] = {
    "": ("qwen-tied", {}),
    "dp_shard4 zero_stage3": ("qwen-tied", {}),
    "tp2 pp2": ("qwen-tied", {}),
    "pp2 dp_shard2 zero_stage0": ("qwen-tied", {"precision": "bf16"}),
    "dp_replicate2 dp_shard2 zero_stage1": ("qwen-tied", {}),
    "dp_shard4 ep2 zero_stage3": ("mixtral", {"optimizer": "sgd-momentum"}),
    "dp_shard2 zero_stage3": ("llama", {"optimizer": "adamw-8bit", "sizes": "hidden_size=64 intermediate_size=256"}),
    "tp2 sp1": ("latent", {"optimizer": "sgd"}),
}
"""A model and fields by layout."""


@pytest.mark.proof
@pytest.mark.parametrize("plan", BYTES)
def test_the_ledger_predicts_the_bytes_of_every_layout(plan: str, tmp_path: Path) -> None:
    """Replicas, both ends of a tied pipeline and whole tensors of a cut model are written once."""
    kind, fields = BYTES[plan]
    spec = spec_of(kind, plan, **fields)
    ran(Ask(spec, tmp_path / "saved", saves=(1,)), steps=1)
    assert measured_bytes(tmp_path / "saved" / name_of(1)).payload_bytes == predicted_bytes(spec)


RECIPES = {"bf16": 2e-2, "fp16": 2e-2, "fp8-tensorwise": 1e-1, "fp8-rowwise": 1e-1}
"""How far the losses of a recipe may be from those of fp32, which it went on from."""


@pytest.mark.proof
@pytest.mark.parametrize("precision", RECIPES)
def test_a_checkpoint_goes_on_in_another_recipe(precision: str, tmp_path: Path) -> None:
    """Weights and moments are in fp32 under every recipe, so a save and a load in between change nothing."""
    plan, other = "dp_shard2 zero_stage3", "dp_shard2 zero_stage1"
    whole = ran(Ask(spec_of(plan=plan), tmp_path / "saved", saves=(SAVED_AT,)))
    told = resumed(tmp_path / "saved", tmp_path, "llama", other, precision=precision)
    assert told.losses == pytest.approx(whole.losses[SAVED_AT:], rel=RECIPES[precision])
    again = tmp_path / "again"
    own = ran(Ask(spec_of(plan=plan, precision=precision), again, saves=(SAVED_AT,)))
    assert resumed(again, tmp_path, "llama", plan, precision=precision).losses == own.losses[SAVED_AT:]


CODED = ("adamw-8bit", "adamw-fp8")
RECODED = 1e-3
"""How far a loss may be from that of the run that was not stopped, where moments are in blocks of other elements."""

LARGE = "hidden_size=64 intermediate_size=256"
"""Sizes at which torchao codes the moments of some matrices."""


def coded(rank: int, spec: RunSpec) -> int:
    """How many tensors of this rank are codes after a step."""
    del rank
    program = program_of(spec)
    stepped(program, 0)
    return sum(part.coded is not None for part in parts_of(program))


@pytest.mark.proof
@pytest.mark.parametrize("optimizer", CODED)
def test_moments_that_are_coded_are_saved_as_they_are_decoded(optimizer: str, tmp_path: Path) -> None:
    """So an optimizer of another width goes on from them, and one of the same layout as if it had not stopped."""
    plan = "dp_shard2 zero_stage3"
    spec = spec_of(plan=plan, optimizer=optimizer, sizes=LARGE)
    assert min(run_forked(2, coded, spec, timeout_s=120)) > 0
    whole = ran(Ask(spec, tmp_path / "saved", saves=(SAVED_AT,)))
    for other, layout in ((optimizer, plan), (optimizer, ""), ("adamw", "tp2")):
        found = resumed(tmp_path / "saved", tmp_path, "llama", layout, optimizer=other, sizes=LARGE)
        off = max(abs(one / right - 1) for one, right in zip(found.losses, whole.losses[SAVED_AT:], strict=True))
        print(f"{optimizer} to {other} {layout or 'alone'}: losses differ by {off:.1e}")  # noqa: T201  # shown with -s
        assert off <= (0.0 if layout == plan else RECODED)
