"""The contract of a pre-training framework, and what the frameworks that predict pixels share."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import nn

from encoders.models_swin import SwinSizes
from models_vit import ViTSizes, unpatchify
from prmim import MaskCollator, Method, SpatialAggregation, TokenCounts, TokenOrder, TokenOrderSampler, count_visible
from util.run.checkpoint import load_strict

if TYPE_CHECKING:
    from util.run.cli import Change


class Arguments(Method, total=False):
    """The arguments of every framework, see `Framework`."""

    norm_pix_loss: bool
    mask_unit: int


class ViTArguments(Arguments, ViTSizes, total=False):
    """The arguments of every framework on a ViT, apart from its own."""


class SwinArguments(Arguments, SwinSizes, total=False):
    """The arguments of every framework on a Swin, apart from its own."""


class ViTTokenArguments(ViTArguments, total=False):
    """The arguments of frameworks that can have several class tokens, apart from their own."""

    num_cls_tokens: int
    learned_pos_embed: bool


class MAEArguments(ViTTokenArguments, total=False):
    """The arguments of MAE, for frameworks that are built on it."""

    decoder_embed_dim: int
    decoder_depth: int
    decoder_num_heads: int | None


@dataclass(frozen=True)
class Flag:
    """A command-line flag of a framework: an argument of its constructor, and an attribute of the model that holds it.

    type: `bool` makes a switch. required: whether a run needs it. changes: what another value changes, see
    `util.run.cli.Change`. names_file: its attribute has `source`, the path or name; `fingerprint`, which checkpoints
    record, because files may move but must not change; and `origin`, a sentence for the log.
    """

    name: str
    help: str
    type: type = str
    choices: tuple[str, ...] | None = None
    required: bool = False
    names_file: bool = False
    changes: "Change" = "results"


@dataclass(frozen=True)
class View:
    """A prediction that can be looked at and measured. `frameworks.reconstruction` composes pictures of views."""

    title: str  # of the prediction in a picture
    truth_title: str | None  # of the truth; None if it is the images themselves, which every picture shows
    truth: torch.Tensor  # images [B, C, H, W] in [0, 1]
    prediction: torch.Tensor  # likewise; read at predicted tokens only
    measure: str  # name of the errors in a table
    errors: torch.Tensor  # of each token in raster order, [B, N]; read at predicted tokens only


class NoPixels(ValueError):
    """The predictions are no pixels, and nothing says how to draw them."""


class Framework(nn.Module):
    """A pre-training model: `model(imgs, ids_shuffle)` returns {name: scalar loss}, and the sum is trained on.

    imgs: float [B, C, H, W], normalised. ids_shuffle: int64 [B, N], made by `collator`. What else
    a framework's collator adds to a batch follows as further arguments, which the model does not need.

    A framework is a file `models_<framework>_pr.py` with a subclass of this class and of an encoder. The encoder has
    the methods `patchify`, `forward_features` and `no_weight_decay`. The subclass implements `forward`,
    `official_names`, `reconstruct` and `views`.

    mask_ratio, throw_ratio: shares of all tokens that are masked and thrown.
    progressive: reconstruct the thrown tokens by an aggregation. False is plain partial reconstruction: they are not
        supervised.
    kernel_size, aggregation, applies_to: arguments of `prmim.SpatialAggregation`. `aggregation` is its `kind`.
    norm_pix_loss: normalise the targets of each token, in a `PixelFramework`.
    mask_unit: side, in tokens, of the squares that are masked as a whole. Throwing stays per token.
    sizes: arguments of the encoder, the next class in the order of inheritance.
    """

    release: str  # name of the published framework, in errors
    img_size: tuple[int, int]  # (height, width) in pixels
    patch_size: int  # side of a patch in pixels
    grid_size: tuple[int, int]  # (rows, columns) of the tokens that are masked
    counts: TokenCounts
    shared_visible: ClassVar[bool] = False  # whether all images of a batch have the same visible tokens
    throws: bool = True  # whether the framework can throw tokens
    flags: tuple[Flag, ...] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        """ValueError if a flag has the name of a method or attribute of the class: the flag's value would hide it."""
        super().__init_subclass__(**options)
        taken = set(dir(cls))
        for base in cls.mro():
            taken.update(inspect.get_annotations(base))  # attributes that the constructor sets
        for flag in cls.flags:
            if flag.name in taken:
                raise ValueError(
                    f"the flag --{flag.name} of {cls.__name__} has the name of a method or attribute of the class: "
                    "give the flag another name"
                )

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
        if throw_ratio and not self.throws:
            raise ValueError(f"{type(self).__name__} throws no tokens, got throw_ratio {throw_ratio}; set it to 0")
        if getattr(self, "num_cls_tokens", 1) > 1 and not set(TOKEN_FLAGS) <= set(self.flags):
            raise ValueError(f"{type(self).__name__} is made for one class token, got {self.num_cls_tokens}")
        self.norm_pix_loss, self.mask_unit = norm_pix_loss, mask_unit
        self.progressive, self.aggregation_options = progressive, (kernel_size, aggregation, applies_to)
        self.mask_ratio, self.throw_ratio = mask_ratio, throw_ratio
        self.counts = self.count_tokens()

    def count_tokens(self, has_maps: bool = True) -> TokenCounts:
        """Returns how many tokens are visible, retained and thrown. The number of visible squares is rounded down.

        has_maps: False before there are attention maps. Only AMT has other counts then.
        """
        return self.counts_of(count_visible(self.num_units, self.mask_ratio))

    @property
    def num_units(self) -> int:
        """The number of squares that are masked as a whole."""
        (rows, columns), unit = self.grid_size, self.mask_unit
        if unit < 1 or rows % unit or columns % unit:
            raise ValueError(f"mask_unit must divide the grid of {rows} x {columns} tokens, got {unit}")
        return rows * columns // unit**2

    def counts_of(self, visible_units: int) -> TokenCounts:
        """Returns the counts if that many squares are visible. `throw_ratio` is a share of all tokens."""
        num_tokens, num_visible = self.num_units * self.mask_unit**2, visible_units * self.mask_unit**2
        return TokenCounts.from_ratios(num_tokens, self.mask_ratio, self.throw_ratio, num_visible)

    def make_aggregation(self, dim: int) -> SpatialAggregation | None:
        """Returns what reconstructs the thrown tokens from features of width `dim`, or None if nothing does.

        A framework makes it last, so that a seed gives every arm of an ablation the same weights.
        """
        if not (self.progressive and self.counts.num_thrown):
            return None
        return SpatialAggregation(dim, *self.aggregation_options)

    def supervised(self, order: TokenOrder) -> torch.Tensor:
        """Returns the tokens that are predicted and supervised, bool [B, N] in raster order: masked, or retained."""
        return order.mask if self.progressive else order.mask & ~order.thrown

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

    def reconstruct(self, imgs: torch.Tensor, ids_shuffle: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Returns (the framework's predictions in raster order, mask of the predicted tokens, bool [B, N]).

        Plain partial reconstruction predicts no thrown token.
        """
        raise NotImplementedError

    def views(
        self, imgs: torch.Tensor, ids_shuffle: torch.Tensor, undo: Callable[[torch.Tensor], torch.Tensor]
    ) -> list[View]:
        """Returns the predictions as images and errors. undo: turns normalised images into images in [0, 1].

        NoPixels if the predictions cannot be drawn.
        """
        raise NotImplementedError

    def predicts_pixels(self) -> bool:
        """Returns whether the predictions are pixels, which a PSNR or a decoder of MAE's scripts stands for."""
        return False

    def official_names(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the weights of the framework's release under the names of this model."""
        raise NotImplementedError

    def load_official(self, state_dict: Mapping[str, Any]) -> None:
        """Loads weights of the framework's release from before fine-tuning, under the names of the release.

        state_dict: the content of a file, or its `model` or `state_dict`. All keys must match, except that a release
        has no aggregation. ValueError names missing, unexpected and mis-shaped keys.
        """
        weights = state_dict.get("model", state_dict.get("state_dict", state_dict))
        load_strict(self, self.official_names(dict(weights)), f"{self.release} weights", optional="aggregation.")


DECODER_FLAGS = (  # of MAE, MFF and CrossMAE, whose constructors use `decoder_heads`
    Flag("decoder_depth", "blocks of the decoder (default: the model's)", int),
    Flag("decoder_embed_dim", "width of the decoder (default: the model's)", int),
    Flag("decoder_num_heads", "heads of a decoder block (default: one per 32 channels)", int),
    Flag("mask_unit", "side, in tokens, of the squares that are masked (default: 1)", int),
)

TOKEN_FLAGS = (  # of MAE and MFF: other frameworks' decoders or targets are made for one class token
    Flag("num_cls_tokens", "class tokens of encoder and decoder (default: 1)", int),
    Flag("learned_pos_embed", "train the positions of encoder and decoder (default: frozen sine-cosine tables)", bool),
)


def decoder_heads(embed_dim: int, depth: int, num_heads: int | None) -> int:
    """Returns the heads of a decoder: `num_heads`, or one per 32 channels. ValueError for impossible sizes."""
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


def check_blocks(name: str, numbers: Sequence[int], depth: int) -> tuple[int, ...]:
    """Returns the numbers of some blocks. ValueError unless they increase from 0 or more to the last of `depth`."""
    if [*numbers] != sorted(set(numbers)) or [*numbers][-1:] != [depth - 1] or numbers[0] < 0:
        raise ValueError(f"{name} must increase from 0 or more to the last block {depth - 1}, got {tuple(numbers)}")
    return tuple(numbers)


class PixelFramework(Framework):
    """What frameworks share that predict the pixels of each token, or other values of it.

    A subclass implements `predict_all`.

    Below, P is the number of target values of a token. Of pixels it is p*p*C for a patch of side p, in the layout of
    `patchify`.
    """

    def token_pixels(self, imgs: torch.Tensor) -> torch.Tensor:
        """Returns the pixels of each token [B, N, p*p*C]. GreenMIM's tokens are larger than its patches."""
        return self.patchify(imgs)

    def target_tokens(self, imgs: torch.Tensor) -> torch.Tensor:
        """Returns what is predicted of each token [B, N, P] in raster order, before `norm_pix_loss`: its pixels.

        Losses, pictures and exports know targets from here alone. A subclass overrides it for another target.
        """
        return self.token_pixels(imgs)

    def predicts_pixels(self) -> bool:
        """Returns whether the targets of random images are their pixels."""
        generator = torch.Generator().manual_seed(0)  # leaves the run's random numbers alone
        parameter = next(self.parameters())
        imgs = torch.randn(1, self.in_chans, *self.img_size, generator=generator).to(parameter.device, parameter.dtype)
        return torch.equal(self.target_tokens(imgs), self.token_pixels(imgs))

    def predict_all(self, imgs: torch.Tensor, order: TokenOrder) -> torch.Tensor:
        """Predicts all tokens, visible ones included. Returns [B, N, P] in token order.

        Plain partial reconstruction predicts the kept tokens only, [B, num_kept, P].
        """
        raise NotImplementedError

    def supervised_targets(self, imgs: torch.Tensor, order: TokenOrder, num_tokens: int) -> torch.Tensor:
        """Returns the targets of the first `num_tokens` masked tokens in token order, [B, num_tokens, P].

        They are normalised if `norm_pix_loss`.
        """
        first = self.counts.num_visible
        target = order.take(self.target_tokens(imgs), order.ids_shuffle[:, first : first + num_tokens])
        if self.norm_pix_loss:
            mean, std = patch_statistics(target)
            target = (target - mean) / std
        return target

    def error(self, pred: torch.Tensor, imgs: torch.Tensor, order: TokenOrder) -> torch.Tensor:
        """Returns the difference between the predictions of the supervised tokens [B, n, P] and their targets.

        It is float32 or float64. Every image supervises the same number of tokens, so a plain mean of a loss over all
        values equals MAE's sum over masked tokens divided by their number.
        """
        target = self.supervised_targets(imgs, order, pred.shape[1])
        return pred.to(torch.promote_types(pred.dtype, torch.float32)) - target

    @torch.no_grad()
    def reconstruct(self, imgs: torch.Tensor, ids_shuffle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (predictions [B, N, P] in raster order, mask of the predicted tokens, bool [B, N]).

        Plain partial reconstruction predicts no thrown token: the mask is False there and the prediction is zero.
        """
        order = TokenOrder(ids_shuffle, self.counts)
        return order.restore(self.predict_all(imgs, order)), self.supervised(order)

    @torch.no_grad()
    def views(
        self, imgs: torch.Tensor, ids_shuffle: torch.Tensor, undo: Callable[[torch.Tensor], torch.Tensor]
    ) -> list[View]:
        """Returns one view. Its errors are squared errors of pixels in [0, 1], averaged over each token.

        The normalisation of targets is undone with the mean and variance of the true patch, which no model predicts.
        NoPixels for other targets.
        """
        if not self.predicts_pixels():
            raise NoPixels(
                f"the targets of {type(self).__name__} are no pixels, so its predictions cannot be drawn as images: "
                "override `views`"
            )
        (pred, _), patches = self.reconstruct(imgs, ids_shuffle), self.token_pixels(imgs)
        if self.norm_pix_loss:
            mean, std = patch_statistics(patches)
            pred = pred * std + mean
        side = self.img_size[0] // self.grid_size[0]
        truth, prediction = undo(imgs), undo(unpatchify(pred.to(patches.dtype), side, self.grid_size))
        error = (truth - prediction).square().mean(dim=1, keepdim=True)
        errors = nn.functional.adaptive_avg_pool2d(error, self.grid_size).flatten(1)
        return [View("reconstruction", None, truth, prediction, "masked MSE", errors)]


def patch_statistics(patches: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns mean and standard deviation of each patch of [B, n, P], two of [B, n, 1].

    They are those of `norm_pix_loss`: the variance is unbiased, and 1e-6 is added to it.
    """
    return patches.mean(-1, keepdim=True), (patches.var(-1, keepdim=True) + 1e-6).sqrt()
