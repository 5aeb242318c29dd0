"""The commands of a table's rows, and its numbers beside the published ones."""

import json
import shlex

import pytest

from scripts import reproduce_table
from tests.documents import Command, parse
from tests.runs import refused


def printed(capsys, *arguments):
    reproduce_table.main([str(word) for word in arguments])
    return capsys.readouterr().out.splitlines()


def test_each_program_understands_its_commands(capsys):
    tables = {row["table"] for row in reproduce_table.read_published()} - {*reproduce_table.NOT_OF_THE_PAPER}
    lines = printed(capsys, *sorted(tables), "--launcher", "torchrun --nproc_per_node 8")
    assert len(lines) == len(set(lines)) > 100
    for line in lines:
        assert line.startswith("torchrun --nproc_per_node 8 ")
        parse(Command("reproduce_table.py", tuple(shlex.split(line))))


def test_a_run_comes_after_the_one_that_it_needs(capsys):
    lines = printed(capsys, "robustness", "--rows", "mae*", "--output_dir", "o p")
    pretraining, tuning, *evaluations = [shlex.split(line) for line in lines]
    folder = pretraining[pretraining.index("--output_dir") + 1]
    assert tuning[tuning.index("--finetune") + 1] == folder == "o p/mae_vit_base_800ep"
    tuned = tuning[tuning.index("--output_dir") + 1]
    assert len(evaluations) == 4
    for command in evaluations:
        assert command[command.index("--resume") + 1] == tuned
    assert '--data_path "$IMAGENET"' in lines[0]


def test_results_of_finished_runs_stand_beside_the_published_numbers(tmp_path, capsys):
    tuned = tmp_path / "prmim50_vit_base_800ep" / "finetune_vit_base"
    failed = tmp_path / "mae_vit_base_800ep" / "finetune_vit_base"
    for folder, state, top1 in ((tuned, "finished", 83.25), (failed, "failed", 1)):
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({"state": state}))
        (folder / "results.json").write_text(json.dumps({"last": {"val_top1": top1 + 1 / 900}}))
    results = {"imagenet_c": {"imagenet_c": {"mce": 51.5}}, "imagenet_a": {"last": {"val_top1": 35.0}}}
    for name, content in results.items():
        (tuned / name).mkdir()
        file = "imagenet_c.json" if name == "imagenet_c" else "results.json"
        (tuned / name / file).write_text(json.dumps(content))
    lines = printed(capsys, "schedules", "robustness", "--rows", "prmim*", "--collect", "--output_dir", tmp_path)
    text = "\n".join(lines)
    assert "| prmim50_vit_base_800ep | Top-1 | 83.3 | 83.25 |" in text
    assert "| prmim50_vit_base_800ep | IN-C | 51.4 | 51.50 |" in text
    assert "| prmim50_vit_base_800ep | IN-A | 35.4 | 35.00 |" in text
    lines = printed(capsys, "schedules", "--rows", "mae*_base_800ep", "--collect", "--output_dir", tmp_path)
    assert "| mae_vit_base_800ep | Top-1 | 83.3 |  |" in "\n".join(lines)


@pytest.mark.parametrize("flags", ["kernel", "kernels --rows prmim51*"])
def test_user_errors(flags, capsys):
    assert flags.split()[-1] in refused(capsys, reproduce_table.main, *flags.split())
