"""What a part of a model keeps and needs while it runs forward and backward: a program of operations, walked."""

from trainledger.inventory.tape.nested import nested
from trainledger.inventory.tape.program import Bytes, Op, Program, Value
from trainledger.inventory.tape.retained import Later, Split, retained
from trainledger.inventory.tape.tape import Storage, Tape
from trainledger.inventory.tape.walk import walk

__all__ = ["Bytes", "Later", "Op", "Program", "Split", "Storage", "Tape", "Value", "nested", "retained", "walk"]
