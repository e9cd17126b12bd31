"""State-space mixers as Megatron runs them: projections by TransformerEngine, and functions of mamba_ssm between."""

from __future__ import annotations

from trainledger.facts.model import Ssm
from trainledger.inventory.blocks.megatron.modules import Modules
from trainledger.inventory.tape import Value

CHUNK = 128
"""Tokens that a scan takes at once. [megatron: core/ssm/mamba_mixer.py, chunk_size]"""


def mixer(modules: Modules, of: Ssm, x: Value) -> Value:
    """A Mamba-2 mixer, its norms included.

    Convolution, scan and gate are one function, which keeps what it reads and what the scan gave before the gate; the
    rest it makes again in its backward. The norm over what it gives is a function of its own, and keeps that.
    [mamba: mamba_ssm/ops/triton/ssd_combined.py MambaSplitConv1dScanCombinedFn, layernorm_gated.py LayerNormFn]
    """
    program, sizes = modules.program, modules.sizes
    inner, outer = of.heads * of.head_dim, 2 * of.groups * of.state
    mixed = sizes.cut(2 * inner + outer + of.heads, sizes.tp)
    wide = sizes.cut(inner, sizes.tp)
    projected = modules.normed_column("norm, input projection of the mixer", x, sizes.hidden_size, mixed)
    convolved, steps = sizes.cut(inner + outer, sizes.tp), sizes.cut(of.heads, sizes.tp, "fp32")
    products = sizes.cut(of.groups * CHUNK, sizes.tp, "fp32")
    states = sizes.cut(-(-inner * of.state // CHUNK), sizes.tp)
    scanned = program.op(
        "convolution, scan and gate",
        projected,
        wide,
        keeps=(projected,),
        made={"before the gate": wide},
        work=(convolved, 2 * steps, products, states),
        # both gradients of the convolution, of the gate, and of the states, which are in fp32 and then in 16 bits
        back_work=(2 * convolved, 3 * steps, products, wide, 2 * 2 * states, 2 * states),
    )
    statistics = {"statistics": sizes.cut(of.groups, sizes.tp, "fp32")}
    normed = program.op("norm of the mixer", scanned, wide, keeps=(scanned,), made=statistics)
    return modules.row("output projection of the mixer", normed, sizes.hidden_size)
