"""How fast the kernels are, beside the strongest bf16 and fp8 that torch offers. Needs a GPU.

    python tests/bench.py                       all of it, two minutes
    python tests/bench.py --only quantize,engine

Every time is the median of replays of a CUDA graph of 24 calls that go round buffers larger than
the L2 cache together (kernels.microseconds). Shares are of what this card was measured to do in
the same run: copy bandwidth for what moves bytes, a bf16 matmul of 8,192^3 for what multiplies.
Bytes are those that must move once: a W4A4 weight is 0.5625 B, bf16 2 B, fp8 1 B.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script of tests/: the root is not on it
import kernels
import rollout
from kernels import microseconds
from quads_min import checkpoint, nvfp4
from quads_min.modes import ARITHMETICS, MODES, Arithmetic
from quads_min.nvfp4 import NVFP4Tensor

W4, SECTIONS = 0.5625, ("quantize", "dense", "grouped", "engine", "estimate")
MOE = {  # (E, top_k, N, K): both expert GEMMs of preset base, and of a Qwen3-30B-A3B-like layer
    "toy gate_up": (8, 2, 128, 128),
    "toy down": (8, 2, 128, 64),
    "gate_up": (128, 8, 1536, 2048),
    "down": (128, 8, 2048, 768),
}
TOKENS = (1, 16, 64, 256, 4096)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def random_weight(*shape: int) -> NVFP4Tensor:
    """Codes and scales at random: the time does not depend on them, and 226 MB come at once."""
    *lead, N, K = shape
    codes = torch.randint(0, 256, (*lead, N, K // 2), device="cuda", dtype=torch.uint8)
    scale = torch.randint(0x30, 0x7F, (*lead, N, K // 16), device="cuda", dtype=torch.uint8)
    scale = scale.view(torch.float8_e4m3fn)
    return NVFP4Tensor(codes, scale, torch.ones(*lead, 1, 1, device="cuda"))


def fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return nvfp4.encode_fp8(x)


def copies(bytes_each: float, most: int = 24) -> int:
    """How many buffers so that together they are three times the L2 cache."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return max(1, min(most, int(3 * l2 / bytes_each) + 1))


class Card:
    """This card's ceilings, measured."""

    def __init__(self):
        a, b = (torch.empty(1 << 28, device="cuda", dtype=torch.uint8) for _ in range(2))
        self.copy = 2 * a.numel() / microseconds([lambda: b.copy_(a)], 8) / 1e3  # GB/s
        x, w = normal(8192, 8192), normal(8192, 8192)
        self.matmul = 2 * 8192**3 / microseconds([lambda: x @ w.T], 4) / 1e6  # TFLOP/s

    def row(self, what: str, path: str, us: float | None, moved: float, flops: float = 0) -> None:
        if us is None:
            print(f"{what:52} {path:9} {'-':>9}")
            return
        rate = f"{moved / us / 1e3:6.0f} GB/s {100 * moved / us / 1e3 / self.copy:4.0f} %"
        if flops:
            tflops = flops / us / 1e6
            rate += f" {tflops:7.1f} TFLOP/s {100 * tflops / self.matmul:4.0f} %"
        print(f"{what:52} {path:9} {us:9.2f} us {rate}", flush=True)


def attempt(calls) -> float | None:
    """None where torch has no such kernel for this card or shape: an empty cell."""
    try:
        return microseconds(calls)
    except (RuntimeError, NotImplementedError, AttributeError):
        torch.cuda.synchronize()
        return None


def bench_quantize(card: Card, path: str) -> None:
    for M, K in ((256, 128), (64, 2048), (4096, 2048), (4096, 4096)):
        xs = [normal(M, K) for _ in range(copies(2.0 * M * K))]
        us = microseconds([lambda x=x: kernels.quantize(x, check=False) for x in xs])
        card.row(f"quantize {M} x {K}", path, us, (2 + W4) * M * K)
        us = microseconds([lambda x=x: kernels._packets(x, "row", 1, 1, rows[:M]) for x in xs])
        card.row(f"quantize {M} x {K} + residual, energies", path, us, (2 + 2 * W4) * M * K)
        us = microseconds([lambda x=x: split(x, rows[:M]) for x in xs])
        card.row(f"quantize {M} x {K} + residual, mask", path, us, (2 + 2 * W4) * M * K)


rows = torch.ones(4096, dtype=torch.bool, device="cuda" if torch.cuda.is_available() else "cpu")


def split(x: torch.Tensor, live: torch.Tensor, ratio: float = 0.5):
    return kernels.quantize_with_residual(x, ratio, rows=live, check=False)


def bench_dense(card: Card, path: str, native: bool) -> None:
    N = K = 4096
    ws = [random_weight(N, K) for _ in range(copies(W4 * N * K))]
    wb = [normal(N, K) for _ in range(copies(2.0 * N * K))]
    w8 = [fp8(w) for w in wb]
    for M in TOKENS:
        flops, name = 2 * M * N * K, f"dense N=K=4096 M={M}"
        x, xb = kernels.quantize(normal(M, K)), normal(M, K)
        x8, sx = fp8(xb)
        us = microseconds([lambda w=w: kernels.w4a4_gemm(x, w, native=native) for w in ws])
        card.row(f"{name} w4a4", path, us, W4 * N * K, flops)
        for ratio in (0.5, 1.0):
            x, r, m = split(xb, rows[:M], ratio)
            calls = [lambda w=w: kernels.w4a4_gemm(x, w, r, m, native) for w in ws]
            card.row(f"{name} w4a4 + RAC {ratio}", path, microseconds(calls), W4 * N * K, flops)
        us = microseconds([lambda w=w: xb @ w.T for w in wb])
        card.row(f"{name} bf16 (cuBLAS)", "torch", us, 2 * N * K, flops)
        us = attempt([
            lambda w=w: torch._scaled_mm(x8, w[0].T, sx, w[1].T, out_dtype=torch.bfloat16)
            for w in w8
        ])  # fmt: skip
        card.row(f"{name} fp8 (_scaled_mm)", "torch", us, N * K, flops)


def bench_grouped(card: Card, path: str, native: bool) -> None:
    for layer, (E, top_k, N, K) in MOE.items():
        ws = [random_weight(E, N, K) for _ in range(copies(W4 * E * N * K))]
        if native:
            ws = [w._replace(scale=kernels.tile_scales(w.scale)) for w in ws]
        wb = [normal(E, N, K) for _ in range(copies(2.0 * E * N * K))]
        w8 = [fp8(w) for w in wb]
        for T in TOKENS:
            torch.manual_seed(T)
            choice = torch.rand(T, E, device="cuda").topk(top_k).indices
            hit, S, up = len(choice.unique()), T * top_k, layer.endswith("gate_up")
            M = T if up else S  # a row per token, or per slot
            flops, name = 2 * S * N * K, f"{layer} E={E} N={N} K={K} T={T}"
            routing, xb = kernels.route(choice, E), normal(M, K)
            x = kernels.quantize(xb)
            gemm = kernels.grouped_w4a4_gemm
            us = microseconds([lambda w=w: gemm(x, w, routing, native=native) for w in ws])
            card.row(f"{name} w4a4", path, us, W4 * hit * N * K, flops)
            for ratio in (0.5, 1.0):
                x, r, m = split(xb, rows.new_ones(M), ratio)
                calls = [lambda w=w: gemm(x, w, routing, r, m, native) for w in ws]
                us = microseconds(calls)
                card.row(f"{name} w4a4 + RAC {ratio}", path, us, W4 * hit * N * K, flops)
            order = choice.flatten().argsort(stable=True)
            sorted_rows = xb[order // top_k] if up else xb[order]
            counts = torch.bincount(choice.flatten(), minlength=E)
            ends = counts.cumsum(0).int()
            us = attempt([lambda w=w: torch._grouped_mm(sorted_rows, w.mT, ends) for w in wb])
            card.row(f"{name} bf16 (_grouped_mm)", "torch", us, 2 * hit * N * K, flops)
            x8, sx = fp8(sorted_rows)
            us = attempt([
                lambda w=w: torch._scaled_grouped_mm(
                    x8, w[0].mT, sx.flatten(), w[1].squeeze(-1), ends, out_dtype=torch.bfloat16
                ) for w in w8
            ])  # fmt: skip
            card.row(f"{name} fp8 (_scaled_grouped_mm)", "torch", us, hit * N * K, flops)
        del ws, wb, w8
    choice = torch.rand(64, 128, device="cuda").topk(8).indices
    us = microseconds([lambda: kernels.route(choice, 128)])
    print(f"{'route E=128 T=64':52} {path:9} {us:9.2f} us")


def bench_engine() -> None:
    policy, task = checkpoint.load_policy(rollout.SHIPPED / "base.pt", Arithmetic())
    policy.to("cuda")
    prompts = rollout.held_out_prompts(task, 16)
    for name in ARITHMETICS:
        modes = ", ".join(mode for mode, (ours, _) in MODES.items() if ours == name)
        engine = rollout.Engine(policy, ARITHMETICS[name])
        run = lambda e=engine: e.generate(prompts, task.max_new_tokens, task.eos, task.pad, 16)  # noqa: E731
        tokens = int(run().lengths.sum())
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        for _ in range(12):
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        ms = sorted(times)[len(times) // 2]
        print(f"engine {name:9} {engine.backend.label:18} {ms:7.2f} ms for 16 x 16 completions, "
              f"{tokens / ms * 1e3:8.0f} tokens/s   (rollouts of {modes})")  # fmt: skip


def estimate(bandwidth: float, flops: float, source: str) -> None:
    """Roofline: the larger of bytes / bandwidth and FLOPs / rate. Nothing was run for this."""
    print(f"\nESTIMATE, not measured, for a card of {bandwidth:g} TB/s and {flops:g} PFLOP/s dense "
          f"FP4 ({source}):")  # fmt: skip
    for layer in ("gate_up", "down"):
        E, top_k, N, K = MOE[layer]
        for T in (64, 4096):
            hit = E * (1 - (1 - top_k / E) ** T)  # experts hit, on average
            moved = (W4 * hit * N + W4 * T * top_k) * K + 4 * T * top_k * N
            memory = moved / bandwidth / 1e6
            once, twice = (2 * p * T * top_k * N * K / flops / 1e9 for p in (1, 2))
            print(f"  {layer} T={T}: {moved / 1e6:.0f} MB -> {memory:.1f} us; MMA {once:.1f} us, "
                  f"with RAC {twice:.1f} us: RAC costs at least "
                  f"x {max(memory, twice) / max(memory, once):.2f}")  # fmt: skip


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--only", default=",".join(SECTIONS), help="of " + ", ".join(SECTIONS))
    parser.add_argument("--estimate-bandwidth", type=float, default=8.0, help="TB/s")
    parser.add_argument("--estimate-fp4", type=float, default=9.0, help="PFLOP/s, dense")
    parser.add_argument("--estimate-source", default="vendor's figures for an HGX B200")
    args = parser.parse_args(argv)
    wanted = args.only.split(",")
    if unknown := set(wanted) - set(SECTIONS):
        parser.error(f"--only takes {', '.join(SECTIONS)}, got {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    native, why = kernels.has_fp4("cuda")
    path = "native" if native else "emulated"
    card = Card()
    print(f"{kernels.versions('cuda')}; {path}: {why}\ncopy {card.copy:.0f} GB/s, bf16 matmul "
          f"{card.matmul:.0f} TFLOP/s\n")  # fmt: skip
    if "quantize" in wanted:
        bench_quantize(card, path)
    if "dense" in wanted:
        bench_dense(card, path, native)
    if "grouped" in wanted:
        bench_grouped(card, path, native)
    if "engine" in wanted:
        bench_engine()
    if "estimate" in wanted:
        estimate(args.estimate_bandwidth, args.estimate_fp4, args.estimate_source)


if __name__ == "__main__":
    main(sys.argv[1:])
