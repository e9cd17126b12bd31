"""What the cards of this machine cannot do is refused before torchrun is started; without cards nothing is."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from checkpoint_runs import spec_of
from trainledger.errors import BadInput, Refused, TrainledgerError
from trainledger.runtime.launch import devices, torchrun
from trainledger.runtime.launch.devices import Device, check_devices, cuda_devices
from trainledger.runtime.observe.observation import Observation
from trainledger.service.prove_plan import planned
from trainledger.service.prove_request import Request

H100, A100 = Device("H100", (9, 0)), Device("A100", (8, 0))


def test_a_run_that_the_cards_cannot_take_is_refused() -> None:
    ring, fp8 = spec_of(plan="cp2"), spec_of(plan="dp_shard2", precision="fp8-rowwise")
    for spec, found, error, message in (
        (ring, [H100] * 2, Refused, r"\[cp-flash\] cp=2 runs on flash kernels, .* --precision bf16"),
        (fp8, [H100, A100], Refused, r"\[fp8-sm\] --precision fp8-rowwise needs .* 8\.9, and A100 has 8\.0; use bf16"),
        (fp8, [H100], BadInput, "2 ranks of this node need a CUDA device each, and 1 are visible here"),
    ):
        with pytest.raises(error, match=message):
            check_devices(spec, 2, found)
        check_devices(spec, 2, [])
    check_devices(spec_of(plan="cp2", precision="bf16"), 2, [H100] * 2)
    check_devices(fp8, 2, [H100, H100, A100])


def test_torchrun_is_not_started_for_such_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*given: object) -> None:
        raise AssertionError(given)

    monkeypatch.setattr(torchrun, "cuda_devices", lambda: (H100, H100))
    monkeypatch.setattr(torchrun, "_start", never)
    spec = spec_of(plan="cp2")
    with pytest.raises(Refused, match="cp-flash"):
        torchrun.run_job(torchrun.Job("prove", spec, Observation), 2, (), timeout_s=10)


def test_a_card_that_the_plan_names_binds_ranks_that_may_have_it() -> None:
    given = {"model": "llama-3-8b", "cp": 2, "gpu": "h100"}
    planned(Request(**given))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TrainledgerError, match=r"\[cp-flash\] cp=2 on H100-SXM5-80GB"):
        planned(Request(**given, cluster_args=""))  # pyright: ignore[reportArgumentType]
    planned(Request(**given, cluster_args="", precision="bf16"))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("cuda", "built"), [("cuda: Optional[str] = None", False), ("cuda = '12.9'", True)])
def test_a_driver_is_asked_only_where_torch_would_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: str, built: bool
) -> None:
    (tmp_path / "version.py").write_text(f"hip = '6.0'\n{cuda}\n")
    found: Callable[[str], ModuleSpec] = lambda name: ModuleSpec(name, None, origin=str(tmp_path / "__init__.py"))  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", found)
    asked: list[str] = []

    def library(name: str) -> None:
        asked.append(name)
        raise OSError(name)

    monkeypatch.setattr(devices.ctypes, "CDLL", library)
    assert cuda_devices("driver") == ()
    assert asked == ["driver"] * built
