"""The peak of a rank's memory: places of the step, and what each meter reads of it."""

from trainledger.account.memory.stage import Place, StageMemory, stage_memory

__all__ = ["Place", "StageMemory", "stage_memory"]
