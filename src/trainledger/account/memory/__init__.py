"""The peak of a rank's memory: places of the step, and what each meter reads of it."""

from trainledger.account.memory.active import Place
from trainledger.account.memory.beside import Beside, beside
from trainledger.account.memory.meters import METERS, Alive, Memory, Meter, alive_at, device_bytes, memory_of
from trainledger.account.memory.stage import StageMemory, stage_memory

__all__ = [
    "METERS",
    "Alive",
    "Beside",
    "Memory",
    "Meter",
    "Place",
    "StageMemory",
    "alive_at",
    "beside",
    "device_bytes",
    "memory_of",
    "stage_memory",
]
