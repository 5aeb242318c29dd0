"""All published numbers: the tables of "Delving Deeper into Partial Reconstruction in Masked Image Modeling", with the
recipes whose runs fill each row, and what other papers and releases report for further recipes.

`scripts/reproduce_table.py` runs the rows and writes measured beside published numbers. The tables of the documents
print the same numbers (a test). A column is filled by one of these measures:

top1              top-1 accuracy in percent on the validation images of a fine-tuning recipe
imagenet_c        mean corruption error of the fine-tuned classifier on ImageNet-C, lower is better
imagenet_a ...    top-1 of the fine-tuned classifier on ImageNet-A, imagenet_r on -R, imagenet_sketch on -Sketch
box_ap, mask_ap   COCO's average precision of boxes and masks of a detection recipe of `downstream/recipes.py`
miou, macc        mean IoU and mean accuracy of the classes of a segmentation recipe of `downstream/recipes.py`
flops             forward multiply-adds of pre-training, relative to the row of the same model that throws nothing
memory, time      peak memory and time of a pre-training step, relative to the same row
module_gflops     forward multiply-adds of the spatial aggregation alone, in 10^9
"""

from typing import NamedTuple


class Row(NamedTuple):
    """A row of a table.

    label, epochs: as printed. throw_ratio: rho_d as printed, in percent of all tokens. pretrain: recipe of
    `main_pretrain.py`. finetune: {column: recipe of `main_finetune.py`, or of a downstream program, that fills it}.
    published: the number of each column as printed; "-": none is printed.
    """

    label: str
    epochs: int
    throw_ratio: int
    pretrain: str
    finetune: dict[str, str]
    published: str

    @property
    def numbers(self) -> list[str]:
        return self.published.split()


class Table(NamedTuple):
    """A table: its caption, {column: measure}, its rows, and a note on what is printed."""

    title: str
    columns: dict[str, str]
    rows: list[Row]
    note: str = ""


_TOP1 = {"Top-1": "top1"}
_COSTS = _TOP1 | {"FLOPs": "flops", "Memory": "memory"}
_BASE = {"Top-1": "finetune_vit_base"}
_LARGE = {"Top-1": "finetune_vit_large"}
_MFF = {"Top-1": "mff_finetune_vit_base"}
_SIMMIM = {"Top-1": "simmim_finetune_vit_base"}
_LOCALMIM = {"Top-1": "localmim_finetune_vit_base_100ep"}
_AMT = {"Top-1": "amt_finetune_vit_base"}
_AMT_SIMMIM = {"Top-1": "amt_simmim_finetune_vit_base"}
_TEC = {"Top-1": "tec_finetune_vit_base_300ep"}
_SWIN_BASE = {"Top-1": "greenmim_finetune_swin_base"}
_SWIN_LARGE = {"Top-1": "greenmim_finetune_swin_large"}
_INAT = {"iNat18": "inat18_vit_base", "iNat19": "inat19_vit_base"}
_MFF_INAT = {"iNat18": "mff_inat18_vit_base", "iNat19": "mff_inat19_vit_base"}
_SETS = {"IN-C": "imagenet_c", "IN-A": "imagenet_a", "IN-R": "imagenet_r", "IN-S": "imagenet_sketch"}
_ROBUST = dict.fromkeys(_SETS, "finetune_vit_base")
_MFF_ROBUST = dict.fromkeys(_SETS, "mff_finetune_vit_base")
# 0 blocks are linear probing, all 12 are fine-tuning.
_BLOCKS = {"0 blocks": "linprobe_vit_base"} | {f"{k} blocks": f"partial{k}_vit_base" for k in (1, 2, 4, 6, 8, 10)}
_BLOCKS |= {"12 blocks": "finetune_vit_base"}
_ADE20K = dict.fromkeys(("mIoU", "mAcc"), "ade20k_upernet_vit_base")
_COCO = dict.fromkeys(("AP box", "AP mask"), "coco_mask_rcnn_vit_base")

TABLES: dict[str, Table] = {
    "ablation": Table(
        "Ablation studies on the proposed method: ViT-B/16, 100 epochs",
        _COSTS | {"Time": "time"},
        [
            Row("MAE", 100, 0, "mae_vit_base_100ep", _BASE, "81.7 1.00 1.00 1.00"),
            Row("plain", 100, 25, "plain25_vit_base_100ep", _BASE, "81.4 0.85 0.81 0.83"),
            Row("progressive", 100, 25, "progressive25_vit_base_100ep", _BASE, "81.7 0.85 0.81 0.83"),
            Row("furthest", 100, 25, "furthest25_vit_base_100ep", _BASE, "81.6 0.85 0.81 0.83"),
            Row("PR-MIM (both)", 100, 25, "prmim25_vit_base_100ep", _BASE, "81.7 0.85 0.81 0.83"),
            Row("plain", 100, 50, "plain50_vit_base_100ep", _BASE, "81.1 0.72 0.64 0.75"),
            Row("progressive", 100, 50, "progressive50_vit_base_100ep", _BASE, "81.6 0.72 0.64 0.75"),
            Row("furthest", 100, 50, "furthest50_vit_base_100ep", _BASE, "81.4 0.72 0.64 0.75"),
            Row("PR-MIM (both)", 100, 50, "prmim50_vit_base_100ep", _BASE, "81.8 0.72 0.64 0.75"),
            Row("plain", 100, 65, "plain65_vit_base_100ep", _BASE, "80.3 0.64 0.55 0.65"),
            Row("progressive", 100, 65, "progressive65_vit_base_100ep", _BASE, "81.5 0.64 0.55 0.65"),
            Row("furthest", 100, 65, "furthest65_vit_base_100ep", _BASE, "80.4 0.64 0.55 0.65"),
            Row("PR-MIM (both)", 100, 65, "prmim65_vit_base_100ep", _BASE, "81.7 0.64 0.55 0.65"),
        ],
    ),
    "schedules": Table(
        "Training schedules and model scaling",
        _COSTS,
        [
            Row("MAE, ViT-B/16", 100, 0, "mae_vit_base_100ep", _BASE, "81.7 1.00 1.00"),
            Row("MAE, ViT-B/16", 100, 50, "plain50_vit_base_100ep", _BASE, "81.1 0.72 0.64"),
            Row("+PR-MIM, ViT-B/16", 100, 50, "prmim50_vit_base_100ep", _BASE, "81.8 0.72 0.64"),
            Row("MAE, ViT-B/16", 300, 0, "mae_vit_base_300ep", _BASE, "82.7 1.00 1.00"),
            Row("MAE, ViT-B/16", 300, 50, "plain50_vit_base_300ep", _BASE, "82.3 0.72 0.64"),
            Row("+PR-MIM, ViT-B/16", 300, 50, "prmim50_vit_base_300ep", _BASE, "82.7 0.72 0.64"),
            Row("MAE, ViT-B/16", 800, 0, "mae_vit_base_800ep", _BASE, "83.3 1.00 1.00"),
            Row("MAE, ViT-B/16", 800, 50, "plain50_vit_base_800ep", _BASE, "83.0 0.72 0.64"),
            Row("+PR-MIM, ViT-B/16", 800, 50, "prmim50_vit_base_800ep", _BASE, "83.3 0.72 0.64"),
            Row("MAE, ViT-L/16", 100, 0, "mae_vit_large_100ep", _LARGE, "83.3 1.00 1.00"),
            Row("MAE, ViT-L/16", 100, 50, "plain50_vit_large_100ep", _LARGE, "82.4 0.87 0.82"),
            Row("+PR-MIM, ViT-L/16", 100, 50, "prmim50_vit_large_100ep", _LARGE, "83.2 0.87 0.82"),
            Row("MAE, ViT-L/16", 800, 0, "mae_vit_large_800ep", _LARGE, "85.4 1.00 1.00"),
            Row("+PR-MIM, ViT-L/16", 800, 50, "prmim50_vit_large_800ep", _LARGE, "85.4 0.87 0.82"),
        ],
    ),
    "frameworks": Table(
        "Compatibility with different methods: ViT-B/16",
        _COSTS,
        [
            Row("SimMIM, RGB", 100, 0, "simmim_vit_base_100ep", _SIMMIM, "81.6 1.00 1.00"),
            Row("SimMIM, RGB", 100, 30, "simmim_plain30_vit_base_100ep", _SIMMIM, "81.0 0.50 0.61"),
            Row("+PR-MIM", 100, 30, "simmim_prmim30_vit_base_100ep", _SIMMIM, "81.7 0.50 0.61"),
            Row("SimMIM, RGB", 800, 0, "simmim_vit_base_800ep", _SIMMIM, "83.8 1.00 1.00"),
            Row("+PR-MIM", 800, 30, "simmim_prmim30_vit_base_800ep", _SIMMIM, "83.8 0.50 0.61"),
            Row("LocalMIM, HOG", 100, 0, "localmim_vit_base_100ep", _LOCALMIM, "83.3 1.00 1.00"),
            Row("LocalMIM, HOG", 100, 65, "localmim_plain65_vit_base_100ep", _LOCALMIM, "82.9 0.91 0.84"),
            Row("+PR-MIM", 100, 65, "localmim_prmim65_vit_base_100ep", _LOCALMIM, "83.3 0.91 0.84"),
            Row("MFF, RGB", 800, 0, "mff_vit_base_800ep", _MFF, "83.6 1.00 1.00"),
            Row("MFF, RGB", 800, 50, "mff_plain50_vit_base_800ep", _MFF, "83.3 0.73 0.64"),
            Row("+PR-MIM", 800, 50, "mff_prmim50_vit_base_800ep", _MFF, "83.8 0.73 0.64"),
            Row("TEC, iBOT", 300, 0, "tec_vit_base_300ep", _TEC, "84.8 1.00 1.00"),
            Row("TEC, iBOT", 300, 50, "tec_plain50_vit_base_300ep", _TEC, "84.5 0.82 0.81"),
            Row("+PR-MIM", 300, 50, "tec_prmim50_vit_base_300ep", _TEC, "84.7 0.82 0.81"),
        ],
    ),
    "swin": Table(
        "Compatibility with Swin transformer",
        _TOP1,
        [
            Row("GreenMIM, Swin-B", 100, 0, "greenmim_swin_base_100ep", _SWIN_BASE, "83.2"),
            Row("GreenMIM, Swin-B", 100, 50, "greenmim_plain50_swin_base_100ep", _SWIN_BASE, "82.9"),
            Row("+PR-MIM, Swin-B", 100, 50, "greenmim_prmim50_swin_base_100ep", _SWIN_BASE, "83.3"),
            Row("GreenMIM, Swin-L", 100, 0, "greenmim_swin_large_100ep", _SWIN_LARGE, "83.8"),
            Row("GreenMIM, Swin-L", 100, 50, "greenmim_plain50_swin_large_100ep", _SWIN_LARGE, "83.1"),
            Row("+PR-MIM, Swin-L", 100, 50, "greenmim_prmim50_swin_large_100ep", _SWIN_LARGE, "83.9"),
        ],
    ),
    "methods": Table(
        "Comparison with existing partial reconstruction methods: ViT-B/16",
        _TOP1,
        [
            Row("MAE †", 400, 40, "plain40_vit_base_400ep", _BASE, "82.6"),
            Row("MAE+AMT", 400, 40, "amt_vit_base_400ep", _AMT, "82.8"),
            Row("MAE+PR-MIM", 400, 50, "prmim50_vit_base_400ep", _BASE, "83.0"),
            Row("SimMIM", 100, 24, "simmim_plain24_vit_base_100ep", _SIMMIM, "81.6"),
            Row("SimMIM+AMT", 200, 24, "amt_simmim24_vit_base_200ep", _AMT_SIMMIM, "80.7"),
            Row("SimMIM+PR-MIM", 100, 30, "simmim_prmim30_vit_base_100ep", _SIMMIM, "81.7"),
        ],
        note="†: the paper took this number from AMT's paper, where it is most likely MAE's without throwing, on raw "
        "pixels: recipe `amt_mae_vit_base_400ep`. 81.6 is also SimMIM's number without throwing.",
    ),
    "partial": Table(
        "Figure: partial fine-tuning results of ViT-B/16, 800 epochs",
        dict.fromkeys(_BLOCKS, "top1"),
        [
            Row("MAE", 800, 0, "mae_vit_base_800ep", _BLOCKS, "- - - - - - - 83.3"),
            Row("PR-MIM", 800, 50, "prmim50_vit_base_800ep", _BLOCKS, "- - - - - - - 83.3"),
        ],
        note="The figure prints no numbers. Those of all 12 blocks are in the table of schedules. 0: linear probing.",
    ),
    "robustness": Table(
        "Robust evaluation: top-1, and the mean corruption error on ImageNet-C",
        _SETS,
        [
            Row("MAE", 800, 0, "mae_vit_base_800ep", _ROBUST, "51.2 34.6 49.4 35.2"),
            Row("MAE", 800, 50, "plain50_vit_base_800ep", _ROBUST, "51.9 32.9 49.4 36.0"),
            Row("MAE + PR-MIM", 800, 50, "prmim50_vit_base_800ep", _ROBUST, "51.4 35.4 49.7 36.4"),
            Row("MFF", 800, 0, "mff_vit_base_800ep", _MFF_ROBUST, "49.0 37.2 51.0 36.8"),
            Row("MFF", 800, 50, "mff_plain50_vit_base_800ep", _MFF_ROBUST, "50.5 35.6 51.7 37.6"),
            Row("MFF + PR-MIM", 800, 50, "mff_prmim50_vit_base_800ep", _MFF_ROBUST, "49.9 37.9 52.1 37.6"),
        ],
    ),
    "inaturalist": Table(
        "Top-1 accuracy of image classification on iNaturalist 2018 and 2019",
        dict.fromkeys(_INAT, "top1"),
        [
            Row("MAE", 800, 0, "mae_vit_base_800ep", _INAT, "72.5 78.9"),
            Row("MAE", 800, 50, "plain50_vit_base_800ep", _INAT, "71.8 78.2"),
            Row("MAE + PR-MIM", 800, 50, "prmim50_vit_base_800ep", _INAT, "72.4 79.0"),
            Row("MFF", 800, 0, "mff_vit_base_800ep", _MFF_INAT, "73.5 79.8"),
            Row("MFF", 800, 50, "mff_plain50_vit_base_800ep", _MFF_INAT, "72.5 78.5"),
            Row("MFF + PR-MIM", 800, 50, "mff_prmim50_vit_base_800ep", _MFF_INAT, "73.3 79.8"),
        ],
    ),
    "ade20k": Table(
        "Semantic segmentation on ADE20K",
        {"mIoU": "miou", "mAcc": "macc"},
        [
            Row("MAE", 800, 0, "mae_vit_base_800ep", _ADE20K, "46.8 57.6"),
            Row("MAE", 800, 50, "plain50_vit_base_800ep", _ADE20K, "45.5 56.6"),
            Row("MAE + PR-MIM", 800, 50, "prmim50_vit_base_800ep", _ADE20K, "46.9 58.2"),
        ],
    ),
    "coco": Table(
        "Object detection and instance segmentation on COCO",
        {"AP box": "box_ap", "AP mask": "mask_ap"},
        [
            Row("MAE", 800, 0, "mae_vit_base_800ep", _COCO, "51.0 45.2"),
            Row("MAE", 800, 50, "plain50_vit_base_800ep", _COCO, "50.2 44.6"),
            Row("MAE + PR-MIM", 800, 50, "prmim50_vit_base_800ep", _COCO, "50.8 45.2"),
        ],
    ),
    "kernels": Table(
        "Ablation studies on the kernel sizes in the progressive reconstruction: ViT-B/16, 100 epochs",
        _TOP1,
        [
            Row("3 x 3", 100, 50, "kernel3_vit_base_100ep", _BASE, "81.7"),
            Row("5 x 5", 100, 50, "kernel5_vit_base_100ep", _BASE, "81.7"),
            Row("7 x 7", 100, 50, "prmim50_vit_base_100ep", _BASE, "81.8"),
            Row("9 x 9", 100, 50, "kernel9_vit_base_100ep", _BASE, "81.7"),
            Row("11 x 11", 100, 50, "kernel11_vit_base_100ep", _BASE, "81.6"),
        ],
        note="The table prints no throw ratio. 50 % follows from the number of the 7 x 7 kernel.",
    ),
    "designs": Table(
        "Different designs of the spatial aggregation module: ViT-B/16, 100 epochs",
        _TOP1 | {"GFLOPs": "module_gflops"},
        [
            Row("Average pooling", 100, 50, "avgpool_vit_base_100ep", _BASE, "fail -"),
            Row("Depth-wise convolution", 100, 50, "prmim50_vit_base_100ep", _BASE, "81.8 7.3e-3"),
            Row("Transformer block", 100, 50, "transformer_vit_base_100ep", _BASE, "81.8 0.65"),
            Row("ConvNeXt block", 100, 50, "convnext_vit_base_100ep", _BASE, "81.7 0.41"),
        ],
        note="The table prints neither epochs nor throw ratio. They follow from the number of the convolution.",
    ),
}

# Further recipes of pre-training: (ImageNet-1K top-1 after fine-tuning, who reports it). CrossMAE's release reports the
# best epoch on the validation images. GreenMIM's numbers come from its first code, which has other coordinates and
# another order of patch merging.
OTHER_PRETRAINING = {
    "amt_mae_vit_base_400ep": ("82.6", "the paper's row MAE †, most likely"),
    "mff_vit_base_300ep": ("83.0", "MFF's release"),
    "simmim_swin_base_100ep": ("83.5", "SimMIM's release"),
    "simmim_swin_base_800ep": ("84.0", "SimMIM's release"),
    "simmim_swin_large_800ep": ("85.4", "SimMIM's release"),
    "localmim_vit_base_1600ep": ("84.0", "LocalMIM's release"),
    "localmim_vit_large_800ep": ("85.8", "LocalMIM's release"),
    "tec_vit_base_800ep": ("85.1", "TEC's release, teacher: iBOT"),
    "tec_mae_vit_base_100ep": ("83.9", "TEC's release, teacher: MAE, 300 epochs"),
    "tec_mae_vit_base_300ep": ("84.7", "TEC's release, teacher: MAE, 1600 epochs"),
    "tec_mae_vit_base_800ep": ("84.8", "TEC's release"),
    "tec_mae_vit_large_300ep": ("86.5", "TEC's release"),
    "greenmim_swin_base_800ep": ("83.8", "GreenMIM's release"),
    "greenmim_swin_large_800ep": ("85.1", "GreenMIM's release"),
    "crossmae_vit_base_800ep": ("83.7", "CrossMAE's paper"),
    "crossmae_plain50_vit_base_800ep": ("83.5", "CrossMAE's paper"),
    "crossmae_vit_base_400ep": ("83.3", "CrossMAE's paper"),
    "crossmae_plain50_vit_base_400ep": ("83.2", "CrossMAE's paper"),
    "crossmae_vit_large_800ep": ("85.4", "CrossMAE's paper"),
    "crossmae_plain50_vit_large_800ep": ("85.4", "CrossMAE's paper"),
    "crossmae_vit_huge_800ep": ("86.4", "CrossMAE's paper"),
    "crossmae_plain50_vit_huge_800ep": ("86.3", "CrossMAE's paper"),
}
# Further recipes of evaluation: (numbers, the encoder and who reports it).
OTHER_EVALUATION = {
    "finetune_vit_huge": ("top-1 86.9", "MAE, 1600 epochs; MAE's release"),
    "linprobe_vit_base": ("top-1 67.8", "MAE, 1600 epochs; MAE's release"),
    "linprobe_vit_large": ("top-1 76.0", "MAE, 1600 epochs; MAE's release"),
    "linprobe_vit_huge": ("top-1 77.2", "MAE, 1600 epochs; MAE's release"),
    "ade20k_upernet_vit_base_mae": (
        "mIoU 48.15, mAcc 58.99, aAcc 83.05",
        "MAE, 1600 epochs; the community's reproduction in mmsegmentation",
    ),
    "ade20k_linear_vit_base": (
        "-",
        "none for this size; MAE's ViT-H: mIoU 35.2, by Pixio's authors, other head, crop and length, best epoch",
    ),
    "coco_mask_rcnn_vit_base_mae": ("AP box 51.6, AP mask 45.9", "MAE, 1600 epochs; ViTDet's release, batch 64"),
}


# Counted with this code: forward multiply-adds of a recipe of any epochs, relative to throwing nothing. TEC's are
# the student's.
COUNTED_FLOPS = {
    "plain25_vit_base": 0.856,
    "plain40_vit_base": 0.773,
    "plain50_vit_base": 0.717,
    "plain65_vit_base": 0.636,
    "prmim25_vit_base": 0.859,
    "prmim50_vit_base": 0.721,
    "prmim65_vit_base": 0.641,
    "prmim50_vit_large": 0.869,
    "amt_vit_base": 0.602,
    "mff_prmim50_vit_base": 0.725,
    "simmim_plain24_vit_base": 0.754,
    "simmim_prmim30_vit_base": 0.699,
    "simmim_prmim50_vit_base": 0.496,
    "amt_simmim24_vit_base": 0.749,
    "localmim_prmim65_vit_base": 0.910,
    "greenmim_prmim50_swin_base": 0.981,
    "greenmim_prmim50_swin_large": 0.991,
    "tec_prmim50_vit_base": 0.835,
    "crossmae_prmim50_vit_base": 0.674,
    "crossmae_prmim50_vit_large": 0.850,
    "crossmae_prmim50_vit_huge": 0.916,
}
