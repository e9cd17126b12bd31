"""What `make gpu` measures, in its CPU form: counted, timed, put beside the ledger, refused where it is no figure."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch

from card_runs import Seen, seen
from trainledger.errors import BadInput
from trainledger.runtime.launch.fork import run_forked

SCRIPTS = Path(__file__).parent.parent / "scripts"
Loose = Any
"""Of a script, whose types the tests do not see."""
Made = dict[str, Any]
LLAMA = "saved/llama-3.2-1b"


@pytest.fixture(scope="module", autouse=True)
def scripts_on_the_path() -> Iterator[None]:
    sys.path.insert(0, str(SCRIPTS))
    yield
    sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def found() -> Seen:
    return run_forked(1, seen, timeout_s=55)[0]


@pytest.fixture(scope="module")
def records() -> ModuleType:
    return importlib.import_module("cards.record")


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    return importlib.import_module("gpu")


@pytest.fixture
def record(records: ModuleType) -> Loose:
    machine = records.Machine(
        device="cuda",
        card="Some Card",
        accelerator="",
        driver="1",
        power_limit="1 W",
        cuda="13.0",
        torch="2.13.0",
        torchao="0.18.0",
        python="3.11.7",
    )
    rows = (
        records.Row(id="saved/m/flash", amount=8, unit="B", predicted=8),
        records.Row(id="gemm/m/product", amount=2.0, unit="s", repeats=3, low=1.0, high=3.0),
    )
    return records.Record(
        command="python scripts/gpu.py",
        date="2026-11-30",
        machine=machine,
        commit="a",
        changed=False,
        seconds=1,
        rows=rows,
    )


@pytest.mark.parametrize(
    "row",
    [
        f"{LLAMA}/flash/eager/recompute none/storages",
        f"{LLAMA}/flash/eager/recompute full/storages",
        f"{LLAMA}/flash/compiled/recompute none/saved tensors",
        "saved/mixtral-8x7b/flash/eager/recompute none/storages",
    ],
)
def test_a_block_keeps_to_the_byte_what_the_ledger_says(found: Seen, row: str) -> None:
    assert found.rows[row]["amount"] == found.rows[row]["predicted"]


def test_attention_without_a_kernel_keeps_its_scores_and_has_no_account(found: Seen) -> None:
    math, flash = (found.rows[f"{LLAMA}/{kernel}/eager/recompute none/storages"] for kernel in ("math", "flash"))
    # at least one matrix of scores: 2 sequences, 4 heads, 64 x 64 in fp32
    assert math["amount"] - flash["amount"] > 2 * 4 * 64 * 64 * 4
    assert math["predicted"] is None
    assert math["note"]


def test_two_counters_agree_on_a_block_and_a_tensor_more_is_seen(found: Seen) -> None:
    assert found.counted[0] == found.counted[1]
    assert found.extra == 2 * 64 * 64 * 2  # planted: 2 sequences of 64 tokens, 64 wide, in bf16


def test_peaks_stand_beside_the_ledger_and_recomputation_lowers_both(found: Seen) -> None:
    none, full = (found.rows[f"peak/llama-3-8b/bf16/recompute {how}/allocated"] for how in ("none", "full"))
    assert full["amount"] < none["amount"]
    assert full["predicted"] < none["predicted"]
    assert none["predicted"] == pytest.approx(none["amount"], rel=0.02)


def test_steps_take_turns_and_rates_are_tokens_over_seconds(found: Seen) -> None:
    for recipe in ("bf16", "fp8-tensorwise"):
        seconds, tokens = (found.rows[f"step/llama-3-8b/{recipe}/{what}"] for what in ("seconds", "tokens"))
        assert seconds["repeats"] == 3
        assert seconds["low"] <= seconds["amount"] <= seconds["high"]
        assert tokens["amount"] == pytest.approx(2 * 64 / seconds["amount"])


def test_products_in_fp8_are_those_of_their_operands(found: Seen) -> None:
    assert set(found.errors) == {
        f"{recipe} {way}" for recipe in ("fp8-tensorwise", "fp8-rowwise") for way in ("product", "with_casts")
    }
    # e4m3 has 3 bits of mantissa; a scale upside down is off by far more
    assert all(0 < error < 0.1 for error in found.errors.values())


def test_products_have_the_shapes_of_an_8b_model() -> None:
    gemms, sizes = (importlib.import_module(f"cards.{name}") for name in ("gemms", "sizes"))
    _, model = gemms.find_config(gemms.Request(model=sizes.CUDA.gemm_model))
    made = {shape.layers: shape[1:] for shape in gemms.shapes(model, sizes.CUDA.gemm_rows)}
    assert made == {
        "q_proj+o_proj": (8192, 4096, 4096),
        "k_proj+v_proj": (8192, 4096, 1024),
        "gate_proj+up_proj": (8192, 4096, 14336),
        "down_proj": (8192, 14336, 4096),
    }


def test_a_share_is_of_the_cards_peak_in_the_dtype_of_the_product() -> None:
    gemms = importlib.import_module("cards.gemms")
    card = importlib.import_module("trainledger.facts.cluster").find_accelerator("NVIDIA H100 80GB HBM3")
    rate, _ = gemms._peak(card, "fp8-rowwise/product")
    assert rate == card.peak_flop_per_s("fp8") == pytest.approx(2 * card.peak_flop_per_s("bf16"), rel=0.01)
    shape = gemms.Shape("q", 1000, 1000, 1000)
    rows = list(gemms._rows("gemm/m/q", shape, [4e-6, 2e-6, 3e-6], (rate, "")))
    share = rows[-1]
    assert share.unit == "of peak"
    assert share.amount == pytest.approx(2e9 / 3e-6 / rate)
    assert (share.low, share.high) == (pytest.approx(2e9 / 4e-6 / rate), pytest.approx(2e9 / 2e-6 / rate))


def test_calls_are_timed_in_turns() -> None:
    here = importlib.import_module("cards.here")
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in "ab"}
    times = here.in_turns(calls, torch.device("cpu"), 3)
    assert [len(each) for each in times.values()] == [3, 3]
    assert "".join(order).endswith("ababab")


def test_what_fails_or_comes_too_late_is_listed_and_the_rest_is_measured(gpu: ModuleType, records: ModuleType) -> None:
    clock = iter(range(100))

    def works(_: int) -> Iterator[Any]:
        yield records.Row(id="saved/a", amount=1, unit="B")

    def breaks() -> Iterator[Any]:
        yield records.Row(id="saved/b", amount=1, unit="B")
        raise RuntimeError("no room")

    every = [gpu.Work("b", breaks), gpu.Work("a", lambda: works(1)), gpu.Work("late", lambda: works(2))]
    found = gpu.measure(every, 6, lambda: next(clock))
    assert [row.id for row in found.rows] == ["saved/b", "saved/a"]
    assert [one.id for one in found.lacking] == ["b", "late"]
    assert found.lacking[0].why == "RuntimeError: no room"


def test_all_sections_are_measured_and_what_is_compiled_comes_last(gpu: ModuleType, records: ModuleType) -> None:
    ids = [work.id for work in gpu.works(torch.device("cpu"), records.SECTIONS)]
    assert {one.partition("/")[0] for one in ids} == set(records.SECTIONS)
    assert len(ids) == len(set(ids))
    compiled = ["/compiled/" in one for one in ids]
    assert compiled == sorted(compiled)
    assert sum(compiled) == 8


def test_a_record_of_this_machine_is_written_and_read_back(
    gpu: ModuleType,
    records: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = records.Row(id="saved/a", amount=1, unit="B", predicted=2)
    work = gpu.Work("a", lambda: [row])

    def works(*_: object) -> list[Loose]:
        return [work]

    monkeypatch.setattr(gpu, "works", works)
    out = tmp_path / "record.json"
    assert gpu.main(["--device", "cpu", "--only", "saved", "--out", str(out)]) == 0
    made = records.read(out)
    assert made.rows == (row,)
    assert made.machine.torch == torch.__version__
    assert made.command == f"python scripts/gpu.py --device cpu --only saved --out {out}"
    assert made.commit
    assert "ledger 2, +100.00%" in capsys.readouterr().out


def test_a_record_of_a_card_has_a_name_of_its_own(records: ModuleType, record: Loose, tmp_path: Path) -> None:
    paths = [records.keep(record, tmp_path) for _ in range(2)]
    assert [path.name for path in paths] == ["Some-Card-2026-11-30.json", "Some-Card-2026-11-30-2.json"]
    assert records.read(paths[1]) == record


def test_what_a_cpu_did_is_not_kept_as_a_figure_of_a_card(records: ModuleType, record: Loose, tmp_path: Path) -> None:
    machine = msgspec.structs.replace(record.machine, device="cpu")
    with pytest.raises(BadInput, match="measured on a card, and this on cpu"):
        records.keep(msgspec.structs.replace(record, machine=machine), tmp_path)
    assert not list(tmp_path.iterdir())


def _of_first(**changes: object) -> Callable[[Made], None]:
    def change(made: Made) -> None:
        made["rows"][0].update(changes)

    return change


def _of_all(**changes: object) -> Callable[[Made], None]:
    def change(made: Made) -> None:
        made.update(changes)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_of_first(amount=0), "saved/m/flash has 0: a measured figure is finite and above 0"),
        (_of_first(predicted=-1), "has -1"),
        (_of_first(unit="s"), "saved/m/flash is in s: rows of its section are in B"),
        (_of_first(unit="GB"), "Invalid enum value 'GB'"),
        (_of_first(id="gemm/m/product", unit="s"), "gemm/m/product stands twice"),
        (_of_first(id="other/m"), "other/m begins with none of gemm, peak, step, saved"),
        (_of_first(low=9, high=10), "is 8 and not within 9 and 10"),
        (_of_all(rows=[]), "has no row"),
        (_of_all(date="30 November"), "date is '30 November'"),
        (_of_all(more=1), "unknown field `more`"),
        (_of_all(machine={"device": "cuda"}), "missing required field `card`"),
    ],
)
def test_what_is_no_record_is_refused(
    records: ModuleType, record: Loose, tmp_path: Path, change: Callable[[Made], None], message: str
) -> None:
    made = msgspec.to_builtins(record)
    change(made)
    path = tmp_path / "made.json"
    path.write_text(json.dumps(made), encoding="utf-8")
    with pytest.raises(BadInput, match=message):
        records.read(path)


def test_every_record_that_is_kept_can_be_read(records: ModuleType) -> None:
    kept = sorted(records.FOLDER.glob("*"))
    assert all(records.read(path).machine.device == "cuda" for path in kept)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cpu", "--record"], "--record keeps a whole run on a card"),
        (["--only", "gemm", "--record"], "--record keeps a whole run on a card"),
        ([], "finds no CUDA device"),
    ],
)
def test_what_cannot_be_measured_here_is_refused(
    gpu: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "--record" in arguments)
    assert gpu.main(arguments) == 2
    assert message in capsys.readouterr().err
