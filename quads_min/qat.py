"""The trainer's side: fake-quantized experts with a straight-through backward.

*Asymmetric* here means that the two sides quantize differently. The engine must quantize weights
and activations (W4A4), or its FP4 tensor cores idle. The trainer quantizes weights alone:

- Weights are copied. After a sync both sides quantize the same tensor by the same function (or its
  twin in kernels.py, which gives equal bits) and multiply identical numbers: no mismatch, and
  training learns around the error.
- Activations are recomputed on each side, from inputs that already differ a little; two on either
  side of a rounding threshold come out a whole E2M1 step apart. So, the paper argues, quantizing
  them in the trainer too (mode `sym`) adds this error on a second side instead of cancelling the
  first one's. In this toy the inputs differ so little that it does cancel most of it, and `sym`
  fails by not learning (README, C4).

With V = W / o (o: the planted outliers, model.py), rounded to bf16, and Q, DQ of nvfp4.py, one
GEMM of the trainer is

    forward    V^ = DQ(Q(V)),  y = x (V^)^T                      product of exact planes, then g
    backward   dL/dV = dL/dV^ = (dL/dy)^T x,  dL/dx = dL/dy V^   straight through: Q is skipped
                                          (x: as multiplied, so DQ(Q(x)) in sym)

hence dL/dW = dL/dV^ / o, by autograd through W / o. Every element passes its gradient, the block's
maximum included. Next: modes.py, the table that picks the formats.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from quads_min import model, nvfp4
from quads_min.model import Routing, from_tiles, to_tiles
from quads_min.modes import Arithmetic


class Operand(NamedTuple):
    """One GEMM input as plane * scale: a plane exact in bf16, a scale applied to the fp32 sum."""

    plane: torch.Tensor  # x: (rows, K); w: (E, N, K); fp32
    scale: torch.Tensor | None  # x: (rows, 1); w: (E, 1, 1) or (E, N, 1); fp32; None: 1

    def value(self) -> torch.Tensor:
        """x^ as the GEMM has it, (value * s_b) * g: `dequantize`, but for the last bit."""
        return self.plane if self.scale is None else self.plane * self.scale


def encode_operand(x: torch.Tensor, fmt: str, outer: str = "row") -> Operand:
    """x, rounded to bf16, in format `fmt`: what a GEMM of either side multiplies. Detached.

    Activations (rows, K) are encoded by row (and without RAC), weights V (E, N, K) by "tensor".
    """
    x = x.detach().to(torch.bfloat16)
    if fmt == "bf16":
        return Operand(x.float(), None)
    if fmt == "fp8":
        plane, scale = nvfp4.encode_fp8(x)
        return Operand(plane.float(), scale)
    encoded = nvfp4.encode(x, outer)
    return Operand(encoded.planes(), encoded.global_scale)


def grouped_matmul(x: Operand, w: Operand, routing: Routing, residual: torch.Tensor | None = None):
    """y[slot] = x[slot's row] @ w[slot's expert]^T for all experts at once: (slots, N) fp32.

    Products of planes are exact in fp32; the scales are applied to their sum. `residual`: plane
    (rows, K) of RAC's second packet, under x's scale, so its product joins the same sum.
    """
    weight = w.plane.index_select(0, routing.expert_of_tile).mT  # (tiles, K, N)
    y = torch.bmm(to_tiles(x.plane, routing), weight)
    if residual is not None:
        y = torch.baddbmm(y, to_tiles(residual, routing), weight)
    if w.scale is not None:
        y = y * w.scale[routing.expert_of_tile].mT
    y = from_tiles(y, routing)
    if x.scale is not None:
        y = y * x.scale.repeat_interleave(routing.slots_per_row(x.plane), 0, output_size=len(y))
    return y


class StraightThroughMatmul(torch.autograd.Function):
    """grouped_matmul of quantized operands whose gradient goes to what they were quantized from."""

    @staticmethod
    def forward(ctx, x, v, x_hat: Operand, v_hat: Operand, routing: Routing):
        """x (rows, K), v (E, N, K): only their gradients matter. Returns (slots, N) fp32."""
        ctx.x_hat, ctx.v_hat, ctx.routing, ctx.dtype = x_hat, v_hat, routing, x.dtype
        return grouped_matmul(x_hat, v_hat, routing)

    @staticmethod
    def backward(ctx, dy):
        x_hat, routing = ctx.x_hat.value(), ctx.routing
        dy = to_tiles(dy, routing)  # (tiles, tile_rows, N); empty rows are zero
        dv = model.sum_per_expert(dy.mT @ to_tiles(x_hat, routing), routing)
        weight = ctx.v_hat.value().index_select(0, routing.expert_of_tile)  # (tiles, N, K)
        dx = from_tiles(dy @ weight, routing).unflatten(0, (-1, routing.slots_per_row(x_hat)))
        return dx.sum(1).to(ctx.dtype), dv, None, None, None  # a row's slots added up


class FakeQuantExperts(model.ExpertLinear):
    """The trainer's expert matmul: fp32 master weights, quantized on the way into each product."""

    def __init__(self, experts, n, k, outliers, arithmetic: Arithmetic):
        super().__init__(experts, n, k, outliers)
        self.arithmetic = arithmetic
        self.weight = nn.Parameter(torch.randn(experts, n, k) * k**-0.5)
        self.consumed: Operand | None = None  # the weights of the latest product, for train.py

    def scaled_weight(self) -> torch.Tensor:
        """V = W / o, (E, N, K): what is quantized, here and in the engine."""
        return self.weight if self.outliers is None else self.weight / self.outliers

    def product(self, x: torch.Tensor, routing: Routing, live: torch.Tensor | None) -> torch.Tensor:
        v = self.scaled_weight()
        self.consumed = encode_operand(v, self.arithmetic.weights, "tensor")
        x_hat = encode_operand(x, self.arithmetic.activations)
        return StraightThroughMatmul.apply(x, v, x_hat, self.consumed, routing)


def make_policy(config: model.ModelConfig, arithmetic: Arithmetic) -> model.MoETransformer:
    """The trainer's model: fp32 master weights and residual stream, experts in `arithmetic`."""
    if arithmetic.rac_ratio:
        raise ValueError(f"RAC is the engine's part; the trainer cannot run {arithmetic}")
    return model.MoETransformer(config, partial(FakeQuantExperts, arithmetic=arithmetic))
