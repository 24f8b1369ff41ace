"""Models by name: what each name stands for, files that fit and files that do not, no network."""

import re
import subprocess
import sys
from types import SimpleNamespace
from urllib.error import URLError

import huggingface_hub
import numpy as np
import pytest
import timm
import torch
import torchvision
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import fata
from fata import zoo
from fata.zoo import mini, model_file, sources
from fata.zoo.loaded import Loaded, Weights
from fata.zoo.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess

HALF = (0.5, 0.5, 0.5)
PLAIN = Preprocess(36, 32, "bilinear", HALF, HALF)


def refused(message, name, **arguments):
    with pytest.raises(zoo.ZooError, match=message):
        zoo.load(name, **arguments)


def picture(width, height):
    pixels = np.random.default_rng(0).integers(0, 256, (height // 7, width // 7, 3), np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


def network(arch="test_vit", classes=7):
    torch.manual_seed(0)
    return timm.create_model(arch, num_classes=classes).eval()


@pytest.fixture
def vit(tmp_path):
    """A file of weights, and the network that they are of."""
    model = network()
    save_file(model.state_dict(), tmp_path / "vit.safetensors")
    return SimpleNamespace(model=model, path=tmp_path / "vit.safetensors")


@pytest.fixture
def untrained(monkeypatch):
    """Any name, with a small network in place of its weights."""
    for kind in (sources.Timm, sources.Torchvision):
        monkeypatch.setattr(kind, "pretrained", lambda self: nn.Linear(2, 2))


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No network, and nothing downloaded before."""

    def fail(*arguments, **options):
        raise URLError("no route to host")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", fail)
    monkeypatch.setattr("fata.zoo.download.urlopen", fail)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    return tmp_path


# -- names ----------------------------------------------------------------------------------------

IMAGENET = (IMAGENET_MEAN, IMAGENET_STD)


@pytest.mark.parametrize(
    ("name", "tag", "preprocess"),
    [
        (
            "resnet50_bn",
            "torchvision:resnet50.IMAGENET1K_V1",
            Preprocess(256, 224, "bilinear", *IMAGENET),
        ),
        ("resnet50_gn", "timm:resnet50_gn.a1h_in1k", Preprocess(238, 224, "bicubic", *IMAGENET)),
        (
            "vit_base",
            "timm:vit_base_patch16_224.augreg_in21k_ft_in1k",
            Preprocess(248, 224, "bicubic", HALF, HALF),
        ),
    ],
)
def test_the_papers_models_are_pinned(untrained, name, tag, preprocess):
    loaded = zoo.load(name)
    assert (loaded.name, loaded.weights.tag, loaded.classes) == (name, tag, 1000)
    assert loaded.preprocess == preprocess
    assert not loaded.model.training
    published = zoo.load(name, protocol="sar").preprocess
    assert (published.mean, published.std) == IMAGENET
    assert (published.resize, published.size) == (preprocess.resize, preprocess.size)
    assert zoo.load(tag, protocol="sar").preprocess == published


def test_a_protocol_is_the_papers_models_own(untrained, vit):
    refused("'saw': choose 'sar', or None", "vit_base", protocol="saw")
    refused("for resnet50_bn, resnet50_gn, vit_base, not", "timm:test_vit", protocol="sar")
    refused("not for", vit.path, protocol="sar")


def test_one_set_of_weights_needs_no_tag(untrained):
    assert zoo.load("timm:test_vit").weights.tag == "timm:test_vit.r160_in1k"
    assert zoo.load("torchvision:resnet18").weights.tag == "torchvision:resnet18.IMAGENET1K_V1"


def test_ambiguous_names_are_refused_with_the_tags():
    vit = "vit_base_patch16_224"
    refused(f"choose .*'timm:{vit}.augreg_in21k_ft_in1k' or ", f"timm:{vit}")
    refused("choose 'torchvision:resnet50.IMAGENET1K_V1' or ", "torchvision:resnet50")
    refused(
        "which weights: choose .*timm:resnet50.a1_in1k.*torchvision:resnet50.IMAGENET1K_V2",
        "resnet50",
    )


def test_unknown_names_are_told_what_is_like_them():
    refused("Did you mean 'resnet50_gn'", "timm:resnet50_gm")
    refused(
        "no weights 'resnet50_gn.a1'; it has 'timm:resnet50_gn.a1h_in1k'", "timm:resnet50_gn.a1"
    )
    refused("Did you mean 'resnet50'", "torchvision:resnet5")
    refused("no weights 'resnet18.V9'; it has", "torchvision:resnet18.V9")
    refused(f"choose one of {', '.join(zoo.NAMES)}.*Did you mean 'vit_base'", "vit_bas")


def test_weights_without_a_classifier_are_refused():
    refused("no classifier", "timm:vit_base_patch16_224.dino")
    refused("no classifier", "torchvision:vgg16.IMAGENET1K_FEATURES")
    refused("no weights for 'test_vit4'; load a file", "timm:test_vit4")


# -- no network -----------------------------------------------------------------------------------


def test_without_a_network_the_error_says_what_to_place_and_it_works(offline):
    """The line of code in the message loads the file that the message names."""
    with pytest.raises(zoo.ZooError, match="no route to host") as caught:
        zoo.load("timm:test_vit")
    message = str(caught.value)
    assert "'timm/test_vit.r160_in1k'" in message
    assert str(offline / "hub") in message
    place, arch = re.search(r"zoo\.load\('/path/to/(.+?):(.+?)'\)", message).groups()
    save_file(network(classes=1000).state_dict(), offline / place)
    loaded = zoo.load(f"{offline / place}:{arch}")
    assert loaded.preprocess == sources.Timm("test_vit").preprocess


def test_a_file_placed_by_hand_is_found_without_a_network(offline):
    with pytest.raises(zoo.ZooError, match=r"'squeezenet1_1-\w+\.pth'") as caught:
        zoo.load("torchvision:squeezenet1_1")
    place = offline / "torch" / "hub" / "checkpoints"
    assert f"put it into {str(place)!r}" in str(caught.value)
    place.mkdir(parents=True)
    model = torchvision.models.squeezenet1_1()
    torch.save(model.state_dict(), place / re.search(r"'(squeeze.+?\.pth)'", str(caught.value))[1])
    loaded = zoo.load("torchvision:squeezenet1_1")
    assert torch.equal(loaded.model.features[0].weight, model.features[0].weight)
    assert loaded.weights.origin.endswith(".pth")


def test_hugging_face_without_a_network(offline):
    pytest.importorskip("transformers")
    refused(r"all files of the hub's 'some/vit'.*'hf:/path/to/folder'", "hf:some/vit")


# -- files ----------------------------------------------------------------------------------------


def test_a_file_gives_its_network_and_its_classes(vit):
    loaded = zoo.load(f"{vit.path}:test_vit")
    images = torch.rand(2, 3, 160, 160)
    assert torch.equal(loaded.model(images), vit.model(images))
    assert (loaded.classes, loaded.model.training) == (7, False)
    assert loaded.preprocess == sources.Timm("test_vit").preprocess
    assert loaded.weights.tag == "vit.safetensors:timm:test_vit"
    assert loaded.weights.origin == str(vit.path)


def test_equal_weights_have_one_hash_whatever_their_file(vit, tmp_path):
    state = {name: tensor.half() for name, tensor in vit.model.state_dict().items()}
    save_file(state, tmp_path / "half.safetensors")
    wrapped = {"epoch": 3, "state_dict": {f"module.{name}": t for name, t in state.items()}}
    torch.save(wrapped, tmp_path / "a.pth")
    torch.save({name: tensor.float() for name, tensor in state.items()}, tmp_path / "b.pt")
    files = ("half.safetensors", "a.pth", "b.pt")
    models = [zoo.load(f"{tmp_path / file}:timm:test_vit") for file in files]
    assert len({loaded.weights.sha256 for loaded in models}) == 1
    assert all(p.dtype == torch.float32 for one in models for p in one.model.parameters())
    assert zoo.load(f"{vit.path}:test_vit").weights.sha256 != models[0].weights.sha256


def test_the_hash_is_of_the_source_weights(vit):
    loaded = zoo.load(f"{vit.path}:test_vit")
    before = loaded.weights.sha256
    fata.adapt(loaded.model, "tent", lr=1.0)(torch.rand(4, 3, 160, 160))
    assert loaded.weights.sha256 == before
    assert Weights.of(loaded.model, "", "").sha256 != before


def test_a_file_of_torchvision_may_leave_out_counters(tmp_path):
    model = torchvision.models.shufflenet_v2_x0_5(num_classes=3)
    state = {n: t for n, t in model.state_dict().items() if "num_batches" not in n}
    torch.save(state, tmp_path / "net.pth")
    loaded = zoo.load(f"{tmp_path / 'net.pth'}:torchvision:shufflenet_v2_x0_5")
    assert (loaded.classes, loaded.preprocess.mean) == (3, IMAGENET_MEAN)
    assert loaded.weights.sha256 == Weights.of(model, "", "").sha256


def test_files_for_another_network_are_refused(vit, tmp_path):
    refused(r"lacks \d+ tensors \('conv1.*have no place \('blocks", f"{vit.path}:test_resnet")
    wide = vit.model.state_dict() | {"blocks.0.norm1.weight": torch.ones(9)}
    save_file(wide, tmp_path / "wide.safetensors")
    where = f"{tmp_path / 'wide.safetensors'}:test_vit"
    refused(r"1 have another shape \('blocks.0.norm1.weight' is \(9,\), not \(64,\)", where)
    headless = {n: t for n, t in vit.model.state_dict().items() if not n.startswith("head.")}
    save_file(headless, tmp_path / "headless.safetensors")
    where = f"{tmp_path / 'headless.safetensors'}:test_vit"
    refused(r"lacks 2 tensors \('head.weight', 'head.bias'\)", where)


def test_an_architecture_whose_weights_disagree_on_mean_and_std_needs_a_tag(vit):
    refused("different mean and std", f"{vit.path}:vit_base_patch16_224")
    refused("unknown architecture 'jax:vit'", f"{vit.path}:jax:vit")
    refused("Did you mean 'test_vit'", f"{vit.path}:test_wit")
    refused("must carry its preprocessing", f"{vit.path}:mini_vit")


def test_files_that_cannot_be_read_are_refused(vit, tmp_path):
    refused("there is no file", f"{tmp_path / 'nowhere.safetensors'}:test_vit")
    refused("does not say which network it is for; load it as", vit.path)
    vit.path.write_bytes(vit.path.read_bytes()[:-100])
    refused("damaged or no safetensors file", f"{vit.path}:test_vit")
    (tmp_path / "junk.pth").write_bytes(b"junk")
    refused("damaged or holds more than tensors", f"{tmp_path / 'junk.pth'}:test_vit")
    torch.save([1, 2], tmp_path / "list.pth")
    refused("no dict of tensors", f"{tmp_path / 'list.pth'}:test_vit")
    torch.save(network(), tmp_path / "whole.pth")  # a pickle may run anything: never opened
    refused("holds more than tensors", f"{tmp_path / 'whole.pth'}:test_vit")


def test_a_file_of_ours_says_what_it_is(tmp_path):
    model, path = mini.build("mini_vit", 4).eval(), tmp_path / "mine.safetensors"
    labels, recipe = ["ape", "bee", "cat", "dog"], {"epochs": 3}
    model_file.save(path, model, arch="mini_vit", preprocess=PLAIN, labels=labels, recipe=recipe)
    loaded = zoo.load(path)
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(loaded.model(images), model(images))
    assert (loaded.preprocess, loaded.classes) == (PLAIN, 4)
    assert (list(loaded.labels), loaded.recipe) == (labels, recipe)
    assert zoo.load(f"{path}:mini_vit").weights == loaded.weights


def test_other_files_with_a_description_are_refused(vit, tmp_path):
    adapter = fata.adapt(fata.tiny.build("vit_ln"), "tent")
    adapter.save(tmp_path / "state.safetensors")
    refused("is the state of an adapter", tmp_path / "state.safetensors")
    state = vit.model.state_dict()
    save_file(state, vit.path, {"meta": '{"format": "model 9"}'})
    refused("has format 'model 9'", vit.path)
    save_file(state, vit.path, {"meta": '{"format": "model 1", "arch": "test_vit"}'})
    refused("its description is not whole", vit.path)
    model_file.save(vit.path, vit.model, arch="test_vit", preprocess=PLAIN)
    with pytest.raises(fata.StateError, match="this is a model, not the state"):
        adapter.load(vit.path)


# -- Hugging Face ---------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A small classifier of transformers, in half precision."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 64, "image_size": 32, "patch_size": 8, "num_labels": 7}
    config = transformers.ViTConfig(**sizes)
    transformers.ViTForImageClassification(config).half().save_pretrained(tmp_path)
    processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    processor.save_pretrained(tmp_path)
    return SimpleNamespace(path=tmp_path, config=config, transformers=transformers)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_folder_of_hugging_face(folder):
    loaded = zoo.load(f"hf:{folder.path}")
    assert loaded.classes == 7
    assert loaded.preprocess == Preprocess(32, 32, "bilinear", HALF, HALF, squash=True)
    assert all(p.dtype == torch.float32 for p in loaded.model.parameters())
    pixels = loaded.preprocess.pixels(picture(70, 49))
    assert fata.adapt(loaded.model, "tent")(loaded.preprocess.normalise(pixels[None])).shape == (
        1,
        7,
    )


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_hugging_face_models_that_are_no_plain_classifiers_are_refused(folder):
    refused("there is no folder './nowhere'", "hf:./nowhere")
    (folder.path / "empty").mkdir()
    refused("folder must hold a model and its processor", f"hf:{folder.path / 'empty'}")
    folder.transformers.LevitImageProcessor().save_pretrained(folder.path)
    refused("LevitImageProcessor.* does other things than a resize", f"hf:{folder.path}")
    folder.transformers.ViTModel(folder.config).save_pretrained(folder.path)
    refused("no trained classifier: its weights lack 'classifier.bias'", f"hf:{folder.path}")


# -- preprocessing --------------------------------------------------------------------------------

WEIGHTS = torchvision.models.ResNet50_Weights


@pytest.mark.parametrize("shape", [(320, 240), (241, 333), (90, 70), (224, 224)])
def test_images_are_those_of_the_libraries(shape):
    """Bit for bit what torchvision and timm make of them."""
    image = picture(*shape)
    for name in (
        "test_vit.r160_in1k",
        "resnet50_gn.a1h_in1k",
        "eva_giant_patch14_224.clip_ft_in1k",
    ):
        cfg = timm.get_pretrained_cfg(name).to_dict()
        theirs = timm.data.create_transform(**timm.data.resolve_data_config(pretrained_cfg=cfg))
        ours = sources.Timm(name).preprocess
        assert torch.equal(ours.normalise(ours.pixels(image)[None])[0], theirs(image)), name
    for weights in WEIGHTS:
        ours = sources.Torchvision(f"resnet50.{weights.name}").preprocess
        assert torch.equal(ours.normalise(ours.pixels(image)[None])[0], weights.transforms()(image))


def test_a_crop_leaves_the_scale_alone():
    use = Preprocess(256, 224, "bilinear", HALF, HALF)
    image = picture(224, 224)
    assert use.crop(image).tobytes() == image.tobytes()
    assert use.view(image).tobytes() != image.tobytes()
    larger = picture(300, 260)
    assert use.crop(larger).tobytes() == larger.crop((38, 18, 262, 242)).tobytes()
    assert use.crop(picture(100, 140)).size == (224, 224)
    assert use.crop(Image.new("L", (224, 224), 51)).getpixel((7, 7)) == (51, 51, 51)


def test_a_squash_keeps_the_whole_image():
    image = Image.new("RGB", (100, 50), "black")
    image.paste("white", (0, 0, 5, 50))
    use = Preprocess(40, 40, "nearest", HALF, HALF, squash=True)
    assert torch.equal(use.pixels(image)[:, :, :2], torch.ones(3, 40, 2))
    assert use.pixels(image)[:, :, 2:].sum() == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("size", 0), ("interpolation", "cubic"), ("mean", (0.5,)), ("std", (1.0, 0.0, 1.0))],
)
def test_impossible_preprocessing_is_refused(field, value):
    with pytest.raises(ValueError, match=rf"Preprocess\(.*{field}={re.escape(repr(value))}"):
        Preprocess.of({**vars(PLAIN), field: value})


# -- what was loaded ------------------------------------------------------------------------------


def test_settings_suit_the_method():
    eata = {"redundancy": 0.4, "fisher_alpha": 0.0, "lr": 1e-3}
    presets = {"eata": eata, "eata+fata": {"lr": 2e-3, "sigma": 0.5}}
    model = fata.tiny.build("resnet_gn")
    loaded = Loaded("mine", model, PLAIN, 10, Weights.of(model, "mine", "here"), presets)
    assert loaded.settings("tent+fata") == {}
    assert loaded.settings("fata") == {}
    assert loaded.settings("cotta") == loaded.settings("memo") == {"mean": HALF, "std": HALF}
    assert loaded.settings("eata") == eata
    assert loaded.settings("eata+fata") == {**eata, "lr": 2e-3, "sigma": 0.5}
    adapted = fata.adapt(model, "eata+fata", **loaded.settings("eata+fata"))
    assert (adapted.method.redundancy, adapted.plus.sigma) == (0.4, 0.5)
    with pytest.raises(ValueError, match="unknown method 'tant'"):
        loaded.settings("tant")


def test_one_line_says_what_was_loaded(untrained):
    line = str(zoo.load("vit_base", protocol="sar"))
    assert "\n" not in line
    for part in ("augreg_in21k_ft_in1k", "1000 classes", "224 x 224", "bicubic", "0.485", "0.225"):
        assert part in line


def test_importing_it_leaves_the_large_libraries_alone():
    large = "{'timm', 'torchvision', 'transformers', 'huggingface_hub'}"
    script = f"import sys, fata.zoo; assert not {large} & set(sys.modules), sys.modules.keys()"
    subprocess.run([sys.executable, "-c", script], check=True)
