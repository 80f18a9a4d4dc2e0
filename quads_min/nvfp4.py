"""NVFP4 in plain torch: the arithmetic on which rollout engine and trainer agree, bit for bit.

NVFP4 stores a number in 4 bits (E2M1: 0 .5 1 1.5 2 3 4 6 and a sign) under two scales: one E4M3
byte per 16 values, and one fp32 number per row (activations: one per token) or per matrix
(weights). With S the encode scale of the row or matrix, all arithmetic in fp32, round to nearest,
ties to even:

    amax = max |x|                                    over the row, or the matrix
    S    = min(2688 / amax, FLT_MAX)                  1 if amax = 0;  2688 = 6 * 448
    g    = 1 / S                                      stored as `global_scale`
    s_b  = E4M3(min(bmax * (S * (1/6)), 448))         bmax = max |x| in the 16-block; `scale`
    enc  = min(1 / (s_b * g), FLT_MAX)
    code = E2M1(clamp(x * enc, -6, 6))                a block with s_b = 0 stores code 0
    x^   = value(code) * (s_b * g)

Why 6 and 448: they are the largest E2M1 and E4M3 values. The largest value of the row then lands on
6 * 448 * g exactly, and every block scale fits E4M3 without saturating (min and clamp are for
products that round up). Why two levels: a scale of one byte has little range, 2^-9 to 448; g moves
the row into it first.

Exact planes. value(code) * s_b has at most 6 significant bits, so it is exact in fp16 and bf16. A
tensor core of any age that multiplies these *planes* and accumulates in fp32, with g applied to
the fp32 sum afterwards, therefore computes the numbers of a native FP4 GEMM up to the order of
that sum. This is why the method can be studied without FP4 hardware. It emulates the numbers, not
the speed. Rounding x^ itself, with g folded in, to bf16 would change nearly every entry: nobody
here does.

The residual split below is the arithmetic of RAC (residual activation compensation): what the first
packet lost, in the channels where it lost most, is quantized once more under the same g.

Source: the order of operations is that of the NVFP4 reference quantizers that production stacks
compare with; residual compensation is from QUADS, arXiv 2607.15810. Next: model.py.
"""

from typing import NamedTuple

import torch
from einops import rearrange

QBLOCK = 16  # values that share one E4M3 scale
E2M1_MAX = 6.0
E4M3_MAX = 448.0
FLT_MAX = torch.finfo(torch.float32).max


class NVFP4Tensor(NamedTuple):
    """A quantized tensor of logical shape (..., K): 4.5 bits a value, and its global scales."""

    packed: torch.Tensor  # (..., K // 2) uint8, two codes a byte, the even index in the low nibble
    scale: torch.Tensor  # (..., K // 16) float8_e4m3fn, one per block
    global_scale: torch.Tensor  # fp32: (..., 1) for outer="row", (..., 1, 1) for outer="tensor"


class Encoded(NamedTuple):
    """The same before packing. `planes` and `dequantize` are its two readings."""

    value: torch.Tensor  # (..., K / 16, 16) fp32, on the E2M1 grid
    scale: torch.Tensor  # (..., K / 16) fp32, on the E4M3 grid
    global_scale: torch.Tensor

    def planes(self) -> torch.Tensor:
        """value * s_b, without g: (..., K) fp32, exact in bf16 and fp16."""
        return (self.value * self.scale.unsqueeze(-1)).flatten(-2)

    def dequantize(self) -> torch.Tensor:
        """x^ = value * (s_b * g): (..., K) fp32. The association is part of the format."""
        return (self.value * (self.scale * self.global_scale).unsqueeze(-1)).flatten(-2)

    def pack(self) -> NVFP4Tensor:
        """Codes to bytes: [1.0, 6.0] -> codes 2, 7 -> 0x72."""
        v = self.value.abs()  # spacing 1/2 up to 2, 1 up to 4, then 2: the lowest of three lines
        code = torch.minimum(torch.minimum(2 * v, v + 2), v / 2 + 4) + 8 * torch.signbit(self.value)
        low, high = rearrange(code.to(torch.uint8), "... b (k two) -> two ... (b k)", two=2)
        return NVFP4Tensor(low | (high << 4), self.scale.to(torch.float8_e4m3fn), self.global_scale)


# ---- the quantizer


def round_to_e2m1(y: torch.Tensor) -> torch.Tensor:
    """Round fp32 values in [-6, 6] to the E2M1 grid, ties to even; the sign of zero survives.

    E2M1 keeps one mantissa bit, and its smallest spacing is 0.5. So the spacing at y is half the
    power of two at or below |y|, but that power of two never counts as less than 1.

    >>> round_to_e2m1(torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, -5.0])).tolist()
    [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, -4.0]
    """
    bits = y.abs().clamp(min=1.0).view(torch.int32)
    spacing = (bits & 0x7F800000).view(torch.float32) * 0.5  # the exponent alone: 1, 2 or 4
    return torch.round(y / spacing) * spacing  # torch.round is ties-to-even; the division is exact


def encode_scale(x: torch.Tensor, outer: str) -> torch.Tensor:
    """S of the formula above: (..., 1) or (..., 1, 1) fp32. inf or NaN in x gives 0 or NaN."""
    amax = x.abs().amax((-1,) if outer == "row" else (-2, -1), keepdim=True)
    # tensor / tensor: with a Python number torch would multiply by a rounded reciprocal
    S = (torch.full_like(amax, E2M1_MAX * E4M3_MAX) / amax).clamp(max=FLT_MAX)
    return torch.where(amax == 0, 1.0, S)


def _encode_blocks(x: torch.Tensor, S: torch.Tensor) -> Encoded:
    """Quantize fp32 x (..., K) under the given encode scale S."""
    g = S.reciprocal()
    blocks = x.unflatten(-1, (-1, QBLOCK))  # (..., K / 16, 16)
    bmax = blocks.abs().amax(-1)
    scale = (bmax * (S * (1 / 6))).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float()
    enc = (scale * g).reciprocal().clamp(max=FLT_MAX).unsqueeze(-1)
    value = round_to_e2m1((blocks * enc).clamp(-E2M1_MAX, E2M1_MAX))
    return Encoded(torch.where(scale.unsqueeze(-1) == 0, 0.0, value), scale, g)


def encode(x: torch.Tensor, outer: str = "row", name: str = "x") -> Encoded:
    """`quantize` without packing, and without looking for inf or NaN, which costs a device sync.

    inf or NaN in a row makes that row's `global_scale` inf or NaN, so it reaches every output that
    the row feeds: it cannot hide behind a finite code.
    """
    check_input(x, outer, name)
    x = x.float()
    return _encode_blocks(x, encode_scale(x, outer))


def quantize(x: torch.Tensor, outer: str = "row", name: str = "x") -> NVFP4Tensor:
    """Quantize x to NVFP4 (formula: module docstring).

    Args:
        x: (..., K) bf16, fp16 or fp32; K a positive multiple of 16. Not modified.
        outer: what shares a global scale: "row" the last dimension, "tensor" the last two.
        name: what error messages call x.
    Raises:
        ValueError: wrong dtype, shape or `outer`; inf or NaN in x (costs one device sync).

    >>> q = quantize(torch.tensor([[1.0, 6.0] + [0.0] * 14]))
    >>> hex(q.packed[0, 0]), q.scale.item(), dequantize(q)[0, :2].tolist()
    ('0x72', 448.0, [1.0, 6.0])
    """
    encoded = encode(x, outer, name)
    check_finite(encoded.global_scale, name)
    return encoded.pack()


def dequantize(t: NVFP4Tensor) -> torch.Tensor:
    """x^ = value(code) * (s_b * g): (..., K) fp32."""
    return unpack(t).dequantize()


def unpack(t: NVFP4Tensor) -> Encoded:
    """Bytes to values: the inverse of `Encoded.pack`."""
    codes = rearrange([t.packed & 0xF, t.packed >> 4], "two ... k -> ... (k two)").float()
    c = codes % 8
    v = torch.maximum(torch.maximum(c / 2, c - 2), 2 * c - 8)  # the lines of `pack`, inverted
    value = (v * (1 - 2 * (codes >= 8))).unflatten(-1, (-1, QBLOCK))
    return Encoded(value, t.scale.float(), t.global_scale)


# ---- the residual split (RAC)


def tree_sum(x: torch.Tensor, down_to: int = 1) -> torch.Tensor:
    """Sum over dim 0 by adding neighbours (0 + 1, 2 + 3, ...), then neighbours of these, and so on,
    until `down_to` rows at most are left: (rows, ...), one row where there was none.

    The order is fixed, whatever the device and tile size, and so is a mask chosen from such sums.
    """
    x = x if x.shape[0] else x.new_zeros(1, *x.shape[1:])
    while x.shape[0] > down_to:
        if x.shape[0] % 2:
            x = torch.cat([x, torch.zeros_like(x[:1])])
        x = x[0::2] + x[1::2]
    return x


def kept_groups(groups: int, ratio: float) -> int:
    """How many of `groups` a ratio keeps: at least one, unless it is 0."""
    return max(1, int(ratio * groups + 0.5)) if ratio > 0 else 0


def choose_groups(energy: torch.Tensor, ratio: float) -> torch.Tensor:
    """The groups of highest `energy` (groups,): (groups,) bool, ties to the lower index.

    >>> [choose_groups(torch.ones(8), r).sum().item() for r in (0, 0.01, 0.5, 0.5625, 1)]
    [0, 1, 4, 5, 8]
    """
    order = energy.sort(descending=True, stable=True).indices
    kept = order[: kept_groups(energy.numel(), ratio)]
    return torch.zeros_like(energy, dtype=torch.bool).index_fill_(0, kept, True)


def choose_channels(
    residual: torch.Tensor, ratio: float, unit: str, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """The channel mask of RAC (K,) bool: the groups with most energy in `residual` (M, K) fp32.

    A group is a 16-block (unit="block") or a channel ("channel"). Energy is summed over the live
    `rows` (M,) bool, None: all.
    """
    energy = residual.square()
    if rows is not None:
        energy = torch.where(rows.unsqueeze(-1), energy, 0.0)
    width = QBLOCK if unit == "block" else 1
    energy = energy.unflatten(-1, (-1, width)).movedim(-1, 0)  # (width, M, K / width)
    energy = tree_sum(tree_sum(energy)[0])[0]  # over a row's group, then over rows
    mask = choose_groups(energy, ratio)
    return mask.repeat_interleave(width, output_size=residual.shape[-1])


def encode_with_residual(
    x: torch.Tensor, ratio: float = 0.5, unit: str = "block",
    rows: torch.Tensor | None = None, mask: torch.Tensor | None = None,
) -> tuple[Encoded, Encoded, torch.Tensor]:  # fmt: skip
    """Encode x, then what that lost in the worst channels, under the same global scale.

        r = x - x^,   r^ = DQ(Q(r * m)) with x's own g and new block scales,   x ~ x^ + r^

    Args:
        x: (..., K), as in `quantize`; a row has its own global scale.
        ratio: share of the groups that m keeps: max(1, floor(ratio * groups + 0.5)), 0: none.
        unit: "block" (16 channels share their fate, as they share a scale) or "channel".
        rows: x.shape[:-1] bool: the rows whose residual counts in choosing m; None: all.
        mask: (K,) bool: use this m and choose nothing.
    Returns:
        main packet (exactly `encode(x)`), residual packet, m (K,) bool.
    Raises:
        ValueError: as `encode`; a ratio, unit, rows or mask outside the above.
    Source: QUADS (arXiv 2607.15810), residual activation compensation.
    """
    check_split(x, ratio, unit, rows, mask)
    main, x = encode(x), x.float()
    residual = x - main.dequantize()
    if mask is None:
        flat_rows = None if rows is None else rows.flatten()
        mask = choose_channels(residual.reshape(-1, x.shape[-1]), ratio, unit, flat_rows)
    return main, _encode_blocks(torch.where(mask, residual, 0.0), encode_scale(x, "row")), mask


# ---- fp8, for the mode that NVFP4 is compared with


def encode_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 with one scale a row: x ~ plane * scale, scale = amax / 448 (1 where that is 0).

    x (..., K) bf16, fp16 or fp32 -> plane (..., K) float8_e4m3fn, scale (..., 1) fp32. inf or NaN
    in a row makes its scale so.
    """
    x = x.float()
    amax = x.abs().amax(-1, keepdim=True)
    scale = amax / torch.full_like(amax, E4M3_MAX)
    scale = torch.where(scale == 0, 1.0, scale)
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


# ---- checks


def check_input(x: torch.Tensor, outer: str, name: str) -> None:
    """ValueError unless x can be quantized, as far as dtype and shape tell."""
    if outer not in ("row", "tensor"):
        raise ValueError(f"quantize: outer is 'row' or 'tensor', got {outer!r}")
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"quantize: {name} must be bf16, fp16 or fp32, got {x.dtype}; cast it")
    shape = tuple(x.shape)
    if x.dim() < 1 + (outer == "tensor") or (outer == "tensor" and shape[-2] == 0):
        raise ValueError(f"quantize: {name} of shape {shape} has no {outer} to share a scale")
    if shape[-1] == 0 or shape[-1] % QBLOCK:
        raise ValueError(
            f"quantize: last dim K={shape[-1]} of {name} is not a positive multiple of {QBLOCK} "
            f"(QBLOCK); pad to {max(1, -(-shape[-1] // QBLOCK)) * QBLOCK}"
        )


def check_finite(global_scale: torch.Tensor, name: str) -> None:
    """ValueError if a global scale tells of inf or NaN in what was quantized. A device sync."""
    if not torch.isfinite(global_scale).all():
        raise ValueError(f"quantize: {name} holds inf or NaN; NVFP4 has neither, find its source")


def check_split(x: torch.Tensor, ratio: float, unit: str, rows, mask) -> None:
    """ValueError unless these are arguments of `encode_with_residual`."""
    if not 0 <= ratio <= 1:
        raise ValueError(f"RAC: ratio is a share from 0 to 1, got {ratio}")
    if unit not in ("block", "channel"):
        raise ValueError(f"RAC: unit is 'block' or 'channel', got {unit!r}")
    for what, t, shape in (("rows", rows, x.shape[:-1]), ("mask", mask, x.shape[-1:])):
        if t is not None and (t.dtype != torch.bool or t.shape != shape):
            raise ValueError(
                f"RAC: {what} must be bool {tuple(shape)}, got {t.dtype} {tuple(t.shape)}"
            )
