"""The README is a program: commands parse, paths exist, numbers are those of the logs."""

import re
import shlex
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import rollout
import train
from quads_min import nvfp4

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
RESULTS = (ROOT / "quads_min/results/README.md").read_text()
COMMANDS = re.findall(r"^python3? (?!-)([^#&\n]*)", README.split("git apply")[0], re.M)
TABLES = re.findall(r"<!-- \$ python -m (.+?) -->\n(.*?)\n<!-- end -->", README + RESULTS, re.S)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_parses(command):
    """Each flag is one that its program takes today; nothing is run."""
    program, *argv = shlex.split(command)
    parse = {"train.py": train.parse, "rollout.py": rollout.parse, "tests/bench.py": tuple}[program]
    parse([*argv, "--device", "cpu"])


def test_paths_exist_and_the_file_map_is_complete():
    for path in re.findall(r"`((?:quads_min|tests|\.ci)/[\w./-]*)`", README):
        assert (ROOT / path).exists(), path
    for path, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", README):
        text = (ROOT / path).read_bytes().decode(errors="ignore") if path else README
        heads = re.sub(r"[^\w\n #-]", "", text.lower()).replace(" ", "-").splitlines()
        assert not anchor or any(re.fullmatch(f"#+-{anchor}", head) for head in heads), anchor
    rows = {ROOT / row for row in re.findall(r"^\| `([\w./]+)` \|", README, re.M)}
    assert rows == {*ROOT.glob("*.py"), *ROOT.glob("quads_min/[!_]*.py"), ROOT / "tests"}
    for log in ROOT.glob("quads_min/results/*/*.jsonl"):  # every set of runs has its table
        assert any(f"results/{log.parent.name}" in command for command, _ in TABLES), log


@pytest.mark.parametrize(("command", "shown"), TABLES, ids=[command for command, _ in TABLES])
def test_tables_are_what_their_commands_print(command, shown, monkeypatch, capsys):
    """To the character, from the shipped logs."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    assert not import_module(sys.argv[0]).main()
    assert capsys.readouterr().out.strip() == shown.strip("`\n")


def test_the_block_by_hand_is_what_the_quantizer_makes_of_it():
    block = re.search(r"### One block, by hand.*?```\n(.*?)```", README, re.S)[1]
    rows = [(line[:11].strip(), line[11:].split()) for line in block.splitlines()]
    x = torch.tensor([[float(v) for v in rows[0][1]]])
    main, residual, _ = nvfp4.encode_with_residual(x, 1.0)
    x_hat, r_hat = main.dequantize(), residual.dequantize()
    expected = [x, main.value, main.pack().packed, x_hat, x - x_hat, residual.value,
                residual.pack().packed, r_hat, x_hat + r_hat]  # fmt: skip
    for (name, shown), values in zip(rows, expected, strict=True):
        found = [int(v, 16) if name == "bytes" else float(v) for v in shown]
        assert found == pytest.approx(values.flatten().tolist(), abs=0.006)
    assert main.scale.item() == 448 and residual.scale.item() == 18
