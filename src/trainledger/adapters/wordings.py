"""How messages of memory that ran out are worded: where they state a size, and what those are that state none."""

from __future__ import annotations

import re

SIZE = r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*(bytes|[KMGTP]iB|[KMGTP]B|B)\b"
_COUNT = r"([0-9]{1,3}(?:,[0-9]{3}){1,6}|[0-9]{1,18})\s*(bytes|B)\b"
_SHORT = r"([0-9]{1,18}(?:\.[0-9]{1,18})?)([KMGTP])(?![A-Za-z])"

REQUESTS: tuple[re.Pattern[str], ...] = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"(?:(?:tried|trying|unable|failed)\s+to\s+allocate|Requested\s*:)\s+(?:more\s+than\s+)?{SIZE}",
        # XLA, jaxlib from 0.4.31 on, and CuPy
        rf"out\s+of\s+memory\s+(?:while\s+trying\s+to\s+allocate|allocating)\s+{_COUNT}",
        # a stream executor that retries: 890.06M (933298432 bytes); and its exact size is the one in brackets
        rf"failed\s+to\s+allocate\s+[0-9.]+[KMGTP]?i?B?\s+\({_COUNT}",
        # XLA's own allocator on a TPU, whose G are 2^30 bytes
        rf"attempting\s+to\s+(?:allocate|reserve)\s+{_SHORT}",
        rf"not\s+enough\s+space\s+to\s+allocate\s+{_COUNT}",
        rf"allocating\s+{SIZE}\s+on\s+device",
    )
)
"""What states the size of one request: its digits and its unit."""

SHAPED = re.compile(
    r"OOM\s+when\s+allocating\s+tensor\s+with\s+shape\s*\[([0-9]{1,12}(?:,\s*[0-9]{1,12}){0,9})\]\s+and\s+type\s+"
    r"(float|half|bfloat16|double|int8|uint8|int32|int64|bool)\b",
    re.IGNORECASE,
)
"""TensorFlow states the shape and the type."""
TYPE_BYTES = {
    "float": 4, "half": 2, "bfloat16": 2, "double": 8, "int8": 1, "uint8": 1, "int32": 4, "int64": 8, "bool": 1,
}  # fmt: skip

COLOURS = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]")
"""What sets colours and weights on a terminal: rich, ray and loguru write it into the middle of a size."""
SIZELESS = re.compile(
    r"out of memory|OutOfMemory|OUT_OF_(?:DEVICE_|HOST_)?MEMORY|RESOURCE_EXHAUSTED|cannot allocate memory|"
    r"std::bad_alloc|MemoryError",
    re.IGNORECASE,
)
_NCCL = (
    "is NCCL's, whose communicators lie beside PyTorch's allocator and have no size in its messages; leave them room "
    "with a smaller --mbs, and judge a plan with --reserve '2 GiB' (rule nccl-memory)"
)
_CUBLAS = (
    "is cuBLAS's, whose handles and workspaces need room that PyTorch's allocator has taken; leave it with a smaller "
    "--mbs, and judge a plan with --reserve '1 GiB'"
)
_SERVING = (
    "is of an engine that serves a model, whose cache of keys and values is no part of training; raise "
    "gpu_memory_utilization (vLLM) or mem_fraction_static (SGLang) there, and where it shares the card with training "
    "keep its part free with --reserve"
)
_PROGRAM = (
    "is XLA's of a compiled program as a whole, which names no single request; `trainledger ledger` with the plan's "
    "flags says what it holds, and the list of buffers below the message which are largest"
)
_SHARED = (
    "is of shared memory (/dev/shm), through which a DataLoader's workers hand over batches; raise it, as with docker "
    "run --shm-size, or use fewer workers"
)
_PINNED = (
    "is of page-locked host memory, which offloading takes; `trainledger ledger` with --cluster counts it (rule "
    "host-memory), and DeepSpeed's pin_memory: false does without"
)
_KILLED = (
    "is of a process that was killed, as a host does that runs out of memory; `trainledger ledger` with --cluster "
    "counts what a plan holds there: offloaded states, and what is read and saved (rule host-memory)"
)
ELSEWHERE: dict[str, re.Pattern[str]] = {
    _SERVING: re.compile(
        r"No available memory for the cache blocks|stored in KV cache|less than desired GPU memory utilization|"
        r"KV cache is needed, which is larger than|mem[-_]fraction[-_]static",
        re.IGNORECASE,
    ),
    _PROGRAM: re.compile(r"Ran out of memory in memory space|Exceeded hbm capacity", re.IGNORECASE),
    _SHARED: re.compile(r"shared memory ?\(shm\)|out of shared memory|/dev/shm", re.IGNORECASE),
    _PINNED: re.compile(r"(?:cudaHostAlloc|hipHostMalloc|pin_memory\().*out of memory", re.IGNORECASE | re.DOTALL),
    _NCCL: re.compile(r"nccl.*(?:memory|malloc)", re.IGNORECASE | re.DOTALL),
    _CUBLAS: re.compile(r"CUBLAS_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)"),
    _KILLED: re.compile(r"\bSIGKILL\b|\bsignal 9\b|\b(?:exit|return) ?code\W{1,4}(?:9|137)\b", re.IGNORECASE),
}
"""What runs out beside PyTorch's allocator states no size; what it is, and what to ask instead."""
XLA = re.compile(r"RESOURCE_EXHAUSTED|Resource exhausted|XlaRuntimeError|jaxlib|\bxla\b|HBM[0-9]\)", re.IGNORECASE)
"""Words of programs that XLA compiled, whose allocator rounds to 256 bytes and not to PyTorch's steps."""
