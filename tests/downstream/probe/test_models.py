"""Frozen encoders and the heads on them."""

import pytest
import timm
import torch
from torch.nn import functional as F

import main_pretrain
import monitor
from downstream.probe import models as models_probe
from downstream.probe.models import (
    AttentiveHead,
    HeadGrid,
    LinearHead,
    open_encoder,
    open_timm_model,
    refuse_other_network,
)
from encoders.load import load_encoder
from frameworks import registry
from frameworks.teacher import Teacher
from models_vit import MICRO, VisionTransformer, vit_micro_patch4, vit_tiny_patch16
from tests.runs import info_of_run
from util.costs import count_gmac
from util.data.transforms import IMAGENET_MEAN, IMAGENET_STD
from util.run.checkpoint import CheckpointError, save_checkpoint

MICRO_MODELS = [name for name in registry.MODELS if "_micro_" in name]


def a_model(name, **changes):
    settings = vars(main_pretrain.get_args_parser().parse_args(["--model", name])) | changes
    torch.manual_seed(0)
    model = registry.build_model(settings).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # also biases and tables, which begin as zeros
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model, settings


@pytest.mark.parametrize("size", [None, [32, 48]])
@pytest.mark.parametrize("name", MICRO_MODELS)
def test_an_encoder_of_every_framework_opens_to_the_features_of_its_run(name, size, tmp_path, monkeypatch):
    monkeypatch.setattr("frameworks.models_tec_pr.open_teacher", lambda *_: Teacher(**MICRO))
    if size and "swin" in name:
        pytest.skip("windows must divide the stages")
    throw_ratio = 0.0 if name.startswith("simmim_swin") else 0.3
    changes = {"input_size": size, "throw_ratio": throw_ratio, "mask_ratio": 0.75}
    model, settings = a_model(name, **changes, **({"teacher": "t"} if name.startswith("tec") else {}))
    settings["input_size"] = list(model.img_size)
    save_checkpoint(tmp_path, 1, {"model": model.state_dict()}, {"settings": settings | {"patch_size": 4}})
    encoder = open_encoder(tmp_path)
    imgs = torch.randn(2, 3, *model.img_size, generator=torch.Generator().manual_seed(0))
    assert encoder.img_size == model.img_size and len(encoder.sha256) == 64 and not encoder.training
    with torch.no_grad():
        expected = monitor.encode(model, imgs)
    found = encoder.vectors(imgs)
    assert {key.split()[1] for key in found} == expected.keys()
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key.split()[1]], rtol=1e-4, atol=1e-5)
        assert not value.requires_grad


@pytest.mark.parametrize("pool", ["avg", "token"])
def test_a_fine_tuned_classifier_opens_without_its_head(pool, tmp_path):
    model = vit_micro_patch4(num_classes=3, global_pool=pool).eval()
    save_checkpoint(tmp_path, 1, {"model": model.state_dict()}, {"settings": {"mean": [0.5] * 3, "std": [0.25] * 3}})
    encoder = open_encoder(tmp_path)
    assert encoder.pixel_settings == {"pixels": None, "mean": [0.5] * 3, "std": [0.25] * 3}
    imgs = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        tokens = model.forward_features(imgs)  # with mean pooling there is no norm before it
    torch.testing.assert_close(encoder(imgs)[4].patches, tokens[:, 1:])
    torch.testing.assert_close(encoder(imgs)[4].cls, tokens[:, 0])


def test_inner_blocks_go_through_the_final_norm(tmp_path):
    model, settings = a_model("mae_vit_micro_patch4")
    save_checkpoint(tmp_path, 1, {"model": model.state_dict()}, {})
    encoder = open_encoder(tmp_path)
    encoder.read_blocks([4, 2, 2])
    imgs = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        x = model.prepend_cls_token(model.patch_embed(model.patchify(imgs)) + model.pos_embed[:, 1:])
        after = [x := block(x) for block in model.blocks]
    found = encoder(imgs)
    assert list(found) == [2, 4]
    for block, tokens in found.items():
        torch.testing.assert_close(
            torch.cat([tokens.cls[:, None], tokens.patches], dim=1), model.norm(after[block - 1])
        )
    for odd in ([0], [5, 1]):
        with pytest.raises(ValueError, match="--blocks must lie between 1 and 4"):
            encoder.read_blocks(odd)


def test_a_checkpoint_opens_at_another_size(tmp_path):
    model, _ = a_model("mae_vit_micro_patch4")
    save_checkpoint(tmp_path, 1, {"model": model.state_dict()}, {})
    assert open_encoder(tmp_path, 48)(torch.randn(1, 3, 48, 48))[4].patches.shape == (1, 144, 96)


def test_timm_s_files_open_here_and_by_timm(tmp_path):
    torch.manual_seed(0)
    theirs = timm.create_model("vit_tiny_patch16_224", num_classes=5, img_size=32).eval()
    for parameter in theirs.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    torch.save(theirs.state_dict(), tmp_path / "tiny.pth")
    imgs = torch.randn(2, 3, 32, 32)
    ours = open_encoder(tmp_path / "tiny.pth")
    made = open_timm_model("vit_tiny_patch16_224", str(tmp_path / "tiny.pth"), 32)
    with torch.no_grad():
        for encoder in (ours, made):
            encoder.read_blocks([3, 12])
            inner = theirs.forward_intermediates(
                imgs, [2], return_prefix_tokens=True, norm=True, output_fmt="NLC", intermediates_only=True
            )[0]
            found, last = encoder(imgs), theirs.forward_features(imgs)
            for block, cls, patches in ((3, inner[1][:, 0], inner[0]), (12, last[:, 0], last[:, 1:])):
                torch.testing.assert_close(found[block].cls, cls, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(found[block].patches, patches, rtol=1e-4, atol=1e-4)
    assert made.pixel_settings["mean"] == (0.5, 0.5, 0.5) and made.img_size == (32, 32)
    assert made.notes[0].startswith("note: pixel mean [0.5, 0.5, 0.5] and std [0.5, 0.5, 0.5] are timm's for vit_tiny")


@pytest.mark.parametrize("statistics", [{"mean": [0.1, 0.2, 0.3], "std": [0.3] * 3}, {}])
def test_the_statistics_in_a_file_win_over_timm_s(statistics, tmp_path):
    """Checkpoints from before statistics were stored had ImageNet's."""
    model = vit_tiny_patch16(img_size=32, num_classes=5, global_pool="token")
    meta = {"settings": {"model": "vit_tiny_patch16", **statistics}, "pixels": "uint16" if statistics else "uint8"}
    path = save_checkpoint(tmp_path, "best", {"model": model.state_dict()}, meta)
    encoder = open_timm_model("vit_tiny_patch16_224", str(path), 32)
    mean, std = statistics.values() or (IMAGENET_MEAN, IMAGENET_STD)
    expected = {"pixels": meta["pixels"], "mean": pytest.approx(mean), "std": pytest.approx(std)}
    assert encoder.pixel_settings == expected
    assert f"note: pixel mean {list(mean)} and std {list(std)} are those of '{path}'" in encoder.notes


@pytest.mark.parametrize("epoch", [2.5, 100])
def test_an_unfinished_encoder_is_named(tmp_path, epoch):
    model = vit_tiny_patch16(img_size=32, global_pool="token")
    info = info_of_run(5, epoch=epoch, settings={"model": "vit_tiny_patch16", "epochs": 100})
    path = save_checkpoint(tmp_path, 5, {"model": model.state_dict()}, info.to_json())
    warning = f"warning: the training of {path} is not finished: it is at step 5, epoch 2.5 of 100"
    assert (warning in open_encoder(path).notes) == (epoch < 100)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"init_values": 0.1}, "blocks.0.ls1.gamma"),
        ({"qk_norm": True}, "blocks.0.attn.q_norm.weight"),
        ({"reg_tokens": 4, "no_embed_class": True}, "reg_token"),
        ({"pre_norm": True}, "norm_pre.weight"),
        ({"depth": 3}, "blocks.2.norm1.weight"),
    ],
)
def test_weights_with_parts_that_the_model_lacks_are_refused(options, named, tmp_path, monkeypatch):
    """Of a ViT of two blocks. Its head of other classes is no such part."""
    exact, sizes = timm.create_model, dict(img_size=32, depth=2)
    monkeypatch.replace_in(models_probe, "timm.create_model", lambda name, **own: exact(name, **{**sizes, **own}))
    plain = exact("vit_tiny_patch16_224", num_classes=7, **sizes).state_dict()
    torch.save(plain, tmp_path / "plain.pth")
    assert open_timm_model("vit_tiny_patch16_224", str(tmp_path / "plain.pth")).depth == 2
    other = plain | exact("vit_tiny_patch16_224", **{**sizes, **options}).state_dict()
    other["pos_embed"] = plain["pos_embed"]  # of the right shape, whatever the prefix is
    torch.save(other, tmp_path / "other.pth")
    with pytest.raises(CheckpointError, match=f"other.pth'.* holds another kind of encoder: .* has no {named}"):
        open_timm_model("vit_tiny_patch16_224", str(tmp_path / "other.pth"))
    ours = VisionTransformer(img_size=32, patch_size=16, embed_dim=192, depth=2, num_heads=3, num_classes=5)
    load_encoder(ours, tmp_path / "plain.pth")
    with pytest.raises(CheckpointError, match=f"another kind of encoder: this VisionTransformer has no {named}"):
        load_encoder(ours, tmp_path / "other.pth")


@pytest.mark.parametrize("name", ["resnet18", "convnext_atto", "swin_tiny_patch4_window7_224", "beit_base_patch16_224"])
def test_heads_and_computed_buffers_of_timm_s_files_are_ignored(name):
    """Of ConvNeXt's head, `head.norm` is a part of the network without classes, and `head.fc` is not."""
    with torch.device("meta"):
        whole, network = timm.create_model(name), timm.create_model(name, num_classes=0)
    unexpected = sorted(whole.state_dict().keys() - network.state_dict().keys())
    assert unexpected
    computed = [key.replace("_bias_table", "_index") for key in whole.state_dict() if "_bias_table" in key]
    refuse_other_network(network, [*unexpected, *computed], "the file")
    block = next(key for key in network.state_dict() if key.endswith("weight") and key.count(".") > 2)
    with pytest.raises(CheckpointError, match="has no .*_extra"):
        refuse_other_network(network, [f"{block}_extra"], "the file")


@pytest.mark.parametrize("name", ["test_resnet", "swin_tiny_patch4_window7_224", "vit_small_patch16_dinov3.lvd1689m"])
def test_other_networks_of_timm_have_what_their_features_have(name, monkeypatch):
    exact = timm.create_model
    sizes = {"vit": dict(img_size=32, depth=2), "swin": dict(img_size=64, window_size=2, depths=(1, 1, 1, 1))}
    options = sizes.get(name.partition("_")[0], {})
    torch.manual_seed(0)
    network = exact(name, num_classes=0, **options).eval()
    monkeypatch.replace_in(models_probe, "timm.create_model", lambda *_, **__: network)
    encoder = open_timm_model(name)
    imgs = torch.randn(2, 3, 64 if "swin" in name else 32, 64 if "swin" in name else 32)
    found = encoder.vectors(imgs)
    x = network.forward_features(imgs)
    if "vit" in name:  # a class token, then four registers
        expected = {"2 cls": x[:, 0], "2 mean": x[:, 5:].mean(dim=1)}
    else:
        expected = {"0 mean": x.mean(dim=(1, 2) if "swin" in name else (2, 3))}
        with pytest.raises(ValueError, match="--blocks .* is for ViTs with a class token"):
            encoder.read_blocks([1])
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value)


VIT = "vit_tiny_patch16_224"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vit_bse", None, "'vit_bse' is no model of timm"),
        (VIT, None, "with its pre-trained weights: OSError: no route to host; without a network, download"),
        (VIT, "missing", "^no weights at '.*/w.pth': give the path of a file, or none for those of timm$"),
        (VIT, "not a checkpoint", r"make 'vit_tiny_patch16_224' with '.*w.pth': \w+Error: (?!.*network)"),
        (VIT, {"a": torch.zeros(1)}, "w.pth' holds no 'vit_tiny_patch16_224': it lacks cls_token, pos_embed"),
        ("", {"a": torch.zeros(1)}, "holds no encoder of a known kind"),
    ],
)
def test_what_cannot_be_opened_is_named(tmp_path, monkeypatch, name, content, message):
    """Without a network. name: of a model of timm, or "" for any file."""

    def no_network(name, pretrained, **options):
        if pretrained:
            raise OSError("no route to host")
        return create(name, **options)

    create, path = timm.create_model, tmp_path / "w.pth"
    monkeypatch.replace_in(models_probe, "timm.create_model", no_network)
    if isinstance(content, dict):
        torch.save(content, path)
    elif content != "missing":
        path.write_text(content or "")
    with pytest.raises(ValueError, match=message):
        open_timm_model(name, None if content is None else str(path)) if name else open_encoder(path)


def test_registers_are_no_part_of_our_encoders(tmp_path):
    weights = vit_micro_patch4(num_classes=3, global_pool="token").state_dict() | {"reg_token": torch.zeros(1, 4, 96)}
    torch.save(weights, tmp_path / "registers.pth")
    with pytest.raises(CheckpointError, match="this ViTEncoder has no reg_token"):
        open_encoder(tmp_path / "registers.pth")


# --------------------------------------------------------------------------------------------------------------- heads

GRID = [(1e-3, 0.05), (1e-2, 5e-4), (5e-2, 1e-3)]


def explicit_attentive(head, x, num_heads):
    """CAPI's head as it is written: keys and values of all tokens, with a bias, and one attention per head."""
    dim = x.shape[2]
    keys, values = x @ head.key.T + 0.7, x @ head.value.T + head.value_bias  # any bias of the keys cancels
    pooled = []
    for channels in torch.arange(dim).chunk(num_heads):
        logits = keys[..., channels] @ head.query[channels] / len(channels) ** 0.5
        pooled.append((logits.softmax(dim=1)[..., None] * values[..., channels]).sum(dim=1))
    return torch.cat(pooled, dim=1) @ head.weight.T + head.bias


@pytest.mark.parametrize(("dim", "num_heads"), [(128, 2), (96, 2), (192, 3), (36, 1), (768, 12)])
def test_folded_heads_equal_explicit_ones_in_value_and_gradient(dim, num_heads):
    torch.manual_seed(0)
    grid = HeadGrid(AttentiveHead, dim, 5, GRID).double()
    for parameter in grid.parameters():
        parameter.data = torch.randn_like(parameter) / dim**0.25
    x, y = torch.randn(3, 7, dim, dtype=torch.float64), torch.randn(3, 3, 5, dtype=torch.float64)
    assert grid.num_heads == num_heads
    for folded in (True, False):
        logits = grid(x) if folded else torch.stack([explicit_attentive(head, x, num_heads) for head in grid.heads])
        gradients = torch.autograd.grad((logits * y).sum(), list(grid.parameters()))
        if folded:
            first = logits, gradients
    torch.testing.assert_close(first[0], logits, rtol=1e-10, atol=1e-10)
    for ours, expected in zip(first[1], gradients, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)
        assert expected.abs().max() > 1e-6


def test_linear_heads_are_linear():
    grid = HeadGrid(LinearHead, 12, 5, GRID)
    for parameter in grid.parameters():
        parameter.data = torch.randn_like(parameter)
    x = torch.randn(4, 12)
    expected = torch.stack([F.linear(x, head.weight, head.bias) for head in grid.heads])
    torch.testing.assert_close(grid(x), expected)


@pytest.mark.parametrize("kind", [AttentiveHead, LinearHead])
def test_a_grid_trains_each_head_as_if_it_were_alone(kind):
    torch.manual_seed(0)
    x = torch.randn(6, 16, 12) if kind is AttentiveHead else torch.randn(6, 12)
    labels = torch.tensor([0, 1, 2, 3, 4, 0])
    together = HeadGrid(kind, 12, 5, GRID).double()
    for parameter in together.parameters():  # large gradients, beside which epsilon is nothing
        parameter.data = torch.randn_like(parameter)
    first = together.state_dict()
    first = {name: value.clone() for name, value in first.items()}
    train(together, x.double(), labels, len(GRID))
    for i, pair in enumerate(GRID):
        alone = HeadGrid(kind, 12, 5, [pair]).double()
        prefix = f"heads.{i}."
        own = {name.replace(prefix, "heads.0."): value for name, value in first.items() if name.startswith(prefix)}
        alone.load_state_dict(own)
        train(alone, x.double(), labels, 1)
        for ours, theirs in zip(together.heads[i].parameters(), alone.heads[0].parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    moved = [(head.weight - first[f"heads.{i}.weight"]).abs().mean() for i, head in enumerate(together.heads)]
    assert moved[0] < moved[1] < moved[2]  # by their learning rates


def train(grid, x, labels, num_heads):
    """Twenty steps; the loss is the mean over images and heads. AdamW does not see its scale, but for epsilon."""
    groups = grid.parameter_groups(2.0)
    assert len(groups) == 2 * num_heads
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    for _ in range(20):
        logits = grid(x)
        F.cross_entropy(logits.flatten(0, 1), labels.repeat(num_heads)).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_groups_of_the_optimizer_hold_every_parameter_once_and_decay_no_bias():
    grid = HeadGrid(AttentiveHead, 12, 5, GRID)
    groups, names = grid.parameter_groups(4.0), {p: name for name, p in grid.named_parameters()}
    assert sorted(names[p] for group in groups for p in group["params"]) == sorted(names.values())
    for i, (lr, weight_decay) in enumerate(GRID):
        own = [group for group in groups if names[group["params"][0]].startswith(f"heads.{i}.")]
        assert [(group["base_lr"], group["weight_decay"]) for group in own] == [(4 * lr, weight_decay), (4 * lr, 0.0)]
        assert {names[p].rpartition(".")[2] for p in own[1]["params"]} == {"value_bias", "bias"}


def test_the_sizes_and_the_cost_of_capi_s_heads():
    with torch.device("meta"):
        grid, x = HeadGrid(AttentiveHead, 768, 1000, [(1.0, 0.0)] * 30), torch.empty(1, 196, 768)
    sizes = [sum(p.numel() for p in head.parameters()) for head in grid.heads]
    assert sizes == [768 + 2 * 768**2 + 768 + 769_000] * 30  # 1.95 M; the bias of the keys is left out
    assert count_gmac(lambda: grid(x)) < 0.03 * 17.56 * 1.5  # folding the key matrices comes once a batch, not an image


def test_first_weights_are_small_and_equal():
    torch.manual_seed(0)
    grid = HeadGrid(AttentiveHead, 64, 50, GRID)
    for name in ("query", "key", "value", "weight", "bias", "value_bias"):
        values = [getattr(head, name) for head in grid.heads]
        assert all(torch.equal(values[0], value) for value in values)
        assert values[0].std().item() == pytest.approx(0 if "bias" in name else 0.02, rel=0.25)
