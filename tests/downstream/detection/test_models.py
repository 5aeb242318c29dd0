"""ViTDet's backbone, pyramid and heads against slow derivations; encoders that load; learning rates."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close
from torchvision.models.detection.image_list import ImageList

from downstream.detection.backbone import (
    DecomposedAttention,
    SimpleFeaturePyramid,
    ViTDet,
)
from downstream.detection.models import AlignedRoIPool, Detector
from encoders.load import load_encoder
from models_vit import MICRO, VisionTransformer
from util.pos_embed import resize_pos_embed

SMALL = {**MICRO, "img_size": 48, "pretrain_size": 32, "window_size": 5}
EIGHT_BLOCKS = {**SMALL, "depth": 8}


def randomise(module, std=0.1):
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)
    return module.eval()


def small_detector(num_classes=2, **options):
    torch.manual_seed(0)
    return Detector(num_classes, channels=16, **SMALL, **options)


# -------------------------------------------------------------------------------------------------------- backbone


def test_relative_positions_pair_by_pair():
    """Logit of (query, key) = q.k / sqrt(d) + q.R_h[row offset] + q.R_w[column offset], with the query unscaled."""
    rows, columns, heads, d = 3, 4, 2, 5
    attention = DecomposedAttention(heads * d, heads, (rows, columns))
    attention = randomise(attention, 0.5).double()
    x = torch.randn(rows, columns, heads * d, dtype=torch.float64)
    places = [(row, column) for row in range(rows) for column in range(columns)]
    weight = attention.qkv.weight.view(3, heads, d, -1)
    bias = attention.qkv.bias.view(3, heads, d)
    expected = torch.zeros(rows, columns, heads, d, dtype=torch.float64)
    for head in range(heads):
        q = x @ weight[0, head].T + bias[0, head]
        k = x @ weight[1, head].T + bias[1, head]
        v = x @ weight[2, head].T + bias[2, head]
        for query in places:
            logits = []
            for key in places:
                down = attention.rel_pos_h[query[0] - key[0] + rows - 1]
                across = attention.rel_pos_w[query[1] - key[1] + columns - 1]
                similarity = q[query] @ k[key] / math.sqrt(d)
                logits.append(similarity + q[query] @ (down + across))
            shares = torch.stack(logits).softmax(0)
            for share, key in zip(shares, places, strict=True):
                expected[query][head] += share * v[key]
    expected = expected.flatten(2) @ attention.proj.weight.T + attention.proj.bias
    assert_close(attention(x[None])[0], expected)


@pytest.mark.parametrize("num_cls_tokens", [1, 3])
def test_the_backbone_begins_as_the_pretrained_vit_without_class_tokens(num_cls_tokens, tmp_path):
    """With windows as large as the map and tables of zeros, all blocks are those of the plain ViT on patch tokens."""
    torch.manual_seed(0)
    vit = VisionTransformer(global_pool="token", num_cls_tokens=num_cls_tokens, **MICRO)
    nn.init.normal_(vit.pos_embed)
    torch.save({"model": vit.state_dict()}, tmp_path / "vit.pth")
    model = ViTDet(**{**SMALL, "window_size": 12})
    report = load_encoder(model, tmp_path / "vit.pth")
    assert not report.missing  # tables of positions begin at zero
    assert {"cls_token", "norm.weight"} <= set(report.unexpected)
    imgs = torch.randn(2, 3, 48, 48)
    patches = vit.patch_embed.proj(imgs)  # [B, D, 12, 12]
    positions = resize_pos_embed(vit.pos_embed, (8, 8), (12, 12))
    x = patches.flatten(2).transpose(1, 2) + positions[:, num_cls_tokens:]
    for block in vit.blocks:
        x = block(x)
    found = model(imgs).flatten(2).transpose(1, 2)
    assert_close(found, x, rtol=1e-4, atol=1e-5)


def test_windowed_blocks_see_their_window_and_global_blocks_everything():
    model = randomise(ViTDet(**EIGHT_BLOCKS)).double()
    assert model.global_blocks == (1, 3, 5, 7)
    twelve_blocks = ViTDet(embed_dim=32, num_heads=1)
    assert twelve_blocks.global_blocks == (2, 5, 8, 11)
    x = torch.randn(1, 12, 12, 96, dtype=torch.float64)
    moved = x.clone()
    moved[0, 6, 6] = 2 * torch.randn(96, dtype=torch.float64)
    window = torch.zeros(12, 12, dtype=torch.bool)
    window[5:10, 5:10] = True
    for number, block in enumerate(model.blocks):
        difference = block(x) - block(moved)
        is_changed = difference[0].any(dim=-1)
        if number in model.global_blocks:
            assert is_changed.all()
        else:
            assert torch.equal(is_changed, window)


def test_padded_places_of_a_window_are_keys():
    """As in detectron2: zeros after the norm, whose keys and values are the layer's biases."""
    block = randomise(ViTDet(**EIGHT_BLOCKS).blocks[0])
    x = torch.randn(1, 12, 12, 96)
    corner = x[:, 10:, 10:]
    last_window = F.pad(block.norm1(corner), (0, 0, 0, 3, 0, 3))
    expected = corner + block.attn(last_window)[:, :2, :2]
    expected = expected + block.mlp(block.norm2(expected))
    assert_close(block(x)[:, 10:, 10:], expected)


def test_the_pyramid_has_strides_of_4_to_64():
    pyramid = SimpleFeaturePyramid(96, 16)
    maps = pyramid(torch.randn(2, 96, 8, 8))
    for level, side in zip(maps, (32, 16, 8, 4, 2), strict=True):
        assert level.shape == (2, 16, side, side)
    for level in maps[:4]:  # the last layer is a norm over channels, with weight 1 and bias 0
        assert level.mean(dim=1).abs().max() < 1e-5
        variance = level.var(dim=1, unbiased=False)
        assert (variance - 1).abs().max() < 1e-2
    every_second = maps[3][:, :, ::2, ::2]
    assert torch.equal(maps[4], every_second)


# ----------------------------------------------------------------------------------------------------------- heads


def test_roi_pooling_samples_where_the_box_is():
    """On maps whose value is the coordinate of the pixel centre, each cell has the coordinate of its own centre."""
    maps = []
    for side in (64, 32, 16, 8):  # of images of 64 pixels
        centres = (torch.arange(side) + 0.5) * 64 / side
        rows, columns = torch.meshgrid(centres, centres, indexing="ij")
        maps.append(torch.stack([rows, columns])[None])
    box = torch.tensor([9.0, 5.0, 30.0, 47.0])
    pooled = AlignedRoIPool(7, patch_size=4)(maps, [box[None]])
    rows, columns = pooled[0]
    cells = (torch.arange(7) + 0.5) / 7
    assert_close(rows, (5 + 42 * cells)[:, None].expand(7, 7))
    assert_close(columns, (9 + 21 * cells)[None].expand(7, 7))


def test_boxes_go_to_the_level_of_their_area():
    """224 pixels are the third level for patches of 16: floor(2 + log2(side / 224))."""
    maps = []
    for level, size in enumerate((256, 128, 64, 32)):
        maps.append(torch.full((1, 1, size, size), float(level)))
    sides = [30, 55, 57, 111, 113, 223, 225, 447, 449, 1000]
    boxes = torch.tensor([[0.0, 0.0, side, side] for side in sides])
    levels = AlignedRoIPool(1, patch_size=16)(maps, [boxes]).flatten()
    for side, level in zip(sides, levels, strict=True):
        expected = math.floor(2 + math.log2(side / 224))
        assert level == min(3, max(0, expected))


def test_losses_of_proposals_by_hand():
    """Two objects, one background, one ignored anchor. A loss of |x| has the same slope at 0.01 as at 1."""
    labels = [torch.tensor([1.0, 1.0, 0.0, -1.0])]
    deltas = torch.tensor([0.01, -1.0, 5.0, 5.0]).repeat(4, 1).T
    deltas.requires_grad_()
    logits = torch.tensor([2.0, -1.0, 0.5, 9.0])[:, None]
    targets = [torch.zeros(4, 4)]
    objectness, box = small_detector().rpn.compute_loss(logits, deltas, labels, targets)
    assert box.item() == pytest.approx((0.04 + 4.0) / 3)
    expected = 0.0
    for wrong_way in (-2, 1, 0.5):
        expected += math.log(1 + math.exp(wrong_way)) / 3
    assert objectness.item() == pytest.approx(expected)
    box.backward()
    assert deltas.grad[:, 0].tolist() == pytest.approx([1 / 3, -1 / 3, 0, 0])


def test_class_box_and_mask_losses_by_hand():
    """One object, two proposals: one with an offset to it, one on the background."""
    heads = small_detector().roi_heads.train()
    near = [4.0, 4.0, 20.0, 36.0]
    background = [30.0, 30.0, 40.0, 40.0]
    proposals = torch.tensor([near, background])
    mask = torch.zeros(1, 48, 48, dtype=torch.uint8)
    mask[0, 4:40, 4:12] = 1  # the left half of the object
    target = {
        "boxes": torch.tensor([[4.0, 4.0, 20.0, 40.0]]),
        "labels": torch.tensor([2]),
        "masks": mask,
    }
    maps = [torch.randn(1, 16, side, side) for side in (48, 24, 12, 6)]
    losses = heads(maps, [proposals.clone()], [target])

    boxes = torch.cat([proposals, target["boxes"]])  # the object itself is a proposal, too
    logits, deltas = heads.predict_boxes(maps, [boxes])
    shares = logits.log_softmax(dim=1)
    total = shares[0, 2] + shares[1, 0] + shares[2, 2]
    assert_close(losses["class"], -total / 3)

    down = 10 * (22.0 - 20.0) / 32  # of the centre
    taller = 5 * math.log(36 / 32)
    offset = torch.tensor([0.0, down, 0.0, taller])
    of_class_2 = deltas.view(3, 3, 4)[:, 2]
    errors = of_class_2[[0, 2]].abs()
    errors[0] = (of_class_2[0] - offset).abs()
    assert_close(losses["box"], errors.sum() / 3)

    with_object = boxes[[0, 2]]
    masks = heads.predict_masks(maps, [with_object], torch.tensor([2, 2]))
    left_half = torch.zeros(2, 28, 28)
    left_half[..., :14] = 1
    expected = F.binary_cross_entropy_with_logits(masks, left_half)
    assert_close(losses["mask"], expected)


def test_an_image_without_objects_reaches_every_parameter():
    model = small_detector()
    nothing = {
        "boxes": torch.zeros(0, 4),
        "labels": torch.zeros(0, dtype=torch.int64),
        "masks": torch.zeros(0, 48, 48, dtype=torch.uint8),
    }
    losses = model(torch.randn(1, 3, 48, 48), [(48, 40)], [nothing])
    for name in ("box", "rpn_box", "mask"):
        assert losses[name] == 0
    sum(losses.values()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_bfloat16_computes_boxes_in_float32():
    model = small_detector().eval()
    model.roi_heads.score_thresh = 0.0
    imgs = torch.randn(1, 3, 48, 48)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        maps = model.pyramid(model.backbone(imgs))
        (detections,) = model(imgs, [(48, 40)])
    (anchors,) = model.rpn.anchor_generator(ImageList(imgs, [(48, 40)]), maps)
    assert anchors.dtype == torch.float32  # in bfloat16 they would have steps of 4 pixels in large images
    for name in ("boxes", "scores", "masks"):
        assert detections[name].dtype == torch.float32
    boxes = detections["boxes"]
    assert not torch.equal(boxes, boxes.bfloat16().float())
    assert boxes[:, 2].max() <= 40


def test_learning_rates_and_weight_decay_follow_detectron2():
    model = small_detector()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    settings = {}
    for group in model.param_groups(0.1, 0.7):
        for parameter in group["params"]:
            settings[names[id(parameter)]] = (group["lr_scale"], group["weight_decay"])
    assert len(settings) == len(names)
    expected = {
        "backbone.pos_embed": (0.7**5, 0.0),
        "backbone.patch_embed.proj.bias": (0.7**5, 0.1),
        "backbone.blocks.0.norm1.weight": (0.7**4, 0.0),
        "backbone.blocks.3.attn.rel_pos_h": (0.7, 0.1),
        "backbone.blocks.3.mlp.fc1.bias": (0.7, 0.1),
        "pyramid.stages.0.1.weight": (1.0, 0.1),
        "roi_heads.box_head.0.1.bias": (1.0, 0.1),
    }
    for name, scale_and_decay in expected.items():
        assert settings[name] == pytest.approx(scale_and_decay)
