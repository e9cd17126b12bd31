"""Parts of a model one after the other, forward and backward, with what data parallelism does in between."""

from __future__ import annotations

from collections.abc import Sequence

from trainledger.account.memory.rank.piece import Piece
from trainledger.account.memory.rank.tally import Tally
from trainledger.account.memory.rank.units import DataParallel


def run_forward(tally: Tally, data: DataParallel, pieces: Sequence[Piece]) -> None:
    """Each piece in turn; what it keeps stays, and what it gives waits for the next to begin."""
    given = 0
    for piece in pieces:
        with tally.during(f"what {piece.label} is given", given):
            if piece.unit is None:
                data.turn()
            elif piece.opens:
                data.enter(piece.unit)
        before = 0
        for stretch in piece.forward():
            if stretch.within is not None:
                with tally.during(f"before the experts of {piece.label}", before):
                    data.enter(stretch.within)
            tally.reach(f"{piece.label}, forward", stretch.most)
            before = stretch.ends
            if stretch.within is not None:
                with tally.during(f"after the experts of {piece.label}", before):
                    data.leave(stretch.within)
        tally.add(f"{piece.label}, kept", piece.saved)
        if piece.unit is not None and piece.closes:
            data.leave(piece.unit)
        given = piece.given
    data.turn()


def run_backward(tally: Tally, data: DataParallel, pieces: Sequence[Piece]) -> None:
    """Each piece in reverse; what it kept goes, and the gradient that it hands on waits for the next to begin."""
    handed = 0
    for piece in reversed(pieces):
        with tally.during(f"gradient for {piece.label}", handed):
            if piece.unit is not None and piece.closes:
                data.start(piece.unit)
        tally.drop(piece.saved)
        _backward(tally, data, piece)
        handed = piece.handed
        with tally.during(f"gradient of {piece.label}", handed):
            if piece.unit is not None:
                data.give(piece.unit, awaits=piece.awaits, joins=piece.joins)
                if not piece.awaits:
                    data.hand_over(piece.unit)


def _backward(tally: Tally, data: DataParallel, piece: Piece) -> None:
    """The operations of one piece, its experts' unit gathered and reduced around theirs."""
    added = piece.unit is not None and data.accumulates(piece.unit) and not piece.awaits
    within = piece.inner is not None and data.accumulates(piece.inner)
    before = piece.saved
    for stretch in piece.backward(added=added, added_within=within):
        if stretch.within is not None:
            with tally.during(f"before the experts of {piece.label}", before):
                (data.again if stretch.again else data.start)(stretch.within)
        tally.reach(f"{piece.label}, backward", stretch.most)
        before = stretch.ends
        if stretch.within is not None and not stretch.again:
            with tally.during(f"after the experts of {piece.label}", before):
                data.give(stretch.within)
                data.hand_over(stretch.within)


def run_for_inputs(tally: Tally, data: DataParallel, pieces: Sequence[Piece]) -> int:
    """A backward for inputs alone; bytes that it leaves for the gradients of weights. A loss leaves nothing."""
    handed = left = 0
    for piece in reversed(pieces):
        most, stays = piece.for_inputs
        with tally.during(f"gradient for {piece.label}", handed):
            if piece.unit is not None and piece.closes:
                data.start(piece.unit)
        tally.drop(piece.saved)
        tally.reach(f"{piece.label}, backward for its input", most)
        tally.add(f"{piece.label}, kept for its weights", stays)
        handed = piece.handed
        left += stays if piece.unit is not None else 0
    tally.drop(sum(piece.for_inputs[1] for piece in pieces if piece.unit is None))
    return left


def run_for_weights(tally: Tally, data: DataParallel, pieces: Sequence[Piece], left: int) -> None:
    """The gradients of weights that such a backward has left, one operation after the other, then the rest goes."""
    for piece in pieces:
        before = fresh = 0
        for unit, given, freed in piece.for_weights:
            added = unit is not None and data.accumulates(unit)
            tally.reach(f"{piece.label}, gradients of weights", before + given)
            if not added:
                tally.add(f"{piece.label}, gradients of weights", given)
                fresh += given
            tally.drop(freed)
            left -= freed
            before = given if added else 0
        tally.drop(fresh)
        for unit in piece.all_units:
            data.give(unit, awaits=piece.awaits)
    tally.drop(left)
    for piece in pieces:
        for unit in piece.all_units:
            data.hand_over(unit)
