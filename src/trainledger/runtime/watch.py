"""What a program tells whoever watches it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from trainledger.lines import Instant


class Watch(Protocol):
    """Whoever watches a program; `observe.Observer` is the one that counts."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Everything inside belongs to this phase of the step."""
        ...

    def instant(self, instant: Instant, named: Iterable[tuple[str, str, torch.Tensor]]) -> None:
        """The step has come to this instant, with these (category, name, tensor) alive."""
        ...

    def labelled(self, category: str, name: str) -> AbstractContextManager[None]:
        """What is born inside and never named is `held/<category>/<name>`."""
        ...

    def group(self, name: str, tensors: Iterable[torch.Tensor]) -> None:
        """These tensors are gathered together, under this name."""
        ...


class Unwatched:
    """Nobody watches."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Nothing is noted."""
        del name
        return nullcontext()

    def instant(self, instant: Instant, named: Iterable[tuple[str, str, torch.Tensor]]) -> None:
        """Nothing is noted."""

    def labelled(self, category: str, name: str) -> AbstractContextManager[None]:
        """Nothing is noted."""
        del category, name
        return nullcontext()

    def group(self, name: str, tensors: Iterable[torch.Tensor]) -> None:
        """Nothing is noted."""
