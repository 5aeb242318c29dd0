"""GreenMIM (Huang et al., NeurIPS 2022) with PR-MIM: MAE on Swin, whose encoder sees only the visible units.

Images are masked in units of 32 px, the cells of Swin's last stage. All images of a batch share one visible set, so
that its windows are grouped once. The decoder works on the grid of units. There PR-MIM throws units of each image
independently, as it does with MAE's tokens.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from encoders import models_swin
from encoders.models_swin import GroupPlanner, SwinEncoder
from encoders.names import swap_merging
from framework import PixelFramework
from models_vit import check_image_size, init_weights, patchify
from prmim import ProgressiveDecoder, TokenCounts, TokenOrder
from util.run.checkpoint import load_strict

__all__ = [
    "GreenMIMSwin",
    "greenmim_swin_micro_patch4_window4",
    "greenmim_swin_base_patch4_window7",
    "greenmim_swin_large_patch4_window14",
]

DECODER_ORDERS = ("true", "reference")


def add_flags(group: argparse._ArgumentGroup) -> None:
    """Adds GreenMIM's own flag to a group of a parser. It is None unless given: the model then uses its default."""
    group.add_argument(
        "--decoder_order",
        choices=DECODER_ORDERS,
        help="where the decoder places the visible units. true: at their own positions; reference: as the release's "
        "code, which takes their raster order for the order of the mask's noise (default: true)",
    )


class GreenMIMSwin(PixelFramework, SwinEncoder):
    """A Swin encoder on visible units that owns a progressive decoder. Arguments are Swin's, then MAE's, then PR-MIM's.

    N is the number of units here, not of patches. decoder_order: "true" places the visible units where they belong.
    "reference" does as the release's code, which encodes them in raster order and then treats them as if they were in
    the order of the mask's noise. Each visible unit is then placed at a random one of the visible positions. That needs
    the batches of `collator`, since only they keep the order of the noise.
    """

    shared_visible = True

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 4,
        in_chans: int = 3,
        embed_dim: int = 128,
        depths: Sequence[int] = (2, 2, 18, 2),
        num_heads: Sequence[int] = (4, 8, 16, 32),
        window_size: int = 7,
        mlp_ratio: float = 4.0,
        decoder_embed_dim: int = 512,
        decoder_depth: int = 1,
        decoder_num_heads: int = 16,
        decoder_order: str = "true",
        norm_pix_loss: bool = False,
        mask_ratio: float = 0.75,
        throw_ratio: float = 0.5,
        progressive: bool = True,
        kernel_size: int = 7,
        aggregation: str = "dwconv",
        applies_to: str = "thrown",
    ) -> None:
        super().__init__(img_size, patch_size, in_chans, embed_dim, depths, num_heads, window_size, mlp_ratio)
        if decoder_order not in DECODER_ORDERS:
            raise ValueError(f"unknown decoder_order {decoder_order!r}, choose from {', '.join(DECODER_ORDERS)}")
        self.grid_size, self.norm_pix_loss, self.decoder_order = self.unit_grid, norm_pix_loss, decoder_order
        self.visible_order = "noise" if decoder_order == "reference" else "raster"
        for module in self.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.eps = 1e-6  # only in pre-training: fine-tuning uses Swin's 1e-5
        init_weights(self)  # MAE's initialisation of everything except the bias tables
        self.counts = TokenCounts.from_ratios(self.num_tokens, mask_ratio, throw_ratio)
        self.planner = GroupPlanner(self, self.counts.num_visible)
        self.decoder = ProgressiveDecoder(
            self.grid_size,
            self.counts,
            self.num_features,
            head=self.stride**2 * in_chans,
            decoder_embed_dim=decoder_embed_dim,
            decoder_depth=decoder_depth,
            decoder_num_heads=decoder_num_heads,
            mlp_ratio=mlp_ratio,
            progressive=progressive,
            kernel_size=kernel_size,
            aggregation=aggregation,
            applies_to=applies_to,
            cls_token=False,
        )

    def own_settings(self) -> dict[str, Any]:
        """Returns GreenMIM's own settings as resolved values, by the names of its flags."""
        return {"decoder_order": self.decoder_order}

    def forward(self, imgs: torch.Tensor, ids_shuffle: torch.Tensor, *plans: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the scalar loss {"pixel"}.

        imgs: [B, C, H, W], normalised. ids_shuffle: int64 [B, N]. plans: the groups of windows that `collator` has
        planned for the visible set of the batch. Without them each stage has one group of all visible tokens: the
        result is the same, but it takes longer.
        """
        order = TokenOrder(ids_shuffle, self.counts)
        units = self.cut_pixels(imgs)  # [B, N, 32 * 32 * C]
        pred = self.decoder(self.forward_encoder(units, order, plans), order)  # [B, num_supervised, 32 * 32 * C]
        return {"pixel": self.error(pred, units, order).square().mean()}

    def cut_pixels(self, imgs: torch.Tensor) -> torch.Tensor:
        """Cuts images [B, C, H, W] of the model's size into units [B, N, 32 * 32 * C], pixels in MAE's layout."""
        check_image_size(imgs, self.img_size)
        return patchify(imgs, self.stride)

    def forward_encoder(
        self, units: torch.Tensor, order: TokenOrder, plans: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor:
        """Returns the latent of the visible units [B, num_visible, 8 D].

        units: all of them, [B, N, 32 * 32 * C]. Raises ValueError, on the CPU, if the images of the batch do not share
        their visible units.
        """
        ids = order.ids_visible
        if ids.device.type != "meta" and not torch.compiler.is_compiling():
            shared = (ids == ids[:1]).all()
            if ids.device.type == "cpu" and not shared:
                raise ValueError(
                    "all images of a batch must share their visible tokens: use MaskCollator with shared_visible=True"
                )
            torch._assert_async(shared)  # without a host-device sync
        if self.visible_order == "noise":  # the reference encodes in raster order, not in the order of the noise
            ids = ids.sort(dim=1).values
        side, p = self.stride // self.patch_size, self.patch_size
        pixels = order.take(units, ids).unflatten(2, (side, p, side, p, -1))  # [B, V, 8, 4, 8, 4, C]
        tokens = self.patch_embed(pixels.transpose(3, 4).flatten(4))  # [B, V, 8, 8, D]
        return self.encode_visible(tokens, ids[0], plans)

    def predict_all(self, imgs: torch.Tensor, order: TokenOrder) -> torch.Tensor:
        """Returns predictions [B, N, 32 * 32 * C] in token order, of the kept units only if not progressive."""
        latent = self.forward_encoder(self.cut_pixels(imgs), order)
        return self.decoder.predict(self.decoder.reconstruct(latent, order))

    def no_weight_decay(self) -> set[str]:
        """Returns the names of the bias tables and the mask token, which the release does not decay."""
        return {name for name, _ in self.named_parameters() if "position_bias" in name or "token" in name}

    def load_official(self, state_dict: Mapping[str, Any], first_release: bool = False) -> None:
        """Loads a release of GreenMIM before fine-tuning, given as the file's content or as its `model`.

        Loading is strict, except for the aggregator. The ValueError names missing, unexpected and mis-shaped keys.

        first_release: re-index the patch merging from the order 00, 01, 10, 11 of the public files to Swin's 00, 10,
        01, 11.
        """
        renamed: dict[str, torch.Tensor] = {}
        for name, value in state_dict.get("model", state_dict).items():
            if name.startswith("decoder_") or name == "mask_token":
                renamed["decoder." + name.removeprefix("decoder_")] = value
            elif not name.endswith(("relative_position_index", "attn_mask")):  # the model computes these
                renamed[name.removeprefix("encoder.")] = value
        if first_release:
            renamed = swap_merging(renamed)
        load_strict(self, renamed, "GreenMIM weights", optional="aggregation.")


def greenmim_swin_micro_patch4_window4(**kwargs: Any) -> GreenMIMSwin:
    decoder = dict(decoder_embed_dim=64, decoder_num_heads=2)
    return GreenMIMSwin(**{**models_swin.MICRO, **decoder, **kwargs})


def greenmim_swin_base_patch4_window7(**kwargs: Any) -> GreenMIMSwin:
    return GreenMIMSwin(**{**models_swin.BASE, "window_size": 7, **kwargs})


def greenmim_swin_large_patch4_window14(**kwargs: Any) -> GreenMIMSwin:
    return GreenMIMSwin(**{**models_swin.LARGE, "window_size": 14, **kwargs})
