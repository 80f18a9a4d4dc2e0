"""The folder of a run: a log that only grows, a checkpoint that is replaced whole, and resuming.

A step is done when its checkpoint is renamed into place. Killed at any moment, a run loses at most
the steps since then: resuming restores weights, optimizer and random generators, cuts the log back
to where it stood, and repeats what is missing, bit for bit on one device. Next: report.py.
"""

import json
import platform
import signal
import subprocess
import tempfile
import time
from importlib import metadata
from pathlib import Path

import torch

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

from quads_min import checkpoint
from quads_min.model import MoETransformer
from quads_min.tasks import ChainTask

# knobs that a resumed run may change: they do not change what a step computes
# (another device only the order of its fp32 sums)
FREE = {"out", "resume", "steps", "checkpoint_every", "log_every", "check_weights", "init",
        "device"}  # fmt: skip

# what a checkpoint holds besides the policy, for resuming
PARTS = {"config": dict, "step": int, "optimizer": dict, "rng": dict, "log_bytes": int,
         "seconds": float}  # fmt: skip


def make_folder(path: Path) -> None:
    """Make a folder that files can be written to; ValueError where that is not possible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as e:
        raise ValueError(f"--out: cannot write to {path} ({e.strerror}); choose another") from e


def find_checkpoint(run: Path, config: dict) -> dict | None:
    """The checkpoint to resume from, None for a new run; ValueError if it is another run's."""
    path = run / "checkpoint.pt"
    if not config["resume"] and (run / "log.jsonl").exists():
        raise ValueError(f"{run} already holds a run; continue it with --resume or choose --out")
    if not config["resume"] or not path.exists():
        return None
    state = checkpoint.load(path)
    for part, kind in PARTS.items():
        if part not in state:
            raise ValueError(f"{path}: has no {part}, so no run can resume from it")
        if not isinstance(state[part], kind) or (kind is int and state[part] < 0):
            raise ValueError(f"{path}: its {part} is damaged, so no run can resume from it")
    log = run / "log.jsonl"
    if state["log_bytes"] > (log.stat().st_size if log.exists() else -1):
        raise ValueError(
            f"{log}: missing, or shorter than when {path.name} was written; restore it"
        )
    for name, value in state["config"].items():
        if name not in FREE and config.get(name) != value:
            raise ValueError(
                f"{run}: the run to resume has {name}={value!r}, this command "
                f"{config.get(name)!r}; repeat its flags or choose another --out"
            )
    if state["step"] > config["steps"]:
        raise ValueError(f"{run}: already at step {state['step']}, past --steps {config['steps']}")
    return state


def save(
    run: Path,
    policy: MoETransformer,
    task: ChainTask,
    optimizer: torch.optim.Optimizer,
    generators: dict[str, torch.Generator],
    log: "Log",
    config: dict,
    step: int,
) -> None:
    """Everything that the next step depends on, and where the log stood."""
    rng = {name: g.get_state() for name, g in generators.items()} | {"cpu": torch.get_rng_state()}
    if policy.embed.is_cuda:
        rng["cuda"] = torch.cuda.get_rng_state(policy.embed.device)
    checkpoint.save(
        run / "checkpoint.pt", policy, task, config=config, step=step, rng=rng,
        optimizer=optimizer.state_dict(), log_bytes=log.file.tell(), seconds=log.seconds(),
    )  # fmt: skip


def restore(
    state: dict,
    optimizer: torch.optim.Optimizer,
    generators: dict[str, torch.Generator],
    device: torch.device,
    run: Path,
) -> int:
    """The inverse of `save`, but for the weights; returns the number of steps done."""
    try:
        optimizer.load_state_dict(state["optimizer"])
        for name, generator in generators.items():
            generator.set_state(state["rng"][name])
        torch.set_rng_state(state["rng"]["cpu"])
    except (ValueError, KeyError, TypeError, RuntimeError) as e:
        raise ValueError(f"{run / 'checkpoint.pt'}: damaged, or of another model ({e!r})") from e
    if len(optimizer.state) != sum(len(group["params"]) for group in optimizer.param_groups):
        raise ValueError(f"{run / 'checkpoint.pt'}: its optimizer state is missing or incomplete")
    if device.type == "cuda" and "cuda" in state["rng"]:
        torch.cuda.set_rng_state(state["rng"]["cuda"], device)
    return state["step"]


class Log:
    """JSON lines, one event each. Resuming cuts what the checkpoint has not: it happens again.

    The file is locked while it is open, so that no two processes write one run (not on Windows).
    """

    def __init__(self, path: Path, state: dict | None):
        self.file = path.open("a", encoding="utf-8")
        try:
            if fcntl:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise ValueError(
                f"{path.parent}: another process is writing this run; wait or choose another --out"
            ) from e
        self.file.truncate(state["log_bytes"] if state else 0)
        self.began = time.perf_counter() - (state["seconds"] if state else 0.0)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.file.close()

    def __call__(self, event: str, **values) -> None:
        short = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in values.items()}
        self.file.write(json.dumps({"event": event, **short}) + "\n")
        self.file.flush()

    def seconds(self) -> float:
        """Since the run began, the time between kill and resume left out."""
        return time.perf_counter() - self.began


class graceful_interrupt:
    """The first Ctrl-C lets the step finish and be saved; the second one stops at once."""

    def __enter__(self):
        self.seen = False
        try:
            self.previous = signal.signal(signal.SIGINT, self.note)
        except ValueError:  # not the main thread: Ctrl-C is not ours to catch
            self.previous = None
        return lambda: self.seen

    def note(self, *_):
        self.seen = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *exception):
        if self.previous is not None:
            signal.signal(signal.SIGINT, self.previous)


def environment(device: torch.device) -> dict:
    """What a number depends on besides the config: device, versions, and the checkout's commit
    (with + if files differ from it)."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "einops"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "none"
    cpu = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    return {"device": name, "versions": versions, "commit": _git_commit()}


def _git_commit() -> str:
    def git(*args: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *args]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    try:
        return (git("rev-parse", "--short", "HEAD") or "unknown") + (
            "+" if git("status", "--porcelain", "-uno") else ""
        )
    except OSError:  # no git here
        return "unknown"
