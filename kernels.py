"""Triton kernels of the rollout engine: NVFP4 quantization with residual packets, W4A4 GEMMs.

    kernel           | what it computes                   | torch reference
    quantize_kernel  | rows to packed NVFP4, and RAC's    | nvfp4.quantize, quantize_with_residual
                     | residual packets and energies      |   (bit for bit)
    energy_kernel,   | RAC's channel mask from them       | nvfp4.choose_channels (bit for bit)
    choose_kernel    |                                    |
    decode_kernel    | packed activations to fp16 planes  | Encoded.planes (bit for bit)
    gemm_kernel      | x w^T, dense or for routed experts | dequantize, fp32 matmul
    combine_kernel   | the parts of a K split, summed     |   (to fp32 summation error)
    count_kernel,    | slots to one-expert tiles          | model.route (the same rows in the
    route_kernel     |                                    |   same order, in tiles of 16 or more)

tests/test_kernels.py holds each to its reference, tests/bench.py times it. The format, and why the
order of operations is part of it, is the docstring of quads_min/nvfp4.py.

Native and emulated. Blackwell's tensor cores multiply packed E2M1 under E4M3 block scales
(`tl.dot_scaled`): the *native* path of gemm_kernel. Every other card decodes both operands to fp16,
where code value * block scale is exact, and multiplies those: the *emulated* path, the same numbers
up to the order of the fp32 sum. The emulated path runs on NVIDIA cards since sm_80 and, without any
card, in Triton's interpreter (TRITON_INTERPRET=1). The native one has been compiled for sm_100 and
sm_120 and its instruction checked; no such card has run it yet, so an engine checks every kernel
against torch before the first use (`self_check`) and tells what it found.

Sizes: x (M, K), w (N, K) or (E, N, K); S slots = M * top_k. Packing and scales as in NVFP4Tensor:

    row of x    | c1 c0 | c3 c2 | c5 c4 | ...        K / 2 bytes, the even channel in the low nibble
                 \\____ 8 bytes = 16 channels ___/    one E4M3 scale;  K / 16 of them a row

Next: quads_min/nvfp4.py.
"""

import statistics
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from einops import rearrange

from quads_min import nvfp4
from quads_min.model import Routing
from quads_min.nvfp4 import E4M3_MAX, FLT_MAX, QBLOCK, NVFP4Tensor

INTERPRETED = triton.knobs.runtime.interpret  # no GPU needed, and no inline assembly possible
_E4M3_MAX, _FLT_MAX = tl.constexpr(E4M3_MAX), tl.constexpr(FLT_MAX)
_EXPONENT = tl.constexpr(0x7F800000)  # the exponent bits of an fp32 number


# ---- quantize
#
#     S = min(2688 / amax, FLT_MAX);  g = 1 / S;  s = E4M3(min(bmax * (S / 6), 448))
#     code = E2M1(x * min(1 / (s g), FLT_MAX));  r = x - code * (s g);  the same again for r
#
# Products and sums must round separately, as in torch, so every launch disables fused multiply-add.
# The kernel is bound by integer and fp32 instructions, not by memory: about 16 an element. Hence
# bf16 is read as int32 pairs, an even and an odd channel each, which is also how codes are packed.


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _abs(x, ASM: tl.constexpr):
    if ASM:  # opaque to LLVM, which would spend an instruction on it; ptxas makes it free
        return tl.inline_asm_elementwise(
            "abs.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.abs(x)


@triton.jit
def _nan_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _block_max(even, odd, ASM: tl.constexpr):
    """(M, B, 8) even and odd channels -> (M, B), NaN if one of them is."""
    return tl.reduce(_nan_max(_abs(even, ASM), _abs(odd, ASM)), 2, _nan_max)


@triton.jit
def _e2m1_code(y):
    """y fp32 >= 0 -> 0x4B400000 + its E2M1 code, RTNE, saturating.

    The code of a value v is the lowest of 2v, v + 2, v / 2 + 4 (nvfp4.Encoded.pack). Adding
    1.5 * 2^23 rounds each line to an integer, ties to even, and leaves it in the low bits; as the
    numbers are positive, their bits compare as they do.
    """
    a = _bits(tl.fma(y, 2.0, 12582912.0))
    b = _bits(y + 12582914.0)
    c = _bits(tl.fma(y, 0.5, 12582916.0))
    return tl.minimum(tl.minimum(tl.minimum(a, b), c), 0x4B400007)


@triton.jit
def _e4m3(s):
    """s fp32 in 0..448 -> (its E4M3 value in fp32, its code), RTNE.

    Spacing = 2^-3 of the power of two at or below s, which counts as 2^-6 at least. Adding and
    taking away 1.5 * 2^23 spacings rounds to it. (Casts to fp8 are wrong in the interpreter.)
    """
    power = tl.maximum(_bits(s) & _EXPONENT, 0x3C800000).to(tl.float32, bitcast=True)
    big = power * 1572864.0  # 2^-3 * 1.5 * 2^23
    t = s + big
    return t - big, (_bits(t) & 31) + (_bits(power) >> 20) - 968


@triton.jit
def _block_scale(bmax, S, g):
    """-> (code of s, s * g, encode scale, sign bits to keep). A block with s = 0 stores code 0."""
    s, code = _e4m3(tl.minimum(bmax * (S * (1 / 6))[:, None], _E4M3_MAX))
    sg = s * g[:, None]
    enc = tl.where(s > 0, tl.minimum(tl.math.div_rn(1.0, sg), _FLT_MAX), 0.0)
    signs = tl.where(s > 0, -0x7FFF8000, 0)  # 0x80008000: those of a bf16 pair
    return code.to(tl.uint8), sg[:, :, None], enc[:, :, None], signs[:, :, None]


@triton.jit
def _encode(pair, even, odd, enc, signs, ASM: tl.constexpr):
    """-> (codes of the even channels, of the odd ones, both packed with the signs of `pair`)."""
    low = _e2m1_code(_abs(even, ASM) * enc)
    high = _e2m1_code(_abs(odd, ASM) * enc)
    kept = (pair & signs).to(tl.uint32, bitcast=True)
    sign = tl.umulhi(kept, 0x00100100)  # bits 31 and 15 to bits 7 and 3: >> 24 and >> 12 in one
    return low, high, (low + sign.to(tl.int32, bitcast=True) + (high << 4)).to(tl.uint8)


@triton.jit
def _residual(x, code, sg):
    """x - x^. A code in an fp32 exponent field, times 2^126, is its value (subnormals included)."""
    value = (code << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37
    x_hat = _bits(value * sg) | (_bits(x) & -0x80000000)
    return x - x_hat.to(tl.float32, bitcast=True)


@triton.jit
def _as_pair(even, odd):
    """The upper halves of two fp32 numbers in one word: a bf16 pair, or just its two signs."""
    return (_bits(odd) & -0x10000) | ((_bits(even) >> 16) & 0xFFFF)


@triton.jit
def _load_pairs(row_ptr, pair, inside, BF16: tl.constexpr):
    """-> (word with both signs, even channels, odd channels), fp32."""
    if BF16:
        v = tl.load(row_ptr + pair, mask=inside, other=0, eviction_policy="evict_first")
        odd = (v & -0x10000).to(tl.float32, bitcast=True)
        return v, (v << 16).to(tl.float32, bitcast=True), odd
    else:
        even = tl.load(row_ptr + 2 * pair, mask=inside, other=0.0)
        odd = tl.load(row_ptr + 2 * pair + 1, mask=inside, other=0.0)
        return _as_pair(even, odd), even, odd


@triton.jit
def _tree_sum(x, M: tl.constexpr, N: tl.constexpr):
    """(M, N) -> (N,): rows 0 + 1, 2 + 3, ..., then neighbours of these: nvfp4.tree_sum."""
    half: tl.constexpr = M // 2
    if M == 1:
        return tl.reshape(x, (N,))
    else:
        return _tree_sum(tl.sum(tl.reshape(x, (half, 2, N)), 1), half, N)


@triton.jit(do_not_specialize=["M"])
def quantize_kernel(
    x_ptr,  # (M, K) fp32, or int32 words of two bf16: (M, K / 2)
    packed_ptr,  # (1 or 2, M, K / 2) uint8: the main packet, the residual packet
    scale_ptr,  # (1 or 2, M, K / 16) uint8
    g_ptr,  # (M,) fp32, written unless S is given
    S_ptr,  # GIVEN_S: (M / rows_per_S,) fp32
    live_ptr,  # ENERGY: (M,) which rows count
    mask_ptr,  # RESIDUAL 2: (K,) which channels to keep
    energy_ptr,  # ENERGY: (M / BLOCK_M, K / 16 or K) fp32, summed over a program's rows
    M, K, x_stride, rows_per_S,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    BF16: tl.constexpr, GIVEN_S: tl.constexpr,
    RESIDUAL: tl.constexpr,  # write the residual packet: 0 no, 1 of all channels, 2 of the mask's
    ENERGY: tl.constexpr,  # write the energy of the residual: 0 no, 1 per block, 2 per channel
    EVEN: tl.constexpr,  # BLOCK_M divides M, BLOCK_K divides K
    ASM: tl.constexpr,
):  # fmt: skip
    B: tl.constexpr = BLOCK_K // 16
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    block = tl.program_id(1) * B + tl.arange(0, B)
    in_m = tl.full((BLOCK_M,), True, tl.int1) if EVEN else m < M
    in_b = tl.full((B,), True, tl.int1) if EVEN else block < K // 16
    inside = in_m[:, None] & in_b[None, :]
    inside8 = tl.broadcast_to(inside[:, :, None], (BLOCK_M, B, 8))
    m = m.to(tl.int64)
    byte = block[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]  # of the row's K / 2

    # load, and find the scales
    row_ptr = x_ptr + m[:, None, None] * x_stride
    pair, even, odd = _load_pairs(row_ptr, byte, inside8, BF16)  # (BLOCK_M, B, 8)
    bmax = _block_max(even, odd, ASM)
    if GIVEN_S:
        S = tl.load(S_ptr + m // rows_per_S, mask=in_m, other=1.0)
    else:
        amax = tl.reduce(bmax, 1, _nan_max)
        S = tl.math.div_rn(2688.0, amax)
        S = tl.where(S > _FLT_MAX, _FLT_MAX, S)
        S = tl.where(amax == 0, 1.0, S)
    g = tl.math.div_rn(1.0, S)
    scale, sg, enc, signs = _block_scale(bmax, S, g)

    # the main packet
    low, high, packed = _encode(pair, even, odd, enc, signs, ASM)
    at_s = m[:, None] * (K // 16) + block[None, :]
    at_b = m[:, None, None] * (K // 2) + byte
    tl.store(packed_ptr + at_b, packed, mask=inside8)
    tl.store(scale_ptr + at_s, scale, mask=inside)
    if not GIVEN_S:
        tl.store(g_ptr + m, g, mask=in_m)

    # what it lost, under the same g
    if RESIDUAL or ENERGY:
        even, odd = _residual(even, low, sg), _residual(odd, high, sg)
    if RESIDUAL:
        if RESIDUAL == 2:
            keep_ptr, in_k = mask_ptr + 2 * byte, tl.broadcast_to(in_b[None, :, None], (1, B, 8))
            even = tl.where(tl.load(keep_ptr, mask=in_k, other=0) != 0, even, 0.0)
            odd = tl.where(tl.load(keep_ptr + 1, mask=in_k, other=0) != 0, odd, 0.0)
        scale, sg, enc, signs = _block_scale(_block_max(even, odd, ASM), S, g)
        _, _, packed = _encode(_as_pair(even, odd), even, odd, enc, signs, ASM)
        second = (m * 0 + M)[:, None]
        tl.store(packed_ptr + (second * (K // 2))[:, :, None] + at_b, packed, mask=inside8)
        tl.store(scale_ptr + second * (K // 16) + at_s, scale, mask=inside)

    # how much, over the channels of a block (or not) and this program's live rows
    if ENERGY:
        live = (tl.load(live_ptr + m, mask=in_m, other=0) != 0)[:, None]
        tile = tl.program_id(0).to(tl.int64)
        even *= even
        odd *= odd
        if ENERGY == 2:
            even = tl.where(live, tl.reshape(even, (BLOCK_M, B * 8)), 0.0)
            odd = tl.where(live, tl.reshape(odd, (BLOCK_M, B * 8)), 0.0)
            at = tl.reshape(energy_ptr + tile * K + 2 * byte, (B * 8,))
            in_k = tl.reshape(tl.broadcast_to(in_b[:, None], (B, 8)), (B * 8,))
            tl.store(at, _tree_sum(even, BLOCK_M, B * 8), mask=in_k)
            tl.store(at + 1, _tree_sum(odd, BLOCK_M, B * 8), mask=in_k)
        else:
            e = tl.sum(tl.reshape(even + odd, (BLOCK_M, B, 4, 2)), 3)
            e = tl.sum(tl.sum(tl.reshape(e, (BLOCK_M, B, 2, 2)), 3), 2)
            e = _tree_sum(tl.where(live, e, 0.0), BLOCK_M, B)
            tl.store(energy_ptr + tile * (K // 16) + block, e, mask=in_b)


@triton.jit
def energy_kernel(part_ptr, energy_ptr, R, G, BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr):
    """Tree sums of BLOCK_R rows each: (R, G) -> (R / BLOCK_R, G)."""
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    g = tl.program_id(0) * BLOCK_G + tl.arange(0, BLOCK_G)
    at = part_ptr + r[:, None].to(tl.int64) * G + g[None, :]
    e = tl.load(at, mask=(r < R)[:, None] & (g < G)[None, :], other=0.0)
    at = energy_ptr + tl.program_id(1).to(tl.int64) * G + g
    tl.store(at, _tree_sum(e, BLOCK_R, BLOCK_G), mask=g < G)


@triton.jit
def choose_kernel(
    energy_ptr,  # (G,) fp32
    mask_ptr,  # (G * WIDTH,) uint8
    G, kept,
    WIDTH: tl.constexpr,  # channels of a group
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Keep group i if fewer than `kept` groups come before it: more energy, or as much and first.

    Counting instead of sorting: no order of execution can change it.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = tl.load(energy_ptr + i, mask=i < G, other=0.0)[:, None]
    before = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, G, BLOCK):
        j = start + tl.arange(0, BLOCK)
        other = tl.load(energy_ptr + j, mask=j < G, other=-1.0)[None, :]
        first = (other > mine) | ((other == mine) & (j[None, :] < i[:, None]))
        before += tl.sum(first.to(tl.int32), 1)
    keep = tl.broadcast_to((before < kept).to(tl.uint8)[:, None], (BLOCK, WIDTH))
    at = mask_ptr + i[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(at, keep, mask=tl.broadcast_to((i < G)[:, None], (BLOCK, WIDTH)))


# ---- W4A4 GEMM
#
#     y[slot, n] = (sum over k of (x^ + r^)[row of slot, k] * w^[expert of slot, n, k])
#                = (sum of code * s planes) * g_w * g_x
#
# The weights sit on the M side of the tensor core (128 or 64 rows of them, always full), the tokens
# on its N side (16 to 64). A weight tile is loaded and decoded once, for x^ and r^ alike.
#
# Emulated. A byte holds an even and an odd channel; two products, one over the even channels and
# one over the odd ones, need no interleaving. Bit by bit, a nibble s e e m becomes the fp16 number
# s 000ee m000000000, which is its value * 2^-14, subnormal code 1 included; the block scale times
# 2^7 makes it exact again: value * s * 2^-7, at least 2^-17. Activations are decoded once, by
# decode_kernel, into (packet, even | odd, row, column) planes; columns in the order of _columns.
#
# Order of summation, hence bits: blocks of BLOCK_K = 128 channels, even before odd, x^ before r^,
# then the parts of K. None of it depends on the number of rows, so a row's result does not either.


_DECODE = tl.constexpr(  # four bytes, and the scale of each: four even and four odd fp16 numbers
    """{
    .reg .b32 c, v;
    prmt.b32 c, $4, 0, 0x1404;                 // bytes 0 and 1 to the tops of two halves
    shr.u32 v, c, 3;                           // exponent and mantissa into place ...
    and.b32 v, v, 0x0E000E00;
    lop3.b32 v, c, 0x80008000, v, 0xEA;        // ... and the sign: v = (c & mask) | v
    mul.f16x2 $2, v, $5;
    shl.b32 c, c, 4;                           // the low nibbles likewise
    shr.u32 v, c, 3;
    and.b32 v, v, 0x0E000E00;
    lop3.b32 v, c, 0x80008000, v, 0xEA;
    mul.f16x2 $0, v, $5;
    prmt.b32 c, $4, 0, 0x3424;                 // bytes 2 and 3
    shr.u32 v, c, 3;
    and.b32 v, v, 0x0E000E00;
    lop3.b32 v, c, 0x80008000, v, 0xEA;
    mul.f16x2 $3, v, $6;
    shl.b32 c, c, 4;
    shr.u32 v, c, 3;
    and.b32 v, v, 0x0E000E00;
    lop3.b32 v, c, 0x80008000, v, 0xEA;
    mul.f16x2 $1, v, $6;
    }"""
)


@triton.jit
def _scale_to_fp16(s):
    """E4M3 byte -> its value * 2^7 in fp16."""
    return (s.to(tl.uint16) << 7).to(tl.float16, bitcast=True) * 32768.0


@triton.jit
def _decode(p, s, ASM: tl.constexpr):
    """Bytes and scales * 2^7, of one shape -> (even, odd) planes * 2^-7, fp16, exact."""
    if ASM:
        return tl.inline_asm_elementwise(
            _DECODE, "=r,=r,=r,=r,r,r,r", [p, s], dtype=(tl.float16, tl.float16), is_pure=True,
            pack=4,
        )  # fmt: skip
    else:
        p = p.to(tl.uint16)
        even = (((p & 0x08) << 12) | ((p & 0x07) << 9)).to(tl.float16, bitcast=True)
        odd = (((p & 0x80) << 8) | ((p & 0x70) << 5)).to(tl.float16, bitcast=True)
        return even * s, odd * s


@triton.jit
def _columns(w, N: tl.constexpr, C: tl.constexpr):
    """(N, C) columns 16g + 4t + 2h + j to 16g + 8h + 2t + j.

    Any order will do, if both operands have it. In this one the columns that a thread feeds to the
    tensor core, 2t, 2t + 1, 2t + 8 and 2t + 9, are four neighbouring bytes: one load, not two.
    """
    w = tl.permute(tl.reshape(w, (N, C // 16, 4, 2, 2)), (0, 1, 3, 2, 4))
    return tl.reshape(w, (N, C))


@triton.jit(do_not_specialize=["M"])
def decode_kernel(
    packed_ptr,  # (packets, M, K / 2) uint8
    scale_ptr,  # (packets, M, K / 16) uint8
    mask_ptr,  # (K,) uint8: blocks without a kept channel drop out of packet 1
    plane_ptr,  # (packets, 2, M, P) fp16: even channels, odd ones, in the order of _columns
    kept_ptr,  # (K / 128,) int32: does the mask keep a channel of this K tile of the GEMM?
    M, K, P,
    BLOCK: tl.constexpr,  # at least P and 64
    ASM: tl.constexpr,
):  # fmt: skip
    row, packet = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.arange(0, BLOCK)
    inside = c < K // 2
    p = tl.load(packed_ptr + (packet * M + row) * (K // 2) + c, mask=inside, other=0)
    s = tl.load(scale_ptr + (packet * M + row) * (K // 16) + c // 8, mask=inside, other=0)
    if packet == 1:
        channel = tl.arange(0, 2 * BLOCK)
        keep = tl.load(mask_ptr + channel, mask=channel < K, other=0)
        if row == 0:
            tile = tl.arange(0, BLOCK // 64)
            kept = tl.max(tl.reshape(keep, (BLOCK // 64, 128)), 1).to(tl.int32)
            tl.store(kept_ptr + tile, kept, mask=tile * 128 < K)
        keep = tl.max(tl.reshape(keep, (BLOCK // 8, 16)), 1)
        keep = tl.reshape(tl.broadcast_to(keep[:, None], (BLOCK // 8, 8)), (BLOCK,))
        s = tl.where(keep != 0, s, 0)
    even, odd = _decode(p, _scale_to_fp16(s), ASM)
    column = (c & -16) + ((c >> 1) & 1) * 8 + ((c >> 2) & 3) * 2 + (c & 1)
    at = plane_ptr + (2 * packet * M + row) * P + column
    tl.store(at, even, mask=c < P)
    tl.store(at + M.to(tl.int64) * P, odd, mask=c < P)


@triton.jit
def load_tiled_scales(ptr, columns, column, BLOCK_K: tl.constexpr):
    """(128, BLOCK_K / 16) scales from 512-byte tiles of 128 rows x 4 columns (`tile_scales`).

    sm_100 copies this layout to its tensor memory as it is; a row-major plane would take a detour
    through registers. ptr: the first tile of these rows; columns: K / 16; column: the first wanted.
    """
    tiles: tl.constexpr = BLOCK_K // 64
    i = tl.arange(0, tiles * 512)[None, :]
    inside = column + i // 512 * 4 < columns
    s = tl.load(ptr + column // 4 * 512 + i, mask=inside, other=0.0)  # (1, tiles * 512)
    s = tl.reshape(s, (1, tiles, 32, 4, 4))
    return tl.reshape(tl.trans(s, 0, 3, 2, 1, 4), (128, tiles * 4))


@triton.jit(do_not_specialize=["S"])
def gemm_kernel(
    x_ptr,  # native: packed (packets, M, K / 2) uint8; emulated: planes (packets, 2, M, P) fp16
    xs_ptr,  # native: (packets, M, K / 16) fp8
    xg_ptr,  # (M,) fp32
    mask_ptr,  # RESIDUAL: native (K,) uint8; emulated (K / BLOCK_K,) int32, decode_kernel's `kept`
    w_ptr,  # (E, N, K / 2) uint8
    ws_ptr,  # native: tiled fp8 (E, N / 128, K / 64, 512); emulated: (E, N, K / 16) uint8
    wg_ptr,  # (E,) fp32
    expert_of_tile_ptr,  # GROUPED: (tiles,)
    slot_of_row_ptr,  # GROUPED: (tiles * BLOCK_M,); S marks an empty row
    y_ptr,  # (S, N) fp32; with several parts (parts, S, N), unscaled
    S, N, K,
    P,  # columns of a row of x_ptr: K / 2, in the emulated path rounded up to 16
    k_part,  # channels of a part of K
    SLOTS_PER_ROW: tl.constexpr,  # slots that read a row of x
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,  # parts of K for this program to sum, one after the other
    GROUPED: tl.constexpr, RESIDUAL: tl.constexpr, NATIVE: tl.constexpr,
    EVEN: tl.constexpr,  # BLOCK_N divides N, BLOCK_K divides K
    ASM: tl.constexpr,
):  # fmt: skip
    # tile: which slots, which expert, which of its outputs
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    slot, first, expert = m, tl.program_id(1) * BLOCK_M, tl.program_id(1).to(tl.int64) * 0
    if GROUPED:
        slot = tl.load(slot_of_row_ptr + m)
        first = tl.load(slot_of_row_ptr + first)
        expert = tl.load(expert_of_tile_ptr + tl.program_id(1)).to(tl.int64)
    if first < S:  # tiles fill from the front: an empty first row means an empty tile
        live = slot < S
        row = (slot // SLOTS_PER_ROW).to(tl.int64)
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        in_n = (n < N)[:, None]
        c = tl.arange(0, BLOCK_K // 2)[None, :]
        b = tl.arange(0, BLOCK_K // 16)[None, :]
        w_row = expert * N + n.to(tl.int64)[:, None]
        w_ptrs, ws_ptrs = w_ptr + w_row * (K // 2) + c, ws_ptr + w_row * (K // 16) + b
        x_ptrs = x_ptr + row[:, None] * P + c
        plane = (S // SLOTS_PER_ROW).to(tl.int64) * P  # native: a packet; emulated: half of one
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for part in range(PARTS):
            start = (tl.program_id(2) * PARTS + part) * k_part
            acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for k in tl.range(start, min(start + k_part, K), BLOCK_K):
                # load
                in_x = tl.broadcast_to(live[:, None], (BLOCK_M, BLOCK_K // 2))
                in_w = tl.full((BLOCK_N, BLOCK_K // 2), True, tl.int1)
                in_s = tl.full((BLOCK_N, BLOCK_K // 16), True, tl.int1)
                if not EVEN:
                    in_x = in_x & (c < P - k // 2)
                    in_w = in_n & (c < (K - k) // 2)
                    in_s = in_n & (b < (K - k) // 16)
                w = tl.load(w_ptrs + k // 2, mask=in_w, other=0)
                x = tl.load(x_ptrs + k // 2, mask=in_x, other=0)
                if NATIVE:
                    # multiply packed codes under their scales
                    tl.static_assert(BLOCK_N == 128)  # rows of a tile of scales
                    tiles = (expert * tl.cdiv(N, 128) + tl.program_id(0)) * tl.cdiv(K, 64)
                    ws = load_tiled_scales(ws_ptr + tiles * 512, K // 16, k // 16, BLOCK_K)
                    in_xs = live[:, None] & (b < (K - k) // 16)
                    xs_ptrs = xs_ptr + row[:, None] * (K // 16) + b + k // 16
                    xs = tl.load(xs_ptrs, mask=in_xs, other=0.0)
                    acc = tl.dot_scaled(w, ws, "e2m1", x.T, xs, "e2m1", acc)
                    if RESIDUAL:
                        channel = k + tl.arange(0, BLOCK_K)
                        keep = tl.load(mask_ptr + channel, mask=channel < K, other=0)
                        keep = tl.max(tl.reshape(keep.to(tl.int32), (BLOCK_K // 16, 16)), 1)
                        if tl.max(keep, 0) > 0:
                            r = tl.load(x_ptrs + plane + k // 2, mask=in_x, other=0)
                            xs_ptrs += (S // SLOTS_PER_ROW).to(tl.int64) * (K // 16)
                            rs = tl.load(xs_ptrs, mask=in_xs & (keep > 0)[None, :], other=0.0)
                            acc = tl.dot_scaled(w, ws, "e2m1", r.T, rs, "e2m1", acc)
                else:
                    # decode
                    s = _scale_to_fp16(tl.load(ws_ptrs + k // 16, mask=in_s, other=0))
                    s = tl.broadcast_to(s[:, :, None], (BLOCK_N, BLOCK_K // 16, 8))
                    even, odd = _decode(w, tl.reshape(s, (BLOCK_N, BLOCK_K // 2)), ASM)
                    even = _columns(even, BLOCK_N, BLOCK_K // 2)
                    odd = _columns(odd, BLOCK_N, BLOCK_K // 2)
                    # multiply
                    x_odd = tl.load(x_ptrs + plane + k // 2, mask=in_x, other=0)
                    acc = tl.dot(even, x.T, acc)
                    acc = tl.dot(odd, x_odd.T, acc)
                    if RESIDUAL:
                        r = tl.load(x_ptrs + 2 * plane + k // 2, mask=in_x, other=0)
                        r_odd = tl.load(x_ptrs + 3 * plane + k // 2, mask=in_x, other=0)
                        if tl.load(mask_ptr + k // BLOCK_K) > 0:
                            acc = tl.dot(even, r.T, acc)
                            acc = tl.dot(odd, r_odd.T, acc)
            total += acc
        # store
        at = slot[None, :].to(tl.int64) * N + n[:, None]
        in_y = live[None, :] & in_n
        if tl.num_programs(2) > 1:
            at += tl.program_id(2).to(tl.int64) * S * N
            tl.store(y_ptr + at, total, mask=in_y)
        else:
            if not NATIVE:
                total *= 16384.0  # both planes hold 2^-7 of their value
            xg = tl.load(xg_ptr + row, mask=live, other=0.0)[None, :]
            tl.store(y_ptr + at, total * tl.load(wg_ptr + expert) * xg, mask=in_y)


@triton.jit
def combine_kernel(
    part_ptr, xg_ptr, wg_ptr, y_ptr, size, N, UNIT: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """(PARTS, M, N) -> (M, N): y = (part 0 + part 1 + ...) * g_w * g_x, as gemm_kernel does."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(part_ptr + part * size + i, mask=i < size, other=0.0)
    xg = tl.load(xg_ptr + i // N, mask=i < size, other=0.0)
    tl.store(y_ptr + i, total * UNIT * tl.load(wg_ptr) * xg, mask=i < size)


# ---- routing
#
# A counting sort of the slots by expert, into tiles of one expert each (model.Routing).


@triton.jit
def count_kernel(choice_ptr, count_ptr, S, BLOCK: tl.constexpr):
    """Program e counts the slots of expert e."""
    total = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, S, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        expert = tl.load(choice_ptr + slot, mask=slot < S, other=-1)
        total += (expert == tl.program_id(0)).to(tl.int32)
    tl.store(count_ptr + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def route_kernel(
    choice_ptr,  # (S,) int64
    count_ptr,  # (E,) int32
    expert_of_tile_ptr,  # (tiles,) int32
    slot_of_row_ptr,  # (tiles * ROWS,) int32
    row_of_slot_ptr,  # (S,) int32
    S, E, tiles,
    ROWS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program e deals the slots of expert e; program E - 1 also owns the tiles that are left."""
    e = tl.program_id(0)
    j = tl.arange(0, BLOCK_E)
    tiles_of = (tl.load(count_ptr + j, mask=j < E, other=0) + ROWS - 1) // ROWS
    tile = tl.sum(tl.where(j < e, tiles_of, 0), 0)
    end = tile + tl.sum(tl.where(j == e, tiles_of, 0), 0)
    if e == E - 1:
        end = tiles
    row, lane = tile * ROWS, tl.arange(0, BLOCK)
    for start in range(0, S, BLOCK):
        slot = start + lane
        mine = tl.load(choice_ptr + slot, mask=slot < S, other=-1) == e
        rows = row + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(slot_of_row_ptr + rows, slot, mask=mine)
        tl.store(row_of_slot_ptr + slot, rows, mask=mine)
        row += tl.sum(mine.to(tl.int32), 0)
    for start in range(row, end * ROWS, BLOCK):
        tl.store(slot_of_row_ptr + start + lane, S, mask=start + lane < end * ROWS)
    for start in range(tile, end, BLOCK):
        tl.store(expert_of_tile_ptr + start + lane, e, mask=start + lane < end)


# ---- launchers: checks, allocation, grid

BLOCK_K = 128  # of the GEMMs: part of the order of summation, so one value for every shape
LONGEST_ROW = 16384  # channels that one program of quantize_kernel holds


def _check_device(where: str, *tensors: torch.Tensor) -> None:
    devices = {str(t.device) for t in tensors}
    if len(devices) > 1 or not (INTERPRETED or tensors[0].is_cuda):
        raise ValueError(
            f"{where}: needs tensors of one CUDA device, got {' and '.join(sorted(devices))}; "
            "on a CPU use quads_min.nvfp4, or set TRITON_INTERPRET=1 before importing triton"
        )


def _on(x: torch.Tensor):
    """Launches go to the current device: make it x's."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _packets(
    x: torch.Tensor, outer: str, residual: int, energy: int,
    rows: torch.Tensor | None = None, mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Launch quantize_kernel: (packed, scale, global_scale, parts of the energy).

    packed and scale have a leading dimension: the main packet and, if asked for, the residual one.
    """
    K, device = x.shape[-1], x.device
    flat = x.reshape(-1, K)
    M = flat.shape[0]
    flat = flat.float() if flat.dtype == torch.float16 else flat
    bf16 = flat.dtype == torch.bfloat16
    if flat.stride(1) != 1 or (bf16 and (flat.stride(0) % 2 or flat.data_ptr() % 4)):
        flat = flat.contiguous()
    words = flat.view(torch.int32) if bf16 else flat
    given = outer == "tensor" or K > LONGEST_ROW
    block_k = min(triton.next_power_of_2(K), 4096 if given else LONGEST_ROW)
    block_m = max(1, 4096 // block_k)
    grid = (triton.cdiv(M, block_m), triton.cdiv(K, block_k))
    packed = torch.empty(1 + bool(residual), M, K // 2, dtype=torch.uint8, device=device)
    scale = torch.empty(1 + bool(residual), M, K // QBLOCK, dtype=torch.uint8, device=device)
    if given:
        S = nvfp4.encode_scale(x.float(), outer)
        g = S.reciprocal()
    else:
        S = g = torch.empty(*x.shape[:-1], 1, device=device)
    parts = torch.empty(grid[0], (0, K // QBLOCK, K)[energy], device=device)
    if energy and rows is None:
        rows = torch.ones(M, dtype=torch.bool, device=device)
    if M:
        quantize_kernel[grid](
            words, packed, scale, g, S, S if rows is None else rows.flatten(),
            S if mask is None else mask, parts, M, K, words.stride(0),
            x.shape[-2] if outer == "tensor" else 1,
            block_m, block_k, bf16, given, residual, energy,
            M % block_m == 0 and K % block_k == 0, not INTERPRETED,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return packed, scale, g, parts


def _as_nvfp4(shape: torch.Size, packed, scale, g) -> NVFP4Tensor:
    lead = shape[:-1]
    scale = scale.view(torch.float8_e4m3fn)
    return NVFP4Tensor(
        packed.view(*lead, shape[-1] // 2), scale.view(*lead, shape[-1] // QBLOCK), g
    )


def quantize(
    x: torch.Tensor, outer: str = "row", name: str = "x", check: bool = True
) -> NVFP4Tensor:
    """nvfp4.quantize, bit for bit, on the GPU.

    Args:
        x, outer, name: as there; any strides.
        check: raise on inf or NaN, which costs a device sync. Without it they make the row's
            global_scale inf or NaN, so whoever captures a CUDA graph can look at that later.
    """
    nvfp4.check_input("quantize", x, outer, name)
    _check_device("quantize", x)
    with _on(x):
        packed, scale, g, _ = _packets(x, outer, residual=0, energy=0)
    out = _as_nvfp4(x.shape, packed[0], scale[0], g)
    return nvfp4.check_finite("quantize", out, name) if check else out


def quantize_with_residual(
    x: torch.Tensor, ratio: float = 0.5, unit: str = "block", rows: torch.Tensor | None = None,
    mask: torch.Tensor | None = None, name: str = "x", check: bool = True,
) -> tuple[NVFP4Tensor, NVFP4Tensor, torch.Tensor]:  # fmt: skip
    """nvfp4.quantize_with_residual (outer="row"), bit for bit, on the GPU.

    One difference: with unit="block" the residual holds the packets of *all* blocks, so that one
    pass over x is enough; the GEMMs leave out the blocks that the mask does not keep.
    """
    where = "quantize_with_residual"
    nvfp4.check_split(where, x, "row", name, ratio, unit, rows, mask)
    _check_device(where, x)
    with _on(x):
        packed = None
        if mask is None:
            by_block = unit == "block"
            packed, scale, g, parts = _packets(x, "row", by_block, 1 if by_block else 2, rows)
            mask = _choose(parts, ratio, QBLOCK if by_block else 1)
        if packed is None or not by_block:
            packed, scale, g, _ = _packets(x, "row", residual=2, energy=0, mask=mask)
    main = _as_nvfp4(x.shape, packed[0], scale[0], g)
    residual = _as_nvfp4(x.shape, packed[1], scale[1], g)
    return nvfp4.check_finite(where, main, name) if check else main, residual, mask


def _choose(parts: torch.Tensor, ratio: float, width: int) -> torch.Tensor:
    """Energy parts (R, groups) to the mask (K,) bool, a group being `width` channels."""
    R, groups = parts.shape
    if R == 0:  # no rows: no energy
        parts = parts.new_zeros(1, groups)
    while R > 1:  # 1024 rows of parts at a time
        block = min(triton.next_power_of_2(R), 1024)
        total = torch.empty(triton.cdiv(R, block), groups, device=parts.device)
        energy_kernel[(triton.cdiv(groups, 16), len(total))](
            parts, total, R, groups, block, 16, enable_fp_fusion=False
        )
        parts, R = total, len(total)
    mask = torch.empty(groups * width, dtype=torch.uint8, device=parts.device)
    kept = nvfp4.selected_groups(groups, ratio)
    choose_kernel[(triton.cdiv(groups, 64),)](
        parts, mask, groups, kept, width, 64, enable_fp_fusion=False
    )
    return mask.view(torch.bool)


def tile_scales(scale: torch.Tensor) -> torch.Tensor:
    """Block scales (..., R, C) fp8 to the layout of load_tiled_scales: (..., R', C', 512).

    R' = ceil(R / 128), C' = ceil(C / 4); the scale of row r, column c of a tile is byte
    (r % 32) * 16 + r // 32 * 4 + c. Missing rows and columns are 0.
    """
    *lead, R, C = scale.shape
    rows, columns = triton.cdiv(R, 128), triton.cdiv(C, 4)
    out = scale.new_zeros(*lead, rows * 128, columns * 4, dtype=torch.uint8)
    out[..., :R, :C] = scale.view(torch.uint8)
    out = rearrange(out, "... (R four r) (C c) -> ... R C (r four c)", four=4, r=32, c=4)
    return out.view(torch.float8_e4m3fn)


def _gemm(
    x: NVFP4Tensor, w: NVFP4Tensor, residual: NVFP4Tensor | None, mask: torch.Tensor | None,
    routing: Routing | None, native: bool,
) -> torch.Tensor:  # fmt: skip
    """gemm_kernel on checked operands; w (E, N, K), x (M, K)."""
    N, K = w.packed.shape[1], w.packed.shape[2] * 2
    M, device = x.packed.shape[0], x.packed.device
    S = M if routing is None else routing.row_of_slot.numel()
    y = torch.empty(S, N, device=device)
    if S == 0 or N == 0:
        return y
    with _on(y):
        # the packets of x, one behind the other
        tensors = [x] if residual is None else [x, residual]
        packed = _stack([t.packed for t in tensors])
        scale = _stack([t.scale.view(torch.uint8) for t in tensors])
        mask = packed if mask is None else mask  # not read without a residual
        if native:
            planes, P = packed, K // 2
            scale = scale.view(torch.float8_e4m3fn)
            w_scale = w.scale if w.scale.shape[-1] == 512 else tile_scales(w.scale)
        else:
            P = triton.cdiv(K, 32) * 16
            planes = torch.empty(len(tensors), 2, M, P, dtype=torch.float16, device=device)
            kept = torch.empty(triton.cdiv(K, BLOCK_K), dtype=torch.int32, device=device)
            decode_kernel[(M, len(tensors))](
                packed, scale, mask, planes, kept, M, K, P,
                max(64, triton.next_power_of_2(P)), not INTERPRETED,
                num_warps=8, enable_fp_fusion=False,
            )  # fmt: skip
            w_scale, mask = w.scale.view(torch.uint8), kept
        # the grid
        block_n = 128 if native else 64
        if routing is None:
            block_m = min(64, max(16, triton.next_power_of_2(M)))
            tiles, table = triton.cdiv(M, block_m), (planes, planes)  # not read
        else:
            block_m, tiles = routing.tile_rows, routing.expert_of_tile.numel()
            table = (routing.expert_of_tile, routing.slot_of_row)
        n_tiles = triton.cdiv(N, block_n)
        parts = 1 if routing is not None else k_parts(N, K)
        together = parts > 1 and M <= 64  # parts side by side where rows are few, else in turn
        out = torch.empty(parts, S, N, device=device) if together else y
        gemm_kernel[(n_tiles, tiles, parts if together else 1)](
            planes, scale, x.global_scale, mask, w.packed, w_scale,
            w.global_scale, *table, out, S, N, K, P,
            triton.cdiv(K, parts * BLOCK_K) * BLOCK_K, S // M, block_m, block_n, BLOCK_K,
            1 if together else parts, routing is not None, residual is not None, native,
            N % block_n == 0 and K % BLOCK_K == 0, not INTERPRETED,
            num_warps=4, num_stages=3, enable_fp_fusion=False,
        )  # fmt: skip
        if together:
            combine_kernel[(triton.cdiv(S * N, 512),)](
                out, x.global_scale, w.global_scale, y, S * N, N, 1.0 if native else 16384.0,
                parts, 512, enable_fp_fusion=False,
            )  # fmt: skip
    return y


def k_parts(N: int, K: int) -> int:
    """Into how many parts a dense GEMM splits K: enough programs for a large card at few rows.

    Depends on the weight alone, so that a row's bits do not depend on how many rows there are.
    """
    parts = 1
    while parts < 8 and parts * triton.cdiv(N, 64) < 512 and parts * 4 * BLOCK_K <= K:
        parts *= 2
    return parts


def _stack(tensors: list[torch.Tensor]) -> torch.Tensor:
    """One tensor (n, ...) of them; free if they lie one behind the other, as packets do."""
    first, size = tensors[0], tensors[0].nbytes
    behind = all(
        t.is_contiguous() and t.data_ptr() == first.data_ptr() + i * size
        for i, t in enumerate(tensors)
    )
    if behind and first.untyped_storage().nbytes() >= first.storage_offset() + len(tensors) * size:
        return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))
    return torch.stack(tensors)


def w4a4_gemm(
    x: NVFP4Tensor, w: NVFP4Tensor, residual: NVFP4Tensor | None = None,
    mask: torch.Tensor | None = None, native: bool = False,
) -> torch.Tensor:  # fmt: skip
    """y = (x^ + r^) w^^T: (M, N) fp32.

    Args:
        x: (M, K), one global scale a row.
        w: (N, K), one global scale.
        residual, mask: RAC's second packet, and which channels (K,) bool of it count.
        native: FP4 tensor cores (sm_100 and up), or decode to fp16.
    Raises:
        ValueError: shapes that do not match, no CUDA.
    """
    if w.packed.dim() != 2:
        raise ValueError(f"w4a4_gemm: w must be (N, K), its codes are {tuple(w.packed.shape)}")
    w = NVFP4Tensor(w.packed[None], w.scale[None], w.global_scale[None])
    _check_operands("w4a4_gemm", x, w, residual, mask, native)
    return _gemm(x, w, residual, mask, None, native)


def grouped_w4a4_gemm(
    x: NVFP4Tensor, w: NVFP4Tensor, routing: Routing, residual: NVFP4Tensor | None = None,
    mask: torch.Tensor | None = None, native: bool = False,
) -> torch.Tensor:  # fmt: skip
    """All routed experts in one launch: y[slot] = (x^ + r^)[its row] w^[its expert]^T, (S, N) fp32.

    x has a row per token or per slot, w is (E, N, K) with one global scale an expert, `routing`
    comes from `route`. The grid depends on shapes alone: fit for a CUDA graph.
    """
    where = "grouped_w4a4_gemm"
    if w.packed.dim() != 3 or w.packed.shape[0] != routing.experts:
        raise ValueError(
            f"{where}: w must be (E, N, K) with E={routing.experts} as in the routing, its codes "
            f"are {tuple(w.packed.shape)}"
        )
    _check_operands(where, x, w, residual, mask, native)
    S, M = routing.row_of_slot.numel(), x.packed.shape[0]
    if M not in (S, S // routing.top_k):
        raise ValueError(
            f"{where}: the routing deals {S} slots, top {routing.top_k}; x must have a row per "
            f"slot or token, it has {M}"
        )
    if routing.tile_rows not in (16, 32, 64):
        raise ValueError(
            f"{where}: tiles of {routing.tile_rows} rows; build the routing with kernels.route"
        )
    return _gemm(x, w, residual, mask, routing, native)


def _check_operands(where: str, x, w, residual, mask, native: bool) -> None:
    """ValueError unless these are x (M, K), w (E, N, K), residual like x, and mask (K,)."""
    K = w.packed.shape[-1] * 2
    if x.packed.dim() != 2 or x.packed.shape[1] * 2 != K:
        raise ValueError(
            f"{where}: x must be (M, K) with w's K={K}, its codes are {tuple(x.packed.shape)}"
        )
    if (residual is None) != (mask is None):
        raise ValueError(f"{where}: residual and mask come together, or not at all")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != (K,)):
        raise ValueError(f"{where}: mask must be bool ({K},), got {mask.dtype} {(*mask.shape,)}")
    if native and INTERPRETED:
        raise ValueError(f"{where}: Triton's interpreter misreads NVFP4; use native=False")
    (M, _), (E, N, _) = x.packed.shape, w.packed.shape
    for what, t, rows, scales in (
        ("x", x, (M,), M),
        ("w", w, (E, N), E),
        ("residual", residual, (M,), M),
    ):
        if t is None:
            continue
        tiled = native and what == "w" and t.scale.dim() == 4  # tile_scales made it
        wanted = {
            "packed": (torch.uint8, (*rows, K // 2)),
            "scale": (torch.float8_e4m3fn, t.scale.shape if tiled else (*rows, K // QBLOCK)),
            "global_scale": (torch.float32, t.global_scale.shape),
        }
        for field, (dtype, shape) in wanted.items():
            v = getattr(t, field)
            if v.dtype != dtype or v.shape != shape or not v.is_contiguous():
                raise ValueError(
                    f"{where}: {what}.{field} must be contiguous {dtype} {tuple(shape)}, got "
                    f"{v.dtype} {tuple(v.shape)}; make it with kernels.quantize"
                )
        if t.global_scale.numel() != scales:
            raise ValueError(
                f"{where}: {what} needs {scales} global scales, a row each for x (outer='row') or "
                f"a matrix each for w (outer='tensor'); it has {t.global_scale.numel()}"
            )
    _check_device(where, *x, *w, *(residual or ()), *(() if mask is None else (mask,)))


def route(choice: torch.Tensor, experts: int) -> Routing:
    """model.route in two launches; tiles of 16 rows or more, as the tensor cores want them.

    choice (T, top_k) int64, each in 0..E - 1 (not checked: that would take a device sync) -> a
    Routing with int32 tables.
    """
    if choice.dtype != torch.int64 or choice.dim() != 2 or experts < 1:
        raise ValueError(
            f"route: needs a choice (T, top_k) of int64 and 1 or more experts, got {choice.dtype} "
            f"{tuple(choice.shape)} and {experts}"
        )
    _check_device("route", choice)
    S, ints = choice.numel(), {"dtype": torch.int32, "device": choice.device}
    rows = 16
    while rows < 64 and rows * 4 * experts < S:
        rows *= 2
    tiles = max(1, triton.cdiv(S, rows) + min(experts, S))
    count, expert_of_tile = torch.empty(experts, **ints), torch.empty(tiles, **ints)
    slot_of_row, row_of_slot = torch.empty(tiles * rows, **ints), torch.empty(S, **ints)
    with _on(choice):
        choice = choice.contiguous()
        count_kernel[(experts,)](choice, count, S, 1024, enable_fp_fusion=False)
        route_kernel[(experts,)](
            choice, count, expert_of_tile, slot_of_row, row_of_slot, S, experts, tiles, rows,
            triton.next_power_of_2(experts), 1024, enable_fp_fusion=False,
        )  # fmt: skip
    return Routing(expert_of_tile, slot_of_row, row_of_slot, experts, choice.shape[1])


# ---- does this card compute what torch computes?


def has_fp4(device: str | torch.device) -> tuple[bool, str]:
    """Can this card, with this Triton, take the native path? And why (not)."""
    if torch.device(device).type != "cuda":
        return False, f"{device} runs kernels in Triton's interpreter"
    major, minor = torch.cuda.get_device_capability(device)
    card = f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
    if major not in (10, 12):
        return False, f"{card} has no FP4 tensor cores"
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8):
        return False, f"for the FP4 tensor cores of {card} triton {triton.__version__} is too old"
    return True, f"{card} has FP4 tensor cores"


def versions(device: torch.device | str) -> str:
    """Card and versions, in a line."""
    card = torch.device(device).type
    if card == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        card = f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
    return f"{card}, torch {torch.__version__}, triton {triton.__version__}"


class Check(NamedTuple):
    kernel: str
    passed: bool
    found: str


def self_check(device: str | torch.device, native: bool) -> list[Check]:
    """Each kernel against torch on a small awkward shape: ragged M, N and K, an empty expert.

    Quantizer and mask bit for bit; the GEMMs against an explicit dequantize and matmul in fp64, to
    K 2^-21 sum |x| |w|, which tests/test_kernels.py derives.
    """
    E, T, top_k, N, K = 5, 19, 2, 72, 592  # K is split, and its last tile holds 80 channels
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(T, K, generator=rng) * torch.randn(T, 1, generator=rng).exp()
    x[:, 7] *= 64  # an outlier channel
    x[1], x[2, :QBLOCK] = 0, x[2, :QBLOCK] * 1e-4
    x = x.to(device, torch.bfloat16)
    v = torch.randn(E, N, K, generator=rng).to(device, torch.bfloat16)
    choice = torch.stack([torch.randperm(E - 1, generator=rng)[:top_k] for _ in range(T)])
    choice, rows = choice.to(device), torch.arange(T, device=device) % 5 != 0
    checks = []

    def same(kernel: str, found, expected) -> None:
        wrong = sum(
            (a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).sum().item()
            for a, b in zip(found, expected, strict=True)
        )
        checks.append(
            Check(kernel, wrong == 0, "equal bits" if not wrong else f"{wrong} bytes differ")
        )

    def close(kernel: str, y: torch.Tensor, x_hat: torch.Tensor, w_hat: torch.Tensor) -> None:
        expected = torch.einsum("sk,snk->sn", x_hat, w_hat)
        bound = K * 2.0**-21 * torch.einsum("sk,snk->sn", x_hat.abs(), w_hat.abs())
        error = ((y.double() - expected).abs() / bound.clamp(min=1e-30)).max().item()
        checks.append(Check(kernel, error <= 1, f"error {error:.3f} of the bound"))

    w = quantize(v, "tensor")
    main, residual, mask = quantize_with_residual(x, rows=rows)
    reference = nvfp4.quantize_with_residual(x, rows=rows)
    all_blocks = nvfp4.quantize_with_residual(x, mask=torch.ones_like(mask))[1]
    same("quantize", w, nvfp4.quantize(v, "tensor"))
    same("quantize + residual", (*main, *residual), (*reference[0], *all_blocks))
    same("choose", [mask], [reference[2]])
    routing, slots = route(choice, E), torch.arange(T * top_k, device=device)
    at = routing.row_of_slot.long()
    same("route", [routing.slot_of_row[at], routing.expert_of_tile[at // routing.tile_rows]],
         [slots.int(), choice.flatten().int()])  # fmt: skip
    x_hat, w_hat = nvfp4.dequantize(main).double(), nvfp4.dequantize(w).double()
    rac_hat = x_hat + torch.where(mask, nvfp4.dequantize(residual).double(), 0.0)
    w0 = NVFP4Tensor(w.packed[0], w.scale[0], w.global_scale[0])
    close("w4a4_gemm", w4a4_gemm(main, w0, native=native), x_hat, w_hat[0].expand(T, -1, -1))
    y = w4a4_gemm(main, w0, residual, mask, native)
    close("w4a4_gemm + RAC", y, rac_hat, w_hat[0].expand(T, -1, -1))
    token = slots // top_k
    y = grouped_w4a4_gemm(main, w, routing, native=native)
    close("grouped_w4a4_gemm", y, x_hat[token], w_hat[choice.flatten()])
    y = grouped_w4a4_gemm(main, w, routing, residual, mask, native)
    close("grouped_w4a4_gemm + RAC", y, rac_hat[token], w_hat[choice.flatten()])
    return checks


def microseconds(calls: list[Callable[[], object]], count: int = 24, repeats: int = 20) -> float:
    """Median time of a call in a CUDA graph of `count` calls that go round `calls`.

    Give several calls with their own buffers, larger than the L2 cache together. A graph leaves
    out what the CPU takes to launch, which would hide a kernel of a few microseconds.
    """
    for call in calls[:2]:
        call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            calls[i % len(calls)]()
    times = []
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / count)
    return statistics.median(times[1:])
