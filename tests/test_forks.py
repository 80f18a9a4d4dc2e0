"""The README's forks: each is a small patch that applies to this tree and runs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quads_min import checkpoint

ROOT = Path(__file__).parent.parent
PATCHES = sorted((ROOT / "tests" / "forks").glob("*.patch"))
TINY = "--preset tiny --device cpu --steps 2 --prompts 8 --eval-prompts 64"


@pytest.fixture
def fork(tmp_path, request):
    """A copy of the tree with one patch; calling it runs a command there and gives its output."""
    if shutil.which("git") is None:
        pytest.skip("no git to apply patches with")
    for name in ("train.py", "rollout.py", "kernels.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "quads_min", tmp_path / "quads_min", ignore=lambda *_: ["results"])
    patch = ROOT / "tests" / "forks" / f"{request.param}.patch"
    subprocess.run(["git", "apply", str(patch)], cwd=tmp_path, check=True)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}

    def run(*command):
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, env=env, text=True,
                              capture_output=True)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.stem)
def test_a_fork_changes_at_most_40_lines_and_is_in_the_readme(patch):
    lines = patch.read_text().splitlines()
    assert sum(line[:1] in "+-" and line[:3] not in ("+++", "---") for line in lines) <= 40
    assert f"git apply tests/forks/{patch.name}" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("fork", ["sorting"], indirect=True)
def test_a_new_task_from_warm_start_to_quads(fork):
    fork(*f"train.py --warm-start {TINY} --warm-steps 5 --warm-batch 16 --out warm".split())
    assert "quads " in fork(*f"train.py --mode quads {TINY} --init warm/tiny.pt".split())
    seen = fork("-c", """if True:
        import torch
        from quads_min.tasks import ChainTask
        task = ChainTask(13, 3)
        prompt = torch.tensor([[5, 2, 9, task.equals]] * 3)
        answers = torch.tensor([[2, 5, 9, task.eos], [2, 9, 5, task.eos], [2, 5, 9, 9]])
        print(task.rewards(prompt, answers, torch.full((3,), 4)).tolist())""")  # fmt: skip
    assert seen.strip() == "[1.0, 0.0, 0.0]"


@pytest.mark.parametrize("fork", ["four_six"], indirect=True)
def test_a_new_mode_in_which_each_block_takes_the_better_of_two_scales(fork):
    assert "naive-46 " in fork(*f"train.py --mode naive-46 {TINY}".split())
    lost = fork("-c", """if True:
        import torch
        from quads_min import nvfp4
        x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
        for encode in nvfp4.ENCODE.values():
            print((x - encode(x).dequantize()).square().sum().item())""")  # fmt: skip
    plain, better = map(float, lost.split())
    assert 0.5 * plain < better < 0.95 * plain


@pytest.mark.parametrize("fork", ["hadamard"], indirect=True)
def test_a_rotation_of_the_experts_input_leaves_the_function_and_the_weight_identity(fork):
    """The run checks weight identity at every sync; rotated products differ by fp32 rounding."""
    assert "qat " in fork(*f"train.py --mode qat {TINY}".split())
    said = fork("-c", """if True:
        import torch
        from quads_min.model import random_hadamard
        R = random_hadamard(64)
        print(torch.equal(R @ R.T, torch.eye(64)), R.abs().unique().tolist())""")  # fmt: skip
    assert said.strip() == "True [0.125]"


@pytest.mark.parametrize("fork", ["torchrun"], indirect=True)
def test_two_ranks_take_the_steps_of_one_process_with_the_same_batch(fork, tmp_path):
    """Ranks to the bit. Against one process: gradients are summed in another order, 1e-7 of them,
    and Adam's first steps have size lr = 2e-4 whatever the gradient's: 1e-5 is 5 % of a step."""
    fork(*f"train.py --mode qat {TINY} --out one".split())
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    fork(*launch, *f"train.py --mode qat {TINY} --out two".split())
    one, first, second = (
        checkpoint.load(tmp_path / f"{out}/qat-s0/checkpoint.pt")["weights"]
        for out in ("one/rank0", "two/rank0", "two/rank1")
    )
    assert all(torch.equal(first[k], second[k]) for k in first)
    torch.testing.assert_close(first, one, rtol=0, atol=1e-5)
    begun = checkpoint.load(ROOT / "quads_min/checkpoints/tiny.pt")["weights"]
    assert (one["head"] - begun["head"].float()).abs().max() > 1e-4  # steps were taken
