"""One dispatch mode for all that watch operations: each operation costs one call into Python, whoever looks at it.

Watchers that share a mode see the same operations once each and cannot disturb each other, which modes stacked on one
another can: torch.utils.flop_counter decomposes operations and so changes what a mode below it sees.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from types import TracebackType
from typing import Any, Protocol

from torch._ops import OpOverload
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

After = Callable[[tuple[Any, ...], dict[str, Any], Any], None]
"""Takes the arguments, the keyword arguments and the result of an operation that has run."""


class Watcher(Protocol):
    """Something that looks at operations."""

    def after(self, func: OpOverload) -> After | None:
        """What to do whenever `func` has run; None where it is of no interest. Asked once per operation."""
        ...


@lru_cache
def _wraps(kind: type) -> bool:
    return is_traceable_wrapper_subclass_type(kind)


class Watching(TorchDispatchMode):
    """Shows every operation on local tensors to the watchers, backward and recomputation included.

    A wrapper (DTensor, AsyncCollectiveTensor) is left to its own class, which calls the operation again on what it
    wraps. A mode holds for the threads of its autograd as well, since autograd takes over the caller's state.
    """

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        super().__init__()
        self._watchers = tuple(watchers)
        self._plans: dict[OpOverload, tuple[After, ...]] = {}
        self.suspended = 0

    @property
    def watchers(self) -> tuple[Watcher, ...]:
        """Who looks on; may be set at any time."""
        return self._watchers

    @watchers.setter
    def watchers(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = tuple(watchers)
        self._plans = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        if types and any(map(_wraps, types)):
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self.suspended:
            plan = self._plans.get(func)
            if plan is None:
                plan = self._plans[func] = self._plan(func)
            for after in plan:
                after(args, kwargs, out)
        return out

    def _plan(self, func: OpOverload) -> tuple[After, ...]:
        found = (watcher.after(func) for watcher in self._watchers)
        return tuple(after for after in found if after is not None)


class _Suspending:
    """Suspends a mode, while holding what was held before."""

    def __init__(self, mode: Watching, inner: AbstractContextManager[Any]) -> None:
        self._mode, self._inner = mode, inner

    def __enter__(self) -> None:
        self._inner.__enter__()
        self._mode.suspended += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mode.suspended -= 1
        self._inner.__exit__(kind, error, trace)


@contextmanager
def watching(*watchers: Watcher) -> Generator[Watching]:
    """Watch what happens within.

    DTensor runs each new operation once on fake tensors of the whole size, to learn the shape of the result. Under an
    outer FakeTensorMode they look like any other tensor, so the lock that DTensor holds meanwhile suspends the mode.
    [torch: distributed/tensor/_sharding_prop.py, _fake_mode_lock, private because nothing public tells]
    """
    mode = Watching(watchers)
    held = ShardingPropagator._fake_mode_lock
    ShardingPropagator._fake_mode_lock = _Suspending(mode, held)  # pyright: ignore[reportAttributeAccessIssue]  # any context
    try:
        with mode:
            yield mode
    finally:
        ShardingPropagator._fake_mode_lock = held
