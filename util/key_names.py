"""Parameter names of other releases -> those of plain ViTs here, which are timm's and MAE's."""

import re

import torch
from torch.nn import functional as F

# mmpretrain (MFF). Its layers count their norms from 1, and so does its backbone: ln1 is the encoder's final norm.
_MMPRETRAIN = [
    (r"\.(?:ln|norm)([12])\.", r".norm\1."),
    (r"\.ffn\.layers\.0\.0\.", ".mlp.fc1."),
    (r"\.ffn\.layers\.1\.", ".mlp.fc2."),
    (r"^backbone\.norm1\.", "norm."),
    (r"^backbone\.norm2\.", "fc_norm."),
    (r"^backbone\.patch_embed\.projection\.", "patch_embed.proj."),
    (r"^backbone\.layers\.", "blocks."),
    (r"^backbone\.", ""),
    (r"^neck\.norm1\.", "decoder.norm."),
    (r"^neck\.(?:decoder_)?", "decoder."),
    (r"^head\.fc\.", "head."),
]


def from_mmpretrain(weights):
    """{our name: value} of a mmpretrain state dict; what is neither backbone, neck nor head is left out."""
    renamed = {}
    for name, value in weights.items():
        if name.startswith(("backbone.", "neck.", "head.fc.")):
            for pattern, replacement in _MMPRETRAIN:
                name = re.sub(pattern, replacement, name)
            renamed[name] = value
    return renamed


def from_simmim(weights):
    """{our name: value} of the encoder in a SimMIM state dict, without what is computed anew."""
    computed = ("relative_position_index", "attn_mask")
    return {
        name.removeprefix("encoder."): value
        for name, value in weights.items()
        if name.startswith("encoder.") and not name.endswith(computed)
    }


def swap_merging(weights):
    """Swin weights that merge (row, column) neighbours in the order 00, 01, 10, 11, GreenMIM's first release, -> 00, 10, 01, 11.

    That is an exact re-indexing: the second and third quarter of the norm's and of the matrix's 4 C inputs change places.
    """
    merging = [name for name in weights if ".downsample." in name]
    if not merging:
        raise ValueError("these weights merge no patches: only Swin's have an order of merging")
    swapped = {}
    for name in merging:
        first, second, third, fourth = weights[name].chunk(4, dim=-1)
        swapped[name] = torch.cat([first, third, second, fourth], dim=-1)
    return weights | swapped


def from_localmim(weights):
    """{our name: value} of a LocalMIM state dict: of its norms, one a level, the last is the encoder's."""
    last = max(int(name.split(".")[1]) for name in weights if re.match(r"norm\.\d+\.", name))
    renamed = {name.replace(f"norm.{last}.", "norm.") if name.startswith("norm.") else name: v for name, v in weights.items()}
    return {name: value for name, value in renamed.items() if not re.match(r"norm\.\d+\.", name)}


def from_tec(weights):
    """{our name: value} of a TEC state dict, in which the MLP that the class token goes through is folded into the token."""
    mlp = {name: value.double() for name, value in weights.items() if name.startswith("cls_token_mlp.")}
    fc1, fc2 = ((mlp[f"cls_token_mlp.{fc}.weight"], mlp[f"cls_token_mlp.{fc}.bias"]) for fc in ("fc1", "fc2"))
    folded = F.linear(F.gelu(F.linear(weights["cls_token"].double(), *fc1)), *fc2).to(weights["cls_token"].dtype)
    return {k: v for k, v in weights.items() if not k.startswith("cls_token_mlp.")} | {"cls_token": folded}


def encoder_names(weights):
    """Whatever release the weights are of, the encoder's under our names."""
    if "cls_token_mlp.fc1.weight" in weights:
        return from_tec(weights)
    if "norm.0.weight" in weights:
        return from_localmim(weights)
    if any(name.startswith("backbone.") for name in weights):
        return from_mmpretrain(weights)
    if any(name.startswith("encoder.") for name in weights):
        return from_simmim(weights)
    return weights
