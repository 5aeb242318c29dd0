"""The arms and presets of the studies: what differs between runs, and what they share. tools/study.py runs them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from recipes import RECIPES

Flags = dict[str, Any]

# The flags in which arms may differ. All other flags are the preset's.
METHOD = ("throw_ratio", "progressive", "sampling", "kernel_size", "aggregation")
SEEDS = tuple(range(8))  # of the second study
ABLATION = {  # {arm without its ratio: title}
    "plain": "plain partial reconstruction",
    "progressive": "+ progressive reconstruction",
    "furthest": "+ furthest sampling",
    "prmim": "+ both: PR-MIM",
}


def paper_arm(name: str) -> Flags:
    """The method of a row of the paper's ViT-B tables in recipes.py."""
    recipe = RECIPES[f"{name}_vit_base_100ep"]
    return {key: recipe[key] for key in METHOD if key in recipe}


PRMIM50 = paper_arm("prmim50")
PLAIN50 = paper_arm("plain50")
# {arm: its flags of main_pretrain.py}. "reading" names a variant in tools/readings.py, "pretrain_per_class" replaces
# the preset's. None: no pre-training.
ARMS: dict[str, Flags | None] = {
    "mae": paper_arm("mae"),
    **{f"{name}{ratio}": paper_arm(f"{name}{ratio}") for ratio in (50, 25, 65) for name in ABLATION},
    "all": PRMIM50 | dict(applies_to="all"),
    "predictions": PRMIM50 | dict(reading="predictions"),
    **{f"kernel{size}": paper_arm(f"kernel{size}") for size in (3, 5, 9, 11)},
    **{kind: paper_arm(kind) for kind in ("avgpool", "transformer", "convnext")},
    "avgpool_all": paper_arm("avgpool") | dict(applies_to="all"),
    "init_average": PRMIM50 | dict(reading="init_average"),
    "init_normal": PRMIM50 | dict(reading="init_normal"),
    "scratch": None,
}
_CROSSMAE: Flags = dict(model="crossmae_vit_micro_patch4")
_CROSSMAE14: Flags = dict(model="crossmae_vit_nano_patch4")
# PR-MIM and its peers, with half of the tokens thrown.
PEERS: dict[str, Flags | None] = {
    **{name: ARMS[name] for name in ("mae", "plain50", "furthest50", "progressive50", "prmim50")},
    "cell50": PLAIN50 | dict(sampling="running_cell"),
    "attention50": PLAIN50 | dict(sampling="attention"),
    "amt": PLAIN50 | dict(model="amt_vit_micro_patch4", mask_ratio=0.85, throw_ratio=0.4, sampling="attention"),
    "crossmae": paper_arm("mae") | _CROSSMAE,
    "crossmae_plain50": PLAIN50 | _CROSSMAE,
    "crossmae_plain50_lr": PLAIN50
    | _CROSSMAE
    | dict(blr=1e-2 / 3),  # its release scales the rate by the predicted share
    "crossmae_prmim50": PRMIM50 | _CROSSMAE,
    "scratch": None,
}
# The second study, on the paper's grid of 14 x 14 tokens.
GRID14: dict[str, Flags | None] = {
    "mae": ARMS["mae"],
    **{f"{name}{ratio}": ARMS[f"{name}{ratio}"] for ratio in (50, 65) for name in ("plain", "progressive", "prmim")},
    "prmim50_all": ARMS["all"],
    "prmim50_masknorm": PRMIM50 | dict(reading="mask_normalised"),
    "prmim50_convnext": ARMS["convnext"],
    "prmim50_gaussian": PRMIM50 | dict(reading="gaussian"),
    "prmim50_cell": PRMIM50 | dict(sampling="running_cell"),
    "crossmae": paper_arm("mae") | _CROSSMAE14,
    "crossmae_prmim50": PRMIM50 | _CROSSMAE14,
    "mae_short": paper_arm("mae") | dict(pretrain_per_class=1430),  # the multiply-adds of prmim50
    "scratch": None,
}
# The third study: throwing, recovery, level and furthest sampling, by the frozen encoder.
FROZEN14: dict[str, Flags | None] = {
    name: ARMS[name]
    for name in ("mae", *(f"{name}{ratio}" for ratio in (50, 65) for name in ("plain", "progressive", "prmim")))
}
# Its pilot, for MAE alone: learning rate, twice the length, and an encoder that is hardly trained.
PILOT14: dict[str, Flags | None] = {
    **{f"mae_blr{blr:g}": paper_arm("mae") | dict(blr=blr) for blr in (5e-3, 1e-2, 2e-2, 4e-2)},
    **{f"mae_long_blr{blr:g}": paper_arm("mae") | dict(blr=blr, epochs=2, warmup_epochs=0.2) for blr in (1e-2, 2e-2)},
    "mae_untrained": paper_arm("mae") | dict(pretrain_per_class=4),  # one step
}
# Deep decoders with masks in squares, as in Pixio's setting: `deep_prmim50` costs as much as `shallow`.
_SHALLOW, _DEEP = dict(decoder_depth=2), dict(decoder_depth=5)
DEEP16: dict[str, Flags | None] = {
    "shallow": paper_arm("mae") | _SHALLOW,
    "deep": paper_arm("mae") | _DEEP,
    "deep_plain50": PLAIN50 | _DEEP,
    "deep_prmim50": PRMIM50 | _DEEP,
}
# The learning rate of the second study, for MAE alone.
TUNING14: dict[str, Flags | None] = {f"mae_blr{blr:g}": paper_arm("mae") | dict(blr=blr) for blr in (1e-2, 2e-2, 4e-2)}


@dataclass(frozen=True)
class Preset:
    """What all arms share: flags of the mains, data, seeds, and the resources of a run."""

    pretrain: Flags
    finetune: Flags
    labels_per_class: int | None  # fine-tune on the first images of each class, by file name; None: on all
    arms: Mapping[str, Flags | None] = field(default_factory=lambda: ARMS)
    pretrain_per_class: int | None = None  # pre-train on the first images of each class; None: on all
    finetunes: int = 1  # fine-tunings of each encoder, with seeds of their own
    finetuned_seeds: tuple[int, ...] | None = None  # only the encoders of these seeds are fine-tuned; None: all
    frozen: bool = False  # also measure the frozen encoder, by kNN and ridge regression
    seeds: tuple[int, ...] = (0, 1)
    measured_images: int = 1000  # of val/, for the errors of reconstruction
    device: str = "cpu"
    gib_per_run: float = 1.0  # device memory, which limits the number of runs at once


_GRID14 = Preset(
    pretrain=dict(
        model="mae_vit_nano_patch4", input_size=56, epochs=1, warmup_epochs=0.1, total_batch_size=32, blr=2e-2,
        mask_ratio=0.75, norm_pix_loss=True,
    ),
    finetune=dict(
        recipe="finetune_cifar10", model="vit_nano_patch4", input_size=56, epochs=2, warmup_epochs=0.2,
        total_batch_size=16, blr=3.2e-2,
    ),
    labels_per_class=500,
    arms=GRID14,
    pretrain_per_class=2500,
    finetunes=2,
    frozen=True,
    seeds=SEEDS,
)  # fmt: skip
# 1,562 steps: one pass over all 50,000 images, of which 5,000 are labelled for kNN, ridge regression and fine-tuning.
_FROZEN14 = replace(
    _GRID14,
    arms=FROZEN14,
    pretrain_per_class=None,
    finetunes=1,
    finetuned_seeds=tuple(range(400, 404)),
    seeds=tuple(range(400, 418)),
)
# 16 x 16 tokens, 12,500 images, 781 steps. Each square of 2 x 2 tokens is visible or masked as a whole.
_DEEP16 = replace(
    _GRID14,
    pretrain=_GRID14.pretrain | dict(input_size=64, mask_unit=2, total_batch_size=16),
    finetune=_GRID14.finetune | dict(input_size=64),
    arms=DEEP16,
    pretrain_per_class=1250,
    finetunes=1,
    finetuned_seeds=(),
    measured_images=300,
    seeds=tuple(range(500, 508)),
)
PRESETS = {
    # Learning rates: the better of two, for MAE alone. 781 steps of pre-training, 312 of fine-tuning.
    "cpu": Preset(
        pretrain=dict(
            model="mae_vit_micro_patch4", epochs=1, warmup_epochs=0.1, total_batch_size=64, blr=1e-2, mask_ratio=0.75,
            norm_pix_loss=True,
        ),
        finetune=dict(
            recipe="finetune_cifar10", model="vit_micro_patch4", epochs=2, warmup_epochs=0.2, total_batch_size=64,
            blr=8e-3,
        ),
        labels_per_class=1000,
    ),
    # As `cpu`, but five epochs of 10,000 images, because attention maps are refreshed between epochs: after each epoch.
    "peers": Preset(
        pretrain=dict(
            model="mae_vit_micro_patch4", epochs=5, warmup_epochs=0.5, total_batch_size=64, blr=1e-2, mask_ratio=0.75,
            norm_pix_loss=True, attention_start=0, attention_every=1,
        ),
        finetune=dict(
            recipe="finetune_cifar10", model="vit_micro_patch4", epochs=2, warmup_epochs=0.2, total_batch_size=64,
            blr=8e-3,
        ),
        labels_per_class=1000,
        arms=PEERS,
        pretrain_per_class=1000,
        seeds=(0, 1, 2),
    ),
    # 14 x 14 tokens, as in the paper: the images are enlarged to 56 px.
    "gpu": Preset(
        pretrain=dict(
            model="mae_vit_mini_patch4", input_size=56, epochs=100, warmup_epochs=10, total_batch_size=512,
            batch_size=512, blr=1e-3, mask_ratio=0.75, norm_pix_loss=True,
        ),
        finetune=dict(
            recipe="finetune_cifar10", model="vit_mini_patch4", input_size=56, epochs=30, warmup_epochs=3,
            total_batch_size=512, batch_size=512, blr=2e-3, aa="rand-m9-mstd0.5-inc1", mixup=0.8, cutmix=1.0,
        ),
        labels_per_class=None,
        seeds=(0, 1, 2),
        measured_images=10_000,
        device="cuda",
        gib_per_run=12.0,
    ),
    # 14 x 14 tokens on two cores: 781 steps of pre-training, twice 624 of fine-tuning.
    "grid14": _GRID14,
    "tuning14": replace(_GRID14, arms=TUNING14, seeds=(100, 101)),
    "frozen14": _FROZEN14,
    "deep16": _DEEP16,
    "pilot14": replace(_FROZEN14, arms=PILOT14, seeds=(200, 201, 202), finetuned_seeds=()),
}  # fmt: skip
