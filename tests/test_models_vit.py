"""The ViT and its classifier: timm's function, MAE's initial weights and decays, and frozen parts."""

import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay
from torch import nn
from torch.testing import assert_close

from models_vit import (
    DropPath,
    PatchEmbed,
    VisionTransformer,
    ViTEncoder,
    patchify,
    unpatchify,
    vit_base_patch16,
    vit_micro_patch4,
)
from tests.test_models_mae_pr import perturbed

SIZES = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3)
DEEP = SIZES | dict(depth=4)


def test_patchify_layout_and_inverse():
    imgs = torch.randn(2, 5, 16, 24)
    patches = patchify(imgs, 8)
    assert patches.shape == (2, 6, 320)
    token = patches[1, 4]  # row 1, column 1
    value = token[(3 * 8 + 7) * 5 + 2]  # of row 3, column 7, channel 2, with the channel fastest
    assert value == imgs[1, 2, 8 + 3, 8 + 7]
    assert torch.equal(unpatchify(patches, 8, (2, 3)), imgs)


@pytest.mark.parametrize("in_chans", [1, 3, 5])
def test_patch_embed_is_the_convolution(in_chans):
    embed = PatchEmbed(8, in_chans, 12).double()
    imgs = torch.randn(2, in_chans, 16, 24, dtype=torch.float64)
    grid = nn.functional.conv2d(imgs, embed.proj.weight, embed.proj.bias, stride=8)
    assert_close(embed(patchify(imgs, 8)), grid.flatten(2).mT)


@torch.no_grad()
@pytest.mark.parametrize("global_pool", ["avg", "token"])
def test_equals_timm_on_the_same_weights(global_pool):
    torch.manual_seed(0)
    options = dict(num_classes=7, global_pool=global_pool, **SIZES)
    theirs = perturbed(timm.models.VisionTransformer(**options)).eval()
    ours = VisionTransformer(**options).double().eval()
    ours.load_state_dict(theirs.state_dict())  # the same names, all of them
    imgs = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    assert_close(ours(imgs), theirs(imgs), rtol=1e-9, atol=1e-9)
    features = ours.forward_features(imgs)
    assert_close(features, theirs.forward_features(imgs), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("layer", "inputs", "outputs"),
    [
        ("blocks.0.attn.qkv", 192, 576),
        ("blocks.0.attn.proj", 192, 192),
        ("blocks.0.mlp.fc1", 192, 768),
        ("patch_embed.proj", 3 * 8 * 8, 192),  # as a linear layer on the flattened patch
    ],
)
def test_linear_layers_are_xavier_uniform_at_first(layer, inputs, outputs):
    torch.manual_seed(0)
    model = ViTEncoder(img_size=32, patch_size=8, embed_dim=192, depth=1, num_heads=3)
    bound = (6 / (inputs + outputs)) ** 0.5
    weight = model.get_submodule(layer).weight
    assert 0.98 * bound < weight.abs().max() <= bound
    assert not model.blocks[0].attn.qkv.bias.any()


@pytest.mark.parametrize("rate", [0.3, 0.9])
def test_drop_path_compiled_drops_images_at_its_rate(rate):
    """Eager code is timm's, with the same draws. Compiled code draws its own."""
    torch.manual_seed(0)
    drop_path = DropPath(rate)
    x = torch.ones(4000, 2, 3, requires_grad=True)
    compiled = torch.compile(drop_path, fullgraph=True, dynamic=False, backend="aot_eager")(x)
    kept = compiled != 0
    of_images = kept[:, :1, :1]
    assert torch.equal(kept, of_images.expand_as(x))
    assert_close(compiled, kept / (1 - rate))
    share = of_images.float().mean()
    assert share.item() == pytest.approx(1 - rate, abs=0.03)  # 4 sigma
    compiled.sum().backward()
    assert torch.equal(x.grad, compiled)
    torch.manual_seed(1)
    eager = drop_path(x)
    torch.manual_seed(1)
    assert torch.equal(eager, timm.layers.DropPath(rate)(x))
    assert drop_path.eval()(x) is x


def test_drop_path_grows_linearly_from_0():
    rates = [getattr(block.drop_path, "drop_prob", 0) for block in vit_micro_patch4(drop_path_rate=0.3).blocks]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3])


def test_unknown_pooling_is_refused():
    with pytest.raises(ValueError, match="unknown global_pool 'max', choose from avg, token"):
        VisionTransformer(**SIZES, global_pool="max")


# --------------------------------------------------------------------------------------------- decays and frozen parts


def scale_and_decay(model, layer_decay):
    """Returns {parameter's name: (lr_scale, weight_decay)} of the trained parameters."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {}
    for group in param_groups_layer_decay(model, 0.05, model.no_weight_decay(), layer_decay=layer_decay):
        for parameter in group["params"]:
            found[names[parameter]] = (group["lr_scale"], group["weight_decay"])
    return found


@pytest.mark.parametrize("global_pool", ["avg", "token"])
def test_layer_scales_and_decays_are_mae_s(global_pool):
    """The scale is .65^(13 - id), with id 0 for the embeddings, i + 1 for block i, and 13 for norm and head.

    Parameters with one dimension, the class token and the positions do not decay.
    """
    with torch.device("meta"):
        model = vit_base_patch16(global_pool=global_pool)
    found = scale_and_decay(model, 0.65)
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        is_token = name in ("cls_token", "pos_embed")
        if name.startswith("blocks."):
            layer = int(name.split(".")[1]) + 1
        elif is_token or name.startswith("patch_embed"):
            layer = 0
        else:
            layer = 13
        decay = 0.0 if is_token or parameter.ndim == 1 else 0.05
        assert found[name] == (pytest.approx(0.65 ** (13 - layer)), decay), name


@pytest.mark.parametrize("trainable_blocks", [0, 1, 3, 4])
def test_frozen_parts_are_frozen_in_eval_mode_and_outside_autograd(trainable_blocks):
    torch.manual_seed(0)
    options = dict(global_pool="avg")
    if trainable_blocks == 0:
        options = dict(global_pool="token", probe=True)
    model = VisionTransformer(num_classes=5, drop_path_rate=0.5, **DEEP, **options)
    model.freeze_all_but(trainable_blocks)
    model.train()
    is_trained = [i >= 4 - trainable_blocks for i in range(4)]
    prefixes = ("head.", "fc_norm.")
    for i in range(4):
        if is_trained[i]:
            prefixes += (f"blocks.{i}.",)
    if trainable_blocks == 4:
        prefixes = ("",)  # all
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == name.startswith(prefixes), name
    assert [block.training for block in model.blocks] == is_trained
    assert model.patch_embed.training == (trainable_blocks == 4)
    assert model.head.training
    assert model.norm.training == (trainable_blocks > 0)
    in_graph = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, output: in_graph.append(output.requires_grad))
    model(torch.randn(4, 3, 32, 32))
    assert in_graph == is_trained


def test_the_probe_s_head_is_mae_s():
    """It is a BatchNorm without parameters (eps 1e-6) and a linear layer of std .01, under MAE's key names."""
    torch.manual_seed(0)
    model = VisionTransformer(num_classes=200, global_pool="token", probe=True, **SIZES)
    head = model.head
    assert set(head.state_dict()) >= {"0.running_mean", "0.running_var", "1.weight", "1.bias"}
    weight = head[1].weight
    assert weight.std().item() == pytest.approx(0.01, rel=0.05)
    x = torch.randn(64, 48) / 1000  # so small that eps shows
    variance = x.var(dim=0, unbiased=False)
    normalised = (x - x.mean(dim=0)) / (variance + 1e-6).sqrt()
    assert_close(head(x), normalised @ weight.T)
