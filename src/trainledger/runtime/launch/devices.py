"""The CUDA devices that ranks of this machine will have, asked of the driver before any of them starts.

torch would tell too, and takes seconds to import. What is not known here, because the driver is another or does not
answer, is refused by the ranks themselves.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from trainledger.errors import BadInput, Refused
from trainledger.runtime.spec import FP8_RECIPES, RunSpec

DRIVER = "libcuda.so.1"
MAJOR, MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR. [cuda.h]"""
LEAST_FP8 = (8, 9)
"""Compute capability from which PyTorch multiplies in FP8. [torch: native/cuda/ScaledBlas.cpp]"""


class Device(NamedTuple):
    """A card as its driver describes it."""

    name: str
    capability: tuple[int, int]


def cuda_devices(driver: str = DRIVER) -> tuple[Device, ...]:
    """The devices that CUDA_VISIBLE_DEVICES leaves, where torch was built for them; () where none is known."""
    if not _built_for_cuda():
        return ()
    try:
        library = ctypes.CDLL(driver)
        count = ctypes.c_int()
        if library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count)):
            return ()
        return tuple(_device(library, ordinal) for ordinal in range(count.value))
    except (OSError, AttributeError):
        return ()


def _device(library: ctypes.CDLL, ordinal: int) -> Device:
    name, major, minor = ctypes.create_string_buffer(256), ctypes.c_int(), ctypes.c_int()
    library.cuDeviceGetName(name, len(name), ordinal)
    library.cuDeviceGetAttribute(ctypes.byref(major), MAJOR, ordinal)
    library.cuDeviceGetAttribute(ctypes.byref(minor), MINOR, ordinal)
    return Device(name.value.decode(errors="replace"), (major.value, minor.value))


def _built_for_cuda() -> bool:
    """Whether the torch that ranks will import has CUDA in it, from the file in which it says so."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    version = Path(found.origin).with_name("version.py")
    return version.is_file() and re.search(r"^cuda\b[^=]*= *['\"]", version.read_text(), re.MULTILINE) is not None


def check_devices(spec: RunSpec, local: int, devices: Sequence[Device]) -> None:
    """Refuse `local` ranks of a run that these devices cannot take; where there is none they compute on the CPU."""
    if not devices:
        return
    if local > len(devices):
        raise BadInput(
            f"{local} ranks of this node need a CUDA device each, and {len(devices)} are visible here; start fewer "
            "ranks on this node (--nproc-per-node)"
        )
    cp = spec.plan["cp"]
    if cp > 1 and spec.precision == "fp32":
        raise Refused("cp-flash", f"cp={cp} runs on flash kernels, which have no fp32 on CUDA; use --precision bf16")
    old = min(devices[:local], key=lambda one: one.capability)
    if spec.precision in FP8_RECIPES and old.capability < LEAST_FP8:
        least, have = (".".join(map(str, version)) for version in (LEAST_FP8, old.capability))
        raise Refused(
            "fp8-sm",
            f"--precision {spec.precision} needs compute capability {least}, and {old.name} has {have}; use bf16",
        )
