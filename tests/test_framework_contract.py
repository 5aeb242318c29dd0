"""The contract of every framework behind `registry.MODELS`. A new framework is tested without changes here."""

import inspect
import json
import re

import pytest
import torch
from torch import nn

import monitor
from encoders.load import Weights, load_encoder
from encoders.models_absolute_vit import AbsoluteVisionTransformer, AbsoluteViTEncoder
from encoders.models_relative_vit import RelativeVisionTransformer, RelativeViTEncoder
from encoders.models_swin import SwinEncoder, SwinTransformer
from encoders.names import fold_cls_token
from framework import Flag, NoPixels, PixelFramework
from frameworks import registry
from models_vit import VisionTransformer, ViTEncoder
from prmim import SpatialAggregation, TokenOrder
from tests.two_processes import run_in_two_processes
from util.costs import saved_bytes
from util.data.pixel_format import PixelFormat
from util.data.transforms import Normalize
from util.pictures import as_rgb
from util.run.checkpoint import save_checkpoint
from util.run.shard import recompute_blocks

SIZES = dict(img_size=32, patch_size=4, embed_dim=32, depth=4, num_heads=2)
# Enough tokens for windows that are grouped and shifted.
SWIN = dict(img_size=32, patch_size=4, embed_dim=16, depths=(2, 2), num_heads=(1, 2), window_size=2)
DECODER = dict(decoder_embed_dim=16, decoder_depth=2, decoder_num_heads=2)

CLASSES = {
    name: getattr(module, name)
    for module in registry.FRAMEWORKS
    for name in module.__all__
    if inspect.isclass(getattr(module, name))
}


def build(name, throw_ratio=None, shallow=False, **options):
    """Builds a small model. By default half of the tokens are thrown if the framework can throw.

    shallow: as few blocks as the framework allows, which compile faster.
    """
    torch.manual_seed(0)
    throws = CLASSES[name].method.throw_ratio > 0
    if throw_ratio and not throws:
        pytest.skip("throws no tokens")
    parameters = {p for c in CLASSES[name].__mro__ for p in inspect.signature(c.__init__).parameters}
    sizes = dict(SWIN if "depths" in parameters else SIZES)
    if "decoder_depth" in parameters and "depths" not in parameters:
        sizes |= {key: value for key, value in DECODER.items() if key in parameters}
    if shallow:
        least = dict(depth=2, decoder_depth=1, depths=(2, 1))
        sizes |= {key: value for key, value in least.items() if key in sizes}
    if "taps" in parameters:
        sizes |= dict(taps=(0, 1, 2, 3), depth=4)
    if "fused_blocks" in parameters:
        sizes |= dict(fused_blocks=(0, sizes["depth"] - 1))
    if throw_ratio is None:
        throw_ratio = 0.5 if throws else 0.0
    return CLASSES[name](**{"norm_pix_loss": True, "mask_ratio": 0.75, **sizes, "throw_ratio": throw_ratio, **options})


def a_batch(model, size=4, seed=0):
    """Returns images, token orders, and the further inputs that the model's collator adds."""
    _, _, *orders = model.collator("furthest", seed)([(torch.zeros(1), 0, (0, i)) for i in range(size)])
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, model.patch_embed.proj.in_channels, *model.img_size, generator=generator), *orders


def total(losses):
    return sum(losses.values())


def pixels_of(model, tokens):
    """Turns a mask of tokens [B, N] into a mask of pixels [B, 1, H, W]."""
    grid = tokens.view(-1, 1, *model.grid_size).float()
    return nn.functional.interpolate(grid, size=model.img_size, mode="nearest").bool()


def predictions(model, imgs, ids_shuffle):
    pred, mask = model.reconstruct(imgs, ids_shuffle)
    return (pred if isinstance(pred, (list, tuple)) else [pred]), mask


frameworks = pytest.mark.parametrize("name", CLASSES)
arms = pytest.mark.parametrize(
    "arm",
    [dict(throw_ratio=0.0), dict(throw_ratio=0.5, progressive=False), dict(throw_ratio=0.5)],
    ids=["throw 0", "plain", "progressive"],
)


@frameworks
@arms
def test_losses_are_named_finite_scalars(name, arm):
    model = build(name, **arm)
    losses = model(*a_batch(model))
    assert losses and all(loss.ndim == 0 and loss.isfinite() for loss in losses.values())
    assert total(losses).dtype == torch.float32


@frameworks
@arms
def test_masked_pixels_never_change_a_prediction(name, arm):
    model = build(name, **arm).eval()
    imgs, ids, *groupings = a_batch(model)
    masked = pixels_of(model, TokenOrder(ids, model.counts).mask)
    before, mask = predictions(model, imgs, ids)
    after, _ = predictions(model, torch.where(masked, torch.randn_like(imgs) * 9, imgs), ids)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    changed, _ = predictions(model, torch.where(masked, imgs, imgs + 0.5 * torch.randn_like(imgs)), ids)
    assert not any(torch.equal(a, b) for a, b in zip(before, changed, strict=True))


@frameworks
@arms
def test_decoder_blocks_see_exactly_the_class_token_and_the_kept_tokens(name, arm):
    model = build(name, **arm)
    in_decoders = [m for name, m in model.named_modules() if re.search(r"decoder.*\bblocks\.\d+$", name)]
    if not in_decoders and not hasattr(model, "blocks"):
        pytest.skip("windows see whole grids")
    lengths = []  # of all inputs [B, T, C] of a block together: cross-attention has queries and a context
    for module in in_decoders or model.blocks:
        module.register_forward_hook(
            lambda _, args, __: lengths.append(sum(tokens.shape[1] for tokens in args if tokens.ndim == 3))
        )
    model(*a_batch(model))
    prefix = int(hasattr(model, "cls_token"))
    assert set(lengths) == {prefix + model.counts.num_kept}


@frameworks
@arms
def test_supervision_reaches_every_masked_token_or_the_retained_alone(name, arm):
    """The pixels of a masked patch get a gradient of the loss only through the target.

    If targets are no pixels, the framework's own tests look at the gradient of the predictions.
    """
    model = build(name, **arm)
    imgs, ids, *groupings = a_batch(model)
    order = TokenOrder(ids, model.counts)
    supervised = order.mask if arm.get("progressive", True) else order.mask & ~order.thrown
    assert torch.equal(predictions(model, imgs, ids)[1], supervised)
    aggregates = any(isinstance(module, SpatialAggregation) for module in model.modules())
    assert aggregates == (model.method.progressive and model.counts.num_thrown > 0)
    if model.predicts_pixels():
        imgs.requires_grad_()
        total(model(imgs, ids, *groupings)).backward()
        gradient = imgs.grad.abs().amax(1, keepdim=True)
        touched = nn.functional.adaptive_max_pool2d(gradient, model.grid_size).flatten(1) > 0
        assert torch.equal(touched & order.mask, supervised)


@frameworks
def test_the_same_seed_gives_every_arm_the_same_first_weights(name):
    first = build(name, throw_ratio=0.0).state_dict()
    for arm in (dict(progressive=False), dict(), dict(kernel_size=3), dict(aggregation="transformer")):
        weights = build(name, throw_ratio=0.5, **arm).state_dict()
        shared = {key: value for key, value in weights.items() if "aggregation" not in key}
        assert [key for key, value in shared.items() if not torch.equal(value, first[key])] == []


@frameworks
@arms
def test_gradients_reach_every_trainable_parameter(name, arm):
    model = build(name, **arm)
    total(model(*a_batch(model))).backward()
    without = [n for n, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    assert not without
    aggregates = any("aggregation" in n for n, _ in model.named_parameters())
    assert aggregates == (arm["throw_ratio"] > 0 and arm.get("progressive", True))


def views_of(model, imgs, ids_shuffle, undo):
    """The views; none if the targets are no pixels and the framework says that it cannot draw them."""
    try:
        views = model.views(imgs, ids_shuffle, undo)
    except NoPixels:
        assert not model.predicts_pixels()
        return []
    assert views
    return views


@frameworks
@arms
def test_views_are_what_pictures_and_tables_need(name, arm):
    model = build(name, **arm).eval()
    imgs, ids, *groupings = a_batch(model)
    undo = Normalize().undo
    views, predicted = views_of(model, imgs, ids, undo), model.reconstruct(imgs, ids)[1]
    assert len({view.title for view in views}) == len({view.measure for view in views}) == len(views)
    for view in views:
        for picture in (view.truth, view.prediction):
            assert picture.shape == imgs.shape and picture.min() >= 0 and picture.max() <= 1 and picture.std() > 0
        assert view.errors.shape == ids.shape and (view.errors[predicted] > 0).all()


@pytest.mark.parametrize("name", [name for name in CLASSES if issubclass(CLASSES[name], PixelFramework)])
def test_a_new_target_reaches_the_loss_and_is_not_drawn(name, monkeypatch):
    """The targets of all frameworks on pixels come from one method, which a subclass overrides."""
    model = build(name, norm_pix_loss=False)
    imgs, *orders = a_batch(model)
    before = model(imgs, *orders)["pixel"]
    assert model.predicts_pixels()
    monkeypatch.setattr(type(model), "target_tokens", lambda self, imgs, pixels: 1000 + pixels)
    assert model(imgs, *orders)["pixel"] > 100 * before
    assert not model.predicts_pixels()
    with pytest.raises(NoPixels, match=f"the targets of {name} are no pixels"):
        model.views(imgs, orders[0], Normalize().undo)


@pytest.mark.parametrize("name", [name for name in CLASSES if issubclass(CLASSES[name], PixelFramework)])
def test_images_are_cut_into_tokens_once_in_a_step(name, monkeypatch):
    model = build(name)
    batch = a_batch(model)
    calls = []
    for method in ("patchify", "token_pixels"):
        original = getattr(model, method)
        monkeypatch.setattr(model, method, lambda imgs, cut=original: calls.append(1) or cut(imgs))
    model(*batch)
    assert len(calls) == 1


@frameworks
def test_images_may_have_five_channels(name):
    """Every channel is an input, is a part of the target, and is predicted; pictures show the first three."""
    model = build(name, in_chans=5)
    imgs, ids, *groupings = a_batch(model)
    masked = pixels_of(model, TokenOrder(ids, model.counts).mask)
    imgs.requires_grad_()
    total(model(imgs, ids, *groupings)).backward()
    assert model.patch_embed.proj.weight.grad.abs().amax(dim=(0, 2, 3)).min() > 0
    undo = Normalize((0.5,) * 5, (0.25,) * 5, PixelFormat(5, "uint8")).undo
    views = views_of(model, imgs.detach(), ids, undo)
    for view in views:
        assert as_rgb(view.truth).shape == as_rgb(view.prediction).shape == (len(imgs), 3, *model.img_size)
    if model.predicts_pixels():
        assert (imgs.grad.abs() * masked).amax(dim=(0, 2, 3)).min() > 0  # masked pixels are the target alone
        difference = (views[0].prediction - views[0].truth).abs()
        assert (difference * masked).amax(dim=(0, 2, 3)).min() > 0


@frameworks
def test_the_order_of_tokens_inside_a_segment_does_not_matter(name):
    model = build(name).double()
    imgs, ids, *groupings = a_batch(model)
    counts = model.counts
    segments = ids.split([counts.num_visible, counts.num_retained, counts.num_thrown], dim=1)
    mixed = torch.cat([segment.flip(1) for segment in segments], dim=1)
    torch.testing.assert_close(total(model(imgs.double(), ids)), total(model(imgs.double(), mixed)))


@frameworks
def test_own_settings_are_the_values_of_the_framework_s_own_flags(name):
    """Each flag is an argument of the constructor, an attribute of the model, and a value that JSON keeps."""
    model = build(name)
    parameters = {p for c in type(model).__mro__ for p in inspect.signature(c.__init__).parameters}
    assert {flag.name for flag in model.flags} <= parameters
    assert json.loads(json.dumps(model.own_settings())) == model.own_settings()
    assert all(isinstance(file.origin, str) for file in model.named_files().values())


@frameworks
def test_load_official_names_what_does_not_fit(name):
    """It takes the content of a file. What every framework's own names are is in its own test."""
    model = build(name)
    own, weights = model.state_dict(), {"cls_token": torch.zeros(1, 1, 7), "nonsense": torch.zeros(1)}
    with pytest.raises(ValueError) as error:
        model.load_official({"model": weights, "epoch": 799})
    message = str(error.value)
    assert re.match(rf"{model.release} weights do not fit this {name}: \d+ missing: ", message)
    if "cls_token" in own:
        assert "1 unexpected: nonsense; 1 of another shape: cls_token is [1, 1, 7], the model's [1, 1, 32]" in message
    else:
        assert "2 unexpected: cls_token, nonsense" in message
    assert "aggregation" not in message


def gradients(model, loss):
    """Returns the gradients of the loss, and clears those of the model."""
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@frameworks
@arms
def test_recomputed_activations_change_nothing(name, arm):
    """Losses and gradients are bit-equal, and fewer activations are kept."""
    model = build(name, **arm)
    batch = a_batch(model)
    kept = saved_bytes(lambda: total(model(*batch)))
    expected = gradients(model, loss := total(model(*batch)))
    recompute_blocks(model)
    again = total(model(*batch))
    assert torch.equal(again, loss) and saved_bytes(lambda: total(model(*batch))) < 0.8 * kept
    found = gradients(model, again)
    assert found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ("MaskedAutoencoderViT", "SimMIMSwin") else pytest.mark.long) for n in CLASSES],
)
def test_recomputed_activations_compile(name):
    model = build(name, shallow=True)
    batch = a_batch(model)
    expected = gradients(model, total(model(*batch)))
    recompute_blocks(model)
    model.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    for parameter, gradient in gradients(model, total(model(*batch))).items():
        torch.testing.assert_close(gradient, expected[parameter], rtol=1e-4, atol=1e-6, msg=parameter)


@frameworks
def test_a_step_reads_nothing_from_the_device(name):
    """The step runs on the meta device, whose tensors have no values that the host could read."""
    model = build(name).to("meta")
    total(model(*(tensor.to("meta") for tensor in a_batch(model)))).backward()


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize(
    "arm",
    [
        pytest.param(dict(throw_ratio=0.0), marks=pytest.mark.long, id="throw 0"),
        pytest.param(dict(throw_ratio=0.5, progressive=False), marks=pytest.mark.long, id="plain"),
        pytest.param(dict(throw_ratio=0.5), id="progressive"),
    ],
)
def test_compiles_without_graph_breaks_to_the_same_loss(name, arm):
    """Dynamo captures the model. AOTAutograd, which is slow, differentiates the arm that has all operations.

    The default backend would need a C++ compiler.
    """
    model = build(name, shallow=True, **arm)
    batch = a_batch(model)
    expected = total(model(*batch))
    has_all_operations = arm == dict(throw_ratio=0.5) or name == "SimMIMSwin"
    model.compile(fullgraph=True, dynamic=False, backend="aot_eager" if has_all_operations else "eager")
    torch.testing.assert_close(total(model(*batch)), expected, rtol=1e-5, atol=1e-6)
    other = a_batch(model, seed=1)
    with torch._dynamo.config.patch(error_on_recompile=True):  # other images and orders use the same graph
        compiled = total(model(*other))
    compiled_gradients = gradients(model, compiled)
    for parameter, gradient in gradients(model, total(eager(model, *other))).items():
        torch.testing.assert_close(compiled_gradients[parameter], gradient, rtol=1e-4, atol=1e-6, msg=parameter)


def eager(model, *batch):
    with torch.compiler.set_stance("force_eager"):
        return model(*batch)


@frameworks
def test_encoder_moves_to_the_fine_tune_model(name, tmp_path):
    model = build(name)
    path = save_checkpoint(tmp_path, 1, {"model": model.state_dict()}, {})
    kinds = {ViTEncoder: VisionTransformer, RelativeViTEncoder: RelativeVisionTransformer, SwinEncoder: SwinTransformer}
    kinds |= {AbsoluteViTEncoder: AbsoluteVisionTransformer}
    encoder = next(c for c in type(model).__mro__ if c in kinds)
    tuned = kinds[encoder](num_classes=3, **(SWIN if encoder is SwinEncoder else SIZES))
    report = load_encoder(tuned, path)
    assert set(report.missing) <= {"head.weight", "head.bias", "fc_norm.weight", "fc_norm.bias"}
    encoder_keys = ("patch_embed.", "blocks.", "layers.", "cls_token", "pos_embed")
    assert not [key for key in report.unexpected if key.startswith(encoder_keys)]
    ours, theirs = (
        Weights(path, model.state_dict()).tensors,
        tuned.state_dict(),
    )  # with the names of the fine-tune model
    ours = fold_cls_token(ours) if "cls_token_mlp.fc1.weight" in ours else ours
    assert len(ours.keys() & theirs.keys()) > 20
    assert all(torch.equal(ours[key], theirs[key]) for key in ours.keys() & theirs.keys())


@frameworks
def test_monitored_features_are_those_of_the_encoder_that_is_fine_tuned(name, tmp_path):
    """One pass of the encoder over all tokens, without the decoder."""
    model = build(name).eval()
    path = save_checkpoint(tmp_path, 1, {"model": model.state_dict()}, {})
    kinds = (ViTEncoder, RelativeViTEncoder, AbsoluteViTEncoder, SwinEncoder)
    kind = next(c for c in type(model).__mro__ if c in kinds)
    encoder = kind(**(SWIN if kind is SwinEncoder else SIZES), **({"shared_bias": False} if kind in kinds[1:2] else {}))
    if isinstance(model.norm, nn.Identity):
        encoder.norm = nn.Identity()
    load_encoder(encoder, path)
    imgs, *_ = a_batch(model)
    modules = [(n, m) for n, m in model.named_modules() if re.search(r"decoder|aggregation|head|proj_layers|adap", n)]
    called = []
    for inner, module in modules:
        module.register_forward_hook(lambda *_, inner=inner: called.append(inner))
    with torch.no_grad():
        found, tokens = monitor.encode(model, imgs), encoder.eval().forward_features(imgs)
    assert not called
    prefix = int(hasattr(encoder, "cls_token"))
    expected = {"mean": tokens[:, prefix:].sum(dim=1) / (tokens.shape[1] - prefix)}
    if prefix:
        expected["cls"] = tokens[:, 0]
    assert found.keys() == expected.keys()
    for feature, value in expected.items():
        torch.testing.assert_close(found[feature], value, rtol=1e-4, atol=1e-5)
        assert value.std(dim=0).max() > 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert {x.dtype for x in monitor.encode(model, imgs).values()} == {torch.float32}


VARIANTS = {
    "as it is": lambda model: None,
    "recomputed": recompute_blocks,
    "compiled": lambda model: model.compile(fullgraph=True, dynamic=False, backend="aot_eager"),
}
IN_TWO_PROCESSES = [(name, variant) for name in CLASSES for variant in ("as it is", "recomputed")]
IN_TWO_PROCESSES += [("MaskedAutoencoderViT", "compiled")]


def _gradients_in_ddp(rank):
    """Returns {(name, variant, parameter): gradient} of all frameworks, which DDP has averaged over both ranks."""
    found = {}
    for name, variant in IN_TWO_PROCESSES:
        try:
            gradients_by_parameter = _gradients_of_half_a_batch(rank, name, variant)
        except Exception as error:
            raise RuntimeError(f"{name}, {variant}: {error}") from error
        found |= {(name, variant, parameter): gradient for parameter, gradient in gradients_by_parameter.items()}
    return found


def _gradients_of_half_a_batch(rank, name, variant):
    """Trains on this rank's half of a batch, in DDP with a run's options but with small buckets.

    Dynamo cuts the graph of a compiled model where a bucket ends. This small model then has cuts as a large one does.
    """
    torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = bucket_bytes = 20_000
    model = build(name, shallow=True)
    imgs, ids, *groupings = a_batch(model)
    VARIANTS[variant](model)
    options = dict(gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=bucket_bytes / 2**20)
    ddp = nn.parallel.DistributedDataParallel(model, **options)
    half = slice(2 * rank, 2 * rank + 2)
    for _ in range(2):  # the first pass records the graph
        ddp.zero_grad(set_to_none=True)
        total(ddp(imgs[half], ids[half], *groupings)).backward()
    return {parameter: p.grad for parameter, p in model.named_parameters() if p.requires_grad}


@pytest.fixture(scope="module")
def gradients_in_ddp():
    """The results of two processes, which are started once for all frameworks, because starting is slow."""
    return run_in_two_processes(_gradients_in_ddp, timeout_s=280)


@pytest.mark.parametrize(("name", "variant"), IN_TWO_PROCESSES)
def test_two_processes_give_the_gradient_of_one(name, variant, gradients_in_ddp):
    model = build(name, shallow=True)
    expected = gradients(model, total(model(*a_batch(model))))
    assert expected
    for found in gradients_in_ddp:
        for parameter, gradient in expected.items():
            theirs = torch.from_numpy(found[name, variant, parameter])
            torch.testing.assert_close(theirs, gradient, rtol=1e-4, atol=1e-6, msg=parameter)


@pytest.mark.parametrize("taken", ["target_tokens", "views", "counts"])  # two methods, and an attribute of instances
def test_a_flag_must_not_hide_a_method_or_attribute(taken):
    with pytest.raises(ValueError, match=f"the flag --{taken} of Mine has the name of a method or attribute"):
        type("Mine", (PixelFramework,), {"flags": (Flag(taken, "help"),)})
