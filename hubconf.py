"""Entry points of torch.hub: encoders and classifiers of this project.

    import torch

    model = torch.hub.load(REPO, "encoder", source="local", path=RUN_OR_FILE)
    tokens = model(imgs)  # [B, 1 + N, D], class token first; Swin: [B, cells, 8 D]

REPO is the folder of this code. The other entry points are `classifier`, and the factories of all encoders, such as
`vit_base_patch16`.
"""

from collections.abc import Callable as _Callable
from pathlib import Path as _Path
from typing import Any as _Any

from torch import nn as _nn

from encoders.classifiers import MODELS as _MODELS
from encoders.load import load_encoder as _load_encoder
from encoders.load import load_model as _load_model

dependencies = ["torch", "timm", "numpy", "safetensors"]


def encoder(path: str | _Path) -> _nn.Module:
    """Returns a pre-trained encoder in eval mode. Calling it computes the features of normalised images [B, C, H, W].

    path: a checkpoint of this project or of a release, the folder of a run, whose newest intact checkpoint is used, or
    a folder of Transformers. Raises ValueError if it holds no encoder of a known kind, or a classifier.
    """
    model = _load_model(path)
    if hasattr(model, "head"):
        raise ValueError(f"{str(path)!r} holds a classifier: load it with the entry point 'classifier'")
    model.forward = model.forward_features  # an encoder alone has no other output
    return model


def classifier(path: str | _Path) -> _nn.Module:
    """Returns a fine-tuned classifier in eval mode. Calling it computes the logits of normalised images [B, C, H, W].

    path: as in `encoder`. Raises ValueError if it holds no classifier of a known kind.
    """
    model = _load_model(path)
    if not hasattr(model, "head"):
        raise ValueError(f"{str(path)!r} holds an encoder without a head: load it with the entry point 'encoder'")
    return model


def _entry_point(name: str, factory: _Callable[..., _nn.Module]) -> _Callable[..., _nn.Module]:
    def build(pretrained: str | _Path | None = None, **kwargs: _Any) -> _nn.Module:
        model = factory(**kwargs)
        if pretrained is not None:
            print(_load_encoder(model, pretrained))
        return model

    build.__name__ = name
    build.__doc__ = f"""Returns a new `{name}` for fine-tuning. kwargs: those of its class, such as `num_classes`.

    pretrained: the encoder to load, see `encoder`. What was loaded is printed. Position tables of
    another grid are resized.
    """
    return build


for _name, _factory in _MODELS.items():
    globals()[_name] = _entry_point(_name, _factory)
