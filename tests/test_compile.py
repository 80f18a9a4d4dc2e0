"""The kernels compiled for cards that are not here: which tensor core instruction comes out?

Triton's wheels carry the assemblers, so a cubin needs neither GPU nor driver. What this shows is
the instruction, not that its results or speed are right: no Blackwell card has run it yet.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="compiling needs Triton")
if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8):
    reason = f"Triton {triton.__version__} cannot compile all of this for sm_90 to 120; 3.8 can"
    pytest.skip(reason, allow_module_level=True)

SHARED = {80: 166912, 90: 232448, 100: 232448, 120: 101376}  # bytes; the compiler does not look
NATIVE = {
    100: r"tcgen05\.mma\S*kind::mxf4nvf4\.block_scale\.(scale_vec::4X|block16)",
    120: r"mma\.sync\S*kind::mxf4nvf4\.block_scale\.scale_vec::4X\S*\.ue4m3",
}
FP16 = r"wgmma\S*f32\.f16\.f16|mma\.sync\S*f32\.f16\.f16|kind::f16"
FALLBACK = FP16 + r"|m\d+n\d+k16\S*bf16|cvt\.rn\.bf16x2\.e2m1x2"

COMPILE = r"""
import json, sys
import triton
from triton.backends.compiler import GPUTarget
import kernels

def typed(name, types):
    return types.get(name, "i32" if not name.endswith("_ptr") else "*u8")

for name, arch, types, consts, warps in json.load(sys.stdin):
    kernel = getattr(kernels, name)
    names = kernel.arg_names
    signature = {n: "constexpr" if n in consts else typed(n, types) for n in names}
    # what the launcher's specialization finds out: aligned pointers, sizes that 16 divides
    even = [n for n in names if n.endswith("_ptr") or n in ("N", "K", "P", "k_part", "x_stride")]
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in even}
    source = triton.compiler.ASTSource(kernel, signature, consts, attrs)
    options = {"enable_fp_fusion": False, "num_warps": warps, "num_stages": 3}
    k = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    out = {"ptx": k.asm["ptx"], "elf": k.asm["cubin"][:4].hex(), "shared": k.metadata.shared}
    print(json.dumps({**out, "tmem": k.metadata.tmem_size or 0}))
"""


def compiled(variants, tmp_path):
    """[(kernel, arch, pointer types, constexprs, warps)] -> [{ptx, elf, shared, tmem}], in a
    process that does not interpret and finds no earlier compilation."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], input=json.dumps(variants), env=env, text=True,
        capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]  # MLIR prints whole modules: the end will do
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == len(variants)
    for (name, arch, *_), k in zip(variants, found, strict=True):
        assert k["elf"] == "7f454c46" and k["shared"] <= SHARED[arch] and k["tmem"] <= 512, name
    return found


def gemm(arch, native, grouped=True, residual=True, rows=16, even=True, **changes):
    types = {"xg_ptr": "*fp32", "wg_ptr": "*fp32", "y_ptr": "*fp32"}
    types |= {"expert_of_tile_ptr": "*i32", "slot_of_row_ptr": "*i32"}
    if native:
        types |= {"xs_ptr": "*fp8e4nv", "ws_ptr": "*fp8e4nv"}
    else:
        types |= {"x_ptr": "*fp16", "mask_ptr": "*i32"}
    types |= changes.pop("types", {})
    consts = {
        "SLOTS_PER_ROW": 1, "BLOCK_M": rows, "BLOCK_N": 128 if native else 64, "BLOCK_K": 128,
        "PARTS": 1, "GROUPED": grouped, "RESIDUAL": residual, "NATIVE": native, "EVEN": even,
        "ASM": True,
    }  # fmt: skip
    return "gemm_kernel", arch, types, {**consts, **changes}, 4


FORMS = [(g, r, rows) for g in (False, True) for r in (False, True) for rows in (16, 64)]


@pytest.mark.parametrize("arch", [100, 120])
def test_native_gemms_hold_the_block_scaled_fp4_instruction(arch, tmp_path):
    """Dense and grouped, plain and RAC, 16 and 64 tokens a tile; ragged shapes, too."""
    variants = [gemm(arch, True, *form) for form in FORMS]
    variants += [gemm(arch, True, True, True, 16, even=False)]
    for (_, _, _, consts, _), k in zip(variants, compiled(variants, tmp_path), strict=True):
        found = len(re.findall(NATIVE[arch], k["ptx"]))
        assert found >= 1 + consts["RESIDUAL"] and not re.search(FALLBACK, k["ptx"]), consts
        if arch == 100:  # the tiled scales of the weights go to tensor memory without a detour
            assert "tcgen05.cp" in k["ptx"]


def test_the_check_sees_what_is_not_native(tmp_path):
    """Tiles of 8 tokens, or two warps, make Triton multiply in fp16 or bf16 on sm_100 without a
    word; block scales that are bytes, not E4M3, are read as powers of two on sm_120."""
    plain = gemm(100, True, residual=False)
    variants = [gemm(100, True, residual=False, rows=8), (*plain[:4], 2)]
    for k in compiled(variants, tmp_path):
        assert not re.search(NATIVE[100], k["ptx"]) and re.search(FALLBACK, k["ptx"])
    scales = {"xs_ptr": "*u8", "ws_ptr": "*u8"}
    (k,) = compiled([gemm(120, True, residual=False, types=scales)], tmp_path)
    assert not re.search(NATIVE[120], k["ptx"]) and "ue8m0" in k["ptx"]


@pytest.mark.parametrize("arch", [80, 90])
def test_older_cards_decode_to_fp16(arch, tmp_path):
    variants = [gemm(arch, False, *form) for form in FORMS[:: 2 if arch == 80 else 1]]
    for k in compiled(variants, tmp_path):
        assert re.search(FP16, k["ptx"]) and "mxf4" not in k["ptx"] and "e2m1" not in k["ptx"]


@pytest.mark.parametrize("arch", [90, 100, 120])
def test_the_other_kernels_compile(arch, tmp_path):
    fp32 = {"g_ptr": "*fp32", "S_ptr": "*fp32", "energy_ptr": "*fp32", "part_ptr": "*fp32"}
    quantize = {"BLOCK_M": 1, "BLOCK_K": 4096, "GIVEN_S": False, "EVEN": True, "ASM": True}
    ints = {f"{n}_ptr": "*i32" for n in ("count", "expert_of_tile", "slot_of_row", "row_of_slot")}
    ints["choice_ptr"] = "*i64"
    variants = [
        ("quantize_kernel", arch, fp32 | {"x_ptr": "*i32"},
         quantize | {"BF16": True, "RESIDUAL": 1, "ENERGY": 1}, 4),
        ("quantize_kernel", arch, fp32 | {"x_ptr": "*fp32"},
         quantize | {"BF16": False, "RESIDUAL": 0, "ENERGY": 2}, 4),
        ("energy_kernel", arch, fp32, {"BLOCK_R": 1024, "BLOCK_G": 16}, 4),
        ("choose_kernel", arch, fp32, {"WIDTH": 16, "BLOCK": 64}, 4),
        ("decode_kernel", arch, {"plane_ptr": "*fp16", "kept_ptr": "*i32"},
         {"BLOCK": 1024, "ASM": True}, 8),
        ("combine_kernel", arch, fp32 | {"xg_ptr": "*fp32", "wg_ptr": "*fp32", "y_ptr": "*fp32"},
         {"UNIT": 1.0, "PARTS": 8, "BLOCK": 512}, 4),
        ("count_kernel", arch, ints, {"BLOCK": 1024}, 4),
        ("route_kernel", arch, ints, {"ROWS": 16, "BLOCK_E": 128, "BLOCK": 1024}, 4),
    ]  # fmt: skip
    compiled(variants, tmp_path)
