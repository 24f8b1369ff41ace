"""Real architectures with random weights: the tap is right on each, and one step adapts it."""

import pytest
import timm
import torch
import torchvision
from torch import nn

import fata
from fata._torch import tree_map
from fata.network.norms import batch_norms, norm_layers
from fata.network.tap import Tap, _first

# Name -> (image size, keyword arguments).
FAST = {
    "timm:resnet18": (64, {}),
    "timm:resnet50_gn": (64, {}),
    "timm:vit_tiny_patch16_224": (64, {"img_size": 64}),
    "timm:convnext_atto": (64, {}),
    "timm:mobilenetv3_small_100": (64, {}),
    "torchvision:resnet18": (64, {}),
}
REST = {
    "timm:resnetv2_50": (64, {}),
    "timm:deit3_small_patch16_224": (64, {"img_size": 64}),
    "timm:swin_tiny_patch4_window7_224": (64, {"img_size": 64, "window_size": 2}),
    "timm:swinv2_cr_tiny_224": (64, {"img_size": 64, "window_size": 2}),
    "timm:convnextv2_atto": (64, {}),
    "timm:efficientnet_b0": (64, {}),
    "timm:tf_efficientnetv2_b0": (64, {}),
    "timm:mobilenetv4_conv_small": (64, {}),
    "timm:densenet121": (64, {}),
    "timm:regnety_002": (64, {}),
    "timm:xcit_nano_12_p16_224": (64, {}),
    "timm:cait_xxs24_224": (64, {"img_size": 64}),
    "timm:coat_lite_tiny": (64, {"img_size": 64}),
    "timm:crossvit_tiny_240": (240, {}),
    "timm:hrnet_w18_small": (64, {}),
    "timm:maxvit_rmlp_pico_rw_256": (64, {"img_size": 64}),
    "timm:hiera_tiny_224": (64, {"img_size": (64, 64)}),
    "timm:mixer_s32_224": (64, {"img_size": 64}),
    "timm:poolformer_s12": (64, {}),
    "timm:pvt_v2_b0": (64, {}),
    "timm:twins_pcpvt_small": (64, {"img_size": 64}),
    "timm:levit_128s": (64, {"img_size": 64}),
    "timm:edgenext_xx_small": (64, {}),
    "timm:mobilevit_xxs": (64, {}),
    "timm:eva02_tiny_patch14_224": (56, {"img_size": 56}),
    "timm:visformer_tiny": (64, {"img_size": 64}),
    "timm:tnt_s_patch16_224": (64, {"img_size": 64}),
    "timm:fastvit_t8": (64, {}),
    "timm:xception41": (64, {}),
    "timm:dla34": (64, {}),
    "timm:ghostnet_100": (64, {}),
    "timm:repvgg_a0": (64, {}),
    "timm:caformer_s18": (64, {}),
    "torchvision:vit_b_16": (32, {"image_size": 32}),
    "torchvision:convnext_tiny": (64, {}),
    "torchvision:swin_t": (64, {}),
    "torchvision:mobilenet_v3_small": (64, {}),
    "torchvision:efficientnet_b0": (64, {}),
    "torchvision:densenet121": (64, {}),
    "torchvision:shufflenet_v2_x0_5": (64, {}),
    "torchvision:regnet_y_400mf": (64, {}),
    "huggingface:ViT": (32, {}),
    "huggingface:Swin": (32, {}),
    "huggingface:ConvNext": (64, {}),
    "huggingface:ResNet": (64, {}),
}
ALL = [*FAST, *(pytest.param(name, marks=pytest.mark.zoo) for name in REST)]
LAYERS = {  # what `auto` must find where the paper, or the network's own words, say it
    "timm:resnet18": "layer3",
    "timm:resnet50_gn": "layer3",
    "timm:vit_tiny_patch16_224": "blocks.10",
    "timm:convnext_atto": "stages.2",
    "timm:swin_tiny_patch4_window7_224": "layers.2",
    "timm:efficientnet_b0": "blocks.4",
    "timm:mobilenetv3_small_100": "blocks.3",
    "torchvision:resnet18": "layer3",
    "torchvision:vit_b_16": "encoder.layers.encoder_layer_10",
    "torchvision:convnext_tiny": "features.5",
    "torchvision:swin_t": "features.5",
    "timm:hiera_tiny_224": "blocks.9",
    "huggingface:Swin": "swin.encoder.layers.2",
    "huggingface:ResNet": "resnet.encoder.stages.2",
    "huggingface:ConvNext": "convnext.encoder.stages.2",
}

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def small_transformer(kind, size):
    import transformers

    config = {
        "ViT": {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2,
                "intermediate_size": 64, "image_size": size, "patch_size": 8},
        "Swin": {"embed_dim": 16, "depths": [1, 1, 2, 1], "num_heads": [1, 2, 2, 4],
                 "image_size": size, "patch_size": 2, "window_size": 2},
        "ConvNext": {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]},
        "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]},
    }[kind]  # fmt: skip
    make = getattr(transformers, f"{kind}ForImageClassification")
    return make(getattr(transformers, f"{kind}Config")(num_labels=10, **config))


def load(name):
    """The architecture with seeded weights, and three images."""
    size, arguments = (FAST | REST)[name]
    library, _, kind = name.partition(":")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if library == "timm":
            model = timm.create_model(kind, num_classes=10, **arguments)
        elif library == "torchvision":
            model = torchvision.models.get_model(kind, weights=None, num_classes=10, **arguments)
        else:
            model = small_transformer(kind, size)
        for key, parameter in model.named_parameters():  # no part of it idle: many start at zero
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=(parameter[0].numel()) ** -0.5)
            elif not key.endswith("bias"):
                nn.init.uniform_(parameter, 0.5, 1.0)
    return model.eval(), torch.rand(3, 3, size, size, generator=torch.Generator().manual_seed(1))


def logits(output):
    return getattr(output, "logits", output)


@pytest.mark.parametrize("name", ALL)
def test_tap(name):
    """`tail(z)` is the forward; the tail of another z, and its gradient, a full forward's."""
    model, images = load(name)
    tap = Tap(model, "auto")
    assert tap.layer == LAYERS.get(name, tap.layer)
    model.requires_grad_(False)
    trained = [p for _, norm in norm_layers(model) for p in norm.parameters(recurse=False)]
    for parameter in trained:
        parameter.requires_grad_(True)

    def other(z):
        noise = torch.randn(z.shape, generator=torch.Generator().manual_seed(2))
        return z + 0.5 * z.detach().std() * noise

    plain = logits(model(images))
    close = {"atol": 1e-4 * plain.abs().max().item(), "rtol": 1e-3}
    recording = tap.record(images)
    assert torch.equal(logits(recording.output), plain), "the clean logits changed"
    again = logits(recording.tail(recording.z))
    torch.testing.assert_close(again, plain, **close)
    tail = logits(recording.tail(other(recording.z)))
    found = torch.autograd.grad(tail.square().sum(), trained, allow_unused=True)

    def replace(module, args, output):
        z = _first(output, len(images), tap.layer)
        return tree_map(lambda leaf: other(z) if leaf is z else leaf, output)

    with tap.target.register_forward_hook(replace):
        full = logits(model(images))
    assert not torch.allclose(full, plain, **close), "the layer has no part in the logits"
    torch.testing.assert_close(tail, full, **close)
    expected = torch.autograd.grad(full.square().sum(), trained, allow_unused=True)
    for one, two in zip(found, expected, strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            scale = two.abs().max().item()
            torch.testing.assert_close(one, two, atol=1e-3 * scale + 1e-7, rtol=1e-3)


@pytest.mark.parametrize("name", ALL)
def test_one_step(name):
    """Only the named parameters move, and the first answer is the plain model's (BN: norm's)."""
    model, images = load(name)
    with torch.no_grad():
        plain = logits(model(images))
    if batch_norms(model):
        norm = fata.adapt(model, "norm")
        plain = norm(images)
        assert norm.unwrap() is model
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    adapted = fata.adapt(model, "tent+fata", guard=None, fata_threshold=float("inf"), lr=1e-3)
    close = {"atol": 1e-4 * plain.abs().max().item(), "rtol": 1e-3}
    torch.testing.assert_close(adapted(images), plain, **close)
    assert adapted.counts["selected"] == {"tent": 3, "fata": 3}
    moved = {n for n, tensor in model.state_dict().items() if not torch.equal(tensor, before[n])}
    assert moved
    assert moved <= set(adapted.trainable)
    last = adapted._live().network.tap
    assert last.layer in fata.layers(model) or last.layer.rpartition(".")[0] in fata.layers(model)


def test_truncated_counts_of_the_papers_networks():
    """43 of 53 layers and 30,592 parameters of a ResNet-50; 18 of 25 and 27,648 of a ViT-B."""
    for name, layers, parameters in (
        ("resnet50_gn", 53, 53_120),
        ("vit_base_patch16_224", 25, 38_400),
    ):
        model = timm.create_model(name)
        every = fata.Adapter(model, fata.Tent(), params="norm")
        assert (len(every.trainable), sum(every._live().theta.sizes)) == (2 * layers, parameters)
        every.unwrap()
        fewer = fata.Adapter(model, fata.Tent())
        expected = (86, 30_592) if layers == 53 else (36, 27_648)
        assert (len(fewer.trainable), sum(fewer._live().theta.sizes)) == expected


def test_truncated_goes_by_depth_not_by_literal_names():
    """The last three blocks of 24 are left out, and blocks 9 to 11 are not."""
    model = timm.create_model("vit_tiny_patch16_224", depth=24, img_size=32)
    blocks = {int(name.split(".")[1]) for name in fata.adapt(model, "tent").trainable}
    assert blocks == set(range(21))
