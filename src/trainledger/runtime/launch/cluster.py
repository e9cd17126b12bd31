"""The flags that say how several machines meet, checked before torchrun sees them.

Their names and meanings are torchrun's. [torch/distributed/run.py] What a run decides itself (which program, how many
restarts) cannot be given.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec

from trainledger.errors import BadInput, UnknownName, UsageError

PASSED = (
    "nnodes",
    "nproc-per-node",
    "node-rank",
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-id",
    "rdzv-conf",
    "standalone",
    "master-addr",
    "master-port",
    "local-addr",
    "log-dir",
    "numa-binding",
)

OWN = {
    "max-restarts": "a rank that dies ends the run",
    "monitor-interval": "ranks are looked at ten times a second",
    "module": "the program is trainledger's",
    "m": "the program is trainledger's",
    "no-python": "the program is trainledger's",
    "run-path": "the program is trainledger's",
    "nproc": "torchrun knows several flags that start so; write --nproc-per-node",
}

DEFAULT_PORTS = {"static": 29500, "c10d": 29400}
"""Where nodes meet if no port is named. [torch/distributed/run.py, elastic/rendezvous/c10d_rendezvous_backend.py]"""


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """How torchrun is to be started on this node.

    flags      as torchrun takes them
    local      ranks on this node
    port       the port that this node must listen on; 0: torchrun finds a free one
    knob       the flag that names it
    log_dir    where the ranks' output is to be kept; None: nowhere
    """

    flags: tuple[str, ...]
    nnodes: int
    local: int
    port: int
    knob: str
    log_dir: Path | None = None


def read_cluster(arguments: Sequence[str], world: int) -> Cluster:
    """Check the flags for a run of `world` ranks; those of one machine are found where none are given."""
    given = _named(arguments)
    nnodes = _number(given, "nnodes", 1)
    local = _local(given, nnodes, world)
    if nnodes == 1:
        flags, (port, knob) = _alone(given), _own_port(given, host=True)
    else:
        flags, (port, knob) = _together(given, nnodes), _own_port(given, host=given.get("node-rank") == "0")
    flags = {**flags, "nnodes": str(nnodes), "nproc-per-node": str(local)}
    return Cluster(
        flags=tuple(f"--{name}={value}" if value else f"--{name}" for name, value in flags.items()),
        nnodes=nnodes,
        local=local,
        port=port,
        knob=knob,
        log_dir=Path(given["log-dir"]) if "log-dir" in given else None,
    )


def check_port(cluster: Cluster) -> None:
    """Refuse a port that this node must listen on and cannot."""
    if not cluster.port:
        return
    with socket.socket() as probe:
        # As torch's store does, so that a port in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", cluster.port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise port_in_use(str(cluster.port), cluster.knob) from error
            raise BadInput(
                f"port {cluster.port} cannot be listened on: {error}; choose another with {cluster.knob}"
            ) from error


def port_in_use(port: str, knob: str) -> BadInput:
    """The error for a port that another process listens on."""
    return BadInput(f"port {port} is in use on this machine; name a free one with {knob}, or end what listens there")


def _named(arguments: Sequence[str]) -> dict[str, str]:
    """Flag to value, from `--flag value` and `--flag=value`, with torchrun's underscores made hyphens."""
    given: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        name = flag.lstrip("-").replace("_", "-")
        if not flag.startswith("-") or name not in PASSED:
            raise _unknown(flag, name)
        if name in given:
            raise UsageError(f"--{name} is given twice; once is enough")
        if name != "standalone" and not equals:
            if not rest or rest[0].startswith("--"):
                raise UsageError(f"--{name} needs a value")
            value = rest.pop(0)
        given[name] = value
    return given


def _unknown(flag: str, name: str) -> UsageError:
    if name in OWN:
        return UsageError(f"{flag} cannot be given: {OWN[name]}")
    return UsageError(str(UnknownName("torchrun flag that is passed on", flag, (f"--{known}" for known in PASSED))))


def _number(given: dict[str, str], name: str, default: int, least: int = 1) -> int:
    text = given.get(name, str(default))
    if not text.isdecimal() or int(text) < least:
        raise UsageError(f"--{name} {text} is not a whole number from {least} up; a run has a fixed number of ranks")
    return int(text)


def _local(given: dict[str, str], nnodes: int, world: int) -> int:
    """Ranks on this node, which must be the world's share."""
    if "nproc-per-node" not in given:
        if world % nnodes:
            raise UsageError(f"{world} ranks cannot be divided over --nnodes {nnodes}; choose a divisor")
        return world // nnodes
    local = _number(given, "nproc-per-node", 1)
    if local * nnodes != world:
        raise UsageError(
            f"--nnodes {nnodes} x --nproc-per-node {local} are {nnodes * local} ranks, and the plan has {world}; "
            "leave --nproc-per-node out, or change a degree of the plan"
        )
    return local


def _clash(given: dict[str, str], one: str, others: Sequence[str], why: str) -> None:
    for other in others:
        if one in given and other in given:
            raise UsageError(f"--{one} and --{other} contradict each other: {why}; leave one out")


def _alone(given: dict[str, str]) -> dict[str, str]:
    """One node: torchrun finds a free port unless one is named."""
    meeting = ("rdzv-endpoint", "rdzv-backend", "master-addr", "master-port")
    _clash(given, "standalone", (*meeting, "rdzv-id", "node-rank"), "a standalone node meets nobody")
    _check_meeting(given)
    if _number(given, "node-rank", 0, least=0) != 0:
        raise UsageError(f"--node-rank {given['node-rank']} is not one of --nnodes 1; the only node is 0")
    if any(name in given for name in meeting):
        return given
    return {"standalone": "", "local-addr": "localhost", **given}


def _together(given: dict[str, str], nnodes: int) -> dict[str, str]:
    """Several nodes: how they meet must be said, and said once."""
    if "standalone" in given:
        raise UsageError(f"--standalone and --nnodes {nnodes} contradict each other: leave one out")
    _check_meeting(given)
    if "rdzv-endpoint" not in given and "master-addr" not in given:
        raise UsageError(
            f"--nnodes {nnodes} needs a place to meet: --rdzv-endpoint HOST:PORT, or --master-addr HOST and --node-rank"
        )
    backend = _backend(given)
    if backend == "c10d":
        return {"rdzv-backend": "c10d", **given}
    if "node-rank" not in given:
        raise UsageError(f"--nnodes {nnodes} by {backend} rendezvous needs --node-rank: 0 on the node that listens")
    if _number(given, "node-rank", 0, least=0) >= nnodes:
        raise UsageError(f"--node-rank {given['node-rank']} is not one of --nnodes {nnodes}: 0 to {nnodes - 1}")
    return given


def _check_meeting(given: dict[str, str]) -> None:
    why = "each says where the nodes meet"
    _clash(given, "rdzv-endpoint", ("master-addr", "master-port"), why)
    if _backend(given) != "static":
        _clash(given, "rdzv-backend", ("node-rank", "master-addr", "master-port"), "only static rendezvous reads it")


def _backend(given: dict[str, str]) -> str:
    """Torchrun's own default is static; an endpoint alone, without a node's number, can only mean c10d."""
    alone = "rdzv-endpoint" in given and "node-rank" not in given
    backend = given.get("rdzv-backend", "c10d" if alone else "static")
    if backend not in DEFAULT_PORTS:
        raise UnknownName("rendezvous that is passed on", backend, DEFAULT_PORTS)
    return backend


def _own_port(given: dict[str, str], *, host: bool) -> tuple[int, str]:
    """The port this node listens on, and its flag. Of several nodes that meet by c10d, torchrun chooses the host."""
    knob = "--rdzv-endpoint" if "rdzv-endpoint" in given else "--master-port"
    if "rdzv-endpoint" in given:
        _, colon, text = given["rdzv-endpoint"].rpartition(":")
        text = text if colon else str(DEFAULT_PORTS[_backend(given)])
    else:
        text = given.get("master-port", str(DEFAULT_PORTS["static"]))
    if not text.isdecimal() or not 0 < int(text) < 2**16:
        raise UsageError(f"{knob}: {text!r} is not a port; give a number from 1 to {2**16 - 1}")
    named = any(name in given for name in ("rdzv-endpoint", "master-addr", "master-port"))
    return (int(text) if host and named else 0), knob
