"""DDP's buckets, which no tensor of a program names.

DDP's reducer allocates them in C++, with operations that a dispatch mode is shown all the same: when DDP is built, and
anew in the forward after the first backward, in the order in which the gradients came. Where gradients are views of
the buckets, the gradients claim them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps

from torch.nn.parallel import DistributedDataParallel

from trainledger.runtime.observe.storages import Label, StorageTracker

BUCKETS = Label("buffers", "reducer buckets", op="aten::empty.memory_format")

_PLACES = ("_ddp_init_helper", "_pre_forward")
"""Where DDP makes its reducer and lets it make its buckets anew; private, because DDP tells nobody of its buckets.
[torch: nn/parallel/distributed.py; csrc/distributed/c10d/reducer.cpp, initialize_buckets]"""


@contextmanager
def labelling_reducers(tracker: StorageTracker) -> Generator[None]:
    """Label the buckets of every DDP that is built or run within."""
    own = {place: getattr(DistributedDataParallel, place) for place in _PLACES}

    def labelled(work: Callable[..., object]) -> Callable[..., object]:
        @wraps(work)
        def under_label(*args: object, **kwargs: object) -> object:
            with tracker.labelled(BUCKETS):
                return work(*args, **kwargs)

        return under_label

    for place, work in own.items():
        setattr(DistributedDataParallel, place, labelled(work))
    try:
        yield
    finally:
        for place, work in own.items():
            setattr(DistributedDataParallel, place, work)
