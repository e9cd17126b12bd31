"""What a disk does to checkpoints: it runs full in the middle of a save, and training waits only for a copy."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from checkpoint_runs import program_of, spec_of, stepped
from trainledger.runtime.checkpoint.checkpoints import Checkpoints
from trainledger.runtime.checkpoint.parts import parts_of
from trainledger.runtime.launch.fork import run_forked
from trainledger.runtime.spec import RunSpec

SMALL_DISK = "mount -t tmpfs -o size=4m none {folder} && exec {python} {script} {folder}"
SMALL_FILES = "ulimit -f 200 && trap '' XFSZ && exec {python} {script} {folder}"
"""Where a user may not mount: no file may grow beyond so many KiB, which the system says in other words."""


def _small_disk() -> bool:
    """Whether this user may mount a file system of its own, in a namespace that ends with the process."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return False
    tried = subprocess.run([unshare, "-Urm", "true"], check=False, capture_output=True)
    return tried.returncode == 0


@pytest.mark.proof
def test_a_full_disk_leaves_the_older_checkpoint_and_nothing_of_the_newer(tmp_path: Path) -> None:
    script = Path(__file__).with_name("full_disk.py")
    mounts = _small_disk()
    command = (SMALL_DISK if mounts else SMALL_FILES).format(folder=tmp_path, python=sys.executable, script=script)
    said = "No space left on device" if mounts else "File too large"
    shell = ["unshare", "-Urm", "sh", "-c", command] if mounts else ["sh", "-c", command]
    done = subprocess.run(shell, check=False, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    for seen in json.loads(done.stdout):
        assert "the checkpoint of step 2 was not saved: rank " in seen["told"]
        assert said in seen["told"]
        assert ".distcp'" in seen["told"]
        assert seen["left"] == [".lock", "step-00000001"]
        assert (seen["loaded"], seen["skipped"]) == (1, 0)


class Blocked(NamedTuple):
    """Of one save of one rank, in seconds: what training waited, its copy, and a bare copy of the same tensors."""

    blocked_s: float
    copied_s: float
    bare_s: float
    bytes: int


SHARDS = "hidden_size=512 intermediate_size=1408 num_hidden_layers=6 vocab_size=4096 num_attention_heads=8 head_dim=64"
SAVES = 15
LIMIT = 1.5
LEAST_BYTES = 100_000_000


def blocked(rank: int, folder: Path, spec: RunSpec) -> list[Blocked]:
    """Save several times while training goes on, each time after a bare copy of the same tensors."""
    del rank
    program = program_of(spec)
    kept = Checkpoints(folder, program, keep_last=1)
    found: list[Blocked] = []
    room: list[torch.Tensor] = []
    for index in range(SAVES):
        stepped(program, index)
        kept.wait()
        parts = [part.values for part in parts_of(program)]
        begin = time.perf_counter()
        if room:
            for copy, values in zip(room, parts, strict=True):
                copy.copy_(values)
        else:
            room = [values.clone() for values in parts]
        bare_s = time.perf_counter() - begin
        saved = kept.save(index + 1, {"at": index + 1})
        found.append(Blocked(saved.blocked_s, saved.copied_s, bare_s, saved.bytes))
        stepped(program, index)
    kept.close()
    return found


@pytest.mark.proof
def test_training_waits_no_longer_than_for_the_copy(tmp_path: Path) -> None:
    """Other programs share this machine, so a wait is held against the copy in it, and the best copy against the best.

    The first save makes its room, as the copy beside it does.
    """
    for rank in run_forked(2, blocked, tmp_path, spec_of(sizes=SHARDS), timeout_s=300):
        assert all(one.bytes >= LEAST_BYTES for one in rank)
        waits = statistics.median(one.blocked_s / one.copied_s for one in rank)
        best, copied, bare = (min(times) for times in list(zip(*rank, strict=True))[:3])
        told = f"blocked {best:.4f} s, copy {copied:.4f} s, bare {bare:.4f} s; {waits:.2f} of its own copy"
        print(f"{told}, {rank[0].bytes} B")  # noqa: T201  # shown with -s
        assert waits <= LIMIT
        assert copied <= LIMIT * bare
        assert best <= LIMIT * bare
