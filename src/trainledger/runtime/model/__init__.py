"""The decoder models of the training program, built from the facts that the ledger counts."""

from trainledger.runtime.model.block import Block
from trainledger.runtime.model.decoder import Decoder, build_decoder
from trainledger.runtime.model.initialise import init_weights
from trainledger.runtime.model.weights import decoder_tensors, load_safetensors, save_safetensors

__all__ = [
    "Block",
    "Decoder",
    "build_decoder",
    "decoder_tensors",
    "init_weights",
    "load_safetensors",
    "save_safetensors",
]
