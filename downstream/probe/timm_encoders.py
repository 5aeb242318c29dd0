"""Encoders of timm for the probes, with weights of the Hugging Face Hub, of its cache, or of a file."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import timm
import torch
from torch import nn

from downstream.probe.models import FrozenEncoder
from encoders.load import ENCODER_KEYS, read_file, refuse_foreign
from util.data.pixel_format import RGB8
from util.run.files import checkpoint
from util.text import close_to, shorten


def open_timm_model(name: str, path: str | None = None, input_size: int | None = None) -> FrozenEncoder:
    """Makes a model of timm with the weights at `path`, or else with those that timm has in its cache or downloads.

    path: a file, or the folder of a run or of an export. ValueError if timm does not know the model, if there are no
    weights for it, or if those at `path` belong to another network.
    """
    if not timm.is_model(name):
        raise ValueError(f"--timm {name!r} is no model of timm{close_to(name, timm.list_models())}")
    options = {}
    if input_size is not None and timm.get_pretrained_cfg(name).fixed_input_size:  # others read images of any size
        options["img_size"] = input_size
    try:
        network = timm.create_model(name, pretrained=path is None, num_classes=0, **options)
    except Exception as error:  # many types: no weights, no network, a size that does not fit
        raise ValueError(
            f"timm could not make {name!r} ({error}); without a network, give a file of weights"
        ) from error
    config = network.pretrained_cfg
    in_chans, height, width = config["input_size"]
    pixel_settings = {"pixels": RGB8.dtype, "mean": config["mean"], "std": config["std"]}
    if path is not None:
        file = checkpoint.find_checkpoint_file(path)
        load_timm_weights(network, name, file)
        _, info = read_file(file)
        stored = info.pixel_settings
        if stored["mean"] and stored["std"]:
            pixel_settings = {**stored, "pixels": stored["pixels"] or RGB8.dtype}
    num_prefix = getattr(network, "num_prefix_tokens", 0)
    num_cls = num_prefix
    registers = getattr(network, "reg_token", None)
    if registers is not None:
        num_cls -= registers.shape[1]
    return FrozenEncoder(
        network,
        name=name,
        img_size=(input_size or height, input_size or width),
        num_prefix=num_prefix,
        num_cls=num_cls,
        in_chans=in_chans,
        sha256=sha256_of_weights(network),
        pixel_settings=pixel_settings,
    )


def load_timm_weights(network: nn.Module, name: str, file: Path) -> None:
    """Loads a file into a network of timm, which needs no head. ValueError if the weights are of another network."""
    try:
        missing, unexpected = timm.models.load_checkpoint(network, str(file), strict=False)
    except Exception as error:  # many types, as timm and safetensors raise them
        raise ValueError(f"timm could not load {str(file)!r} into {name!r}: {error}") from error
    if missing:
        raise ValueError(f"{str(file)!r} holds no {name!r}: it lacks {shorten(missing, most=6)}")
    refuse_other_network(network, unexpected, repr(str(file)))


def refuse_other_network(network: nn.Module, unexpected: Sequence[str], origin: str) -> None:
    """Raises CheckpointError if `unexpected` keys, but for those of a head, belong to parts of the network.

    origin: where the keys are from, for the message.
    """
    heads = network.pretrained_cfg.get("classifier") or ()
    if isinstance(heads, str):
        heads = (heads,)
    prefixes = tuple(f"{head}." for head in heads)
    beside_heads = [key for key in unexpected if not key.startswith(prefixes)]
    parts = {f"{key.partition('.')[0]}." for key in network.state_dict()}
    refuse_foreign(network, beside_heads, origin, (*ENCODER_KEYS, "norm.", *parts))


def sha256_of_weights(network: nn.Module) -> str:
    """Returns the SHA-256 of all weights."""
    digest = hashlib.sha256()
    for tensor in network.state_dict().values():
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
