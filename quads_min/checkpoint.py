"""Checkpoint files: written whole or not at all, read without executing anything, checked by name.

A file is one dict: format, task and model sizes, the policy's weights; a run adds what resuming
needs. Next: runs.py.
"""

import os
import pickle
from dataclasses import asdict
from pathlib import Path

import torch

from quads_min.model import ModelConfig, MoETransformer
from quads_min.modes import Arithmetic
from quads_min.qat import make_policy
from quads_min.tasks import ChainTask

FORMAT = "quads_min checkpoint 1"


def save(path: Path, policy: MoETransformer, task: ChainTask, dtype=torch.float32, **more) -> None:
    """Write the policy, in `dtype`, and `more` to a temporary file, then rename it to `path`."""
    weights = {k: v.to(dtype) for k, v in policy.state_dict().items()}
    content = {"format": FORMAT, "task": asdict(task), "model": asdict(policy.config)}
    temporary = path.with_name(path.name + ".tmp")
    try:
        torch.save({**content, "weights": weights, **more}, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: Path) -> dict:
    """Read a checkpoint onto the CPU; ValueError if it is missing, damaged or not ours."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such checkpoint") from None
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as e:
        reason = str(e).splitlines()[0][:100] if str(e) else type(e).__name__
        raise ValueError(f"{path}: not a readable checkpoint, damaged or foreign ({reason})") from e
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path}: expected a file of format {FORMAT!r}, this one is another kind")
    return content


def load_weights(policy: MoETransformer, content: dict, path: Path, outliers: bool = True) -> None:
    """Copy a checkpoint's weights into `policy`; ValueError where a name or a shape differs.

    outliers=False keeps the policy's own planted channels o: they do not change the bf16 function.
    """
    have, want = content.get("weights"), policy.state_dict()
    if not isinstance(have, dict) or not all(
        isinstance(t, torch.Tensor) and t.is_floating_point() for t in have.values()
    ):
        raise ValueError(f"{path}: expected floating-point weights by name; the file is damaged")
    for name in sorted(have.keys() | want.keys()):
        shapes = [tuple(s[name].shape) if name in s else "nothing" for s in (have, want)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"{path}: {name} has shape {shapes[0]}, this model expects {shapes[1]}; "
                "use a checkpoint of the same preset and sizes"
            )
    keep = {} if outliers else {k: v for k, v in want.items() if k.endswith("outliers")}
    policy.load_state_dict(have | keep)


def load_policy(path: Path, arithmetic: Arithmetic) -> tuple[MoETransformer, ChainTask]:
    """The policy and the task of a checkpoint, planted channels included."""
    content = load(path)
    try:
        task, config = ChainTask(**content["task"]), ModelConfig(**content["model"])
    except (KeyError, TypeError) as e:
        raise ValueError(f"{path}: written by another version of quads_min ({e})") from e
    policy = make_policy(config, arithmetic)
    load_weights(policy, content, path)
    return policy, task
