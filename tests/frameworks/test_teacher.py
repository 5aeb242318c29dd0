import numpy as np
import pytest
import timm
import torch

from frameworks import teacher as models_teacher
from frameworks.models_tec_pr import tec_vit_micro_patch4
from frameworks.teacher import open_teacher
from models_mae_pr import mae_vit_micro_patch4
from models_vit import vit_micro_patch4, vit_mini_patch4
from prmim import TokenOrder, TokenOrderSampler, addressed_noise
from util.run.checkpoint import save_checkpoint

TIMM = dict(img_size=32, patch_size=4, embed_dim=96, depth=4, num_heads=3, num_classes=0)


def timm_vit(seed=0, **options):
    torch.manual_seed(seed)
    model = timm.create_model("vit_base_patch16_224", **{**TIMM, **options}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def an_order(model, batch=2):
    counts = mae_vit_micro_patch4(throw_ratio=0.5).counts
    noise = addressed_noise(0, 0, np.arange(batch), counts.num_tokens)
    return TokenOrder(torch.from_numpy(TokenOrderSampler(8, counts)(noise)), counts)


def theirs_and_ours(theirs, teacher, imgs):
    """Returns the mean of the last two blocks' outputs, from timm and from the teacher."""
    blocks = theirs.forward_intermediates(imgs, indices=2, norm=False, intermediates_only=True, output_fmt="NLC")
    return sum(blocks) / 2, teacher.features(imgs)


FORMS = {
    "timm": lambda w: w,
    "MAE": lambda w: {"model": w, "epoch": 3},
    "iBOT": lambda w: {"state_dict": w | {"head.mlp.0.weight": torch.zeros(3)}},
    "training checkpoint": lambda w: {
        "student": {f"module.backbone.{k}": v for k, v in w.items()} | {"module.head.last": torch.zeros(3)}
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_features_and_attention_equal_those_of_timm(tmp_path, form):
    theirs = timm_vit()
    torch.save(FORMS[form](theirs.state_dict()), tmp_path / "teacher.pth")
    teacher = open_teacher(str(tmp_path / "teacher.pth"), (32, 32), 4)
    assert ("(the student in a training checkpoint of iBOT or DINO)" in teacher.origin) == (
        form == "training checkpoint"
    )
    assert teacher.source == str(tmp_path / "teacher.pth")
    imgs = torch.randn(2, 3, 32, 32)
    expected, features = theirs_and_ours(theirs, teacher, imgs)
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-4)
    last, inputs, order = theirs.blocks[-1], [], an_order(teacher)
    last.register_forward_hook(lambda module, args, output: inputs.append(args[0]))
    theirs.forward_features(imgs)
    q, k, _ = last.attn.qkv(last.norm1(inputs[0])).reshape(2, 65, 3, 3, 32).permute(2, 0, 3, 1, 4)
    logits = q @ k.transpose(-2, -1) / 32**0.5  # [B, heads, 65, 65]
    for num_keys in (64, 32):
        features, rows, queries = teacher(imgs, order, num_keys, topk=5)
        torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-4)
        assert rows.shape == (2, 3, 6, num_keys) and queries.shape == (2, 5)
        for b in range(2):
            patches = order.ids_shuffle[b, :num_keys]
            relevance = logits[b, :, 0, 1 + patches].mean(dim=0)
            assert set(queries[b].tolist()) == set(relevance.argsort(descending=True)[:5].tolist())
            assert relevance[queries[b]].diff().max() <= 0
            for i, query in enumerate([0, *(1 + patches[queries[b]]).tolist()]):
                torch.testing.assert_close(rows[b, :, i], logits[b, :, query, 1 + patches], rtol=1e-4, atol=1e-4)


def test_a_run_of_this_project_is_a_teacher(tmp_path):
    model = mae_vit_micro_patch4()
    settings = dict(model="mae_vit_micro_patch4", input_size=[32], patch_size=4)
    save_checkpoint(tmp_path, 7, {"model": model.state_dict()}, {"settings": settings})
    teacher = open_teacher(str(tmp_path), (32, 32), 4)
    assert torch.equal(teacher.blocks[3].mlp.fc2.weight, model.blocks[3].mlp.fc2.weight)
    assert (
        "checkpoint-7.pth' (made as mae_vit_micro_patch4), width 96, 4 blocks: 52 loaded" in teacher.origin
        and len(teacher.fingerprint) == 64
    )
    assert teacher.source == str((tmp_path / "checkpoint-7.pth").resolve())
    assert not any(p.requires_grad for p in teacher.parameters()) and not teacher.training


def test_the_pixel_normalisation_of_a_run_is_respected(tmp_path):
    model, pixels = mae_vit_micro_patch4(), torch.rand(2, 3, 32, 32)
    settings = dict(input_size=[32], patch_size=4, mean=[0.5, 0.4, 0.3], std=[0.2, 0.3, 0.4])
    mean, std = (torch.tensor(settings[name]).view(3, 1, 1) for name in ("mean", "std"))
    imagenet = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    features = []
    for number, meta in enumerate(({"settings": settings}, {})):
        path = save_checkpoint(tmp_path, number, {"model": model.state_dict()}, meta)
        ours, ours_std = (torch.tensor(x).view(3, 1, 1) for x in imagenet) if number == 0 else (mean, std)
        features.append(open_teacher(path, (32, 32), 4).features((pixels - ours) / ours_std))
    torch.testing.assert_close(*features, rtol=1e-4, atol=1e-4)


def test_positions_of_another_grid_are_resized(tmp_path):
    torch.save(timm_vit().state_dict(), tmp_path / "teacher.pth")
    teacher = open_teacher(str(tmp_path / "teacher.pth"), (48, 32), 4)
    assert teacher.pos_embed.shape == (1, 97, 96) and teacher.features(torch.randn(1, 3, 48, 32)).shape == (1, 96, 96)


@pytest.fixture
def timm_gives(monkeypatch):
    """Replaces timm's download: every pre-trained model is the one that is given here."""

    def give(make):
        def create(name, pretrained, img_size):
            return make()

        monkeypatch.replace_in(models_teacher, "timm.create_model", create)

    return give


def test_a_timm_name_and_pixels_of_another_normalisation(timm_gives):
    """The teacher sees a photograph as timm's model does: normalised with that model's mean and deviation."""
    theirs = timm_vit()
    theirs.pretrained_cfg = dict(mean=(0.5, 0.5, 0.4), std=(0.5, 0.25, 0.5))
    timm_gives(lambda: theirs)
    teacher = open_teacher("vit_base_patch16_224.augreg_in21k", (32, 32), 4)
    assert teacher.source == teacher.fingerprint == "vit_base_patch16_224.augreg_in21k" and teacher.num_heads == 3
    pixels = torch.rand(2, 3, 32, 32)
    normalised = lambda mean, std: (pixels - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)  # noqa: E731
    expected, _ = theirs_and_ours(theirs, teacher, normalised(**theirs.pretrained_cfg))
    features = teacher.features(normalised((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-4)


def test_a_timm_model_that_computes_other_features_is_refused(timm_gives):
    def quick():
        model = timm_vit(act_layer="quick_gelu")
        model.pretrained_cfg = dict(mean=(0.5,) * 3, std=(0.5,) * 3)
        return model

    timm_gives(quick)
    with pytest.raises(ValueError, match="is no plain ViT with a class token: timm's network computes other features"):
        open_teacher("vit_base_patch16_224", (32, 32), 4)
    timm_gives(lambda: timm.create_model("resnet18", num_classes=0))
    with pytest.raises(ValueError, match="is a ResNet; a teacher must be a plain ViT"):
        open_teacher("resnet18", (32, 32), 4)


def test_unusable_teachers_are_refused(tmp_path, timm_gives):
    def refused(weights, message, patch_size=4):
        torch.save(weights, tmp_path / "teacher.pth")
        with pytest.raises(ValueError, match=message):
            open_teacher(str(tmp_path / "teacher.pth"), (32, 32), patch_size)

    weights = vit_mini_patch4(global_pool="token").state_dict()
    refused(weights, "cuts patches of 4 px, the student of 8: tokens must be the same", patch_size=8)
    for odd in ({"model": torch.zeros(2)}, {"model": "x"}, {"state_dict": None}, {0: torch.zeros(2)}):
        refused(odd, "holds no weights by their names")
    refused({"fc.weight": torch.zeros(2)}, "holds no encoder of a known kind: patch_embed.proj.weight, ")
    refused(
        {**weights, "blocks.0.ls1.gamma": torch.zeros(192)},
        "another kind of encoder: this Teacher has no blocks.0.ls1.gamma",
    )
    refused({k: v for k, v in weights.items() if k != "blocks.2.norm1.bias"}, r"missing: blocks\.2\.norm1\.bias")
    wide = vit_micro_patch4(embed_dim=48).state_dict()
    refused(wide, "none is known for width 48 and depth 4; known")
    with pytest.raises(
        ValueError, match=r"'vit_bas_patch16_224' is neither a file nor .* close to it: vit_base_patch16_224"
    ):
        open_teacher("vit_bas_patch16_224", (224, 224), 16)
    timm_gives(
        lambda: timm.create_model("vit_tiny_patch16_224", pretrained_cfg=dict(file="nowhere.pth"), pretrained=True)
    )
    with pytest.raises(ValueError, match="teacher 'vit_tiny_patch16_224': timm could not make it, with its weights"):
        open_teacher("vit_tiny_patch16_224", (224, 224), 16)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no intact checkpoint"):
        open_teacher(str(tmp_path / "empty"), (32, 32), 4)


@pytest.mark.parametrize("channels", [3, 5])
def test_a_teacher_follows_the_normalisation_of_its_student(tmp_path, channels):
    """Whatever statistics the student's images are normalised with, the teacher computes the features of its own."""
    draw = lambda: [[0.1 + 0.8 * torch.rand(1).item() for _ in range(channels)] for _ in range(2)]  # noqa: E731
    torch.manual_seed(3)
    theirs, (own_mean, own_std), (mean, std) = timm_vit(in_chans=channels), draw(), draw()
    settings = {"settings": {"mean": own_mean, "std": own_std, "input_size": 32, "patch_size": 4}}
    path = save_checkpoint(tmp_path, 1, {"model": theirs.state_dict()}, settings)
    student = tec_vit_micro_patch4(teacher=path, in_chans=channels)
    images = torch.rand(2, channels, 32, 32)
    normalised = lambda mean, std: (images - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1)  # noqa: E731
    expected, _ = theirs_and_ours(theirs, student.teacher, normalised(own_mean, own_std))
    for statistics in ((mean, std), (own_mean, own_std), (mean, std), (mean, std)):
        student.use_statistics(*statistics)
        found = student.teacher.features(normalised(*statistics))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_a_teacher_of_other_channels_is_refused(tmp_path):
    path = save_checkpoint(tmp_path, 1, {"model": timm_vit().state_dict()}, {})
    with pytest.raises(ValueError, match="the teacher reads images of 3 channels, the student of 5"):
        tec_vit_micro_patch4(teacher=path, in_chans=5)
