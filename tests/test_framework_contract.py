"""What every framework behind `main_pretrain.MODELS` must satisfy; a new one is tested without a new test."""

import inspect

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import main_pretrain
from framework import PixelFramework
from models_relative_vit import RelativeVisionTransformer, RelativeViTEncoder
from models_swin import SwinEncoder, SwinTransformer
from models_vit import Block, VisionTransformer, ViTEncoder
from prmim import TokenOrder
from tests.two_processes import run_in_two_processes
from util.costs import saved_bytes
from util.data.transforms import Normalize
from util.key_names import encoder_names
from util.recompute import recompute_blocks
from util.run.checkpoint import load_encoder, save_checkpoint

SIZES = dict(img_size=32, patch_size=4, embed_dim=32, depth=4, num_heads=2)
SWIN = dict(img_size=32, patch_size=4, embed_dim=16, depths=(2, 2), num_heads=(1, 2), window_size=2)  # grouped, shifted
DECODER = dict(decoder_embed_dim=16, decoder_depth=2, decoder_num_heads=2)

CLASSES = {
    name: getattr(module, name)
    for module in main_pretrain.FRAMEWORKS
    for name in module.__all__
    if inspect.isclass(getattr(module, name))
}


def build(name, throw_ratio=None, **options):
    """A small model; half of the tokens thrown, where the framework can throw at all."""
    torch.manual_seed(0)
    throws = CLASSES[name].throws
    if throw_ratio and not throws:
        pytest.skip("throws no tokens")
    parameters = {p for c in CLASSES[name].__mro__ for p in inspect.signature(c.__init__).parameters}
    sizes = SWIN if "depths" in parameters else SIZES | (DECODER if "decoder_depth" in parameters else {})
    sizes = sizes | (dict(taps=(0, 1, 2, 3)) if "taps" in parameters else {})
    options |= dict(throw_ratio=(0.5 if throws else 0.0) if throw_ratio is None else throw_ratio)
    return CLASSES[name](**{"norm_pix_loss": True, "mask_ratio": 0.75, **sizes, **options})


def a_batch(model, size=4, seed=0):
    """Images, token orders, and what the model's collator plans beside."""
    _, _, *orders = model.collator("furthest", seed)([(torch.zeros(1), 0, (0, i)) for i in range(size)])
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 3, *model.img_size, generator=generator), *orders


def total(losses):
    return sum(losses.values())


def pixels_of(model, tokens):
    """Bool [B, N] -> bool [B, 1, H, W]."""
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
    imgs, ids, *plans = a_batch(model)
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
    in_decoders = [m for name, m in model.named_modules() if isinstance(m, Block) and "decoder" in name]
    if not in_decoders and not hasattr(model, "blocks"):
        pytest.skip("windows see whole grids")
    lengths = []
    for module in in_decoders or model.blocks:
        module.register_forward_hook(lambda _, args, __: lengths.append(args[0].shape[1]))
    model(*a_batch(model))
    prefix = int(hasattr(model, "cls_token"))
    assert set(lengths) == {prefix + model.counts.num_kept}


@frameworks
@arms
def test_supervision_reaches_every_masked_token_or_the_retained_alone(name, arm):
    """The loss's gradient with respect to the pixels of a masked patch exists through the target alone.

    Where targets are no pixels the frameworks' own tests look at the gradient of their predictions.
    """
    model = build(name, **arm)
    imgs, ids, *plans = a_batch(model)
    order = TokenOrder(ids, model.counts)
    supervised = order.mask if arm.get("progressive", True) else order.mask & ~order.thrown
    assert torch.equal(predictions(model, imgs, ids)[1], supervised)
    if isinstance(model, PixelFramework):
        imgs.requires_grad_()
        total(model(imgs, ids, *plans)).backward()
        touched = nn.functional.adaptive_max_pool2d(imgs.grad.abs().amax(1, keepdim=True), model.grid_size).flatten(1) > 0
        assert torch.equal(touched & order.mask, supervised)


@frameworks
def test_the_same_seed_gives_every_arm_the_same_first_weights(name):
    first = build(name, throw_ratio=0.0).state_dict()
    for arm in (dict(progressive=False), dict(), dict(kernel_size=3), dict(aggregation="transformer")):
        weights = build(name, throw_ratio=0.5, **arm).state_dict()
        assert [key for key, value in weights.items() if "aggregation" not in key and not torch.equal(value, first[key])] == []


@frameworks
@arms
def test_gradients_reach_every_trainable_parameter(name, arm):
    model = build(name, **arm)
    total(model(*a_batch(model))).backward()
    without = [n for n, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    assert not without
    aggregates = any("aggregation" in n for n, _ in model.named_parameters())
    assert aggregates == (arm["throw_ratio"] > 0 and arm.get("progressive", True))


@frameworks
@arms
def test_panels_and_errors_are_what_pictures_and_tables_need(name, arm):
    model = build(name, **arm).eval()
    imgs, ids, *plans = a_batch(model)
    undo = Normalize().undo
    panels, errors = model.panels(imgs, ids, undo), model.token_errors(imgs, ids, undo)
    assert all(p.shape == imgs.shape and p.min() >= 0 and p.max() <= 1 and p.std() > 0 for p in panels.values())
    assert all(e.shape == ids.shape and (e[TokenOrder(ids, model.counts).mask] > 0).all() for e in errors.values())
    assert panels and errors


@frameworks
def test_the_order_of_tokens_inside_a_segment_does_not_matter(name):
    model = build(name).double()
    imgs, ids, *plans = a_batch(model)
    counts = model.counts
    mixed = torch.cat([part.flip(1) for part in ids.split([counts.num_visible, counts.num_retained, counts.num_thrown], 1)], 1)
    torch.testing.assert_close(total(model(imgs.double(), ids)), total(model(imgs.double(), mixed)))


def gradients(model, loss):
    """Of the loss; the model's are left empty."""
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@frameworks
@arms
def test_recomputed_activations_change_nothing(name, arm):
    """Losses and gradients to the last bit, with less kept."""
    model = build(name, **arm)
    batch = a_batch(model)
    kept = saved_bytes(lambda: total(model(*batch)))
    expected = gradients(model, loss := total(model(*batch)))
    recompute_blocks(model)
    again = total(model(*batch))
    assert torch.equal(again, loss) and saved_bytes(lambda: total(model(*batch))) < 0.8 * kept
    found = gradients(model, again)
    assert found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected)


@frameworks
def test_recomputed_activations_compile(name):
    model = build(name)
    batch = a_batch(model)
    expected = gradients(model, total(model(*batch)))
    recompute_blocks(model)
    model.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    for parameter, gradient in gradients(model, total(model(*batch))).items():
        torch.testing.assert_close(gradient, expected[parameter], rtol=1e-4, atol=1e-6, msg=parameter)


@frameworks
def test_a_step_reads_nothing_from_the_device(name):
    """On the meta device, whose tensors have no values that could be waited for."""
    model = build(name).to("meta")
    total(model(*(tensor.to("meta") for tensor in a_batch(model)))).backward()
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.ones(1, device="meta").item()


@frameworks
@arms
def test_compiles_without_graph_breaks_to_the_same_loss(name, arm):
    """Captured by Dynamo and differentiated by AOTAutograd; the kernels of the default backend need a compiler."""
    model = build(name, **arm)
    batch = a_batch(model)
    expected = total(model(*batch))
    model.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    torch.testing.assert_close(total(model(*batch)), expected, rtol=1e-5, atol=1e-6)
    other = a_batch(model, seed=1)
    with torch._dynamo.config.patch(error_on_recompile=True):  # other images, other orders: the same graph
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
    encoder = next(c for c in type(model).__mro__ if c in kinds)
    tuned = kinds[encoder](num_classes=3, **(SWIN if encoder is SwinEncoder else SIZES))
    report = load_encoder(tuned, path)
    assert set(report.missing) <= {"head.weight", "head.bias", "fc_norm.weight", "fc_norm.bias"}
    assert not [
        key for key in report.unexpected if key.startswith(("patch_embed.", "blocks.", "layers.", "cls_token", "pos_embed"))
    ]
    ours, theirs = encoder_names(model.state_dict()), tuned.state_dict()  # names, and TEC's class token, as fine-tuning has them
    assert len(ours.keys() & theirs.keys()) > 20
    assert all(torch.equal(ours[key], theirs[key]) for key in ours.keys() & theirs.keys())


def _gradients(rank, name):
    """Gradient of a rank's half of the batch through DDP as a run wraps it; then with recomputed activations."""
    found = {}
    for recompute in (False, True):
        model = build(name)
        imgs, ids, *plans = a_batch(model)
        if recompute:
            recompute_blocks(model)
        ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
        for _ in range(2):  # the first pass learns the graph
            ddp.zero_grad(set_to_none=True)
            total(ddp(imgs[2 * rank : 2 * rank + 2], ids[2 * rank : 2 * rank + 2], *plans)).backward()
        found |= {(n, recompute): p.grad for n, p in model.named_parameters() if p.requires_grad}
    return found


@frameworks
def test_two_processes_give_the_gradient_of_one(name):
    model = build(name)
    total(model(*a_batch(model))).backward()
    for theirs in run_in_two_processes(_gradients, name):
        for (parameter, _), gradient in theirs.items():
            torch.testing.assert_close(torch.from_numpy(gradient), model.get_parameter(parameter).grad, rtol=1e-4, atol=1e-6)


def _compiled_gradients(rank):
    """The gradient of a rank's half of the batch through DDP; how many backward graphs ran, and how many before each reduction."""
    torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = bucket = 20_000
    ran, reduced = [], []

    def backward_compiler(graph, example):
        return make_boxed_func(lambda *args: (graph(*args), ran.append(graph))[0])

    def reduce(state, bucket):
        reduced.append(len(ran))
        return allreduce_hook(state, bucket)

    backend = aot_autograd(fw_compiler=lambda graph, example: make_boxed_func(graph), bw_compiler=backward_compiler)
    model = build("MaskedAutoencoderViT")
    imgs, ids = a_batch(model)
    model.compile(fullgraph=True, dynamic=False, backend=backend)
    ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=bucket / 2**20)
    ddp.register_comm_hook(None, reduce)
    for _ in range(3):  # the first pass learns the graph, and all gradients share one bucket until the third
        ran.clear(), reduced.clear(), ddp.zero_grad(set_to_none=True)
        total(ddp(imgs[2 * rank : 2 * rank + 2], ids[2 * rank : 2 * rank + 2])).backward()
    return {"ran": len(ran), "reduced": reduced} | {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


def test_a_compiled_model_under_ddp_reduces_before_its_backward_pass_is_over():
    """One graph would hand out all gradients at its end: dynamo cuts it where DDP's buckets end, and the gradient is the same."""
    model = build("MaskedAutoencoderViT")
    total(model(*a_batch(model))).backward()
    for theirs in run_in_two_processes(_compiled_gradients):
        ran, reduced = theirs.pop("ran"), theirs.pop("reduced")
        assert ran > 5 and len(reduced) > 5
        assert reduced[0] < ran / 2 and sum(before < ran for before in reduced) > len(reduced) / 2
        for parameter, gradient in theirs.items():
            torch.testing.assert_close(torch.from_numpy(gradient), model.get_parameter(parameter).grad, rtol=1e-4, atol=1e-6)
