"""The text that a run learns from: prepared once, read without loading it, in an order that no layout changes.

Everything here but `source` works without torch, so that a run is checked before a process is started.
"""

from trainledger.runtime.data.check import check_data
from trainledger.runtime.data.order import Order
from trainledger.runtime.data.prepare import Prepared, prepare
from trainledger.runtime.data.token_file import TokenFile

__all__ = ["Order", "Prepared", "TokenFile", "check_data", "prepare"]
