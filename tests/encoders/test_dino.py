"""Weights of DINOv2, DINOv3 and DeiT III, as their authors, timm and Transformers save them. All are random here."""

import pytest
import timm
import torch
from timm.optim import param_groups_weight_decay
from torch.testing import assert_close

from downstream.detection.backbone import ViTDet
from downstream.probe.models import open_encoder
from downstream.segmentation.vit_backbone import DenseViT
from encoders.load import build, load_blocks, load_encoder, read, sizes_of
from encoders.trained import load
from frameworks import registry
from models_mae_pr import MaskedAutoencoderViT
from models_vit import VisionTransformer
from prmim import TokenOrder
from scripts import export
from tests.downstream.dense import detect, segment, write_shapes, write_stripes
from tests.runs import assert_same_state, finetune, losses, pretrain, state
from tests.test_models_mae_pr import orders
from util.run.errors import CheckpointError

SIZES = dict(img_size=32, patch_size=8, embed_dim=96, depth=4, num_heads=3, num_classes=0)
DINOV3 = dict(init_values=1.0, norm_layer=torch.nn.LayerNorm, use_fc_norm=False, dynamic_img_size=True)  # eps 1e-5
DINOV3 |= dict(use_abs_pos_emb=False, use_rot_pos_emb=True, rope_type="dinov3", rope_temperature=100)
DINOV3 |= dict(rope_rotate_half=True, num_reg_tokens=4)
NETWORKS = {
    "dinov2": ("VisionTransformer", dict(init_values=1.0)),
    "dinov2_registers": ("VisionTransformer", dict(init_values=1.0, reg_tokens=4, no_embed_class=True)),
    "deit3": ("VisionTransformer", dict(init_values=1.0, no_embed_class=True)),
    "dinov3": ("Eva", dict(qkv_bias=False, **DINOV3)),
    "dinov3_qkvb": ("Eva", dict(qkv_bias=True, **DINOV3)),
}
SCALED = dict(layer_scale=True)
WITH_REGISTERS = dict(num_cls_tokens=5, registers=True, **SCALED)
TRAITS = {
    "dinov2": SCALED,
    "dinov2_registers": WITH_REGISTERS,
    "deit3": SCALED,
    "dinov3": WITH_REGISTERS | dict(rotary=True),
    "dinov3_qkvb": WITH_REGISTERS | dict(rotary=True),
}


@torch.no_grad()
def randomized(network):
    torch.manual_seed(3)
    for name, value in network.named_parameters():
        mean = float("norm" in name and name.endswith("weight"))
        value.normal_(mean, 0.1)
    return network.eval()


def network_of(kind, **sizes):
    class_name, options = NETWORKS[kind]
    models = {"VisionTransformer": timm.models.VisionTransformer, "Eva": timm.models.Eva}
    return randomized(models[class_name](**SIZES | options | sizes))


def weights_of_meta(kind, network):
    """The state dict under the names of Meta's files, with what else they hold."""
    weights = dict(network.state_dict())
    width = weights["cls_token"].shape[2]
    weights["mask_token"] = torch.randn(1, width)
    if kind == "dinov2_registers":
        weights["register_tokens"] = weights.pop("reg_token")
        position = torch.randn(1, 1, width)
        weights["pos_embed"] = torch.cat([position, weights["pos_embed"]], dim=1)
        weights["cls_token"] = weights["cls_token"] - position
    if kind.startswith("dinov3"):
        weights["storage_tokens"] = weights.pop("reg_token")
        weights["rope_embed.periods"] = torch.randn(16)
        for i in range(4):
            block = f"blocks.{i}"
            bias = weights.pop(f"{block}.attn.q_bias"), torch.ones(width), weights.pop(f"{block}.attn.v_bias")
            weights[f"{block}.attn.qkv.bias"] = torch.cat(bias)  # that of keys is masked
            mask = torch.ones(3 * width)
            mask[width:-width] = 0
            weights[f"{block}.attn.qkv.bias_mask"] = mask
            for n in (1, 2):
                weights[f"{block}.ls{n}.gamma"] = weights.pop(f"{block}.gamma_{n}")
    return weights


def images(size=(32, 32)):
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def assert_same_features(path, network, size):
    """`network` computes the features of `path`, and gradients of pixels and of the patch embedding, in float64."""
    weights = read(path)
    sizes = {}
    if not weights.settings.get("rotary"):  # which takes any size
        sizes["img_size"] = size
    model, report = build(weights, **sizes)
    assert not report.missing
    model.double()
    network.double()
    found = images(size).requires_grad_()
    expected = images(size).requires_grad_()
    ours = model.forward_features(found)
    theirs = network.forward_features(expected) if hasattr(network, "forward_features") else network(expected)[0]
    assert_close(ours, theirs, rtol=1e-6, atol=1e-6)  # rotations are rounded to float32 in some networks
    weight = torch.randn_like(ours)
    (ours * weight).sum().backward()
    (theirs * weight).sum().backward()
    assert_close(found.grad, expected.grad, rtol=1e-5, atol=1e-5)
    return weights


@pytest.mark.parametrize("kind", NETWORKS)
def test_features_and_gradients_of_timms_files(kind, tmp_path):
    network = network_of(kind, dynamic_img_size=True)
    torch.save(network.state_dict(), tmp_path / "timm.pth")
    sizes = [(32, 32)]
    if "registers" in TRAITS[kind]:  # timm resizes the table of others otherwise
        sizes += [(24, 24), (40, 80)]
    for size in sizes:
        weights = assert_same_features(tmp_path / "timm.pth", network, size)
        assert weights.traits == TRAITS[kind]


@pytest.mark.parametrize("kind", ["dinov2", "dinov2_registers", "dinov3_qkvb"])
def test_features_of_metas_files(kind, tmp_path):
    network = network_of(kind)
    torch.save(weights_of_meta(kind, network), tmp_path / "meta.pth")
    weights = assert_same_features(tmp_path / "meta.pth", network, (32, 32))
    assert weights.traits == TRAITS[kind]


def save_by_transformers(kind, folder, **settings):
    """Saves a network of this kind. Returns it."""
    transformers = pytest.importorskip("transformers")
    names = {"dinov2": "Dinov2", "dinov2_registers": "Dinov2WithRegisters", "dinov3": "DINOv3ViT"}
    sizes = dict(hidden_size=96, num_hidden_layers=4, num_attention_heads=3, image_size=32, patch_size=8)
    if "registers" in TRAITS[kind]:
        sizes["num_register_tokens"] = 4
    if kind == "dinov3":
        sizes["intermediate_size"] = 384
    config = getattr(transformers, f"{names[kind]}Config")(**sizes, **settings)
    network = randomized(getattr(transformers, f"{names[kind]}Model")(config))
    network.save_pretrained(folder)
    return network


@pytest.mark.parametrize("kind", ["dinov2", "dinov2_registers", "dinov3"])
def test_features_of_transformers_folders(kind, tmp_path):
    network = save_by_transformers(kind, tmp_path)
    for size in ((32, 32), (24, 24), (40, 80)):
        weights = assert_same_features(tmp_path, network, size)
        assert weights.traits == TRAITS[kind]


@pytest.mark.parametrize("kind", ["dinov2", "dinov3_qkvb"])
def test_a_step_of_training_is_that_of_timm(kind, tmp_path):
    """Small layer scales are parameters, without weight decay; the bias of keys stays 0."""
    network = network_of(kind)
    with torch.no_grad():
        for name, value in network.named_parameters():
            if name.endswith(("gamma", "gamma_1", "gamma_2")):
                value.mul_(0.01)
            value.requires_grad_(name != "pos_embed")  # which pre-training leaves as it is
    torch.save(network.state_dict(), tmp_path / "begun.pth")
    model = build(read(tmp_path / "begun.pth"))[0].double()
    weight = torch.randn(2, 5, 96, dtype=torch.float64)
    for trained in (model, network.double()):
        groups = param_groups_weight_decay(trained, 0.5)
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        for _ in range(2):
            optimizer.zero_grad()
            (trained.forward_features(images())[:, -5:] * weight).sum().backward()
            optimizer.step()
    torch.save(network.state_dict(), tmp_path / "trained.pth")
    found = model.state_dict()
    expected = read(tmp_path / "trained.pth").tensors
    for name, value in expected.items():
        assert_close(found[name], value, rtol=1e-5, atol=1e-5)  # a step is 1e-2


def test_registers_are_no_class_tokens(tmp_path):
    network = network_of("dinov2_registers")
    torch.save(network.state_dict(), tmp_path / "timm.pth")
    imgs = images().float()
    features = open_encoder(tmp_path / "timm.pth").vectors(imgs)
    expected = network.forward_features(imgs)
    assert_close(features["4 cls"], expected[:, 0], rtol=1e-4, atol=1e-4)
    assert_close(features["4 mean"], expected[:, 5:].mean(dim=1), rtol=1e-4, atol=1e-4)


def slow_features(model, imgs, ids):
    """The tokens of one image whose patches `ids` are visible, of a rotary ViT: token by token, head by head."""
    width = model.embed_dim // 3
    rows, columns = model.grid_size
    patches = model.patchify(imgs)[0]
    tokens = [*model.cls_token[0]]
    places: list = [None] * len(tokens)
    for i in ids.tolist():
        tokens.append(model.patch_embed(patches[None, i : i + 1])[0, 0])
        places.append(((i // columns + 0.5) / rows * 2 - 1, (i % columns + 0.5) / columns * 2 - 1))

    def turn(vector, place):
        if place is None:
            return vector
        turned = vector.clone()
        for axis in (0, 1):
            for k in range(width // 4):
                angle = torch.tensor(2 * torch.pi * place[axis] / 100 ** (k / (width // 4)), dtype=torch.float64)
                i = axis * (width // 4) + k
                j = i + width // 2
                turned[i] = vector[i] * angle.cos() - vector[j] * angle.sin()
                turned[j] = vector[j] * angle.cos() + vector[i] * angle.sin()
        return turned

    x = torch.stack(tokens)
    for block in model.blocks:
        q, k, v = block.attn.qkv(block.norm1(x)).chunk(3, dim=1)
        heads = []
        for head in range(3):
            part = slice(head * width, (head + 1) * width)
            queries = torch.stack([turn(vector, place) for vector, place in zip(q[:, part], places, strict=True)])
            keys = torch.stack([turn(vector, place) for vector, place in zip(k[:, part], places, strict=True)])
            attention = (queries @ keys.T / width**0.5).softmax(dim=1)
            heads.append(attention @ v[:, part])
        x = x + block.ls1(block.attn.proj(torch.cat(heads, dim=1)))
        x = x + block.ls2(block.mlp(block.norm2(x)))
    return model.norm(x)


@torch.no_grad()
@pytest.mark.parametrize("throw_ratio", [0.0, 0.5])
def test_visible_tokens_are_rotated_by_their_places(throw_ratio, tmp_path):
    torch.save(network_of("dinov3_qkvb").state_dict(), tmp_path / "timm.pth")
    weights = read(tmp_path / "timm.pth")
    sizes = sizes_of(weights) | dict(img_size=(32, 48))
    model = MaskedAutoencoderViT(**sizes, decoder_embed_dim=32, decoder_depth=1, throw_ratio=throw_ratio)
    load_blocks(model, weights)
    model.double()
    imgs = images((32, 48))
    order = TokenOrder(orders(model, 2), model.counts)
    latent = model.forward_encoder(model.token_pixels(imgs), order)
    for i in range(2):
        assert_close(latent[i], slow_features(model, imgs[i : i + 1], order.ids_visible[i]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["rope", "rope_ape", "rope_mixed", "rope_mixed_ape"])
def test_other_rotations_are_refused(name, tmp_path):
    network = timm.create_model(f"vit_small_patch16_{name}_224", **SIZES)
    torch.save(network.state_dict(), tmp_path / "timm.pth")
    with pytest.raises(ValueError, match=str(tmp_path)):
        load(tmp_path / "timm.pth")
    sizes = {name: SIZES[name] for name in SIZES.keys() - {"num_classes"}}
    model = MaskedAutoencoderViT(32, 1, **sizes)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        load_blocks(model, tmp_path / "timm.pth")


@pytest.mark.parametrize(("name", "value"), [("layer_norm_eps", 1e-6), ("rope_theta", 10.0), ("key_bias", True)])
def test_other_settings_in_a_config_are_refused(name, value, tmp_path):
    """No shape shows them."""
    save_by_transformers("dinov3", tmp_path, **{name: value})
    with pytest.raises(CheckpointError, match=f"{tmp_path}.*{name}"):
        read(tmp_path)


@pytest.mark.parametrize("layers", [("fc1", "fc2"), ("w12", "w3")])  # of timm and Meta
def test_gated_mlps_are_refused(layers, tmp_path):
    weights = {}
    for name, value in network_of("dinov2").state_dict().items():
        if ".mlp.fc1." in name:
            value = torch.cat([value, value])
        weights[name.replace("fc1", layers[0]).replace("fc2", layers[1])] = value
    torch.save(weights, tmp_path / "giant.pth")
    with pytest.raises(CheckpointError, match="giant.pth"):
        build(read(tmp_path / "giant.pth"))
    with pytest.raises(CheckpointError, match="giant.pth"):
        load_encoder(VisionTransformer(**SIZES | dict(num_classes=2)), tmp_path / "giant.pth")


# ------------------------------------------------------------------------------------------------------------- programs


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """{kind: file}, of patches of 4 pixels."""
    folder = tmp_path_factory.mktemp("dino")
    paths = {}
    for kind in ("dinov2", "dinov2_registers", "dinov3_qkvb"):
        paths[kind] = folder / f"{kind}.pth"
        torch.save(weights_of_meta(kind, network_of(kind, patch_size=4)), paths[kind])
    return paths


@pytest.mark.parametrize("model", ["mae_vit_micro_patch4", "mff_vit_micro_patch4"])
@pytest.mark.parametrize("kind", ["dinov2_registers", "dinov3_qkvb"])
def test_from_a_file_to_a_fine_tuned_classifier(kind, model, files, labelled, tmp_path):
    """The network follows from the file, and a stopped run needs it no longer."""
    flags = ["--model", model, "--input_size", 24, 32]
    pretrain(labelled, tmp_path / "whole", *flags, "--pretrained", files[kind])
    copy = tmp_path / "copy.pth"
    copy.write_bytes(files[kind].read_bytes())
    pretrain(labelled, tmp_path / "parts", *flags, "--pretrained", copy, "--max_steps", 3)
    copy.unlink()
    pretrain(labelled, tmp_path / "parts", *flags, "--pretrained", copy)
    assert_same_state(state(tmp_path / "parts"), state(tmp_path / "whole"))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    encoder = load(tmp_path / "parts").model
    assert encoder.traits == TRAITS[kind]
    assert open_encoder(tmp_path / "parts").num_cls == 1
    finetune(labelled, tmp_path / "tuned", "--finetune", tmp_path / "parts", "--max_steps", 3, "--global_pool", "token")
    finetune(labelled, tmp_path / "tuned", "--finetune", tmp_path / "parts", "--global_pool", "token")
    classifier = load(tmp_path / "tuned").model
    assert classifier.traits == TRAITS[kind]
    imgs = torch.randn(2, 3, 32, 32)
    assert_close(classifier(imgs), classifier.head(classifier.forward_features(imgs)[:, 0]))


def test_frozen_blocks_stay_and_keep_nothing_for_a_backward_pass(files, labelled, tmp_path, capsys):
    """Also after a stop. The decoder and the last block are trained."""
    path = files["dinov3_qkvb"]
    command = [labelled, tmp_path / "run", "--pretrained", path, "--trainable_blocks", 1, "--drop_path", 0.5]
    pretrain(*command, "--max_steps", 3)
    pretrain(*command)
    model, settings = registry.load_run(tmp_path / "run")
    encoder, _ = build(read(path))
    untrained = encoder.state_dict()
    changed = {
        name for name, value in model.state_dict().items() if name in untrained and value.ne(untrained[name]).any()
    }
    assert changed == {name for name in untrained if name.startswith(("blocks.3.", "norm."))}
    model.freeze_all_but(1)
    model.train()
    kept = []
    model.blocks[2].register_forward_hook(lambda module, args, output: kept.append(output.requires_grad))
    model(torch.randn(2, 3, 32, 32), orders(model, 2))
    assert kept == [False]
    assert not model.blocks[2].training
    message = pretrain.refused(capsys, labelled, tmp_path / "other", "--trainable_blocks", 1)
    assert "--pretrained" in message


@pytest.mark.parametrize("kind", ["dinov2_registers", "dinov3_qkvb"])
@pytest.mark.parametrize("global_pool", ["avg", "token"])
def test_they_come_back_from_an_export(global_pool, kind, files, labelled, tmp_path):
    """The script compares each file with timm. MAE's scripts read a .pth of a ViT, and know no layer scales."""
    finetune(labelled, tmp_path / "run", "--finetune", files[kind], "--global_pool", global_pool)
    imgs = torch.randn(2, 3, 32, 32)
    expected = load(tmp_path / "run").model(imgs)
    for name in ("exported", "e.safetensors", "e.pth"):
        export.main([str(tmp_path / "run"), "--out", str(tmp_path / name)])
        weights = read(tmp_path / name)
        traits = dict(TRAITS[kind])
        if name == "e.pth" and kind == "dinov2_registers":
            del traits["layer_scale"]
        assert weights.traits == traits
        assert_close(load(tmp_path / name).model(imgs), expected)


@pytest.mark.parametrize("name", ["localmim", "crossmae", "tec", "simmim", "greenmim", "segmentation", "detection"])
def test_others_name_encoder_and_task_that_do_not_go_together(name, files, labelled, tmp_path, capsys):
    weights = files["dinov3_qkvb"]
    if name in ("segmentation", "detection"):
        program, write = {"segmentation": (segment, write_stripes), "detection": (detect, write_shapes)}[name]
        message = program.refused(capsys, write(tmp_path / "data"), tmp_path / "out", "--finetune", weights)
    else:
        model = f"{name}_vit_micro_patch4"
        flags = ["--model", model, "--pretrained", weights]
        if name == "greenmim":
            flags[1] = "greenmim_swin_micro_patch4_window4"
        if name == "tec":
            flags += ["--teacher", files["dinov2"]]
        message = pretrain.refused(capsys, labelled, tmp_path / "out", *flags)
    assert name in message
    assert "DINOv3" in message


def test_teachers_of_rotary_positions_are_refused(files, labelled, tmp_path, capsys):
    flags = ["--model", "tec_vit_micro_patch4", "--teacher", files["dinov3_qkvb"], "--total_batch_size", 8]
    assert "rotary" in pretrain.refused(capsys, labelled, tmp_path, *flags)


@torch.no_grad()
def test_dense_tasks_start_with_the_features_of_a_file(files):
    """In float64; registers and layer scales included."""
    network = network_of("dinov2_registers", patch_size=4).double()
    weights = read(files["dinov2_registers"])
    sizes = dict(patch_size=4, embed_dim=96, depth=4, num_heads=3, img_size=32)
    segmenter = DenseViT(final_norm=True, num_cls_tokens=5, registers=True, **sizes)
    detector = ViTDet(pretrain_size=32, window_size=8, layer_scale=True, **sizes)
    detector.norm = torch.nn.LayerNorm(96, eps=1e-6)
    detector.norm.load_state_dict({name: weights.tensors[f"norm.{name}"] for name in ("weight", "bias")})
    of_patches = network.patch_embed(images()) + network.pos_embed
    without_class_token = network.norm(network.blocks(of_patches))
    with_class_token = network.forward_features(images())[:, 5:]
    for model, expected in ((segmenter, with_class_token), (detector, without_class_token)):
        report = load_encoder(model, weights)
        assert not report.missing
        found = model.double().forward_features(images())[:, -64:]
        assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_without_registers_it_serves_everywhere(files, labelled, tmp_path):
    path = files["dinov2"]
    pretrain(
        labelled, tmp_path / "tec", "--model", "tec_vit_micro_patch4", "--teacher", path, "--pretrained", path,
        "--max_steps", 3,
    )  # fmt: skip
    pretrain(labelled, tmp_path / "crossmae", "--model", "crossmae_vit_micro_patch4", "--pretrained", path)
    path = files["dinov2_registers"]
    for program, data in ((segment, write_stripes(tmp_path / "striped")), (detect, write_shapes(tmp_path / "shapes"))):
        out = tmp_path / program.module.__name__
        begun = program(data, out, "--finetune", path, "--num_iters", 4)
        trained = load(out)
        assert trained.settings["registers"]
        assert any("gamma" in name for name in begun["model"])


def test_a_new_decoder_trains_alone_at_first(labelled, pretrained, tmp_path):
    """The first epoch leaves the encoder as it is, the second does not; a stop between them changes nothing."""
    flags = ("--pretrained", pretrained, "--decoder_warmup_epochs", 1, "--epochs", 2, "--warmup_epochs", 0)
    begun = pretrain(labelled, tmp_path / "stopped", *flags, "--max_steps", 1)["model"]
    first = pretrain(labelled, tmp_path / "stopped", *flags, "--max_steps", 3)["model"]
    resumed = pretrain(labelled, tmp_path / "stopped", *flags)["model"]
    undisturbed = pretrain(labelled, tmp_path / "whole", *flags)["model"]
    start = state(pretrained)["model"]
    encoder = [name for name in start if not name.startswith("decoder.")]
    assert all(torch.equal(first[name], start[name]) for name in encoder)
    assert not torch.equal(first["decoder.embed.weight"], begun["decoder.embed.weight"])
    assert not torch.equal(resumed["blocks.0.mlp.fc1.weight"], start["blocks.0.mlp.fc1.weight"])
    assert all(torch.equal(value, undisturbed[name]) for name, value in resumed.items())
