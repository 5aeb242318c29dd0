"""ViTDet's backbone, pyramid and heads against slow derivations; encoders that load; learning rates."""

import math

import pytest
import torch
from torch.nn import functional as F
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import roi_align

from downstream.detection import backbone
from downstream.detection.backbone import (
    ChannelNorm,
    DecomposedAttention,
    SimpleFeaturePyramid,
    ViTDet,
    window_partition,
    window_unpartition,
)
from downstream.detection.models import AlignedRoIPool, Detector, RegionProposalNetworkL1, crop_masks
from encoders.load import load_encoder
from models_vit import MICRO, VisionTransformer
from util.pos_embed import resize_pos_embed
from util.run.checkpoint import CheckpointError

SMALL = {**MICRO, "img_size": 48, "pretrain_size": 32, "window_size": 5}


def randomise(module, std=0.1):
    torch.manual_seed(0)
    for p in module.parameters():
        torch.nn.init.normal_(p, std=std)
    return module.eval()


# -------------------------------------------------------------------------------------------------------- backbone


def test_relative_positions_pair_by_pair():
    """Logit of (query, key) = q.k / sqrt(d) + q.R_h[row offset] + q.R_w[column offset], with the query unscaled."""
    rows, columns, heads, d = 3, 4, 2, 5
    attention = randomise(DecomposedAttention(heads * d, heads, (rows, columns)), 0.5).double()
    x = torch.randn(2, rows, columns, heads * d, dtype=torch.float64)
    places = [(r, c) for r in range(rows) for c in range(columns)]
    expected = torch.zeros(2, rows, columns, heads * d, dtype=torch.float64)
    for b in range(2):
        for head in range(heads):
            weight = attention.qkv.weight.view(3, heads, d, -1)[:, head]
            bias = attention.qkv.bias.view(3, heads, d)[:, head]
            q, k, v = ({p: weight[i] @ x[b][p] + bias[i] for p in places} for i in range(3))
            for query in places:
                logits = []
                for key in places:
                    down = attention.rel_pos_h[query[0] - key[0] + rows - 1]
                    across = attention.rel_pos_w[query[1] - key[1] + columns - 1]
                    logits.append(q[query] @ k[key] / math.sqrt(d) + q[query] @ down + q[query] @ across)
                weights = torch.stack(logits).softmax(0)
                value = sum(w * v[key] for w, key in zip(weights, places, strict=True))
                expected[b][query][head * d : (head + 1) * d] = value
    expected = expected @ attention.proj.weight.T + attention.proj.bias
    torch.testing.assert_close(attention(x), expected)


def test_attention_gets_queries_keys_and_values_of_one_width(monkeypatch):
    """Flash attention takes no others. A width of 5 with 3 + 4 places is padded to 16."""
    widths, fused = [], F.scaled_dot_product_attention

    def watched(*inputs, **options):
        widths.append([x.shape[-1] for x in inputs])
        return fused(*inputs, **options)

    monkeypatch.replace_in(backbone, "F.scaled_dot_product_attention", watched)
    DecomposedAttention(10, 2, (3, 4))(torch.randn(2, 3, 4, 10))
    assert widths == [[16, 16, 16]]


@pytest.mark.parametrize(("height", "width", "side"), [(6, 9, 3), (5, 7, 3), (2, 2, 4)])
def test_windows_are_cut_and_joined(height, width, side):
    x = torch.randn(2, height, width, 3)
    windows, padded = window_partition(x, side)
    assert padded == (math.ceil(height / side) * side, math.ceil(width / side) * side)
    assert torch.equal(window_unpartition(windows, padded, (height, width)), x)
    per_row = padded[1] // side
    for b in range(2):
        for y in range(padded[0]):
            for z in range(padded[1]):
                number = (b * (padded[0] // side) + y // side) * per_row + z // side
                expected = x[b, y, z] if y < height and z < width else torch.zeros(3)
                assert torch.equal(windows[number, y % side, z % side], expected)


def test_the_backbone_begins_as_the_pretrained_vit_without_class_token(tmp_path):
    """With windows as large as the map and tables of zeros, all blocks are those of the plain ViT on patch tokens."""
    torch.manual_seed(0)
    vit = VisionTransformer(global_pool="token", **MICRO)
    torch.nn.init.normal_(vit.pos_embed)
    torch.save({"model": vit.state_dict()}, tmp_path / "vit.pth")
    backbone = ViTDet(**{**SMALL, "window_size": 12})
    report = load_encoder(backbone, tmp_path / "vit.pth")
    assert {key.rpartition(".")[2] for key in report.missing} == {"rel_pos_h", "rel_pos_w"}
    assert {"cls_token", "norm.weight"} <= set(report.unexpected)
    imgs = torch.randn(2, 3, 48, 48)
    x = F.conv2d(imgs, vit.patch_embed.proj.weight, vit.patch_embed.proj.bias, stride=4).flatten(2).transpose(1, 2)
    x = x + resize_pos_embed(vit.pos_embed, (8, 8), (12, 12))[:, 1:]
    for block in vit.blocks:
        x = block(x)
    torch.testing.assert_close(backbone(imgs), x.transpose(1, 2).unflatten(2, (12, 12)), rtol=1e-4, atol=1e-5)


def test_windowed_blocks_see_their_window_and_global_blocks_everything():
    backbone = randomise(ViTDet(**{**SMALL, "depth": 8})).double()
    assert backbone.global_blocks == (1, 3, 5, 7)
    assert ViTDet(embed_dim=32, num_heads=1).global_blocks == (2, 5, 8, 11)
    x = torch.randn(1, 12, 12, 96, dtype=torch.float64)
    moved = x.clone()
    moved[0, 6, 6] = 2 * torch.randn(96, dtype=torch.float64)
    for number, block in enumerate(backbone.blocks):
        changed = (block(x) != block(moved)).any(dim=-1)[0]
        expected = torch.zeros(12, 12, dtype=torch.bool)
        expected[5:10, 5:10] = True
        assert torch.equal(changed, torch.ones_like(changed) if number in backbone.global_blocks else expected)


def test_padded_places_of_a_window_are_keys():
    """As in detectron2: zeros after the norm, whose keys and values are the layer's biases."""
    block = randomise(ViTDet(**{**SMALL, "depth": 8}).blocks[0])
    x = torch.randn(1, 12, 12, 96)
    y = F.pad(block.norm1(x)[:, 10:, 10:], (0, 0, 0, 3, 0, 3))  # the last window
    expected = x[:, 10:, 10:] + block.attn(y)[:, :2, :2]
    expected = expected + block.mlp(block.norm2(expected))
    torch.testing.assert_close(block(x)[:, 10:, 10:], expected)


def test_the_pyramid_has_strides_of_4_to_64():
    pyramid = SimpleFeaturePyramid(96, 16)
    maps = pyramid(torch.randn(2, 96, 8, 8))
    assert [tuple(m.shape) for m in maps] == [(2, 16, side, side) for side in (32, 16, 8, 4, 2)]
    for level in maps[:4]:  # the last layer is a norm over channels, with weight 1 and bias 0
        torch.testing.assert_close(level.mean(dim=1), torch.zeros_like(level[:, 0]), rtol=0, atol=1e-5)
        torch.testing.assert_close(level.var(dim=1, unbiased=False), torch.ones_like(level[:, 0]), rtol=1e-2, atol=0)
    assert torch.equal(maps[4], maps[3][:, :, ::2, ::2])


@pytest.mark.parametrize("kind", ["relative", "width", "scaled", "channels"])
def test_other_encoders_are_refused(tmp_path, kind):
    weights = VisionTransformer(global_pool="token", **MICRO).state_dict()
    if kind == "relative":
        weights["blocks.0.attn.relative_position_bias_table"] = torch.zeros(228, 3)
    elif kind == "scaled":
        weights["blocks.0.ls1.gamma"] = torch.ones(96)
    elif kind == "channels":
        weights = VisionTransformer(global_pool="token", in_chans=5, **MICRO).state_dict()
    else:
        weights = VisionTransformer(global_pool="token", **{**MICRO, "embed_dim": 48}).state_dict()
    torch.save({"model": weights}, tmp_path / "vit.pth")
    with pytest.raises(
        CheckpointError, match="another kind of encoder|width 48|5 channels, this ViTDet is for 3: only"
    ):
        load_encoder(ViTDet(**SMALL), tmp_path / "vit.pth")


@pytest.mark.parametrize("options", [{"img_size": 40}, {"pretrain_size": 30}])
def test_sizes_that_do_not_divide_are_refused(options):
    with pytest.raises(ValueError, match="must be a multiple of (16|4), with patches of 4 pixels"):
        ViTDet(**{**SMALL, **options})


# ----------------------------------------------------------------------------------------------------------- heads


def test_roi_pooling_samples_where_the_box_is():
    """On maps whose value is the coordinate of the pixel centre, each cell has the coordinate of its own centre."""
    pool, boxes = AlignedRoIPool(7, patch_size=4), torch.tensor([[9.0, 5.0, 30.0, 47.0], [20.0, 13.0, 41.0, 20.0]])
    maps = []
    for side in (64, 32, 16, 8):  # of images of 64 pixels
        centres = (torch.arange(side) + 0.5) * 64 / side
        maps.append(torch.stack(torch.meshgrid(centres, centres, indexing="ij"))[None])
    out = pool(maps, [boxes[:1], boxes[:0], boxes[1:]][:1])
    cells = (torch.arange(7) + 0.5) / 7
    torch.testing.assert_close(out[0, 0], (5 + 42 * cells)[:, None].expand(7, 7))
    torch.testing.assert_close(out[0, 1], (9 + 21 * cells)[None].expand(7, 7))


def test_boxes_go_to_the_level_of_their_area():
    """224 pixels are the third level for patches of 16: floor(2 + log2(side / 224))."""
    pool = AlignedRoIPool(1, patch_size=16)
    maps = [torch.full((1, 1, 256 // 2**level, 256 // 2**level), float(level)) for level in range(4)]
    sides = [30, 55, 57, 111, 113, 223, 225, 447, 449, 1000]
    boxes = torch.tensor([[0.0, 0.0, side, side] for side in sides])
    expected = [min(3, max(0, math.floor(2 + math.log2(side / 224)))) for side in sides]
    assert pool(maps, [boxes])[:, 0, 0, 0].tolist() == expected


def test_mask_targets_are_cut_out_of_the_object():
    masks = torch.zeros(2, 20, 20, dtype=torch.uint8)
    masks[1, 4:12, 6:10] = 1
    boxes = torch.tensor([[6.0, 4.0, 10.0, 12.0], [2.0, 4.0, 10.0, 12.0]])
    cut = crop_masks(masks, boxes, torch.tensor([1, 1]), 8)
    assert cut[0].all() and torch.equal(cut[1], (torch.arange(8) >= 4).float().expand(8, 8))
    assert crop_masks(masks, boxes[:0], torch.zeros(0, dtype=torch.int64), 8).shape == (0, 8, 8)


def test_box_losses_are_l1():
    """A loss of |x| has the same slope at 0.01 as at 1; torchvision's smooth loss does not."""
    network = Detector(2, channels=16, **SMALL).rpn
    assert isinstance(network, RegionProposalNetworkL1)
    labels, wanted = [torch.tensor([1.0, 1.0, 0.0, -1.0])], [torch.zeros(4, 4)]
    deltas = torch.tensor([[0.01] * 4, [-1.0] * 4, [5.0] * 4, [5.0] * 4], requires_grad=True)
    logits = torch.tensor([[2.0], [-1.0], [0.5], [9.0]])
    objectness, box = network.compute_loss(logits, deltas, labels, wanted)
    assert box.item() == pytest.approx((0.04 + 4.0) / 3)  # of the three anchors that are not ignored
    expected = sum(math.log(1 + math.exp(x)) for x in (-2.0, 1.0, 0.5)) / 3
    assert objectness.item() == pytest.approx(expected)
    box.backward()
    torch.testing.assert_close(deltas.grad, torch.tensor([[1.0], [-1.0], [0.0], [0.0]]).expand(4, 4) / 3)


def test_class_box_and_mask_losses_by_hand(monkeypatch):
    """One object, two proposals: one with an offset to it, one on the background."""
    torch.manual_seed(0)
    heads = Detector(2, channels=16, **SMALL).roi_heads.train()
    proposals = [torch.tensor([[4.0, 4.0, 20.0, 36.0], [30.0, 30.0, 40.0, 40.0]])]
    target = {"boxes": torch.tensor([[4.0, 4.0, 20.0, 40.0]]), "labels": torch.tensor([2])}
    target["masks"] = torch.zeros(1, 48, 48, dtype=torch.uint8)
    target["masks"][0, 4:40, 4:12] = 1
    maps = [torch.randn(1, 16, side, side) for side in (48, 24, 12, 6)]
    _, losses = heads(maps, [p.clone() for p in proposals], [(48, 48)], [target])
    boxes = torch.cat([proposals[0], target["boxes"]])  # the object itself is a proposal, too
    logits, deltas = heads.predict_boxes(maps, [boxes])
    label = torch.tensor([2, 0, 2])
    expected = -logits.log_softmax(1)[torch.arange(3), label].mean()
    torch.testing.assert_close(losses["class"], expected)
    wanted = torch.tensor([[0.0, 5 * 0.0, 0.0, 0.0], [0.0] * 4])
    wanted[0] = torch.tensor([0.0, 10 * (22.0 - 20.0) / 32, 0.0, 5 * math.log(36 / 32)])
    found = deltas.view(3, 3, 4)[[0, 2], 2]
    torch.testing.assert_close(losses["box"], (found - wanted).abs().sum() / 3)
    masks = heads.predict_masks(maps, [boxes[[0, 2]]])[:, 2]
    half = (torch.arange(28) < 14).float().expand(2, 28, 28)
    torch.testing.assert_close(losses["mask"], F.binary_cross_entropy_with_logits(masks, half))


def test_each_proposal_gets_the_mask_of_its_own_object():
    """Two images with two objects each, all of other shapes and classes. Each proposal is an object's box, moved."""
    torch.manual_seed(0)
    heads = Detector(3, channels=16, **SMALL).roi_heads.train()
    maps = [torch.randn(2, 16, side, side) for side in (48, 24, 12, 6)]
    boxes = torch.tensor([[[0, 0, 16, 20], [24, 4, 44, 40]], [[2, 20, 30, 46], [30, 2, 46, 18]]]).float()
    labels = torch.tensor([[1, 3], [2, 1]])
    masks = torch.zeros(2, 2, 48, 48, dtype=torch.uint8)
    for i in range(2):
        for n in range(2):
            x1, y1, x2, y2 = boxes[i, n].int().tolist()
            masks[i, n, y1:y2, x1:x2] = torch.rand(y2 - y1, x2 - x1) < 0.5
    targets = [{"boxes": boxes[i], "labels": labels[i], "masks": masks[i]} for i in range(2)]
    proposals = [boxes[i].flip(0) + 0.5 for i in range(2)]  # the second object's box comes first
    _, losses = heads(maps, [part.clone() for part in proposals], [(48, 48)] * 2, targets)
    found = [torch.cat([part, boxes[i]]) for i, part in enumerate(proposals)]
    owner = [(i, n) for i in range(2) for n in (1, 0, 0, 1)]
    logits = heads.predict_masks(maps, found)
    expected = [
        F.binary_cross_entropy_with_logits(
            logits[row, labels[i, n]],
            (
                roi_align(masks[i, n][None, None].float(), [box[None]], 28, sampling_ratio=0, aligned=True)[0, 0] >= 0.5
            ).float(),
        )
        for row, ((i, n), box) in enumerate(zip(owner, torch.cat(found), strict=True))
    ]
    torch.testing.assert_close(losses["mask"], torch.stack(expected).mean())


def test_the_heads_have_the_settings_of_detectron2():
    """Of configs/common/models/mask_rcnn_vitdet.py and its bases, for patches of 16 pixels."""
    model = Detector(80, embed_dim=32, num_heads=1, img_size=64)
    rpn, heads = model.rpn, model.roi_heads
    sides = [[32], [64], [128], [256], [512]]
    assert [list(level) for level in rpn.anchor_generator.sizes] == sides
    assert {tuple(ratios) for ratios in rpn.anchor_generator.aspect_ratios} == {(0.5, 1.0, 2.0)}
    assert sum(isinstance(module, torch.nn.Conv2d) for module in rpn.head.conv.modules()) == 2
    assert (rpn.proposal_matcher.high_threshold, rpn.proposal_matcher.low_threshold) == (0.7, 0.3)
    assert (rpn.fg_bg_sampler.batch_size_per_image, rpn.fg_bg_sampler.positive_fraction) == (256, 0.5)
    assert rpn._pre_nms_top_n == {"training": 2000, "testing": 1000}
    assert rpn._post_nms_top_n == {"training": 1000, "testing": 1000}
    assert (rpn.nms_thresh, rpn.score_thresh) == (0.7, 0.0)
    assert (heads.proposal_matcher.high_threshold, heads.proposal_matcher.low_threshold) == (0.5, 0.5)
    assert (heads.fg_bg_sampler.batch_size_per_image, heads.fg_bg_sampler.positive_fraction) == (512, 0.25)
    assert heads.box_coder.weights == (10.0, 10.0, 5.0, 5.0)
    assert (heads.score_thresh, heads.nms_thresh, heads.detections_per_img) == (0.05, 0.5, 100)
    assert (heads.box_roi_pool.size, heads.mask_roi_pool.size) == (7, 14)
    for head, fc in ((heads.box_head, [1024]), (heads.mask_head, [])):
        convs = [module for module in head.modules() if isinstance(module, torch.nn.Conv2d)]
        assert [(conv.out_channels, conv.kernel_size, conv.bias) for conv in convs] == [(256, (3, 3), None)] * 4
        assert sum(isinstance(module, ChannelNorm) for module in head.modules()) == 4
        assert [m.out_features for m in head.modules() if isinstance(m, torch.nn.Linear)] == fc
    assert heads.box_predictor.cls_score.out_features == 81


def test_anchors_are_exact_in_bfloat16():
    """Against their definition, at 1024 pixels, where bfloat16 has steps of 4 pixels."""
    generator = Detector(2, channels=16, embed_dim=32, num_heads=1, img_size=64).rpn.anchor_generator
    maps = [torch.zeros(1, 1, side, side, dtype=torch.bfloat16) for side in (256, 128, 64, 32, 16)]
    (found,) = generator(ImageList(torch.zeros(1, 3, 1024, 1024), [(1024, 1024)]), maps)
    expected = []
    for level, side in enumerate((256, 128, 64, 32, 16)):
        stride, size = 1024 // side, 32 * 2**level
        shapes = []
        for ratio in (0.5, 1.0, 2.0):
            height, width = size * math.sqrt(ratio), size / math.sqrt(ratio)
            shapes.append(torch.tensor([-width, -height, width, height]).div(2).round())
        places = torch.arange(side) * stride
        corners = torch.cartesian_prod(places, places)[:, [1, 0, 1, 0]]  # x varies fastest
        expected.append((corners[:, None] + torch.stack(shapes)).reshape(-1, 4))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=1e-3)


def test_without_masks_there_is_no_mask_head_and_no_object_is_no_problem():
    torch.manual_seed(0)
    model = Detector(2, masks=False, channels=16, **SMALL)
    assert not any("mask" in name for name in model.state_dict())
    nothing = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}
    losses = model(torch.randn(1, 3, 48, 48), [(48, 40)], [nothing])
    assert set(losses) == {"objectness", "rpn_box", "class", "box"} and losses["box"] == losses["rpn_box"] == 0
    model = Detector(2, channels=16, **SMALL)
    nothing["masks"] = torch.zeros(0, 48, 48, dtype=torch.uint8)
    losses = model(torch.randn(1, 3, 48, 48), [(48, 40)], [nothing])
    assert losses["mask"] == 0
    sum(losses.values()).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_bfloat16_computes_boxes_in_float32():
    torch.manual_seed(0)
    model = Detector(2, channels=16, **SMALL).eval()
    model.roi_heads.score_thresh = 0.0
    anchors = []
    model.rpn.anchor_generator.register_forward_hook(lambda *parts: anchors.extend(parts[-1]))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        (found,) = model(torch.randn(1, 3, 48, 48), [(48, 40)])
    assert [boxes.dtype for boxes in anchors] == [torch.float32]
    assert {found[name].dtype for name in ("boxes", "scores", "masks")} == {torch.float32}
    assert len(found["boxes"]) and not torch.equal(found["boxes"], found["boxes"].bfloat16().float())
    assert found["boxes"][:, 2].max() <= 40


def test_learning_rates_and_weight_decay_follow_detectron2():
    model = Detector(2, channels=16, **SMALL)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = model.param_groups(0.1, 0.7)
    found = {names[id(p)]: (g["lr_scale"], g["weight_decay"]) for g in groups for p in g["params"]}
    assert len(found) == len(names) == sum(len(g["params"]) for g in groups)
    assert found["backbone.pos_embed"] == (pytest.approx(0.7**5), 0.0)
    assert found["backbone.patch_embed.proj.bias"] == (pytest.approx(0.7**5), 0.1)
    assert found["backbone.blocks.0.norm1.weight"] == (pytest.approx(0.7**4), 0.0)
    assert found["backbone.blocks.3.attn.rel_pos_h"] == (pytest.approx(0.7), 0.1)
    assert found["backbone.blocks.3.mlp.fc1.bias"] == (pytest.approx(0.7), 0.1)
    assert found["pyramid.stages.0.1.weight"] == found["roi_heads.box_head.0.1.bias"] == (1.0, 0.1)
