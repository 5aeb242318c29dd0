"""Frozen encoders and the heads on them."""

import copy
from functools import partial

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import main_pretrain
import monitor
from downstream.probe import timm_encoders
from downstream.probe.models import AttentiveProbe, HeadGrid, LinearProbe, open_encoder
from downstream.probe.timm_encoders import open_timm_model
from encoders.load import load_encoder
from frameworks import registry
from frameworks.teacher import Teacher
from models_vit import MICRO, VisionTransformer, vit_micro_patch4, vit_tiny_patch16
from util.run.errors import CheckpointError
from util.run.files.checkpoint import save_checkpoint

VIT = "vit_tiny_patch16_224"


def shake(model):
    """Changes all weights, also biases and tables, which begin as zeros."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model.eval()


def write_pretrained(folder, name, **changes):
    """Writes a checkpoint of an untrained model. Returns the model."""
    settings = vars(main_pretrain.get_args_parser().parse_args(["--model", name])) | changes
    torch.manual_seed(0)
    model = shake(registry.build_model(settings))
    settings["input_size"] = list(model.img_size)
    settings["patch_size"] = 4
    save_checkpoint(folder, 1, {"model": model.state_dict()}, {"settings": settings})
    return model


def options_of(name, monkeypatch):
    """The settings that a framework needs for a model without files."""
    if name.startswith("tec"):
        monkeypatch.setattr("frameworks.models_tec_pr.open_teacher", lambda *_: Teacher(MICRO))
        return {"teacher": "t", "throw_ratio": 0.3}
    if name.startswith("simmim_swin"):
        return {"throw_ratio": 0.0}
    return {"throw_ratio": 0.3}


def check_features(encoder, model):
    """The encoder has the features of the model of its run."""
    torch.manual_seed(0)
    imgs = torch.randn(2, 3, *model.img_size)
    assert encoder.img_size == model.img_size
    with torch.no_grad():
        expected = monitor.encode(model, imgs)
    vectors = encoder.vectors(imgs)
    assert len(vectors) == len(expected)
    found = {}
    for name, value in vectors.items():
        assert not value.requires_grad
        _, feature = name.split()
        found[feature] = value
    assert_close(found, dict(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in registry.MODELS if "_micro_" in name])
def test_an_encoder_of_every_framework_opens_to_the_features_of_its_run(name, tmp_path, monkeypatch):
    model = write_pretrained(tmp_path, name, **options_of(name, monkeypatch))
    check_features(open_encoder(tmp_path), model)


def test_an_encoder_of_rectangles_opens(tmp_path):
    model = write_pretrained(tmp_path, "mae_vit_micro_patch4", input_size=[32, 48])
    check_features(open_encoder(tmp_path), model)


@pytest.mark.parametrize("pool", ["avg", "token"])
def test_a_fine_tuned_classifier_opens_without_its_head(pool, tmp_path):
    model = vit_micro_patch4(num_classes=3, global_pool=pool).eval()
    statistics = {"mean": [0.5] * 3, "std": [0.25] * 3}
    save_checkpoint(tmp_path, 1, {"model": model.state_dict()}, {"settings": statistics})
    encoder = open_encoder(tmp_path)
    assert encoder.pixel_settings == {"pixels": None, **statistics}
    imgs = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        tokens = model.forward_features(imgs)  # with mean pooling there is no norm before it
    found = encoder(imgs)[4]
    assert_close(found.patches, tokens[:, 1:])
    assert_close(found.cls, tokens[:, 0])


@pytest.mark.parametrize("blocks", [[0], [5, 1]])
def test_blocks_that_do_not_exist_are_refused(tmp_path, blocks):
    write_pretrained(tmp_path, "mae_vit_micro_patch4")
    with pytest.raises(ValueError, match="--blocks must lie between 1 and 4"):
        open_encoder(tmp_path).read_blocks(blocks)


def test_a_checkpoint_opens_at_another_size(tmp_path):
    write_pretrained(tmp_path, "mae_vit_micro_patch4")
    encoder = open_encoder(tmp_path, 48)
    found = encoder(torch.randn(1, 3, 48, 48))[4]
    assert found.patches.shape == (1, 144, 96)


@pytest.mark.parametrize("by_timm", [False, True])
def test_timm_s_files_open_here_and_by_timm(tmp_path, by_timm):
    theirs = shake(timm.create_model(VIT, num_classes=5, img_size=32))
    path = tmp_path / "tiny.pth"
    torch.save(theirs.state_dict(), path)
    if by_timm:
        encoder = open_timm_model(VIT, str(path), 32)
        assert encoder.img_size == (32, 32)
        assert encoder.pixel_settings["mean"] == (0.5, 0.5, 0.5)
    else:
        encoder = open_encoder(path)
    encoder.read_blocks([3, 12])
    imgs = torch.randn(2, 3, 32, 32)
    tokens = encoder(imgs)
    with torch.no_grad():
        last = theirs.forward_features(imgs)
        ((patches, prefix),) = theirs.forward_intermediates(
            imgs,
            [2],
            return_prefix_tokens=True,
            norm=True,
            output_fmt="NLC",
            intermediates_only=True,
        )
    third = torch.cat([prefix, patches], dim=1)
    for block, expected in ((3, third), (12, last)):
        found = torch.cat([tokens[block].cls[:, None], tokens[block].patches], dim=1)
        assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_statistics_in_a_file_win_over_timm_s(tmp_path):
    statistics = {"mean": [0.1, 0.2, 0.3], "std": [0.3, 0.3, 0.3]}
    model = vit_tiny_patch16(img_size=32, num_classes=5, global_pool="token")
    meta = {"settings": {"model": "vit_tiny_patch16", **statistics}, "pixels": "uint16"}
    path = save_checkpoint(tmp_path, "best", {"model": model.state_dict()}, meta)
    encoder = open_timm_model(VIT, str(path), 32)
    assert encoder.pixel_settings == {"pixels": "uint16", **statistics}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"qk_norm": True}, "blocks.0.attn.q_norm"),
        ({"reg_tokens": 4, "no_embed_class": True}, "reg_token"),
        ({"pre_norm": True}, "norm_pre.weight"),
    ],
)
def test_weights_with_parts_that_the_model_lacks_are_refused(options, named, tmp_path, monkeypatch):
    """Of a ViT of two blocks. Its head of other classes is no such part."""
    create = timm.create_model
    sizes = {"img_size": 32, "depth": 2}
    monkeypatch.replace_in(timm_encoders, "timm.create_model", partial(create, **sizes))
    plain = create(VIT, num_classes=7, **sizes).state_dict()
    torch.save(plain, tmp_path / "plain.pth")
    encoder = open_timm_model(VIT, str(tmp_path / "plain.pth"))
    assert encoder.depth == 2
    other = plain | create(VIT, **sizes, **options).state_dict()
    other["pos_embed"] = plain["pos_embed"]  # of the right shape, whatever the prefix is
    torch.save(other, tmp_path / "other.pth")
    with pytest.raises(CheckpointError, match=f"other.pth'.* holds another kind of encoder: .* has no {named}"):
        open_timm_model(VIT, str(tmp_path / "other.pth"))
    ours = VisionTransformer(
        img_size=32,
        patch_size=16,
        embed_dim=192,
        depth=2,
        num_heads=3,
        num_classes=5,
    )
    with pytest.raises(CheckpointError, match="other.pth"):
        load_encoder(ours, tmp_path / "other.pth")


@pytest.mark.parametrize(
    "name",
    [
        "resnet18",
        "convnext_atto",
        "swin_tiny_patch4_window7_224",
        "beit_base_patch16_224",
    ],
)
def test_heads_and_computed_buffers_of_timm_s_files_are_ignored(name):
    """Of ConvNeXt's head, `head.norm` is a part of the network without classes, and `head.fc` is not."""
    with torch.device("meta"):
        whole = timm.create_model(name).state_dict()
        network = timm.create_model(name, num_classes=0)
    ours = network.state_dict()
    ignored = whole.keys() - ours.keys()
    for key in whole:
        if "_bias_table" in key:
            ignored.add(key.replace("_bias_table", "_index"))
    timm_encoders.refuse_other_network(network, list(ignored), "the file")
    part = next(key for key in ours if key.endswith("weight") and key.count(".") > 2)
    with pytest.raises(CheckpointError, match="has no .*_extra"):
        timm_encoders.refuse_other_network(network, [f"{part}_extra"], "the file")


def open_small(monkeypatch, name, **options):
    """Opens a model of timm of these sizes. Returns (encoder, the network itself)."""
    torch.manual_seed(0)
    network = timm.create_model(name, num_classes=0, **options).eval()
    monkeypatch.replace_in(timm_encoders, "timm.create_model", lambda *_, **__: network)
    return open_timm_model(name), network


def test_registers_of_timm_s_vits_are_no_patches(monkeypatch):
    encoder, network = open_small(monkeypatch, "vit_small_patch16_dinov3.lvd1689m", img_size=32, depth=2)
    imgs = torch.randn(2, 3, 32, 32)
    x = network.forward_features(imgs)  # a class token, then four registers
    vectors = encoder.vectors(imgs)
    assert_close(vectors["2 cls"], x[:, 0])
    assert_close(vectors["2 mean"], x[:, 5:].mean(dim=1))


SWIN = {"img_size": 64, "window_size": 2, "depths": (1, 1, 1, 1)}


@pytest.mark.parametrize(
    ("name", "options", "side", "places"),
    [
        ("test_resnet", {}, 32, (2, 3)),
        ("swin_tiny_patch4_window7_224", SWIN, 64, (1, 2)),
    ],
)
def test_networks_of_timm_without_class_token_have_the_mean_of_their_map(monkeypatch, name, options, side, places):
    encoder, network = open_small(monkeypatch, name, **options)
    imgs = torch.randn(2, 3, side, side)
    vectors = encoder.vectors(imgs)
    assert list(vectors) == ["0 mean"]
    assert_close(vectors["0 mean"], network.forward_features(imgs).mean(dim=places))
    with pytest.raises(ValueError, match="--blocks .* is for ViTs with a class token"):
        encoder.read_blocks([1])


def test_networks_of_timm_that_read_any_size_read_the_given_one(tmp_path):
    network = timm.create_model("test_resnet").eval()
    path = tmp_path / "resnet.pth"
    torch.save(network.state_dict(), path)
    encoder = open_timm_model("test_resnet", str(path), 64)
    assert encoder.img_size == (64, 64)
    imgs = torch.randn(2, 3, 64, 64)
    (mean,) = encoder.vectors(imgs).values()
    assert_close(mean, network.forward_features(imgs).mean(dim=(2, 3)))


def test_models_that_timm_does_not_know_are_refused():
    with pytest.raises(ValueError, match="'vit_bse' is no model of timm"):
        open_timm_model("vit_bse")


def test_pretrained_weights_of_timm_need_a_network(monkeypatch):
    def no_network(*_, **__):
        raise OSError("no route to host")

    monkeypatch.replace_in(timm_encoders, "timm.create_model", no_network)
    with pytest.raises(ValueError, match="no route to host.*; without a network"):
        open_timm_model(VIT)


# --------------------------------------------------------------------------------------------------------------- heads

GRID = [(1e-3, 0.05), (1e-2, 5e-4), (5e-2, 1e-3)]


def randomised_grid(kind, dim, std=1.0):
    torch.manual_seed(0)
    grid = HeadGrid(kind, dim, 5, GRID).double()
    for parameter in grid.parameters():
        nn.init.normal_(parameter, std=std)
    return grid


def explicit_attentive(head, x, num_heads):
    """CAPI's head as it is written: keys and values of all tokens, with a bias, and one attention per head."""
    keys = x @ head.key.T + 0.7  # any bias of the keys cancels
    values = x @ head.value.T + head.value_bias
    pooled = []
    for channels in torch.arange(x.shape[2]).chunk(num_heads):
        logits = keys[..., channels] @ head.query[channels] / len(channels) ** 0.5
        shares = logits.softmax(dim=1)
        weighted = shares[..., None] * values[..., channels]
        pooled.append(weighted.sum(dim=1))
    return torch.cat(pooled, dim=1) @ head.weight.T + head.bias


@pytest.mark.parametrize(
    ("dim", "num_heads"),
    [
        (128, 2),
        (96, 2),
        (36, 1),
    ],
)
def test_folded_heads_equal_explicit_ones_in_value_and_gradient(dim, num_heads):
    grid = randomised_grid(AttentiveProbe, dim, std=dim**-0.25)
    x = torch.randn(3, 7, dim, dtype=torch.float64)
    factors = torch.randn(3, 3, 5, dtype=torch.float64)
    assert grid.num_heads == num_heads
    folded = grid(x)
    logits = [explicit_attentive(head, x, num_heads) for head in grid.heads]
    explicit = torch.stack(logits)
    assert_close(folded, explicit, rtol=1e-10, atol=1e-10)
    parameters = list(grid.parameters())
    gradients = torch.autograd.grad((folded * factors).sum(), parameters)
    expected = torch.autograd.grad((explicit * factors).sum(), parameters)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
        assert theirs.abs().max() > 1e-6


def train(grid, x, labels):
    """Twenty steps; the loss is the mean over images and heads. AdamW does not see its scale, but for epsilon."""
    optimizer = torch.optim.AdamW(grid.parameter_groups(2.0), betas=(0.9, 0.95))
    for _ in range(20):
        logits = grid(x)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.repeat(len(logits)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (AttentiveProbe, (6, 16, 12)),
        (LinearProbe, (6, 12)),
    ],
)
def test_a_grid_trains_each_head_as_if_it_were_alone(kind, shape):
    together = randomised_grid(kind, 12)  # large gradients, beside which epsilon is nothing
    before = copy.deepcopy(together.heads)
    x = torch.randn(shape, dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 3, 4, 0])
    train(together, x, labels)
    distances = []
    for i, pair in enumerate(GRID):
        alone = HeadGrid(kind, 12, 5, [pair]).double()
        (head,) = alone.heads
        head.load_state_dict(before[i].state_dict())
        train(alone, x, labels)
        ours = together.heads[i]
        assert_close(ours.state_dict(), head.state_dict(), rtol=1e-3, atol=1e-5)
        moved = ours.weight - before[i].weight
        distances.append(moved.abs().mean())
    assert distances == sorted(distances)  # by their learning rates


def test_groups_of_the_optimizer_hold_every_parameter_once_and_decay_no_bias():
    grid = HeadGrid(AttentiveProbe, 12, 5, GRID)
    names = {parameter: name for name, parameter in grid.named_parameters()}
    settings = {}
    for group in grid.parameter_groups(4.0):
        for parameter in group["params"]:
            assert names[parameter] not in settings
            settings[names[parameter]] = (group["base_lr"], group["weight_decay"])
    assert settings.keys() == set(names.values())
    for i, (lr, weight_decay) in enumerate(GRID):
        for name in ("query", "key", "value", "weight"):
            assert settings[f"heads.{i}.{name}"] == (4 * lr, weight_decay)
        for name in ("value_bias", "bias"):
            assert settings[f"heads.{i}.{name}"] == (4 * lr, 0.0)


def test_first_weights_are_small_and_equal():
    torch.manual_seed(0)
    grid = HeadGrid(AttentiveProbe, 64, 50, GRID)
    first = grid.heads[0].state_dict()
    for head in grid.heads:
        assert_close(head.state_dict(), first, rtol=0, atol=0)
    for name, value in first.items():
        std = 0.02
        if "bias" in name:
            std = 0.0
        assert value.std().item() == pytest.approx(std, rel=0.25)
