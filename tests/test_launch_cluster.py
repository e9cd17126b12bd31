"""The flags for several nodes are checked before anything starts, and so are the port and the memory."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from trainledger.errors import BadInput, Refused, TrainledgerError, UsageError
from trainledger.runtime.launch.cluster import check_port, read_cluster
from trainledger.runtime.launch.memory import check_host_memory, host_available_bytes

GIB = 2**30


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        ("", "--standalone --local-addr=localhost --nnodes=1 --nproc-per-node=8"),
        ("--nproc-per-node 8", "--standalone --local-addr=localhost --nproc-per-node=8 --nnodes=1"),
        ("--standalone", "--standalone --local-addr=localhost --nnodes=1 --nproc-per-node=8"),
        ("--master-port=29777", "--master-port=29777 --nnodes=1 --nproc-per-node=8"),
        (
            "--nnodes 2 --rdzv-endpoint head:29400",
            "--rdzv-backend=c10d --nnodes=2 --rdzv-endpoint=head:29400 --nproc-per-node=4",
        ),
        (
            "--nnodes=4 --node_rank=3 --master_addr=head",
            "--nnodes=4 --node-rank=3 --master-addr=head --nproc-per-node=2",
        ),
        (
            "--nnodes=2 --node-rank=1 --rdzv-endpoint=head:1 --rdzv-conf a=1,b=2",
            "--nnodes=2 --node-rank=1 --rdzv-endpoint=head:1 --rdzv-conf=a=1,b=2 --nproc-per-node=4",
        ),
    ],
)
def test_flags_for_torchrun(arguments: str, flags: str) -> None:
    assert " ".join(read_cluster(arguments.split(), 8).flags) == flags


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--nnode 2", "'--nnode' is not a known torchrun flag that is passed on; nearest: --nnodes"),
        ("head:29400", "'head:29400' is not a known torchrun flag that is passed on"),
        ("--nproc 8", "--nproc cannot be given: torchrun knows several flags that start so; write --nproc-per-node"),
        ("--max-restarts=3", "--max-restarts cannot be given: a rank that dies ends the run"),
        ("--max_restarts 3", "--max_restarts cannot be given: a rank that dies ends the run"),
        ("-m other.program", "-m cannot be given: the program is trainledger's"),
        ("--nnodes", "--nnodes needs a value"),
        ("--nnodes --standalone", "--nnodes needs a value"),
        ("--nnodes 2 --nnodes 2", "--nnodes is given twice"),
        ("--nnodes 1:4", "--nnodes 1:4 is not a whole number from 1 up; a run has a fixed number of ranks"),
        ("--nnodes 0", "--nnodes 0 is not a whole number from 1 up"),
        ("--nproc-per-node gpu", "--nproc-per-node gpu is not a whole number from 1 up"),
        ("--nnodes 3 --rdzv-endpoint a:1", "8 ranks cannot be divided over --nnodes 3"),
        ("--nproc-per-node 3", "--nnodes 1 x --nproc-per-node 3 are 3 ranks, and the plan has 8"),
        ("--nnodes 2 --standalone", "--standalone and --nnodes 2 contradict each other"),
        ("--standalone --master-port 5000", "--standalone and --master-port contradict each other"),
        ("--standalone --rdzv-endpoint a:1", "--standalone and --rdzv-endpoint contradict each other"),
        ("--node-rank 1", "--node-rank 1 is not one of --nnodes 1"),
        ("--nnodes 2", "--nnodes 2 needs a place to meet: --rdzv-endpoint HOST:PORT, or --master-addr HOST"),
        ("--nnodes 2 --master-addr a", "--nnodes 2 by static rendezvous needs --node-rank"),
        ("--nnodes 2 --master-addr a --node-rank 2", "--node-rank 2 is not one of --nnodes 2: 0 to 1"),
        ("--nnodes 2 --master-addr a --node-rank x", "--node-rank x is not a whole number from 0 up"),
        ("--nnodes 2 --master-addr a --rdzv-endpoint a:1", "--rdzv-endpoint and --master-addr contradict each other"),
        ("--master-port 1 --rdzv-endpoint a:1", "--rdzv-endpoint and --master-port contradict each other"),
        (
            "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint a:1 --node-rank 0",
            "--rdzv-backend and --node-rank contradict each other: only static rendezvous reads it",
        ),
        ("--master-port 0", "--master-port: '0' is not a port; give a number from 1 to 65535"),
        ("--master-port 65536", "--master-port: '65536' is not a port"),
        ("--rdzv-endpoint head:door", "--rdzv-endpoint: 'door' is not a port"),
    ],
)
def test_flags_that_cannot_be_are_refused_by_name(arguments: str, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_cluster(arguments.split(), 8)
    assert str(refused.value).startswith(words)


def test_a_rendezvous_of_another_kind_is_not_known() -> None:
    with pytest.raises(TrainledgerError, match="'etcd' is not a known rendezvous that is passed on"):
        read_cluster(["--rdzv-backend", "etcd"], 8)


@pytest.mark.parametrize(
    ("arguments", "port"),
    [
        ("", 0),
        ("--nnodes 2 --rdzv-endpoint head:29401", 0),
        ("--nnodes 2 --master-addr head --node-rank 0", 29500),
        ("--nnodes 2 --master-addr head --node-rank 1", 0),
        ("--nnodes 2 --rdzv-endpoint head:29501 --node-rank 0", 29501),
        ("--rdzv-endpoint localhost", 29400),
        ("--master-port 29777", 29777),
    ],
)
def test_only_a_node_that_listens_needs_a_port(arguments: str, port: int) -> None:
    assert read_cluster(arguments.split(), 8).port == port


@pytest.mark.parametrize("flag", ["--master-port={}", "--rdzv-endpoint=localhost:{}"])
def test_a_port_in_use_is_named_with_its_knob(flag: str) -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        cluster = read_cluster([flag.format(port)], 1)
        with pytest.raises(BadInput, match=f"^port {port} is in use on this machine; name a free one with --"):
            check_port(cluster)
    check_port(cluster)


def test_ranks_that_do_not_fit_into_the_machine_are_refused() -> None:
    check_host_memory(4, 2 * GIB, 8 * GIB)
    with pytest.raises(Refused) as refused:
        check_host_memory(4, 2 * GIB, 8 * GIB - 1)
    assert refused.value.rule == "runtime-host-memory"
    assert str(refused.value).startswith(
        "[runtime-host-memory] 4 ranks on this machine need 8.00 GiB (2.00 GiB each), and 8.00 GiB of its memory are "
        "available; use fewer ranks"
    )


def test_available_memory_is_the_kernels_or_the_containers(tmp_path: Path) -> None:
    meminfo, group = tmp_path / "meminfo", tmp_path / "group"
    meminfo.write_text("MemTotal:       32000000 kB\nMemAvailable:   16000000 kB\nHugePages_Total:       0\n")
    assert host_available_bytes(meminfo, group) == 16_000_000 * 1024
    group.mkdir()
    (group / "memory.max").write_text("max\n")
    assert host_available_bytes(meminfo, group) == 16_000_000 * 1024
    (group / "memory.max").write_text("5000\n")
    (group / "memory.current").write_text("3000\n")
    (group / "memory.stat").write_text("anon 2500\ninactive_file 400\n")
    assert host_available_bytes(meminfo, group) == 5000 - (3000 - 400)
    assert host_available_bytes(tmp_path / "absent", group) > GIB
    assert host_available_bytes() > 0
