"""MFF: a slow derivation of its mixture of blocks, its decays, and the names of the release."""

import re

import pytest
import torch

from frameworks.models_mff_pr import MFFMaskedAutoencoderViT, mff_vit_base_patch16
from tests import slow_mae
from tests.test_models_mae_pr import assert_is_slow_mae, assert_same_weights, orders, perturbed

SIZES = dict(img_size=32, patch_size=8, embed_dim=24, depth=4, num_heads=3)
SIZES |= dict(decoder_embed_dim=16, decoder_depth=2, decoder_num_heads=2)
FUSED = (1, 2, 3)


def slow_fusion(tokens, w, name, heads):
    """Mixes three levels by the softmax of three logits. The first two go through a linear layer each."""
    powers = w["proj_weights"].flatten().exp()
    shares = powers / powers.sum()
    mixture = dict.fromkeys(tokens, 0.0)
    for layer in range(4):
        tokens = slow_mae.block(tokens, w, f"{name}.{layer}", heads)
        if layer in FUSED:
            level = FUSED.index(layer)
            for t, x in tokens.items():
                if layer < 3:
                    x = slow_mae.linear(x, w, f"proj_layers.{level}")
                mixture[t] = mixture[t] + shares[level] * x
    return mixture


@pytest.mark.parametrize(
    ("throw_ratio", "progressive"),
    [
        (0.0, True),
        (0.5, False),
        (0.5, True),
    ],
)
def test_loss_and_predictions_against_the_slow_derivation(throw_ratio, progressive):
    torch.manual_seed(0)
    model = MFFMaskedAutoencoderViT(
        **SIZES,
        fused_blocks=FUSED,
        throw_ratio=throw_ratio,
        progressive=progressive,
        kernel_size=3,
        norm_pix_loss=True,
    )
    assert_is_slow_mae(perturbed(model), orders(model, 2), encode=slow_fusion)


def test_the_defaults_are_those_of_the_release():
    with torch.device("meta"):
        model = mff_vit_base_patch16(throw_ratio=0.0)
    assert model.fused_blocks == (0, 2, 4, 6, 8, 11)
    assert model.proj_weights.shape == (6, 1, 1, 1)
    assert len(model.proj_layers) == 5
    assert len(model.state_dict()) == 265
    assert sum(p.numel() for p in model.parameters()) == 114_860_806
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 114_608_646


def test_the_mixture_begins_even():
    model = MFFMaskedAutoencoderViT(**SIZES)
    assert model.fused_blocks == (0, 3)
    assert model.proj_weights.softmax(dim=0).flatten().tolist() == [0.5, 0.5]
    assert not model.proj_layers[0].bias.any()
    bound = (6 / 48) ** 0.5  # Xavier's
    assert 0.9 * bound < model.proj_layers[0].weight.abs().max() <= bound


def release_name(name):
    """Returns the release's name of one of our parameters, by a table that is independent of the tested one."""
    name = name.replace("mlp.fc1.", "ffn.layers.0.0.").replace("mlp.fc2.", "ffn.layers.1.")
    name = name.replace("norm1.", "ln1.").replace("norm2.", "ln2.")
    if name.startswith("decoder."):
        name = name.removeprefix("decoder.")
        if name == "mask_token" or name.startswith("norm."):
            return "neck." + name.replace("norm.", "ln1.")
        return f"neck.decoder_{name}"
    name = re.sub(r"^norm\.", "ln1.", name)
    name = name.replace("patch_embed.proj.", "patch_embed.projection.").replace("blocks.", "layers.")
    return f"backbone.{name}"


@pytest.mark.parametrize("older", [False, True])
def test_load_official(older):
    source = perturbed(MFFMaskedAutoencoderViT(**SIZES, throw_ratio=0.0)).float()
    released = {release_name(name): value for name, value in source.state_dict().items()}
    if older:
        for name in list(released):
            older_name = name.replace(".ln1.", ".norm1.").replace(".ln2.", ".norm2.")
            released[older_name] = released.pop(name)
    released["data_preprocessor.mean"] = torch.zeros(3)
    model = MFFMaskedAutoencoderViT(**SIZES, throw_ratio=0.5)
    model.load_official({"state_dict": released, "meta": {}})
    assert_same_weights(model, source)
