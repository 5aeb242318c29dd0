"""What a framework behind `main_pretrain.MODELS` is: the contract, and what those that predict pixels share."""

import torch
from torch import nn

from models_vit import unpatchify
from prmim import MaskCollator, TokenOrder, TokenOrderSampler


class Framework(nn.Module):
    """A pre-training model: `model(imgs, ids_shuffle) -> {name: scalar loss}`, whose sum is trained on.

    A subclass is an encoder, too, and has `img_size`, `patch_size`, `grid_size`, `counts`, `cut` and `load_official`. Images
    are normalised float [B, C, H, W], `ids_shuffle` is int64 [B, N]. A framework with a `planner` also takes what it makes of
    a batch's visible tokens, `model(imgs, ids_shuffle, *plans)`; it may do without.
    """

    mask_unit = 1  # tokens a side of the squares that are masked
    shared_visible = False  # each image draws its own visible tokens
    throws = True  # the framework can throw tokens
    visible_order = "raster"  # inside ids_shuffle; "noise" as they were shuffled
    planner = None  # ids of visible tokens [V] -> tensors, in the DataLoader worker; `shapes(ids)`: one plan of each shape

    def collator(self, sampling, seed):
        """The `MaskCollator` whose batches this model takes; `sampling` picks the retained tokens."""
        sampler = TokenOrderSampler(self.grid_size, self.counts, sampling, self.mask_unit, self.visible_order)
        return MaskCollator(sampler, seed, self.shared_visible, self.planner)

    def reconstruct(self, imgs, ids_shuffle):
        """-> (the framework's predictions in raster order, mask bool [B, N] of the predicted tokens)."""
        raise NotImplementedError

    def panels(self, imgs, ids_shuffle, undo):
        """What the model predicts, to look at: {title: images [B, 3, H, W] in [0, 1]}. `undo` turns `imgs` into [0, 1]."""
        raise NotImplementedError

    def token_errors(self, imgs, ids_shuffle, undo):
        """How far predictions are from their targets: {name: error of each token [B, N], raster}, meaningful where masked."""
        raise NotImplementedError


class PixelFramework(Framework):
    """What frameworks that predict pixels share: targets, predictions as tokens, predictions as pictures.

    A subclass has `norm_pix_loss` and `predict_all`. P below is the pixels of a token that is masked.
    """

    def cut_pixels(self, imgs):
        """imgs [B, C, H, W] of the model's size -> the pixels of each token that is masked [B, N, P]."""
        return self.cut(imgs)

    def predict_all(self, imgs, order):
        """imgs -> predictions of all tokens [B, N, p*p*C], or of the kept ones if plain, in token order."""
        raise NotImplementedError

    def target(self, patches, order, num_tokens):
        """Patches [B, N, p*p*C] -> the first `num_tokens` masked ones, normalised if norm_pix_loss [B, num_tokens, p*p*C]."""
        first = self.counts.num_visible
        target = order.take(patches, order.ids_shuffle[:, first : first + num_tokens])
        if self.norm_pix_loss:
            mean, std = patch_statistics(target)
            target = (target - mean) / std
        return target

    def error(self, pred, patches, order):
        """Predictions of the supervised tokens [B, n, P] less their targets, in float32 at least.

        Every image supervises the same number of tokens, so a plain mean is MAE's sum over masked / number masked.
        """
        target = self.target(patches, order, pred.shape[1])
        return pred.to(torch.promote_types(pred.dtype, torch.float32)) - target

    @torch.no_grad()
    def reconstruct(self, imgs, ids_shuffle):
        """-> (pred [B, N, p*p*C] in raster order and MAE's patch layout, mask bool [B, N] of the predicted tokens).

        Plain partial reconstruction predicts no thrown token: its mask is False there and pred is zero.
        """
        order = TokenOrder(ids_shuffle, self.counts)
        pred = self.predict_all(imgs, order)
        return order.restore(pred), order.masked_of_first(pred.shape[1])

    @torch.no_grad()
    def reconstruct_image(self, imgs, ids_shuffle):
        """-> (images [B, C, H, W]: true patches where visible, predictions where predicted, zeros elsewhere; mask [B, N]).

        Per-patch normalisation is undone with the true patch's own mean and variance, which the model never predicts.
        """
        pred, mask = self.reconstruct(imgs, ids_shuffle)
        patches = self.cut_pixels(imgs)
        if self.norm_pix_loss:
            mean, std = patch_statistics(patches)
            pred = pred * std + mean
        visible = ~TokenOrder(ids_shuffle, self.counts).mask
        patches = torch.where(mask.unsqueeze(-1), pred.to(patches.dtype), patches * visible.unsqueeze(-1))
        return unpatchify(patches, self.img_size[0] // self.grid_size[0], self.grid_size), mask

    def panels(self, imgs, ids_shuffle, undo):
        return {"reconstruction": undo(self.reconstruct_image(imgs, ids_shuffle)[0])}

    def token_errors(self, imgs, ids_shuffle, undo):
        """Squared error of the pixels in [0, 1], averaged over each token's."""
        error = (undo(imgs) - undo(self.reconstruct_image(imgs, ids_shuffle)[0])).square().mean(dim=1, keepdim=True)
        return {"masked MSE": nn.functional.adaptive_avg_pool2d(error, self.grid_size).flatten(1)}


def patch_statistics(patches):
    """Mean and standard deviation of each patch [B, n, P] -> two of [B, n, 1], as norm_pix_loss uses them (unbiased)."""
    return patches.mean(-1, keepdim=True), (patches.var(-1, keepdim=True) + 1e-6).sqrt()
