"""GreenMIM (Huang et al., NeurIPS 2022) with PR-MIM: MAE on Swin, whose encoder sees visible units alone.

Images are masked in units of 32 px, the cells of Swin's last stage. All images of a batch share the visible set, so that its
windows are grouped once; the decoder works on the grid of units, where PR-MIM throws per image, as on MAE's tokens.
"""

import torch

import models_swin
from framework import PixelFramework
from models_swin import GroupPlanner, SwinEncoder
from models_vit import init_weights, patchify
from prmim import ProgressiveDecoder, TokenCounts, TokenOrder
from util.key_names import swap_merging
from util.run.checkpoint import load_strict

__all__ = [
    "GreenMIMSwin",
    "greenmim_swin_micro_patch4_window4",
    "greenmim_swin_base_patch4_window7",
    "greenmim_swin_large_patch4_window14",
]

DECODER_ORDERS = ("true", "reference")


class GreenMIMSwin(PixelFramework, SwinEncoder):
    """A Swin encoder on visible units that owns a progressive decoder. Arguments are Swin's, then MAE's, then PR-MIM's.

    N counts units here, not patches. decoder_order "true" puts visible units where they belong; "reference" does as the
    release's code, which encodes them in raster order and takes them for the order of the mask's noise: each then lies
    at a random one of the visible places (with the batches of `collator`, which alone keep that order).
    """

    shared_visible = True

    def __init__(
        self,
        img_size=224,
        patch_size=4,
        in_chans=3,
        embed_dim=128,
        depths=(2, 2, 18, 2),
        num_heads=(4, 8, 16, 32),
        window_size=7,
        mlp_ratio=4.0,
        decoder_embed_dim=512,
        decoder_depth=1,
        decoder_num_heads=16,
        decoder_order="true",
        norm_pix_loss=False,
        mask_ratio=0.75,
        throw_ratio=0.5,
        progressive=True,
        kernel_size=7,
        aggregation="dwconv",
        applies_to="thrown",
    ):
        super().__init__(img_size, patch_size, in_chans, embed_dim, depths, num_heads, window_size, mlp_ratio)
        if decoder_order not in DECODER_ORDERS:
            raise ValueError(f"unknown decoder_order {decoder_order!r}, choose from {', '.join(DECODER_ORDERS)}")
        self.grid_size, self.norm_pix_loss, self.decoder_order = self.unit_grid, norm_pix_loss, decoder_order
        self.visible_order = "noise" if decoder_order == "reference" else "raster"
        for module in self.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.eps = 1e-6  # in pre-training; Swin's own 1e-5 in fine-tuning
        init_weights(self)  # MAE's, on everything but the bias tables
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

    def forward(self, imgs, ids_shuffle, *plans):
        """imgs [B, C, H, W], normalised, and ids_shuffle int64 [B, N] -> {"pixel": scalar loss}.

        plans: the groups of windows that `collator` has planned for the batch's visible set; without them each stage is one
        group of all visible tokens: equal, and slower.
        """
        order = TokenOrder(ids_shuffle, self.counts)
        units = self.cut_pixels(imgs)  # [B, N, 32 * 32 * C]
        pred = self.decoder(self.forward_encoder(units, order, plans), order)  # [B, num_supervised, 32 * 32 * C]
        return {"pixel": self.error(pred, units, order).square().mean()}

    def cut_pixels(self, imgs):
        """imgs [B, C, H, W] of the model's size -> units [B, N, 32 * 32 * C], pixels in MAE's layout."""
        self.check_size(imgs)
        return patchify(imgs, self.stride)

    def forward_encoder(self, units, order, plans=()):
        """All units [B, N, 32 * 32 * C] -> latent of the visible ones [B, num_visible, 8 D]."""
        ids = order.ids_visible
        if ids.device.type != "meta" and not torch.compiler.is_compiling():
            shared = (ids == ids[:1]).all()
            if ids.device.type == "cpu" and not shared:
                raise ValueError("all images of a batch must share their visible tokens: use MaskCollator with shared_visible=True")
            torch._assert_async(shared)  # waits for no device
        if self.visible_order == "noise":  # the reference encodes in raster order, whatever the order of the noise
            ids = ids.sort(dim=1).values
        side, p = self.stride // self.patch_size, self.patch_size
        pixels = order.take(units, ids).unflatten(2, (side, p, side, p, -1))  # [B, V, 8, 4, 8, 4, C]
        tokens = self.patch_embed(pixels.transpose(3, 4).flatten(4))  # [B, V, 8, 8, D]
        return self.encode_visible(tokens, ids[0], plans)

    def predict_all(self, imgs, order):
        return self.decoder.predict(self.decoder.reconstruct(self.forward_encoder(self.cut_pixels(imgs), order), order))

    def no_weight_decay(self):
        """The release decays neither bias tables nor the mask token."""
        return {name for name, _ in self.named_parameters() if "position_bias" in name or "token" in name}

    def load_official(self, state_dict, first_release=False):
        """Loads the weights of GreenMIM's releases before fine-tuning: their content, or its `model`.

        Strict, apart from the aggregator. first_release: the files that are public merge patches in the order 00, 01, 10,
        11, and are re-indexed to Swin's 00, 10, 01, 11. ValueError names missing, unexpected and mis-shaped keys.
        """
        renamed = {}
        for name, value in state_dict.get("model", state_dict).items():
            if name.startswith("decoder_") or name == "mask_token":
                renamed["decoder." + name.removeprefix("decoder_")] = value
            elif not name.endswith(("relative_position_index", "attn_mask")):  # those are computed
                renamed[name.removeprefix("encoder.")] = value
        renamed = swap_merging(renamed) if first_release else renamed
        load_strict(self, renamed, "GreenMIM weights", optional="aggregation.")


def greenmim_swin_micro_patch4_window4(**kwargs):
    decoder = dict(decoder_embed_dim=64, decoder_num_heads=2)
    return GreenMIMSwin(**{**models_swin.MICRO, **decoder, **kwargs})


def greenmim_swin_base_patch4_window7(**kwargs):
    return GreenMIMSwin(**{**models_swin.BASE, "window_size": 7, **kwargs})


def greenmim_swin_large_patch4_window14(**kwargs):
    return GreenMIMSwin(**{**models_swin.LARGE, "window_size": 14, **kwargs})
