import itertools
import math

import numpy as np
import pytest
import torch

import main_pretrain
from tests import runs
from tests.runs import refused
from tools import gradient_gap
from util.tables import read_csv

pretrain = runs.pretrain.also("--warmup_epochs 0 --lr 1e-3")
GAP = "--batch_size 4 --batches 3 --draws 2 --conv_steps 3 --num_workers 0 --device cpu"


def flags(*argv):
    return gradient_gap.get_args_parser().parse_args(["RUN", "--images", "IMAGES", *argv, "--num_workers", "0"])


@pytest.fixture(scope="module")
def mae(photos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gap") / "mae"
    pretrain(photos, folder, "--throw_ratio", "0")
    return str(folder)


@pytest.fixture(scope="module")
def rows(mae, photos):
    out = photos.parent / "gap.svg"
    gradient_gap.main(
        [mae, "--images", str(photos), "--throw_ratios", "0", "0.25", "0.5", "0.7", *GAP.split(), "--out", str(out)]
    )
    assert "<svg" in out.read_text()
    return read_csv(out.with_suffix(".csv"), gradient_gap.COLUMNS, gradient_gap.TEXT)


def of(rows, column, **where):
    return [row[column] for row in rows if all(row[k] == v for k, v in where.items())]


def test_nothing_thrown_is_exactly_mae(rows):
    for row in (r for r in rows if r["throw_ratio"] == 0):
        assert row["difference"] == row["bias"] == row["sd_draws"] == row["sd_batches"] == 0
        assert row["cosine"] == pytest.approx(1)
    assert len(of(rows, "difference", throw_ratio=0)) == 4  # two methods, two samplings


def test_the_plain_difference_grows_with_what_is_thrown(rows):
    for sampling in ("random", "furthest"):
        differences = of(rows, "difference", method="plain", sampling=sampling)
        assert len(differences) == 4 and all(a < b for a, b in itertools.pairwise(differences))


def test_each_method_is_the_model_of_its_flags(photos, mae):
    """The gradient is that of a model built from flags of main_pretrain.py. It differs between any two methods."""
    settings, weights = gradient_gap.load(mae, flags())
    first = gradient_gap.variant(settings, weights, 0.0, "plain")
    images, gradients = gradient_gap.open_images("folder", photos), {}
    batches = gradient_gap.Batches(images, first, settings, flags("--batch_size", "4"), "cpu")
    imgs = next(batches.load(0, 1))[1]
    for method, argv in {"plain": "--no-progressive", "progressive": ""}.items():
        ours = gradient_gap.variant(settings, weights, 0.5, method, shared=first)
        args = main_pretrain.parse_args([*pretrain.flags.split(), "--throw_ratio", "0.5", *argv.split()])[1]
        model = main_pretrain.build_model(vars(args))
        own = {name: value for name, value in ours.state_dict().items() if name.startswith("decoder.aggregation.")}
        assert bool(own) == (method != "plain")
        model.eval().load_state_dict(weights | own)
        order = batches.token_order(0, model.counts, "furthest", 0)
        model(imgs, order)["pixel"].backward()
        encoder = [p for name, p in model.named_parameters() if p.requires_grad and "decoder" not in name]
        expected = torch.cat([p.grad.flatten() for p in encoder])
        gradients[method] = gradient_gap.encoder_gradient(ours, imgs, order)
        assert torch.equal(gradients[method], expected)
    for one, other in itertools.combinations(gradients.values(), 2):
        assert (one - other).norm() > 0.01 * one.norm()


def test_the_encoder_gradient_against_finite_differences(photos, mae):
    settings, weights = gradient_gap.load(mae, flags())
    model = gradient_gap.variant(settings, weights, 0.5, "progressive").double()
    batches = gradient_gap.Batches(
        gradient_gap.open_images("folder", photos), model, settings, flags("--batch_size", "2"), "cpu"
    )
    imgs, order = next(batches.load(0, 1))[1].double(), batches.token_order(0, model.counts, "furthest", 0)
    gradient = gradient_gap.encoder_gradient(model, imgs, order)
    parameters = [p for name, p in model.named_parameters() if not name.startswith("decoder.") and name != "pos_embed"]
    assert len(gradient) == sum(p.numel() for p in parameters)
    direction = [
        torch.randn(p.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) for p in parameters
    ]

    def loss(step):
        with torch.no_grad():
            for p, d in zip(parameters, direction, strict=True):
                p.add_(step * d)
            value = sum(model(imgs, order).values()).item()
            for p, d in zip(parameters, direction, strict=True):
                p.sub_(step * d)
        return value

    slope = (loss(1e-6) - loss(-1e-6)) / 2e-6
    assert torch.cat([d.flatten() for d in direction]) @ gradient == pytest.approx(slope, rel=1e-5)


def test_bias_and_spread_of_known_noise():
    """Differences = bias + noise of the batch + noise of the draw, with known variances."""
    generator = torch.Generator().manual_seed(0)
    size, batches, draws = 500, 400, 3

    def noise(rows, variance):
        return torch.randn(rows, size, generator=generator, dtype=torch.float64) * (variance / size) ** 0.5

    bias = noise(1, 1.0)[0]
    bias *= 0.8 / bias.norm()
    reference = noise(1, 1.0)[0]
    reference *= 2 / reference.norm()
    gap = gradient_gap.Gap()
    for _ in range(batches):
        gap.add(iter(reference + bias + noise(1, 1.5**2) + noise(draws, 0.6**2)), reference)
    row = gap.row(draws)
    assert row["mae_norm"] == pytest.approx(2)
    assert row["bias"] == pytest.approx(0.8 / 2, rel=0.05)
    assert row["sd_batches"] == pytest.approx(1.5 / 2, rel=0.05)
    assert row["sd_draws"] == pytest.approx(0.6 / 2, rel=0.05)
    assert row["difference"] == pytest.approx((0.8**2 + 1.5**2 + 0.6**2) ** 0.5 / 2, rel=0.05)
    one = gradient_gap.Gap()
    one.add(reference[None], reference)
    assert one.row(1)["difference"] == 0 and one.row(1)["bias"] is None and one.row(1)["sd_draws"] is None


def test_batches_are_the_same_for_every_method(photos, mae):
    settings, weights = gradient_gap.load(mae, flags())
    models = {r: gradient_gap.variant(settings, weights, r, "progressive") for r in (0.0, 0.25, 0.5)}
    batches = gradient_gap.Batches(
        gradient_gap.open_images("folder", photos), models[0.0], settings, flags("--batch_size", "3"), "cpu"
    )
    visible = [
        batches.token_order(1, model.counts, sampling, draw)[:, : model.counts.num_visible]
        for model, sampling, draw in itertools.product(models.values(), gradient_gap.SAMPLINGS, (0, 1))
    ]
    assert all(torch.equal(visible[0], other) for other in visible)
    draws = [batches.token_order(1, models[0.5].counts, "random", draw) for draw in (0, 1)]
    assert not torch.equal(*draws)
    assert not np.array_equal(visible[0], batches.token_order(0, models[0.5].counts, "random", 0)[:, :16])


def test_a_batch_mixes_the_classes_and_a_pass_sees_each_image_once(photos, mae):
    settings, weights = gradient_gap.load(mae, flags())
    model = gradient_gap.variant(settings, weights, 0.0, "plain")
    images = gradient_gap.open_images("folder", photos)
    batches = gradient_gap.Batches(images, model, settings, flags("--batch_size", "8"), "cpu")
    addresses = [batches.address(b) for b in range(6)]
    for epoch, batch in ((0, addresses[:3]), (1, addresses[3:])):
        assert sorted(address for part in batch for address in part) == [(epoch, index) for index in range(24)]
    labels = [{int(index >= 12) for _, index in part} for part in addresses]  # 12 cats, then 12 dogs
    assert labels.count({0, 1}) >= 5 and addresses[0] != [(0, index) for _, index in addresses[3]]


def test_images_are_normalised_as_in_the_run(photos, tmp_path):
    own = ("--mean", "0.1", "0.2", "0.3", "--std", "0.5", "0.6", "0.7")
    pretrain(photos, tmp_path / "run", "--throw_ratio", "0", "--max_steps", "1", *own)
    settings, weights = gradient_gap.load(tmp_path / "run", flags())
    images = gradient_gap.open_images("folder", photos)
    model = gradient_gap.variant(settings, weights, 0.0, "plain")
    batches = gradient_gap.Batches(images, model, settings, flags("--batch_size", "2"), "cpu")
    pixels = torch.stack([torch.as_tensor(batches.dataset[address][0]) for address in batches.address(0)]) / 255
    mean, std = torch.tensor([[0.1, 0.2, 0.3], [0.5, 0.6, 0.7]]).view(2, 3, 1, 1)
    assert torch.allclose(next(batches.load(0, 1))[1], (pixels - mean) / std, atol=1e-6)


def test_models_share_all_but_the_convolution(photos, mae):
    settings, weights = gradient_gap.load(mae, flags())
    first = gradient_gap.variant(settings, weights, 0.0, "plain")
    second = gradient_gap.variant(settings, weights, 0.5, "progressive", shared=first)
    theirs = dict(first.named_parameters())
    own = [name for name, p in second.named_parameters() if p is not theirs.get(name)]
    assert own == ["decoder.aggregation.operator.weight", "decoder.aggregation.operator.bias"]


def test_only_the_convolution_is_trained(photos, mae):
    settings, weights = gradient_gap.load(mae, flags())
    model = gradient_gap.variant(settings, weights, 0.5, "progressive")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batches = gradient_gap.Batches(
        gradient_gap.open_images("folder", photos), model, settings, flags("--batch_size", "4"), "cpu"
    )
    gradient_gap.train_aggregations([(model, "furthest")], batches, 2, 0)
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    assert changed == ["decoder.aggregation.operator.weight", "decoder.aggregation.operator.bias"]
    assert model.blocks[0].mlp.fc1.weight.requires_grad and not model.pos_embed.requires_grad


def test_models_that_are_trained_together_end_as_if_trained_alone(photos, mae):
    """Against whole forward passes, model by model. The models differ in throw ratio and sampling."""
    settings, weights = gradient_gap.load(mae, flags())
    first = gradient_gap.variant(settings, weights, 0.0, "plain")
    images = gradient_gap.open_images("folder", photos)
    batches = gradient_gap.Batches(images, first, settings, flags("--batch_size", "4"), "cpu")
    compared = [
        (throw_ratio, sampling, method)
        for throw_ratio, sampling in ((0.5, "furthest"), (0.5, "random"), (0.25, "furthest"))
        for method in ("progressive",)
    ]

    def build(throw_ratio, sampling, method, shared):
        return gradient_gap.variant(settings, weights, throw_ratio, method, shared), sampling

    together = [build(*names, first) for names in compared]
    steps = 3
    losses = gradient_gap.train_aggregations(together, batches, steps, 1)
    for names, (ours, _), loss in zip(compared, together, losses, strict=True):
        model, sampling = build(*names, None)
        parameters = list(model.decoder.aggregation.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.0)
        for step, (b, imgs) in enumerate(batches.load(1, steps)):
            optimizer.param_groups[0]["lr"] = 1e-3 * (1 + math.cos(math.pi * step / steps))
            optimizer.zero_grad()
            value = model(imgs, batches.token_order(b, model.counts, sampling, 0))["pixel"]
            value.backward(inputs=parameters)
            optimizer.step()
        assert loss == pytest.approx(value.item(), rel=1e-5)
        for one, other in zip(ours.decoder.aggregation.parameters(), parameters, strict=True):
            assert torch.allclose(one, other, atol=1e-5)


def test_official_weights(photos, tmp_path, monkeypatch):
    model = main_pretrain.MODELS["mae_vit_micro_patch4"](throw_ratio=0.0)
    back = {"decoder.mask_token": "mask_token", "decoder.pos_embed": "decoder_pos_embed"}
    names = {k: back.get(k, k.replace("decoder.", "decoder_", 1)) for k in model.state_dict()}
    torch.save({"model": {names[k]: v for k, v in model.state_dict().items()}}, tmp_path / "full.pth")
    settings, weights = gradient_gap.load(tmp_path / "full.pth", flags("--model", "mae_vit_micro_patch4"))
    assert settings["throw_ratio"] == 0
    assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("", "the following arguments are required: RUN, --images"),
        ("{mae} --images {photos} --batches 0", "--batches must be at least 1, got 0"),
        ("{mae} --images {photos} --throw_ratios 0.8", "throw_ratio 0.8"),
        ("{mae} --images {photos}/nowhere", "nowhere"),
        ("{mae} --images {photos} --csv /dev/null/gap.csv", "cannot be made: File exists"),
        ("{mae} --images {photos} --model simmim_vit_micro_patch4", "invalid choice: 'simmim_vit_micro_patch4'"),
        ("{mae} --images {photos} --out gap.pdf", "--out 'gap.pdf' must end in .svg or .png"),
        ("{throwing} --images {photos}", "throws tokens: give a run with throw_ratio 0"),
    ],
)
def test_errors(photos, mae, argv, message, capsys, tmp_path):
    if "{throwing}" in argv:
        pretrain(photos, tmp_path / "run", "--max_steps", "1")
    words = [word.format(mae=mae, photos=photos, throwing=tmp_path / "run") for word in argv.split()]
    assert message in refused(capsys, gradient_gap.main, *words)
