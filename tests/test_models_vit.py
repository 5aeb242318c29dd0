import pytest
import timm
import torch
from torch import nn

from models_vit import PatchEmbed, VisionTransformer, ViTEncoder, patchify, unpatchify, vit_base_patch16, vit_huge_patch14

SIZES = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3)


def test_patchify_layout_and_inverse():
    imgs = torch.randn(2, 5, 16, 24)
    patches = patchify(imgs, 8)
    assert patches.shape == (2, 6, 320)
    # token 4 is row 1, column 1; value (row 3, column 7, channel 2) with the channel fastest
    assert patches[1, 4, (3 * 8 + 7) * 5 + 2] == imgs[1, 2, 8 + 3, 8 + 7]
    assert torch.equal(unpatchify(patches, 8, (2, 3)), imgs)


@pytest.mark.parametrize("in_chans", [1, 3, 5])
def test_patch_embed_is_the_convolution(in_chans):
    embed, imgs = PatchEmbed(8, in_chans, 12).double(), torch.randn(2, in_chans, 16, 24, dtype=torch.float64)
    expected = nn.functional.conv2d(imgs, embed.proj.weight, embed.proj.bias, stride=8).flatten(2).transpose(1, 2)
    torch.testing.assert_close(embed(patchify(imgs, 8)), expected)


@pytest.mark.parametrize("global_pool", ["avg", "token"])
def test_equals_timm_on_the_same_weights(global_pool):
    torch.manual_seed(0)
    options = dict(num_classes=7, global_pool=global_pool, **SIZES)
    theirs = timm.models.VisionTransformer(**options).double().eval()
    ours = VisionTransformer(**options).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ours.load_state_dict(theirs.state_dict())  # the same names, all of them
    imgs = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(ours(imgs), theirs(imgs), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours.forward_features(imgs), theirs.forward_features(imgs), rtol=1e-9, atol=1e-9)


def test_initialisation_is_mae_s():
    torch.manual_seed(0)
    model = ViTEncoder(img_size=32, patch_size=8, embed_dim=192, depth=1, num_heads=3)
    block = model.blocks[0]
    for layer, fan in ((block.attn.qkv, 192 + 576), (block.mlp.fc1, 192 + 768), (block.attn.proj, 384)):
        bound = (6 / fan) ** 0.5
        assert 0.98 * bound < layer.weight.abs().max() <= bound and not layer.bias.any()
    bound = (6 / (192 + 192)) ** 0.5  # 3 * 8 * 8 inputs of the flattened patch convolution
    assert 0.98 * bound < model.patch_embed.proj.weight.abs().max() <= bound
    assert model.cls_token.std().item() == pytest.approx(0.02, rel=0.15)
    assert not model.pos_embed.requires_grad and not model.pos_embed[0, 0].any()


def test_drop_path_grows_linearly():
    rates = [getattr(b.drop_path, "drop_prob", 0.0) for b in VisionTransformer(**{**SIZES, "depth": 5}, drop_path_rate=0.2).blocks]
    assert rates == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])


def test_published_sizes():
    with torch.device("meta"):
        base, huge = vit_base_patch16(num_classes=1000), vit_huge_patch14()
    assert sum(p.numel() for p in base.parameters()) == 86_567_656  # timm's vit_base_patch16_224
    assert (huge.embed_dim, len(huge.blocks), huge.num_tokens) == (1280, 32, 256)


def test_unknown_pooling_is_refused():
    with pytest.raises(ValueError, match="unknown global_pool 'max', choose from avg, token"):
        VisionTransformer(**SIZES, global_pool="max")
