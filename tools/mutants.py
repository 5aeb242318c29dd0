"""Change one line of the code at a time, and check that a test near it fails.

    python tools/mutants.py                    # all mutants, in a copy of the working tree
    python tools/mutants.py --only lr_sched    # those whose file, texts or tests contain this text
    python tools/mutants.py --list

A mutant that no test notices is printed as ALIVE. The exit code is 1 if a mutant is alive or does not apply, or if its
tests fail without it.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from util.run.cli import Parser

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 600  # a mutant may make a loop endless


class Mutant(NamedTuple):
    """A file, a text that occurs in it once, what replaces it, and the tests that must notice, as pytest takes them."""

    file: str
    old: str
    new: str
    tests: str


PRMIM, MAE = "tests/test_prmim.py -k 'not interpreter'", "tests/test_models_mae_pr.py"
SUPERVISION = "tests/test_framework_contract.py -k 'supervision and MaskedAutoencoderViT'"
LOOP, FINETUNE = "tests/test_engine_pretrain.py", "tests/test_engine_finetune.py"
ACCUMULATION = f"{LOOP} -k accumulation"
PRETRAIN = "tests/test_main_pretrain.py -k 'weight_decay or adamw'"
SCHEDULES, LARS, ADDRESSED = "tests/util/test_lr_sched.py", "tests/util/test_lars.py", "tests/util/test_addressed.py"
DATA = "tests/util/data/test_datasets.py -k 'epoch or split or micro or skips or once'"
CROPS = "tests/util/data/test_crops.py"
CHECKPOINT, RULES = "tests/util/run/test_checkpoint.py", "tests/util/run/test_resume.py"
LOADING, BIASES = "tests/encoders/test_load.py", "tests/encoders/test_rel_pos.py"
POSITIONS = "tests/util/test_pos_embed.py"
SAVING = "tests/util/run/test_saving.py"
KNN, ROBUSTNESS = "tests/util/evaluate/test_knn.py", "tests/downstream/robustness -k 'ce or errors'"
SEGMENTATION = "tests/downstream/segmentation/test_engine.py"
EVALUATION = "tests/util/evaluate/test_loop.py"

# {file: (a text that occurs in it once, what replaces it, the tests that must notice, as pytest takes them)}
BY_FILE: dict[str, list[tuple[str, str, str]]] = {
    "prmim.py": [
        ("int(num * (1 - mask_ratio))", "round(num * (1 - mask_ratio))", PRMIM),
        ("int(num_tokens * throw_ratio)", "round(num_tokens * throw_ratio)", PRMIM),
        ("if not 0 <= throw_ratio < mask_ratio", "if not 0 <= throw_ratio <= mask_ratio", PRMIM),
        ("return self.num_visible + self.num_retained\n", "return self.num_masked\n", PRMIM),
        ("self.ids_restore >= self.counts.num_visible", "self.ids_restore > self.counts.num_visible", PRMIM),
        ("self.ids_restore >= self.counts.num_kept", "self.ids_restore >= self.counts.num_visible", PRMIM),
        ("x.new_zeros(x.shape[0], self", "x.new_ones(x.shape[0], self", PRMIM),
        ("np.minimum(nearest, difference[0] + difference[1]", "np.minimum(nearest, difference[0]", PRMIM),
        ("pick = nearest.argmax(axis=1)", "pick = nearest.argmin(axis=1)", PRMIM),
        ("np.int16 if coords.max() <= 127", "np.int16 if coords.max() <= 255", PRMIM),
        (".sum(axis=(2, 4)) % 1", ".sum(axis=(2, 4))", PRMIM),
        ("noise - visible, axis=1)", "noise + visible, axis=1)", PRMIM),
        ("self.sampler.visible_tokens(noise[:1])", "self.sampler.visible_tokens(noise)", PRMIM),
        ("addressed_noise(self.seed, epochs, indices", "addressed_noise(self.seed, 0, indices", PRMIM),
        ("order.take_kept(self.pos_embed[:, P:])", "order.take_kept(self.pos_embed[:, :-P])", MAE),
        ("return self.pred(self.norm(x))", "return self.pred(x)", MAE),
        ('if self.applies_to == "all":', 'if self.applies_to == "thrown":', PRMIM),
        ("padding=kernel_size // 2, groups=dim)", "padding=kernel_size // 2, groups=1)", PRMIM),
        ("return x + self.mlp(", "return self.mlp(", PRMIM),
    ],
    "framework.py": [
        ("if not (self.progressive and self.counts.num_thrown)", "if not self.progressive", SUPERVISION),
        ("else order.mask & ~order.thrown", "else order.mask", SUPERVISION),
        ("first : first + num_tokens]", "first - 1 : first - 1 + num_tokens]", MAE),
        ("patches.var(-1, keepdim=True)", "patches.var(-1, keepdim=True, unbiased=False)", MAE),
        ("target = (target - mean) / std", "target = target / std", MAE),
        (
            "order.take(self.target_tokens(imgs)",
            "order.take(self.token_pixels(imgs)",
            "tests/frameworks/test_targets.py",
        ),
    ],
    "models_mae_pr.py": [
        (".square().mean()}", ".abs().mean()}", MAE),
        ("return self.norm(self.encode(tokens))", "return self.encode(tokens)", MAE),
        ("order.take_visible(self.patch_positions)", "order.take_visible(self.pos_embed[:, :-1])", MAE),
    ],
    "frameworks/models_simmim_pr.py": [
        (
            'p*p*C]\n        return {"pixel": self.error(pred, imgs, order).abs()',
            'p*p*C]\n        return {"pixel": self.error(pred, imgs, order).square()',
            "tests/frameworks/test_models_simmim_pr.py",
        ),
    ],
    "frameworks/models_mff_pr.py": [
        ("self.proj_weights.softmax(dim=0)", "self.proj_weights", "tests/frameworks/test_models_mff_pr.py"),
    ],
    "util/run/loop.py": [
        ("loss.detach() / self.accum_iter", "loss.detach()", ACCUMULATION),
        ("sum(losses.values()) / self.accum_iter", "sum(losses.values())", ACCUMULATION),
        ("is_last = micro == self.accum_iter - 1", "is_last = micro == 0", "tests/test_accumulation.py"),
        ("micro * world_size + rank", "micro + rank", f"{LOOP} -k seed"),
        ("addressed_seed(STEP, self.seed, step,", "addressed_seed(STEP, self.seed, 0,", f"{LOOP} -k drawn"),
        ("total * (1 + 0 * total.detach())", "total", f"{LOOP} -k non_finite"),
        ("(~grad_norm.isfinite()).float()", "grad_norm.isfinite().float()", f"{LOOP} -k non_finite"),
        ("torch.where(finite, 0.0, self.bad_streak + 1)", "self.bad_streak * 0", f"{LOOP} -k losing"),
        ("torch.where(finite, values, 0.0)", "torch.nan_to_num(values)", f"{LOOP} -k 'skipped or finite'"),
        ("self.optimizer.zero_grad(set_to_none=True)", "pass", f"{LOOP} -k adamw"),
        ("sums[rank] if len(sums) == world_size", "sums[0] if len(sums) == world_size", f"{LOOP} -k own_sums"),
        ("self.parameters, self.clip_grad, grad_norm", "self.parameters, 1e9, grad_norm", f"{FINETUNE} -k clipping"),
        ('group.get("lr_scale", 1.0)', "1.0", f"{FINETUNE} -k rates"),
    ],
    "util/lr_sched.py": [
        ("0.5 * (1.0 + math.cos(math.pi * progress))", "(1.0 - progress)", SCHEDULES),
        ("step / max(1, warmup - 1)", "step / max(1, warmup)", SCHEDULES),
        ("    step = max(step - 1, 0)\n", "", SCHEDULES),
        ("0.1**num_falls", "0.5**num_falls", SCHEDULES),
    ],
    "util/lars.py": [
        ("if p.ndim > 1:", "if p.ndim > 0:", LARS),
        ("(p.norm() > 0) & (g.norm() > 0)", "p.norm() > 0", LARS),
    ],
    "main_pretrain.py": [
        ("no_weight_decay_list=model.no_weight_decay()", "no_weight_decay_list=()", PRETRAIN),
        ("betas=tuple(args.betas)", "betas=(0.9, 0.999)", PRETRAIN),
    ],
    "models_vit.py": [
        ('r"^pos_embed|^patch_embed"', 'r"^patch_embed"', "tests/test_models_vit.py -k 'layer or decay'"),
    ],
    "util/addressed.py": [
        ("np.arange(1, num + 1", "np.arange(num", ADDRESSED),
        ("(stream, seed, epoch, indices)", "(stream, seed, indices)", ADDRESSED),
    ],
    "util/data/datasets.py": [
        ("(micro * self.world_size + self.rank)", "(self.rank * self.accum_iter + micro)", DATA),
        (
            "order, epoch_of_order = permutation(self.seed, epoch,",
            "order, epoch_of_order = permutation(self.seed, 0,",
            DATA,
        ),
        ("divmod(self.start_micro + part.start,", "divmod(part.start,", "tests/util/data/test_datasets.py"),
    ],
    "util/data/transforms.py": [
        ("rows * width >= columns * height", "rows * width <= columns * height", CROPS),
        ("round((side - wanted) / 2)", "int((side - wanted) / 2)", CROPS),
        ("draws[-1] < 0.5", "draws[-1] < 0.6", CROPS),
        ("math.sqrt(area * ratio)", "math.sqrt(area / ratio)", CROPS),
        (".clamp(0, 65535)", "", CROPS),
        ("(imgs - self.mean) / self.std", "imgs / self.std - self.mean", CROPS),
    ],
    "util/run/checkpoint.py": [
        ("for path in reversed(list_checkpoints(output_dir))", "for path in list_checkpoints(output_dir)", CHECKPOINT),
        ('if path.stat().st_size != record["size"]:', "if False:", CHECKPOINT),
        ('sha256(path) == record["sha256"] else', "path else", CHECKPOINT),
        ("weights_only=True", "weights_only=False", CHECKPOINT),
        ('record is not None and not record.get("keep", True)', "record is not None", CHECKPOINT),
        ("step_of(path) < good_steps[-1]", "step_of(path) != good_steps[-1]", CHECKPOINT),
        ("if not (value.is_meta or value.isfinite().all())", "if value.is_meta", CHECKPOINT),
        ("self.digest.update(rest)", "self.digest.update(rest[1:])", CHECKPOINT),
    ],
    "util/run/saving.py": [
        ("self.join()  # the write before", "pass  # the write before", SAVING),
        ("self.join(required)", "pass", SAVING),
    ],
    "util/run/shard.py": [("return self.buffers[place].copy_(whole, non_blocking=True)", "return whole", SAVING)],
    "util/run/resume.py": [
        ("(machine_flags - fixed_flags)", "machine_flags", RULES),
        ('if before["files"].get(flag) != fingerprint:', "if False:", RULES),
        ('if before["pixels"] != now["pixels"]:', "if False:", RULES),
        ("module.drop_prob for module", "True for module", RULES),
        ("if before != total_batch_size:", "if False:", "tests/faults/test_folder.py -k changed_settings"),
    ],
    "encoders/load.py": [
        ('if lacks_norm else ("head.", "fc_norm.")', "", LOADING),
        ("if _has_other_classes(weights, found, own, classes):", "if False:", LOADING),
    ],
    "encoders/names.py": [
        (
            "first, third, second, fourth]",
            "first, second, third, fourth]",
            "tests/frameworks/test_models_greenmim_pr.py",
        ),
    ],
    "encoders/rel_pos.py": [
        ("* (2 * columns - 1) + (across", "* (2 * rows - 1) + (across", BIASES),
        ('einsum("ij,jkh,lk->ilh", down', 'einsum("ij,jkh,lk->lih", down', BIASES),
    ],
    "util/pos_embed.py": [
        ("for axis in (column, row)]", "for axis in (row, column)]", POSITIONS),
        ("align_corners=False", "align_corners=True", POSITIONS),
    ],
    "engine_finetune.py": [
        ("chosen.topk(min(5, chosen.shape[1]))", "chosen.topk(min(4, chosen.shape[1]))", FINETUNE),
        ("return imgs, targets, 0.0", "return imgs, targets, self.label_smoothing", FINETUNE),
        ("if num_seen != num_images:", "if num_seen > num_images:", FINETUNE),
    ],
    "util/evaluate/loop.py": [
        ("np.asarray(indices)[rank::world_size]", "np.asarray(indices)[rank:-1:world_size]", EVALUATION),
    ],
    "util/evaluate/knn.py": [
        ("TEMPERATURE = 0.07", "TEMPERATURE = 0.7", KNN),
        ("(classes < labels[:, None])", "(classes > labels[:, None])", KNN),
        ("query_indices[:, None] == indices, -torch.inf", "query_indices[:, None] == indices, 0", KNN),
    ],
    "downstream/segmentation/metrics.py": [
        ("(true + predicted - right)", "(true + predicted)", SEGMENTATION),
        (
            "truth[is_labelled].long() * num_classes + predicted",
            "predicted[is_labelled].long() * num_classes + truth",
            SEGMENTATION,
        ),
    ],
    "downstream/robustness/main_robustness.py": [
        ("100 * mean / alexnet_error", "100 * mean", ROBUSTNESS),
    ],
}
MUTANTS = [Mutant(file, *change) for file, changes in BY_FILE.items() for change in changes]


def copy_tree(target: Path) -> None:
    """Copies the files of the working tree that git knows or does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-zco", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def run_tests(tree: Path, tests: str) -> bool:
    """Whether the tests pass in `tree`. A selection without tests fails."""
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", *shlex.split(tests)]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}  # a mutant may have the size and time of the original
    null = subprocess.DEVNULL
    with subprocess.Popen(
        command, cwd=tree, env=environment, stdout=null, stderr=null, start_new_session=True
    ) as process:
        try:
            return process.wait(SECONDS) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what a test has started, too


def try_mutant(mutant: Mutant, tree: Path, passed: dict[str, bool]) -> str:
    """Returns what became of a mutant. passed: whether tests pass without a mutant, filled here."""
    path = tree / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        return "DOES NOT APPLY"
    if mutant.tests not in passed:
        passed[mutant.tests] = run_tests(tree, mutant.tests)
    if not passed[mutant.tests]:
        return "TESTS FAIL WITHOUT IT"
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        return "ALIVE" if run_tests(tree, mutant.tests) else "killed"
    finally:
        path.write_text(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; `argv` replaces the command line. Returns the exit code."""
    parser = Parser("mutants.py", description=__doc__)
    parser.add_argument("--only", default="", help="text that the file, the texts or the tests of a mutant contain")
    parser.add_argument("--list", action="store_true", help="print the mutants and end")
    args = parser.parse_args(argv)
    mutants = [mutant for mutant in MUTANTS if args.only in "\n".join(mutant)]
    survivors, passed = 0, dict[str, bool]()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        if not args.list:
            copy_tree(tree)
        for mutant in mutants:
            start, state = time.monotonic(), ""
            if not args.list:
                state = try_mutant(mutant, tree, passed)
                survivors += state != "killed"
                state = f"{state} ({time.monotonic() - start:.0f} s): "
            print(f"{state}{mutant.file}: {mutant.old.strip()!r} -> {mutant.new.strip()!r}", flush=True)
    print(f"{len(mutants)} mutants" + ("" if args.list else f", {survivors} not killed"))
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
