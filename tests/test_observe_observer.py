"""One pass sees what separate passes see, of the step that is observed and of no other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from observed_models import Tiny, loss_of, tokens
from trainledger.runtime.observe.clock import Clock
from trainledger.runtime.observe.dispatch import watching
from trainledger.runtime.observe.flop import FlopCounter
from trainledger.runtime.observe.observation import Observation
from trainledger.runtime.observe.observer import Observer
from trainledger.runtime.observe.storages import StorageTracker


def named(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        yield "weights", name, parameter
        if parameter.grad is not None:
            yield "gradients", name, parameter.grad
        for what, value in optimizer.state.get(parameter, {}).items():
            yield "optimizer", f"{name}:{what}", value


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, observer: Observer | None = None, micro_batches: int = 2
) -> None:
    for index in range(micro_batches):
        loss = loss_of(model, tokens())
        if observer and index == micro_batches - 1:
            observer.instant("loss", named(model, optimizer))
        loss.backward()
        del loss
    if observer:
        observer.instant("backward", named(model, optimizer))
    optimizer.step()
    optimizer.zero_grad()
    if observer:
        observer.instant("rest", named(model, optimizer))


def observed(*, recompute: bool, steps: int = 2) -> Observation:
    observer = Observer({})
    with observer.watching():
        model = Tiny(recompute=recompute)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        torch.zeros(10_000_000)
        for _ in range(steps - 1):
            step(model, optimizer, observer)
        with observer.observing():
            step(model, optimizer, observer)
        step(model, optimizer)
    return observer.result(3, "digest", [1.5])


@pytest.mark.parametrize("recompute", [False, True])
def test_all_watchers_in_one_pass_see_what_each_sees_alone(recompute: bool) -> None:
    observation = observed(recompute=recompute)
    model = Tiny(recompute=recompute)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    step(model, optimizer)
    counter, tracker = FlopCounter(), StorageTracker(Clock())
    with watching(counter):
        step(model, optimizer)
    tracker.adopt(value for _, _, value in named(model, optimizer))
    tracker.mark()
    with tracker.following_resizes(), watching(tracker):
        step(model, optimizer)
    reported = {line.id: line.amount for line in observation.reported}
    assert observation.flop == counter.flop
    assert reported["held/peak/allocated"] == tracker.peak_bytes


def test_the_observed_step_is_reported_with_its_instants() -> None:
    observation = observed(recompute=False)
    weights = sum(parameter.nbytes for parameter in Tiny().parameters())
    scalars = 4 * len(list(Tiny().parameters()))
    loss, backward, rest = observation.held
    assert [held.instant for held in observation.held] == ["loss", "backward", "rest"]
    assert rest.unclaimed == ()
    assert rest.total_bytes == 3 * weights + scalars
    assert backward.total_bytes == 4 * weights + scalars
    assert backward.unclaimed == ()
    saved, peak = observation.reported
    assert (saved.id, peak.id) == ("held/activations/saved for backward", "held/peak/allocated")
    assert saved.amount == loss.total_bytes - backward.total_bytes > 0
    assert peak.amount > backward.total_bytes
    assert (observation.rank, observation.digest, observation.losses) == (3, "digest", (1.5,))
    assert set(observation.phases_s) == {"step"}
    assert observation.calls == ()
    assert observation.torch_version == torch.__version__


def test_recomputing_saves_less_for_the_backward() -> None:
    plain, again = (observed(recompute=recompute).reported[0].amount for recompute in (False, True))
    assert again < plain / 2


def test_only_one_step_is_counted_however_many_are_run() -> None:
    two, four = observed(recompute=False, steps=2), observed(recompute=False, steps=4)
    assert two.flop == four.flop
    assert [held.total_bytes for held in two.held] == [held.total_bytes for held in four.held]


def test_nothing_of_pytorch_stays_changed() -> None:
    lock, resize = ShardingPropagator._fake_mode_lock, torch.UntypedStorage.resize_

    def fails() -> None:
        with Observer({}).watching():
            assert ShardingPropagator._fake_mode_lock is not lock
            assert torch.UntypedStorage.resize_ is not resize
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert ShardingPropagator._fake_mode_lock is lock
    assert torch.UntypedStorage.resize_ is resize
    with pytest.raises(AssertionError, match="inside watching"), Observer({}).observing():
        pass
