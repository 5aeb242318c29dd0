"""Models of Transformers, as the library saves them, wherever weights are read; see also test_load."""

import pytest
import torch
from timm.data import ImageNetInfo
from torch.testing import assert_close

from downstream.probe.models import open_encoder
from encoders.load import load_blocks, load_encoder, read
from encoders.trained import load
from models_mae_pr import MaskedAutoencoderViT
from models_vit import VisionTransformer
from util.run.errors import CheckpointError

transformers = pytest.importorskip("transformers")

CLOSE = dict(rtol=1e-10, atol=1e-10)  # in float64
KINDS = {
    "mae": ("ViTMAEForPreTraining", "ViTMAEConfig"),
    "mae_encoder": ("ViTMAEModel", "ViTMAEConfig"),
    "encoder": ("ViTModel", "ViTConfig"),
    "classifier": ("ViTForImageClassification", "ViTConfig"),
}
SIZES = dict(
    hidden_size=48,
    num_hidden_layers=4,
    num_attention_heads=3,
    intermediate_size=192,
    patch_size=8,
)
DECODER = dict(
    decoder_hidden_size=32, decoder_num_hidden_layers=2, decoder_num_attention_heads=4, decoder_intermediate_size=128
)
OURS = dict(img_size=32, patch_size=8, embed_dim=48, depth=4, num_heads=3)
PRETRAINING = OURS | dict(decoder_embed_dim=32, decoder_depth=2, decoder_num_heads=4)


def make(kind, **config):
    """A model whose weights are all random, in float32."""
    torch.manual_seed(3)
    model_class, config_class = KINDS[kind]
    options = dict(image_size=32, layer_norm_eps=1e-6) | SIZES | config
    if kind.startswith("mae"):
        options |= DECODER
    settings = getattr(transformers, config_class)(**options)
    model = getattr(transformers, model_class)(settings).eval()
    for name, value in model.named_parameters():
        mean = 0.0
        if "norm" in name and name.endswith("weight"):
            mean = 1.0
        torch.nn.init.normal_(value, mean, 0.2)
    return model


@torch.no_grad()
def features_of(model, imgs):
    """Features of all patches in their order: a ViTMAEModel masks and shuffles by itself."""
    model = getattr(model, "vit", model).double()
    if "MAE" not in type(model).__name__:
        return model(imgs).last_hidden_state
    model.config.mask_ratio = 0.0
    num_tokens = model.embeddings.patch_embeddings.num_patches
    return model(imgs, noise=torch.arange(num_tokens).double().expand(len(imgs), -1)).last_hidden_state


def images(channels=3, size=(32, 32)):
    return torch.randn(2, channels, *size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("mae", {}),
        ("mae_encoder", {"num_channels": 5, "intermediate_size": 96}),
        ("encoder", {"image_size": (16, 32)}),
        ("encoder", {"qkv_bias": False, "patch_size": (8, 8)}),
        ("classifier", {"num_channels": 1}),
    ],
)
def test_features(tmp_path, kind, config):
    """The second path is that of evaluation."""
    theirs = make(kind, **config)
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path).model.double()
    imgs = images(ours.in_chans, ours.img_size)
    expected = features_of(theirs, imgs)
    assert_close(ours.forward_features(imgs), expected, **CLOSE)
    frozen = open_encoder(tmp_path).double()
    assert_close(frozen(imgs)[frozen.depth].patches, expected[:, 1:], **CLOSE)


@torch.no_grad()
def test_a_classifier(tmp_path):
    theirs = make("classifier", num_labels=7)
    theirs.save_pretrained(tmp_path)
    expected = theirs.double()(images()).logits
    assert_close(load(tmp_path).model.double()(images()), expected, **CLOSE)


def test_what_its_two_json_files_say(tmp_path):
    """Statistics are those of its processor. ImageNet's descriptions become the names of its folders."""
    names = ImageNetInfo()
    labels = {i: names.index_to_description(i) for i in range(1000)}
    make("classifier", id2label=labels, layer_norm_eps=1e-12).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.4, 0.3], "image_std": [0.1, 0.2, 0.3]}')
    trained = load(tmp_path, "classification")
    assert trained.settings["mean"] == [0.5, 0.4, 0.3]
    assert trained.settings["std"] == [0.1, 0.2, 0.3]
    assert trained.settings["nb_classes"] == 1000
    assert trained.weights.info.classes[:2] == ["n01440764", "n01443537"]


@pytest.mark.parametrize("config", [{"num_attention_heads": 6}, {"hidden_act": "relu"}, {"layer_norm_eps": 1e-3}])
def test_encoders_that_differ_in_no_shape_are_refused(tmp_path, config):
    make("encoder", **config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        load_encoder(VisionTransformer(**OURS), tmp_path)


@torch.no_grad()
@pytest.mark.parametrize("way", ["file", "--pretrained"])
def test_pre_training_goes_on(tmp_path, way):
    """The same mask gives the same loss and the same reconstruction, decoder included."""
    theirs = make("mae", norm_pix_loss=True)
    theirs.save_pretrained(tmp_path)
    model = MaskedAutoencoderViT(throw_ratio=0, norm_pix_loss=True, **PRETRAINING)
    if way == "--pretrained":
        report = load_blocks(model, tmp_path)
        assert not report.missing
        assert not report.unexpected
    else:
        model.load_official(read(tmp_path).raw)
    model.double()
    ids_shuffle = torch.rand(2, 16).argsort(dim=1)
    output = theirs.double()(images(), noise=ids_shuffle.argsort(dim=1).double())
    pred, mask = model.reconstruct(images(), ids_shuffle)
    assert torch.equal(output.mask.bool(), mask)
    assert_close(model(images(), ids_shuffle)["pixel"], output.loss, **CLOSE)
    assert_close(pred[mask], output.logits[mask], **CLOSE)
