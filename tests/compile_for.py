"""Compile all of kernels.py for a GPU that is not here: `python tests/compile_for.py 100`.

It wants PYTHONPATH=. and no TRITON_INTERPRET, as test_compile.py runs it. The launchers run, on
CPU tensors, but each launch ends when Triton's JIT has compiled the kernel for sm_100: with the
types, alignments and constants of a real launch. Prints a JSON line a kernel.
"""

import json
import re
import sys
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import kernels
from quads_min.model import route
from quads_min.nvfp4 import NVFP4Tensor


def packed(*shape, scales):
    """NVFP4 of some shape, which nobody reads."""
    codes = torch.zeros(*shape[:-1], shape[-1] // 2, dtype=torch.uint8)
    scale = torch.zeros(*shape[:-1], shape[-1] // 16, dtype=torch.float8_e4m3fn)
    return NVFP4Tensor(codes, scale, torch.ones(scales))


def main(arch):
    if kernels.INTERPRETED:
        raise SystemExit("unset TRITON_INTERPRET: interpreted kernels cannot be compiled")
    driver.set_active(SimpleNamespace(  # all that the JIT asks of a driver before it launches
        get_current_target=lambda: GPUTarget("cuda", arch, 32), get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    ))  # fmt: skip
    native, jit, gemms, note = arch >= 100, JITFunction.run, [], ""

    def compile_only(kernel, *args, grid, warmup, **options):
        """Of the PTX the tests look at what multiplies, converts or fills tensor memory."""
        constants = {p.name: a for p, a in zip(kernel.params, args, strict=True) if p.is_constexpr}
        try:
            compiled = jit(kernel, *args, grid=grid, warmup=True, **options)
        except Exception as e:
            raise SystemExit(f"{kernel.__name__} {constants}: {str(e)[-400:]}") from None
        words = re.findall(r"\b(?:\w*mma|mul|cvt|tcgen05)\.[\w.:]+", compiled.asm["ptx"])
        print(json.dumps({
            "kernel": compiled.metadata.name, "constants": constants, "note": note,
            "types": dict(compiled.src.signature), "ptx": " ".join(words),
            "elf": compiled.asm["cubin"][:4] == b"\x7fELF", "shared": compiled.metadata.shared,
            "tensor_columns": compiled.metadata.tmem_size or 0,
        }), flush=True)  # fmt: skip
        if kernel is kernels.gemm_kernel:
            gemms.append((dict(zip(kernel.arg_names, args, strict=True)), options))

    JITFunction.run = compile_only
    kernels._check_device = lambda *args: None  # CPU tensors will do
    x = torch.zeros(16, 512, dtype=torch.bfloat16)
    kernels.quantize(x, check=False)
    kernels.quantize(x, "tensor", check=False)
    kernels.quantize_with_residual(x, check=False)

    # even and ragged sizes; 160 tokens fill tiles of 64 and sum the splits of K = 512 in turn, 16
    # tokens tiles of 16, the splits side by side
    sizes = [(16, 256, 512), (160, 200, 208), (16, 200, 208), (160, 256, 512)]
    for T, N, K in sizes if native else sizes[:2]:
        routing = route(torch.zeros(T, 2, dtype=torch.int64), 2, least=16, most=64)
        w, experts = packed(N, K, scales=(1, 1)), packed(2, N, K, scales=(2, 1, 1))
        for mask in (None, torch.ones(K // 16, dtype=torch.bool)):
            x = packed(*(() if mask is None else (2,)), T, K, scales=(T, 1))
            kernels.w4a4_gemm(x, w, None, mask, native)
            kernels.w4a4_gemm(x, experts, routing, mask, native)

    args, options = gemms[0]  # of launches that the tests must tell from the right ones
    if arch == 100:
        note = "8 tokens"
        kernels.gemm_kernel[(1,)](*(args | {"BLOCK_M": 8}).values(), **options)
    if arch == 120:
        note = "uint8 scales"
        scales = {name: args[name].view(torch.uint8) for name in ("xs_ptr", "ws_ptr")}
        kernels.gemm_kernel[(1,)](*(args | scales).values(), **options)


if __name__ == "__main__":
    main(int(sys.argv[1]))
