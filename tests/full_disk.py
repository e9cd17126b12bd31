"""Fills a real disk in the middle of a save: `python full_disk.py FOLDER`, with a folder on a small file system.

Prints as JSON what the ranks were told, what is left, and what a load then finds.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from checkpoint_runs import program_of, spec_of, stepped
from trainledger.errors import BadInput
from trainledger.runtime.checkpoint.checkpoints import Checkpoints
from trainledger.runtime.checkpoint.manifest import verify
from trainledger.runtime.launch.fork import run_forked

LEFT_BYTES = 250_000
"""Room for about half of the second checkpoint."""


def filled(rank: int, folder: Path) -> dict[str, Any]:
    """Save once, fill the disk up to half a checkpoint, save again, then look."""
    program = program_of(spec_of())
    kept = Checkpoints(folder / "kept", program)
    stepped(program, 0)
    kept.save(1, {"at": 1})
    kept.wait()
    if rank == 0:
        disk = os.statvfs(folder)
        (folder / "others").write_bytes(b"x" * (disk.f_bavail * disk.f_frsize - LEFT_BYTES))
    kept.save(2, {"at": 2})
    told = ""
    try:
        kept.wait()
    except BadInput as error:
        told = str(error)
    left = sorted(path.name for path in (folder / "kept").iterdir())
    loaded = kept.load()
    kept.close()
    assert loaded is not None
    verify(loaded.path)
    return {"told": told, "left": left, "loaded": loaded.step, "skipped": len(loaded.skipped)}


if __name__ == "__main__":
    print(json.dumps(run_forked(2, filled, Path(sys.argv[1]), timeout_s=120)))  # noqa: T201  # its answer
