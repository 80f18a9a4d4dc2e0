"""kernels.py compiled for cards that are not here: the instructions are there and the tiles fit.

Triton compiles for any GPU, ptxas included. That shows which instruction a launch would run, not
that its results are right: those are the GPU tests of test_kernels.py. But a tile that misses a
condition of the FP4 tensor cores does not fail: it silently decodes to bf16, right, and slow.
"""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest

# older ones cannot compile dot_scaled for all of these cards (kernels.has_fp4 asks for it too)
pytest.importorskip("triton", "3.8", reason="the kernels need Triton")

ROOT = Path(__file__).parent.parent
BLACKWELL, OLDER = (100, 120), (80, 90)
SHARED = {80: 166_912, 90: 232_448, 100: 232_448, 120: 101_376}  # bytes a program may have
MULTIPLY = {  # block16 and scale_vec::4X are two names of a scale for 16 channels
    80: r"mma\.sync\S*\.m16n8k16\S*\.f32\.f16\.f16\.f32",
    90: r"wgmma\.mma_async\S*\.f32\.f16\.f16",
    100: r"tcgen05\.mma\S*kind::mxf4nvf4\.block_scale\.(block16|scale_vec::4X)",
    120: r"mma\.sync\S*kind::mxf4nvf4\.block_scale\.scale_vec::4X\S*\.e2m1\.e2m1\.f32\.ue4m3",
}
DECODED = r"mma\S*(kind::f16|\.b?f16)|cvt\S*e2m1|bf16x2"  # codes turned into numbers first


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    """(arch, kernel, note) -> records of compile_for.py, in a process a card, two at a time."""

    def build(arch):
        env = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
        env["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp(f"sm_{arch}"))
        command = [sys.executable, ROOT / "tests/compile_for.py", str(arch)]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)

    def records(arch, kernel="", note=""):
        done = running[arch].result()
        assert not done.returncode, done.stderr[-600:]  # which may be a whole module in MLIR
        lines = map(json.loads, done.stdout.splitlines())
        return [r for r in lines if r["note"] == note and kernel in r["kernel"]]

    with ThreadPoolExecutor(2) as pool:
        running = {arch: pool.submit(build, arch) for arch in (*BLACKWELL, *OLDER)}
        yield records


@pytest.mark.parametrize("arch", (*BLACKWELL, *OLDER))
def test_every_kernel_compiles_and_fits(builds, arch):
    """Triton checks neither limit before a launch. decode_kernel serves the emulated path alone."""
    records = builds(arch)
    names = set(re.findall(r"^def (\w+_kernel)\(", (ROOT / "kernels.py").read_text(), re.M))
    assert {r["kernel"] for r in records} == names - ({"decode_kernel"} if arch >= 100 else set())
    for r in records:
        fits = r["shared"] <= SHARED[arch] and r["tensor_columns"] <= 512  # of sm_100's memory
        assert r["elf"] and fits, f"{r['kernel']} {r['constants']}"


@pytest.mark.parametrize("arch", BLACKWELL)
def test_blackwell_multiplies_packed_codes_under_e4m3_scales(builds, arch):
    """On sm_100 the instruction's name says nothing of the scales' type (see the pointers), and
    weight scales reach tensor memory by copy, a tcgen05.cp for each multiplication."""
    gemms = builds(arch, "gemm_kernel")
    names = ("GROUPED", "RESIDUAL", "EVEN", "BLOCK_M")
    variants = {tuple(r["constants"][name] for name in names) for r in gemms}
    assert variants == set(product((False, True), (False, True), (False, True), (16, 64)))
    assert {r["constants"]["SPLITS"] for r in gemms if not r["constants"]["GROUPED"]} == {1, 2}
    for r in gemms:
        c, ptx = r["constants"], r["ptx"]
        # a dot takes 2 steps of 64 channels; on sm_120 a warp has 2 x BLOCK_M / 8 tiles m16n8
        dot = 2 if arch == 100 else 2 * 2 * c["BLOCK_M"] // 8
        found = len(re.findall(MULTIPLY[arch], ptx))
        assert c["NATIVE"] and found >= dot * (1 + c["RESIDUAL"]), c
        assert not re.search(DECODED, ptx), c
        assert r["types"]["xs_ptr"] == r["types"]["ws_ptr"] == "*fp8e4nv"
        assert arch != 100 or ptx.count("tcgen05.cp") >= found, c


@pytest.mark.parametrize("arch", OLDER)
def test_older_cards_multiply_fp16(builds, arch):
    """On the tensor cores, and without an instruction that they lack."""
    for r in builds(arch, "gemm_kernel"):
        assert re.search(MULTIPLY[arch], r["ptx"]), r["constants"]
        assert not re.search("mxf4|e2m1|block_scale", r["ptx"]), r["constants"]


def test_controls_what_is_not_native_is_seen(builds):
    """No error to Triton: on sm_100 tiles of 8 tokens are decoded; on sm_120 scales in bytes are
    taken for powers of two (E8M0), and the result would be wrong."""
    (gemm,) = builds(100, note="8 tokens")
    assert not re.search(MULTIPLY[100], gemm["ptx"]) and re.search(DECODED, gemm["ptx"])
    (gemm,) = builds(120, note="uint8 scales")
    assert not re.search(MULTIPLY[120], gemm["ptx"]) and "ue8m0" in gemm["ptx"]
    assert gemm["types"]["xs_ptr"] == gemm["types"]["ws_ptr"] == "*u8"
