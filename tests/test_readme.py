"""The README is a program: commands parse, paths exist, numbers are those of the logs."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

import rollout
import train
from quads_min import analysis, nvfp4, report
from quads_min.modes import ARITHMETICS, MODES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.split("#")[0].strip()
    for block in re.findall(r"```(?:bash)?\n(.*?)```", README, re.S)
    for line in block.splitlines()
    if "git apply" not in block  # the forks: test_forks.py
    and re.match(r"(python3?|pip|bash) ", line)
]


def python_commands():
    parts = [part.strip() for command in COMMANDS for part in command.split("&&")]
    return [shlex.split(p)[1:] for p in parts if re.match(r"python3? (?!-m venv|-m pytest)", p)]


@pytest.mark.parametrize("argv", python_commands(), ids=" ".join)
def test_every_command_parses(argv, monkeypatch):
    """Each flag is one that its program takes today; nothing is run."""
    program, args = argv[0], argv[1:]
    if program == "train.py":
        train.parse([*args, "--device", "cpu"])
    elif program == "rollout.py":
        seen = []
        monkeypatch.setattr(report, "new_figure", lambda *_: None)  # needs matplotlib
        for name in ("show", "compare", "cross_evaluate", "report_self_check"):
            monkeypatch.setattr(rollout, name, lambda args: seen.append(args) or True)
        assert rollout.cli(args) == 0 and seen
    elif program == "tests/bench.py":
        assert not args
    else:
        assert argv[:2] == ["-m", "quads_min.report"]


def test_paths_exist_and_the_file_map_is_complete():
    """Every path named in `code` is there, and every module has its row in the reading order."""
    for path in re.findall(r"`((?:quads_min|tests|\.ci)/[\w./-]*)`", README):
        assert (ROOT / path).exists(), path
    for path, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", README):
        assert (ROOT / path).exists(), path
        if anchor:  # a heading as GitHub names it
            text = (ROOT / (path or "README.md")).read_text()
            heads = re.findall(r"^#+ (.+)$", text, re.M)
            assert anchor in [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in heads]
    rows = set(re.findall(r"^\| `([\w./]+)` \|", README, re.M))
    modules = {p.name for p in ROOT.glob("*.py")}
    modules |= {f"quads_min/{p.name}" for p in (ROOT / "quads_min").glob("[!_]*.py")}
    assert rows == modules | {"tests/"}


MARKED = [
    pytest.param(*found, id=found[0])
    for text in (README, (ROOT / "quads_min/results/README.md").read_text())
    for found in re.findall(r"<!-- \$ (.+?) -->\n(.*?)\n<!-- end -->", text, re.S)
]


@pytest.mark.parametrize(("command", "shown"), MARKED)
def test_tables_are_what_their_commands_print(command, shown, monkeypatch, capsys):
    """To the character, from the shipped logs."""
    _, _, module, *argv = shlex.split(command)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [module, *argv])
    main = {"quads_min.report": report, "quads_min.analysis": analysis}
    assert not main[module].main()
    assert capsys.readouterr().out.strip() == shown.strip().strip("`").strip()


def test_both_readmes_have_their_tables():
    commands = [p.values[0] for p in MARKED]
    sets = {p.parent for p in (ROOT / "quads_min/results").glob("*/*.jsonl")}
    unshown = [s.name for s in sets if not any(f"results/{s.name}" in c for c in commands)]
    assert len(commands) >= 20 and not unshown


def test_the_table_of_modes_in_train_py_is_that_of_modes_py():
    rows = re.findall(r"^    (\w+) +(\w+ / \w+(?:\+RAC)?) +(\w+ / \w+) +\w", train.__doc__, re.M)
    said = {mode: (rollout_side, trainer_side) for mode, rollout_side, trainer_side in rows}

    def text(name):
        a = ARITHMETICS[name]
        return f"{a.weights} / {a.activations}" + ("+RAC" if a.rac_ratio else "")

    assert said == {mode: tuple(map(text, pair)) for mode, pair in MODES.items()}


def test_the_block_by_hand_is_what_the_quantizer_makes_of_it():
    block = re.search(r"### One block, by hand.*?```\n(.*?)```", README, re.S)[1]
    rows = [(line[:11].strip(), line[11:].split()) for line in block.splitlines()]
    x = torch.tensor([[float(v) for v in rows[0][1]]])
    main, residual, _ = nvfp4.quantize_with_residual(x, 1.0)
    x_hat, r_hat = nvfp4.dequantize(main), nvfp4.dequantize(residual)
    codes = [nvfp4.unpack(packet).value.flatten() for packet in (main, residual)]
    expected = [x, codes[0], main.packed, x_hat, x - x_hat, codes[1], residual.packed, r_hat,
                x_hat + r_hat]  # fmt: skip
    for (name, shown), values in zip(rows, expected, strict=True):
        if name == "bytes":
            assert [int(b, 16) for b in shown] == values.flatten().tolist()
        else:
            assert [float(v) for v in shown] == pytest.approx(values.flatten().tolist(), abs=0.006)
    assert main.scale.item() == 448 and residual.scale.item() == 18
    assert main.global_scale.item() == pytest.approx(1 / 56)
