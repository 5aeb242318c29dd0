import re

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from encoders import classifiers
from framework import PixelFramework
from frameworks.attention_phases import refresh_epochs
from frameworks.registry import build_model
from main_pretrain import get_args_parser, note_on_rate
from prmim import TokenOrder
from recipes import FINETUNE_RECIPES, RECIPES
from tests.gmac import forward_gmac
from util.run.cli import parse_with_recipe
from util.run.distributed import Process
from util.run.flags import make_plan

# {throw_ratio: numbers of visible, retained and thrown tokens} for 196 tokens and mask ratio .75.
COUNTS = {0.0: (49, 147, 0), 0.25: (49, 98, 49), 0.4: (49, 69, 78), 0.5: (49, 49, 98), 0.65: (49, 20, 127)}
BASE, LARGE = "mae_vit_base_patch16", "mae_vit_large_patch16"
# Multiply-adds of one forward pass relative to throw_ratio 0, counted by hand for 196 embedded and predicted tokens.
COST = {(BASE, 0.25): 0.860, (BASE, 0.5): 0.724, (BASE, 0.65): 0.645, (LARGE, 0.5): 0.870}


def settings_of(recipe, **changes):
    return vars(parse_with_recipe(get_args_parser(), RECIPES, ["--recipe", recipe])) | changes


def forward_multiply_adds(settings):
    with torch.device("meta"):
        model = build_model(settings)
        imgs = torch.empty(1, 3, *model.img_size)
        ids_shuffle = torch.empty(1, model.counts.num_tokens, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(imgs, ids_shuffle)
    return counter.get_total_flops() / 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_builds_and_counts(recipe):
    settings = settings_of(recipe)
    with torch.device("meta"):
        model = build_model(settings)
    if model.counts.num_tokens == 196 and not recipe.startswith(("simmim_", "amt_")):
        counts = (model.counts.num_visible, model.counts.num_retained, model.counts.num_thrown)
        assert counts == COUNTS[settings["throw_ratio"]]
    if isinstance(model, PixelFramework):
        assert model.norm_pix_loss == settings["norm_pix_loss"]
    epochs = re.search(r"_(\d+)ep$", recipe)
    assert epochs is None or settings["epochs"] == int(epochs[1])
    aggregates = any("aggregation" in name for name, _ in model.named_parameters())
    assert aggregates == (
        settings["progressive"] and settings["throw_ratio"] > 0 and settings["aggregation"] != "avgpool"
    )


@pytest.mark.parametrize(
    "recipe", [n for n in RECIPES if RECIPES[n]["model"] in (BASE, LARGE) and not n.startswith(("amt_", "pixio_"))]
)
def test_recipe_trains_by_the_supplementary(recipe):
    """Pre-training details: lr 2.4e-3 at batch 4096, 40 warm-up epochs, weight decay .05, per-patch targets."""
    s = settings_of(recipe)
    assert s["blr"] * s["total_batch_size"] / 256 == pytest.approx(2.4e-3)
    assert (s["total_batch_size"], s["warmup_epochs"], s["weight_decay"]) == (4096, 40, 0.05)
    assert (s["mask_ratio"], s["norm_pix_loss"], s["min_lr"], s["crop_scale"]) == (0.75, True, 0, (0.2, 1.0))
    assert s["epochs"] == int(re.search(r"_(\d+)ep$", recipe)[1])
    deep, kind, percent = re.match(r"(?:deep(\d+)_)?([a-z_]+?)(\d*)_vit", recipe).groups()
    assert s["decoder_depth"] == (int(deep) if deep else None)
    expected = {
        "mae": (0.0, True, "furthest"),
        "plain": (None, False, "random"),
        "progressive": (None, True, "random"),
        "furthest": (None, False, "furthest"),
        "attention": (None, False, "attention"),
        "attention_progressive": (None, True, "attention"),
        "cell": (None, False, "running_cell"),
        "cell_progressive": (None, True, "running_cell"),
    }.get(kind, (None, True, "furthest"))
    throw_ratio = expected[0] if kind == "mae" else int(percent or 50) / 100 if kind != "kernel" else 0.5
    assert (s["throw_ratio"], s["progressive"], s["sampling"]) == (throw_ratio, *expected[1:])


@pytest.mark.parametrize(
    ("recipe", "ratios"),
    [
        ("amt_vit_base_400ep", (0.85, 0.4)),
        ("amt_masking_vit_base_400ep", (0.75, 0.0)),
        ("amt_progressive_vit_base_400ep", (0.85, 0.4)),
        ("amt_mae_vit_base_400ep", (0.75, 0.0)),
    ],
)
def test_amt_trains_mae_as_its_release(recipe, ratios):
    """MAE's settings for 400 epochs, but raw pixels; maps after epochs 40, 80, ..., 360."""
    s, mae = settings_of(recipe), settings_of("mae_vit_base_800ep")
    own = {"recipe", "model", "epochs", "mask_ratio", "throw_ratio", "norm_pix_loss", "sampling", "progressive"}
    assert {k: v for k, v in s.items() if k not in own} == {k: v for k, v in mae.items() if k not in own}
    assert (s["epochs"], s["mask_ratio"], s["throw_ratio"], s["norm_pix_loss"]) == (400, *ratios, False)
    assert s["model"] == (BASE if recipe.startswith("amt_mae") else "amt_vit_base_patch16")
    assert s["sampling"] == "attention" or recipe.startswith("amt_mae")
    assert s["progressive"] == (recipe.startswith(("amt_progressive", "amt_mae")))
    assert (s["attention_start"], s["attention_every"], s["attention_crop"]) == (40, 40, "view")


@pytest.mark.parametrize(
    ("recipe", "mask_ratio", "throw_ratio"),
    [("amt_simmim_vit_base_200ep", 0.7, 0.26), ("amt_simmim24_vit_base_200ep", 0.68, 0.24)],
)
def test_amt_trains_simmim_as_its_release(recipe, mask_ratio, throw_ratio):
    """Rates at a batch of 512: peak 1e-4, start 5e-7, floor 5e-6."""
    s, simmim = settings_of(recipe), settings_of("simmim_vit_base_100ep")
    assert (s["blr"] * 2, s["warmup_lr"] / 4, s["min_lr"] / 4) == pytest.approx((1e-4, 5e-7, 5e-6))
    own = {"recipe", "model", "epochs", "mask_ratio", "throw_ratio", "sampling", "progressive"}
    own |= {"blr", "warmup_lr", "min_lr"}
    assert {k: v for k, v in s.items() if k not in own} == {k: v for k, v in simmim.items() if k not in own}
    assert (s["epochs"], s["mask_ratio"], s["throw_ratio"]) == (200, mask_ratio, throw_ratio)
    assert (s["sampling"], s["progressive"], s["attention_start"]) == ("attention", False, 40)


@pytest.mark.parametrize("recipe", [n for n in RECIPES if n.startswith("attention") or n == "cifar10_attention"])
def test_attention_as_a_sampling_keeps_amt_s_share_of_refreshes(recipe):
    """Nine refreshes, from a tenth of the schedule on, as in 400 epochs."""
    s = settings_of(recipe)
    refreshes = refresh_epochs(s["epochs"], s["attention_start"], s["attention_every"])
    assert [epoch / s["epochs"] for epoch in refreshes] == pytest.approx([i / 10 for i in range(1, 10)])


def test_cost_of_amt():
    """5.94 G of one forward pass if all tokens are embedded and predicted, against 9.78 G of MAE."""
    counted = forward_multiply_adds(settings_of("amt_vit_base_400ep"))
    # All patches embedded, and class and visible tokens predicted.
    lean = (196 - 30) * 768 * 768 + 31 * 512 * 768
    assert counted + lean == pytest.approx(5.94e9, rel=2e-3)
    simmim = forward_multiply_adds(settings_of("amt_simmim_vit_base_200ep"))
    lean = (196 - 56 + 56) * 768 * 768  # patches not embedded; visible tokens not predicted
    assert simmim + lean == pytest.approx(12.90e9, rel=5e-3)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name.startswith("mff_")])
def test_mff_trains_as_its_release(recipe):
    s = settings_of(recipe)
    assert (s["blr"] * s["total_batch_size"] / 256, s["total_batch_size"]) == (pytest.approx(2.4e-3), 4096)
    assert (s["weight_decay"], s["warmup_epochs"], s["min_lr"], s["norm_pix_loss"]) == (0.05, 40, 0, True)
    assert (s["crop"], s["interpolation"], s["lr_schedule"]) == ("padded", "bilinear", "mff")
    assert tuple(s["betas"]) == (0.9, 0.95)
    assert s["warmup_lr"] / 2.4e-3 == pytest.approx(1e-9 if s["epochs"] == 800 else 1e-4) and s["clip_grad"] is None
    throws, method = "50" in recipe, recipe.split("_")[1]
    assert (s["throw_ratio"], s["progressive"]) == (0.5 if throws else 0.0, method != "plain50")
    assert s["sampling"] == ("random" if method == "plain50" else "furthest")


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name.startswith("simmim_")])
def test_simmim_trains_as_its_release(recipe):
    """Rates at a total batch of 2048: peaks 4e-4 and 8e-4; starts and floors are the release's times 2048 / 512."""
    s = settings_of(recipe)
    assert (s["total_batch_size"], s["mask_ratio"], s["norm_pix_loss"], s["clip_grad"]) == (2048, 0.6, False, 5.0)
    assert (tuple(s["betas"]), s["weight_decay"], s["warmup_epochs"]) == ((0.9, 0.999), 0.05, 10)
    assert (tuple(s["crop_scale"]), s["crop"], s["interpolation"]) == ((0.67, 1.0), "resized", "bilinear")
    peak = s["blr"] * s["total_batch_size"] / 256
    if s["epochs"] == 100:
        assert (peak, s["warmup_lr"], s["min_lr"], s["lr_schedule"]) == (pytest.approx(8e-4), 4e-6, 4e-5, "simmim")
    else:
        assert (peak, s["warmup_lr"]) == (pytest.approx(4e-4), 2e-6)
        assert (s["lr_schedule"], s["lr_steps"]) == ("simmim_steps", (700,))
    percent = re.search(r"(plain|prmim)(\d+)", recipe)
    assert s["throw_ratio"] == (int(percent[2]) / 100 if percent else 0)
    plain = percent is not None and percent[1] == "plain"
    assert (s["progressive"], s["sampling"]) == ((False, "random") if plain else (True, "furthest"))


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name.startswith("greenmim_")])
def test_greenmim_trains_as_its_release(recipe):
    """Swin-L, 100 epochs: 8 processes of 512 images; all others: 8 of 256. Each process draws one visible set."""
    s = settings_of(recipe)
    size, epochs = ("large" if "large" in recipe else "base"), int(re.search(r"_(\d+)ep$", recipe)[1])
    batch, lr = {("large", 100): (512, 1.6e-3), ("base", 100): (256, 1.2e-3)}.get((size, epochs), (256, 8e-4))
    assert (s["epochs"], s["batch_size"], s["total_batch_size"]) == (epochs, batch, 8 * batch)
    assert s["blr"] * s["total_batch_size"] / 256 == pytest.approx(lr)
    assert (s["warmup_epochs"], s["min_lr"], s["weight_decay"], tuple(s["betas"])) == (40, 0, 0.05, (0.9, 0.95))
    assert (s["norm_pix_loss"], s["mask_ratio"], s["clip_grad"], s["lr_schedule"]) == (True, 0.75, None, "mae")
    assert (tuple(s["crop_scale"]), s["crop"], s["interpolation"]) == ((0.2, 1.0), "resized", "bicubic")
    assert (s["throw_ratio"], s["progressive"], s["sampling"]) == arm_of(recipe, 0.5)
    assert s["decoder_order"] == ("reference" if "800" in recipe else None)
    assert s["model"] == f"greenmim_swin_{'large_patch4_window14' if 'large' in recipe else 'base_patch4_window7'}"


@pytest.mark.parametrize(
    ("size", "width", "plain", "progressive"), [("base", 128, 0.972, 0.981), ("large", 192, 0.987, 0.991)]
)
def test_cost_of_greenmim(size, width, plain, progressive):
    """Compares with a count by hand. Throwing saves little: it saves in the decoder, a small part of Swin's cost."""
    recipes = [f"greenmim_{arm}swin_{size}_100ep" for arm in ("", "plain50_", "prmim50_")]
    full, *thrown = (forward_gmac(settings_of(recipe))[0] for recipe in recipes)
    assert [gmac / full for gmac in thrown] == pytest.approx([plain, progressive], abs=1e-3)
    with torch.device("meta"):
        model = build_model(settings_of(recipes[0]))
    groups = dict(zip(model.grouper.stages, model.grouper.capacities, strict=True))
    count = 768 * 48 * width
    for s, depth in enumerate((2, 2, 18, 2)):
        side, C = 8 >> s, width << s
        T, stage = 12 * side**2, model.layers[s]
        for b in range(depth):
            shift = stage.shifts[-1] if b % 2 else 0
            group = (side, stage.window, shift)
            G, g = (groups[group], stage.window**2) if group in groups else (1, T)
            count += 12 * T * C**2 + 2 * G * g**2 * C
        count += 2 * T * C**2 if s < 3 else 0  # 4 C to 2 C of a quarter of the tokens
    count += 12 * 8 * width * 512 + 12 * 49 * 512**2 + 2 * 49**2 * 512 + 37 * 512 * 3072
    assert full == pytest.approx(count / 1e9, rel=1e-9)


def arm_of(recipe, throw_ratio):
    """Returns the (throw_ratio, progressive, sampling) that a recipe's name stands for."""
    arm = re.search(r"_(plain|prmim)\d\d_", recipe)
    plain = bool(arm) and arm[1] == "plain"
    return (throw_ratio if arm else 0.0, not plain, "random" if plain else "furthest")


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name.startswith("crossmae_")])
def test_crossmae_trains_as_its_release(recipe):
    """lr 2.4e-3 at batch 4096, times the predicted share of the masked tokens; PR-MIM supervises all of them."""
    s = settings_of(recipe)
    share = 1.0 if s["progressive"] else (s["mask_ratio"] - s["throw_ratio"]) / s["mask_ratio"]
    assert (s["blr"] * s["total_batch_size"] / 256, s["total_batch_size"]) == (pytest.approx(2.4e-3 * share), 4096)
    assert (s["epochs"], s["warmup_epochs"]) == {400: (400, 20), 800: (800, 40)}[s["epochs"]]
    assert f"_{s['epochs']}ep" in recipe and s["model"].split("_")[2] in recipe
    assert (s["min_lr"], s["weight_decay"], tuple(s["betas"]), s["clip_grad"]) == (0, 0.05, (0.9, 0.95), None)
    assert (s["norm_pix_loss"], s["mask_ratio"], s["lr_schedule"], s["visible_source"]) == (True, 0.75, "mae", None)
    assert (tuple(s["crop_scale"]), s["crop"], s["interpolation"]) == ((0.2, 1.0), "resized", "bicubic")
    assert (s["throw_ratio"], s["progressive"], s["sampling"]) == arm_of(recipe, 0.65 if "65" in recipe else 0.5)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name.startswith("localmim_")])
def test_localmim_trains_as_its_release(recipe):
    """lr 1.6e-3 at batch 2048, for ViT-L 2.4e-3 at 4096; floor 1e-6; 10 warm-up epochs of 100, 40 of longer runs."""
    s = settings_of(recipe)
    large = "large" in recipe
    assert (s["total_batch_size"], s["min_lr"], s["weight_decay"]) == (4096 if large else 2048, 1e-6, 0.05)
    assert s["blr"] * s["total_batch_size"] / 256 == pytest.approx(2.4e-3 if large else 1.6e-3)
    assert (s["epochs"], s["warmup_epochs"]) == {100: (100, 10), 800: (800, 40), 1600: (1600, 40)}[s["epochs"]]
    assert (tuple(s["betas"]), tuple(s["crop_scale"]), s["interpolation"]) == ((0.9, 0.95), (0.2, 1.0), "bicubic")
    assert (s["lr_schedule"], s["warmup_lr"], s["clip_grad"], s["mask_ratio"]) == ("mae", 0, None, 0.75)
    assert (s["throw_ratio"], s["progressive"], s["sampling"]) == arm_of(recipe, 0.65)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name.startswith("tec_")])
def test_tec_trains_as_its_release(recipe):
    """lr 2.4e-3 at batch 4096, no floor, 40 warm-up epochs. att_topk and att_tau depend on the teacher."""
    s = settings_of(recipe)
    assert (s["blr"] * s["total_batch_size"] / 256, s["total_batch_size"]) == (pytest.approx(2.4e-3), 4096)
    assert (s["warmup_epochs"], s["min_lr"], s["weight_decay"], tuple(s["betas"])) == (40, 0, 0.05, (0.9, 0.95))
    mae_tau = 1.4 if "large" in recipe else 1.8
    assert (s["att_topk"], s["att_tau"]) == ((15, mae_tau) if recipe.startswith("tec_mae") else (9, 1.0))
    assert s["teacher"] is None and s["epochs"] == int(re.search(r"_(\d+)ep$", recipe)[1])
    assert (tuple(s["crop_scale"]), s["crop"], s["interpolation"]) == ((0.2, 1.0), "resized", "bicubic")
    assert (s["throw_ratio"], s["progressive"], s["sampling"]) == arm_of(recipe, 0.5)


@pytest.mark.parametrize(
    ("throw_ratio", "total", "ratio"), [(0.0, 5.234, 1), (0.5, 4.876, 0.932), (0.65, 4.775, 0.912)]
)
def test_cost_of_localmim(throw_ratio, total, ratio):
    """Counts as if all patches were embedded and the heads of levels 0 to 2 ran on all cells."""
    recipe = "localmim_prmim65_vit_base_100ep"
    heads = 256 * 512 + 4 * 128 * 256 + 16 * 64 * 27 + 256 * 512 + 4 * 128 * 27 + 256 * 27  # of a token
    lean = 147 * 768 * 768 + 49 * heads
    counted = forward_multiply_adds(settings_of(recipe, throw_ratio=throw_ratio)) + lean
    assert counted == pytest.approx(total * 1e9, rel=2e-4)
    assert counted / 5.234e9 == pytest.approx(ratio, abs=5e-4)


@pytest.mark.parametrize(
    ("throw_ratio", "progressive", "total", "ratio"),
    [
        (0.0, True, 8.302, 1),
        (0.25, False, 7.558, 0.910),
        (0.5, False, 6.834, 0.823),
        (0.65, False, 6.415, 0.773),
        (0.5, True, 6.960, 0.838),
    ],
)
def test_cost_of_tecs_student(throw_ratio, progressive, total, ratio):
    """Counts as if all patches were embedded, all tokens predicted and queried; without teacher and cls_token_mlp."""
    s = settings_of("tec_prmim50_vit_base_300ep", throw_ratio=throw_ratio, progressive=progressive)
    with torch.device("meta"):
        model = build_model(s)
        imgs, ids_shuffle = torch.empty(1, 3, 224, 224), torch.empty(1, 196, dtype=torch.int64)
    num_keys = 196 if progressive else model.counts.num_kept
    with FlopCounterMode(display=False) as counter:
        model.teacher(imgs, TokenOrder(ids_shuffle, model.counts), num_keys, topk=9)
    teacher = counter.get_total_flops() / 2
    lean = 147 * 768 * 768 + 50 * 512 * 768 + (num_keys - 9) * 512 * 768 - 2 * 768 * 3072
    counted = forward_multiply_adds(s) - teacher + lean
    assert counted == pytest.approx(total * 1e9, rel=1e-3)
    assert counted / 8.302e9 == pytest.approx(ratio, abs=1e-3)
    assert teacher == pytest.approx(17.68e9, rel=5e-3)


@pytest.mark.parametrize(("throw_ratio", "ratio", "thrown"), [(0.3, 0.701, 58), (0.5, 0.499, 98)])
def test_cost_of_simmim(throw_ratio, ratio, thrown):
    """17.679 G if all tokens are embedded and predicted, and the shares of it at 30 and 50 % thrown."""
    recipe = "simmim_prmim30_vit_base_100ep"
    full = forward_multiply_adds(settings_of(recipe, throw_ratio=0.0))
    ours = forward_multiply_adds(settings_of(recipe, throw_ratio=throw_ratio))
    lean = (120 + 76) * 768 * 768  # masked patches not embedded, visible ones not predicted
    assert full + lean == pytest.approx(17.679e9, rel=1e-3)
    assert (ours + lean) / (full + lean) == pytest.approx(ratio, abs=1e-3)


def test_cost_of_mff():
    """9.929 G if all tokens are embedded and predicted; 7.230 G at rho_d .5. Both include the five projections."""
    full = forward_multiply_adds(settings_of("mff_vit_base_800ep"))
    thrown = forward_multiply_adds(settings_of("mff_prmim50_vit_base_800ep"))
    lean = 147 * 768 * 768 + 50 * 512 * 768  # patches not embedded; class and visible tokens not predicted
    assert full + lean == pytest.approx(9.929e9, rel=1e-3)
    assert thrown + lean == pytest.approx(7.230e9, rel=1e-3)
    assert (thrown + lean) / (full + lean) == pytest.approx(0.728, abs=5e-4)


@pytest.mark.parametrize(("model", "throw_ratio"), COST)
def test_forward_cost_relative_to_mae(model, throw_ratio):
    """The code embeds only visible and predicts only masked tokens, which changes the ratios by less than .005."""
    recipe = "prmim50_vit_base_100ep"
    full = forward_multiply_adds(settings_of(recipe, model=model, throw_ratio=0.0))
    thrown = forward_multiply_adds(settings_of(recipe, model=model, throw_ratio=throw_ratio))
    assert thrown / full == pytest.approx(COST[model, throw_ratio], abs=0.005)


def test_cost_of_mae_itself_and_of_the_convolution():
    """9.781 G if all tokens are embedded and predicted; 4.92e-3 G for 49 taps x 196 cells x 512 channels."""
    recipe = "prmim50_vit_base_100ep"
    full = forward_multiply_adds(settings_of(recipe, throw_ratio=0.0))
    lean = 147 * 768 * 768 + 50 * 512 * 768  # patches not embedded; class and visible tokens not predicted
    assert full + lean == pytest.approx(9.781e9, rel=1e-3)
    plain = forward_multiply_adds(settings_of(recipe, progressive=False))
    progressive = forward_multiply_adds(settings_of(recipe))
    assert progressive - plain - 98 * 512 * 768 == pytest.approx(49 * 196 * 512, rel=1e-6)


# The rows of the paper's other tables: beginnings and end of their names in RECIPES, and how they are fine-tuned.
ROWS = [
    (("mae_", "plain50_", "prmim50_"), "vit_base_300ep", "finetune_vit_base"),
    (("mae_", "plain50_", "prmim50_"), "vit_large_100ep", "finetune_vit_large"),
    (("mae_", "prmim50_"), "vit_large_800ep", "finetune_vit_large"),
    (("simmim_", "simmim_plain30_", "simmim_prmim30_"), "vit_base_100ep", "simmim_finetune_vit_base"),
    (("simmim_", "simmim_prmim30_"), "vit_base_800ep", "simmim_finetune_vit_base"),
    (("localmim_", "localmim_plain65_", "localmim_prmim65_"), "vit_base_100ep", "localmim_finetune_vit_base_100ep"),
    (("tec_", "tec_plain50_", "tec_prmim50_"), "vit_base_300ep", "tec_finetune_vit_base_300ep"),
    (("greenmim_", "greenmim_plain50_", "greenmim_prmim50_"), "swin_base_100ep", "greenmim_finetune_swin_base"),
    (("greenmim_", "greenmim_plain50_", "greenmim_prmim50_"), "swin_large_100ep", "greenmim_finetune_swin_large"),
    (("prmim50_",), "vit_base_400ep", "finetune_vit_base"),
    (("kernel3_", "kernel5_", "prmim50_", "kernel9_", "kernel11_"), "vit_base_100ep", "finetune_vit_base"),
    (("avgpool_", "prmim50_", "transformer_", "convnext_"), "vit_base_100ep", "finetune_vit_base"),
]
# Tables "Training schedules", "Robust evaluation" and "Top-1 accuracy of image classification".
for arms, name in (("mae_", "plain50_", "prmim50_"), ""), (("mff_", "mff_plain50_", "mff_prmim50_"), "mff_"):
    ROWS += [(arms, "vit_base_800ep", f"{name}{task}_vit_base") for task in ("finetune", "inat18", "inat19")]


@pytest.mark.parametrize(("arms", "end", "finetune"), ROWS)
def test_the_paper_s_rows_have_recipes_whose_encoders_are_fine_tuned(arms, end, finetune):
    """The model of a fine-tuning recipe has the size of the pre-trained one."""
    tuned = FINETUNE_RECIPES[finetune]
    with torch.device("meta"):
        classifier = classifiers.MODELS[tuned["model"]]()
        encoders = [build_model(settings_of(arm + end)) for arm in arms]
    for encoder in encoders:
        assert (encoder.patch_size, encoder.patch_embed.proj.out_channels) == (
            *(classifier.patch_size, classifier.patch_embed.proj.out_channels),
        )
        assert len(encoder.state_dict().keys() & classifier.state_dict().keys()) > 100


def test_the_default_rate_for_a_small_batch_is_said():
    process = Process(torch.device("cpu"), world_size=1, local_world_size=1)
    for flags, peak in (
        (["--total_batch_size", "64"], "3.75e-05"),
        (["--total_batch_size", "64", "--blr", "2e-3"], None),
        (["--total_batch_size", "64", "--lr", "1e-4"], None),
        (["--total_batch_size", "4096"], None),
        (["--recipe", "prmim50_vit_base_100ep", "--total_batch_size", "64"], None),
    ):
        args = parse_with_recipe(get_args_parser(), RECIPES, flags)
        notes = note_on_rate(args, make_plan(args, process))
        assert len(notes) == (peak is not None) and all(f"rate is {peak}: " in note for note in notes)


def test_average_pooling_fills_all_cells_in_the_paper_s_row_only():
    paper, ours = (settings_of(f"avgpool_{name}vit_base_100ep") for name in ("", "thrown_"))
    assert {key for key in paper if paper[key] != ours[key]} == {"recipe", "applies_to"}
    assert (paper["applies_to"], ours["applies_to"]) == ("all", "thrown")


def test_the_ablation_table_is_complete():
    arms = {"plain", "progressive", "furthest", "prmim"}
    names = {f"{arm}{rho}_vit_base_100ep" for arm in arms for rho in (25, 50, 65)} | {"mae_vit_base_100ep"}
    assert names <= set(RECIPES)
    distinct = {tuple(sorted((k, str(v)) for k, v in RECIPES[name].items())) for name in RECIPES}
    assert len(distinct) == len(RECIPES)


def test_explicit_flags_win_and_unknown_recipes_are_named(capsys):
    args = parse_with_recipe(get_args_parser(), RECIPES, ["--recipe", "cifar10", "--epochs", "7"])
    assert args.epochs == 7 and args.model == "mae_vit_mini_patch4"
    with pytest.raises(SystemExit):
        parse_with_recipe(get_args_parser(), RECIPES, ["--recipe", "prmim50_vit_bas"])
    assert "unknown recipe 'prmim50_vit_bas'; close to it: prmim50_vit_base" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse_with_recipe(get_args_parser(), {"odd": dict(depth=3)}, ["--recipe", "odd"])
    assert "recipe 'odd' sets depth, which main_pretrain.py does not know" in capsys.readouterr().err


FLAGS = """
    recipe
    model input_size patch_size mask_ratio throw_ratio progressive sampling aggregation kernel_size applies_to
    norm_pix_loss decoder_depth decoder_embed_dim decoder_num_heads mask_unit num_cls_tokens
    learned_pos_embed drop_path hflip decoder_order teacher att_topk att_tau
    in_chans mean std pretrained visible_source attention_start attention_every attention_crop
    batch_size accum_iter total_batch_size epochs warmup_epochs blr lr min_lr weight_decay seed
    warmup_lr lr_schedule lr_steps clip_grad betas
    dataset data_path image_column label_column loader crop_scale crop interpolation num_workers max_bad_fraction
    output_dir resume allow_changes device precision attention compile recompute shard dist_timeout
    max_steps save_every save_minutes save_steps picture_every knn_every knn_train print_freq
"""


def test_flags_are_frozen():
    """Users' scripts depend on these names: a removal or renaming must be deliberate."""
    flags = {action.dest for action in get_args_parser()._actions} - {"help"}
    assert flags == set(FLAGS.split())
