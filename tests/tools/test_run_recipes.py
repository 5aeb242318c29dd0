"""tools/run_recipes.py: every recipe runs with a tiny model through the mains themselves."""

import csv
import json

import pytest

from recipes import FINETUNE_RECIPES, RECIPES
from tests.runs import refused
from tools import run_recipes
from tools.run_recipes import IMAGES, Job, Workshop, check_run, command, find_jobs, get_args_parser, run, scale_of
from util.data import transforms

EVERY_RECIPE = "every recipe, scaled down, over 5,000 images with a stop in the middle"
GOES_ON = "no exception, finite losses, goes on at the very step"
QUICK = dict(images=96, total_batch_size=32)


def all_jobs(**options):
    jobs = [Job("main_pretrain", name, **options) for name in RECIPES]
    return jobs + [Job("main_finetune", name, **options) for name in FINETUNE_RECIPES]


def kind(job):
    """The settings that determine which code a recipe runs."""
    s = job.settings()
    model = s["model"].split("_")[:2] if job.program == "main_pretrain" else s["model"].split("_")[:1]
    trained = "head" if s.get("trainable_blocks") == 0 else "some" if s.get("trainable_blocks") else "all"
    return (*model, trained, s["lr_schedule"], s.get("crop"), s.get("aa"), bool(s.get("mixup")))


def one_of_each_kind():
    """The first recipe of each kind."""
    return list({kind(job): job for job in reversed(all_jobs(**QUICK))}.values())[::-1]


def by_name(job):
    return job.recipe


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    """Photographs, teacher and encoders for all runs."""
    return Workshop(tmp_path_factory.mktemp("workshop"))


def run_job(job, workshop, folder):
    row = run(job, command(job, workshop, folder), folder)
    assert row["problem"] == "", row["problem"]
    return row


def test_every_kind_of_the_paper_is_there():
    kinds = {kind(job) for job in one_of_each_kind()}
    pretrained = {"mae", "mff", "simmim", "localmim", "tec", "greenmim", "crossmae", "amt"}
    assert {k[0] for k in kinds} >= pretrained | {"vit", "relative", "absolute", "swin"}
    assert {k[-5] for k in kinds} >= {"all", "some", "head"}
    assert {k[-4] for k in kinds} >= {"mae", "mff", "simmim", "simmim_steps"}
    assert len(kinds) <= 40  # the test below runs all of them


def test_the_table_in_docs_has_every_recipe_as_it_is_now():
    """A changed or renamed recipe must run again: `--recipes NAME --csv`, and its row goes into the table."""
    with open(run_recipes.Path(__file__).parents[2] / "docs" / "recipes_run.csv") as file:
        rows = [(row["recipe"], row["model"], int(row["total_batch_size"])) for row in csv.DictReader(file)]
    jobs = [(job.recipe, job.settings()) for job in all_jobs()]
    assert sorted(rows) == sorted((name, s["model"], s["total_batch_size"]) for name, s in jobs)


def test_every_recipe_has_a_small_model():
    for job in all_jobs():
        settings, (steps, stop, count) = job.settings(), job.steps()
        scale = scale_of(job.main, settings)
        assert scale["img_size"] <= 64 and scale["embed_dim"] <= 32
        total = settings["total_batch_size"]
        assert steps * total >= IMAGES and 0 < stop < steps and count % total == 0 and stop % (count // total)


@pytest.mark.parametrize("job", one_of_each_kind(), ids=by_name)
def test_a_recipe_of_each_kind_runs(job, workshop, tmp_path):
    row = run_job(job, workshop, tmp_path / "run")
    assert (row["steps"], row["stopped_after"], row["images"]) == (3, 1, 96)


@pytest.mark.long
@pytest.mark.fault("U2", EVERY_RECIPE, GOES_ON)
@pytest.mark.parametrize("recipe", ["prmim50_vit_base_800ep", "finetune_vit_base"])
def test_a_recipe_runs_over_5000_images(recipe, workshop, tmp_path, record_property):
    job = next(job for job in all_jobs() if job.recipe == recipe)
    row = run_job(job, workshop, tmp_path / "run")
    assert row["images"] >= IMAGES
    if recipe == "finetune_vit_base":
        assert (row["total_batch_size"], row["steps"], row["stopped_after"]) == (1024, 5, 3)
    record_property("measured", f"{recipe}: {row['images']} images in {row['seconds']:.0f} s")


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.fault("U2", EVERY_RECIPE, GOES_ON)
@pytest.mark.parametrize("job", all_jobs(), ids=by_name)
def test_every_recipe_runs_over_5000_images(job, workshop, tmp_path):
    assert run_job(job, workshop, tmp_path / "run")["images"] >= IMAGES


def test_a_new_recipe_is_covered(workshop, tmp_path, monkeypatch):
    """A recipe of a new kind needs an entry in recipes.py and nothing else."""
    swin = {**FINETUNE_RECIPES["finetune_cifar10_swin"], "model": "swin_large_patch4_window14", "aa": "augmix-m5-w4-d2"}
    monkeypatch.setitem(FINETUNE_RECIPES, "my_finetuning", swin)
    monkeypatch.setitem(RECIPES, "my_pretraining", {**RECIPES["tec_vit_base_300ep"], "model": "tec_vit_mini_patch4"})
    names = [job.recipe for job in find_jobs(get_args_parser().parse_args([]))]
    assert names == [*RECIPES, *FINETUNE_RECIPES] == [job.recipe for job in all_jobs()]
    for job in all_jobs(**QUICK):
        if job.recipe.startswith("my_"):
            row = run_job(job, workshop, tmp_path / job.recipe)
            assert row["model"] == (RECIPES | FINETUNE_RECIPES)[job.recipe]["model"]


def quick(*flags):
    return [*flags, "--images", "96", "--total_batch_size", "32", "--jobs", "1"]


def test_the_script_writes_a_table(tmp_path, capsys):
    flags = ["--output_dir", str(tmp_path / "out"), "--csv", str(tmp_path / "table.csv")]
    run_recipes.main(quick("--recipes", "cifar10", "finetune_cifar10", *flags))
    assert "2 of 2 recipes ran" in capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "table.csv").open()))
    assert [(r["recipe"], r["images"], r["stopped_after"], r["problem"]) for r in rows] == [
        ("cifar10", "96", "1", ""),
        ("finetune_cifar10", "96", "1", ""),
    ]
    assert json.loads((tmp_path / "out" / "cifar10" / "settings.json").read_text())["aggregation"] == "dwconv"
    assert "is not an empty folder" in refused(capsys, run_recipes.main, *quick("--recipes", "cifar10", *flags))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--recipes", "cifar11"], "--recipes names cifar11, which recipes.py does not have"),
        (["--output_dir", __file__], f"--output_dir {__file__!r} is not an empty folder"),
        (["--images", "0"], "--images must be at least 1, got 0"),
        (["--csv", "/dev/null/a.csv"], "--csv '/dev/null/a.csv' cannot be written: the folder '/dev/null'"),
    ],
)
def test_wrong_flags_are_refused(flags, message, capsys):
    assert f"run_recipes.py: error: {message}" in refused(capsys, run_recipes.main, *flags)


def test_an_exception_in_the_augmentation_fails_the_recipe_and_not_the_others(tmp_path, monkeypatch, capsys):
    def refuse(img, bits_to_keep, **options):
        raise ValueError(f"{bits_to_keep} bits")

    monkeypatch.setattr(transforms, "posterize", refuse)
    flags = ["--recipes", "finetune_vit_base", "finetune_cifar10", "--output_dir", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as stop:
        run_recipes.main(quick(*flags))
    out, err = capsys.readouterr()
    assert stop.value.code == 1 and err.endswith("error: recipes failed: finetune_vit_base\n")
    assert "1 of 2 recipes ran" in out and " bits" in out
    assert "Traceback" in (tmp_path / "out" / "finetune_vit_base.txt").read_text()


def test_a_loss_that_is_not_finite_fails_the_recipe(workshop, tmp_path, monkeypatch):
    monkeypatch.setitem(RECIPES, "wild", {**RECIPES["cifar10"], "blr": 1e30, "warmup_epochs": 0})
    job = Job("main_pretrain", "wild", **QUICK)
    row = run(job, command(job, workshop, tmp_path / "run"), tmp_path / "run")
    assert "not finite" in row["problem"] or "exit code 3" in row["problem"]


def test_settings_other_than_the_recipe_s_fail_it(workshop, tmp_path):
    job = Job("main_pretrain", "cifar10", **QUICK)
    argv = [*command(job, workshop, tmp_path / "run"), "--weight_decay", "0.2", "--epochs", "7"]
    assert "epochs was 7, not 100" in run(job, argv, tmp_path / "run")["problem"]


def test_a_run_that_does_not_go_on_where_it_stopped_fails(workshop, tmp_path):
    job, folder = Job("main_pretrain", "cifar10", **QUICK), tmp_path / "run"
    run_job(job, workshop, folder)
    lines = (folder / "log.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 3 and check_run(job, folder, lines[0]) == []
    assert "not what they were" in check_run(job, folder, lines[1])[0]  # the first report differs
    (folder / "log.jsonl").write_text("".join(lines[:2]))
    assert "steps 1 to 3 should be reported once each, found [1, 2]" in check_run(job, folder, lines[0])
    (folder / "log.txt").write_text("resuming checkpoint-2.pth at step 2\n")
    assert "one resume at step 1 was expected, found ['2']" in check_run(job, folder, lines[0])
