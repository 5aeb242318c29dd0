"""Entry points of torch.hub: encoders, classifiers, segmentation models and detectors of this project.

    import torch

    model = torch.hub.load(REPO, "encoder", source="local", path=RUN_OR_FILE)
    tokens = model(imgs)  # [B, P + N, D], class token and registers first; Swin: [B, cells, 8 D]; detectors: [B, N, D]

REPO is the folder of this code. The other entry points are `classifier`, `segmenter`, `detector`, and the factories of
all encoders, such as `vit_base_patch16`. Images are normalised, [B, C, H, W].
"""

from collections.abc import Callable as _Callable
from collections.abc import Sequence as _Sequence
from pathlib import Path as _Path
from typing import Any as _Any

from torch import nn as _nn

from encoders.classifiers import MODELS as _MODELS
from encoders.load import load_encoder as _load_encoder
from encoders.trained import load as _load

dependencies = ["torch", "timm", "numpy", "safetensors"]


def encoder(path: str | _Path) -> _nn.Module:
    """Returns an encoder in eval mode: a pre-trained one, or that of a dense task. Calling it computes features.

    path: a checkpoint of this project or of a release, the folder of a run, whose newest intact checkpoint is used, or
    a folder of Transformers. Raises ValueError if it holds no encoder of a known kind, or a classifier.
    """
    trained = _load(path)
    if trained.task == "classification":
        raise ValueError(f"{str(path)!r} holds a classifier: load it with the entry point 'classifier'")
    model = trained.encoder
    model.forward = model.forward_features  # an encoder alone has no other output
    return model


def classifier(path: str | _Path) -> _nn.Module:
    """Returns a fine-tuned classifier in eval mode. Calling it computes logits [B, K].

    path: as in `encoder`. Raises ValueError if it holds no classifier of a known kind.
    """
    return _load(path, "classification").model


def segmenter(path: str | _Path) -> _nn.Module:
    """Returns a model of main_segmentation.py in eval mode. Calling it computes {"decode": logits [B, K, h, w]}.

    path: a checkpoint or the folder of a run. Images have the size `model.img_size`. Raises ValueError for other files.
    """
    return _load(path, "segmentation").model


def detector(path: str | _Path) -> _nn.Module:
    """Returns a model of main_detection.py in eval mode. `model(imgs, sizes)` detects the objects of each image.

    sizes: (height, width) of each image before zeros were added at the bottom and the right, to `model.img_size`.
    Returns {"boxes": [n, 4] in pixels, "scores": [n], "labels": [n], from 1} for each image, and "masks" [n, 28, 28],
    which are probabilities inside the boxes, if the model has them. path: as in `segmenter`.
    """
    return _load(path, "detection").model


def _entry_point(name: str) -> _Callable[..., _nn.Module]:
    def build(
        pretrained: str | _Path | None = None, rgb_bands: _Sequence[int] | None = None, **kwargs: _Any
    ) -> _nn.Module:
        model = _MODELS[name](**kwargs)
        if pretrained is not None:
            print(_load_encoder(model, pretrained, rgb_bands=rgb_bands))
        return model

    build.__name__ = name
    build.__doc__ = f"""Returns a new `{name}` for fine-tuning. kwargs: those of its class, such as `num_classes`.

    pretrained: the encoder to load, see `encoder`. What was loaded is printed. Position tables of another grid are
    resized. rgb_bands: see `encoders.load.load_encoder`.
    """
    return build


for _name in _MODELS:
    globals()[_name] = _entry_point(_name)
