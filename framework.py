"""The contract of a pre-training framework, and what the frameworks that predict pixels share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from encoders.models_swin import SwinSizes
from models_vit import ViTSizes, unpatchify
from prmim import MaskCollator, Method, SpatialAggregation, TokenCounts, TokenOrder, TokenOrderSampler


class Arguments(Method, total=False):
    """Further arguments that every framework takes, see `Framework`."""

    norm_pix_loss: bool
    mask_unit: int


class ViTArguments(Arguments, ViTSizes, total=False):
    """The arguments of every framework on a ViT, apart from its own."""


class SwinArguments(Arguments, SwinSizes, total=False):
    """The arguments of every framework on a Swin, apart from its own."""


class MAEArguments(ViTArguments, total=False):
    """The arguments of MAE, for frameworks that are built on it."""

    decoder_embed_dim: int
    decoder_depth: int
    decoder_num_heads: int | None


@dataclass(frozen=True)
class Flag:
    """A command-line flag of a framework: an argument of its constructor, and an attribute of the model that holds it.

    required: whether a run needs it. names_file: its attribute has `source`, the path or name; `fingerprint`, which
    checkpoints record, because files may move but must not change; and `origin`, a sentence for the log.
    """

    name: str
    help: str
    type: type = str
    choices: tuple[str, ...] | None = None
    required: bool = False
    names_file: bool = False


class Framework(nn.Module):
    """A pre-training model: `model(imgs, ids_shuffle)` returns {name: scalar loss}, and the sum is trained on.

    imgs: float [B, C, H, W], normalised. ids_shuffle: int64 [B, N], made by `collator`. What else
    a framework's collator adds to a batch follows as further arguments, which the model does not need.

    A framework is a file `models_<framework>_pr.py` with a subclass of this class and of an encoder. The encoder has
    the methods `cut`, which cuts images into patches, `forward_features` and `no_weight_decay`. The subclass sets the
    attributes below and implements `forward`, `reconstruct`, `panels`, `token_errors` and `load_official(state_dict)`,
    which loads weights under the names of the framework's release.

    mask_ratio, throw_ratio: shares of all tokens that are masked and thrown.
    progressive: reconstruct the thrown tokens by an aggregation. False is plain partial reconstruction: they are not
        supervised.
    kernel_size, aggregation, applies_to: arguments of `prmim.SpatialAggregation`. `aggregation` is its `kind`.
    norm_pix_loss: normalise the target pixels of each patch. It has no effect if the targets are not pixels.
    mask_unit: side, in tokens, of the squares that are masked as a whole. Throwing stays per token.
    sizes: arguments of the encoder, the next class in the order of inheritance.
    """

    img_size: tuple[int, int]  # (height, width) in pixels
    patch_size: int  # side of a patch in pixels
    grid_size: tuple[int, int]  # (rows, columns) of the tokens that are masked
    counts: TokenCounts
    mask_unit: int = 1  # side, in tokens, of the squares that are masked as a whole
    shared_visible: bool = False  # whether all images of a batch have the same visible tokens
    throws: bool = True  # whether the framework can throw tokens
    flags: tuple[Flag, ...] = ()

    def __init__(
        self,
        mask_ratio: float = 0.75,
        throw_ratio: float = 0.5,
        progressive: bool = True,
        kernel_size: int = 7,
        aggregation: str = "dwconv",
        applies_to: str = "thrown",
        norm_pix_loss: bool = False,
        mask_unit: int = 1,
        **sizes: Any,
    ) -> None:
        super().__init__(**sizes)
        self.norm_pix_loss, self.mask_unit = norm_pix_loss, mask_unit
        self.progressive, self.aggregation_options = progressive, (kernel_size, aggregation, applies_to)
        self.mask_ratio, self.throw_ratio = mask_ratio, throw_ratio
        self.counts = self.count_tokens()

    def count_tokens(self, has_maps: bool = True) -> TokenCounts:
        """Returns how many tokens are visible, retained and thrown. The number of visible squares is rounded down.

        has_maps: False before there are attention maps. Only AMT has other counts then.
        """
        return token_counts(self.grid_size, self.mask_ratio, self.throw_ratio, self.mask_unit)

    def make_aggregation(self, dim: int) -> SpatialAggregation | None:
        """Returns what reconstructs the thrown tokens from features of width `dim`, or None if nothing does.

        A framework makes it last, so that a seed gives every arm of an ablation the same weights.
        """
        if not (self.progressive and self.counts.num_thrown):
            return None
        return SpatialAggregation(dim, *self.aggregation_options)

    def own_settings(self) -> dict[str, Any]:
        """Returns the resolved values of the framework's flags. They are recorded with the run."""
        values = {flag: getattr(self, flag.name) for flag in self.flags}
        return {flag.name: value.source if flag.names_file else value for flag, value in values.items()}

    def named_files(self) -> dict[str, Any]:
        """Returns {flag: what was made of its file}."""
        return {flag.name: getattr(self, flag.name) for flag in self.flags if flag.names_file}

    def use_statistics(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """Tells the model by which mean and deviation its images are normalised. A teacher must know; others need not.

        Without a call they are ImageNet's.
        """

    def sampler(self, sampling: str) -> TokenOrderSampler:
        """Returns the sampler of the token orders that this model takes. sampling: see `collator`."""
        return TokenOrderSampler(self.grid_size, self.counts, sampling, self.mask_unit)

    def collator(
        self, sampling: str, seed: int, token_weights: Callable[[Sequence], np.ndarray] | None = None
    ) -> MaskCollator:
        """Returns the `MaskCollator` whose batches this model takes.

        sampling: name in `prmim.SAMPLING` of the function that picks the retained tokens. seed: of the token orders.
        token_weights: for sampling by attention, see `MaskCollator`. By default all tokens have the same weight.
        """
        return MaskCollator(self.sampler(sampling), seed, self.shared_visible, token_weights)

    def monitor_features(self, imgs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Computes one feature vector per whole image, by the encoder that is fine-tuned, in float32 or wider.

        imgs: normalised images [B, C, H, W]. Returns {"mean": mean of the patch tokens [B, D], "cls": class token
        [B, D]}, both after the encoder's final norm. Encoders without a class token return "mean" alone.
        """
        x = self.forward_features(imgs)  # [B, P + N, D]
        x, P = x.to(torch.promote_types(x.dtype, torch.float32)), int(hasattr(self, "cls_token"))
        features = {"mean": x[:, P:].mean(dim=1)}
        return features | {"cls": x[:, 0]} if P else features

    def reconstruct(self, imgs: torch.Tensor, ids_shuffle: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Returns (the framework's predictions in raster order, mask of the predicted tokens, bool [B, N])."""
        raise NotImplementedError

    def panels(
        self, imgs: torch.Tensor, ids_shuffle: torch.Tensor, undo: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Returns pictures of what the model predicts: {title: images [B, 3, H, W] in [0, 1]}.

        undo: turns normalised images into images in [0, 1].
        """
        raise NotImplementedError

    def token_errors(
        self, imgs: torch.Tensor, ids_shuffle: torch.Tensor, undo: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Returns the errors of the predictions: {name: error of each token [B, N] in raster order}.

        The errors are meaningful at masked tokens only. undo: turns normalised images into images in [0, 1].
        """
        raise NotImplementedError


DECODER_FLAGS = (  # of MAE, MFF and CrossMAE, whose constructors use `decoder_heads`
    Flag("decoder_depth", "blocks of the decoder (default: the model's)", int),
    Flag("decoder_embed_dim", "width of the decoder (default: the model's)", int),
    Flag("decoder_num_heads", "heads of a decoder block (default: one per 32 channels)", int),
    Flag("mask_unit", "side, in tokens, of the squares that are masked (default: 1)", int),
)


def decoder_heads(embed_dim: int, depth: int, num_heads: int | None) -> int:
    """Returns the heads of a decoder: `num_heads`, or one per 32 channels if it is None.

    Raises ValueError if a decoder of these sizes cannot be built.
    """
    if min(embed_dim, depth, 1 if num_heads is None else num_heads) < 1:
        raise ValueError(
            f"decoder_embed_dim, decoder_depth and decoder_num_heads must be at least 1, got {embed_dim}, {depth} and "
            f"{num_heads}"
        )
    if num_heads is None and embed_dim % 32:
        raise ValueError(
            f"decoder_embed_dim must be a multiple of 32, which is the width of a head, got {embed_dim}; "
            "for heads of another width set decoder_num_heads"
        )
    return embed_dim // 32 if num_heads is None else num_heads


def token_counts(grid_size: tuple[int, int], mask_ratio: float, throw_ratio: float, mask_unit: int) -> TokenCounts:
    """Returns the counts of a (rows, columns) grid whose squares of `mask_unit` x `mask_unit` tokens are masked whole.

    The number of visible squares is rounded down, as MAE rounds visible tokens. Tokens are thrown one by one, so
    `throw_ratio` is a share of all tokens, as `mask_ratio` is. Raises ValueError for impossible ratios, or for a
    `mask_unit` that does not divide the grid or leaves no square visible.
    """
    rows, columns = grid_size
    counts = TokenCounts.from_ratios(rows * columns, mask_ratio, throw_ratio)

    def count_visible(unit: int) -> int:
        return unit**2 * int(rows * columns // unit**2 * (1 - mask_ratio))

    divisors = [unit for unit in range(1, min(grid_size) + 1) if rows % unit == columns % unit == 0]
    possible = [unit for unit in divisors if count_visible(unit) > 0]
    if mask_unit not in possible and mask_unit != 1:
        raise ValueError(
            f"mask_unit must divide the grid of {rows} x {columns} tokens and leave a square visible, got {mask_unit}; "
            f"possible with mask_ratio {mask_ratio}: {', '.join(map(str, possible)) or 'none'}"
        )
    num_visible = count_visible(mask_unit)
    return TokenCounts(num_visible, rows * columns - num_visible - counts.num_thrown, counts.num_thrown)


class PixelFramework(Framework):
    """What frameworks that predict pixels share: targets, predictions as tokens, and predictions as pictures.

    A subclass has `norm_pix_loss` (normalise the target of each token) and `predict_all`. Below, P is the number of
    pixel values of a token, p*p*C for a patch of side p.
    """

    def cut_pixels(self, imgs: torch.Tensor) -> torch.Tensor:
        """Cuts images [B, C, H, W] into the pixels of each token [B, N, P]. Raises ValueError for another size."""
        return self.cut(imgs)

    def predict_all(self, imgs: torch.Tensor, order: TokenOrder) -> torch.Tensor:
        """Predicts all tokens, visible ones included. Returns [B, N, P] in token order.

        Plain partial reconstruction predicts the kept tokens only, [B, num_kept, P].
        """
        raise NotImplementedError

    def target(self, patches: torch.Tensor, order: TokenOrder, num_tokens: int) -> torch.Tensor:
        """Returns the targets of the first `num_tokens` masked tokens in token order, [B, num_tokens, P].

        patches: pixels of all tokens [B, N, P]. They are normalised if `norm_pix_loss`.
        """
        first = self.counts.num_visible
        target = order.take(patches, order.ids_shuffle[:, first : first + num_tokens])
        if self.norm_pix_loss:
            mean, std = patch_statistics(target)
            target = (target - mean) / std
        return target

    def error(self, pred: torch.Tensor, patches: torch.Tensor, order: TokenOrder) -> torch.Tensor:
        """Returns the difference between the predictions of the supervised tokens [B, n, P] and their targets.

        It is float32 or float64. Every image supervises the same number of tokens, so a plain mean of a loss over all
        values equals MAE's sum over masked tokens divided by their number.
        """
        target = self.target(patches, order, pred.shape[1])
        return pred.to(torch.promote_types(pred.dtype, torch.float32)) - target

    @torch.no_grad()
    def reconstruct(self, imgs: torch.Tensor, ids_shuffle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (predictions [B, N, P] in raster order, mask of the predicted tokens, bool [B, N]).

        The pixels of a token are in MAE's layout, see `models_vit.patchify`. Plain partial reconstruction predicts no
        thrown token. The mask is False there and the prediction is zero.
        """
        order = TokenOrder(ids_shuffle, self.counts)
        pred = self.predict_all(imgs, order)
        return order.restore(pred), order.masked_of_first(pred.shape[1])

    @torch.no_grad()
    def reconstruct_image(self, imgs: torch.Tensor, ids_shuffle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (images [B, C, H, W], mask of the predicted tokens, bool [B, N]).

        The images show the true pixels of visible tokens, the predictions of predicted tokens, and zeros elsewhere. The
        normalisation of targets is undone with the mean and variance of the true patch, which no model predicts.
        """
        pred, mask = self.reconstruct(imgs, ids_shuffle)
        patches = self.cut_pixels(imgs)
        if self.norm_pix_loss:
            mean, std = patch_statistics(patches)
            pred = pred * std + mean
        visible = ~TokenOrder(ids_shuffle, self.counts).mask
        patches = torch.where(mask.unsqueeze(-1), pred.to(patches.dtype), patches * visible.unsqueeze(-1))
        return unpatchify(patches, self.img_size[0] // self.grid_size[0], self.grid_size), mask

    def panels(
        self, imgs: torch.Tensor, ids_shuffle: torch.Tensor, undo: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Returns one panel: the images of `reconstruct_image`."""
        return {"reconstruction": undo(self.reconstruct_image(imgs, ids_shuffle)[0])}

    def token_errors(
        self, imgs: torch.Tensor, ids_shuffle: torch.Tensor, undo: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Returns the squared error of pixels in [0, 1], averaged over the pixels of each token."""
        error = (undo(imgs) - undo(self.reconstruct_image(imgs, ids_shuffle)[0])).square().mean(dim=1, keepdim=True)
        return {"masked MSE": nn.functional.adaptive_avg_pool2d(error, self.grid_size).flatten(1)}


def patch_statistics(patches: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns mean and standard deviation of each patch of [B, n, P], two of [B, n, 1].

    They are those of `norm_pix_loss`: the variance is unbiased, and 1e-6 is added to it.
    """
    return patches.mean(-1, keepdim=True), (patches.var(-1, keepdim=True) + 1e-6).sqrt()
