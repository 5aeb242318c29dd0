"""Frozen encoders for evaluation without fine-tuning, and the heads that are trained on their features.

The heads are those of CAPI (Darcet et al., 2025): attentive pooling of the patch tokens, and a linear layer. All heads
of a grid of learning rates and weight decays are trained at once, on the same batches.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from encoders.load import ENCODER_KEYS, build, read, refuse_foreign
from util.data.pixel_format import RGB8, PixelFormat
from util.data.statistics import known_statistics
from util.evaluate.features import class_feature, forward_blocks
from util.lazy import LazyModule
from util.run import checkpoint
from util.run.resume import identify_encoder
from util.text import shorten

timm = LazyModule("timm")

HEAD_CHANNELS = 64  # of a head of the attentive probe


class Tokens(NamedTuple):
    """What an encoder makes of a batch of images at one block, after the final norm."""

    cls: torch.Tensor | None  # [B, D]; None without a class token
    patches: torch.Tensor  # [B, N, D]


class FrozenEncoder(nn.Module):
    """A network in eval mode without gradients: `encoder(imgs) -> {block: Tokens}`, in float32 or wider.

    network: has `forward_features(imgs)`, which returns tokens [B, P + N, D] or a map [B, D, H, W] or [B, H, W, D].
    num_prefix: leading tokens that are not patches. num_cls: how many of these are class tokens, see
    `util.evaluate.features.class_feature`.
    sha256: of the weights. pixel_settings: see `CheckpointInfo.pixel_settings`. notes: what is to be printed.

    `blocks` are counted from 1. By default only the last one is read. Outputs of other blocks go through the final
    norm, too, as in DINOv2's evaluation.
    """

    def __init__(
        self,
        network: nn.Module,
        name: str,
        img_size: tuple[int, int],
        num_prefix: int,
        num_cls: int,
        in_chans: int,
        sha256: str,
        pixel_settings: Mapping[str, Any],
        notes: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.network, self.name, self.img_size, self.sha256, self.notes = network, name, img_size, sha256, [*notes]
        self.num_prefix, self.num_cls, self.in_chans = num_prefix, num_cls, in_chans
        self.pixel_settings = dict(pixel_settings)
        self.dim: int = getattr(network, "num_features", None) or network.embed_dim
        self.depth = len(network.blocks) if num_prefix and hasattr(network, "blocks") else 0  # 0: unknown
        self.blocks = [self.depth]
        self.requires_grad_(False).eval()

    def read_blocks(self, blocks: Sequence[int]) -> None:
        """Chooses the blocks whose outputs are returned. ValueError if the network has no such blocks."""
        if not self.depth:
            raise ValueError(f"--blocks {list(blocks)} is for ViTs with a class token: {self.name} has only one output")
        if odd := [block for block in blocks if not 1 <= block <= self.depth]:
            raise ValueError(f"--blocks must lie between 1 and {self.depth}, the blocks of {self.name}, got {odd}")
        self.blocks = sorted(set(blocks))

    @torch.no_grad()
    def forward(self, imgs: torch.Tensor) -> dict[int, Tokens]:
        """Encodes normalised images [B, C, H, W]."""
        hooked = self.blocks if self.num_cls > 1 and self.depth else [b for b in self.blocks if b != self.depth]
        x, outputs = forward_blocks(self.network, imgs, hooked)
        found = {block: self.network.norm(outputs[block]) for block in hooked if block != self.depth}
        found[self.depth] = x
        return {block: self.split(found[block], outputs.get(block)) for block in self.blocks}

    def split(self, x: torch.Tensor, before_norm: torch.Tensor | None) -> Tokens:
        """Separates class tokens and patches, and flattens a map of features."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if x.ndim == 4:
            x = x.flatten(1, 2) if x.shape[-1] == self.dim else x.flatten(2).transpose(1, 2)
        cls = class_feature(x, before_norm, self.num_cls) if self.num_cls else None
        return Tokens(cls, x[:, self.num_prefix :])

    def vectors(self, imgs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns {"<block> mean": [B, D], "<block> cls": [B, D]}, one vector per image, of each block."""
        found: dict[str, torch.Tensor] = {}
        for block, tokens in self(imgs).items():
            found[f"{block} mean"] = tokens.patches.mean(dim=1)
            if tokens.cls is not None:
                found[f"{block} cls"] = tokens.cls
        return found


# ------------------------------------------------------------------------------------------------ encoders and weights


def open_encoder(path: str | Path, input_size: int | None = None) -> FrozenEncoder:
    """Loads the encoder of a file of any origin, pre-trained or fine-tuned; see `encoders.load.read`.

    input_size: side of the images, if not that of the checkpoint. Some encoders have no final norm: CrossMAE's, and
    those of classifiers with mean pooling. Their outputs are used without a norm.
    """
    weights = read(path)
    encoder, report = build(weights, with_head=False, **({} if input_size is None else {"img_size": input_size}))
    source, cls = identify_encoder(Path(weights.path), weights.info), getattr(encoder, "num_cls_tokens", 0)
    notes = [f"encoder: {report}", *source.warnings()]
    sizes = encoder.img_size, cls, cls, encoder.in_chans
    return FrozenEncoder(encoder, str(weights.path), *sizes, source.sha256, weights.pixels, notes)


def open_timm_model(name: str, path: str | None = None, input_size: int | None = None) -> FrozenEncoder:
    """Makes a model of timm with the weights at `path`, or else with those that timm has in its cache or downloads.

    path: a file, or the folder of a run or of an export. ValueError if timm does not know the model, if there are no
    weights for it, or if those at `path` belong to another network.
    """
    if not timm.is_model(name):
        near = ", ".join(timm.list_models(f"*{name.partition('.')[0]}*")[:5])
        raise ValueError(f"--timm {name!r} is no model of timm{f'; close to it: {near}' if near else ''}")
    file = None if path is None else checkpoint.find_checkpoint_file(path)
    if file is not None and not file.is_file():
        raise ValueError(f"no weights at {str(file)!r}: give the path of a file, or none for those of timm")
    size = {} if input_size is None else {"img_size": input_size}
    missing: list[str] = []
    unexpected: list[str] = []
    try:
        network = timm.create_model(name, pretrained=file is None, num_classes=0, **size)
        if file is not None:
            missing, unexpected = timm.models.load_checkpoint(network, str(file), strict=False)
    except Exception as error:  # many types: no weights, no network, another kind of network
        advice = "; without a network, download the weights elsewhere and give them as the first argument"
        raise ValueError(
            f"timm could not make {name!r} with {'its pre-trained weights' if file is None else repr(str(file))}: "
            f"{type(error).__name__}: {error}{advice if file is None else ''}"
        ) from error
    if missing:  # of the features; a head is not needed
        raise ValueError(f"{str(file)!r} holds no {name!r}: it lacks {shorten(missing, most=6)}")
    refuse_other_network(network, unexpected, repr(str(file)))
    config = network.pretrained_cfg
    in_chans, *img_size = config["input_size"]
    prefix, registers = getattr(network, "num_prefix_tokens", 0), getattr(network, "reg_token", None)
    cls = prefix - (0 if registers is None else registers.shape[1])
    digest = hashlib.sha256()
    for tensor in network.state_dict().values():
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    pixels, note = timm_pixel_settings(config, file, name)
    sizes = (input_size, input_size) if input_size else tuple(img_size), prefix, cls, in_chans
    return FrozenEncoder(network, name, *sizes, digest.hexdigest(), pixels, [note])


def refuse_other_network(network: nn.Module, unexpected: Sequence[str], what: str) -> None:
    """Raises CheckpointError if `unexpected` keys, but for those of a head, belong to parts of the network."""
    classifier = network.pretrained_cfg.get("classifier") or ()
    heads = tuple(f"{head}." for head in ((classifier,) if isinstance(classifier, str) else classifier))
    parts = {f"{key.partition('.')[0]}." for key in network.state_dict()}
    refuse_foreign(network, [key for key in unexpected if not key.startswith(heads)], what, (*ENCODER_KEYS, *parts))


def timm_pixel_settings(config: Mapping[str, Any], file: Path | None, name: str) -> tuple[dict[str, Any], str]:
    """Returns (pixel settings of a network of timm, a note that says whose they are: the file's if it holds any)."""
    info = checkpoint.CheckpointInfo() if file is None else checkpoint.read_info(file)
    stored = info.pixel_settings
    pixels = PixelFormat(config["input_size"][0], stored["pixels"] or RGB8.dtype)
    known = known_statistics(stored, pixels)
    mean, std, whose = config["mean"], config["std"], f"timm's for {name}"
    if known is not None and any(stored.values()):
        (mean, std), whose = known, f"those of {str(file)!r}"
    settings = {"pixels": pixels.dtype, "mean": mean, "std": std}
    return settings, f"note: pixel mean {list(mean)} and std {list(std)} are {whose}"


# --------------------------------------------------------------------------------------------------------------- heads


class AttentiveHead(nn.Module):
    """The parameters of CAPI's attentive probe: a learned query, keys and values of the tokens, and a linear layer.

    There is no norm, output projection, residual or MLP. A bias of the keys would cancel in the softmax.
    """

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(dim))
        self.key = nn.Parameter(torch.empty(dim, dim))
        self.value = nn.Parameter(torch.empty(dim, dim))
        self.value_bias = nn.Parameter(torch.zeros(dim))
        self.weight = nn.Parameter(torch.empty(num_classes, dim))
        self.bias = nn.Parameter(torch.zeros(num_classes))
        for parameter in (self.query, self.key, self.value, self.weight):
            nn.init.trunc_normal_(parameter, std=0.02)


class LinearHead(nn.Module):
    """The parameters of a linear probe."""

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_classes, dim))
        self.bias = nn.Parameter(torch.zeros(num_classes))
        nn.init.trunc_normal_(self.weight, std=0.02)


class HeadGrid(nn.Module):
    """G heads of one kind, with the same first weights and each with its own learning rate and weight decay."""

    def __init__(self, kind: type[nn.Module], dim: int, num_classes: int, grid: Sequence[tuple[float, float]]) -> None:
        super().__init__()
        first = kind(dim, num_classes)
        self.heads = nn.ModuleList(kind(dim, num_classes) for _ in grid)
        for head in self.heads:
            head.load_state_dict(first.state_dict())
        self.grid = [*grid]
        # Heads of 64 channels, or of the nearest width that divides D.
        self.num_heads = max(
            (h for h in range(1, dim + 1) if dim % h == 0), key=lambda h: -abs(dim / h - HEAD_CHANNELS)
        )

    def stacked(self, name: str) -> torch.Tensor:
        """Returns a parameter of all heads, [G, ...]."""
        return torch.stack([getattr(head, name) for head in self.heads])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns logits [G, B, C] of vectors [B, D], or of tokens [B, N, D] for attentive heads."""
        pooled = self.pool(x) if isinstance(self.heads[0], AttentiveHead) else x  # [G, B, D] or [B, D]
        return pooled @ self.stacked("weight").transpose(1, 2) + self.stacked("bias").unsqueeze(1)

    def pool(self, x: torch.Tensor) -> torch.Tensor:
        """Pools tokens [B, N, D] by attention. Returns [G, B, D].

        The projections are folded: the product of q with K x is that of x with one vector K^T q per head, and the sum
        of a (V x + b) is V (sum of a x) + b. So no token is projected.
        """
        G, H = len(self.heads), self.num_heads
        query = self.stacked("query").unflatten(1, (H, -1))  # [G, H, d]
        key, value = (self.stacked(name).unflatten(1, (H, -1)) for name in ("key", "value"))  # [G, H, d, D]
        folded = torch.einsum("ghd,ghdc->ghc", query, key) / query.shape[-1] ** 0.5
        attention = (x @ folded.flatten(0, 1).T).softmax(dim=1)  # [B, N, G H]
        summed = (attention.transpose(1, 2) @ x).unflatten(1, (G, H))  # [B, G, H, D]
        pooled = torch.einsum("bghc,ghdc->gbhd", summed, value).flatten(2)
        return pooled + self.stacked("value_bias").unsqueeze(1)

    def parameter_groups(self, scale: float) -> list[dict[str, Any]]:
        """Returns the optimizer's groups. `base_lr` is the grid's learning rate times `scale`; biases do not decay."""
        groups = []
        for head, (lr, weight_decay) in zip(self.heads, self.grid, strict=True):
            named = [(name.endswith("bias"), parameter) for name, parameter in head.named_parameters()]
            for is_bias, decay in ((False, weight_decay), (True, 0.0)):
                chosen = [parameter for bias, parameter in named if bias is is_bias]
                groups.append({"params": chosen, "weight_decay": decay, "base_lr": lr * scale, "lr": lr * scale})
        return groups
