"""kernels.py against its torch reference: in the interpreter anywhere, on the GPU with -m gpu.

Quantizer and mask must agree bit for bit. For the GEMMs the bound is that of fp32 summation: each
of the at most 4 K additions of exact products (two packets, in any order, and two scales) is off by
2^-24 of a partial sum at most, which is at most sum |x| |w|; a tensor core may truncate instead of
rounding, so twice that: K 2^-21 sum |x| |w|.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="the kernels need Triton")
import triton.language as tl

import kernels
import rollout
from quads_min import nvfp4
from quads_min.model import ModelConfig, route
from quads_min.modes import ARITHMETICS, Arithmetic
from quads_min.nvfp4 import NVFP4Tensor
from quads_min.qat import make_policy

ROOT = Path(__file__).parent.parent
SHAPES = [(1, 16), (5, 80), (33, 48), (3, 256), (1025, 16)]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cpu" and not kernels.INTERPRETED:
        pytest.skip("with a GPU the kernels are compiled, not interpreted: use -m gpu")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


def same(a, b):
    """Equal shapes and bytes, of two tensors or of every tensor of two tuples."""
    a, b = ((t,) if torch.is_tensor(t) else t for t in (a, b))
    pairs = [(x.contiguous(), y.contiguous()) for x, y in zip(a, b, strict=True)]
    return all(
        x.shape == y.shape and torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        for x, y in pairs
    )


def hard_rows(M, K, device, seed=0):
    """Rows of very different size, an outlier channel, a zero row, a quiet block, a zero block."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(M, K, generator=rng) * (2 * torch.randn(M, 1, generator=rng)).exp()
    x[:, K // 2] *= 32
    x[0, :16] = 0
    if M > 2:
        x[1], x[2, :16] = 0, x[2, :16] * 1e-4
    return x.to(device, torch.bfloat16)


def operands(M, N, K, device, ratio=0.5, experts=()):
    """Packets (2, M, K), mask, weight, and in fp64: x^ and x^ + r^ of the kept blocks, w^."""
    packets, mask = kernels.quantize_with_residual(hard_rows(M, K, device), ratio)
    w = hard_rows(N * (experts or 1), K, device, seed=2)
    w = kernels.quantize(w.view(experts, N, K) if experts else w, "tensor")
    x, r = nvfp4.dequantize(packets).double()
    kept = torch.where(mask.repeat_interleave(16), r, 0.0)
    return packets, mask, w, (x, x + kept), nvfp4.dequantize(w).double()


def main(packets, rows=slice(None)):
    """The main packet, or some rows of it, as kernels.quantize would return it."""
    packed, scale, g = packets
    return NVFP4Tensor(*(t[rows].contiguous() for t in (packed[0], scale[0], g)))


def first(packets, M):
    """Both packets of the first M rows."""
    packed, scale, g = packets
    return NVFP4Tensor(packed[:, :M].contiguous(), scale[:, :M].contiguous(), g[:M])


def check_gemm(y, x_hat, w_hat):
    """y (S, N) against x_hat (S, K) times w_hat (N, K) or (S, N, K), in fp64."""
    w_hat = w_hat.expand(len(x_hat), -1, -1)
    expected = torch.einsum("sk,snk->sn", x_hat, w_hat)
    bound = x_hat.shape[1] * 2.0**-21 * torch.einsum("sk,snk->sn", x_hat.abs(), w_hat.abs())
    assert ((y.double() - expected).abs() <= bound).all()
    assert expected.abs().max() > 0


# ---- quantize


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packets_and_mask_equal_the_reference_bit_for_bit(shape, device):
    """The residual packet holds all blocks: the reference's under a full mask."""
    x = hard_rows(*shape, device)
    rows = (torch.arange(2 * shape[0], device=device) % 3 != 1)[::2]
    want = nvfp4.quantize(x)
    full = torch.ones(shape[1], dtype=torch.bool, device=device)
    residual = nvfp4.encode_with_residual(x, mask=full)[1].pack()
    assert same(kernels.quantize(x), want)
    for ratio in (0.0, 0.3, 1.0):
        packets, mask = kernels.quantize_with_residual(x, ratio, rows)
        assert same(main(packets), want) and same(packets.packed[1], residual.packed)
        assert same(packets.scale[1], residual.scale)
        channels = nvfp4.encode_with_residual(x, ratio, rows=rows)[2]
        assert same(mask.repeat_interleave(16), channels)


def test_energies_are_summed_in_the_tree_order(device):
    """A program's rows in the kernel, the programs' sums in torch: the order of the reference."""
    x = hard_rows(300, 32, device, seed=1)
    found = kernels._quantize(x, "row", "x", torch.ones(300, dtype=torch.bool, device=device))[1]
    residual = x.float() - nvfp4.encode(x).dequantize()
    energy = residual.square().view(300, 2, 16).movedim(-1, 0)
    assert len(found) > 1 and same(nvfp4.tree_sum(found), nvfp4.tree_sum(nvfp4.tree_sum(energy)[0]))


def test_weights_and_rows_too_long_for_a_program_take_two_passes(device):
    v = hard_rows(6, 80, device).view(2, 3, 80)
    assert same(kernels.quantize(v, "tensor"), nvfp4.quantize(v, "tensor"))
    x = hard_rows(2, kernels.LONGEST_ROW + 16, device)
    assert same(kernels.quantize(x), nvfp4.quantize(x))


def test_any_strides_do_and_x_is_not_changed(device):
    wide = hard_rows(6, 97, device)
    before = wide.clone()
    for x in (wide[:, :64], wide[::2, 16:80], wide[:, 1:65], wide[0, 1:17],
              wide.as_strided((5, 16), (97, 2))):  # fmt: skip
        assert same(kernels.quantize(x), nvfp4.quantize(x)) and torch.equal(before, wide)


def test_the_hard_values_of_the_format(device):
    """Midpoints both ways, E4M3 midpoints and edges, scale order (23, 28), subnormal block scales,
    huge and tiny numbers; all of them bf16 numbers but where rounding to bf16 moves them nearby."""
    grid = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    rows = [grid + [-v for v in grid], [23.0] * 16 + [28.0] * 16]
    for s in (448.0, 464.0, 1.0625, 1.1875, 2**-9, 1.5 * 2**-9, 2**-10, 0.0059 / 6, 240.0, 256.0):
        rows.append([2688.0] * 16 + [6 * s, 6 * s * 0.9999999, -0.0, 0.0239257794] * 4)
    rows += [[3e38, -1e-38] * 8, [1e-40, -1e-40] * 8, [-0.0] * 16, [0.02] * 16 + [5e-5] * 16]
    rows += [row[::-1] for row in rows]
    x = torch.zeros(len(rows), 32)  # zeros at the end of a row change no scale
    for i, row in enumerate(rows):
        x[i, : len(row)] = torch.tensor(row)
    x = x.to(device, torch.bfloat16)
    assert same(kernels.quantize(x), nvfp4.quantize(x))
    full = torch.ones(32, dtype=torch.bool, device=device)
    packets, _ = kernels.quantize_with_residual(x)
    want = nvfp4.encode_with_residual(x, mask=full)[1].pack()
    assert same((packets.packed[1], packets.scale[1]), want[:2])
    assert not (packets.scale.view(torch.uint8) == 0x7F).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_inf_and_nan_are_refused_or_poison_the_global_scale(bad, device):
    x = hard_rows(3, 80, device)
    x[1, 70] = bad
    for quantize in (kernels.quantize, kernels.quantize_with_residual):
        with pytest.raises(ValueError, match="gate_up holds inf or NaN"):
            quantize(x, name="gate_up")
    g = kernels.quantize(x, check=False).global_scale
    assert torch.isfinite(g).flatten().tolist() == [True, False, True]


def test_empty_input_needs_no_launch(device):
    x = torch.empty(0, 32, device=device, dtype=torch.bfloat16)
    packets, mask = kernels.quantize_with_residual(x)
    assert packets.packed.shape == (2, 0, 16) and mask.tolist() == [True, False]
    w = kernels.quantize(torch.ones(24, 32, device=device, dtype=torch.bfloat16), "tensor")
    assert kernels.w4a4_gemm(packets, w, mask=mask).shape == (0, 24)


# ---- GEMM


@pytest.mark.parametrize(
    "M, N, K", [(3, 3, 16), (5, 70, 80), (17, 64, 128), (40, 40, 272)], ids=str
)
def test_gemm_equals_dequantize_and_matmul(M, N, K, device):
    packets, mask, w, (plain, compensated), w_hat = operands(M, N, K, device)
    check_gemm(kernels.w4a4_gemm(main(packets), w), plain, w_hat)
    check_gemm(kernels.w4a4_gemm(packets, w, mask=mask), compensated, w_hat)


@pytest.mark.parametrize("counts", [[0, 1, 127, 129], [0, 0, 3], [1]], ids=str)
def test_each_expert_gets_the_rows_of_its_own_gemm(counts, device):
    """Zero-token experts included; a row per slot (down) and a row per token (gate and up)."""
    E, K, slots = len(counts), 80, sum(counts)
    choice = torch.repeat_interleave(torch.arange(E), torch.tensor(counts))
    choice = choice[torch.randperm(slots, generator=torch.Generator().manual_seed(0))].to(device)
    packets, mask, w, (plain, compensated), w_hat = operands(slots, 24, K, device, experts=E)
    y = kernels.w4a4_gemm(packets, w, route(choice[:, None], E, 16, 64), mask)
    check_gemm(y, compensated, w_hat[choice])
    if slots % 2 == 0:
        pairs, token = route(choice.view(-1, 2), E, 16, 64), torch.arange(slots) // 2
        y = kernels.w4a4_gemm(main(packets, slice(0, slots // 2)), w, pairs)
        check_gemm(y, plain[token.to(device)], w_hat[choice])


def test_a_row_has_the_same_bits_alone_and_in_any_batch(device):
    """Given the mask, and across tile sizes: every M in 1..129 on the GPU, tile edges elsewhere.
    K = 528 is split, and few rows sum the splits otherwise than many."""
    packets, mask, w, (_, compensated), w_hat = operands(129, 40, 528, device)
    assert kernels.k_splits(40, 528) > 1
    whole = kernels.w4a4_gemm(packets, w, mask=mask)
    check_gemm(whole, compensated, w_hat)
    for M in (1, 17, 64) if kernels.INTERPRETED else range(1, 129):
        assert same(kernels.w4a4_gemm(first(packets, M), w, mask=mask), whole[:M]), M
    w = NVFP4Tensor(*(t[None] for t in w))
    expert = torch.zeros(64, 1, dtype=torch.int64, device=device)
    for M in (1, 64):
        y = kernels.w4a4_gemm(first(packets, M), w, route(expert[:M], 1, 16, 64), mask)
        check_gemm(y, compensated[:M], w_hat)


def test_the_planes_are_exact_for_all_codes_and_scales(device):
    """Through the GEMM with the identity as weight: 16 codes times every E4M3 scale but NaN."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)  # every byte: both nibbles
    packed = codes.view(1, 32, 8).repeat(127, 1, 1).flatten(1)  # (127, 256): K = 512
    scale = torch.arange(127, dtype=torch.uint8, device=device)[:, None].repeat(1, 32)
    x = NVFP4Tensor(packed, scale.view(torch.float8_e4m3fn), torch.ones(127, 1, device=device))
    rows = slice(0, 127, 9) if kernels.INTERPRETED else slice(None)  # 3 s a hundred rows there
    x = NVFP4Tensor(*(t[rows].contiguous() for t in x))
    eye, one = torch.eye(512, device=device).unflatten(1, (-1, 16)), torch.ones(1, 1, device=device)
    w = nvfp4.Encoded(eye, one.expand(512, 32).contiguous(), one).pack()
    assert same(kernels.w4a4_gemm(x, w), nvfp4.dequantize(x) + 0.0)


def test_what_the_mask_leaves_out_changes_no_bit(device):
    """Even poison (scales of NaN) in the residual packet, in K tiles with and without kept blocks;
    nor do bytes around the operands (0xFF) and in fresh memory matter."""
    packets, _, w, _, _ = operands(5, 24, 384, device)
    mask = torch.zeros(24, dtype=torch.bool, device=device)
    mask[8] = True
    y = kernels.w4a4_gemm(packets, w, mask=mask)
    scale = packets.scale.view(torch.uint8).clone()
    scale[1, :, :8], scale[1, :, 9:] = 0x7F, 0x7F
    poisoned = packets._replace(scale=scale.view(torch.float8_e4m3fn))
    assert same(kernels.w4a4_gemm(poisoned, w, mask=mask), y)
    plain, none = kernels.w4a4_gemm(main(packets), w), torch.zeros_like(mask)
    assert same(kernels.w4a4_gemm(poisoned, w, mask=none), plain) and not same(y, plain)

    def cut(t):
        flat = t.view(torch.uint8).flatten()
        room = torch.full((flat.numel() + 512,), 0xFF, dtype=torch.uint8, device=device)
        room[256:-256] = flat
        return room[256:-256].view(t.dtype).view(t.shape)

    def dirty(*shape, **kwargs):
        t = torch.zeros(*shape, **kwargs)
        t.view(torch.uint8).fill_(0xFF)  # NaN in every float format here
        return t

    empty, kernels.torch.empty = kernels.torch.empty, dirty
    try:
        operand, weight = (NVFP4Tensor(*map(cut, t)) for t in (packets, w))
        assert same(kernels.w4a4_gemm(operand, weight, mask=cut(mask)), y)
        assert same(kernels.quantize_with_residual(hard_rows(5, 384, device))[0], packets)
    finally:
        kernels.torch.empty = empty


def test_block_scales_are_tiled_128_by_4_and_read_back_in_order(device):
    """(5, 80) takes 1,024 bytes; in a tile, byte (r % 32) * 16 + r // 32 * 4 + c. What the native
    path loads, as far as it can run anywhere: 200 x 11 scales."""

    def tile(scale):
        return kernels.tile_scales(scale.view(torch.float8_e4m3fn)).view(torch.uint8)

    assert tile(torch.zeros(5, 5, dtype=torch.uint8, device=device)).numel() == 1024
    for r, c, offset in ((1, 0, 16), (32, 0, 4), (33, 2, 22), (127, 3, 511)):
        scale = torch.zeros(128, 4, dtype=torch.uint8, device=device)
        scale[r, c] = 1
        assert tile(scale).flatten().nonzero().item() == offset
    scale = torch.arange(200 * 11, device=device).view(200, 11).remainder(120).to(torch.uint8)
    out = torch.zeros(256, 16, dtype=torch.uint8, device=device)
    triton.jit(untile_kernel)[(2, 2)](tile(scale), out, 11, 3, BLOCK_K=128)
    assert same(out[:200, :11], scale) and not out[200:].any() and not out[:, 11:].any()


def untile_kernel(ptr, out_ptr, columns, tiles, BLOCK_K: tl.constexpr):
    r, c = tl.program_id(0), tl.program_id(1)
    s = kernels.load_tiled_scales(ptr + r * tiles * 512, columns, c * 8, BLOCK_K)
    at = (r * 128 + tl.arange(0, 128))[:, None] * 16 + c * 8 + tl.arange(0, 8)[None, :]
    tl.store(out_ptr + at, s)


def test_what_does_not_fit_is_refused(device):
    packets, mask, w, _, _ = operands(4, 24, 32, device)
    x, experts = main(packets), NVFP4Tensor(*(t[None] for t in w))
    ones = torch.ones(24, 32, device=device, dtype=torch.bfloat16)
    zeros = torch.zeros(4, 1, dtype=torch.int64, device=device)
    gemm, routing = kernels.w4a4_gemm, route(zeros, 1, 16, 64)
    for call, message in (
        (lambda: kernels.quantize(ones[:, :20]), "K=20 of x is not"),
        (lambda: kernels.quantize(ones.float()), "must be bf16"),
        (lambda: kernels.quantize(ones, "column"), "outer is"),
        (lambda: kernels.quantize_with_residual(ones, 1.5), "ratio"),
        (lambda: kernels.quantize_with_residual(ones, rows=ones[0] > 0), "rows must be bool"),
        (lambda: gemm(x, w._replace(packed=w.packed[:, :8].contiguous())), r"w.scale .*\(24, 1\)"),
        (lambda: gemm(x, experts), r"w.packed must be .*\(24, 16\)"),
        (lambda: gemm(x, kernels.quantize(ones)), r"w.global_scale \(outer='tensor'\)"),
        (lambda: gemm(kernels.quantize(ones, "tensor"), w), r"x.global_scale \(outer='row'\)"),
        (lambda: gemm(x._replace(scale=x.scale.view(torch.uint8)), w), "x.scale must be"),
        (lambda: gemm(packets, w), r"x.packed must be .*\(4, 16\)"),
        (lambda: gemm(x, w, mask=mask), r"x.packed must be .*\(2, 4, 16\)"),
        (lambda: gemm(packets, w, mask=mask.float()), r"mask must be contiguous torch.bool \(2,\)"),
        (lambda: gemm(x, w, routing), r"w.packed must be .*\(1, 24, 16\)"),
        (lambda: gemm(x, experts, route(zeros[:3].expand(3, 2), 1, 16, 64)), "one a slot or token"),
        (lambda: gemm(x, experts, route(zeros, 1)), "least=16"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()
    if kernels.INTERPRETED:
        with pytest.raises(ValueError, match="misreads NVFP4"):
            gemm(x, w, native=True)


# ---- the engine on these kernels


@pytest.fixture
def policy(device):
    config = ModelConfig(
        vocab=12, max_len=12, width=32, layers=1, heads=2, experts=3, expert_width=32,
        outlier_channels=1,
    )  # fmt: skip
    torch.manual_seed(0)
    return make_policy(config, Arithmetic("nvfp4", "bf16")).to(device)


def generate(engine):
    prompts, rng = torch.arange(8).view(2, 4), torch.Generator().manual_seed(5)
    return engine.generate(prompts, 3, eos=11, pad=10, samples=2, generator=rng)


@pytest.mark.parametrize("name", ["w4a4", "w4a4+rac"])
def test_both_backends_generate_the_same(name, policy):
    """Log-probs differ by the order of fp32 sums, and where that turns a bf16 rounding later on."""
    engines = [rollout.Engine(policy, ARITHMETICS[name], b) for b in ("torch", "emulated")]
    assert [e.backend.name for e in engines] == ["torch (emulated)", "triton (emulated)"]
    a, b = map(generate, engines)
    assert torch.equal(a.tokens, b.tokens) and torch.equal(a.choice, b.choice)
    assert (a.logprobs - b.logprobs).abs().max() < 0.02
    assert engines[0].weight_bytes == engines[1].weight_bytes


def test_the_gemm_multiplies_what_the_trainer_does(policy, device):
    """Weight identity, read through the kernel with the identity as input; also after w -> 2w."""
    engine = rollout.Engine(policy, ARITHMETICS["w4a4+rac"], "emulated")
    tokens = torch.arange(6, device=device).view(1, 6)
    policy(tokens)
    assert engine.multiplies_what(policy)
    with torch.no_grad():
        for p in policy.parameters():
            p *= 2
    policy(tokens)
    assert not engine.multiplies_what(policy)
    engine.sync()
    fresh = rollout.Engine(policy, ARITHMETICS["w4a4+rac"], "emulated")
    assert engine.multiplies_what(policy) and same(generate(engine)[:2], generate(fresh)[:2])


def test_a_failed_self_check_falls_back_to_torch_loudly(policy, device, monkeypatch, capsys):
    checks = kernels.compare_with_torch(device, False)
    assert len(checks) == 7 and all(c.passed for c in checks), checks

    class Wrong:
        right = kernels.gemm_kernel

        def __getitem__(self, grid):
            def launch(*args, **kwargs):
                self.right[grid](*args, **kwargs)
                args[10].mul_(1.001)

            return launch

    kernels.self_check.cache_clear()
    monkeypatch.setattr(kernels, "gemm_kernel", Wrong())
    backend = rollout.Engine(policy, ARITHMETICS["w4a4"], "emulated").backend
    kernels.self_check.cache_clear()
    said = capsys.readouterr().err
    assert backend.name == "torch (emulated)" and "FAILED" in backend.reason
    assert "WARNING" in said and "expert GEMM" in said and torch.__version__ in said


def test_the_backend_is_resolved_by_arithmetic_and_device(device):
    resolve, rac = rollout.resolve_backend, ARITHMETICS["w4a4+rac"]
    assert resolve("torch", rac, device).name == "torch (emulated)"
    assert "W4A4" in resolve("auto", ARITHMETICS["w4a16"], device).reason
    by_channel = Arithmetic("nvfp4", "nvfp4", 0.5, "channel")
    assert "by block" in resolve("auto", by_channel, device).reason
    if device == "cpu":
        assert "need CUDA" in resolve("auto", rac, device).reason
    if not kernels.has_fp4(device)[0]:
        assert resolve("emulated", rac, device).name == "triton (emulated)"
        with pytest.raises(ValueError, match="use --backend emulated"):
            resolve("native", rac, device)


@pytest.mark.gpu
def test_a_graph_replayed_with_new_routing_equals_eager():
    """The tile table is built on the device, the grid depends on shapes alone."""
    E, T, K, N = 8, 40, 128, 64
    w = kernels.quantize(torch.randn(E, N, K, device="cuda", dtype=torch.bfloat16), "tensor")
    x = torch.randn(T, K, device="cuda", dtype=torch.bfloat16)
    choice = torch.zeros(T, 2, dtype=torch.int64, device="cuda")
    live = torch.ones(T, dtype=torch.bool, device="cuda")

    def layer(x, choice, live):
        packets, mask = kernels.quantize_with_residual(x, rows=live, check=False)
        return (kernels.w4a4_gemm(packets, w, route(choice, E, 16, 64), mask),)

    graphed = rollout.Graphed(layer)
    for seed in range(3):
        torch.manual_seed(seed)
        choice = torch.rand(T, E, device="cuda").topk(2).indices
        x, live = torch.randn_like(x), torch.rand(T, device="cuda") > 0.3
        assert same(graphed(x, choice, live), layer(x, choice, live))


def test_triton_is_asked_for_cuda_tensors():
    """In a process without the interpreter: a CPU tensor is an error, not a crash."""
    code = """import torch, kernels
try: kernels.quantize(torch.ones(2, 32, dtype=torch.bfloat16))
except ValueError as e: assert "CUDA" in str(e) and "quads_min.nvfp4" in str(e), e
else: raise SystemExit("no error")"""
    env = {"PATH": "/usr/bin:/bin", "HOME": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
