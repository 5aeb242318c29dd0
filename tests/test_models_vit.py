import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay
from torch import nn

from models_vit import (
    PatchEmbed,
    VisionTransformer,
    ViTEncoder,
    patchify,
    unpatchify,
    vit_base_patch16,
    vit_huge_patch14,
)

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


def test_cls_attention_is_the_softmax_of_the_last_block():
    torch.manual_seed(0)
    model = ViTEncoder(**SIZES | dict(depth=3)).double()
    inputs = {}
    model.blocks[-1].norm1.register_forward_hook(lambda _, __, out: inputs.update(normed=out))
    imgs = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        model.forward_features(imgs)
        x, qkv = inputs["normed"], model.blocks[-1].attn.qkv
        found = model.cls_attention(imgs)
    assert found.shape == (2, 3, 16) and found.dtype == torch.float32
    for b in range(2):
        for head in range(3):
            rows = torch.arange(16) + 16 * head
            query = qkv.weight[rows] @ x[b, 0] + qkv.bias[rows]
            keys = [qkv.weight[48 + rows] @ token + qkv.bias[48 + rows] for token in x[b]]
            exponentials = torch.stack([(query @ key / 4).exp() for key in keys])  # 4 is the root of 16 channels
            torch.testing.assert_close(
                found[b, head].double(), exponentials[1:] / exponentials.sum(), rtol=1e-5, atol=0
            )


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
    model = VisionTransformer(**{**SIZES, "depth": 5}, drop_path_rate=0.2)
    rates = [getattr(block.drop_path, "drop_prob", 0.0) for block in model.blocks]
    assert rates == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])


def test_published_sizes():
    with torch.device("meta"):
        base, huge = vit_base_patch16(num_classes=1000), vit_huge_patch14()
    assert sum(p.numel() for p in base.parameters()) == 86_567_656  # timm's vit_base_patch16_224
    assert (huge.embed_dim, len(huge.blocks), huge.num_tokens) == (1280, 32, 256)


def test_unknown_pooling_is_refused():
    with pytest.raises(ValueError, match="unknown global_pool 'max', choose from avg, token"):
        VisionTransformer(**SIZES, global_pool="max")


def test_equals_timm_s_vit_base_at_its_real_size():
    torch.manual_seed(0)
    theirs = timm.create_model("vit_base_patch16_224", global_pool="avg", num_classes=10).eval()
    ours = vit_base_patch16(num_classes=10).eval()
    ours.load_state_dict(theirs.state_dict())
    imgs = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(ours(imgs), theirs(imgs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("global_pool", ["avg", "token"])
def test_layer_scales_and_decays_are_mae_s(global_pool):
    """The scale is .65^(13 - id), with id 0 for the embeddings, i + 1 for block i, and 13 for norm and head.

    Parameters with one dimension, the class token and the positions do not decay.
    """
    with torch.device("meta"):
        model = vit_base_patch16(global_pool=global_pool)
    groups = param_groups_layer_decay(model, 0.05, model.no_weight_decay(), layer_decay=0.65)
    found = {id(p): (g["lr_scale"], g["weight_decay"]) for g in groups for p in g["params"]}
    assert len(found) == len(list(model.parameters()))
    for name, p in model.named_parameters():
        layer = 0 if name in ("cls_token", "pos_embed") or name.startswith("patch_embed") else 13
        if name.startswith("blocks."):
            layer = int(name.split(".")[1]) + 1
        undecayed = p.ndim == 1 or name in ("cls_token", "pos_embed")
        assert found[id(p)] == (pytest.approx(0.65 ** (13 - layer)), 0.0 if undecayed else 0.05), name
    assert found[id(model.patch_embed.proj.weight)][0] == pytest.approx(0.0036972, rel=1e-4)


def test_the_class_token_may_learn_like_the_head():
    """As in TEC, the class token has the scale 1.0, and positions and patch embedding have the smallest scale."""
    with torch.device("meta"):
        model = vit_base_patch16()
    model.cls_token_layer_decay = False
    groups = param_groups_layer_decay(model, 0.05, model.no_weight_decay(), layer_decay=0.5)
    found = {id(p): (g["lr_scale"], g["weight_decay"]) for g in groups for p in g["params"]}
    assert found[id(model.cls_token)] == (1.0, 0.0) and found[id(model.head.weight)] == (1.0, 0.05)
    assert found[id(model.pos_embed)][0] == found[id(model.patch_embed.proj.weight)][0] == 0.5**13
    assert found[id(model.blocks[0].mlp.fc1.weight)][0] == 0.5**12


DEEP = SIZES | dict(depth=4)


@pytest.mark.parametrize("trainable_blocks", [0, 1, 3])
def test_frozen_parts_are_frozen_in_eval_mode_and_outside_autograd(trainable_blocks):
    torch.manual_seed(0)
    pool = "token" if trainable_blocks == 0 else "avg"
    model = VisionTransformer(num_classes=5, global_pool=pool, probe=pool == "token", drop_path_rate=0.5, **DEEP)
    model.freeze_all_but(trainable_blocks)
    trained = {f"blocks.{i}." for i in range(4 - trainable_blocks, 4)} | {"head.", "fc_norm."}
    for name, p in model.named_parameters():
        assert p.requires_grad == any(name.startswith(prefix) for prefix in trained), name
    model.train()
    assert [block.training for block in model.blocks] == [i >= 4 - trainable_blocks for i in range(4)]
    assert not model.patch_embed.training and model.head.training and model.norm.training == (trainable_blocks > 0)
    recorded = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, out: recorded.append(out.requires_grad))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=10.0, weight_decay=0.1)
    nn.functional.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.arange(4)).backward()
    optimizer.step()
    assert recorded == [i >= 4 - trainable_blocks for i in range(4)]
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert changed and all(any(k.startswith(prefix) for prefix in trained) for k in changed)
    assert "head.1.weight" in changed or "head.weight" in changed


def test_freezing_keeps_the_layer_ids():
    model = VisionTransformer(num_classes=5, **DEEP)
    model.freeze_all_but(2)
    groups = param_groups_layer_decay(model, 0.05, model.no_weight_decay(), layer_decay=0.5)
    assert {g["lr_scale"] for g in groups} == {1.0, 0.5, 0.25}


def test_impossible_freezes_are_refused():
    model = VisionTransformer(**SIZES)
    with pytest.raises(ValueError, match="at least 0 and below the 2 blocks, got 3"):
        model.freeze_all_but(3)
    with pytest.raises(ValueError, match="trainable_blocks 0 needs global_pool 'token'"):
        model.freeze_all_but(0)


def test_the_probe_s_head_is_mae_s():
    """It is a BatchNorm without parameters (eps 1e-6) and a linear layer of std .01, under MAE's key names."""
    torch.manual_seed(0)
    model = VisionTransformer(num_classes=200, global_pool="token", probe=True, **SIZES)
    norm, linear = model.head
    assert (norm.affine, norm.eps) == (False, 1e-6) and linear.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert {"head.0.running_mean", "head.0.running_var", "head.1.weight", "head.1.bias"} <= model.state_dict().keys()
    x = torch.randn(64, 48)
    expected = (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-6).sqrt() @ linear.weight.T
    torch.testing.assert_close(model.head(x), expected)
