"""Imports point one way, the package stands without root modules and Triton, and it ships whole."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train
from quads_min import checkpoint
from quads_min.modes import Arithmetic

ROOT = Path(train.__file__).parent
PACKAGE = sorted((ROOT / "quads_min").glob("*.py"))
ALLOWED = {"kernels": {"triton"}, "rollout": {"kernels"}, "train": {"rollout"}}


def imports(path):
    """Dotted names that a module imports, in its functions too."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    return names | {node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)}


@pytest.mark.parametrize("path", [*PACKAGE, *ROOT.glob("*.py")], ids=lambda path: path.stem)
def test_imports_point_one_way_and_every_module_says_what_it_is(path):
    """train -> rollout -> kernels -> quads_min, and Triton in kernels alone."""
    packages = {name.split(".")[0] for name in imports(path)}
    assert packages & {*ALLOWED, "triton"} <= ALLOWED.get(path.stem, set())
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_everything_but_the_kernels_imports_without_triton():
    """In a process where importing it fails; `import quads_min` alone does not even load torch."""
    modules = [f"quads_min.{path.stem}" for path in PACKAGE if path.stem != "__init__"]
    code = f"""import sys; sys.modules["triton"] = sys.modules["kernels"] = None
import quads_min; assert "torch" not in sys.modules
import {", ".join(modules)}, rollout, train"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_wheel_holds_the_package_and_its_checkpoints_alone():
    tomllib = pytest.importorskip("tomllib")
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert tool == {"packages": ["quads_min"], "package-data": {"quads_min": ["checkpoints/*.pt"]}}


@pytest.mark.parametrize("preset", train.PRESETS)
def test_each_preset_ships_a_bf16_checkpoint_of_its_sizes(preset):
    """rollout.py takes task and sizes from the file, train.py from the preset: they are equal."""
    cfg = train.Config(preset=preset, **train.PRESETS[preset])
    path = ROOT / "quads_min" / "checkpoints" / f"{preset}.pt"
    policy, task = checkpoint.load_policy(path, Arithmetic())
    assert (task, policy.config) == (cfg.task, cfg.model) and path.stat().st_size < 3_000_000
    assert {w.dtype for w in checkpoint.load(path)["weights"].values()} == {torch.bfloat16}
