"""train.py as users meet it: every mode runs, a stopped run goes on, bad input costs one line."""

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

import train
from quads_min import checkpoint, grpo, runs
from quads_min.modes import ARITHMETICS, MODES
from quads_min.tasks import ChainTask
from rollout import Engine, cli

TINY = """--device cpu --steps 12 --prompts 4 --group-size 2 --eval-prompts 32 --eval-every 4
    --checkpoint-every 1 """


def argv(out, flags):
    return ["--out", str(out), *shlex.split(TINY + flags)]


def run(out, flags):
    assert train.cli(argv(out, flags)) == 0
    return next(out.glob("*-s0"), out)


def logged(folder, *kinds):
    """Events of a log without their times."""
    events = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [e | {"seconds": 0} for e in events if e["event"] in (kinds or e["event"])]


def assert_same_run(a, b):
    """Weights, optimizer state, generators and metrics, bit for bit; no step twice."""
    states = [checkpoint.load(folder / "checkpoint.pt") for folder in (a, b)]
    parts = [[s[part] for part in ("step", "weights", "optimizer", "rng")] for s in states]
    torch.testing.assert_close(*parts, rtol=0, atol=0)
    assert logged(a, "step", "eval", "end") == logged(b, "step", "eval", "end")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A quads run of ten steps that nothing interrupted."""
    return run(tmp_path_factory.mktemp("whole"), "--steps 10")


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / whole.name)


@pytest.mark.parametrize("flags", [*MODES, "w4a16 --replay-routing", "w4a16 --correction tis"])
def test_every_mode_trains_and_its_first_ratio_is_one(tmp_path, monkeypatch, flags):
    """In a step's only mini-batch log-probs are equal to the bit: no clipping, a known loss."""
    policy_loss, seen, mode = grpo.policy_loss, [], flags.split()[0]
    monkeypatch.setattr(grpo, "policy_loss", lambda *a: seen.append(a) or policy_loss(*a))
    flags = f"--steps 2 --group-size 8 --minibatches 1 --correction-cap 0.9 --mode {flags}"
    first, *events = logged(run(tmp_path, flags))
    assert [first["rollout"], first["trainer"]] == [str(ARITHMETICS[a]) for a in MODES[mode]]
    assert first["config"]["mode"] == mode and first["config"]["check_weights"]
    assert first["versions"]["torch"] == torch.__version__ and "CPU" in first["device"]
    assert [e.pop("event") for e in events] == ["eval", "step", "step", "eval", "end"]
    assert all(torch.tensor([*e.values()]).isfinite().all() for e in events)
    for step, (new, old, advantages, mask, _, weights) in zip(events[1:3], seen, strict=True):
        loss = -(advantages[:, None] * weights * mask).sum().item() / mask.sum().item()
        assert torch.equal(new, old) and step["clip_share"] == 0
        assert step["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-7)
        assert ("tis" in flags) == bool((weights != 1).any())
        assert "replay" not in flags or step["choice_mismatch"] == 0


def test_the_first_mini_batchs_ratio_is_one_and_the_seconds_is_not(tmp_path, monkeypatch):
    policy_loss, seen = grpo.policy_loss, []
    monkeypatch.setattr(grpo, "policy_loss", lambda *a: seen.append(a) or policy_loss(*a))
    run(tmp_path, "--steps 1 --group-size 8 --mode bf16")
    assert [torch.equal(new, old) for new, old, *_ in seen] == [True, False]


def test_the_warm_start_writes_a_bf16_checkpoint_that_init_starts_from(tmp_path, capsys):
    """At a learning rate of almost 0 the run ends where it started."""
    path = run(tmp_path, "--warm-start --warm-steps 3 --warm-batch 8") / "tiny.pt"
    ended = run(tmp_path, f"--init {path} --steps 1 --lr 1e-30") / "checkpoint.pt"
    begun, ended = (checkpoint.load(p)["weights"] for p in (path, ended))
    assert {w.dtype for w in begun.values()} == {torch.bfloat16}
    refuses(capsys, tmp_path, "--warm-start", "tiny.pt already holds a policy")
    assert all(torch.equal(begun[name].float(), ended[name]) for name in begun)


def test_five_steps_and_five_more_equal_ten(tmp_path):
    """The noise of --engine-drift is torch's own, which resuming restores too."""
    ten = run(tmp_path / "ten", "--engine-drift 0.1 --steps 10")
    run(tmp_path, "--engine-drift 0.1 --steps 5")
    assert_same_run(ten, run(tmp_path, "--engine-drift 0.1 --steps 10 --resume"))


@pytest.mark.parametrize("seed", range(int(os.environ.get("QUADS_KILLS", 3))))
def test_a_run_killed_at_a_random_moment_ends_in_the_same_weights(whole, tmp_path, seed):
    """SIGKILL, during or soon after a random step. QUADS_KILLS=20 tries as many moments."""
    log, chance = tmp_path / "quads-s0" / "log.jsonl", random.Random(seed)
    command = [sys.executable, train.__file__, *argv(tmp_path, "--steps 10")]
    process, lines = subprocess.Popen(command), chance.randint(0, 10)
    while not (log.exists() and len(log.read_bytes().splitlines()) >= lines):
        assert process.poll() is None
    time.sleep(chance.uniform(0, 0.05))
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert_same_run(whole, run(tmp_path, "--steps 10 --resume"))


@pytest.mark.parametrize("moment", [("step", 3), ("eval", 10)])
def test_ctrl_c_saves_the_step_and_says_how_to_go_on(whole, tmp_path, monkeypatch, capsys, moment):
    write = runs.Log.__call__

    def interrupted(log, event, **values):
        write(log, event, **values)
        if (event, values.get("step")) == moment:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(runs.Log, "__call__", interrupted)
    assert train.cli(argv(tmp_path, "--steps 10 --checkpoint-every 99")) == 130
    monkeypatch.undo()
    said, again = capsys.readouterr().err.split("; continue with: python train.py ")
    assert said.endswith(f"interrupted after step {moment[1]}")
    assert checkpoint.load(tmp_path / "quads-s0" / "checkpoint.pt")["step"] == moment[1]
    assert train.cli(shlex.split(again)) == 0
    assert_same_run(whole, tmp_path / "quads-s0")


def refuses(capsys, out, flags, said, files="*.*"):
    """Exit status 2, one line, and nothing changes on disk but for empty files."""
    before = {p: p.read_bytes() for p in out.rglob(files) if p.stat().st_size}
    assert train.cli(argv(out, flags)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("train.py: error: ") and said in line
    assert before == {p: p.read_bytes() for p in out.rglob(files) if p.stat().st_size}


@pytest.mark.parametrize(("flags", "said"), [
    ("--mode quad", "mode must be one of"), ("--preset x", "'x'"), ("--prompts 5", "prompts=5: "),
    ("--lr nan", "lr must be"), ("--group-size 1", "group_size"), ("--steps 0", "steps must be 1"),
    ("--warm-noise nan", "warm_noise"), ("--seed 5 --seeds 0", "exclude"),
    ("--out ''", "out must"), (f"--out {__file__}", "test_train.py"), ("--device x", "'x'"),
    ("--width 72", "multiple of 16"), ("--seeds 0,,1", "whole"), ("--init no.pt", "no.pt: not a "),
    ("--top-k 1", "tiny.pt: not of these sizes: top_k is 2"), ("--seeds 1,1", "named twice"),
    ("--warm-start --seeds 1,2", "makes one policy"),
])  # fmt: skip
def test_bad_flags_are_refused(tmp_path, capsys, flags, said):
    refuses(capsys, tmp_path, flags, said)


def test_a_run_is_never_overwritten_nor_written_by_two_nor_read_from_half_a_file(copy, capsys):
    said = "quads-s0 already holds a run; "
    refuses(capsys, copy.parent, "--mode bf16,quads", said)  # before the run of bf16, not after it
    with runs.Log(copy):
        refuses(capsys, copy.parent, "--resume", "another process is writing this run")
    path, content = copy / "checkpoint.pt", (copy / "checkpoint.pt").read_bytes()
    path.write_bytes(content[:99_999] + b"?" + content[100_000:])
    refuses(capsys, copy.parent, "--resume", "not a readable checkpoint (ValueError('checksum of")
    path.write_bytes(content[:99_999])
    refuses(capsys, copy.parent, "--resume", "not a readable checkpoint (BadZipFile")
    path.unlink()
    refuses(capsys, copy.parent, "--resume", "not a readable checkpoint (FileNotFoundError")


def half(content, path):
    path.write_bytes(b"half a checkpoint")
    raise OSError("No space left")


def poisoned(run, policy, *rest, save=runs.save):
    policy.norm.data[0] = torch.nan
    save(run, policy, *rest)


@pytest.mark.parametrize(("damage", "said"), [
    (lambda s, log, patch: s.pop("optimizer"), "checkpoint.pt: no run can resume from it, optim"),
    (lambda s, log, patch: s["optimizer"]["state"].pop(3), "optimizer state is incomplete, or not"),
    (lambda s, log, patch: s["optimizer"]["state"][3].update(exp_avg=torch.ones(2)), "is incompl"),
    (lambda s, log, patch: s.update(step=9), "not of this model after 18 updates"),
    (lambda s, log, patch: s["rng"].pop("noise"), "checkpoint.pt: damaged, or of another model"),
    (lambda s, log, patch: s["weights"].pop("head"), "checkpoint.pt: not of these sizes: Missing"),
    (lambda s, log, patch: s.update(weights=os.getcwd), "not a readable checkpoint (Unpickling"),
    (lambda s, log, patch: s.update(format="quads_min checkpoint 0"), "expected a file of format"),
    (lambda s, log, patch: s["config"].pop("clip"), "other knobs than this: clip=None"),
    (lambda s, log, patch: log.write_text(log.read_text().replace('"seed": 0', '"seed": 1')),
     "its log is of a run with other knobs than this: seed=1"),
    (lambda s, log, patch: s["weights"].update(head=s["weights"]["head"].int()), "floating-point"),
    (lambda s, log, patch: s.update(step=13), "already at step 13, past --steps 12"),
    (lambda s, log, patch: os.truncate(log, 99), "log.jsonl: missing, or shorter"),
    (lambda s, log, patch: s["weights"]["head"].fill_(torch.nan), "step 11: inf or NaN in head"),
    (lambda s, log, patch: patch(ChainTask, "rewards", lambda *_: torch.arange(8) / 0), "loss nan"),
    (lambda s, log, patch: patch(Engine, "sync", lambda e, sync=Engine.sync: e.programs or sync(e)),
     "step 12: engine and trainer multiply other weights"),
    (lambda s, log, patch: patch(torch, "save", half), "what it held is kept (No space left"),
    (lambda s, log, patch: patch(runs, "save", poisoned), "not written, inf or NaN in norm"),
])  # fmt: skip
def test_what_is_wrong_is_named_and_the_checkpoint_stays(copy, monkeypatch, capsys, damage, said):
    """A checkpoint damaged, hostile or another run's, a log cut short, a step that fails."""
    path, save = copy / "checkpoint.pt", torch.save
    state = checkpoint.load(path)
    damage(state, copy / "log.jsonl", monkeypatch.setattr)
    save(state, path)
    refuses(capsys, copy.parent, "--resume --checkpoint-every 9", said, "*.pt*")


def test_rollout_evaluates_a_run_as_its_log_did(whole, capsys, monkeypatch):
    flags = f"{whole / 'checkpoint.pt'} --device cpu --prompts 32 --show 0 --arithmetic".split()
    assert cli([*flags, "w4a16,w4a4+rac"]) == 0
    last = [f"{100 * logged(whole, 'eval')[-1][k]:.1f}" for k in ("trainer", "deployed")]
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == last
    assert cli([*flags, "w4a5"]) == 2 and "unknown w4a5" in capsys.readouterr().err
    monkeypatch.setattr(Engine, "generate", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    assert cli([*flags, "w4a4"]) == 130
