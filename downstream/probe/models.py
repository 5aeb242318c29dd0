"""Frozen encoders for evaluation without fine-tuning, and the heads that are trained on their features.

The heads are those of CAPI (Darcet et al., 2025): attentive pooling of the patch tokens, and a linear layer. All heads
of a grid of learning rates and weight decays are trained at once, on the same batches.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from encoders.load import build, read
from util.evaluate.features import Tokens, encode_blocks, num_class_tokens
from util.run.start.first_weights import identify_encoder

HEAD_CHANNELS = 64  # of a head of the attentive probe


class FrozenEncoder(nn.Module):
    """A network in eval mode without gradients: `encoder(imgs) -> {block: Tokens}`, in float32 or wider.

    network, num_prefix, num_cls: see `util.evaluate.features.encode_blocks`. sha256: of the weights.
    pixel_settings: see `CheckpointInfo.pixel_settings`. notes: what is to be printed.

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
        self.network = network
        self.name = name
        self.img_size = img_size
        self.num_prefix = num_prefix
        self.num_cls = num_cls
        self.in_chans = in_chans
        self.sha256 = sha256
        self.pixel_settings = dict(pixel_settings)
        self.notes = [*notes]
        self.dim: int = getattr(network, "num_features", None) or network.embed_dim
        self.depth = 0  # unknown
        if num_prefix and hasattr(network, "blocks"):
            self.depth = len(network.blocks)
        self.blocks = [self.depth]
        self.requires_grad_(False).eval()

    def read_blocks(self, blocks: Sequence[int]) -> None:
        """Chooses the blocks whose outputs are returned. ValueError if the network has no such blocks."""
        if not self.depth:
            raise ValueError(f"--blocks {list(blocks)} is for ViTs with a class token: {self.name} has only one output")
        if min(blocks) < 1 or max(blocks) > self.depth:
            raise ValueError(
                f"--blocks must lie between 1 and {self.depth}, the blocks of {self.name}, got {list(blocks)}"
            )
        self.blocks = sorted(set(blocks))

    @torch.no_grad()
    def forward(self, imgs: Tensor) -> dict[int, Tokens]:
        """Encodes normalised images [B, C, H, W]."""
        return encode_blocks(self.network, imgs, self.blocks, self.depth, self.num_prefix, self.num_cls)

    def vectors(self, imgs: Tensor) -> dict[str, Tensor]:
        """Returns {"<block> mean": [B, D], "<block> cls": [B, D]}, one vector per image, of each block."""
        vectors: dict[str, Tensor] = {}
        for block, tokens in self(imgs).items():
            for feature, x in tokens.vectors().items():
                vectors[f"{block} {feature}"] = x
        return vectors


# ------------------------------------------------------------------------------------------------ encoders and weights


def open_encoder(path: str | Path, input_size: int | None = None) -> FrozenEncoder:
    """Loads the encoder of a file of any origin, pre-trained or fine-tuned; see `encoders.load.read`.

    input_size: side of the images, if not that of the checkpoint. Some encoders have no final norm: CrossMAE's, and
    those of classifiers with mean pooling. Their outputs are used without a norm.
    """
    weights = read(path)
    options = {}
    if input_size is not None:
        options["img_size"] = input_size
    encoder, report = build(weights, with_head=False, **options)
    source = identify_encoder(Path(weights.path))
    return FrozenEncoder(
        encoder,
        name=str(weights.path),
        img_size=encoder.img_size,
        num_prefix=getattr(encoder, "num_cls_tokens", 0),
        num_cls=num_class_tokens(encoder),
        in_chans=encoder.in_chans,
        sha256=source.sha256,
        pixel_settings=weights.info.pixel_settings,
        notes=[f"encoder: {report}", *source.warnings()],
    )


# --------------------------------------------------------------------------------------------------------------- heads


class AttentiveProbe(nn.Module):
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


class LinearProbe(nn.Module):
    """The parameters of a linear probe."""

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_classes, dim))
        self.bias = nn.Parameter(torch.zeros(num_classes))
        nn.init.trunc_normal_(self.weight, std=0.02)


class HeadGrid(nn.Module):
    """G heads of one kind, with the same first weights and each with its own learning rate and weight decay."""

    def __init__(
        self,
        kind: type[nn.Module],
        dim: int,
        num_classes: int,
        grid: Sequence[tuple[float, float]],
    ) -> None:
        super().__init__()
        first = kind(dim, num_classes)
        self.heads = nn.ModuleList(kind(dim, num_classes) for _ in grid)
        for head in self.heads:
            head.load_state_dict(first.state_dict())
        self.grid = [*grid]
        # Heads of 64 channels, or of the nearest width that divides D.
        divisors = [number for number in range(1, dim + 1) if dim % number == 0]
        self.num_heads = min(divisors, key=lambda number: abs(dim / number - HEAD_CHANNELS))

    def stacked(self, name: str) -> Tensor:
        """Returns a parameter of all heads, [G, ...]."""
        return torch.stack([getattr(head, name) for head in self.heads])

    def split_by_head(self, name: str) -> Tensor:
        """Returns a parameter of all heads, whose first axis is split by attention heads, [G, H, d, ...]."""
        return self.stacked(name).unflatten(1, (self.num_heads, -1))

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits [G, B, C] of vectors [B, D], or of tokens [B, N, D] for attentive heads."""
        if isinstance(self.heads[0], AttentiveProbe):
            x = self.pool(x)  # [G, B, D]
        weight = self.stacked("weight").transpose(1, 2)  # [G, D, C]
        bias = self.stacked("bias").unsqueeze(1)
        return x @ weight + bias

    def pool(self, x: Tensor) -> Tensor:
        """Pools tokens [B, N, D] by attention. Returns [G, B, D].

        The projections are folded: the product of q with K x is that of x with one vector K^T q per head, and the sum
        of a (V x + b) is V (sum of a x) + b. So no token is projected.
        """
        query = self.split_by_head("query")
        key = self.split_by_head("key")
        value = self.split_by_head("value")
        head_dim = query.shape[-1]
        folded = torch.einsum("ghd,ghdc->ghc", query, key) / head_dim**0.5
        logits = x @ folded.flatten(0, 1).T  # [B, N, G H]
        attention = logits.softmax(dim=1)
        summed = attention.transpose(1, 2) @ x  # [B, G H, D]
        summed = summed.unflatten(1, (-1, self.num_heads))
        pooled = torch.einsum("bghc,ghdc->gbhd", summed, value)
        bias = self.stacked("value_bias").unsqueeze(1)
        return pooled.flatten(2) + bias

    def parameter_groups(self, scale: float) -> list[dict[str, Any]]:
        """Returns the optimizer's groups. `base_lr` is the grid's learning rate times `scale`; biases do not decay."""
        groups = []
        for head, (lr, weight_decay) in zip(self.heads, self.grid, strict=True):
            weights = [parameter for name, parameter in head.named_parameters() if not name.endswith("bias")]
            biases = [parameter for name, parameter in head.named_parameters() if name.endswith("bias")]
            rate = {"base_lr": lr * scale, "lr": lr * scale}
            groups.append({"params": weights, "weight_decay": weight_decay, **rate})
            groups.append({"params": biases, "weight_decay": 0.0, **rate})
        return groups
