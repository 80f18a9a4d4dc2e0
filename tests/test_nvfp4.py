"""quads_min/nvfp4.py against an independent oracle, and the cases that other quantizers got wrong.

The oracle is numpy with the E2M1 and E4M3 casts of ml_dtypes. It shares no code with the module and
every step of it rounds to float32, so all comparisons are of raw bytes: no tolerance to choose.
"""

from itertools import pairwise, product

import ml_dtypes
import numpy as np
import pytest
import torch

from quads_min import nvfp4
from quads_min.nvfp4 import choose_channels, dequantize, quantize
from quads_min.nvfp4 import encode_with_residual as split

F = np.float32
FLT_MAX = np.finfo(F).max
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OUTER = ("row", "tensor")
SHAPES = ((16,), (1, 16), (0, 32), (5, 80), (33, 80), (2, 3, 48), (2, 0, 2, 16), (129, 32))
KINDS = ("normal", "cubed", "sparse", "ties", "decades", "rows")
SCALES = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)  # all but the NaN, 0x7F
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


def tree(items):
    """Sum of a list by adjacent pairs; an odd one at the end moves up unchanged."""
    while len(items) > 1:
        odd = items[-1:] if len(items) % 2 else []
        items = [items[i] + items[i + 1] for i in range(0, len(items) - 1, 2)] + odd
    return items[0]


def oracle_mask(r, ratio, width, rows):
    """Energy of `width` channels, summed within a row, then over rows; ties to the lower index."""
    with np.errstate(over="ignore"):
        energy = np.where(rows[:, None], r * r, F(0)).reshape(len(r), -1, width)
        energy = tree(list(tree(list(np.moveaxis(energy, -1, 0)))))
    keep = max(1, int(np.floor(ratio * len(energy) + 0.5))) if ratio else 0
    kept = sorted(range(len(energy)), key=lambda i: (-energy[i], i))[:keep]
    return np.repeat(np.isin(np.arange(len(energy)), kept), width)


def raw(*arrays):
    """Shapes and bytes, so that -0 is not 0 and fp8 compares."""
    tensors = [a if isinstance(a, torch.Tensor) else torch.from_numpy(a) for a in arrays]
    tensors = [t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t for t in tensors]
    return [(t.dtype, t.shape, t.cpu().numpy().tobytes()) for t in tensors]


def assert_equals_oracle(x, outer="row"):
    q, want = quantize(x, outer), oracle(x.float().numpy(), outer)
    assert raw(*q, dequantize(q)) == raw(*want)
    assert raw(nvfp4.encode(x, outer).dequantize()) == raw(want[3]) and np.isfinite(want[3]).all()
    assert (q.scale.view(torch.uint8) < 0x7F).all()  # no NaN, whatever came in


def sample(kind, shape, dtype=torch.float32, seed=0):
    rng = np.random.default_rng(seed)
    n, u = rng.standard_normal(shape), rng.random(shape)
    ties = np.round(48 * u - 24) / 4  # S = 1 and block scales of 1: many values are midpoints
    ties[..., ::16], ties[..., :1] = 6, 2688
    kinds = {"normal": n, "cubed": n**3, "sparse": n * (u < 0.05), "ties": ties}
    kinds["decades"] = np.sign(n) * 10 ** (84 * u - 45)  # 1e-45 to FLT_MAX
    kinds["rows"] = n * 10 ** (84 * u[..., :1] - 45)
    top = torch.finfo(dtype).max
    return torch.from_numpy(kinds[kind]).clamp(-top, top).to(dtype)


def one_row(*values, amax=2688.0):
    """The values in block 0 and the row's amax in block 1; by default S = g = 1."""
    return torch.tensor([[*values, *[0.0] * (16 - len(values)), amax, *[0.0] * 15]])


# ---- the quantizer


@pytest.mark.parametrize("kind", KINDS)
def test_quantize_equals_the_oracle_bit_for_bit(kind):
    """Ragged M, K = 16, K = 80 (5 scales), no rows, leading dims; down to fp32 subnormals."""
    for (seed, shape), dtype, outer in product(enumerate(SHAPES), DTYPES, OUTER):
        if outer == "row" or (len(shape) > 1 and shape[-2]):
            assert_equals_oracle(sample(kind, shape, dtype, seed), outer)


@pytest.mark.parametrize("exponent", [-100, 0, 100])
def test_all_16_codes_and_127_scales_round_trip(exponent):
    """x = scale * value, so bytes are known without an oracle. A block of scale 0 stores code 0.
    The planes have at most 6 significant bits, from 2^-10 to 2688: exact in bf16 and fp16."""
    x = (SCALES.float()[:, None] * VALUES).view(1, -1) * 2.0**exponent
    q, packed = quantize(x), torch.arange(0x10, 0x100, 0x22).byte().repeat(127, 1)  # 10, 32, 54, ..
    packed[0] = 0
    assert raw(q.packed, q.scale) == raw(packed.view(1, -1), SCALES.view(1, -1))
    assert torch.equal(dequantize(q), x) and raw(*quantize(dequantize(q))) == raw(*q)
    planes = nvfp4.unpack(q).planes()
    assert torch.equal(planes.double().view(127, 16), SCALES.double()[:, None] * VALUES.double())
    assert torch.equal(planes.bfloat16().float(), planes) and torch.equal(
        planes.half().float(), planes
    )


def test_seven_midpoints_round_to_even():
    """Random data never hits a midpoint. -0.25 becomes -0, never -0.5."""
    m, want = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    got = dequantize(quantize(one_row(6.0, *m, *(-v for v in m))))[0, :15]
    assert raw(got) == raw(torch.tensor([6.0, *want, *(-v for v in want)]))


@pytest.mark.parametrize(
    ("bmax", "amax", "scale"),
    [
        (6 * 1.0625, 2688.0, 1.0),  # midpoints of E4M3 go to even
        (6 * 1.1875, 2688.0, 1.25),
        (6 * 1.5 * 2**-9, 2688.0, 2**-8),
        (6 * 2**-10, 2688.0, 0.0),
        (0.00585937, 2688.0, 0.0),  # below it the block is 0
        (0.0059, 2688.0, 2**-9),  # above it lives: no floor at 2^-6, the smallest normal scale
        (23.0, 28.0, 384.0),  # 23 * (96 * (1/6)) = 368 is a midpoint; 23 / 6 / g gives 352
        (9.0, 12.0, 352.0),  # 9 * (224 * (1/6)) = 336.00003; any other order, 336: 320
        (25.0, 28.0, 384.0),  # S = 2688 * (1 / 28) = 96.00001 would give 416
        (0.611, 1.0044062, 288.0),  # amax stays fp32: rounded to bf16 ...
        (0.611, 1.0078125, 256.0),  # ... it would give this
    ],
)
def test_block_scales_round_to_even_and_have_no_floor(bmax, amax, scale):
    assert quantize(one_row(bmax, amax=amax)).scale[0, 0].item() == scale


def test_scales_beyond_448_saturate_and_bytes_are_e4m3():
    """Clamped before the cast: a bare cast is NaN above 464 on some devices and versions."""
    for bmax in (448.0, 464.0, 464.1, 480.0, 1e30):
        e = nvfp4._encode_blocks(torch.full((1, 16), bmax), torch.full((1, 1), 6.0))  # S / 6 = 1
        assert e.scale.item() == 448 and (e.value == 6).all()
    for scale, byte in ((256, 0x78), (240, 0x77), (448, 0x7E)):
        assert quantize(one_row(6.0 * scale)).scale.view(torch.uint8)[0, 0] == byte


def test_zeros_stay_zeros_beside_anything():
    """On bits, since a signal-to-noise figure would hide a NaN; a block of scale 0 has no signs."""
    rows = torch.stack([torch.zeros(16), torch.ones(16)])
    for x, outer in product((one_row(amax=3.0), rows, rows[:1]), OUTER):
        assert raw(dequantize(quantize(x, outer))) == raw(x)
    assert quantize(rows).global_scale[0] == 1
    assert not quantize(one_row(-0.005, 0.003, -0.0)).packed[0, :8].any()


def test_values_multiply_the_reciprocal_and_the_even_index_is_in_the_low_nibble():
    """v * (1 / s) = 1.75 is a midpoint, to 2; v / s = 1.74999988 would give 1.5."""
    q = quantize(one_row(6 * 0.013671875, 0.0239257794))
    assert q.scale.view(torch.uint8)[0, 0] == 7 and q.packed[0, 0] == 0x47
    for pair, byte in (([1.0, 6.0], 0x72), ([-0.5, 3.0], 0x59)):
        assert quantize(one_row(*pair, 6.0)).packed[0, 0] == byte
    q = quantize(torch.ones(1, 16))
    assert (q.packed.numel(), q.scale.numel()) == (8, 1)


@pytest.mark.parametrize(("M", "K"), [(129, 80), (1025, 16)])
def test_a_row_never_depends_on_its_batch_mates_nor_on_strides(M, K):
    """Every M in 1..129: the first M packets of the whole; and a lone row gives its own."""
    x = sample("cubed", (M, K), torch.bfloat16)
    assert_equals_oracle(x)
    for m, first in product(range(1, 130), (0, -1)):
        rows = slice(first % m, m)
        assert raw(*quantize(x[rows])) == raw(*(part[rows] for part in quantize(x)))
    for view in (x[:128].t(), x[::3], x.expand(2, M, K)):
        before = view.clone(memory_format=torch.contiguous_format)
        assert raw(*quantize(view)) == raw(*quantize(before)) and torch.equal(view, before)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (1025, 80)])
def test_gpu_and_cpu_accept_the_same_shapes_and_give_the_same_bits(shape):
    for kind, dtype in product(KINDS, DTYPES):
        x = sample(kind, shape, dtype)
        (*cpu, mask), (*gpu, gpu_mask) = split(x), split(x.cuda())
        for a, b in zip(cpu, gpu, strict=True):
            assert raw(*a.pack(), a.dequantize(), mask) == raw(*b.pack(), b.dequantize(), gpu_mask)
        if len(shape) > 1 and shape[-2]:
            assert raw(*quantize(x, "tensor")) == raw(*quantize(x.cuda(), "tensor"))


@pytest.mark.gpu
def test_offsets_are_64_bit():
    """Beyond 2^31 elements the last rows equal those of a small call. Takes 67 GB."""
    if torch.cuda.mem_get_info()[0] < 75e9:
        pytest.skip("needs 75 GB of free device memory")
    x = torch.empty(2**27 + 3, 16, dtype=torch.bfloat16, device="cuda").normal_()
    q, last = quantize(x), slice(2**27 - 2, None)
    assert raw(*(part[last] for part in q)) == raw(*quantize(x[last]))


# ---- the residual split


@pytest.mark.parametrize("unit", ["block", "channel"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_residual_split_equals_the_oracle_bit_for_bit(kind, unit):
    """Main packet = quantize(x) whatever the mask; r^ = DQ(Q(r * m)) under the g of x."""
    x = sample(kind, (2, 7, 80), torch.bfloat16)
    live = torch.from_numpy(np.random.default_rng(1).random((2, 7)) < 0.6)
    for ratio, rows in product((0, 0.01, 0.5, 1), (None, live)):
        main, residual, mask = split(x, ratio, unit, rows)
        want = oracle(x.float().numpy())
        r, counted = x.float().numpy() - want[3], np.ones(14, bool) if rows is None else rows
        m = oracle_mask(r.reshape(14, 80), ratio, 16 if unit == "block" else 1, counted.reshape(14))
        want_residual = oracle(np.where(m, r, F(0)), "row", x.float().numpy())
        assert raw(*main.pack()) == raw(*want[:3]) == raw(*quantize(x)) and raw(mask) == raw(m)
        assert raw(*residual.pack(), residual.dequantize()) == raw(*want_residual)
    assert raw(*split(x, 0, unit, mask=mask)[1].pack()) == raw(*residual.pack())  # a given mask


def test_the_mask_keeps_most_energy_and_ties_go_to_the_lower_index():
    """max(1, floor(ratio * groups + 0.5)) groups, but 0 at ratio 0."""
    residual = -torch.tensor([1.0, 3, 2, 3, 2, 0, 2, 3]).repeat_interleave(16).expand(3, 128)
    order = [1, 3, 7, 2, 4, 6, 0, 5]
    for ratio, kept in ((0, 0), (1e-9, 1), (3 / 16, 2), (0.4, 3), (0.5, 4), (0.5625, 5), (1, 8)):
        mask = choose_channels(residual, ratio, "block").view(8, 16)
        assert mask.all(1).nonzero().flatten().tolist() == sorted(order[:kept])
        assert mask.any(1).sum() == kept
    for unit, M in product(("block", "channel"), (0, 3)):  # no energy: still a definite choice
        mask = choose_channels(torch.zeros(M, 512), 0.25, unit)
        assert torch.equal(mask, torch.arange(512) < 128)


@pytest.mark.parametrize("huge", [1e4, 1e30, float("inf"), float("nan")])
def test_dead_rows_do_not_choose(huge):
    """Even if their energy overflows: padding may hold anything."""
    residual, rows = sample("normal", (6, 128)), torch.tensor([1, 0, 1, 1, 0, 0]).bool()
    residual[~rows] = 0
    want = choose_channels(residual, 0.25, "block")
    residual[~rows, 32:64] = huge
    assert torch.equal(choose_channels(residual, 0.25, "block", rows), want)
    assert not torch.equal(choose_channels(residual, 0.25, "block"), want)


def test_compensation_shrinks_the_error():
    """|r - r^| <= |r| everywhere, and at ratio 1 at most a scale step, max|r| / 6 * 18/17.

    The step is half the widest E2M1 gap, 18/17 the most that E4M3 rounds up; 2^-20 is for fp32.
    """
    x = sample("normal", (64, 128))
    r = x - nvfp4.encode(x).dequantize()
    left = [r - split(x, ratio)[1].dequantize() for ratio in (0, 0.25, 0.5, 0.75, 1)]
    assert torch.equal(left[0], r) and all((e.abs() <= r.abs() * (1 + 2**-20)).all() for e in left)
    assert all(b.square().sum() < a.square().sum() for a, b in pairwise(left))
    step = r.view(64, 8, 16).abs().amax(-1) / 6 * (18 / 17) * (1 + 2**-20)
    assert (left[-1].view(64, 8, 16).abs().amax(-1) <= step).all()


def test_sums_add_adjacent_pairs():
    """Bit-equal to a python loop for ragged row counts: the order is the contract."""
    for n in [*range(1, 20), 100, 257]:
        x = sample("cubed", (n, 5), seed=n)
        assert raw(nvfp4.tree_sum(x)[0]) == raw(tree(list(x.numpy())))


# ---- fp8, and what is refused


@pytest.mark.parametrize("kind", ["normal", "cubed", "sparse", "ties"])
def test_fp8_equals_ml_dtypes_bit_for_bit(kind):
    for dtype in DTYPES:
        x = sample(kind, (33, 80), dtype)
        x[5] = 0
        amax = x.float().abs().amax(-1, keepdim=True).numpy()
        scale = np.where(amax == 0, F(1), amax / F(448))
        plane = np.clip(x.float().numpy() / scale, F(-448), F(448)).astype(ml_dtypes.float8_e4m3fn)
        assert raw(*nvfp4.encode_fp8(x)) == raw(plane.view(np.uint8), scale)
    plane, scale = nvfp4.encode_fp8(torch.tensor([[1e-44, 0.0]]))  # 1e-44 / 448 is 0
    assert torch.isfinite(plane.float() * scale).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_raise_and_name_the_tensor(bad):
    """`encode` does not sync: there the row turns non-finite as a whole, and only that row."""
    for index in (0, 17, 63):
        x = torch.ones(3, 64)
        x[1, index] = bad
        for outer in OUTER:
            with pytest.raises(ValueError, match="w_up holds inf or NaN"):
                quantize(x, outer, name="w_up")
        e = nvfp4.encode(x)
        for y in (e.dequantize(), e.planes() * e.global_scale, nvfp4.encode_fp8(x)[1]):
            assert torch.isfinite(y).any(-1).tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("x", "kwargs", "message"),
    [
        (torch.ones(2, 100), {}, "K=100 of w_up is not a positive multiple of 16 .*pad to 112"),
        (torch.ones(512, 60), {}, "K=60 of w_up .*pad to 64"),
        (torch.ones(2, 0), {}, "K=0 of w_up .*pad to 16"),
        (torch.ones(2, 16).double(), {}, "w_up must be bf16, fp16 or fp32, got torch.float64"),
        (torch.ones(2, 16), {"outer": "column"}, "outer is 'row' or 'tensor', got 'column'"),
        (torch.ones(16), {"outer": "tensor"}, r"w_up of shape \(16,\) has no tensor to share"),
        (torch.tensor(1.0), {}, "has no row to share"),
        (torch.ones(0, 16), {"outer": "tensor"}, "has no tensor to share a scale"),
        (torch.ones(2, 32), {"ratio": 1.01}, "ratio is a share from 0 to 1, got 1.01"),
        (torch.ones(2, 32), {"ratio": float("nan")}, "ratio"),
        (torch.ones(2, 32), {"unit": "row"}, "unit is 'block' or 'channel', got 'row'"),
        (torch.ones(2, 32), {"rows": torch.ones(3).bool()}, r"rows must be bool \(2,\)"),
        (torch.ones(2, 32), {"rows": torch.ones(2)}, "rows must be bool .*got torch.float32"),
        (torch.ones(2, 32), {"mask": torch.ones(2, 32).bool()}, r"mask must be .* \(32,\)"),
    ],
)
def test_bad_arguments_are_refused_with_what_was_expected(x, kwargs, message):
    with pytest.raises(ValueError, match=message):
        quantize(x, name="w_up", **kwargs) if kwargs.keys() <= {"outer"} else split(x, **kwargs)
