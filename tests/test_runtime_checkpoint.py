"""Checkpoints: what is saved loads in any layout, and what is not as it was written is passed over by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch

from checkpoint_damage import DAMAGES, Judged, copied, flip, full_disk, judged
from checkpoint_runs import STEPS, TOLERANCE, Ask, Ran, predicted_bytes, program_of, ran, spec_of, stepped
from command_line import answer, run
from trainledger.errors import BadInput
from trainledger.runtime.checkpoint.checkpoints import Checkpoints
from trainledger.runtime.checkpoint.export import export
from trainledger.runtime.checkpoint.folders import clear, lock, name_of, partial_of, published
from trainledger.runtime.checkpoint.manifest import STATE, Damaged, read_manifest, verify
from trainledger.runtime.checkpoint.measure import measured_bytes
from trainledger.runtime.launch.fork import RankFailed, run_forked
from trainledger.runtime.model import build_decoder
from trainledger.runtime.model.weights import load_safetensors

SAVES = (2, 4)
NEWEST, OLDER = (name_of(step) for step in (4, 2))


class Kept(NamedTuple):
    """A folder with checkpoints of steps 2 and 4, and the run that saved them and went on."""

    folder: Path
    run: Ran


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    folder = tmp_path_factory.mktemp("checkpoints")
    return Kept(folder, ran(Ask(spec_of(), folder, saves=SAVES)))


def test_a_run_goes_on_where_it_was_saved_in_another_layout(kept: Kept, tmp_path: Path) -> None:
    """ZeRO-3 on two ranks, then two tensor-parallel ranks."""
    falls = kept.run.losses
    assert falls[-1] < 0.95 * falls[0]
    resumed = ran(Ask(spec_of(plan="tp2"), copied(kept.folder, tmp_path / "here"), load=True))
    assert (resumed.begun, resumed.state, resumed.skipped) == (4, {"at": 4}, ())
    assert resumed.losses == pytest.approx(falls[4:], rel=TOLERANCE)


OTHERS = {
    "another width": (
        spec_of(sizes="intermediate_size=64"),
        "mlp.gate_proj.weight is [48, 32], and not of this llama-3-8b: [64, 32]",
    ),
    "another base of positions": (
        spec_of(sizes="rope_theta=1234"),
        "that is not this llama-3-8b: rope_theta is None there and 1234 here",
    ),
    "another family": (spec_of("qwen"), "which has no model.layers.0.self_attn.q_proj.bias"),
    "another optimizer": (spec_of(optimizer="sgd-momentum"), "adamw keeps exp_avg, exp_avg_sq, step of a parameter"),
}
"""Runs that are not those that were saved, and what is said of that."""


@pytest.fixture(scope="module")
def judgements(kept: Kept, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Judged]:
    """What a load in a single process makes of every damage of the newest checkpoint, and of other runs."""
    root = tmp_path_factory.mktemp("judged")
    alone, asks = spec_of(plan=""), dict[str, Ask]()
    for index, (name, (damage, _, _)) in enumerate(DAMAGES.items()):
        folder = copied(kept.folder, root / f"{index}")
        damage(folder / NEWEST)
        asks[name] = Ask(alone, folder)
    for name, (spec, _) in OTHERS.items():
        row = dict(alone.plan)
        asks[name] = Ask(msgspec.structs.replace(spec, plan=row), copied(kept.folder, root / name.replace(" ", "-")))
    ruined = copied(kept.folder, root / "ruined")
    for name in (NEWEST, OLDER):
        flip(ruined / name / "__1_0.distcp")
    asks["all are damaged"] = Ask(alone, ruined)
    asks["nothing is there"] = Ask(alone, root / "empty")
    (found,) = run_forked(1, judged, list(asks.values()))
    return dict(zip(asks, found, strict=True))


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_by_name(name: str, judgements: Mapping[str, Judged]) -> None:
    (_, file, said), found = DAMAGES[name], judgements[name]
    assert found.begun == SAVES[0]
    ((path, why),) = found.skipped
    assert path.name == NEWEST
    assert f"{path}/{file}" in why
    assert said in why
    assert not (path / "executed").exists()


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_another_run_is_refused(name: str, judgements: Mapping[str, Judged]) -> None:
    found = judgements[name]
    assert found.begun is None
    assert OTHERS[name][1] in found.refused
    assert f"{NEWEST}/manifest.json" in found.refused


def test_a_folder_in_which_all_are_damaged_is_no_new_start(judgements: Mapping[str, Judged]) -> None:
    assert judgements["nothing is there"] == Judged()
    refused = judgements["all are damaged"].refused
    assert "no checkpoint of" in refused
    assert refused.count("__1_0.distcp is not as it was written") == 1
    assert f"{NEWEST}/__1_0.distcp" in refused
    assert f"; the same holds of {OLDER};" in refused


def test_verify_reads_every_file(kept: Kept, tmp_path: Path) -> None:
    folder = copied(kept.folder, tmp_path / "here") / NEWEST
    manifest = verify(folder)
    assert (manifest.step, manifest.layout["dp_shard"]) == (4, 2)
    assert {*manifest.files, "manifest.json"} == {path.name for path in folder.iterdir()}
    flip(folder / STATE)
    with pytest.raises(Damaged, match=r"state\.json is not as it was written"):
        verify(folder)


def test_an_export_is_what_the_hub_holds(kept: Kept, tmp_path: Path) -> None:
    """In several files or one; the loss of a decoder that reads it is that of the step after the save."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert [path.name for path in export(kept.folder, whole)] == ["config.json", "model.safetensors"]
    export(kept.folder / NEWEST, cut, file_bytes=20_000)
    assert len(list(cut.glob("model-*-of-*.safetensors"))) > 1
    spec = spec_of()
    config = json.loads((cut / "config.json").read_text())
    assert config == {**spec.config, "torch_dtype": "float32"}
    decoders = [build_decoder(spec.model, config) for _ in range(2)]
    for decoder, path in zip(decoders, (whole, cut), strict=True):
        load_safetensors(decoder, path)
    tokens, labels = next(iter(_batches()))
    with torch.no_grad():
        losses = [_loss(decoder(tokens), labels) for decoder in decoders]
    assert losses == pytest.approx([kept.run.losses[4]] * 2, rel=TOLERANCE)
    with pytest.raises(BadInput, match="exists"):
        export(kept.folder, whole)


def _batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    from trainledger.runtime.batch import global_batch

    return [global_batch(spec_of(), 0)]


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def test_the_command_line_verifies_and_exports(kept: Kept, tmp_path: Path) -> None:
    """Of a run folder, of its checkpoints, of one; a damaged one has exit code 1, and nothing is written from it."""
    folder = copied(kept.folder, tmp_path / "run" / "checkpoints")
    for path in (tmp_path / "run", folder, folder / NEWEST):
        found = answer("checkpoint", "verify", str(path))["checkpoints"]
        assert [(one["step"], one["why"]) for one in found] == [(4, ""), (2, "")][: 1 if path.name == NEWEST else 2]
    written = answer("checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "bfloat16")
    assert [Path(file).name for file in written["files"]] == ["config.json", "model.safetensors"]
    (folder / NEWEST).rename(folder / "step-00000009")
    misnamed = run("checkpoint", "verify", str(folder))
    assert misnamed.code == 1
    assert (
        "step-00000009 is the checkpoint of step 4, and no run goes on from it; name it step-00000004" in misnamed.out
    )
    (folder / "step-00000009").rename(folder / NEWEST)
    (folder / NEWEST / "manifest.json").unlink()
    damaged = run("checkpoint", "verify", str(folder / NEWEST))
    assert damaged.code == 1
    assert "manifest.json cannot be read" in damaged.out
    assert "manifest.json cannot be read" in run("checkpoint", "export", str(folder), str(tmp_path / "two")).err
    assert not (tmp_path / "two").exists()
    assert "has no checkpoint" in run("checkpoint", "verify", str(tmp_path)).err


def test_an_export_of_a_damaged_checkpoint_is_refused(kept: Kept, tmp_path: Path) -> None:
    folder = copied(kept.folder, tmp_path / "here")
    flip(folder / NEWEST / "__1_0.distcp")
    with pytest.raises(Damaged, match=rf"__1_0\.distcp is not as it was written.*; export \S+{OLDER} in its place"):
        export(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_ledger_predicts_the_bytes_on_disk(kept: Kept) -> None:
    found = measured_bytes(kept.folder / NEWEST)
    spec = spec_of()
    assert found.weights_bytes == 4 * spec.model.total_params
    assert found.payload_bytes == predicted_bytes(spec)
    assert found.payload_bytes < found.file_bytes


def _lived_through(rank: int, root: Path) -> dict[str, object]:
    """A run in a single process whose disk is full at times, whose checkpoints are damaged, and that keeps two."""
    del rank
    program, told = program_of(spec_of(plan="")), dict[str, object]()
    kept = Checkpoints(root / "kept", program, keep_last=2)
    kept.save(0, {"at": 0})
    assert not program.optimizer.state
    for step in range(1, 4):
        stepped(program, step - 1)
        kept.save(step, {"at": step})
    kept.wait()
    told["two are kept"] = _steps(root / "kept")
    for file in (".distcp", ".metadata.tmp"):
        told[f"full at {file}"] = _refused(kept, file)
        told[f"after {file}"] = _steps(root / "kept"), sorted(path.name for path in (root / "kept").glob(".step*"))
    flip(root / "kept" / name_of(3) / "__0_0.distcp")
    loaded = kept.load()
    assert loaded is not None
    told["the older one"] = loaded.step, [path.name for path, _ in loaded.skipped]
    kept.save(2, {"at": "again"})
    kept.wait()
    told["the newest by time"] = _steps(root / "kept"), [verify(path).sequence for path in _good(root / "kept")]
    kept.save(3, {"at": "anew"})
    kept.wait()
    told["a damaged one is replaced"] = _steps(root / "kept"), len(_good(root / "kept"))
    kept.close()
    fresh = Checkpoints(root / "zero", program_of(spec_of(plan="")), keep_last=2)
    fresh.save(0, {"at": 0})
    first = fresh.load()
    told["from step 0"] = first is not None and (first.step, first.state)
    fresh.close()
    return told


def _refused(kept: Checkpoints, file: str) -> str:
    with full_disk(file, 2000):
        kept.save(9, {"at": 9})
        try:
            kept.wait()
        except BadInput as error:
            return str(error)
    return ""


def _steps(folder: Path) -> list[int]:
    return [one.step for one in published(folder)]


def _good(folder: Path) -> list[Path]:
    return [one.path for one in published(folder) if _verifies(one.path)]


def _verifies(path: Path) -> bool:
    try:
        verify(path)
    except Damaged:
        return False
    return True


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, object]:
    return run_forked(1, _lived_through, tmp_path_factory.mktemp("life"))[0]


def test_so_many_are_kept_as_was_asked_for(told: Mapping[str, object]) -> None:
    assert told["two are kept"] == [3, 2]
    assert told["from step 0"] == (0, {"at": 0})


@pytest.mark.parametrize(("file", "named"), [(".distcp", "__0_0.distcp"), (".metadata.tmp", ".metadata.tmp")])
def test_a_full_disk_leaves_what_was_there(file: str, named: str, told: Mapping[str, object]) -> None:
    """The writer raises what a disk without room does; a real one is filled in the tests that take longer."""
    said = told[f"full at {file}"]
    assert isinstance(said, str)
    assert "the checkpoint of step 9 was not saved: rank 0 of 1:" in said
    assert "No space left on device" in said
    assert f"{named}'" in said
    assert told[f"after {file}"] == ([3, 2], [])


def test_the_newest_good_one_is_never_removed(told: Mapping[str, object]) -> None:
    """The damaged one of step 3 does not count as kept; one that is saved again is the newest, whatever its step."""
    assert told["the older one"] == (2, [name_of(3)])
    assert told["the newest by time"] == ([2, 3], [5])
    assert told["a damaged one is replaced"] == ([3, 2], 2)


def test_a_folder_belongs_to_one_run(tmp_path: Path) -> None:
    with lock(tmp_path), pytest.raises(RankFailed, match="another run saves its checkpoints in"):
        run_forked(1, _opened, tmp_path)


def _opened(rank: int, folder: Path) -> None:
    del rank
    Checkpoints(folder, program_of(spec_of(plan="")))


def test_what_a_dead_run_left_is_cleared(tmp_path: Path) -> None:
    """Half a checkpoint goes; a whole one that was being replaced by another comes back."""
    (partial_of(tmp_path, 3) / "deep").mkdir(parents=True)
    (tmp_path / f".{name_of(2)}.replaced").mkdir()
    (tmp_path / f".{name_of(1)}.replaced").mkdir()
    (tmp_path / name_of(1)).mkdir()
    assert clear(tmp_path) == [partial_of(tmp_path, 3).name]
    assert sorted(path.name for path in tmp_path.iterdir()) == [name_of(1), name_of(2)]


def test_a_manifest_of_another_format_is_not_called_damaged(kept: Kept, tmp_path: Path) -> None:
    from trainledger.runtime.checkpoint.manifest import write_manifest

    manifest = read_manifest(kept.folder / NEWEST)
    write_manifest(tmp_path, msgspec.structs.replace(manifest, format=2))
    with pytest.raises(BadInput, match="has format 2 and this release reads 1; use the release that wrote it"):
        read_manifest(tmp_path)


assert max(SAVES) < STEPS
