"""What the program cannot do on the card that a plan names: asked before ranks are started by torchrun.

Ranks that are forked compute on the CPU, whatever card a plan is for.
"""

from __future__ import annotations

from trainledger.plans.plan import Plans
from trainledger.plans.setting import Setting
from trainledger.rules.rule import Mask, Rule


def _no_flash(setting: Setting, plans: Plans) -> Mask | bool:
    """A ring sends keys to flash kernels, and on a card there is none in fp32."""
    return (plans.cp > 1) & (setting.accelerator is not None and setting.scenario.precision == "fp32")


def _no_flash_sentence(setting: Setting, row: dict[str, int]) -> str:
    card = setting.accelerator.name if setting.accelerator is not None else "a card"
    return f"cp={row['cp']} on {card} runs on flash kernels, which have no fp32 on CUDA; use --precision bf16"


RULES: tuple[Rule, ...] = (
    Rule(
        id="cp-flash",
        severity="refuse",
        scope="runtime",
        source="PyTorch ATen/native/transformers/cuda/sdp_utils.cpp at 2.13.0: flash attention takes fp16 and bf16",
        broken=_no_flash,
        sentence=_no_flash_sentence,
    ),
)
