"""The contract of every framework behind `registry.MODELS`. A new framework is tested without changes here."""

import argparse
import importlib
import inspect
import json
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import main_pretrain
import monitor
from encoders.load import interpret, load_encoder
from encoders.models_absolute_vit import AbsoluteVisionTransformer, AbsoluteViTEncoder
from encoders.models_relative_vit import RelativeVisionTransformer, RelativeViTEncoder
from encoders.models_swin import SwinEncoder, SwinTransformer
from encoders.names import fold_cls_token
from framework import PixelFramework
from frameworks import registry
from frameworks.views import is_drawable, predicts_pixels, views_of
from models_vit import VisionTransformer, ViTEncoder
from prmim import METHOD_ARGUMENTS, Method, SpatialAggregation, TokenOrder
from tests.patches import MonkeyPatch
from tests.two_processes import run_in_two_processes
from util.costs import saved_bytes
from util.data.pixel_format import PixelFormat
from util.data.transforms import Normalize
from util.flag import Flag
from util.pictures import as_rgb
from util.run.files.checkpoint import save_checkpoint
from util.run.files.record import CheckpointInfo
from util.run.train import wrap
from util.run.train.wrap import recompute_blocks

SIZES = dict(img_size=32, patch_size=4, embed_dim=32, depth=4, num_heads=2)
# Enough tokens for windows that are grouped and shifted.
SWIN = dict(img_size=32, patch_size=4, embed_dim=16, depths=(2, 2), num_heads=(1, 2), window_size=2)
DECODER = dict(decoder_embed_dim=16, decoder_depth=2, decoder_num_heads=2)

CLASSES = {}
for path in registry.NAMES:
    module = importlib.import_module(path)
    for class_name in module.__all__:
        if inspect.isclass(getattr(module, class_name)):
            CLASSES[class_name] = getattr(module, class_name)


def parameters_of(name):
    """Returns the arguments of a class, those of its bases included."""
    parameters = {}
    for base in reversed(CLASSES[name].__mro__):
        parameters |= inspect.signature(base.__init__).parameters
    return parameters


def sizes_of(name, shallow):
    parameters = parameters_of(name)
    if "depths" in parameters:
        sizes = dict(SWIN)
        if shallow:
            sizes["depths"] = (2, 1)
        return sizes
    sizes = dict(SIZES)
    for key, value in DECODER.items():
        if key in parameters:
            sizes[key] = value
    if shallow:
        sizes["depth"] = 2
    if shallow and "decoder_depth" in sizes:
        sizes["decoder_depth"] = 1
    if "taps" in parameters:
        sizes["depth"] = 4
        sizes["taps"] = (0, 1, 2, 3)
    if "fused_blocks" in parameters:
        sizes["fused_blocks"] = (0, sizes["depth"] - 1)
    return sizes


def build(name, throw_ratio=None, shallow=False, **options):
    """Builds a small model. By default half of the tokens are thrown if the framework can throw.

    shallow: as few blocks as the framework allows, which compile faster.
    """
    torch.manual_seed(0)
    throws = parameters_of(name)["throw_ratio"].default > 0
    if throw_ratio and not throws:
        pytest.skip("throws no tokens")
    if throw_ratio is None:
        throw_ratio = 0.5 if throws else 0.0
    settings = dict(norm_pix_loss=True, mask_ratio=0.75, throw_ratio=throw_ratio)
    return CLASSES[name](**settings | sizes_of(name, shallow) | options)


def a_batch(model, size=4, seed=0):
    """Returns images, token orders, and the further inputs that the model's collator adds."""
    samples = [(torch.zeros(1), 0, (0, i)) for i in range(size)]
    _, _, *orders = model.collator("furthest", seed)(samples)
    generator = torch.Generator().manual_seed(seed)
    channels = model.patch_embed.proj.in_channels
    imgs = torch.randn(size, channels, *model.img_size, generator=generator)
    return imgs, *orders


def total(losses):
    return sum(losses.values())


def pixels_of(model, tokens):
    """Turns a mask of tokens [B, N] into a mask of pixels [B, 1, H, W]."""
    grid = tokens.view(-1, 1, *model.grid_size).float()
    return nn.functional.interpolate(grid, size=model.img_size, mode="nearest").bool()


def predictions(model, imgs, ids_shuffle):
    """Returns the list of predictions, one for most frameworks, and the mask of the predicted tokens."""
    pred, mask = model.reconstruct(imgs, ids_shuffle)
    if torch.is_tensor(pred):
        return [pred], mask
    return pred, mask


def aggregates(model):
    return any(isinstance(module, SpatialAggregation) for module in model.modules())


frameworks = pytest.mark.parametrize("name", CLASSES)
SIZE_ARGUMENTS = {"img_size", "patch_size", "in_chans", "embed_dim", "num_heads", "mlp_ratio", "drop_path_rate"}


@frameworks
def test_the_signature_shows_all_arguments(name):
    """Each has a default, and those of all frameworks are there. A `**` would hide the method from a reader."""
    parameters = inspect.signature(CLASSES[name]).parameters
    assert not [p for p in parameters.values() if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    assert not [p for p in parameters.values() if p.default is p.empty]
    expected = SIZE_ARGUMENTS | set(METHOD_ARGUMENTS) | {"norm_pix_loss", "has_invalid"}
    assert expected <= parameters.keys()
    assert len({"depth", "depths"} & parameters.keys()) == 1
    assert {flag.name for flag in CLASSES[name].flags} <= parameters.keys()
    has_decoder = any(module.startswith("decoder") for module, _ in build(name).named_children())
    assert has_decoder == ({"decoder_embed_dim", "decoder_depth", "decoder_num_heads"} <= parameters.keys())


@frameworks
def test_an_argument_is_what_it_says(name):
    """Each argument of the method, also where a constructor hands it on."""
    given = dict(mask_ratio=0.5, throw_ratio=0.0, progressive=False, kernel_size=5, applies_to="all")
    model = build(name, norm_pix_loss=False, has_invalid=True, aggregation="avgpool", **given)
    assert model.method == Method(aggregation="avgpool", **given)
    assert not model.norm_pix_loss
    assert model.has_invalid
    json.dumps(model.own_settings())  # an attribute has the name and the value of each flag of its own


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
    assert losses
    for loss in losses.values():
        assert loss.ndim == 0
        assert loss.isfinite()
    assert total(losses).dtype == torch.float32


@torch.no_grad()
@frameworks
@arms
def test_masked_pixels_never_change_a_prediction(name, arm):
    model = build(name, **arm).eval()
    imgs, ids, *_ = a_batch(model)
    masked = pixels_of(model, TokenOrder(ids, model.counts).mask)
    with_other_masked = torch.where(masked, torch.randn_like(imgs) * 9, imgs)
    with_other_visible = torch.where(masked, imgs, imgs + 0.5 * torch.randn_like(imgs))
    before, _ = predictions(model, imgs, ids)
    same, _ = predictions(model, with_other_masked, ids)
    changed, _ = predictions(model, with_other_visible, ids)
    for level, pred in enumerate(before):
        assert torch.equal(pred, same[level])
        assert not torch.equal(pred, changed[level])


@frameworks
@arms
def test_decoder_blocks_see_exactly_the_class_token_and_the_kept_tokens(name, arm):
    model = build(name, **arm)
    blocks = [module for key, module in model.named_modules() if re.search(r"decoder.*\bblocks\.\d+$", key)]
    if not blocks:
        blocks = getattr(model, "blocks", [])
    if not blocks:
        pytest.skip("windows see whole grids")
    lengths = set()

    def record(module, inputs, output):
        """Cross-attention has queries and a context. A bias is no token."""
        tokens = [x for x in inputs if x is not None and x.ndim == 3]
        lengths.add(sum(x.shape[1] for x in tokens))

    for block in blocks:
        block.register_forward_hook(record)
    model(*a_batch(model))
    prefix = int(hasattr(model, "cls_token"))
    assert lengths == {prefix + model.counts.num_kept}


@frameworks
@arms
def test_supervision_reaches_every_masked_token_or_the_retained_alone(name, arm):
    """The pixels of a masked patch get a gradient of the loss only through the target.

    If targets are no pixels, the slow derivation of the framework's own tests says what is supervised.
    """
    model = build(name, **arm)
    imgs, ids, *groupings = a_batch(model)
    order = TokenOrder(ids, model.counts)
    supervised = order.mask
    if not model.method.progressive:
        supervised = order.mask & ~order.thrown
    _, predicted = predictions(model, imgs, ids)
    assert torch.equal(predicted, supervised)
    assert aggregates(model) == (model.method.progressive and model.counts.num_thrown > 0)
    if predicts_pixels(model):
        imgs.requires_grad_()
        total(model(imgs, ids, *groupings)).backward()
        gradient = imgs.grad.abs().amax(dim=1, keepdim=True)
        touched = nn.functional.adaptive_max_pool2d(gradient, model.grid_size).flatten(1) > 0
        assert torch.equal(touched & order.mask, supervised)


def choices_of_flags():
    """Returns (name, options) for each framework, and for each choice of a flag of its own."""
    cases = []
    for name, framework in CLASSES.items():
        cases.append((name, {}))
        for flag in framework.flags:
            for choice in flag.choices or ():
                cases.append((name, {flag.name: choice}))
    return cases


@pytest.mark.parametrize(("name", "options"), choices_of_flags())
def test_an_aggregation_is_told_which_cells_hold_a_value(name, options):
    """Those that are not zero."""
    model = build(name, **options)
    told = []

    def compare(operator, inputs):
        grid, filled = inputs  # [B, rows, columns, C] and [B, rows, columns]
        told.append(torch.equal(filled, grid.any(dim=-1)))

    for module in model.modules():
        if isinstance(module, SpatialAggregation):
            module.operator.register_forward_pre_hook(compare)
    model(*a_batch(model))
    assert all(told)
    assert bool(told) == aggregates(model)


@frameworks
@pytest.mark.parametrize(
    "arm", [dict(progressive=False), dict(), dict(kernel_size=3), dict(aggregation="transformer")], ids=str
)
def test_the_same_seed_gives_every_arm_the_same_first_weights(name, arm):
    weights = build(name, throw_ratio=0.5, **arm).state_dict()
    for key, value in build(name, throw_ratio=0.0).state_dict().items():
        assert torch.equal(weights[key], value), key


@frameworks
@arms
def test_gradients_reach_every_trainable_parameter(name, arm):
    model = build(name, **arm)
    total(model(*a_batch(model))).backward()
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, key
            assert parameter.grad.any(), key


def drawn_views(model, imgs, ids_shuffle, undo):
    """The views; none if the targets are no pixels and the framework cannot draw them."""
    if not is_drawable(model):
        return []
    views = views_of(model, imgs, ids_shuffle, undo)
    assert views
    return views


@frameworks
@arms
def test_views_are_what_pictures_and_tables_need(name, arm):
    model = build(name, **arm).eval()
    imgs, ids, *_ = a_batch(model)
    _, predicted = predictions(model, imgs, ids)
    views = drawn_views(model, imgs, ids, Normalize().undo)
    assert len({view.title for view in views}) == len(views)
    assert len({view.measure for view in views}) == len(views)
    for view in views:
        for picture in (view.truth, view.prediction):
            assert picture.shape == imgs.shape
            assert picture.min() >= 0
            assert picture.max() <= 1
            assert picture.std() > 0
        assert view.errors.shape == ids.shape
        assert (view.errors[predicted] > 0).all()


on_pixels = pytest.mark.parametrize("name", [name for name in CLASSES if issubclass(CLASSES[name], PixelFramework)])


@on_pixels
def test_a_new_target_reaches_the_loss_and_is_not_drawn(name, monkeypatch):
    """The targets of all frameworks on pixels come from one method, which a subclass overrides."""
    model = build(name, norm_pix_loss=False)
    imgs, *orders = a_batch(model)
    before = model(imgs, *orders)["pixel"]
    assert predicts_pixels(model)
    monkeypatch.setattr(type(model), "target_tokens", lambda self, imgs, pixels: 1000 + pixels)
    assert model(imgs, *orders)["pixel"] > 100 * before
    assert not is_drawable(model)
    with pytest.raises(ValueError, match=f"the targets of {name} are no pixels"):
        views_of(model, imgs, orders[0], Normalize().undo)


@on_pixels
def test_a_new_penalty_reaches_the_loss(name):
    model = build(name)
    model.penalty = lambda error: 7 + 0 * error
    assert model(*a_batch(model))["pixel"].item() == pytest.approx(7)


@torch.no_grad()
@on_pixels
@arms
def test_a_step_predicts_the_supervised_tokens_as_a_reconstruction_does(name, arm):
    model = build(name, **arm).eval()
    imgs, ids, *_ = a_batch(model)
    order = TokenOrder(ids, model.counts)
    latent = model.forward_encoder(model.token_pixels(imgs), order)
    supervised = model.forward_decoder(latent, order)
    pred, mask = model.reconstruct(imgs, ids)
    ids_supervised = order.ids_shuffle[:, model.counts.num_visible :][:, : supervised.shape[1]]
    assert torch.equal(ids_supervised.sort(dim=1).values, mask.nonzero()[:, 1].view(len(ids), -1))
    torch.testing.assert_close(supervised, TokenOrder.take(pred, ids_supervised))


HOLDING = [name for name in CLASSES if hasattr(CLASSES[name], "encoder_parameters") and name != "SimMIMViT"]


@pytest.mark.parametrize("held", ["the first blocks", "the encoder"])
@pytest.mark.parametrize("name", HOLDING)
def test_what_is_held_computes_the_same_after_a_step(name, held):
    """As --trainable_blocks and --decoder_warmup_epochs hold it, whatever it is made of."""
    model = build(name)
    imgs, *orders = a_batch(model)
    if held == "the encoder":
        for parameter in model.encoder_parameters():
            parameter.requires_grad_(False)
    else:
        model.freeze_all_but(1)

    @torch.no_grad()
    def features():
        found = []
        hook = model.blocks[-2].register_forward_hook(lambda module, args, output: found.append(output))
        found.append(model.eval().forward_features(imgs))
        hook.remove()
        return found

    before = features()
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    total(model.train()(imgs, *orders)).backward()
    optimizer.step()
    after = features()
    assert torch.equal(after[0], before[0])
    assert torch.equal(after[1], before[1]) == (held == "the encoder")


@frameworks
def test_images_may_have_five_channels(name):
    """Every channel is an input, is a part of the target, and is predicted; pictures show the first three."""
    model = build(name, in_chans=5)
    imgs, ids, *groupings = a_batch(model)
    masked = pixels_of(model, TokenOrder(ids, model.counts).mask)
    imgs.requires_grad_()
    total(model(imgs, ids, *groupings)).backward()
    assert model.patch_embed.proj.weight.grad.any(dim=3).any(dim=2).any(dim=0).all()
    undo = Normalize((0.5,) * 5, (0.25,) * 5, PixelFormat(5, "uint8")).undo
    views = drawn_views(model, imgs.detach(), ids, undo)
    for view in views:
        for picture in (view.truth, view.prediction):
            assert as_rgb(picture).shape == (len(imgs), 3, *model.img_size)
    if predicts_pixels(model):
        gradient = imgs.grad.abs() * masked  # masked pixels are the target alone
        assert (gradient.amax(dim=(0, 2, 3)) > 0).all()
        difference = (views[0].prediction - views[0].truth).abs() * masked
        assert (difference.amax(dim=(0, 2, 3)) > 0).all()


@frameworks
def test_the_order_of_tokens_inside_a_segment_does_not_matter(name):
    model = build(name).double()
    imgs, ids, *_ = a_batch(model)
    imgs = imgs.double()
    counts = model.counts
    segments = ids.split([counts.num_visible, counts.num_retained, counts.num_thrown], dim=1)
    mixed = torch.cat([segment.flip(1) for segment in segments], dim=1)
    torch.testing.assert_close(total(model(imgs, ids)), total(model(imgs, mixed)))


@frameworks
def test_load_official_names_what_does_not_fit(name):
    """It takes the content of a file. What every framework's own names are is in its own test."""
    model = build(name)
    weights = {"cls_token": torch.zeros(1, 1, 7), "nonsense": torch.zeros(1)}
    with pytest.raises(ValueError) as error:
        model.load_official({"model": weights, "epoch": 799})
    message = str(error.value)
    assert message.startswith(f"{model.release} weights do not fit this {name}: ")
    assert "nonsense" in message
    assert "aggregation" not in message
    if "cls_token" in model.state_dict():
        assert "cls_token is [1, 1, 7], the model's [1, 1, 32]" in message
    else:
        assert "2 unexpected: cls_token, nonsense" in message


def gradients(model, loss):
    """Returns the gradients of the loss, and clears those of the model."""
    loss.backward()
    found = {}
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[key] = parameter.grad
    model.zero_grad(set_to_none=True)
    return found


class Operators(TorchDispatchMode):
    """Records the names of the operators that run, and the storages of what they make."""

    def __init__(self):
        super().__init__()
        self.names = set()
        self.storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        results = func(*args, **(kwargs or {}))
        for result in torch.utils._pytree.tree_leaves(results):
            if torch.is_tensor(result):
                storage = result.untyped_storage()
                self.storages[StorageWeakRef(storage)] = storage.nbytes()
        return results


def bytes_alive(forward):
    """Returns the bytes that a forward pass leaves for the backward pass, whoever holds them."""
    with Operators() as operators:
        loss = forward()
    sizes = [size for storage, size in operators.storages.items() if not storage.expired()]
    loss.backward()
    return sum(sizes)


@frameworks
@arms
def test_recomputed_activations_change_nothing(name, arm):
    """Losses and gradients are bit-equal, and fewer activations are kept. GreenMIM keeps large biases."""
    model = build(name, **arm)
    batch = a_batch(model)
    saved = saved_bytes(lambda: total(model(*batch)))
    alive = bytes_alive(lambda: total(model(*batch)))
    loss = total(model(*batch))
    expected = gradients(model, loss)
    for pointwise_only in (True, False):
        recompute_blocks(model, pointwise_only)
        less = bytes_alive(lambda: total(model(*batch)))
        assert less < 0.98 * alive
        alive = less
        again = total(model(*batch))
        assert torch.equal(again, loss)
        torch.testing.assert_close(gradients(model, again), expected, rtol=0, atol=0)
    assert saved_bytes(lambda: total(model(*batch))) < 0.8 * saved


@pytest.mark.parametrize("pointwise_only", [False, True])
def test_recomputed_blocks_drop_the_same_paths(pointwise_only):
    model = build("MaskedAutoencoderViT", drop_path_rate=0.5)
    batch = a_batch(model)
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        found.append(gradients(model, total(model(*batch))))
        recompute_blocks(model, pointwise_only)
    torch.testing.assert_close(*found, rtol=0, atol=0)


@frameworks
def test_a_step_reads_nothing_from_the_device(name):
    """The step runs on the meta device, whose tensors have no values that the host could read."""
    model = build(name).to("meta")
    batch = [tensor.to("meta") for tensor in a_batch(model)]
    total(model(*batch)).backward()


@frameworks
@pytest.mark.parametrize("applies_to", ["thrown", "all"])
def test_no_backward_pass_adds_by_index(name, applies_to):
    """A GPU would add in no fixed order, by atomic operations. The tables of biases are not large."""
    model = build(name, applies_to=applies_to)
    losses = total(model(*a_batch(model)))
    with Operators() as backward:
        losses.backward()
    assert "mm" in backward.names
    assert not [operator for operator in backward.names if re.search(r"scatter_add|index_add|index_put", operator)]


COMPILED = [(name, False) for name in CLASSES]
COMPILED += [("MaskedAutoencoderViT", True), ("MaskedAutoencoderViT", "pointwise")]


def compile_parts(model):
    """As --compile, but the default backend would need a C++ compiler."""
    with MonkeyPatch.context() as patch:
        patch.replace_in(wrap, "torch.compile", partial(torch.compile, backend="aot_eager"))
        wrap.compile_parts(model)
    assert not torch._functorch.config.graphsafe_rng_functionalization  # on GPUs it would ignore the seed of a step


@pytest.mark.parametrize(("name", "recomputed"), COMPILED)
def test_compiles_to_the_same_loss_and_gradients(name, recomputed):
    model = build(name, shallow=True)
    batch = a_batch(model)
    other = a_batch(model, seed=1)
    if recomputed:
        recompute_blocks(model, recomputed == "pointwise")
    expected = total(model(*other))
    expected_gradients = gradients(model, expected)
    compile_parts(model)
    torch._dynamo.reset()
    counters.clear()
    model(*batch)
    assert counters["stats"]["unique_graphs"] > 0
    with torch._dynamo.config.patch(error_on_recompile=True):  # other images and orders use the same graph
        compiled = total(model(*other))
    torch.testing.assert_close(compiled, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients(model, compiled), expected_gradients, rtol=1e-4, atol=1e-6)
    assert torch.equal(total(model.eval()(*other)), expected)


def num_graphs(model, *inputs):
    """Returns how many graphs a step compiles."""
    torch._dynamo.reset()
    counters.clear()
    compile_parts(model)
    outputs = model(*inputs)
    if isinstance(outputs, dict):
        outputs = total(outputs)
    outputs.sum().backward()
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize(
    ("name", "shallow", "deep"),
    [
        ("MaskedAutoencoderViT", dict(depth=1, decoder_depth=1), dict(depth=3, decoder_depth=4)),
        ("GreenMIMSwin", dict(depths=(2, 1)), dict(depths=(4, 3))),
        ("VisionTransformer", dict(depth=2), dict(depth=4)),  # the first block has no drop path
    ],
)
def test_a_deep_model_compiles_as_many_graphs_as_a_shallow_one(name, shallow, deep, recomputed):
    """Also where drop path's rate differs from block to block."""
    graphs = set()
    for depths in (shallow, deep):
        if name in CLASSES:
            model = build(name, **depths)
            batch = a_batch(model)
        else:
            model = VisionTransformer(num_classes=3, **{**SIZES, "drop_path_rate": 0.3, **depths})
            batch = [torch.randn(2, 3, *model.img_size)]
        if recomputed:
            recompute_blocks(model)
        graphs.add(num_graphs(model, *batch))
    assert len(graphs) == 1


FINE_TUNED = {
    ViTEncoder: VisionTransformer,
    RelativeViTEncoder: RelativeVisionTransformer,
    AbsoluteViTEncoder: AbsoluteVisionTransformer,
    SwinEncoder: SwinTransformer,
}


def encoder_class(model):
    """Returns the class of the encoder that a framework is made of."""
    for base in type(model).__mro__:
        if base in FINE_TUNED:
            return base
    raise AssertionError(f"{type(model).__name__} has an unknown encoder")


def encoder_sizes(kind):
    return SWIN if kind is SwinEncoder else SIZES


@frameworks
def test_encoder_moves_to_the_fine_tune_model(name, tmp_path):
    model = build(name)
    path = save_checkpoint(tmp_path, 1, {"model": model.state_dict()}, {})
    kind = encoder_class(model)
    tuned = FINE_TUNED[kind](num_classes=3, **encoder_sizes(kind))
    report = load_encoder(tuned, path)
    assert set(report.missing) <= {"head.weight", "head.bias", "fc_norm.weight", "fc_norm.bias"}
    encoder_keys = ("patch_embed.", "blocks.", "layers.", "cls_token", "pos_embed")
    assert not [key for key in report.unexpected if key.startswith(encoder_keys)]
    weights = interpret(path, model.state_dict(), CheckpointInfo()).tensors  # with the names of the fine-tune model
    if "cls_token_mlp.fc1.weight" in weights:
        weights = fold_cls_token(weights)
    common = weights.keys() & tuned.state_dict().keys()
    assert len(common) > 20
    for key in common:
        assert torch.equal(tuned.state_dict()[key], weights[key]), key


@torch.no_grad()
@frameworks
def test_monitored_features_need_no_decoder_and_are_float32(name):
    """Which features they are, the probe's tests say."""
    model = build(name).eval()
    imgs, *_ = a_batch(model)
    called = []
    for key, module in model.named_modules():
        if re.search(r"decoder|aggregation|head|proj_layers|adap", key):
            module.register_forward_hook(lambda module, args, output, key=key: called.append(key))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = monitor.encode(model, imgs)
    assert not called
    for value in found.values():
        assert value.dtype == torch.float32
        assert value.std(dim=0).max() > 0


IN_TWO_PROCESSES = [(name, "as it is") for name in CLASSES]
IN_TWO_PROCESSES += [(name, "recomputed") for name in CLASSES]
IN_TWO_PROCESSES += [("MaskedAutoencoderViT", "pointwise")]
IN_TWO_PROCESSES += [(name, "compiled") for name in ("MaskedAutoencoderViT", "TECViT", "GreenMIMSwin")]


def _gradients_in_ddp(rank):
    """Returns {(name, variant, parameter): gradient} of all frameworks, which DDP has averaged over both ranks."""
    found = {}
    for name, variant in IN_TWO_PROCESSES:
        try:
            model = _train_on_half_a_batch(rank, name, variant)
        except Exception as error:
            raise RuntimeError(f"{name}, {variant}: {error}") from error
        for key, parameter in model.named_parameters():
            if parameter.requires_grad:
                found[name, variant, key] = parameter.grad
    return found


def _train_on_half_a_batch(rank, name, variant):
    """Trains on this rank's half of a batch, in DDP with a run's options but with small buckets.

    Dynamo would cut a compiled graph where a bucket ends. This small model would then have cuts as a large one does.
    """
    bucket_bytes = 20_000
    torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = bucket_bytes
    model = build(name, shallow=True)
    imgs, ids, *groupings = a_batch(model)
    if variant in ("recomputed", "pointwise"):
        recompute_blocks(model, variant == "pointwise")
    elif variant == "compiled":
        compile_parts(model)
    options = dict(gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=bucket_bytes / 2**20)
    ddp = nn.parallel.DistributedDataParallel(model, **options)
    half = slice(2 * rank, 2 * rank + 2)
    for _ in range(2):  # the first pass records the graph
        ddp.zero_grad(set_to_none=True)
        total(ddp(imgs[half], ids[half], *groupings)).backward()
    return model


@pytest.fixture(scope="module")
def gradients_in_ddp():
    """The results of two processes, which are started once for all frameworks, because starting is slow."""
    return run_in_two_processes(_gradients_in_ddp, timeout_s=900)


@pytest.mark.parametrize(("name", "variant"), IN_TWO_PROCESSES)
def test_two_processes_give_the_gradient_of_one(name, variant, gradients_in_ddp):
    model = build(name, shallow=True)
    expected = gradients(model, total(model(*a_batch(model))))
    assert expected
    for found in gradients_in_ddp:
        for parameter, gradient in expected.items():
            theirs = torch.from_numpy(found[name, variant, parameter])
            torch.testing.assert_close(theirs, gradient, rtol=1e-4, atol=1e-6, msg=parameter)


@pytest.mark.parametrize("taken", ["target_tokens", "counts"])  # a method, and an attribute of instances
def test_a_flag_must_not_hide_a_method_or_attribute(taken):
    with pytest.raises(ValueError, match=f"the flag --{taken} of Mine has the name of a method or attribute"):
        type("Mine", (PixelFramework,), {"flags": (Flag(taken),)})


def test_a_flag_has_no_default_beside_that_of_the_constructor():
    with pytest.raises(ValueError, match="--loss_beta"):
        type("Mine", (PixelFramework,), {"flags": (Flag("loss_beta", float, 1.0),)})


def test_a_flag_must_not_have_the_name_of_another_flag(monkeypatch):
    mine = type("Mine", (PixelFramework,), {"flags": (Flag("betas"),)})
    monkeypatch.setitem(registry.MODELS, "mine_vit_micro_patch4", partial(mine))
    with pytest.raises(argparse.ArgumentError, match="--betas"):
        main_pretrain.get_args_parser("mine_vit_micro_patch4")
