"""What every rank needs in its environment."""

from __future__ import annotations

import socket

QUIET = {
    # Read by libgomp and MKL when they are loaded: a rank computes on one core unless it asks for more.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Read when torch is loaded: what matters is raised, and the rest would be written over a user's screen.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_SHOW_CPP_STACKTRACES": "0",
}
"""To be set before torch is imported."""


def one_machine() -> dict[str, str]:
    """For ranks that share a machine: its host name need not resolve, and its network card need not be up."""
    loopback = next((name for _, name in socket.if_nameindex() if name in {"lo", "lo0"}), None)
    return {"GLOO_SOCKET_IFNAME": loopback} if loopback else {}
