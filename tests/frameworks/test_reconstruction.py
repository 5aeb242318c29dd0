"""Errors of reconstructions, and the images that they are measured on."""

import pytest
import torch

import main_pretrain
from frameworks import reconstruction
from util.data.datasets import open_images
from util.data.transforms import Normalize


def test_masked_errors_against_a_loop(photos, tmp_path):
    flags = "--model mae_vit_micro_patch4 --batch_size 8 --epochs 1 --warmup_epochs 0 --num_workers 0 --device cpu"
    main_pretrain.main([*flags.split(), "--data_path", str(photos), "--output_dir", str(tmp_path / "run")])
    model, settings = main_pretrain.load_run(tmp_path / "run")
    images = open_images("folder", photos)
    sums, normalize = {"retained": [], "thrown": []}, Normalize()
    for imgs, ids in reconstruction.crops(model, settings, images, range(6), batch_size=2):
        for img, row in zip(imgs, ids, strict=True):
            drawn, _ = model.reconstruct_image(normalize(img[None]), row[None])
            error = (normalize.undo(drawn)[0] - img / 255) ** 2
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
