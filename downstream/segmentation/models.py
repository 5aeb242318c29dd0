"""Segmentation models: a ViT with UPerNet (Xiao et al., ECCV 2018), or a frozen ViT with a linear layer.

Names of modules inside neck and heads are those of mmsegmentation. All models return {name: logits
[B, num_classes, h, w]}, of which "decode" is the prediction.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from downstream.common import encoder_options
from downstream.segmentation.batch_norm import SyncBatchNorm2d
from downstream.segmentation.vit_backbone import DenseViT, pyramid_blocks

HEADS = ("upernet", "linear")
POOL_SIZES = (1, 2, 3, 6)  # sides of the grids of pyramid pooling
AUX_CHANNELS = 256


class ConvModule(nn.Module):
    """Convolution without bias, BatchNorm over all processes, ReLU. Initialised as mmcv's."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(
            in_channels,
            out_channels,
            kernel_size,
            padding=kernel_size // 2,
            bias=False,
        )
        nn.init.kaiming_normal_(self.conv.weight, mode="fan_out", nonlinearity="relu")
        self.bn = SyncBatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


class FeaturePyramid(nn.Module):
    """Makes maps of 4, 2, 1 and 1/2 times the resolution from four maps [B, C, h, w] of a ViT."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.upsample_4x = nn.Sequential(
            twice_as_large(channels),
            SyncBatchNorm2d(channels),
            nn.GELU(),
            twice_as_large(channels),
        )
        self.upsample_2x = nn.Sequential(twice_as_large(channels))
        self.downsample_2x = nn.MaxPool2d(kernel_size=2, stride=2)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        first, second, third, fourth = maps
        return [
            self.upsample_4x(first),
            self.upsample_2x(second),
            third,
            self.downsample_2x(fourth),
        ]


def twice_as_large(channels: int) -> nn.ConvTranspose2d:
    """Returns the layer that doubles the resolution."""
    return nn.ConvTranspose2d(channels, channels, kernel_size=2, stride=2)


class UPerHead(nn.Module):
    """Pyramid pooling on the coarsest of four maps, a top-down path, and a classifier of all maps together."""

    def __init__(self, in_channels: int, channels: int, num_classes: int) -> None:
        super().__init__()
        self.psp_modules = nn.ModuleList()
        for side in POOL_SIZES:
            pool = nn.AdaptiveAvgPool2d(side)
            conv = ConvModule(in_channels, channels, kernel_size=1)
            self.psp_modules.append(nn.Sequential(pool, conv))
        num_pooled = len(POOL_SIZES) * channels
        self.bottleneck = ConvModule(in_channels + num_pooled, channels, 3)
        self.lateral_convs = nn.ModuleList(ConvModule(in_channels, channels, 1) for _ in range(3))
        self.fpn_convs = nn.ModuleList(ConvModule(channels, channels, 3) for _ in range(3))
        self.fpn_bottleneck = ConvModule(4 * channels, channels, 3)
        self.dropout = nn.Dropout2d(0.1)
        self.conv_seg = classifier(channels, num_classes)

    def forward(self, maps: list[Tensor]) -> Tensor:
        """Returns logits [B, num_classes, h, w] at the resolution of the first and finest map."""
        finest = maps[0]
        coarsest = maps[3]
        pooled = [resize_like(module(coarsest), coarsest) for module in self.psp_modules]
        level = self.bottleneck(torch.cat([coarsest, *pooled], dim=1))
        outs = [resize_like(level, finest)]
        for i in (2, 1, 0):
            lateral = self.lateral_convs[i](maps[i])
            level = lateral + resize_like(level, lateral)
            out = self.fpn_convs[i](level)
            outs.insert(0, resize_like(out, finest))
        out = self.fpn_bottleneck(torch.cat(outs, dim=1))
        return self.conv_seg(self.dropout(out))


class FCNHead(nn.Module):
    """One convolution and a classifier: the auxiliary head, which is used in training only."""

    def __init__(self, in_channels: int, channels: int, num_classes: int) -> None:
        super().__init__()
        self.convs = nn.Sequential(ConvModule(in_channels, channels, 3))
        self.dropout = nn.Dropout2d(0.1)
        self.conv_seg = classifier(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv_seg(self.dropout(self.convs(x)))


class LinearHead(nn.Module):
    """BatchNorm without parameters, then one linear layer on each patch token."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.bn = SyncBatchNorm2d(in_channels, affine=False)
        self.conv_seg = classifier(in_channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv_seg(self.bn(x))


def classifier(channels: int, num_classes: int) -> nn.Conv2d:
    """Returns a 1 x 1 convolution with weights of standard deviation 0.01."""
    conv = nn.Conv2d(channels, num_classes, kernel_size=1)
    nn.init.normal_(conv.weight, std=0.01)
    nn.init.zeros_(conv.bias)
    return conv


def resize_like(x: Tensor, like: Tensor) -> Tensor:
    """Resizes maps [B, C, h, w] bilinearly to the height and width of `like`."""
    return F.interpolate(x, size=like.shape[-2:], mode="bilinear", align_corners=False)


class Segmenter(nn.Module):
    """What both models share: image size, layers for the optimizer, and parameters without weight decay."""

    def __init__(self, backbone: DenseViT) -> None:
        super().__init__()
        self.backbone = backbone
        self.img_size = backbone.img_size
        self.patch_size = backbone.patch_size

    def no_weight_decay(self) -> set[str]:
        """Returns the parameters without weight decay, beside the 1-D ones. Bias tables decay."""
        return {"backbone.cls_token", "backbone.pos_embed"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Describes the layers to timm's layer-wise learning-rate decay: embeddings, each block, then all heads."""
        return {
            "stem": r"^backbone\.(?:cls_token|pos_embed|patch_embed)",
            "blocks": r"^backbone\.blocks\.(\d+)",
        }


class UPerNet(Segmenter):
    """ViT, feature pyramid, UPerNet's head and, on the third map, an auxiliary head.

    channels: width of the head. options: arguments of `DenseViT`, with 2 x 2 patches or more.
    """

    def __init__(self, num_classes: int, channels: int = 768, **options: Any) -> None:
        backbone = DenseViT(out_blocks=pyramid_blocks(options["depth"]), **options)
        super().__init__(backbone)
        width = backbone.embed_dim
        self.neck = FeaturePyramid(width)
        self.decode_head = UPerHead(width, channels, num_classes)
        self.auxiliary_head = FCNHead(width, min(AUX_CHANNELS, channels), num_classes)

    def forward(self, imgs: Tensor) -> dict[str, Tensor]:
        """Returns {"decode": logits [B, K, H/4, W/4]}, in training also "aux" [B, K, H/16, W/16], for patches of 16."""
        maps = self.neck(self.backbone(imgs))
        logits = {"decode": self.decode_head(maps)}
        if self.training:
            logits["aux"] = self.auxiliary_head(maps[2])
        return logits


class LinearSegmenter(Segmenter):
    """A linear layer on the patch tokens of a frozen ViT, after its final norm. options: arguments of `DenseViT`."""

    def __init__(self, num_classes: int, **options: Any) -> None:
        super().__init__(DenseViT(final_norm=True, **options))
        self.backbone.requires_grad_(False)
        self.decode_head = LinearHead(self.backbone.embed_dim, num_classes)

    def train(self, mode: bool = True) -> "LinearSegmenter":
        """Sets the training mode of the head. The encoder stays in eval mode."""
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, imgs: Tensor) -> dict[str, Tensor]:
        """Returns {"decode": logits [B, K, rows, columns]}, one for each patch."""
        with torch.no_grad():
            (features,) = self.backbone(imgs)
        return {"decode": self.decode_head(features)}


def build_segmenter(settings: Mapping[str, Any]) -> UPerNet | LinearSegmenter:
    """Builds the model that `settings` (vars(args), or a checkpoint's) describe."""
    options = encoder_options(settings, "segmentation")
    options.pop("layer_scale", None)  # its blocks always have scales
    if settings["head"] == "linear":
        return LinearSegmenter(settings["num_classes"], **options)
    return UPerNet(settings["num_classes"], settings["decoder_channels"], **options)
