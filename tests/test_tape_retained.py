"""Backwards in two parts: what the first leaves for the second, and what the second lets go of."""

from trainledger.inventory.tape import Program, Split, retained, walk


def network(program: Program) -> Split:
    x = program.input("x", 2)
    up = program.op("up", x, 8, keeps=(x,), weights={"up.weight": 5})
    act = program.op("act", up, 8, keeps=(up,))
    return retained(program, program.op("down", act, 2, keeps=(act,), weights={"down.weight": 7}))


def size(split: Split, storages: tuple[int, ...]) -> int:
    return int(split.tape.bytes[list(storages), 0].sum())


def test_what_is_kept_stays_and_so_does_the_gradient_that_reaches_an_operation_with_weights() -> None:
    split = network(Program())
    # x, up, act; the gradients of the results of down and up
    assert size(split, split.stays) == 2 + 8 + 8 + 2 + 8
    assert split.tape.handed.tolist() == [2]
    # at the end of the backward the gradient of act too, which reached no weight, has come and gone
    assert split.tape.peak("backward")[0].tolist() == [18 + 2 + 8 + 8]


def test_no_gradient_of_a_weight_is_there_before_the_second_part() -> None:
    split = network(Program())
    assert split.tape.weight_gradients.max() == 0
    assert [(one.name, one.gradients) for one in split.later] == [("up", (5,)), ("down", (7,))]


def test_each_gradient_lets_go_of_what_nothing_else_waits_for() -> None:
    split = network(Program())
    # of up its input and what reached it; its result waits for the activation, which runs no second part
    assert [size(split, one.frees) for one in split.later] == [2 + 8, 8 + 2]


def test_what_two_weights_multiply_goes_with_the_second() -> None:
    program = Program()
    x = program.input("x", 4)
    left = program.op("left", x, 1, keeps=(x,), weights={"left": 1})
    right = program.op("right", x, 1, keeps=(x,), weights={"right": 1})
    split = retained(program, program.op("sum", (left, right), 1, passes=True))
    # the gradient of the sum is one tensor for both
    assert [size(split, one.frees) for one in split.later] == [0, 4 + 1]


def test_a_whole_backward_of_the_same_program_leaves_nothing() -> None:
    program = Program()
    x = program.input("x", 2)
    y = program.op("up", x, 8, keeps=(x,), weights={"up.weight": 5})
    tape = walk(program, y)
    assert max(storage.last for storage in tape.storages) < len(tape.instants)
