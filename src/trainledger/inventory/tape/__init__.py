"""What a part of a model keeps and needs while it runs forward and backward: a program of operations, walked."""

from trainledger.inventory.tape.program import Op, Program, Value
from trainledger.inventory.tape.walk import Storage, Tape, walk

__all__ = ["Op", "Program", "Storage", "Tape", "Value", "walk"]
