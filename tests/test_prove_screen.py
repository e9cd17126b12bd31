"""What the text of `prove` looks like, over answers written by hand."""

from __future__ import annotations

from typing import Any

import pytest

from command_line import check_golden
from trainledger.report.plain import render
from trainledger.report.prove import document


def line(
    name: str, rank: int, predicted: int | None, measured: int | None, verdict: str = "", **more: str
) -> dict[str, Any]:
    word = verdict or ("equal" if predicted == measured else "differs")
    return {
        "id": name,
        "rank": rank,
        "predicted": predicted,
        "measured": measured,
        "unit": "B",
        "basis": "exact",
        "verdict": word,
        **more,
    }


def lines(rank: int) -> list[dict[str, Any]]:
    """Of a rank in a pipeline of two."""
    layer = f"held/weights/model.layers.{rank}.mlp.up_proj.weight"
    return [
        line(layer, rank, 57_344, 57_344, instant="rest"),
        line(layer, rank, 57_344, 57_344, instant="backward"),
        line(f"{layer}:gathered weights", rank, 114_688, 114_688, instant="backward"),
        line("held/padding/weights", rank, 64 * rank, 64 * rank, instant="rest"),
        line("moved/all_gather/fp32:calls@dp_shard", rank, 4, 4, unit="calls"),
        line("moved/all_gather/fp32:in@dp_shard", rank, 57_344, 57_344),
        line("moved/all_gather/fp32:out@dp_shard", rank, 114_688, 114_688),
        line("moved/all_reduce/fp32:calls@world", rank, 1, 1, unit="calls"),
        line("done/matmul", rank, 28_573_696, 28_573_696, unit="FLOP"),
        line("moved/all_to_all/bf16:in@ep", rank, 8192, 7936, "reported", basis="modelled"),
        line("held/activations/saved for backward", rank, 255_880, 255_876 + rank, "within", basis="modelled"),
        line("held/peak/allocated", rank, None, 1_240_460, "reported"),
    ]


CHANGES = [
    {"what": "hidden", "before": 8192, "after": 128},
    {"what": "layers", "before": 80, "after": 2},
    {"what": "parameters", "before": 70_553_706_496, "after": 340_352},
]


def answer(**changed: Any) -> dict[str, Any]:  # noqa: ANN401 - keys of an answer
    plan = {"tp": 1, "pp": 2, "vpp": 1, "cp": 1, "ep": 1, "dp": 2, "dp_replicate": 1, "mbs": 1, "num_microbatches": 4}
    words = {"zero_stage": 3, "precision": "fp32", "optimizer": "adamw", "seq": 32, "recompute": "none"}
    return {
        "model": "llama-3-70b",
        "profile": {"engine": "pytorch", "framework": "PyTorch", "framework_version": "2.13.0"},
        "plan": {**plan, **words},
        "world_size": 4,
        "ranks": [0, 1, 2, 3],
        "dry": False,
        "steps": 3,
        "shrunken": {"rule": "Everything becomes smaller. " * 8, "factor": 64.0, "changes": CHANGES},
        "assumed": {"seq": 4096, "mbs": 1},
        "notes": [{"rule": "pp-bubble", "severity": "warn", "message": "the pipeline idles"}],
        "list_equal": False,
        "lines": [{**one, "rank": rank} for rank in range(4) for one in lines(rank // 2)],
        "unexplained": {"bytes": 0, "calls": 0, "items": []},
        "losses": [6.2345, 5.5],
        "verdict": "proven",
        **changed,
    }


ITEM = {"rank": 0, "dtype": "fp32", "instants": ["rest", "backward"]}
STORAGE = {
    **ITEM,
    "what": "storage",
    "op": "aten::zeros",
    "phase": "step",
    "shape": [2, 512],
    "times": 2,
    "bytes": 8192,
}
CALL = {**ITEM, "what": "calls", "op": "broadcast/int64@dp", "phase": "", "shape": [], "times": 3, "bytes": 24}
WRONG = [
    line("held/optimizer/model.norm.weight:exp_avg", 0, 256, 128, instant="rest"),
    line("held/optimizer/model.norm.weight:exp_avg", 1, 256, 128, instant="rest"),
    line("held/gradients/model.norm.weight", 3, 256, None, "missing", instant="backward"),
    line("held/peak/allocated", 2, 1_200_000, 1_240_460, "beyond", basis="modelled"),
]
SCREENS = {
    "prove.txt": answer(),
    "prove_all.txt": answer(list_equal=True, shrunken=None, world_size=1, ranks=[0], lines=lines(0), notes=[]),
    "prove_dry.txt": answer(dry=True, world_size=128, ranks=[0, 64], losses=[], lines=[*lines(0)]),
    "prove_differs.txt": answer(
        lines=[*answer()["lines"], *WRONG],
        unexplained={
            "bytes": 16_384,
            "calls": 3,
            "items": [STORAGE, {**STORAGE, "rank": 1}, CALL, *({**CALL, "bytes": size} for size in range(30))],
        },
        verdict="differs",
    ),
}


@pytest.mark.parametrize("name", SCREENS)
def test_screens(name: str) -> None:
    check_golden(name, render(document(SCREENS[name])))


def test_nothing_equal_is_said_too() -> None:
    found = render(document(answer(lines=WRONG, verdict="differs")))
    assert "\nno line is equal\n" in found
    assert found.endswith("differs: 4 of 4 lines differ, and 0 items are unexplained\n")
