"""quads_min/nvfp4.py against an independent oracle, and the cases that other quantizers got wrong.

The oracle is numpy with the E2M1 and E4M3 casts of ml_dtypes. It shares no code with the module and
every step of it rounds to float32, so all comparisons are of raw bytes: no tolerance to choose.
"""

from itertools import product

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from quads_min import nvfp4
from quads_min.nvfp4 import choose_channels, dequantize, quantize
from quads_min.nvfp4 import encode_with_residual as split

settings.register_profile("here", deadline=None, derandomize=True)
settings.load_profile("here")
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
F = np.float32
FLT_MAX = np.finfo(F).max
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OUTER = ("row", "tensor")
SHAPES = ((16,), (1, 16), (0, 32), (5, 80), (33, 80), (2, 3, 48), (2, 0, 2, 16), (1025, 16))
SCALES = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)  # all but the NaN, 0x7F
NORMAL = torch.randn(1025, 80, generator=torch.Generator().manual_seed(0))
MIDPOINTS, EVEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), (0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0)
VALUES = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def oracle(x, outer="row", outer_of=None):
    """[packed, scale bytes, global scale, x^] of float32 x, under the S of `outer_of`."""
    with np.errstate(all="ignore"):  # 2688 / 0 and 1 / 0 are meant
        axes = -1 if outer == "row" else (-2, -1)
        amax = np.abs(x if outer_of is None else outer_of).max(axes, keepdims=True)
        S = np.where(amax == 0, F(1), np.minimum(F(2688) / amax, FLT_MAX))
        g = F(1) / S
        blocks = x.reshape(*x.shape[:-1], x.shape[-1] // 16, 16)
        s = np.minimum(np.abs(blocks).max(-1) * (S * F(1 / 6)), F(448))
        s = s.astype(ml_dtypes.float8_e4m3fn)
        step = (s.astype(F) * g)[..., None]
        y = np.clip(blocks * np.minimum(F(1) / step, FLT_MAX), F(-6), F(6))
    y = np.where(s.astype(F)[..., None] == 0, F(0), y).astype(ml_dtypes.float4_e2m1fn)
    codes = y.view(np.uint8).reshape(x.shape)
    packed = codes[..., 0::2] + 16 * codes[..., 1::2]
    return [packed, s.view(np.uint8), g, (y.astype(F) * step).reshape(x.shape)]


def tree(x):
    """Sum over the first axis by adjacent pairs; an odd one at the end moves up unchanged."""
    while len(x) > 1:
        pairs = len(x) // 2 * 2
        x = np.concatenate([x[0:pairs:2] + x[1:pairs:2], x[pairs:]])
    return x.sum(0)  # of one row, or none


def oracle_mask(r, ratio, width, rows):
    """Energy of `width` channels, summed within a row, then over rows; ties to the lower index."""
    with np.errstate(over="ignore"):
        energy = np.where(rows[..., None], r * r, F(0)).reshape(-1, r.shape[-1] // width, width)
        energy = tree(tree(np.moveaxis(energy, -1, 0)))
    keep = max(1, int(np.floor(ratio * len(energy) + 0.5))) if ratio else 0
    kept = sorted(range(len(energy)), key=lambda i: (-energy[i], i))[:keep]
    return np.repeat(np.isin(np.arange(len(energy)), kept), width)


def raw(*arrays):
    """Shapes and bytes, so that -0 is not 0 and fp8 compares."""
    tensors = [a if isinstance(a, torch.Tensor) else torch.from_numpy(a) for a in arrays]
    tensors = [t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t for t in tensors]
    return [(t.dtype, t.shape, t.cpu().numpy().tobytes()) for t in tensors]


@st.composite
def tensors(draw):
    """Heavy tails, midpoints, 84 decades within or across rows, or what hypothesis thinks of."""
    shape, dtype = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(DTYPES))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    n, decades = rng.standard_normal(shape), 84 * rng.random(shape) - 45
    ties = (8 * n).round().clip(-24, 24) / 4  # S = 1 and block scales of 1
    ties[..., ::16], ties[..., :1] = 6, 2688
    noise = [n**3, ties, n * 10**decades, n * 10 ** decades[..., :1]]
    floats = arrays(F, shape, elements=st.floats(width=32, allow_nan=False, allow_infinity=False))
    x, top = draw(st.one_of(*map(st.just, noise), floats)), torch.finfo(dtype).max
    return torch.from_numpy(x.clip(-top, top)).to(dtype)


def one_row(*values, amax=2688.0):
    """The values in block 0 and the row's amax in block 1; by default S = g = 1."""
    return torch.tensor([[*values, *[0.0] * (16 - len(values)), amax, *[0.0] * 15]])


@pytest.mark.parametrize("device", ["cpu", CUDA])
@given(tensors())
def test_quantize_equals_the_oracle_bit_for_bit(device, x):
    for outer in OUTER if x.dim() > 1 and x.shape[-2] else OUTER[:1]:
        q, want = quantize(x.to(device), outer), oracle(x.float().numpy(), outer)
        x_hat = nvfp4.encode(x.to(device), outer).dequantize()
        assert raw(*q, dequantize(q), x_hat) == raw(*want, want[3]) and np.isfinite(want[3]).all()


@pytest.mark.parametrize("exponent", [-100, 0, 100])
def test_all_16_codes_and_127_scales_round_trip(exponent):
    """x = scale * value, so bytes are known without an oracle. A block of scale 0 stores code 0.
    The planes have at most 6 significant bits, from 2^-10 to 2688: exact in bf16 and fp16."""
    grid = (SCALES.float()[:, None] * VALUES).view(1, -1)
    x = grid * 2.0**exponent
    q, packed = quantize(x), torch.arange(0x10, 0x100, 0x22).byte().repeat(127, 1)  # 10, 32, 54, ..
    packed[0] = 0
    assert raw(q.packed, q.scale) == raw(packed.view(1, -1), SCALES.view(1, -1))
    assert torch.equal(dequantize(q), x) and raw(*quantize(dequantize(q))) == raw(*q)
    assert all(torch.equal(nvfp4.unpack(q).planes().to(dtype).float(), grid) for dtype in DTYPES)


@pytest.mark.parametrize(("bmax", "amax", "scale"), [
    (6 * 1.0625, 2688, 1.0), (6 * 1.1875, 2688, 1.25), (9 * 2**-9, 2688, 2**-8),  # midpoints
    (0.0059, 2688, 2**-9), (0.00585937, 2688, 0), (6 * 2**-10, 2688, 0),  # no floor at 2^-6
    (23, 28, 384.0),  # 23 * (96 * (1/6)) = 368 is a midpoint; 23 / 6 / g gives 352
    (9, 12, 352.0),  # 9 * (224 * (1/6)) = 336.00003; any other order, 336: 320
    (25, 28, 384.0),  # S = 2688 * (1 / 28) = 96.00001 would give 416
    (0.611, 1.0044062, 288.0), (0.611, 1.0078125, 256.0),  # the first amax, rounded to bf16
])  # fmt: skip
def test_block_scales_round_to_even_and_have_no_floor(bmax, amax, scale):
    assert quantize(one_row(bmax, amax=amax)).scale[0, 0].item() == scale


@pytest.mark.parametrize(("block", "amax", "decoded"), [
    # random data never hits a midpoint; -0.25 becomes -0, never -0.5
    ([6, *MIDPOINTS, *(-v for v in MIDPOINTS)], 2688, [6, *EVEN, *(-v for v in EVEN)]),
    # v * (1 / s) = 1.75 is a midpoint, to 2; v / s = 1.74999988 would give 1.5
    ([6 * 0.013671875, 0.0239257794], 2688, [6 * 0.013671875, 2 * 0.013671875]),
    ([0.0059], 2688, [3 * 2**-9]), ([-0.005, 0.003, -0.0], 2688, [0.0]),  # a dead block has no sign
    ([0.0], 3, [0.0]), ([0.0], 0, [0.0]),  # on bits: a signal-to-noise figure would hide a NaN
])  # fmt: skip
def test_values_are_rounded_to_even_and_zeros_stay_zeros(block, amax, decoded):
    for outer in OUTER:
        q = quantize(one_row(*block, amax=amax), outer)
        assert raw(dequantize(q)) == raw(one_row(*decoded, amax=amax))


def test_bytes_of_codes_and_scales():
    """The even index is in the low nibble. A bare cast to E4M3 is NaN above 464 here and there."""
    for pair, byte in (([1.0, 6.0], 0x72), ([-0.5, 3.0], 0x59)):
        assert quantize(one_row(*pair, 6.0)).packed[0, 0] == byte
    for scale, byte in ((256, 0x78), (240, 0x77), (448, 0x7E)):
        assert quantize(one_row(6.0 * scale)).scale.view(torch.uint8)[0, 0] == byte
    bmax = torch.tensor([448, 464, 464.1, 480, 1e30]).unsqueeze(1)
    e = nvfp4._encode_blocks(bmax.expand(5, 16), torch.full((5, 1), 6.0))  # S / 6 = 1
    assert (e.scale == 448).all() and (e.value == 6).all()


def test_a_row_never_depends_on_its_batch_mates_nor_on_strides():
    """Every M in 1..129: the first M packets of the whole; and a lone row gives its own."""
    x = NORMAL[:129].bfloat16()
    for m, first in product(range(1, 130), (0, -1)):
        rows = slice(first % m, m)
        assert raw(*quantize(x[rows])) == raw(*(part[rows] for part in quantize(x)))
    for view in (x[:128].t(), x[::3], x.expand(2, 129, 80)):
        before = view.contiguous()  # a copy
        assert raw(*quantize(view)) == raw(*quantize(before)) and torch.equal(view, before)


@pytest.mark.gpu
def test_offsets_are_64_bit():
    """Beyond 2^31 elements the last rows equal those of a small call. Takes 67 GB."""
    if torch.cuda.mem_get_info()[0] < 75e9:
        pytest.skip("needs 75 GB of free device memory")
    x = torch.empty(2**27 + 3, 16, dtype=torch.bfloat16, device="cuda").normal_()
    q, last = quantize(x), slice(2**27 - 2, None)
    assert raw(*(part[last] for part in q)) == raw(*quantize(x[last]))


@pytest.mark.parametrize("device", ["cpu", CUDA])
@given(tensors(), st.floats(0, 1), st.sampled_from([("block", 16), ("channel", 1)]), st.booleans())
def test_the_residual_split_equals_the_oracle_bit_for_bit(device, x, ratio, unit, all_rows):
    """Main packet = quantize(x) whatever the mask; r^ = DQ(Q(r * m)) under the g of x."""
    live = torch.arange(x[..., 0].numel()).view(x.shape[:-1]) % 3 != 1
    rows, values = None if all_rows else live.to(device), x.float().numpy()
    main, residual, mask = split(x.to(device), ratio, unit[0], rows)
    want = oracle(values)
    r = values - want[3]
    m = oracle_mask(r, ratio, unit[1], live.numpy() | all_rows)
    want_residual = oracle(np.where(m, r, F(0)), "row", values)
    assert raw(*main.pack()) == raw(*want[:3]) and raw(mask) == raw(m)
    for packet in (residual, split(x.to(device), 0, mask=mask)[1]):  # the second: a given mask
        assert raw(*packet.pack(), packet.dequantize()) == raw(*want_residual)


def test_the_mask_keeps_most_energy_and_ties_go_to_the_lower_index():
    """max(1, floor(ratio * groups + 0.5)) groups, but 0 at ratio 0."""
    residual = -torch.tensor([1.0, 3, 2, 3, 2, 0, 2, 3]).repeat_interleave(16).expand(3, 128)
    order = torch.tensor([1, 3, 7, 2, 4, 6, 0, 5])
    for ratio, kept in ((0, 0), (1e-9, 1), (3 / 16, 2), (0.4, 3), (0.5, 4), (0.5625, 5), (1, 8)):
        want = torch.isin(torch.arange(8), order[:kept]).repeat_interleave(16)
        assert torch.equal(choose_channels(residual, ratio, "block"), want)


def test_dead_rows_do_not_choose():
    """Even if their energy overflows: padding may hold anything."""
    residual, rows = NORMAL[:6, :64].clone(), torch.tensor([1, 0, 1, 1, 0, 0]).bool()
    want = choose_channels(residual[rows], 0.25, "block")
    for huge in (1e4, 1e30, float("inf"), float("nan")):
        residual[~rows] = torch.where(want, 0.0, huge)
        assert torch.equal(choose_channels(residual, 0.25, "block", rows), want)
        assert not torch.equal(choose_channels(residual, 0.25, "block"), want)


def test_sums_add_adjacent_pairs():
    """Bit-equal to numpy for ragged row counts: the order is the contract."""
    for n in [*range(20), 100, 257]:
        assert raw(nvfp4.tree_sum(NORMAL[:n, :5])[0]) == raw(tree(NORMAL[:n, :5].numpy()))


@given(tensors())
@example(torch.tensor([[1e-44, 0.0]]))  # 1e-44 / 448 is 0
def test_fp8_equals_ml_dtypes_bit_for_bit(x):
    x32 = x.float().numpy()
    scale = np.abs(x32).max(-1, keepdims=True) / F(448)
    scale = np.where(scale == 0, F(1), scale)
    plane = np.clip(x32 / scale, F(-448), F(448)).astype(ml_dtypes.float8_e4m3fn)
    assert raw(*nvfp4.encode_fp8(x)) == raw(plane.view(np.uint8), scale)
    assert np.isfinite(plane.astype(F) * scale).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_raise_and_name_the_tensor(bad):
    """`encode` does not sync: there the row turns non-finite as a whole, and only that row."""
    for index, outer in product((0, 17, 63), OUTER):
        x = torch.ones(3, 64)
        x[1, index] = bad
        with pytest.raises(ValueError, match="w_up holds inf or NaN"):
            quantize(x, outer, name="w_up")
        e = nvfp4.encode(x)
        for y in (e.dequantize(), e.planes() * e.global_scale, nvfp4.encode_fp8(x)[1]):
            assert torch.isfinite(y).any(-1).tolist() == [True, False, True]


ONES = torch.ones(2, 32)


@pytest.mark.parametrize(("x", "kwargs", "message"), [
    (torch.ones(2, 100), {}, "K=100 of w_up is not a positive multiple of 16 .*pad to 112"),
    (torch.ones(512, 60), {}, "K=60 of w_up .*pad to 64"), (ONES[:, :0], {}, "K=0 .*pad to 16"),
    (ONES.double(), {}, "w_up must be bf16, fp16 or fp32, got torch.float64"),
    (ONES, {"outer": "column"}, "outer is 'row' or 'tensor', got 'column'"),
    (ONES[0], {"outer": "tensor"}, r"w_up of shape \(32,\) has no tensor to share"),
    (ONES[:0], {"outer": "tensor"}, "no tensor to share"), (ONES[0, 0], {}, "no row to share"),
    (ONES, {"ratio": 1.01}, "from 0 to 1, got 1.01"), (ONES, {"ratio": float("nan")}, "ratio"),
    (ONES, {"unit": "row"}, "unit is 'block' or 'channel', got 'row'"),
    (ONES, {"rows": ONES[:, 0]}, r"rows must be bool \(2,\), got torch.float32"),
    (ONES, {"rows": ONES[0] > 0}, "rows must"), (ONES, {"mask": ONES > 0}, r"mask .* \(32,\)"),
])  # fmt: skip
def test_bad_arguments_are_refused_with_what_was_expected(x, kwargs, message):
    with pytest.raises(ValueError, match=message):
        quantize(x, name="w_up", **kwargs) if kwargs.keys() <= {"outer"} else split(x, **kwargs)
