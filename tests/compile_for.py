"""Compile all of kernels.py for a GPU that is not here: `python tests/compile_for.py 100`.

It wants PYTHONPATH=. and no TRITON_INTERPRET, as test_compile.py runs it. The launchers run, on
CPU tensors, but each launch ends when Triton's JIT has compiled the kernel for sm_100: with the
types, alignments and constants of a real launch. What a kernel would have written stays whatever
was in memory, and nobody reads it. Prints a JSON line a kernel.
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


def main(arch):
    driver.set_active(SimpleNamespace(  # all that the JIT asks of a driver before it launches
        get_current_target=lambda: GPUTarget("cuda", arch, 32), get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    ))  # fmt: skip
    native, jit, launches, note = arch >= 100, JITFunction.run, {}, ""

    def compile_only(kernel, *args, grid, warmup, **options):
        """Of the PTX the tests look at what multiplies, converts or fills tensor memory."""
        named = dict(zip(kernel.arg_names, args, strict=True))
        constants = {p.name: named[p.name] for p in kernel.params if p.is_constexpr}
        launches.setdefault(kernel, (named, options))
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

    JITFunction.run = compile_only
    kernels._check_device = lambda *args: None  # CPU tensors will do

    # even and ragged sizes; 160 tokens fill tiles of 64 and sum the splits of K = 512 in turn, 16
    # tokens tiles of 16, the splits side by side
    sizes = [(16, 256, 512), (160, 200, 208), (16, 200, 208), (160, 256, 512)]
    for T, N, K in sizes if native else sizes[:2]:
        routing = route(torch.zeros(T, 2, dtype=torch.int64), 2, least=16, most=64)
        x, v = torch.zeros(T, K, dtype=torch.bfloat16), torch.zeros(2, N, K, dtype=torch.bfloat16)
        w, experts = (kernels.quantize(t, "tensor", check=False) for t in (v[0], v))
        compensated = kernels.quantize_with_residual(x, check=False)
        for packets, mask in ((kernels.quantize(x, check=False), None), compensated):
            kernels.w4a4_gemm(packets, w, None, mask, native)
            kernels.w4a4_gemm(packets, experts, routing, mask, native)

    # launches that the tests must tell from the right ones
    args, options = launches[kernels.gemm_kernel]
    scales = {name: args[name].view(torch.uint8) for name in ("xs_ptr", "ws_ptr")}
    controls = {100: ("8 tokens", {"BLOCK_M": 8}), 120: ("uint8 scales", scales)}
    if arch in controls:
        note, changed = controls[arch]
        kernels.gemm_kernel[(1,)](*(args | changed).values(), **options)


if __name__ == "__main__":
    main(int(sys.argv[1]))
