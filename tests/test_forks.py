"""The README's forks: each is a small patch that applies to this tree and runs."""

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
SQUARED_ERRORS = """import torch
from quads_min import nvfp4
x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
lost = [(x - encode(x).dequantize()).square().sum().item() for encode in nvfp4.ENCODE.values()]
assert 0.5 * lost[0] < lost[1] < 0.95 * lost[0]"""
HADAMARD = """import torch
from quads_min import model
R = model.random_hadamard(64)
assert torch.equal(R @ R.T, torch.eye(64)) and R.abs().unique().tolist() == [0.125]"""
SORTS = """import torch
from quads_min.tasks import ChainTask
task, said = ChainTask(13, 3), torch.tensor([[2, 5, 9], [2, 9, 5], [5, 2, 9]])
prompt, eos = torch.tensor([[5, 2, 9, task.equals]] * 3), torch.full((3, 1), task.eos)
assert task.rewards(prompt, torch.cat([said, eos], 1), torch.full((3,), 4)).tolist() == [1, 0, 0]"""
TWO = "-m torch.distributed.run --standalone --nproc-per-node 2 train.py --mode qat --out two"
RANKS = "one/rank0", "two/rank0", "two/rank1"
FORKS = {
    "sorting": ["train.py --warm-start --warm-steps 5 --out w", "train.py --init w/tiny.pt", SORTS],
    "four_six": ["train.py --mode naive-46", SQUARED_ERRORS],
    "hadamard": ["train.py --mode qat", HADAMARD],  # the run checks weight identity
    "torchrun": ["train.py --mode qat --out one", TWO],
}  # fmt: skip


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_fork_of_at_most_40_lines_applies_and_runs(patch, tmp_path):
    lines = [line for line in patch.read_text().splitlines() if line[:3] not in ("+++", "---")]
    assert sum(line[:1] in "+-" for line in lines) <= 40
    assert f"git apply tests/forks/{patch.name}" in (ROOT / "README.md").read_text()
    shutil.copytree(ROOT / "quads_min", tmp_path / "quads_min", ignore=lambda *_: ["results"])
    for file in ROOT.glob("*.py"):
        shutil.copy(file, tmp_path)
    subprocess.run(["git", "apply", patch], cwd=tmp_path, check=True)
    for command in FORKS[patch.stem]:
        argv = f"{command} {TINY}".split() if "train.py" in command else ["-c", command]
        subprocess.run([sys.executable, *argv], cwd=tmp_path, check=True)
    if patch.stem == "torchrun":
        two_ranks_take_the_steps_of_one_process(tmp_path)


def two_ranks_take_the_steps_of_one_process(folder):
    """Ranks to the bit. Against one process gradients are summed in another order, 1e-7 of them,
    and Adam's first steps have size lr = 2e-4 whatever the gradient's: 1e-5 is 5 % of a step."""
    paths = *(f"{rank}/qat-s0/checkpoint.pt" for rank in RANKS), "quads_min/checkpoints/tiny.pt"
    one, first, second, begun = (checkpoint.load(folder / path)["weights"] for path in paths)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, one, rtol=0, atol=1e-5)
    assert (one["head"] - begun["head"]).abs().max() > 1e-4  # steps were taken
