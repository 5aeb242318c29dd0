"""The recorder of numbers finds what has changed, and nothing else."""

import json

import main_pretrain
from frameworks import registry
from tests.record_numerics import CASES, differences, main, record_all
from tests.runs import pretrain


def test_two_records_are_equal_and_a_changed_number_is_named(tmp_path, capsys):
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    for path in paths:
        record_all(path, ["mae", "mae, nothing thrown"])
    assert main(["--compare", *map(str, paths)]) == 0
    content = json.loads(paths[1].read_text())
    content["mae"]["reports"][2]["loss"] += 1e-7
    content["mae, nothing thrown"]["weights"] = "0"
    paths[1].write_text(json.dumps(content))
    assert main(["--compare", *map(str, paths)]) == 1
    shown = capsys.readouterr().out
    assert "mae: step 3: loss was" in shown
    assert "mae, nothing thrown: weights changed" in shown


def test_a_run_that_failed_is_no_record_of_another():
    assert differences({"mae": {"error": "a"}}, {"mae": {"weights": "1"}})
    assert differences({"mae": {}}, {}) == ["mae: is in one record only"]


def test_each_framework_is_recorded():
    """By the first word of its models' names."""
    recorded = set()
    for case in CASES.values():
        for word in f"{case.program.flags} {case.flags}".split():
            if word in registry.MODELS:
                recorded.add(word.partition("_")[0])
    assert recorded == {name.partition("_")[0] for name in registry.MODELS}


def test_each_case_of_pre_training_can_run():
    """No flag is refused because it has no effect."""
    for name, case in CASES.items():
        if case.program is pretrain:
            words = f"{case.program.flags} {case.flags}".split()
            parser, args = main_pretrain.parse_args(words)
            assert not main_pretrain.unused_flags(args).keys() & parser.given.keys(), name
