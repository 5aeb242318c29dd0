"""A frozen teacher: a pre-trained plain ViT that sees whole images, and what a student may predict of it."""

import difflib
from pathlib import Path

import timm
import torch
from torch import nn
from torch.nn import functional as F

from models_vit import ViTEncoder, read_sizes
from util.data.transforms import IMAGENET_MEAN, IMAGENET_STD
from util.run import checkpoint


class Teacher(ViTEncoder):
    """A ViT without gradients, always in eval mode. `origin` says where its weights are from, `fingerprint` which they are."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.num_heads = self.blocks[0].attn.num_heads
        if len(self.blocks) < 2:
            raise ValueError("a teacher needs two blocks: its features are the mean of the last two's")
        self.norm = nn.Identity()  # targets are the blocks' outputs
        self.origin, self.fingerprint = "untrained", None
        self.requires_grad_(False).eval()

    @torch.no_grad()
    def forward(self, imgs, order, num_keys, topk):
        """imgs [B, C, H, W], normalised -> (features, logits, queries).

        features [B, N, T], raster: mean of the last two blocks' outputs, without the final norm. queries [B, topk]:
        positions in token order, below num_keys, of the patches that the class token attends to most, over all heads.
        logits [B, heads, 1 + topk, num_keys] of the last block's attention before its softmax: rows are the class token and
        `queries`, columns the order's first num_keys patches.
        """
        features, last_input = self._run(imgs)
        x, qkv = self.blocks[-1].norm1(last_input), self.blocks[-1].attn.qkv
        (q_weight, k_weight, _), (q_bias, k_bias, _) = qkv.weight.chunk(3), qkv.bias.chunk(3)
        patches = order.take(x[:, 1:], order.ids_shuffle[:, :num_keys])  # [B, num_keys, T]
        keys = F.linear(patches, k_weight, k_bias) * (self.embed_dim // self.num_heads) ** -0.5
        cls_row = attention_logits(F.linear(x[:, :1], q_weight, q_bias), keys, self.num_heads)  # [B, heads, 1, num_keys]
        queries = cls_row.mean(dim=(1, 2)).topk(topk, dim=1).indices
        rows = attention_logits(F.linear(order.take(patches, queries), q_weight, q_bias), keys, self.num_heads)
        return features, torch.cat([cls_row, rows], dim=2), queries

    @torch.no_grad()
    def features(self, imgs):
        """imgs [B, C, H, W], normalised -> mean of the last two blocks' outputs [B, N, T], raster."""
        return self._run(imgs)[0]

    def _run(self, imgs):
        """-> (features [B, N, T], the last block's input [B, 1 + N, T])"""
        x = self.prepend_cls_token(self.patch_embed(self.cut(imgs)) + self.pos_embed[:, 1:])
        for block in self.blocks[:-1]:
            x = block(x)
        return (x + self.blocks[-1](x))[:, 1:] / 2, x


def attention_logits(q, k, num_heads):
    """Queries [B, Q, T] and keys [B, n, T] -> their products, head by head, unscaled [B, heads, Q, n], in float32 at least.

    Half precision would round what a ranking and a softmax are made of, and the few rows cost nothing.
    """
    device = "cpu" if q.device.type == "meta" else q.device.type  # meta, where costs are counted, knows no autocast
    with torch.autocast(device, enabled=False):
        q, k = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k))
        q, k = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (q, k))
        return q @ k.transpose(-2, -1)


def open_teacher(source, img_size, patch_size):
    """The teacher whose weights are at `source`, for images of `img_size` (height, width) cut into patches of `patch_size`.

    source: a checkpoint (this project's; iBOT's, DINO's and MAE's releases), a run's folder, or the name of a timm model,
    whose pre-trained weights timm then fetches. Positions of another grid are resized. ValueError where there is no such
    thing, where it is no plain ViT of a known size, or where its patches are of another size.
    """
    theirs, source = None, str(source)
    if Path(source).exists():
        path = checkpoint.find_checkpoint_file(source)
        content, fingerprint, what = checkpoint.read_checkpoint(path), checkpoint.sha256(path), f"teacher {str(path)!r}"
        what += " (of a whole run, the student)" if checkpoint.is_whole_run(content) else ""
    elif timm.is_model(source):
        what, fingerprint = f"teacher {source!r}", source
        theirs = _timm_model(source, img_size, what)
        content = theirs.state_dict()
    else:
        near = difflib.get_close_matches(source, timm.list_models("vit_*", pretrained=True), n=3)
        close = f"; close to it: {', '.join(near)}" if near else ""
        raise ValueError(f"teacher {source!r} is neither a file nor the name of a timm model{close}")
    settings = content["meta"].get("settings", {}) if isinstance(content.get("meta"), dict) else {}
    teacher, report = _build(content, settings, img_size, patch_size, what, theirs and theirs.blocks[0].attn.num_heads)
    if theirs is not None:
        _compare(teacher, theirs, what)
        settings = theirs.pretrained_cfg
    _take_imagenet_pixels(teacher, settings.get("mean") or IMAGENET_MEAN, settings.get("std") or IMAGENET_STD)
    teacher.origin = f"{what}, width {teacher.embed_dim}, {len(teacher.blocks)} blocks: {report}"
    teacher.fingerprint = fingerprint
    return teacher


def _build(content, settings, img_size, patch_size, what, num_heads):
    """-> (teacher with the encoder in a checkpoint's content, LoadReport)"""
    weights = checkpoint.encoder_weights_of(content)
    sizes = read_sizes(weights, settings, what, num_heads)
    if sizes["patch_size"] != patch_size:
        raise ValueError(f"{what} cuts patches of {sizes['patch_size']} px, the student of {patch_size}: tokens must be the same")
    with torch.random.fork_rng(devices=[]):  # so that the student's first weights do not depend on the teacher's size
        teacher = Teacher(**sizes | dict(img_size=img_size))
    checkpoint.refuse_foreign(teacher, {k: v for k, v in weights.items() if not k.startswith("norm.")}, what)
    return teacher, checkpoint.fit_encoder(teacher, content, what)


def _timm_model(name, img_size, what):
    try:
        model = timm.create_model(name, pretrained=True, img_size=img_size).eval()
    except Exception as error:  # no weights, no network, another kind of network: a dozen types
        raise ValueError(f"{what}: timm could not make it, with its weights, for images of {img_size} px: {error}") from error
    if not isinstance(model, timm.models.VisionTransformer):
        raise ValueError(f"{what} is a {type(model).__name__}; a teacher must be a plain ViT")
    return model


@torch.no_grad()
def _compare(teacher, theirs, what):
    """ValueError where timm's model computes something else of equal weights: another activation, say."""
    outputs = []
    handle = theirs.blocks[-1].register_forward_hook(lambda module, args, output: outputs.append(output))
    imgs = torch.randn(1, 3, *teacher.img_size, generator=torch.Generator().manual_seed(0))
    theirs.forward_features(imgs)
    handle.remove()
    x = teacher.forward_features(imgs)
    if outputs[0].shape != x.shape or not torch.allclose(outputs[0], x, rtol=1e-3, atol=1e-3 * x.abs().max().item()):
        raise ValueError(f"{what} is no plain ViT with a class token: timm's network computes other features of equal weights")


@torch.no_grad()
def _take_imagenet_pixels(teacher, mean, std):
    """Students' images have ImageNet's mean and deviation; a teacher of another normalisation undoes it in its embedding."""
    mean, std, ours, ours_std = (torch.tensor(x) for x in (mean, std, IMAGENET_MEAN, IMAGENET_STD))
    kernel, bias = teacher.patch_embed.proj.weight, teacher.patch_embed.proj.bias
    bias += (kernel.sum(dim=(2, 3)) * ((ours - mean) / std)).sum(dim=1)
    kernel *= (ours_std / std).view(-1, 1, 1)
