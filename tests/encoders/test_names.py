"""Files of each origin are recognised by their keys, which are renamed to those here."""

import pytest

from encoders.names import find_origin

BLOCK = "blocks.0.norm1.weight"
LAYER = "encoder.layer.0.layernorm_before.bias"


@pytest.mark.parametrize(
    ("keys", "origin"),
    [
        (["cls_token", BLOCK, "norm.weight"], "MAE and timm"),
        ([BLOCK, "norm.0.weight"], "LocalMIM"),
        (["backbone.cls_token"], "mmpretrain"),
        (["vit.embeddings.cls_token", LAYER], "Transformers"),
        (["embeddings.patch_embeddings.projection.bias", LAYER], "Transformers"),
        (["encoder.cls_token", "decoder.0.weight"], "SimMIM"),
        (["module.backbone.cls_token", "module.head.last"], "iBOT or DINO"),
    ],
)
def test_origins(keys, origin):
    assert find_origin(keys).name.endswith(origin)


RENAMED = {
    "mmpretrain": {
        "backbone.cls_token": "cls_token",
        "backbone.patch_embed.projection.weight": "patch_embed.proj.weight",
        "backbone.layers.3.ln1.weight": "blocks.3.norm1.weight",
        "backbone.layers.3.ffn.layers.0.0.bias": "blocks.3.mlp.fc1.bias",
        "backbone.layers.3.ffn.layers.1.bias": "blocks.3.mlp.fc2.bias",
        "backbone.ln1.weight": "norm.weight",
        "backbone.ln2.weight": "fc_norm.weight",
        "neck.ln1.bias": "decoder.norm.bias",
        "neck.decoder_embed.weight": "decoder.embed.weight",
        "head.fc.weight": "head.weight",
        "data_preprocessor.mean": None,
    },
    "LocalMIM": {
        "norm.0.weight": None,
        "norm.2.weight": None,
        "norm.10.weight": "norm.weight",
        BLOCK: BLOCK,
    },
    "student": {"module.backbone.cls_token": "cls_token", "module.head.last": None},
}


@pytest.mark.parametrize("origin", RENAMED)
def test_keys_are_renamed(origin):
    names = RENAMED[origin]
    renamed = find_origin(names).rename({name: number for number, name in enumerate(names)})
    assert renamed == {name: number for number, name in enumerate(names.values()) if name}
