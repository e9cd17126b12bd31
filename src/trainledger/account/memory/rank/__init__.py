"""What one rank of PyTorch's program has alive as its step goes on."""

from trainledger.account.memory.rank.step import Alive, RankStep

__all__ = ["Alive", "RankStep"]
