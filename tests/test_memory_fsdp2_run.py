"""FSDP2 in a run: what is asked for, on which stream, and in which order, on units of sizes that tell them apart."""

from __future__ import annotations

from collections.abc import Callable

from trainledger.account.memory.reserved.engines.fsdp2 import Fsdp2Run, Unit
from trainledger.account.memory.reserved.run import ALL_GATHER, COMPUTE, REDUCE, Layer, Requests
from trainledger.account.memory.reserved.script import script_of
from trainledger.inventory.tape import Program, walk


def part(key: int, gradient: int, *, loss: bool = False) -> Layer:
    program = Program()
    x = program.input("x", 1)
    y = program.op("matrix", x, 1, keeps=(x,), weights={"weight": gradient})
    return Layer(key=key, slots=(key,), script=script_of(walk(program, None if loss else y), 0, gradients=True))


def unit(size: int, **more: object) -> Unit:
    """Weights of two tensors in 16 bits on four ranks, reduced in 32."""
    sizes = {"weights": (size, size), "cast": size // 2, "alone": False, "widens": 2}
    return Unit(**{**sizes, "reduced": 4 * size, "shard": size, **more})  # type: ignore[arg-type]


class Seen:
    """A run of two parts and a loss, asked step by step."""

    def __init__(self, units: list[Unit], *, accumulate: bool = False) -> None:
        self.layers = [part(key, 20 * 10**key, loss=key == 2) for key in range(3)]
        self.requests = Requests()
        self.run = Fsdp2Run(self.requests, dict(enumerate((u,) for u in units)), accumulate=accumulate)
        self.sizes: dict[int, tuple[int, int]] = {}

    def during(self, action: Callable[[], None]) -> list[tuple[int, int]]:
        """(bytes, stream) of what an action asks for, bytes negative where it lets go, in order."""
        start = len(self.requests.events)
        action()
        found: list[tuple[int, int]] = []
        for op, name, nbytes, stream in self.requests.events[start:]:
            if op == "alloc":
                self.sizes[name] = (nbytes, stream)
                found.append((nbytes, stream))
            else:
                size, lies = self.sizes.pop(name)
                found.append((-size, lies))
        return found

    def gradients(self, key: int) -> list[int]:
        sizes = [nbytes for _, nbytes in self.layers[key].script.gradients]
        names = self.requests.alloc(sizes)
        self.sizes.update({name: (nbytes, COMPUTE) for name, nbytes in zip(names, sizes, strict=True)})
        return names

    def forward(self, key: int) -> list[tuple[int, int]]:
        layer = self.layers[key]
        return self.during(lambda: (self.run.before_forward(layer), self.run.after_forward(layer))[0])

    def start(self, key: int) -> list[tuple[int, int]]:
        return self.during(lambda: self.run.before_backward(self.layers[key]))

    def end(self, key: int, *, last: bool = True) -> list[tuple[int, int]]:
        names = self.gradients(key)
        return self.during(lambda: self.run.after_backward(self.layers[key], names, last=last))

    def close(self, *, last: bool = True) -> list[tuple[int, int]]:
        return self.during(lambda: self.run.end_of_backward(self.layers, last=last))


def test_forward_the_gathered_buffer_waits_for_the_next_copy() -> None:
    seen = Seen([unit(10), unit(100), unit(1000, kept=True)])
    first = [(5, ALL_GATHER), (20, ALL_GATHER), (-5, ALL_GATHER), (10, COMPUTE), (10, COMPUTE)]
    assert seen.forward(0) == [*first, (-10, COMPUTE), (-10, COMPUTE)]
    second = [(50, ALL_GATHER), (200, ALL_GATHER), (-50, ALL_GATHER), (100, COMPUTE), (100, COMPUTE), (-20, ALL_GATHER)]
    assert seen.forward(1) == [*second, (-100, COMPUTE), (-100, COMPUTE)]
    # kept for its backward; the loss comes when the model has let go of its own buffer
    assert seen.forward(2)[-4:] == [(1000, COMPUTE), (1000, COMPUTE), (-200, ALL_GATHER), (-2000, ALL_GATHER)]
    assert seen.during(seen.run.end_of_forward) == []


def through_forward(units: list[Unit], *, accumulate: bool = False) -> Seen:
    seen = Seen(units, accumulate=accumulate)
    for key in range(3):
        seen.forward(key)
    seen.during(seen.run.end_of_forward)
    return seen


def test_backward_the_unit_before_is_gathered_and_each_reduction_lets_go_of_the_one_before() -> None:
    seen = through_forward([unit(10, at_end=True), unit(100), unit(1000, kept=True)])
    # the logits have their gradient first
    assert seen.start(2) == []
    gathers = [(50, ALL_GATHER), (200, ALL_GATHER), (-50, ALL_GATHER)]
    reduces = [(-1000, COMPUTE), (-1000, COMPUTE), (4000, COMPUTE), (-2000, COMPUTE), (1000, REDUCE)]
    assert seen.end(2) == [*gathers, *reduces]
    copies = [(100, COMPUTE), (100, COMPUTE), (-200, ALL_GATHER)]
    assert seen.start(1) == [*copies, (5, ALL_GATHER), (20, ALL_GATHER), (-5, ALL_GATHER)]
    reduces = [(-100, COMPUTE), (-100, COMPUTE), (-4000, COMPUTE), (400, COMPUTE), (-200, COMPUTE), (100, REDUCE)]
    assert seen.end(1) == reduces
    seen.start(0)
    # tokens need no gradient, so the end of the whole backward sees to it
    assert seen.end(0) == []
    reduces = [(-10, COMPUTE), (-10, COMPUTE), (-400, COMPUTE), (40, COMPUTE), (-20, COMPUTE), (10, REDUCE)]
    assert seen.close() == [*reduces, (-40, COMPUTE)]
    # in the order in which they were made
    assert seen.during(seen.run.end_of_step) == [(-1000, REDUCE), (-100, REDUCE), (-10, REDUCE)]


def test_a_second_micro_batch_adds_to_the_shard_that_is_there() -> None:
    seen = through_forward([unit(10), unit(100), unit(1000)])
    asked: list[tuple[int, int]] = []
    for _ in range(2):
        for key in (2, 1, 0):
            seen.start(key)
            asked = seen.end(key)
        seen.close()
        for key in range(3):
            seen.forward(key)
        seen.during(seen.run.end_of_forward)
    assert asked[-2:] == [(10, REDUCE), (-10, REDUCE)]
    assert sorted(size for size, stream in seen.sizes.values() if stream == REDUCE) == [10, 100, 1000]


def test_ends_that_are_one_unit_hold_the_output_layers_gradient_until_the_end() -> None:
    root = unit(10, kept=True, at_end=True)
    seen = through_forward([root, unit(100), root])
    assert sorted(seen.sizes.values()) == [(10, COMPUTE), (10, COMPUTE)]
    seen.start(2)
    assert seen.end(2) == [(50, ALL_GATHER), (200, ALL_GATHER), (-50, ALL_GATHER)]
    seen.start(1)
    seen.end(1)
    assert seen.start(0) == []
    seen.end(0)
    gradients = [(-2000, COMPUTE), (-20, COMPUTE)]
    reduced = [(-10, COMPUTE), (-10, COMPUTE), (-400, COMPUTE), (40, COMPUTE), *gradients, (10, REDUCE), (-40, COMPUTE)]
    assert seen.close() == reduced


def test_a_table_that_both_ends_share_has_one_gradient() -> None:
    root = unit(10, kept=True, at_end=True, tied=True)
    seen = through_forward([root, unit(100), root])
    seen.start(2)
    seen.end(2)
    seen.start(0)
    assert seen.end(0) == [(-20, COMPUTE)]


def test_in_a_pipeline_weights_stay_and_gradients_add_up_in_the_dtype_of_reductions() -> None:
    seen = through_forward([unit(10), unit(100), unit(1000)], accumulate=True)
    seen.start(2)
    assert seen.end(2, last=False) == [(4000, COMPUTE), (-2000, COMPUTE)]
    assert seen.close(last=False) == []
    assert seen.forward(2) == []
    seen.start(2)
    assert seen.end(2) == [(-2000, COMPUTE)]
    assert seen.close()[:5] == [(-1000, COMPUTE), (-1000, COMPUTE), (4000, COMPUTE), (-4000, COMPUTE), (1000, REDUCE)]


def test_a_rank_alone_copies_and_gathers_nothing() -> None:
    seen = Seen([unit(10, alone=True), unit(100, alone=True), unit(1000, alone=True)])
    assert {stream for key in range(3) for _, stream in seen.forward(key)} == {COMPUTE}


def test_gradients_of_another_dtype_than_reductions_are_cast() -> None:
    seen = through_forward([unit(10), unit(100), unit(1000, cast_shard=500)])
    seen.start(2)
    assert seen.end(2)[-3:] == [(1000, REDUCE), (500, REDUCE), (-1000, REDUCE)]
