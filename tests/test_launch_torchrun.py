"""torchrun's ranks: what they saw comes back, and a rank that fails is named.

Where ranks fail the program is a planted one, which ends as the spec's faults say; sitecustomize puts it in the place
of the real one.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

import launch_targets as targets
from trainledger.errors import BadInput, Refused
from trainledger.facts.model_load import load_with_config
from trainledger.runtime.launch import run_local, torchrun
from trainledger.runtime.launch.cluster import Cluster
from trainledger.runtime.launch.failure import RankFailed
from trainledger.runtime.spec import RunSpec

PLANTED = """
import sys, types

def run(spec, progress):
    import os, time, torch, torch.distributed as dist
    from trainledger.errors import BadInput
    from trainledger.runtime.observe.observation import Observation
    rank, how = dist.get_rank(), "".join(spec.faults)
    progress(1, 2, "begun")
    if rank == 1:
        if how == "raise":
            raise ValueError("planted")
        if how == "refuse":
            raise BadInput("the value 3 breaks the rule; turn the knob")
        if how == "kill":
            os.kill(os.getpid(), 9)
        if how == "exit":
            os._exit(3)
        if how == "wait":
            time.sleep(1000)
    value = torch.tensor(float(rank))
    dist.all_reduce(value)
    progress(2, 2, "done")
    return Observation(
        rank=rank, digest=spec.digest, held=(), calls=(), flop={}, phases_s={}, losses=(float(value),)
    )

sys.modules["trainledger.runtime.run"] = module = types.ModuleType("trainledger.runtime.run")
module.run = run
"""

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 67}


def spec_of(*faults: str, ranks: int = 2) -> RunSpec:
    """Data parallelism over so many ranks."""
    overrides = {key: str(size) for key, size in SIZES.items()} | {"num_key_value_heads": "2"}
    config, model = load_with_config("llama-3-8b", overrides=overrides)
    ones = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp_replicate", "mbs", "num_microbatches")
    plan = {**dict.fromkeys(ones, 1), "dp_shard": ranks, "sp": 0, "zero_stage": 3}
    return RunSpec(model=model, config=config, plan=plan, seq=16, faults=faults)


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The planted program on the path, and a folder for temporary files in which nothing may stay."""
    (tmp_path / "sitecustomize.py").write_text(PLANTED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("LAUNCH_TEST_MARK", str(tmp_path))
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield
    assert targets.marked_processes(f"LAUNCH_TEST_MARK={tmp_path}") == []
    assert [file.name for file in folder.iterdir() if not file.name.startswith("torchinductor")] == []


def test_torchrun_and_forked_ranks_run_the_same_program() -> None:
    """The one test of torchrun that runs the real program."""
    heard: list[tuple[int, int, str]] = []
    spec = spec_of()

    def hear(done: int, total: int, text: str) -> None:
        heard.append((done, total, text))

    seen = torchrun.run_torchrun(spec, timeout_s=50, progress=hear)
    assert [one.rank for one in seen] == [0, 1]
    assert {one.digest for one in seen} == {spec.digest}
    assert heard[-1][:2] == (spec.steps, spec.steps)
    forked = run_local(spec)
    for ours, theirs in zip(seen, forked, strict=True):
        assert ours.losses == theirs.losses
        assert ours.calls == theirs.calls
        # What no name claims may still be in the hands of gloo's own thread, or may not.
        assert [held.claimed for held in ours.held] == [held.claimed for held in theirs.held]


@pytest.mark.proof
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", "rank 1 of 2 raised ValueError: planted\n"),
        ("refuse", "rank 1 of 2: the value 3 breaks the rule; turn the knob"),
        ("kill", "rank 1 of 2 was killed by SIGKILL"),
        ("exit", "rank 1 of 2 exited with status 3 and without a result"),
    ],
)
def test_the_first_rank_that_fails_ends_the_run(how: str, words: str, planted: None) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailed) as failed:
        torchrun.run_torchrun(spec_of(how), timeout_s=300)
    assert failed.value.rank == 1
    assert str(failed.value).startswith(words)
    assert time.monotonic() - start < 60


@pytest.mark.proof
def test_a_run_that_takes_too_long_is_ended_and_says_where_it_is(planted: None) -> None:
    with pytest.raises(RankFailed) as failed:
        torchrun.run_torchrun(spec_of("wait"), timeout_s=30)
    said = str(failed.value)
    assert said.startswith("the ranks of this node did not end within 30 s; raise --timeout\n")
    assert "in all_reduce" in said.split("local rank 1 is here", maxsplit=1)[0]
    assert "sitecustomize.py" in said.split("local rank 1 is here")[1]


def test_a_port_in_use_stops_torchrun_before_it_starts(planted: None) -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(BadInput, match=f"^port {port} is in use on this machine; .* --master-port"):
            torchrun.run_torchrun(spec_of(), ["--master-port", str(port)])


@pytest.mark.proof
@pytest.mark.parametrize("flag", ["--master-port={}", "--rdzv-endpoint=localhost:{}"])
def test_a_port_taken_meanwhile_is_named_as_well(flag: str, planted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def unchecked(cluster: Cluster) -> None:
        """As if the port had been free at the time."""

    monkeypatch.setattr(torchrun, "check_port", unchecked)
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(BadInput, match=f"^port {port} is in use on this machine"):
            torchrun.run_torchrun(spec_of(), [flag.format(port)], timeout_s=60)


@pytest.mark.parametrize("launch", [run_local, torchrun.run_torchrun])
def test_a_run_that_cannot_fit_is_refused(launch: object, planted: None) -> None:
    assert callable(launch)
    with pytest.raises(Refused, match=r"^\[runtime-host-memory\] 2 ranks"):
        launch(spec_of(), rank_bytes=2**30, available_bytes=2**31 - 1)


PARENT = """
import sys, msgspec
from trainledger.runtime.launch.torchrun import run_torchrun
from trainledger.runtime.spec import RunSpec

def say(done, total, text):
    print(text, flush=True)

spec, *flags = sys.argv[1:]
seen = run_torchrun(msgspec.json.decode(open(spec, "rb").read(), type=RunSpec), flags, timeout_s=120, progress=say)
print(*(one.rank for one in seen), flush=True)
"""


def parent(folder: Path, spec: RunSpec, flags: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Another process that runs `spec`."""
    (folder / "spec.json").write_bytes(msgspec.json.encode(spec))
    command = [sys.executable, "-c", PARENT, str(folder / "spec.json"), *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


@pytest.mark.proof
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_no_rank_survives_its_parent(blow: signal.Signals, planted: None, tmp_path: Path) -> None:
    mark = f"LAUNCH_TEST_MARK={tmp_path}"
    with parent(tmp_path, spec_of("wait")) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        # This process, the parent, torchrun and two ranks.
        running = [pid for pid in targets.marked_processes(mark) if pid != os.getpid()]
        assert len(running) == 4
        process.send_signal(blow)
        start = time.monotonic()
        while targets.marked_processes(mark) and time.monotonic() - start < 5:
            time.sleep(0.05)


@pytest.mark.proof
@pytest.mark.parametrize(
    "flags",
    [
        ["--rdzv-endpoint=localhost:{port}", "--local-addr=localhost"],
        ["--master-addr=localhost", "--master-port={port}", "--node-rank={node}", "--local-addr=localhost"],
    ],
)
def test_two_nodes_each_get_what_all_ranks_saw(flags: list[str], planted: None, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    nodes: list[subprocess.Popen[str]] = []
    for node in range(2):
        (tmp_path / f"{node}").mkdir()
        given = ["--nnodes=2", *(flag.format(port=port, node=node) for flag in flags)]
        nodes.append(parent(tmp_path / f"{node}", spec_of(ranks=4), given))
    answers = sorted(process.communicate()[0].splitlines() for process in nodes)
    assert answers == [["0 1 2 3"], ["begun", "done", "0 1 2 3"]]


@pytest.mark.proof
def test_nodes_that_were_told_different_runs_do_not_start(planted: None, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    flags = ["--nnodes=2", "--master-addr=localhost", f"--master-port={port}", "--local-addr=localhost"]
    other = msgspec.structs.replace(spec_of(), seed=1)
    (tmp_path / "other").mkdir()
    with parent(tmp_path / "other", other, [*flags, "--node-rank=1"]):
        words = r"^rank 0 of 2: rank 1 of 2 was told another run than the rest \(digest"
        with pytest.raises(RankFailed, match=words):
            torchrun.run_torchrun(spec_of(), [*flags, "--node-rank=0"], timeout_s=100)
