"""Errors of reconstructions, and the images that they are measured on."""

import pytest
import torch

import main_pretrain
from framework import View
from frameworks import reconstruction, registry
from models_mae_pr import MaskedAutoencoderViT
from prmim import TokenOrder
from util.data.open import open_images
from util.data.transforms import Normalize


def test_masked_errors_against_a_loop(photos, tmp_path):
    flags = "--model mae_vit_micro_patch4 --batch_size 8 --epochs 1 --warmup_epochs 0 --num_workers 0 --device cpu"
    main_pretrain.main([*flags.split(), "--data_path", str(photos), "--output_dir", str(tmp_path / "run")])
    model, settings = registry.load_run(tmp_path / "run")
    images = open_images("folder", photos)
    sums, normalize = {"retained": [], "thrown": []}, Normalize()
    for imgs, ids in reconstruction.crops(model, settings, images, range(6), batch_size=2):
        for img, row in zip(imgs, ids, strict=True):
            (view,) = model.views(normalize(img[None]), row[None], normalize.undo)
            error = (view.prediction[0] - img / 255) ** 2
            for rank, token in enumerate(row.tolist()):
                r, c = divmod(token, 8)
                if rank >= 16:
                    sums["retained" if rank < 32 else "thrown"].append(
                        error[:, 4 * r : 4 * r + 4, 4 * c : 4 * c + 4].mean()
                    )
    measured = reconstruction.measure(model, settings, images, range(6))
    assert measured == {
        "masked MSE": pytest.approx({name: torch.stack(v).mean().item() for name, v in sums.items()}, rel=1e-4)
    }


def test_a_picture_shows_truth_where_visible_predictions_where_predicted_and_grey_elsewhere():
    """4 x 4 tokens of 2 px. Plain partial reconstruction predicts no thrown token."""
    sizes = dict(img_size=8, patch_size=2, embed_dim=32, depth=1, num_heads=2)
    for progressive in (True, False):
        model = MaskedAutoencoderViT(32, 1, **sizes, progressive=progressive)
        ids = model.collator("furthest", 0)([(torch.zeros(1), 0, (0, i)) for i in range(3)])[2]
        order = TokenOrder(ids, model.counts)
        truth, prediction = torch.rand(2, 3, 3, 8, 8)
        view = View("reconstruction", None, truth, prediction, "error", torch.zeros(3, 16))
        picture = reconstruction.compose(view, ~order.mask, model.supervised(order), model.grid_size)
        for b in range(3):
            for rank, token in enumerate(ids[b].tolist()):
                cell = (b, slice(None), *(slice(2 * i, 2 * i + 2) for i in divmod(token, 4)))
                thrown = torch.full((3, 2, 2), 0.5) if not progressive else prediction[cell]
                assert torch.equal(picture[cell], truth[cell] if rank < 4 else prediction[cell] if rank < 8 else thrown)
