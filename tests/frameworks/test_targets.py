"""A target that is no pixels: scripts refuse to draw it; the contract's tests say that the loss compares with it."""

from functools import partial

from frameworks import registry
from models_mae_pr import MaskedAutoencoderViT
from models_vit import NANO
from scripts import visualize
from tests import runs
from tests.runs import refused

NAME = "mae_shifted_patch4"


class ShiftedMAE(MaskedAutoencoderViT):
    """MAE that predicts something else than pixels."""

    def target_tokens(self, imgs, pixels):
        return 1 + pixels


def test_scripts_refuse_to_take_it_for_pixels(photos, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(registry.MODELS, NAME, partial(ShiftedMAE, **NANO, decoder_embed_dim=64, decoder_depth=2))
    run = tmp_path / "run"
    runs.pretrain(photos, run, "--model", NAME, "--throw_ratio", 0, "--epochs", 1, "--picture_every", 0)
    message = refused(capsys, visualize.main, run, "--images", photos, "--out", tmp_path / "picture.png")
    assert "ShiftedMAE" in message
    assert not (tmp_path / "picture.png").exists()
