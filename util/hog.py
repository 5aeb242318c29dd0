"""Histograms of oriented gradients, as LocalMIM (Wang et al., CVPR 2023) predicts them."""

import math

import torch
from torch.nn import functional as F


@torch.no_grad()
def hog(imgs, cells, num_bins=9, bias=None):
    """Images [B, C, H, W] -> one [B, C * num_bins, H / cell, W / cell] for each side in `cells`, float32 (or float64).

    Each colour channel has its own histogram, of unsigned orientations: the whole gradient of a pixel goes to one bin; the
    mean over the cell is divided by its L2 norm. The angle is atan2(horizontal, vertical), so bin 0 is a gradient along y.
    cells: pixels, increasing, each a multiple of the first. bias [len(cells), 2] is added to the two responses (the
    release's gradient filters for ViT-L have one by accident).

    There is no matrix product here for autocast to halve. Orientations close to a multiple of pi fall into the first or
    last bin by rounding: for images of 8 bits that is .4 to 3 % of the pixels, in any implementation.
    """
    height, width = imgs.shape[-2:]
    if any(cell % cells[0] or height % cell or width % cell for cell in cells):
        raise ValueError(f"cells must be multiples of the first and divide the image, {height} x {width} px; got {cells}")
    horizontal, vertical = _responses(imgs.to(torch.promote_types(imgs.dtype, torch.float32)))
    if bias is None:  # the histograms of larger cells are means of smaller ones'
        finest = _histograms(horizontal, vertical, cells[0], num_bins)
        histograms = [finest, *(F.avg_pool2d(finest, cell // cells[0]) for cell in cells[1:])]
    else:
        histograms = [_histograms(horizontal + b[0], vertical + b[1], c, num_bins) for c, b in zip(cells, bias, strict=True)]
    # [B, C * bins, h, w] with the bins of a colour together: each colour is normalised by itself
    return [F.normalize(h.unflatten(1, (-1, num_bins)), dim=2, eps=1e-12).flatten(1, 2) for h in histograms]


def _responses(imgs):
    """Sobel's filters, "left minus right" and "top minus bottom", mirrored at the border: two of [B, C, H, W].

    Differences are taken before sums, so that at the border they are exactly zero.
    """
    padded = F.pad(imgs, (1, 1, 1, 1), mode="reflect")
    across = padded[..., :-2] - padded[..., 2:]
    along = padded[..., :-2, :] - padded[..., 2:, :]
    horizontal = across[..., :-2, :] + 2 * across[..., 1:-1, :] + across[..., 2:, :]
    vertical = along[..., :-2] + 2 * along[..., 1:-1] + along[..., 2:]
    return horizontal, vertical


def _histograms(horizontal, vertical, cell, num_bins):
    """[B, C, H, W] twice -> [B, C * num_bins, H / cell, W / cell], the mean magnitude of each bin."""
    magnitude = (horizontal.square() + vertical.square()).sqrt()
    bins = (torch.atan2(horizontal, vertical) / math.pi * num_bins).floor().remainder(num_bins)
    # Bin by bin, which needs no room for a one-hot image and adds up in a fixed order, unlike a scatter on a GPU.
    means = [F.avg_pool2d(torch.where(bins == k, magnitude, 0.0), cell) for k in range(num_bins)]
    return torch.stack(means, dim=2).flatten(1, 2)


def orientation_colors(histograms, num_bins):
    """Histograms [B, C * num_bins, h, w] -> images [B, 3, h, w] in [0, 1]: hue is the mean orientation, light its strength."""
    weights = histograms.float().unflatten(1, (-1, num_bins)).mean(dim=1)  # [B, bins, h, w], of all colours
    angles = 2 * math.pi / num_bins * (torch.arange(num_bins, device=weights.device) + 0.5).view(-1, 1, 1)
    x, y = (weights * angles.cos()).sum(dim=1), (weights * angles.sin()).sum(dim=1)
    hue, light = torch.atan2(y, x), (x.square() + y.square()).sqrt().clamp(max=1)
    phases = hue.new_tensor([0.0, -2 * math.pi / 3, 2 * math.pi / 3]).view(3, 1, 1)
    return light.unsqueeze(1) * (0.5 + 0.5 * (hue.unsqueeze(1) + phases).cos())
