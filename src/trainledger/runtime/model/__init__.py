"""The decoder models of the training program, built from the facts that the ledger counts."""

from trainledger.runtime.model.block import Block
from trainledger.runtime.model.decoder import Decoder, build_decoder
from trainledger.runtime.model.initialise import init_weights

__all__ = ["Block", "Decoder", "build_decoder", "init_weights"]
