"""Programs walked by hand: what is alive at which instant, and what is kept in between."""

import numpy as np
import pytest

from trainledger.inventory.tape import Program, Tape, Value, walk


def network(program: Program, x: Value) -> Value:
    normed = program.op("norm", x, 2, keeps=(x,), made={"rstd": 1})
    up = program.op("up", normed, 8, keeps=(normed,), weights={"up.weight": 5})
    act = program.op("act", up, 8, keeps=(up,))
    down = program.op("down", act, 2, keeps=(act,), weights={"down.weight": 7})
    return program.op("add", (x, down), 2, passes=True)


def plain() -> Tape:
    program = Program()
    return walk(program, network(program, program.input("x", 2)))


def recomputed(*, early_stop: bool) -> Tape:
    program = Program()
    x = program.input("x", 2)
    with program.recomputed(early_stop=early_stop):
        y = network(program, x)
    return walk(program, y)


def summed(**how: bool) -> Tape:
    """A region whose last operation keeps nothing, and has a gradient four times as large as its result."""
    program = Program()
    x = program.input("x", 2)
    with program.recomputed(**how):
        down = program.op("down", x, 8, keeps=(x,))
        out = program.op("sum over ranks", down, 2)
    return walk(program, out)


def at(tape: Tape, phase: str, name: str) -> int:
    return int(tape.totals[tape.instants.index((phase, name)), 0])  # type: ignore[arg-type]


def test_a_tensor_that_two_operations_keep_is_kept_once() -> None:
    assert plain().saved.tolist() == [2 + 1 + 2 + 8 + 8]


def test_backward_holds_what_is_kept_and_the_gradients_on_their_way() -> None:
    tape = plain()
    # x 2, rstd 1, normed 2, up 8, act 8; the gradient that waits at the residual 2, that of act 8
    assert at(tape, "backward", "down") == 21 + 2 + 8
    # act is gone; up and its gradient are there
    assert at(tape, "backward", "act") == 13 + 2 + 8 + 8
    # at the end x, rstd, the gradient of normed, and both gradients of x before they are one
    assert at(tape, "backward", "norm") == 3 + 2 + 2 + 2
    assert tape.handed.tolist() == [2]


def test_a_tape_knows_what_it_hands_on_and_what_comes_back_for_it() -> None:
    tape = plain()
    handed_on, back = tape.storages[tape.output], tape.storages[tape.returned]
    assert (handed_on.name, handed_on.last, back.name, back.born) == ("add", 4, "gradient of the output", 5)
    program = Program()
    x = program.input("x", 4)
    program.op("loss", x, 0, keeps=(x,))
    loss = walk(program, None)
    assert (loss.output, loss.returned) == (-1, -1)


def test_gradients_of_weights_stay_beside_the_rest_until_the_part_has_run() -> None:
    tape = plain()
    assert tape.weight_gradients[-1].tolist() == [12]
    assert tape.peak("backward", weights=True)[0].tolist() == [31 + 7]


def test_a_region_keeps_its_input_and_runs_again() -> None:
    tape = recomputed(early_stop=False)
    assert tape.saved.tolist() == [2]
    phases = [phase for phase, _ in tape.instants]
    assert phases.count("again") == 5
    assert tape.peak("backward")[0].tolist() == [31]


def test_an_early_stop_runs_no_operation_of_which_nothing_is_kept() -> None:
    again = [name for phase, name in recomputed(early_stop=True).instants if phase == "again"]
    assert again == ["norm", "up", "act", "down"]


def test_what_is_pinned_is_kept_through_a_region_and_not_made_again() -> None:
    program = Program()
    x = program.input("x", 2)
    with program.recomputed():
        up = program.op("up", x, 8, keeps=(x,), pinned=True)
        act = program.op("act", up, 8, keeps=(up,))
        down = program.op("down", act, 2, keeps=(act,))
    tape = walk(program, down)
    assert tape.saved.tolist() == [2 + 8]
    # running again makes the activation alone: up is there
    assert at(tape, "again", "act") == 2 + 8 + 8 + 2


def test_an_early_stop_comes_before_the_last_operation_computes() -> None:
    # x, and again its norm with rstd, up and act; down's own result is not made, and waits as a gradient only
    assert at(recomputed(early_stop=True), "again", "down") == 2 + 1 + 2 + 8 + 8 + 2
    assert at(recomputed(early_stop=False), "again", "down") == 2 + 1 + 2 + 8 + 8 + 2 + 2


def test_what_hooks_ask_for_is_made_again_as_the_first_backward_reads_it() -> None:
    for how in ({"early_stop": False, "asked": True}, {"early_stop": True}):
        order = [step for step in summed(**how).instants if step[0] != "forward"]
        assert order.index(("backward", "sum over ranks")) < order.index(("again", "down"))
    # x, what is computed again, and the gradient of it that is there already; what the sum gives
    assert at(summed(early_stop=False, asked=True), "again", "sum over ranks") == 2 + 8 + 8 + 2
    # a function around the region runs it before any backward of it: the gradient of its result alone is there
    assert at(summed(early_stop=False), "again", "sum over ranks") == 2 + 8 + 2 + 2


def lazy() -> Tape:
    program = Program()
    x = program.input("x", 2)
    with program.recomputed(lazy=True):
        normed = program.op("norm", x, 2, keeps=(x,), made={"rstd": 1})
        mixed = program.op("mixed", normed, 16, keeps=(normed,), pinned=True)
        out = program.op("attention", mixed, 4, keeps=(mixed,), keeps_output=True, made={"sums": 3}, pinned=True)
        up = program.op("up", out, 8, keeps=(out,))
        act = program.op("act", up, 8, keeps=(up,))
        down = program.op("down", act, 2, keeps=(act,))
    return walk(program, down)


def test_a_lazy_region_makes_again_what_the_next_backward_needs() -> None:
    phases = [entry for entry in lazy().instants if entry[0] != "forward"]
    assert phases == [
        ("again", "up"),
        ("again", "act"),
        ("backward", "down"),
        ("backward", "act"),
        ("backward", "up"),
        ("backward", "attention"),
        ("again", "norm"),
        ("backward", "mixed"),
        ("backward", "norm"),
    ]


def test_what_a_pinned_operation_makes_waits_with_its_outputs() -> None:
    tape = lazy()
    assert tape.saved.tolist() == [2 + 16 + 4 + 3]
    # up and act are made again beside all that is kept, and the norm only when they are gone
    assert at(tape, "backward", "down") == 25 + 8 + 8 + 2 + 8
    assert at(tape, "backward", "mixed") == 2 + 2 + 1 + 16 + 2


def test_a_compiler_drops_what_is_pinned_and_read_by_no_backward() -> None:
    def saved(*, lazy: bool) -> list[int]:
        program = Program()
        x = program.input("x", 2)
        with program.recomputed(lazy=lazy):
            up = program.op("up", x, 8, keeps=(x,), pinned=True)
            act = program.op("act", up, 8, keeps=(up,))
            down = program.op("down", act, 32, keeps=(act,), pinned=True)
            out = program.op("add", (x, down), 32, passes=True)
        return walk(program, out).saved.tolist()

    assert (saved(lazy=True), saved(lazy=False)) == ([2 + 8], [2 + 8 + 32])


def test_a_view_takes_no_room_and_keeps_its_whole_storage() -> None:
    program = Program()
    x = program.input("x", 4)
    mixed = program.op("mixed", x, 12, keeps=(x,))
    query, _ = program.split("split", mixed, {"q": 4, "rest": 8})
    out = program.op("attention", query, 4, keeps=(query,))
    tape = walk(program, out)
    assert tape.saved.tolist() == [4 + 12]
    # the backward of the split makes the gradient of all three parts, that of q still there
    assert at(tape, "backward", "split") == 4 + 4 + 12


def test_a_gradient_may_be_written_over_what_was_kept() -> None:
    program = Program()
    x = program.input("x", 4)
    logits = program.op("logits", x, 100, keeps=(x,))
    program.op("loss", logits, 0, keeps=(logits,), grad_into=logits)
    tape = walk(program, None)
    assert tape.peak("backward")[0].tolist() == [4 + 100 + 4]


def test_a_kernel_that_gives_two_gradients_writes_one_over_what_it_read() -> None:
    def product(*, first_over: bool) -> Tape:
        program = Program()
        x = program.input("x", 4)
        left = program.op("left", x, 10, keeps=(x,))
        right = program.op("right", x, 10, keeps=(x,))
        out = program.op("product", (left, right), 10, keeps=(left, right), first_over=first_over)
        return walk(program, out)

    # both factors, the gradient that comes, and two more; or one of the two in its place
    assert at(product(first_over=False), "backward", "product") == 4 + 20 + 10 + 20
    assert at(product(first_over=True), "backward", "product") == 4 + 20 + 10 + 10


def test_a_local_variable_holds_its_tensor_until_its_function_returns() -> None:
    program = Program()
    x = program.input("x", 4, differentiable=False)
    up = program.op("up", x, 8)
    program.hold(up)
    act = program.op("act", up, 8)
    out = program.op("down", act, 4)
    program.drop(up)
    assert at(walk(program, out), "forward", "down") == 8 + 8 + 4


def test_sizes_are_arrays_over_plans() -> None:
    program = Program()
    x = program.input("x", np.array([2, 4]))
    y = program.op("square", x, np.array([2, 4]), keeps=(x,), back_work=1)
    tape = walk(program, y)
    assert tape.saved.tolist() == [2, 4]
    assert tape.peak("backward")[0].tolist() == [2 + 2 + 2 + 1, 4 + 4 + 4 + 1]


def test_regions_do_not_nest() -> None:
    program = Program()
    with program.recomputed(), pytest.raises(AssertionError, match="inside another"), program.recomputed():
        pass


def test_what_is_alive_is_named_largest_first() -> None:
    tape = plain()
    where = tape.instants.index(("backward", "act"))
    assert [name for name, _, _ in tape.at(where)][:3] == ["up", "gradient of act", "gradient of up"]


def test_gradients_that_meet_are_added_into_a_new_tensor_once_the_second_is_there() -> None:
    program = Program()
    x = program.input("x", 4)
    wide = program.op("up", x, 32, keeps=(x,))
    other = program.op("side", x, 4, keeps=(x,))
    tape = walk(program, program.op("out", (wide, other), 4), anew=True)
    # the backward of up: x, the gradient of its result, both gradients of x; then the sum, and nothing of up's
    assert at(tape, "backward", "up") == 4 + 32 + 4 + 4
    assert at(tape, "sum", "up: gradients added") == 4 + 4 + 4
    assert tape.handed.tolist() == [4]


def test_a_discarded_result_is_made_again_before_the_first_backward_that_reads_it() -> None:
    program = Program()
    x = program.input("x", 2)
    up = program.op("up", x, 8, keeps=(x,))
    with program.recomputed(discarded=True):
        act = program.op("act", up, 16, keeps=(up,), made={"mask": 4})
    down = program.op("down", act, 2, keeps=(act,))
    tape = walk(program, program.op("end", down, 2, keeps=(down,)))
    # act and its mask are gone between forward and backward
    assert tape.saved.tolist() == [2 + 8 + 2]
    order = [name for phase, name in tape.instants if phase != "forward"]
    assert order == ["end", "act", "down", "act", "up"]
    # x, up, what is made again, and the gradients of down and of act
    assert at(tape, "backward", "down") == 2 + 8 + 16 + 4 + 2 + 16
    assert at(tape, "backward", "up") == 2 + 8 + 2


def test_what_a_region_reads_may_be_discarded_and_is_there_before_the_region_runs_again() -> None:
    program = Program()
    x = program.input("x", 2)
    with program.recomputed(discarded=True):
        normed = program.op("norm", x, 16, keeps=(x,))
    with program.recomputed(early_stop=False):
        up = program.op("up", normed, 8, keeps=(normed,))
        down = program.op("down", up, 2, keeps=(up,))
    tape = walk(program, down)
    assert tape.saved.tolist() == [2]
    assert [name for phase, name in tape.instants if phase == "again"] == ["norm", "up", "down"]
    assert at(tape, "backward", "up") == 2 + 16 + 8 + 16


def test_products_that_are_put_off_keep_their_factors() -> None:
    program = Program()
    x = program.input("x", 2)
    normed = program.op("norm", x, 2, keeps=(x,))
    up = program.op("up", normed, 8, keeps=(normed,), product=True)
    gate = program.op("gate", normed, 4, keeps=(normed,), product=True)
    tape = walk(program, program.op("down", (up, gate), 2, keeps=(up, gate), product=True))
    # normed once, up, and the gradients of up, gate and down
    assert tape.put_off.tolist() == [2 + 8 + 8 + 4 + 2]
    assert plain().put_off.tolist() == plain().saved.tolist()


def test_where_products_are_put_off_their_factors_stay_through_the_backward() -> None:
    program = Program(puts_off=True)
    x = program.input("x", 2)
    up = program.op("up", x, 8, keeps=(x,), product=True)
    act = program.op("act", up, 16, keeps=(up,))
    tape = walk(program, program.op("down", act, 2, keeps=(act,), product=True))
    # x, act, the gradients of up and down, and that of x; up and the gradient of act are gone
    assert at(tape, "backward", "up") == 2 + 16 + 8 + 2 + 2
    assert tape.put_off.tolist() == [2 + 16 + 8 + 2]


def test_a_local_variable_holds_its_tensor_in_a_second_run_too() -> None:
    program = Program()
    x = program.input("x", 4)
    with program.recomputed(early_stop=False):
        up = program.op("up", x, 8)
        program.hold(up)
        act = program.op("act", up, 16)
        out = program.op("down", act, 4, keeps=(act,))
        program.drop(up)
        out = program.op("add", out, 4)
    tape = walk(program, out)
    assert at(tape, "again", "down") == 4 + 4 + 8 + 16 + 4
    assert at(tape, "again", "add") == 4 + 4 + 16 + 4 + 4


def scaled(size: int, *, work: int = 0, held: bool = False, differentiable: bool = True) -> Tape:
    program = Program()
    x = program.input("x", size, differentiable=differentiable)
    up = program.op("up", x, 4 * size, keeps=(x,), work=work)
    if held:
        program.hold(up, through_backward=True)
    return walk(program, program.op("down", up, size))


def test_programs_that_differ_in_sizes_alone_are_walked_once_and_keep_their_own_sizes() -> None:
    small, large = scaled(2), scaled(3)
    assert small.lifetimes is large.lifetimes
    assert (small.saved * 3).tolist() == (large.saved * 2).tolist()
    assert [storage.nbytes for storage in large.storages] != [storage.nbytes for storage in small.storages]


@pytest.mark.parametrize("other", [scaled(2, work=1), scaled(2, held=True), scaled(2, differentiable=False)])
def test_programs_that_differ_in_anything_else_are_walked_apart(other: Tape) -> None:
    assert other.lifetimes is not scaled(2).lifetimes
    assert other.totals.tolist() != scaled(2).totals.tolist()
