"""The contract of a pre-training framework, and what the frameworks that predict pixels share."""

import importlib
import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from models_vit import check_image_size, patchify
from prmim import (
    MaskCollator,
    Method,
    SpatialAggregation,
    TokenCounts,
    TokenOrder,
    TokenOrderSampler,
    count_visible,
)
from util.flag import Flag
from util.tokens import counted_tokens, fill_invalid, patch_statistics


class Framework(nn.Module):
    """A pre-training model: `model(imgs, ids_shuffle)` returns {name: scalar loss}, and the sum is trained on.

    imgs: float [B, C, H, W], normalised. ids_shuffle: int64 [B, N], made by `collator`. What else
    a framework's collator adds to a batch follows as further arguments, which the model does not need.

    A framework is a file `models_<framework>_pr.py` with a subclass of this class and of an encoder. The encoder has
    the methods `patchify`, `forward_features` and `no_weight_decay`. The subclass implements `forward`,
    `official_names` and `reconstruct`. Its constructor names all arguments: its own, the encoder's, and those of
    `use_method` and of `prmim.Method`. `models_mae_pr` is an example.
    """

    release: str  # name of the published framework, in errors
    method: Method
    img_size: tuple[int, int]  # (height, width) in pixels
    patch_size: int  # side of a patch in pixels
    grid_size: tuple[int, int]  # (rows, columns) of the tokens that are masked
    counts: TokenCounts
    shared_visible: ClassVar[bool] = False  # whether all images of a batch have the same visible tokens
    needs_attention: ClassVar[bool] = False  # whether it draws tokens by attention alone (AMT)
    flags: tuple[Flag, ...] = ()
    compiled_methods: ClassVar[tuple[str, ...]] = ()  # names of those that --compile compiles, beside all blocks

    def __init_subclass__(cls, **options: Any) -> None:
        """ValueError if a flag has the name of a method or attribute of the class: the flag's value would hide it.

        Or if it has a default, which would take the place of a factory's argument.
        """
        super().__init_subclass__(**options)
        taken = set(dir(cls))
        for base in cls.mro():
            taken.update(inspect.get_annotations(base))  # attributes that the constructor sets
        for flag in cls.flags:
            if flag.default is not None:
                raise ValueError(
                    f"--{flag.name} has the default of the constructor of {cls.__name__}: leave out its own"
                )
            if flag.name in taken:
                raise ValueError(
                    f"the flag --{flag.name} of {cls.__name__} has the name of a method or attribute of the class: "
                    "give the flag another name"
                )

    def use_method(self, method: Method, norm_pix_loss: bool, mask_unit: int, has_invalid: bool) -> None:
        """Sets what the method says of the encoder's tokens. A constructor calls it after that of the encoder.

        norm_pix_loss: normalise the targets of each token, in a `PixelFramework`.
        mask_unit: side, in tokens, of the units, the squares that are masked as a whole. Throwing stays per token.
        has_invalid: pixels may be NaN, that is, invalid: they are 0 for the encoder, and have no loss. For frameworks
            on pixels only.
        """
        self.method = method
        self.norm_pix_loss = norm_pix_loss
        self.mask_unit = mask_unit
        self.has_invalid = has_invalid
        self.counts = self.count_tokens()

    def count_tokens(self) -> TokenCounts:
        """Returns how many tokens are visible, retained and thrown. `throw_ratio` is a share of all tokens."""
        rows, columns = self.grid_size
        side = self.mask_unit
        num_units = rows * columns // side**2
        num_visible = self.count_visible_units(num_units) * side**2
        return TokenCounts.from_ratios(rows * columns, self.method.mask_ratio, self.method.throw_ratio, num_visible)

    def count_visible_units(self, num_units: int) -> int:
        """Returns how many of the units are visible: rounded down, as in MAE."""
        return count_visible(num_units, self.method.mask_ratio)

    def make_aggregation(self, dim: int) -> SpatialAggregation | None:
        """Returns what reconstructs the thrown tokens from features of width `dim`, or None if nothing does.

        Its first weights are drawn aside: a seed gives every arm of an ablation the same other weights.
        """
        if not self.method.progressive or self.counts.num_thrown == 0:
            return None
        with torch.random.fork_rng(devices=[]):
            return self.new_aggregation(dim)

    def new_aggregation(self, dim: int) -> SpatialAggregation:
        """Returns the aggregation of the method's arguments, for features of width `dim`."""
        method = self.method
        return SpatialAggregation(dim, method.kernel_size, method.aggregation, method.applies_to)

    def supervised(self, order: TokenOrder) -> Tensor:
        """Returns the tokens that are predicted and supervised, bool [B, N] in raster order: masked, or retained."""
        if self.method.progressive:
            return order.mask
        return order.mask & ~order.thrown

    def own_settings(self) -> dict[str, Any]:
        """Returns the resolved values of the framework's flags. They are recorded with the run."""
        settings = {}
        for flag in self.flags:
            value = getattr(self, flag.name)
            if flag.names_file:
                value = value.source
            settings[flag.name] = value
        return settings

    def named_files(self) -> dict[str, Any]:
        """Returns the frozen modules that were loaded from files, such as a teacher, by the names of their flags.

        A step runs them although they are no submodules. See `Flag.names_file` for what they have.
        """
        return {flag.name: getattr(self, flag.name) for flag in self.flags if flag.names_file}

    def sampler(self, sampling: str) -> TokenOrderSampler:
        """Returns the sampler of the token orders that this model takes. sampling: see `collator`."""
        return TokenOrderSampler(self.grid_size, self.counts, sampling, self.mask_unit)

    def collator(self, sampling: str, seed: int) -> MaskCollator:
        """Returns the `MaskCollator` whose batches this model takes.

        sampling: name in `prmim.SAMPLING` of the function that picks the retained tokens. seed: of the token orders.
        """
        kind = MaskCollator
        if self.has_invalid:  # which most runs have not: they load no such module
            kind = importlib.import_module("frameworks.valid_tokens").ValidTokenCollator
        return kind(self.sampler(sampling), seed, self.shared_visible)

    def reconstruct(self, imgs: Tensor, ids_shuffle: Tensor) -> tuple[Any, Tensor]:
        """Returns (the framework's predictions in raster order, mask of the predicted tokens, bool [B, N]).

        Plain partial reconstruction predicts no thrown token.
        """
        raise NotImplementedError

    def official_names(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the weights of the framework's release under the names of this model."""
        raise NotImplementedError

    def load_official(self, state_dict: Mapping[str, Any]) -> None:
        """Loads weights of the framework's release from before fine-tuning, under the names of the release.

        state_dict: the content of a file, or its `model` or `state_dict`. All keys must match, except that a release
        has no aggregation. ValueError names missing, unexpected and mis-shaped keys.
        """
        from encoders.strict import load_strict  # here, because a model needs no code for files to be trained

        weights = self.official_names(weights_in(state_dict))
        load_strict(self, weights, f"{self.release} weights", optional="aggregation.")


class PixelFramework(Framework):
    """What frameworks share that predict the pixels of each token, or other values of it.

    A subclass implements `forward_encoder`, `forward_decoder`, and a `forward` that calls both on `token_pixels`, and
    then `forward_loss`. `models_mae_pr` is an example.

    Below, P is the number of target values of a token. Of pixels it is p*p*C for a token of side p, in the layout of
    `patchify`.
    """

    compiled_methods: ClassVar[tuple[str, ...]] = ("forward_loss",)

    def token_pixels(self, imgs: Tensor) -> Tensor:
        """Returns the pixels of each token [B, N, p*p*C]. GreenMIM's tokens are larger than its patches.

        Invalid pixels are 0, the mean.
        """
        check_image_size(imgs, self.img_size)
        pixels = patchify(imgs, self.token_side)
        if self.has_invalid:
            return fill_invalid(pixels)
        return pixels

    def valid_pixels(self, imgs: Tensor) -> Tensor:
        """Returns which pixels of each token are valid, bool [B, N, p*p*C]."""
        return ~patchify(imgs, self.token_side).isnan()

    @property
    def token_side(self) -> int:
        """The side of a token in pixels."""
        return self.img_size[0] // self.grid_size[0]

    def forward_encoder(self, pixels: Tensor, order: TokenOrder) -> Tensor:
        """Encodes the visible ones of all tokens. pixels: `token_pixels(imgs)`. Returns what the decoder takes."""
        raise NotImplementedError

    def forward_decoder(self, latent: Tensor, order: TokenOrder, all_tokens: bool = False) -> Tensor:
        """Predicts the supervised tokens. Returns [B, num_supervised, P] in token order.

        all_tokens: predict the visible tokens, too, which come first.
        """
        raise NotImplementedError

    def forward_loss(
        self,
        pred: Tensor,
        imgs: Tensor,
        pixels: Tensor,
        order: TokenOrder,
    ) -> Tensor:
        """Returns the scalar loss: the mean of `penalty` over all values of the supervised tokens.

        pred: their predictions [B, n, P] in token order. pixels: `token_pixels(imgs)`.

        Every image supervises the same number of tokens, so this plain mean equals MAE's sum over masked tokens divided
        by their number. Invalid pixels have no loss, nor have tokens that do not count because most of their pixels are
        invalid. They still count in the plain mean. So every valid pixel has the same weight, in whichever micro-batch
        it is.
        """
        first = self.counts.num_visible
        ids = order.ids_shuffle[:, first : first + pred.shape[1]]  # of the supervised tokens
        target = order.take(self.target_tokens(imgs, pixels), ids)
        valid: Tensor | None = None
        if self.has_invalid:
            valid = order.take(self.valid_pixels(imgs), ids)
        if self.norm_pix_loss:
            mean, std = patch_statistics(target, valid)
            target = (target - mean) / std
        error = pred.to(torch.promote_types(pred.dtype, torch.float32)) - target  # float32 or wider
        loss = self.penalty(error)
        if valid is not None:
            counted = valid & counted_tokens(valid).unsqueeze(-1)
            loss = torch.where(counted, loss, 0.0)
        return loss.mean()

    def target_tokens(self, imgs: Tensor, pixels: Tensor) -> Tensor:
        """Returns what is predicted of each token [B, N, P] in raster order, before `norm_pix_loss`: its pixels.

        pixels: `token_pixels(imgs)`. A subclass overrides this method for another target, always or if a flag says so.
        The loss follows. Pictures and exports of MAE's decoder are refused unless it returns `pixels` itself.

        imgs: normalised, NaN at invalid pixels. A filter would spread them: apply it to `fill_invalid(imgs)`.
        """
        return pixels

    def penalty(self, error: Tensor) -> Tensor:
        """Returns the loss of each difference between prediction and target [B, n, P]: its square.

        A subclass overrides this method for another loss.
        """
        return error.square()

    @torch.no_grad()
    def reconstruct(self, imgs: Tensor, ids_shuffle: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (predictions [B, N, P] in raster order, mask of the predicted tokens, bool [B, N]).

        Plain partial reconstruction predicts no thrown token: the mask is False there and the prediction is zero.
        """
        order = TokenOrder(ids_shuffle, self.counts)
        latent = self.forward_encoder(self.token_pixels(imgs), order)
        pred = self.forward_decoder(latent, order, all_tokens=True)
        return order.restore(pred), self.supervised(order)


def weights_in(content: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the weights in the content of a release's file: its `model`, its `state_dict`, or all of it."""
    return dict(content.get("model", content.get("state_dict", content)))


def decoder_heads(embed_dim: int, num_heads: int | None) -> int:
    """Returns the heads of a decoder: `num_heads`, or one per 32 channels."""
    if num_heads is not None:
        return num_heads
    if embed_dim % 32:
        raise ValueError(f"decoder_embed_dim {embed_dim} is no multiple of 32: set decoder_num_heads, too")
    return embed_dim // 32


def rename_prefixes(weights: Mapping[str, Tensor], prefixes: Mapping[str, str]) -> dict[str, Tensor]:
    """Returns a state dict whose keys begin with the values of `prefixes` where they began with its keys."""
    renamed = {}
    for name, value in weights.items():
        for old, new in prefixes.items():
            if name.startswith(old):
                name = new + name.removeprefix(old)
                break
        renamed[name] = value
    return renamed


DECODER_FLAGS = (  # of MAE and CrossMAE, whose constructors use `decoder_heads`
    Flag("decoder_depth", int, help="blocks of the decoder (default: the model's)", at_least=1),
    Flag("decoder_embed_dim", int, help="width of the decoder (default: the model's)", at_least=1),
    Flag("decoder_num_heads", int, help="heads of a decoder block (default: one per 32 channels)", at_least=1),
    Flag("mask_unit", int, help="side, in tokens, of the squares that are masked (default: 1)", at_least=1),
)
