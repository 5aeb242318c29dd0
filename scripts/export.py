"""Writes the encoder of a pre-trained checkpoint, or the classifier of a fine-tuned one, as a file that timm loads.

    python scripts/export.py output/prmim50_base --out encoder.safetensors
    python scripts/export.py output/finetune/checkpoint-best.pth --out classifier.pth

The first argument is a checkpoint (ours, or MAE's release) or a run's folder (its newest good checkpoint). The suffix of
--out says which kind of file is written. The printed `timm.create_model` line loads it, every key of it and no other;
before the file gets its name, that very line is run, and its features or logits are compared with this project's model.

Written are float32 weights: of a pre-trained checkpoint the encoder alone, without decoder and optimiser; of a
fine-tuned one everything. The BatchNorm of a linear probe is folded into its linear layer. Normalise images as the
script says: timm's own default for these names is another mean and deviation.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import safetensors.torch
import timm
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import models_vit
from util import checkpoint
from util.cli import Parser
from util.transforms import IMAGENET_MEAN, IMAGENET_STD

SUFFIXES = (".safetensors", ".pth")
TOLERANCE = 1e-5  # of the outputs, absolute and relative
# timm's names for the sizes that it has; for all others the line names a ViT-B and overrides its sizes.
TIMM_SIZES = {"tiny": models_vit.TINY, "small": models_vit.SMALL, "base": models_vit.BASE}
TIMM_SIZES |= {"large": models_vit.LARGE, "huge": models_vit.HUGE}


def load_model(path):
    """-> (our model in eval mode, whether it is a classifier, the checkpoint's meta) of a checkpoint file."""
    content, what = checkpoint.read_checkpoint(path), f"{str(path)!r}"
    weights = checkpoint.encoder_weights_of(content)
    meta = content["meta"] if isinstance(content.get("meta"), dict) else {}
    sizes = models_vit.read_sizes(weights, meta.get("settings", {}), what)
    head = weights.get("head.weight", weights.get("head.1.weight"))
    if head is not None:
        model = models_vit.VisionTransformer(
            num_classes=len(head),
            global_pool="avg" if "fc_norm.weight" in weights else "token",
            probe="head.1.weight" in weights,
            **sizes,
        )
        checkpoint.load_strict(model, weights, f"the weights in {what}")
        return model.eval(), True, meta
    model = models_vit.VisionTransformer(num_classes=1, global_pool="token", **sizes)
    checkpoint.refuse_foreign(model, weights, what)
    del content, weights  # the optimiser's state may be twice the model, and the file is read once more
    report = checkpoint.load_encoder(model, path)
    assert not report.resized, report
    return model.eval(), False, meta


def timm_weights(model, is_classifier):
    """The model's state dict under timm's names, which are ours but for the head: none, or one linear layer."""
    state = model.state_dict()
    if not is_classifier:
        return {name: value for name, value in state.items() if not name.startswith("head.")}
    if isinstance(model.head, torch.nn.Sequential):
        # W ((x - mean) / s) + b = (W / s) x + (b - (W / s) mean), with s = sqrt(var + eps); rounded once, at the end.
        names = ("0.running_mean", "0.running_var", "1.weight", "1.bias")
        mean, var, weight, bias = (state[f"head.{name}"].double() for name in names)
        weight = weight / (var + model.head[0].eps).sqrt()
        state = {name: value for name, value in state.items() if not name.startswith("head.")}
        state |= {"head.weight": weight.float(), "head.bias": (bias - weight @ mean).float()}
    return state


def timm_arguments(model, is_classifier):
    """-> (model name, keyword arguments) with which `timm.create_model` builds `model`, without the checkpoint's path."""
    (height, width), patch_size = model.img_size, model.patch_size
    block = model.blocks[0]
    sizes = dict(embed_dim=model.embed_dim, depth=len(model.blocks), num_heads=block.attn.num_heads)
    named = [name for name, size in TIMM_SIZES.items() if sizes.items() <= size.items()]
    size = named[0] if named else "base"
    name = f"vit_{size}_patch{patch_size}_224"
    options = {} if (height, width) == (224, 224) else {"img_size": height if height == width else (height, width)}
    if not named or not timm.is_model(name):
        name = f"vit_{size}_patch{TIMM_SIZES[size]['patch_size']}_224"
        options["patch_size"] = patch_size
    options |= {} if named else sizes
    in_chans, mlp_ratio = model.patch_embed.proj.in_channels, block.mlp.fc1.out_features / model.embed_dim
    options |= {"in_chans": in_chans} if in_chans != 3 else {}
    options |= {"mlp_ratio": mlp_ratio} if mlp_ratio != 4 else {}
    if is_classifier:
        return name, {**options, "global_pool": model.global_pool, "num_classes": len(timm_weights(model, True)["head.weight"])}
    return name, {**options, "num_classes": 0}


def loading_line(name, options, path):
    """The call of timm that loads the file at `path`, as Python source."""
    quoted = {k: json.dumps(v, ensure_ascii=False) if isinstance(v, str) else repr(v) for k, v in options.items()}
    arguments = "".join(f", {k}={v}" for k, v in quoted.items())
    return f'timm.create_model("{name}"{arguments}, checkpoint_path={json.dumps(str(path), ensure_ascii=False)})'


@torch.inference_mode()
def largest_difference(model, is_classifier, path, name, options):
    """Loads the file at `path` into timm's model; the largest difference of its features, or logits, on two random images.

    As text. What float32 does not settle, since a network may blow up its rounding, is computed again in float64.
    ValueError where timm does not take the file, or where the outputs are not those of `model`.
    """
    try:
        theirs = timm.create_model(name, **options, checkpoint_path=str(path)).eval()
    except RuntimeError as error:
        raise ValueError(f"timm {timm.__version__} does not take the weights, nothing is written: {error}") from error
    generator = torch.Generator().manual_seed(0)
    imgs = torch.randn(2, model.patch_embed.proj.in_channels, *model.img_size, generator=generator)
    differences = []
    for dtype in (torch.float32, torch.float64):
        models = model.to(dtype), theirs.to(dtype)
        expected, output = (m(imgs.to(dtype)) if is_classifier else m.forward_features(imgs.to(dtype)) for m in models)
        differences.append(f"{(output - expected).abs().max().item():.1e}")
        if torch.allclose(output, expected, rtol=TOLERANCE, atol=TOLERANCE):
            return " in float32, which is rounding: in float64 ".join(differences)
    raise ValueError(
        f"timm's model gives other {'logits' if is_classifier else 'features'} than ours, by up to {differences[-1]} where "
        f"{TOLERANCE} is allowed; nothing is written"
    )


def check_out(path, source, overwrite):
    """ValueError where nothing can or should be written at `path`."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"--out {str(path)!r} must end in {' or '.join(SUFFIXES)}, which says the kind of file")
    if not path.parent.is_dir():
        raise ValueError(f"--out {str(path)!r}: there is no folder {str(path.parent)!r}; make it first")
    if path.exists() and path.samefile(source):
        raise ValueError(f"--out {str(path)!r} is the checkpoint itself")
    if path.exists() and not overwrite:
        raise ValueError(f"--out {str(path)!r} exists; give another name, or --overwrite")


def write_weights(path, state, metadata):
    """The bare state dict as the kind of file that the suffix says; only .safetensors has room for the metadata."""
    path.touch()
    mode = path.stat().st_mode
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(state, path, metadata)
        path.chmod(mode)  # safetensors may leave a file that its owner alone can read
    else:
        torch.save(state, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def export(source, out, overwrite=False):
    """Writes the checkpoint or run's folder at `source` for timm to the file `out`; -> the lines that describe it."""
    source, out = checkpoint.find_checkpoint_file(source), Path(out)
    if not source.is_file():
        raise ValueError(f"no checkpoint at {str(source)!r}: give the path of a file or of a run's folder")
    check_out(out, source, overwrite)
    model, is_classifier, meta = load_model(source)
    state = timm_weights(model, is_classifier)
    name, options = timm_arguments(model, is_classifier)
    settings = meta.get("settings", {})
    mean, std = (list(settings.get(k) or default) for k, default in (("mean", IMAGENET_MEAN), ("std", IMAGENET_STD)))
    facts = {"timm": {"model_name": name, **options}, "mean": mean, "std": std, "source": source.name}
    facts |= {"classes": meta["classes"]} if is_classifier and meta.get("classes") else {}
    # The file gets its name when it is known to be right: until then an older one of that name stands.
    temporary = out.with_name(f".{out.stem}.tmp-{os.getpid()}{out.suffix}")
    try:
        write_weights(temporary, state, {"format": "pt", **{k: v if k == "source" else json.dumps(v) for k, v in facts.items()}})
        difference = largest_difference(model, is_classifier, temporary, name, options)
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
    kind, outputs = ("classifier", "logits") if is_classifier else ("encoder", "features")
    num_parameters = sum(value.numel() for value in state.values())
    return [
        f"{kind} of {source}: {out} ({num_parameters / 1e6:.1f} M parameters, {out.stat().st_size / 1e6:.0f} MB)",
        f"largest difference of timm's {outputs} from ours, on two random images: {difference}",
        f"images: pixels in [0, 1], normalised with mean {mean} and std {std}",
        loading_line(name, options, out),
    ]


def main(argv=None):
    parser = Parser("export.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a checkpoint or a run's folder")
    parser.add_argument("--out", required=True, help="the file to write: .safetensors or .pth")
    parser.add_argument("--overwrite", action=argparse.BooleanOptionalAction, default=False, help="replace --out if it exists")
    args = parser.parse_args(argv)
    try:
        lines = export(args.run, args.out, args.overwrite)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
