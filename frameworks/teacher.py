"""A frozen teacher: a pre-trained plain ViT that sees whole images, and the targets that a student predicts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from encoders.kinds import PLAIN
from encoders.load import Weights, interpret, load_encoder, read, sizes_of
from models_vit import ViTEncoder
from prmim import TokenOrder
from util.data.transforms import IMAGENET_MEAN, IMAGENET_STD
from util.run.files import checkpoint
from util.run.files.record import CheckpointInfo


class Teacher(ViTEncoder):
    """A ViT without gradients that is always in eval mode.

    sizes: arguments of `ViTEncoder`. weights: those of its file; None if it is untrained. source: path of the file, or
    the name of a timm model. fingerprint: identifies the weights. statistics: mean and deviation by which its images
    must be normalised; None if they are not known. Images of RGB are normalised with ImageNet's until `use_statistics`
    says otherwise.

    Attributes: `origin`: a sentence for the log about the weights. `statistics`: those of the images it now takes.
    """

    unused_keys = ("norm.",)  # the targets are outputs of blocks

    def __init__(
        self,
        sizes: Mapping[str, Any],
        weights: Weights | None = None,
        source: str | None = None,
        fingerprint: str | None = None,
        statistics: tuple[Sequence[float], Sequence[float]] | None = None,
    ) -> None:
        super().__init__(**sizes)
        self.num_heads: int = self.blocks[0].attn.num_heads
        self.norm = nn.Identity()
        self.requires_grad_(False).eval()
        self.source = source
        self.fingerprint = fingerprint
        self.origin = "untrained"
        self.statistics = statistics
        if weights is not None:
            report = load_encoder(self, weights)
            self.origin = f"teacher {weights.label}, width {self.embed_dim}, {len(self.blocks)} blocks: {report}"
            if self.in_chans == 3:
                self.use_statistics(IMAGENET_MEAN, IMAGENET_STD)

    @torch.no_grad()
    def forward(
        self,
        imgs: Tensor,
        order: TokenOrder,
        num_keys: int,
        topk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (features, logits, queries) of normalised images [B, C, H, W].

        features [B, N, T], in raster order: the mean of the outputs of the last two blocks, without the final norm.
        queries [B, topk]: positions in token order, below num_keys, of the patches to which the class token attends
        most, averaged over the heads. logits [B, heads, 1 + topk, num_keys] of the last block's attention, before its
        softmax: the rows are the class token and the `queries`, the columns the first num_keys patches in token order.
        """
        features, last_input = self._forward_blocks(imgs)
        last_block = self.blocks[-1]
        x = last_block.norm1(last_input)
        q_weight, k_weight, _ = last_block.attn.qkv.weight.chunk(3)
        q_bias, k_bias, _ = last_block.attn.qkv.bias.chunk(3)
        ids_keys = order.ids_shuffle[:, :num_keys]
        patches = order.take(x[:, self.num_cls_tokens :], ids_keys)  # [B, num_keys, T]
        scale = (self.embed_dim // self.num_heads) ** -0.5
        keys = F.linear(patches, k_weight, k_bias) * scale
        cls_query = F.linear(x[:, :1], q_weight, q_bias)
        cls_row = attention_logits(cls_query, keys, self.num_heads)  # [B, heads, 1, num_keys]
        mean_row = cls_row.mean(dim=(1, 2))
        queries = mean_row.topk(topk, dim=1).indices
        queried = order.take(patches, queries)
        patch_queries = F.linear(queried, q_weight, q_bias)
        rows = attention_logits(patch_queries, keys, self.num_heads)  # [B, heads, topk, num_keys]
        logits = torch.cat([cls_row, rows], dim=2)
        return features, logits, queries

    @torch.no_grad()
    def use_statistics(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """Folds a change of the pixel normalisation, to `mean` and `std`, into the patch embedding."""
        if self.statistics == (tuple(mean), tuple(std)):
            return
        if self.statistics is not None:
            kernel = self.patch_embed.proj.weight
            bias = self.patch_embed.proj.bias
            old_mean, old_std = (torch.tensor(values, device=kernel.device) for values in self.statistics)
            new_mean = torch.tensor(mean, device=kernel.device)
            new_std = torch.tensor(std, device=kernel.device)
            shift = (new_mean - old_mean) / old_std  # of each channel
            bias += (kernel.sum(dim=(2, 3)) * shift).sum(dim=1)
            kernel *= (new_std / old_std).view(-1, 1, 1)
        self.statistics = (tuple(mean), tuple(std))

    @torch.no_grad()
    def features(self, imgs: Tensor) -> Tensor:
        """Returns the mean of the last two blocks' outputs, [B, N, T] in raster order, of normalised [B, C, H, W]."""
        features, _ = self._forward_blocks(imgs)
        return features

    def _forward_blocks(self, imgs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (features [B, N, T], input of the last block [B, P + N, T])."""
        x = self.prepend_cls_token(self.embed(imgs))
        for block in self.blocks[:-1]:
            x = block(x)
        last_two = x + self.blocks[-1](x)
        return last_two[:, self.num_cls_tokens :] / 2, x


def attention_logits(q: Tensor, k: Tensor, num_heads: int) -> Tensor:
    """Returns the products of queries [B, Q, T] and keys [B, n, T] per head, unscaled, [B, heads, Q, n].

    They are computed in float32 or wider. Half precision would round the values before a ranking and a softmax. The
    cost is small, since there are few rows.
    """
    device = q.device.type
    if device == "meta":  # autocast has no meta device, which counts costs
        device = "cpu"
    with torch.autocast(device, enabled=False):
        q = q.to(torch.promote_types(q.dtype, torch.float32))
        k = k.to(torch.promote_types(k.dtype, torch.float32))
        q = q.unflatten(-1, (num_heads, -1)).transpose(1, 2)  # [B, heads, Q, d]
        k = k.unflatten(-1, (num_heads, -1)).transpose(1, 2)  # [B, heads, n, d]
        return q @ k.transpose(-2, -1)


def open_teacher(source: str | Path, img_size: tuple[int, int], patch_size: int) -> Teacher:
    """Builds the teacher with the weights at `source`, for images of `img_size` (height, width) and the patch size.

    source: what `encoders.load.read` reads, or the name of a timm model, whose pre-trained weights timm downloads.
    Position tables of another grid are resized. The teacher's images have the statistics that its file or timm's
    configuration says; by default those of RGB are ImageNet's.

    Raises ValueError if `source` is neither, is no plain ViT of a known size, or has patches of another size.
    """
    source = str(source)
    if Path(source).exists():
        weights = read(source)
        path = Path(weights.path)
        source = str(path.parent.resolve() / path.name)
        fingerprint = checkpoint.recorded_sha256(path)
        pixels = weights.settings
    else:
        theirs = open_timm_model(source, img_size)
        heads = {"num_heads": theirs.blocks[0].attn.num_heads}
        weights = interpret(source, theirs.state_dict(), CheckpointInfo(heads))
        fingerprint = source
        pixels = theirs.pretrained_cfg
    label = f"teacher {weights.label}"
    if weights.kind is not PLAIN:
        raise ValueError(f"{label} is {weights.kind.name}; a teacher must be a plain ViT")
    sizes = sizes_of(weights)
    if sizes.get("rotary"):
        raise ValueError(f"{label} has rotary positions, as DINOv3; a teacher must have a table of positions")
    if sizes["patch_size"] != patch_size:
        raise ValueError(
            f"{label} cuts patches of {sizes['patch_size']} px, the student of {patch_size}: tokens must be the same"
        )
    statistics = None
    if pixels.get("mean"):
        statistics = (pixels["mean"], pixels["std"])
    elif sizes["in_chans"] == 3:
        statistics = (IMAGENET_MEAN, IMAGENET_STD)
    with torch.random.fork_rng(devices=[]):  # the student's first weights must not depend on the teacher's size
        return Teacher({**sizes, "img_size": img_size}, weights, source, fingerprint, statistics)


def open_timm_model(name: str, img_size: tuple[int, int]) -> Any:
    """Returns timm's pre-trained `VisionTransformer` of this name."""
    try:
        model = timm.create_model(name, pretrained=True, img_size=img_size).eval()
    except Exception as error:  # many types: no such model, no weights, no network, another kind of network
        raise ValueError(
            f"teacher {name!r} is no file, and timm could not make a model of this name, with weights, for images of "
            f"{img_size} px: {error}"
        ) from error
    if not isinstance(model, timm.models.VisionTransformer):
        raise ValueError(f"teacher {name!r} is a {type(model).__name__}; a teacher must be a plain ViT")
    return model
