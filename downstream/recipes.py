"""Named defaults of the programs in segmentation/ and detection/: SEGMENTATION_RECIPES and DETECTION_RECIPES.

    torchrun --nproc_per_node 8 downstream/segmentation/main_segmentation.py --recipe ade20k_upernet_vit_base \
        --data_path ADEChallengeData2016 --finetune output/prmim50_base

Published numbers are in `docs/published.csv`.
"""

Recipe = dict[str, object]  # {name of a flag: its default}

# UPerNet. The paper prints 160,000 iterations, a layer decay of 0.75 and "the settings in MAE", which were never
# released. The other values are those of the community's reproduction of MAE in mmsegmentation.
UPERNET_DEFAULTS: Recipe = dict(
    head="upernet",
    num_iters=160_000,
    warmup_iters=1500,
    total_batch_size=16,
    lr=1e-4,
    weight_decay=0.05,
    layer_decay=0.75,
    drop_path=0.1,
    input_size=512,
    image_scale=(2048, 512),
    ratio_range=(0.5, 2.0),
    cat_max_ratio=0.75,
    photometric=True,
    mean_over_valid=False,
    stride=341,
    eval_every=16_000,
)
# One linear layer on the patch tokens of a frozen encoder, after DINOv2's evaluation. Judgements: a BatchNorm without
# weights, images of at most 2048 pixels, a loss that is the mean over labelled pixels.
LINEAR_DEFAULTS: Recipe = UPERNET_DEFAULTS | dict(
    head="linear",
    num_iters=40_000,
    lr=1e-3,
    weight_decay=1e-4,
    layer_decay=1.0,
    drop_path=0.0,
    mean_over_valid=True,
    eval_every=8000,
)
_ADE20K: Recipe = dict(num_classes=150, reduce_zero_label=True)
SEGMENTATION_RECIPES: dict[str, Recipe] = {
    # Table "Semantic segmentation on ADE20K": only the encoder differs between the rows.
    "ade20k_upernet_vit_base": UPERNET_DEFAULTS | _ADE20K | dict(model="vit_base_patch16"),
    # The community's reproduction of MAE's own row.
    "ade20k_upernet_vit_base_mae": UPERNET_DEFAULTS | _ADE20K | dict(model="vit_base_patch16", layer_decay=0.65),
    "ade20k_linear_vit_base": LINEAR_DEFAULTS | _ADE20K | dict(model="vit_base_patch16"),
    "ade20k_linear_vit_large": LINEAR_DEFAULTS | _ADE20K | dict(model="vit_large_patch16"),
}

# ViTDet with Mask R-CNN, as in detectron2: 100 epochs. The paper halves batch and learning rate, so the number of
# iterations doubles. The rate falls at the same shares of the schedule.
MASK_RCNN_DEFAULTS: Recipe = dict(
    num_iters=368_750,
    warmup_iters=250,
    total_batch_size=32,
    lr=5e-5,
    lr_drops=(163_889 / 184_375, 177_546 / 184_375),
    weight_decay=0.1,
    layer_decay=0.7,
    drop_path=0.1,
    input_size=1024,
    window_size=14,
    decoder_channels=256,
    scale_range=(0.1, 2.0),
    num_rois=512,
    eval_every=36_875,
)
DETECTION_RECIPES: dict[str, Recipe] = {
    # Table "Object detection and instance segmentation on COCO": only the encoder differs between the rows.
    "coco_mask_rcnn_vit_base": MASK_RCNN_DEFAULTS | dict(model="vit_base_patch16"),
    # ViTDet's own setting.
    "coco_mask_rcnn_vit_base_mae": MASK_RCNN_DEFAULTS
    | dict(model="vit_base_patch16", num_iters=184_375, total_batch_size=64, lr=1e-4, eval_every=18_438),
    # For one GPU: 12 epochs of 512-pixel images.
    "short": MASK_RCNN_DEFAULTS
    | dict(model="vit_base_patch16", input_size=512, num_iters=88_000, total_batch_size=16, eval_every=8800)
    | dict(scale_range=(0.5, 1.5)),
}

DOWNSTREAM_RECIPES = {"main_segmentation": SEGMENTATION_RECIPES, "main_detection": DETECTION_RECIPES}
