"""The device of this process: a group of one rank on it, its clock, and what it is called."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from time import perf_counter

import torch
import torch.distributed as dist

from cards.record import Machine
from trainledger.errors import UnknownName
from trainledger.facts.cluster import Accelerator, find_accelerator
from trainledger.runtime.launch.environment import one_machine


def synchronize(device: torch.device) -> None:
    """Wait for the device; a CPU is done when the call is."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forget(device: torch.device) -> None:
    """Give back what nothing uses, so that the next measurement begins as the first did."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


@contextmanager
def alone(device: torch.device) -> Generator[None]:
    """A process group of this one process, on the backends that torchrun's ranks would have."""
    os.environ.update(one_machine())
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]  # documented
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, device_id=device)
    else:
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def in_turns(
    calls: Mapping[str, Callable[[], object]], device: torch.device, repeats: int, least_s: float = 0.0
) -> dict[str, list[float]]:
    """Seconds of each call, `repeats` times, one after the other in turns: what else a device does meets all alike.

    A call that takes less than `least_s` is done as often in a row as fills that.
    """

    def taken_s(call: Callable[[], object], times: int) -> float:
        synchronize(device)
        start = perf_counter()
        for _ in range(times):
            call()
        synchronize(device)
        return (perf_counter() - start) / times

    for call in calls.values():
        taken_s(call, 2)
    often = {name: max(1, round(least_s / taken_s(call, 2))) for name, call in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            found[name].append(taken_s(call, often[name]))
    return found


def accelerator_here(device: torch.device) -> Accelerator | None:
    """What the facts say of this card; None of a CPU, and of a card that no file is about."""
    if device.type != "cuda":
        return None
    try:
        return find_accelerator(torch.cuda.get_device_name(device))
    except UnknownName:
        return None


def machine_here(device: torch.device) -> Machine:
    """This device and what drives it."""
    cuda = device.type == "cuda"
    known = accelerator_here(device)
    driver, power = _of_driver(device) if cuda else ("", "")
    return Machine(
        device="cuda" if cuda else "cpu",
        card=torch.cuda.get_device_name(device) if cuda else platform.machine(),
        accelerator="" if known is None else known.name,
        driver=driver,
        power_limit=power,
        cuda=str(torch.version.cuda) if cuda else "",
        torch=str(torch.__version__),
        torchao=importlib.metadata.version("torchao"),
        python=platform.python_version(),
    )


def _of_driver(device: torch.device) -> tuple[str, str]:
    """(version of the driver, power limit), as nvidia-smi prints them."""
    named = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"
    asked = ("--query-gpu=driver_version,power.limit", "--format=csv,noheader")
    done = subprocess.run(["nvidia-smi", named, *asked], check=True, capture_output=True, text=True, timeout=30)
    driver, _, power = done.stdout.strip().partition(", ")
    return driver, power
