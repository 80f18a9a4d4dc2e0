"""Checkpoint files: written whole or not at all, read without executing anything, checked by name.

One dict: format, task, model sizes, weights; a run adds what resuming needs. Next: runs.py.
"""

import zipfile
from dataclasses import asdict
from pathlib import Path

import torch

from quads_min.model import ModelConfig, MoETransformer
from quads_min.modes import Arithmetic
from quads_min.qat import make_policy
from quads_min.tasks import ChainTask

FORMAT = "quads_min checkpoint 1"


def save(path: Path, policy: MoETransformer, task: ChainTask, dtype=torch.float32, **more) -> None:
    """Write the policy, in `dtype`, and `more` to a temporary file, then rename it to `path`.

    Raises FloatingPointError on inf or NaN weights and OSError; what `path` held is kept then.
    """
    if bad := policy.nonfinite():
        raise FloatingPointError(f"{path}: not written, inf or NaN in {', '.join(bad)}")
    weights = {k: v.to(dtype) for k, v in policy.state_dict().items()}
    content = {"format": FORMAT, "task": asdict(task), "model": asdict(policy.config)}
    temporary = path.with_name(path.name + ".tmp")
    try:
        torch.save({**content, "weights": weights, **more}, temporary)
        temporary.replace(path)
    except (OSError, RuntimeError) as e:  # the latter is torch's, on a full disk
        temporary.unlink(missing_ok=True)
        raise OSError(f"{path}: cannot be written; what it held is kept ({e})") from e


def load(path: Path) -> dict:
    """Read a checkpoint onto the CPU; ValueError if it is missing, damaged or not ours."""
    try:
        with zipfile.ZipFile(path) as file:
            if bad := file.testzip():  # torch does not look at the checksums
                raise ValueError(f"checksum of {bad}")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:  # torch has many ways to fail on a file that is not a checkpoint
        raise ValueError(f"{path}: not a readable checkpoint ({e!r:.100})") from e
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path}: expected a file of format {FORMAT!r}, this one is another kind")
    return content


def load_weights(policy: MoETransformer, content: dict, path: Path, outliers: bool = True) -> None:
    """Copy a checkpoint's weights into `policy`; outliers=False keeps its own planted channels."""
    own = {} if outliers else {k: v for k, v in policy.state_dict().items() if "outliers" in k}
    try:
        for name in ("heads", "top_k"):  # which no shape shows
            if content["model"][name] != getattr(policy.config, name):
                raise TypeError(f"{name} is {content['model'][name]} there")
        if not all(map(torch.is_floating_point, content["weights"].values())):
            raise TypeError("weights must be floating-point tensors")
        policy.load_state_dict(content["weights"] | own)
    except (KeyError, TypeError, AttributeError, RuntimeError) as e:
        raise ValueError(f"{path}: not of these sizes: {str(e).splitlines()[-1].strip()}") from e


def load_policy(path: Path, arithmetic: Arithmetic) -> tuple[MoETransformer, ChainTask]:
    """The policy and the task of a checkpoint, planted channels included."""
    content = load(path)
    try:
        task, config = ChainTask(**content["task"]), ModelConfig(**content["model"])
        if config.vocab != task.vocab or config.max_len < task.prompt_len + task.max_new_tokens:
            raise TypeError("its task does not fit its model")
        policy = make_policy(config, arithmetic)
    except (KeyError, TypeError, RuntimeError) as e:
        raise ValueError(f"{path}: written by another version of quads_min ({e})") from e
    load_weights(policy, content, path)
    return policy, task
