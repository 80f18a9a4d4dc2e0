"""Imports point one way, the package stands without the root modules and Triton, and what ships is
what the settings say. Read from the source with ast."""

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
PACKAGE, ROOT_MODULES = sorted((ROOT / "quads_min").glob("*.py")), sorted(ROOT.glob("*.py"))
NAMES = {path.stem for path in ROOT_MODULES} | {"kernels", "rollout", "train"}


def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(nodes):
    """Dotted names: `from a import b` gives a and a.b; a relative import gives quads_min.*."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(["quads_min"] * bool(node.level) + [node.module] * bool(node.module))
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return names


def everywhere(name):
    """First parts of all names that a root module imports, in its functions too."""
    return {n.split(".")[0] for n in imports(ast.walk(tree(ROOT / f"{name}.py")))}


@pytest.mark.parametrize("path", PACKAGE, ids=lambda p: p.stem)
def test_the_package_imports_neither_a_root_module_nor_triton(path):
    """So that it can be installed alone, and read without knowing the engine."""
    assert not everywhere(f"quads_min/{path.stem}") & (NAMES | {"triton"})


def test_the_root_modules_import_one_way():
    """train -> rollout -> kernels -> quads_min; kernels inside a branch, since the name is
    everybody's and Triton is not everywhere."""
    assert "train" not in everywhere("rollout") and "kernels" not in everywhere("train")
    assert "kernels" not in imports(tree(ROOT / "rollout.py").body)
    assert "triton" not in everywhere("rollout") | everywhere("train")
    assert not everywhere("kernels") & NAMES
    names = imports(ast.walk(tree(ROOT / "kernels.py")))
    ours = {".".join(n.split(".")[:2]) for n in names if n.startswith("quads_min")}
    assert ours <= {"quads_min", "quads_min.nvfp4", "quads_min.model"}


def test_everything_but_the_kernels_imports_without_triton():
    """In a process where importing it fails; `import quads_min` alone does not even load torch."""
    modules = [f"quads_min.{path.stem}" for path in PACKAGE if path.stem != "__init__"]
    code = f"""import sys; sys.modules["triton"] = sys.modules["kernels"] = None
import quads_min; assert "torch" not in sys.modules
import {", ".join(modules)}, rollout, train"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_module_says_what_it_is_and_none_edits_sys_path():
    """pytest's `pythonpath` and running from the clone suffice; see pyproject.toml. The benchmark,
    a script in a folder below what it imports, is the exception."""
    for path in [*ROOT_MODULES, *PACKAGE, *(ROOT / "tests").rglob("*.py")]:
        assert ast.get_docstring(tree(path)), path
        nodes = list(ast.walk(tree(path)))
        used = {ast.unparse(n) for n in nodes if isinstance(n, ast.Attribute)} | imports(nodes)
        if path.name != "bench.py":
            assert not used & {"sys.path", "site.addsitedir"}, path


def test_the_wheel_holds_the_package_and_its_checkpoints_alone():
    settings = pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())
    setuptools = settings["tool"]["setuptools"]
    assert setuptools["packages"] == ["quads_min"] and "py-modules" not in setuptools
    assert setuptools["package-data"] == {"quads_min": ["checkpoints/*.pt"]}


def test_each_preset_ships_a_bf16_checkpoint_of_its_sizes():
    """At most 3 MB together. Task and model are the preset's own: rollout.py takes them from the
    file, train.py from the preset, and planted outliers of another size would go unnoticed."""
    for preset, knobs in train.PRESETS.items():
        cfg, path = train.Config(preset=preset, **knobs), train.SHIPPED / f"{preset}.pt"
        policy, task = checkpoint.load_policy(path, Arithmetic())
        assert (task, policy.config) == (cfg.task, cfg.model)
        weights = checkpoint.load(path)["weights"]
        assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    shipped = {path.stem: path.stat().st_size for path in train.SHIPPED.iterdir()}
    assert shipped.keys() == train.PRESETS.keys() and sum(shipped.values()) <= 3_000_000
