"""How the ranks of a run are started and watched."""

from __future__ import annotations

QUIET = {
    # Read by libgomp and MKL when they are loaded: a rank computes on one core unless it asks for more.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Read when torch is loaded: what matters is raised, and the rest would be written over a user's screen.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_DISTRIBUTED_DEBUG": "OFF",
    "TORCH_SHOW_CPP_STACKTRACES": "0",
}
"""Environment of every rank, to be set before torch is imported."""
