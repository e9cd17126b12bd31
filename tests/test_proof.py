"""The proof's own machinery over runs that did not happen: what is kept, what is run again, what is a failure."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from fake_runs import Fake, doubled_call
from trainledger.errors import Refused
from trainledger.rules import RUNTIME
from trainledger.runtime.observe.observation import Observation
from trainledger.service import prove
from trainledger.service.prove_plan import planned

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module", autouse=True)
def scripts_on_the_path() -> Iterator[None]:
    sys.path.insert(0, str(ROOT / "scripts"))
    yield
    sys.path.remove(str(ROOT / "scripts"))


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


@dataclasses.dataclass
class Runs:
    """A proof of four small cells; `verdicts` are what they come to, one that is "kill" stops the process."""

    folder: Path
    verdicts: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    run: list[str] = dataclasses.field(default_factory=list[str])

    @property
    def cells(self) -> list[Any]:
        make = module("proofs.cells").Cell
        return [make(id=f"gpt2/dp{n}", kind="run", model="gpt2", flags={"dp": n}) for n in (2, 3, 4, 8)]

    def prover(self, cell: Any, code: str, progress: object) -> Any:  # noqa: ANN401 - of a script
        self.run.append(cell.id)
        verdict = self.verdicts.get(cell.id, "proven")
        if verdict == "kill":
            raise KeyboardInterrupt
        empty = module("proofs.prove").broken(cell, code, RuntimeError("moved/all_gather differs"))
        named = () if verdict == "proven" else empty.named
        return msgspec.structs.replace(empty, verdict=verdict, ranks=cell.flags["dp"], lines=9, equal=9, named=named)

    @property
    def results(self) -> Path:
        return self.folder / "proof.json"

    @property
    def recorded(self) -> Path:
        return self.folder / "data" / "proof.json"

    def __call__(self, *arguments: str) -> tuple[int, list[str]]:
        """(exit status, cells that were run)."""
        self.run.clear()
        status = module("proof").main(
            arguments, cells=self.cells, prover=self.prover, results=self.results, recorded=self.recorded
        )
        return status, list(self.run)

    @property
    def kept(self) -> dict[str, str]:
        return {cell["id"]: cell["verdict"] for cell in json.loads(self.results.read_text("utf-8"))["cells"]}


ALL = [f"gpt2/dp{n}" for n in (2, 3, 4, 8)]


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def test_a_proof_that_was_stopped_goes_on_and_loses_one_cell(runs: Runs) -> None:
    runs.verdicts["gpt2/dp4"] = "kill"
    assert runs() == (130, ALL[:3])
    assert runs.kept == dict.fromkeys(ALL[:2], "proven")
    runs.verdicts.clear()
    assert runs() == (0, ALL[2:])
    assert runs() == (0, [])
    assert runs("--again") == (0, ALL)


def test_only_what_did_not_pass_is_run_again(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.verdicts |= {"gpt2/dp3": "differs", "gpt2/dp8": "failed"}
    assert runs() == (1, ALL)
    said = capsys.readouterr().out
    assert "gpt2/dp3 did not pass: trainledger prove gpt2 --dp 3\n    RuntimeError: moved/all_gather differs" in said
    assert "gpt2/dp2 did not pass" not in said
    assert "2 of 4 cells passed" in said
    runs.verdicts.pop("gpt2/dp8")
    assert runs() == (1, ["gpt2/dp3", "gpt2/dp8"])
    assert runs.kept == {**dict.fromkeys(ALL, "proven"), "gpt2/dp3": "differs"}


def test_other_code_proves_nothing_of_this_one(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs() == (0, ALL)

    def other(torch: str) -> str:
        return f"of other code under {torch}"

    monkeypatch.setattr(module("proof"), "code_digest", other)
    assert runs() == (0, ALL)


def test_code_that_changes_under_a_proof_ends_it(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def changing(torch: str) -> str:
        return f"{torch}, after {len(runs.run) // 2}"

    monkeypatch.setattr(module("proof"), "code_digest", changing)
    assert runs() == (1, ALL[:2])
    assert "the code changed" in capsys.readouterr().err
    assert runs.kept == {ALL[0]: "proven"}


def test_the_digest_is_of_what_decides_and_of_the_release(tmp_path: Path) -> None:
    record = module("proofs.record")
    names = {path.relative_to(ROOT).as_posix() for path in record.deciding()}
    assert {"src/trainledger/runtime/program.py", "src/trainledger/profiles/pytorch/2.13.toml"} <= names
    assert {"src/trainledger/account/rank.py", "src/trainledger/data/models/llama-3-8b.json"} <= names
    assert not any(name.startswith(("src/trainledger/cli", "src/trainledger/report")) for name in names)
    assert all((ROOT / "src" / "trainledger" / folder).is_dir() for folder in record.APART if "measured" not in folder)
    some = [ROOT / "README.md"]
    assert record.code_digest("2.13.0", some) != record.code_digest("2.13.1", some) != record.code_digest("2.13.1", [])


def test_a_write_that_fails_leaves_the_file_as_it_was(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.verdicts["gpt2/dp3"] = "kill"
    runs()
    before = runs.results.read_bytes()

    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:10])
        raise OSError("no space left")

    runs.verdicts.clear()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="no space"):
            runs()
    assert runs.results.read_bytes() == before
    assert runs() == (0, ALL[1:])


def test_a_broken_file_is_named(runs: Runs) -> None:
    runs.results.write_text("{", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"proof\.json cannot be read"):
        runs()


def test_a_part_is_chosen_by_name(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs("--only", "dp8", "--only", "dp2") == (0, ["gpt2/dp2", "gpt2/dp8"])
    assert runs("--only", "dp9") == (2, [])
    assert runs("--list", "--only", "dp4") == (0, [])
    assert capsys.readouterr().out.splitlines()[-1].split() == ["gpt2/dp4", "gpt2", "--dp", "4"]


def test_a_record_is_of_a_whole_proof_of_a_commit(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    here = module("proofs.record").here

    changed = [True]

    def committed(*given: object) -> Any:  # noqa: ANN401 - of a script
        return msgspec.structs.replace(here(*given), changed=changed[0])

    monkeypatch.setattr(module("proof"), "here", committed)
    assert runs("--record", "--only", "dp2")[0] == 2
    assert runs("--record")[0] == 1
    changed[0] = False
    runs.verdicts["gpt2/dp2"] = "differs"
    assert runs("--record", "--again")[0] == 1
    assert not runs.recorded.exists()
    runs.verdicts.clear()
    assert runs("--record") == (0, ["gpt2/dp2"])
    record = module("proofs.record").load(runs.recorded)
    assert [cell.id for cell in record.cells] == ALL
    assert (record.seed, record.machine.cores > 0, len(record.commit)) == (0, True, 40)


@pytest.mark.parametrize("name", ["proofs.cells", "proofs.screen"])
def test_what_the_docstrings_show_holds(name: str) -> None:
    failed, tried = doctest.testmod(module(name))
    assert (failed, tried > 0) == (0, True)


def test_every_cell_is_one_of_a_kind_and_legal() -> None:
    cells = module("proofs.cells").every(0)
    assert len({cell.id for cell in cells}) == len(cells)
    assert len({(cell.model, cell.words, cell.fault) for cell in cells}) == len(cells)
    for cell in cells:
        planned(cell.request)


def test_a_seed_repeats_its_plans() -> None:
    drawn = module("proofs.cells").drawn
    first, again, other = ([(cell.model, cell.words) for cell in drawn(seed, 5)] for seed in (3, 3, 4))
    assert first == again != other


def test_gradients_of_every_cell_can_be_compared() -> None:
    """The small models of tests/parity.py can be cut as every plan says."""
    cells, prover, parity = module("proofs.cells"), module("proofs.prove"), module("parity")
    for cell in [*cells.every(0), *cells.drawn(1), *cells.drawn(2)]:
        narrow = any(word in cell.words for word in ("--precision", "-8bit", "--checkpoint"))
        assert (cell.parity != "") == (cell.kind == "run" and not narrow), cell.id
        if cell.parity:
            assert parity.task_of(prover.counterpart(cell), "sgd").spec.plan["dp_shard"] >= 1, cell.id


def test_a_plan_that_a_rule_refuses_is_not_drawn() -> None:
    cells = module("proofs.cells")
    cell = cells.Cell(id="", kind="run", model="mixtral-8x7b", flags={"ep": 2, "tp": 2, "dp": 2})
    with pytest.raises(Refused):
        planned(cell.request)
    assert not cells._legal(cell)


def cell_of(**given: Any) -> Any:  # noqa: ANN401 - of a script
    return module("proofs.cells").Cell(**{"id": "a/b", "kind": "run", "model": "llama-3-8b", **given})


def stubbed(monkeypatch: pytest.MonkeyPatch, error: float, asked: list[Any]) -> None:
    """tests/parity.py without training."""

    def check(cell: object) -> SimpleNamespace:
        asked.append(cell)
        return SimpleNamespace(error=error, where="lm_head.weight at step 1 on rank 0")

    def tuple_of(*given: object) -> tuple[object, ...]:
        return given

    stub = SimpleNamespace(Cell=tuple_of, check=check, TOLERANCE=1e-5)
    monkeypatch.setattr(module("proofs.prove"), "_parity", lambda: stub)


def test_a_cell_is_proven_by_its_lines_and_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    stubbed(monkeypatch, 3e-7, asked)
    monkeypatch.setattr(prove, "launch", Fake(alive=True))
    cell = cell_of(flags={"tp": 2, "recompute": "full", "optimizer": "adamw"}, parity="llama")
    found = module("proofs.prove").proven(cell, "code", None)
    assert (found.verdict, found.passed, found.gradient_error, found.named) == ("proven", True, 3e-7, ())
    assert (found.ranks, found.equal + found.within, found.unexplained_bytes) == (2, found.lines, 0)
    assert (found.within, found.saved_error, found.peak_error) == (4, 0.0, 0.0)
    assert found.lines > 100
    ((kind, plan, fields, layers),) = asked
    assert (kind, plan["tp"], plan["sp"], layers) == ("llama", 2, 1, 2)
    assert fields == {"recompute": "full", "optimizer": "adamw"}
    stubbed(monkeypatch, 2e-5, asked)
    found = module("proofs.prove").proven(cell, "code", None)
    assert (found.verdict, found.passed) == ("gradients", False)
    assert found.named == ("gradients differ by 2e-05: lm_head.weight at step 1 on rank 0",)


def test_a_cell_whose_lines_differ_names_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove, "launch", Fake(doubled_call, alive=True))
    found = module("proofs.prove").proven(cell_of(flags={"dp": 2, "zero": 3}, parity="llama"), "code", None)
    assert (found.verdict, found.passed, found.gradient_error) == ("differs", False, None)
    assert [name.partition(":calls")[0] for name in found.named] == ["moved/all_gather/fp32"]


def test_a_peak_beyond_its_tolerance_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    def higher(seen: Observation) -> Observation:
        more = (msgspec.structs.replace(line, amount=1.04 * line.amount) for line in seen.reported)
        return msgspec.structs.replace(seen, reported=tuple(more))

    monkeypatch.setattr(prove, "launch", Fake(higher, alive=True))
    found = module("proofs.prove").proven(cell_of(flags={"dp": 2, "zero": 3}, parity="llama"), "code", None)
    assert found.verdict == "differs"
    assert {name.partition(":")[0] for name in found.named} == {
        "held/peak/allocated",
        "held/activations/saved for backward",
    }


def test_a_cell_that_breaks_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def dead(*given: object) -> Sequence[Any]:
        raise RuntimeError("rank 1 died\ntraceback\nlast line")

    monkeypatch.setattr(prove, "launch", dead)
    found = module("proofs.prove").proven(cell_of(flags={"dp": 2}), "code", None)
    assert (found.verdict, found.passed) == ("failed", False)
    assert found.named == ("RuntimeError: rank 1 died", "traceback", "last line")


@pytest.mark.parametrize(
    ("said", "blamed", "verdict"),
    [
        ("differs", ["aten::zeros 1024: 4,096 B that no line claims"], "caught"),
        ("differs", ["aten::zeros 1024: 4,096 B that no line claims", "moved/send/fp32:calls@pp"], "missed"),
        ("differs", [], "missed"),
        ("proven", [], "missed"),
    ],
)
def test_a_fault_is_caught_where_it_alone_is_blamed(said: str, blamed: list[str], verdict: str) -> None:
    cell = cell_of(kind="fault", flags={}, fault="extra-buffer")
    assert module("proofs.prove")._verdict(cell, said, blamed, None, "")[0] == verdict


def test_the_page_has_every_cell_of_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells, record, support = module("proofs.cells"), module("proofs.record"), module("pages.support")
    broken = module("proofs.prove").broken
    every = cells.every(0)
    kept = [
        msgspec.structs.replace(broken(cell, "", RuntimeError("x")), ranks=2, lines=1000 + n, gradient_error=1e-7)
        for n, cell in enumerate(every)
    ]
    monkeypatch.setattr(support, "RECORDED", tmp_path / "proof.json")
    monkeypatch.setattr(support, "_refused", lambda: iter(()))
    monkeypatch.setattr(support, "_presets", str)
    assert "No proof is recorded" in support.render()
    record.store(msgspec.structs.replace(record.here("2.13.0", 0, "code"), cells=tuple(kept)), tmp_path / "proof.json")
    page = support.render()
    assert f"{len(every)} cells, {sum(one.lines for one in kept):,} lines" in page
    for one, cell in zip(kept, every, strict=True):
        if cell.kind == "dry" or "random" in cell.id:
            assert f"{one.lines:,} |" in page, cell.id
    layouts = page.split("## Models and layouts")[1].split("## Plans")[0]
    rows = [line for line in layouts.splitlines() if line.startswith("| `--")]
    counted = sum(int(figure.replace(",", "")) for row in rows for figure in _figures(row))
    assert counted == sum(one.lines for one in kept if one.kind == "run" and "random" not in one.id)


def _figures(row: str) -> Iterator[str]:
    """The counts of lines in the columns of models."""
    for column in row.split(" | ")[2:]:
        if column.strip(" |") != "-":
            yield column.split(", ")[0]


def test_the_page_shows_a_refusal_of_every_rule_that_can_be_met() -> None:
    page = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
    for rule in RUNTIME:
        # --recompute takes two words, and both are run
        assert rule.id == "runtime-recompute" or f"[{rule.id}]" in page
