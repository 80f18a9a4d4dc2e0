"""The folder of a run: a log that only grows, a checkpoint that is replaced whole, and resuming.

Killed at any moment, a run loses at most the steps since its last checkpoint (the first is written
before the first step): resuming restores weights, optimizer and random generators, cuts the log
back to where it stood, and repeats what is missing, bit for bit on one device. Next: report.py.
"""

import json
import platform
import signal
import subprocess
import tempfile
import time
from contextlib import AbstractContextManager, contextmanager
from importlib import metadata
from pathlib import Path

import torch

from quads_min import checkpoint, report

# knobs that a resumed run may change (another device adds in another order; the rest is neutral)
FREE = "out", "resume", "steps", "checkpoint_every", "log_every", "check_weights", "init", "device"
# what a checkpoint holds besides the policy, for resuming
PARTS = {"config": dict, "step": int, "optimizer": dict, "rng": dict, "log_bytes": int,
         "seconds": float}  # fmt: skip


def make_folder(path: Path) -> None:
    """Make a folder that files can be written to; ValueError where that is not possible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as e:
        raise ValueError(f"cannot write to {path} ({e.strerror}); choose another --out") from e


def check_free(run: Path) -> None:
    """ValueError if the folder holds a run: none is overwritten."""
    log = run / "log.jsonl"
    if (run / "checkpoint.pt").exists() or (log.exists() and log.stat().st_size):
        raise ValueError(f"{run} already holds a run; continue it with --resume or choose --out")


def find_checkpoint(run: Path, config: dict) -> dict | None:
    """The checkpoint to resume from, None for a new run; ValueError if it is another run's. To be
    called with the log open, so that no other process is about to write either."""
    path, log = run / "checkpoint.pt", run / "log.jsonl"
    held = log.stat().st_size
    if not config["resume"]:
        check_free(run)
    if not path.exists() and not held:
        return None
    state = checkpoint.load(path)
    if bad := [part for part, kind in PARTS.items() if not isinstance(state.get(part), kind)]:
        raise ValueError(f"{path}: no run can resume from it, {', '.join(bad)} missing or damaged")
    if not 0 <= state["log_bytes"] <= held:
        raise ValueError(f"{log}: missing, or shorter than when {path.name} was written")
    of_log = report.read_log(log)["config"]["config"] if state["log_bytes"] else state["config"]
    for what, other in (("checkpoint", state["config"]), ("log", of_log)):
        names = [k for k in {**config, **other} if k not in FREE and config.get(k) != other.get(k)]
        if names:
            found = ", ".join(f"{k}={other.get(k)!r}" for k in names)
            raise ValueError(f"{run}: its {what} is of a run with other knobs than this: {found}")
    if state["step"] > config["steps"]:
        raise ValueError(f"{run}: already at step {state['step']}, past --steps {config['steps']}")
    return state


def save(run: Path, policy, task, optimizer, generators, log: "Log", config: dict, step: int):
    """Write a checkpoint of everything that the next step depends on, and where the log stands."""
    generators = {**generators, "cpu": torch.default_generator}
    rng = {name: generator.get_state() for name, generator in generators.items()}
    if policy.embed.is_cuda:
        rng["cuda"] = torch.cuda.get_rng_state(policy.embed.device)
    checkpoint.save(
        run / "checkpoint.pt", policy, task, config=config, step=step, rng=rng,
        optimizer=optimizer.state_dict(), log_bytes=log.file.tell(), seconds=log.seconds(),
    )  # fmt: skip


def restore(state: dict, optimizer, generators, device: torch.device, run: Path) -> int:
    """The inverse of `save`, but for the weights; returns the number of steps done."""
    try:
        moments = state["optimizer"]["state"]  # alone: learning rate and so on are the command's
        optimizer.load_state_dict(optimizer.state_dict() | {"state": moments})
        for name, generator in {**generators, "cpu": torch.default_generator}.items():
            generator.set_state(state["rng"][name])
    except (ValueError, KeyError, TypeError, RuntimeError) as e:
        raise ValueError(f"{run / 'checkpoint.pt'}: damaged, or of another model ({e!r})") from e
    updates = state["step"] * state["config"]["minibatches"]
    for p in optimizer.param_groups[0]["params"] if updates else ():  # the step would not look
        found = {k: getattr(v, "shape", None) for k, v in optimizer.state[p].items()}
        if found != {"step": (), "exp_avg": p.shape, "exp_avg_sq": p.shape} or (
            optimizer.state[p]["step"] != updates
        ):
            raise ValueError(f"{run / 'checkpoint.pt'}: its optimizer state is incomplete, or not "
                             f"of this model after {updates} updates")  # fmt: skip
    if device.type == "cuda" and "cuda" in state["rng"]:
        torch.cuda.set_rng_state(state["rng"]["cuda"], device)
    return state["step"]


class Log(AbstractContextManager):
    """JSON lines, one event each. Locked while open, so that no two processes write one run."""

    def __init__(self, run: Path):
        make_folder(run)
        self.file = (run / "log.jsonl").open("a", encoding="utf-8")
        if platform.system() != "Windows":
            import fcntl

            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as e:
                raise ValueError(f"{run}: another process is writing this run") from e
        self.began = time.perf_counter()

    def rewind(self, state: dict) -> None:
        """To where it stood when a checkpoint was written: what is cut happens again."""
        self.file.truncate(state["log_bytes"])
        self.began -= state["seconds"]

    def __exit__(self, *exception):
        self.file.close()

    def __call__(self, event: str, **values) -> None:
        short = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in values.items()}
        self.file.write(json.dumps({"event": event, **short}) + "\n")
        self.file.flush()

    def seconds(self) -> float:
        """Since the run began, the time between kill and resume left out."""
        return time.perf_counter() - self.began


@contextmanager
def graceful_interrupt():
    """The first Ctrl-C lets the step finish and be saved; the second one stops at once."""

    def note(*_):
        signal.signal(signal.SIGINT, signal.default_int_handler)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: signal.getsignal(signal.SIGINT) is not note
    finally:
        signal.signal(signal.SIGINT, previous)


def environment(device: torch.device) -> dict:
    """Device, versions, and the checkout's commit, with + if files differ from it."""
    cpu = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    more = {p.name: p.version for p in metadata.distributions() if p.name in ("triton", "einops")}
    versions = {"python": platform.python_version(), "torch": torch.__version__, **more}
    git = "git describe --always --dirty=+"  # run by a shell, since git may be missing
    ran = subprocess.run(git, shell=True, cwd=Path(__file__).parent, capture_output=True, text=True)
    return {"device": name, "versions": versions, "commit": ran.stdout.strip() or "unknown"}
