"""Every row of the paper's tables as named defaults of the flags: RECIPES of `main_pretrain.py` and FINETUNE_RECIPES of
`main_finetune.py`.

Published numbers are in `docs/published.csv`. This project has not re-run these recipes. The comment on a
group says where its settings come from: "Delving Deeper into Partial Reconstruction in Masked Image Modeling" (the
paper), a release (the code or README of the framework's authors), or a judgement of this project. A recipe holds the
settings that change results. Workers, devices and `--batch_size` per process are machine flags, except for GreenMIM.
Gradient accumulation follows from the recipe's total batch size.

    torchrun --nproc_per_node 8 main_pretrain.py --recipe prmim50_vit_base_100ep --data_path IMAGENET --compile
"""

Recipe = dict[str, object]  # {name of a flag: its default}

# The paper: supplementary, table "Pre-training details", the same for every row. `crop_scale` is that of MAE's release.
_MAE: Recipe = dict(
    mask_ratio=0.75,
    norm_pix_loss=True,
    total_batch_size=4096,
    blr=1.5e-4,
    min_lr=0.0,
    weight_decay=0.05,
    warmup_epochs=40,
    crop_scale=(0.2, 1.0),
)
_BASE = _MAE | dict(model="mae_vit_base_patch16")
_LARGE = _MAE | dict(model="mae_vit_large_patch16")


def _full(epochs: int) -> Recipe:
    """The original framework, without thrown tokens."""
    return dict(epochs=epochs, throw_ratio=0.0)


def _plain(epochs: int, throw_ratio: float, sampling: str = "random") -> Recipe:
    """Plain partial reconstruction: the thrown tokens are not supervised."""
    return dict(epochs=epochs, throw_ratio=throw_ratio, progressive=False, sampling=sampling)


def _progressive(epochs: int, throw_ratio: float, sampling: str = "furthest") -> Recipe:
    """Progressive reconstruction. Together with furthest sampling it is PR-MIM."""
    return dict(epochs=epochs, throw_ratio=throw_ratio, progressive=True, sampling=sampling)


RECIPES: dict[str, Recipe] = {
    # Table "Ablation studies on the proposed method": ViT-B/16, 100 epochs.
    "mae_vit_base_100ep": _BASE | _full(100),
    "plain25_vit_base_100ep": _BASE | _plain(100, 0.25),
    "progressive25_vit_base_100ep": _BASE | _progressive(100, 0.25, "random"),
    "furthest25_vit_base_100ep": _BASE | _plain(100, 0.25, "furthest"),
    "prmim25_vit_base_100ep": _BASE | _progressive(100, 0.25),
    "plain50_vit_base_100ep": _BASE | _plain(100, 0.5),
    "progressive50_vit_base_100ep": _BASE | _progressive(100, 0.5, "random"),
    "furthest50_vit_base_100ep": _BASE | _plain(100, 0.5, "furthest"),
    "prmim50_vit_base_100ep": _BASE | _progressive(100, 0.5),
    "plain65_vit_base_100ep": _BASE | _plain(100, 0.65),
    "progressive65_vit_base_100ep": _BASE | _progressive(100, 0.65, "random"),
    "furthest65_vit_base_100ep": _BASE | _plain(100, 0.65, "furthest"),
    "prmim65_vit_base_100ep": _BASE | _progressive(100, 0.65),
    # Table "Training schedules and model scaling".
    "mae_vit_base_300ep": _BASE | _full(300),
    "plain50_vit_base_300ep": _BASE | _plain(300, 0.5),
    "prmim50_vit_base_300ep": _BASE | _progressive(300, 0.5),
    "mae_vit_base_800ep": _BASE | _full(800),
    "plain50_vit_base_800ep": _BASE | _plain(800, 0.5),
    "prmim50_vit_base_800ep": _BASE | _progressive(800, 0.5),
    "mae_vit_large_100ep": _LARGE | _full(100),
    "plain50_vit_large_100ep": _LARGE | _plain(100, 0.5),
    "prmim50_vit_large_100ep": _LARGE | _progressive(100, 0.5),
    "mae_vit_large_800ep": _LARGE | _full(800),
    "prmim50_vit_large_800ep": _LARGE | _progressive(800, 0.5),
    # Table "Comparison with existing partial reconstruction methods".
    "plain40_vit_base_400ep": _BASE | _plain(400, 0.4),
    "prmim50_vit_base_400ep": _BASE | _progressive(400, 0.5),
    # Table of kernel sizes: ViT-B/16, 100 epochs, rho_d 50 (7x7 is prmim50_vit_base_100ep).
    "kernel3_vit_base_100ep": _BASE | _progressive(100, 0.5) | dict(kernel_size=3),
    "kernel5_vit_base_100ep": _BASE | _progressive(100, 0.5) | dict(kernel_size=5),
    "kernel9_vit_base_100ep": _BASE | _progressive(100, 0.5) | dict(kernel_size=9),
    "kernel11_vit_base_100ep": _BASE | _progressive(100, 0.5) | dict(kernel_size=11),
    # Table of designs of the aggregation (dwconv is prmim50_vit_base_100ep). The paper does not say which cells take
    # the output. `applies_to="all"` is a judgement: only so was average pooling worse here, in both of two seeds
    # (docs/studies/study_cpu.csv). The row in which only the thrown cells take it is one of this project.
    "avgpool_vit_base_100ep": _BASE
    | _progressive(100, 0.5)
    | dict(aggregation="avgpool", applies_to="all"),  # fails to converge
    "avgpool_thrown_vit_base_100ep": _BASE | _progressive(100, 0.5) | dict(aggregation="avgpool"),
    "transformer_vit_base_100ep": _BASE | _progressive(100, 0.5) | dict(aggregation="transformer"),
    "convnext_vit_base_100ep": _BASE | _progressive(100, 0.5) | dict(aggregation="convnext"),
}

# Decoders of 16 and 32 blocks instead of 8, all else as in the rows of ViT-B and ViT-L above. Not in the paper, and
# nothing is published at 224 px on ImageNet-1K: a judgement of this project.
for _depth in (16, 32):
    for _size in ("base", "large"):
        for _arm in ("mae", "plain50", "prmim50"):
            _name = f"{_arm}_vit_{_size}_100ep"
            RECIPES[f"deep{_depth}_{_name}"] = RECIPES[_name] | dict(decoder_depth=_depth)

# The setting of Pixio ("In Pursuit of Pixel Supervision for Visual Pre-training", CVPR 2026): a decoder of 32 blocks,
# masks in squares of 4 x 4 tokens, 8 class tokens, learned positions, no flip. The release pre-trains a huge model, for
# 400 epochs of ImageNet-21K. Sizes base and large, drop path 0 for them, and all rows that throw tokens are a judgement
# of this project: in no paper.
_PIXIO = _MAE | dict(
    input_size=[256],
    patch_size=16,
    decoder_depth=32,
    decoder_num_heads=16,
    mask_unit=4,
    num_cls_tokens=8,
    learned_pos_embed=True,
    hflip=False,
    total_batch_size=8192,
    blr=2.5e-5,
)
_PIXIO_SIZES: dict[str, Recipe] = {
    "base": dict(model="mae_vit_base_patch16"),
    "large": dict(model="mae_vit_large_patch16"),
    "huge": dict(model="mae_vit_huge_patch14", drop_path=0.4),
}
for _size, _model in _PIXIO_SIZES.items():
    RECIPES |= {
        f"pixio_vit_{_size}": _PIXIO | _model | _full(400),
        f"pixio_plain50_vit_{_size}": _PIXIO | _model | _plain(400, 0.5),
        f"pixio_prmim50_vit_{_size}": _PIXIO | _model | _progressive(400, 0.5),
    }

# Settings that others have published with their numbers for MAE, so that one GPU can compare this code with theirs. The
# rows that throw tokens are in no publication. docs/pretrain.md has the numbers, and how they are evaluated.
# stable-pretraining, benchmarks/imagenet10/mae-vit-small.py: Imagenette, whose peak rate is 5e-4 at 128 images.
_IMAGENETTE = _MAE | dict(
    model="mae_vit_small_patch16",
    decoder_embed_dim=384,
    decoder_depth=4,
    decoder_num_heads=6,
    total_batch_size=128,
    blr=1e-3,
    min_lr=5e-5,
    warmup_epochs=2,
    warmup_lr=5e-6,
)
# lightly, benchmarks/imagenet/vitb16/mae.py: raw pixels, a batch of 256.
_LIGHTLY = _BASE | dict(norm_pix_loss=False, total_batch_size=256)
RECIPES |= {
    "imagenette_mae_vit_small_200ep": _IMAGENETTE | _full(200),
    "imagenette_plain50_vit_small_200ep": _IMAGENETTE | _plain(200, 0.5),
    "imagenette_prmim50_vit_small_200ep": _IMAGENETTE | _progressive(200, 0.5),
    "lightly_mae_vit_base_100ep": _LIGHTLY | _full(100),
    "lightly_plain50_vit_base_100ep": _LIGHTLY | _plain(100, 0.5),
    "lightly_prmim50_vit_base_100ep": _LIGHTLY | _progressive(100, 0.5),
}

# Peers of furthest sampling, in no paper. Only the choice of retained tokens differs from the ablations above.
# Attention maps are made as often per schedule as by AMT: from a tenth of the epochs on, after every tenth.
_TENTHS: Recipe = dict(attention_start=10, attention_every=10)
RECIPES |= {
    "attention50_vit_base_100ep": _BASE | _plain(100, 0.5, "attention") | _TENTHS,
    "attention_progressive50_vit_base_100ep": _BASE | _progressive(100, 0.5, "attention") | _TENTHS,
    "cell50_vit_base_100ep": _BASE | _plain(100, 0.5, "running_cell"),
    "cell_progressive50_vit_base_100ep": _BASE | _progressive(100, 0.5, "running_cell"),
}

# Table "Comparison with existing partial reconstruction methods": AMT on MAE as its release trains it, on raw pixels.
# `mask_ratio` includes the thrown tokens: AMT's .45 masked and .40 thrown. The paper's other row on MAE is
# prmim50_vit_base_400ep, with normalised pixels.
_AMT = _MAE | dict(model="amt_vit_base_patch16", norm_pix_loss=False, attention_start=40, attention_every=40)
_AMT_45_40 = _AMT | _plain(400, 0.4, "attention") | dict(mask_ratio=0.85)
RECIPES |= {
    "amt_vit_base_400ep": _AMT_45_40,
    # AMT's own baseline. The paper prints rho_d 40 for it, but it most likely throws nothing.
    "amt_mae_vit_base_400ep": _BASE | _full(400) | dict(norm_pix_loss=False),
    "amt_masking_vit_base_400ep": _AMT | _plain(400, 0.0, "attention"),  # the release's defaults: nothing is thrown
    "amt_progressive_vit_base_400ep": _AMT_45_40 | dict(progressive=True),  # with PR-MIM's aggregation: in no paper
}

# Table "Compatibility with different methods": MFF with the settings of its release for 800 and for 300 epochs. It uses
# MAE's optimizer.
_MFF = {key: value for key, value in _MAE.items() if key != "crop_scale"}
_MFF |= dict(
    model="mff_vit_base_patch16", crop="padded", interpolation="bilinear", lr_schedule="mff", warmup_lr=2.4e-12
)
RECIPES |= {
    "mff_vit_base_800ep": _MFF | _full(800),
    "mff_plain50_vit_base_800ep": _MFF | _plain(800, 0.5),
    "mff_prmim50_vit_base_800ep": _MFF | _progressive(800, 0.5),
    "mff_vit_base_300ep": _MFF | _full(300) | dict(warmup_lr=2.4e-7),
}

# The same table, and "Comparison with existing partial reconstruction methods": SimMIM with the settings of its
# release. The release has no ViT-B for 100 epochs. That these recipes take its schedule for Swin-B and 100 epochs is a
# judgement. `warmup_lr` and `min_lr` are absolute rates for the total batch size given here.
_SIMMIM: Recipe = dict(
    model="simmim_vit_base_patch16",
    mask_ratio=0.6,
    norm_pix_loss=False,
    total_batch_size=2048,
    betas=(0.9, 0.999),
    weight_decay=0.05,
    clip_grad=5.0,
    warmup_epochs=10,
    crop_scale=(0.67, 1.0),
    interpolation="bilinear",
)
_SIMMIM_100 = _SIMMIM | dict(blr=1e-4, warmup_lr=4e-6, min_lr=4e-5, lr_schedule="simmim")
_SIMMIM_800 = _SIMMIM | dict(blr=5e-5, warmup_lr=2e-6, lr_schedule="simmim_steps", lr_steps=(700.0,))
RECIPES |= {
    "simmim_vit_base_100ep": _SIMMIM_100 | _full(100),
    "simmim_plain30_vit_base_100ep": _SIMMIM_100 | _plain(100, 0.3),
    "simmim_prmim30_vit_base_100ep": _SIMMIM_100 | _progressive(100, 0.3),
    "simmim_plain24_vit_base_100ep": _SIMMIM_100 | _plain(100, 0.24),
    "simmim_vit_base_800ep": _SIMMIM_800 | _full(800),
    "simmim_prmim30_vit_base_800ep": _SIMMIM_800 | _progressive(800, 0.3),
    # The release's baselines on Swin: pre-trained at 192 px, fine-tuned at 224 px.
    "simmim_swin_base_100ep": _SIMMIM_100 | _full(100) | dict(model="simmim_swin_base_patch4_window6"),
    "simmim_swin_base_800ep": _SIMMIM_800 | _full(800) | dict(model="simmim_swin_base_patch4_window6"),
    "simmim_swin_large_800ep": _SIMMIM_800 | _full(800) | dict(model="simmim_swin_large_patch4_window12"),
    # Not in the paper: with this throw ratio the FLOPs are half of SimMIM's, which is the cost that the paper prints.
    "simmim_prmim50_vit_base_100ep": _SIMMIM_100 | _progressive(100, 0.5),
}

# Table "Comparison with existing partial reconstruction methods": AMT on SimMIM. 44 % of the units are masked. Its
# release throws 26 % of them, the paper prints 24 %. The total batch size is a judgement: that of SimMIM. The rates are
# the release's times 2048 / 512.
_AMT_SIMMIM = _SIMMIM | _plain(200, 0.26, "attention")
_AMT_SIMMIM |= dict(model="amt_simmim_vit_base_patch16", blr=5e-5, warmup_lr=2e-6, min_lr=2e-5, lr_schedule="simmim")
_AMT_SIMMIM |= dict(attention_start=40, attention_every=40)
RECIPES |= {
    "amt_simmim_vit_base_200ep": _AMT_SIMMIM | dict(mask_ratio=0.7),  # the release's ratio
    "amt_simmim24_vit_base_200ep": _AMT_SIMMIM | dict(mask_ratio=0.68, throw_ratio=0.24),
}

# The same table: LocalMIM with the settings of its release, also for 100 epochs, which are the paper's rows.
_LOCALMIM = _MAE | dict(
    model="localmim_vit_base_patch16", norm_pix_loss=False, total_batch_size=2048, blr=2e-4, min_lr=1e-6
)
_LOCALMIM_100 = _LOCALMIM | dict(warmup_epochs=10)
RECIPES |= {
    "localmim_vit_base_100ep": _LOCALMIM_100 | _full(100),
    "localmim_plain65_vit_base_100ep": _LOCALMIM_100 | _plain(100, 0.65),
    "localmim_prmim65_vit_base_100ep": _LOCALMIM_100 | _progressive(100, 0.65),
    "localmim_vit_base_1600ep": _LOCALMIM | _full(1600),
    "localmim_vit_large_800ep": _LOCALMIM
    | _full(800)
    | dict(model="localmim_vit_large_patch16", total_batch_size=4096, blr=1.5e-4),
}

# The same table: TEC with the settings of its release. The teacher is given by --teacher: iBOT's ViT-B/16 for the
# paper's rows, which have 300 epochs.
_TEC = _MAE | dict(model="tec_vit_base_patch16", norm_pix_loss=False, att_topk=9, att_tau=1.0)
_TEC_MAE = _TEC | dict(att_topk=15, att_tau=1.8)  # for MAE's encoder as the teacher
_TEC_MAE_LARGE = _TEC_MAE | dict(model="tec_vit_large_patch16", att_tau=1.4)
RECIPES |= {
    "tec_vit_base_300ep": _TEC | _full(300),
    "tec_plain50_vit_base_300ep": _TEC | _plain(300, 0.5),
    "tec_prmim50_vit_base_300ep": _TEC | _progressive(300, 0.5),
    "tec_vit_base_800ep": _TEC | _full(800),
    "tec_mae_vit_base_100ep": _TEC_MAE | _full(100),  # teacher: MAE, 300 epochs
    "tec_mae_vit_base_300ep": _TEC_MAE | _full(300),  # teacher: MAE, 1600 epochs
    "tec_mae_vit_base_800ep": _TEC_MAE | _full(800),
    "tec_mae_vit_large_300ep": _TEC_MAE_LARGE | _full(300),
}

# Table "Compatibility with Swin transformer": GreenMIM at 224 px. Swin-L, 100 epochs: the script of the first release,
# by default with 8 processes of 512 images. Swin-B, 100 epochs: the release has none; its base rate of 200 epochs at
# the total batch of its other runs is a judgement. 800 epochs: the release. All images of a micro-batch share one
# visible set. So `batch_size`, images per process, is part of these recipes, with the release's values. Another
# --batch_size still wins: it trains on more or fewer visible sets per step.
_GREENMIM = _MAE | dict(model="greenmim_swin_base_patch4_window7", total_batch_size=2048, batch_size=256)
_GREENMIM_LARGE = _GREENMIM | dict(model="greenmim_swin_large_patch4_window14", blr=1e-4)
_GREENMIM_LARGE_100 = _GREENMIM_LARGE | dict(total_batch_size=4096, batch_size=512)
RECIPES |= {
    "greenmim_swin_base_100ep": _GREENMIM | _full(100),
    "greenmim_plain50_swin_base_100ep": _GREENMIM | _plain(100, 0.5),
    "greenmim_prmim50_swin_base_100ep": _GREENMIM | _progressive(100, 0.5),
    "greenmim_swin_large_100ep": _GREENMIM_LARGE_100 | _full(100),
    "greenmim_plain50_swin_large_100ep": _GREENMIM_LARGE_100 | _plain(100, 0.5),
    "greenmim_prmim50_swin_large_100ep": _GREENMIM_LARGE_100 | _progressive(100, 0.5),
    "greenmim_swin_base_800ep": _GREENMIM | _full(800) | dict(blr=1e-4, decoder_order="reference"),
    "greenmim_swin_large_800ep": _GREENMIM_LARGE | _full(800) | dict(decoder_order="reference"),
}

# CrossMAE, which the paper does not have. The optimizer's settings are those of its
# release, which scales the learning rate by the share of the masked tokens that is predicted: the plain recipes have
# blr 1.5e-4 * (mask_ratio - throw_ratio) / mask_ratio. PR-MIM supervises all masked tokens and keeps 1.5e-4. No PR-MIM
# on CrossMAE is published: these recipes, and all that throw 65 %, are settings that this project has chosen.
_CROSSMAE = _MAE | dict(model="crossmae_vit_base_patch16")
_CROSSMAE_400 = _CROSSMAE | dict(warmup_epochs=20)
_CROSSMAE_LARGE = _CROSSMAE | dict(model="crossmae_vit_large_patch16")
_CROSSMAE_HUGE = _CROSSMAE | dict(model="crossmae_vit_huge_patch14")
RECIPES |= {
    "crossmae_vit_base_800ep": _CROSSMAE | _full(800),
    "crossmae_plain50_vit_base_800ep": _CROSSMAE | _plain(800, 0.5) | dict(blr=5e-5),
    "crossmae_prmim50_vit_base_800ep": _CROSSMAE | _progressive(800, 0.5),
    "crossmae_plain65_vit_base_800ep": _CROSSMAE | _plain(800, 0.65) | dict(blr=2e-5),
    "crossmae_prmim65_vit_base_800ep": _CROSSMAE | _progressive(800, 0.65),
    "crossmae_vit_base_400ep": _CROSSMAE_400 | _full(400),
    "crossmae_plain50_vit_base_400ep": _CROSSMAE_400 | _plain(400, 0.5) | dict(blr=5e-5),
    "crossmae_prmim50_vit_base_400ep": _CROSSMAE_400 | _progressive(400, 0.5),
    "crossmae_plain65_vit_base_400ep": _CROSSMAE_400 | _plain(400, 0.65) | dict(blr=2e-5),
    "crossmae_prmim65_vit_base_400ep": _CROSSMAE_400 | _progressive(400, 0.65),
    "crossmae_vit_large_800ep": _CROSSMAE_LARGE | _full(800),
    "crossmae_plain50_vit_large_800ep": _CROSSMAE_LARGE | _plain(800, 0.5) | dict(blr=5e-5),
    "crossmae_prmim50_vit_large_800ep": _CROSSMAE_LARGE | _progressive(800, 0.5),
    "crossmae_vit_huge_800ep": _CROSSMAE_HUGE | _full(800),
    "crossmae_plain50_vit_huge_800ep": _CROSSMAE_HUGE | _plain(800, 0.5) | dict(blr=5e-5),
    "crossmae_prmim50_vit_huge_800ep": _CROSSMAE_HUGE | _progressive(800, 0.5),
}

# Small runs of this project. Their results are in docs/study.md.
_SMALL: Recipe = dict(model="mae_vit_mini_patch4", mask_ratio=0.75, norm_pix_loss=True, blr=1e-3)
_CIFAR10 = _SMALL | dict(dataset="cifar10", total_batch_size=256, warmup_epochs=5)
RECIPES |= {
    "cifar10": _CIFAR10 | _progressive(100, 0.5),
    "cifar10_plain50": _CIFAR10 | _plain(100, 0.5),
    "cifar10_mae": _CIFAR10 | _full(100),
    "cifar10_cell": _CIFAR10 | _plain(100, 0.5, "running_cell"),
    "cifar10_attention": _CIFAR10 | _plain(100, 0.5, "attention") | _TENTHS,
    "cifar10_amt": _CIFAR10  # with normalised pixels, so that it compares with the others
    | _plain(100, 0.4, "attention")
    | _TENTHS
    | dict(model="amt_vit_mini_patch4", mask_ratio=0.85),
    "cifar10_mff": _CIFAR10 | _progressive(100, 0.5) | dict(model="mff_vit_mini_patch4"),
    "cifar10_simmim": _CIFAR10
    | _progressive(100, 0.3)
    | dict(
        model="simmim_vit_mini_patch4", mask_ratio=0.6, norm_pix_loss=False, betas=(0.9, 0.999), clip_grad=5.0, blr=5e-4
    ),
    "cifar10_localmim": _CIFAR10
    | _progressive(100, 0.65)
    | dict(model="localmim_vit_mini_patch4", norm_pix_loss=False, min_lr=1e-6),
    "cifar10_tec": _CIFAR10  # the teacher is a run of cifar10_mae
    | _progressive(100, 0.5)
    | dict(model="tec_vit_mini_patch4", norm_pix_loss=False, att_topk=15, att_tau=1.8),
    "cifar10_greenmim": _CIFAR10 | _progressive(100, 0.5) | dict(model="greenmim_swin_micro_patch4_window4"),
    "cifar10_crossmae": _CIFAR10 | _progressive(100, 0.5) | dict(model="crossmae_vit_mini_patch4"),
    "quickstart": _SMALL
    | _progressive(16, 0.5)
    | dict(input_size=[64], patch_size=8, total_batch_size=32, warmup_epochs=1, blr=1.2e-2),
}

# The paper: supplementary, table "Fine-tuning details", for ViT-B. `min_lr` and the augmentation's other values are
# those of MAE's release, which agrees with the table.
FINETUNE_DEFAULTS: Recipe = dict(
    epochs=100,
    warmup_epochs=5,
    blr=5e-4,
    min_lr=1e-6,
    weight_decay=0.05,
    layer_decay=0.65,
    drop_path=0.1,
    crop_scale=(0.08, 1.0),
    aa="rand-m9-mstd0.5-inc1",
    smoothing=0.1,
    reprob=0.25,
    mixup=0.8,
    cutmix=1.0,
    clip_crop=False,
)
# Linear probing of MAE's release: LARS, no regularisation, only crops and flips.
LINPROBE_DEFAULTS: Recipe = dict(
    epochs=90,
    warmup_epochs=10,
    blr=0.1,
    min_lr=0.0,
    weight_decay=0.0,
    layer_decay=1.0,
    drop_path=0.0,
    crop_scale=(0.08, 1.0),
    aa=None,
    smoothing=0.0,
    reprob=0.0,
    mixup=0.0,
    cutmix=0.0,
    clip_crop=True,
)
_FINETUNE = FINETUNE_DEFAULTS | dict(total_batch_size=1024)
_LINPROBE = LINPROBE_DEFAULTS | dict(total_batch_size=16384, trainable_blocks=0)
_FINETUNE_BASE = _FINETUNE | dict(model="vit_base_patch16")
_MFF_FINETUNE = _FINETUNE_BASE | dict(lr_schedule="mff", warmup_lr=2e-7)
_SIMMIM_FINETUNE = _FINETUNE | dict(total_batch_size=2048, blr=6.25e-4, warmup_epochs=20, warmup_lr=1e-6, min_lr=1e-6)
_SIMMIM_FINETUNE |= dict(lr_schedule="simmim", clip_grad=5.0)
_TEC_FINETUNE = _FINETUNE_BASE | dict(cls_token_layer_decay=False, cls_token_mlp=True, train_pos_embed=False)
_INATURALIST_18 = dict(dataset="inat18", epochs=360)
_INATURALIST_19 = dict(dataset="inat19", epochs=360)
FINETUNE_RECIPES: dict[str, Recipe] = {
    # All rows of the tables of ablations, schedules, kernels and designs. There is one recipe per model size: only the
    # pre-trained encoder differs between the rows. ViT-B and ViT-L: the paper. ViT-H: MAE's release.
    "finetune_vit_base": _FINETUNE_BASE,
    "finetune_vit_large": _FINETUNE
    | dict(model="vit_large_patch16", epochs=50, blr=1e-3, layer_decay=0.75, drop_path=0.2),
    "finetune_vit_huge": _FINETUNE
    | dict(model="vit_huge_patch14", epochs=50, blr=1e-3, layer_decay=0.75, drop_path=0.3),
    # AMT on MAE and its baseline, 400 epochs, as its release: MAE's settings for raw pixels.
    "amt_finetune_vit_base": _FINETUNE_BASE | dict(blr=1e-3, layer_decay=0.75),
    # MFF's release. The floor of its schedule is the same for all layers.
    "mff_finetune_vit_base": _MFF_FINETUNE,
    # SimMIM's release, after 800 epochs. That ViT-B after 100 epochs has the same settings is a judgement.
    "simmim_finetune_vit_base": _SIMMIM_FINETUNE | dict(model="relative_vit_base_patch16"),
    # AMT on SimMIM, 200 epochs, as its release. The total batch size is SimMIM's.
    "amt_simmim_finetune_vit_base": _SIMMIM_FINETUNE | dict(model="absolute_vit_base_patch16", global_pool="token"),
    "simmim_finetune_swin_base_100ep": _SIMMIM_FINETUNE | dict(model="swin_base_patch4_window7", layer_decay=0.9),
    "simmim_finetune_swin_base_800ep": _SIMMIM_FINETUNE | dict(model="swin_base_patch4_window7", layer_decay=0.8),
    "simmim_finetune_swin_large_800ep": _SIMMIM_FINETUNE
    | dict(model="swin_large_patch4_window14", layer_decay=0.7, drop_path=0.2),
    # GreenMIM's release; the total batches are those of its first README. `warmup_lr` and `min_lr` are the release's
    # rates for 512 images, times total batch size / 512.
    "greenmim_finetune_swin_base": _SIMMIM_FINETUNE
    | dict(model="swin_base_patch4_window7", layer_decay=0.9)
    | dict(total_batch_size=1024, warmup_lr=5e-7, min_lr=5e-7),
    "greenmim_finetune_swin_large": _SIMMIM_FINETUNE
    | dict(model="swin_large_patch4_window14", layer_decay=0.8, drop_path=0.3)
    | dict(total_batch_size=768, blr=5e-4, warmup_lr=3e-7, min_lr=5.25e-7),
    # LocalMIM's release.
    "localmim_finetune_vit_base_100ep": _FINETUNE_BASE | dict(blr=1e-3, warmup_epochs=20, layer_decay=0.75),
    "localmim_finetune_vit_base_1600ep": _FINETUNE_BASE | dict(warmup_epochs=20, min_lr=1e-5),
    "localmim_finetune_vit_large_800ep": _FINETUNE
    | dict(model="vit_large_patch16", epochs=50, blr=7.5e-4, layer_decay=0.75, drop_path=0.2),
    # TEC's release: the positions are frozen, the MLP on the class token is trained.
    "tec_finetune_vit_base_300ep": _TEC_FINETUNE | dict(layer_decay=0.5),
    "tec_finetune_vit_base_800ep": _TEC_FINETUNE | dict(layer_decay=0.55, warmup_epochs=20),
    "tec_mae_finetune_vit_base_100ep": _TEC_FINETUNE,  # the release's command names no warm-up: MAE's default
    "tec_mae_finetune_vit_base_300ep": _TEC_FINETUNE | dict(warmup_epochs=20),
    "tec_mae_finetune_vit_base_800ep": _TEC_FINETUNE | dict(layer_decay=0.55, warmup_epochs=20),
    "tec_mae_finetune_vit_large": _TEC_FINETUNE | dict(model="vit_large_patch16", epochs=50, blr=1e-3, min_lr=1e-5),
    # Figure "Partial fine-tuning results", 800 epochs, without printed numbers. 0 blocks are linear probing, 12 are
    # finetune_vit_base. The paper prints no settings: those of full fine-tuning are a judgement.
    **{f"partial{k}_vit_base": _FINETUNE_BASE | dict(trainable_blocks=k) for k in (1, 2, 4, 6, 8, 10)},
    "linprobe_vit_base": _LINPROBE | dict(model="vit_base_patch16"),
    "linprobe_vit_large": _LINPROBE | dict(model="vit_large_patch16", epochs=50),
    "linprobe_vit_huge": _LINPROBE | dict(model="vit_huge_patch14", epochs=50),
    # After lightly's evaluation of `lightly_mae_vit_base_100ep`. In lightly the last block, class token, positions and
    # patch embedding have the full rate, and the linear probe crops as usual; both resize bilinearly.
    "lightly_finetune_vit_base": _FINETUNE_BASE | dict(total_batch_size=256, global_pool="token"),
    "lightly_linprobe_vit_base": _LINPROBE | dict(model="vit_base_patch16", total_batch_size=256),
    # Table of iNaturalist, from the pre-trained encoder. The paper: 360 epochs, and most settings as for ImageNet. That
    # all others are those of ImageNet is a judgement.
    "inat18_vit_base": _FINETUNE_BASE | _INATURALIST_18,
    "inat19_vit_base": _FINETUNE_BASE | _INATURALIST_19,
    "mff_inat18_vit_base": _MFF_FINETUNE | _INATURALIST_18,
    "mff_inat19_vit_base": _MFF_FINETUNE | _INATURALIST_19,
}

# Small runs of this project. Their results are in docs/study.md.
_MINI: Recipe = dict(model="vit_mini_patch4", total_batch_size=128, crop_pct=1.0, crop_scale=(0.3, 1.0))
_MINI_FINETUNE = FINETUNE_DEFAULTS | _MINI
_MINI_FINETUNE |= dict(warmup_epochs=1, layer_decay=0.75, aa=None, reprob=0.0, mixup=0.0, cutmix=0.0)
FINETUNE_RECIPES |= {
    "finetune_cifar10": _MINI_FINETUNE | dict(dataset="cifar10", epochs=20, blr=2e-3),
    # LARS changes a matrix by lr / 1000 of its norm in each step, so few steps need the learning rate of large batches.
    "linprobe_cifar10": LINPROBE_DEFAULTS
    | _MINI
    | dict(dataset="cifar10", trainable_blocks=0, epochs=20, warmup_epochs=1, blr=25.6),
    "finetune_cifar10_simmim": _MINI_FINETUNE
    | dict(model="relative_vit_mini_patch4", dataset="cifar10", epochs=20, blr=2e-3, clip_grad=5.0),
    "finetune_cifar10_swin": _MINI_FINETUNE
    | dict(model="swin_micro_patch4_window4", dataset="cifar10", epochs=20, blr=2e-3, layer_decay=0.8, clip_grad=5.0),
    "finetune_cifar10_tec": _MINI_FINETUNE | dict(dataset="cifar10", epochs=20, blr=2e-3, cls_token_layer_decay=False),
    "quickstart_finetune": _MINI_FINETUNE
    | dict(input_size=64, patch_size=8, total_batch_size=14, epochs=50, warmup_epochs=5, blr=1e-2),
}
