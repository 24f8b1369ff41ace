"""Classifiers of Hugging Face's transformers, from the hub or from a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from fata._text import listed
from fata.zoo.download import check_hub, downloading
from fata.zoo.loaded import Loaded, Weights, ZooError
from fata.zoo.preprocess import Preprocess


def load(identity: str) -> Loaded:
    """The classifier of a hub's id or of a folder; its output has the logits in `.logits`."""
    name = f"hf:{identity}"
    folder = Path(identity).expanduser()
    local = folder.is_dir()
    where = str(folder) if local else identity
    if not local and identity.startswith((".", "/", "~")):
        raise ZooError(f"{name}: there is no folder {identity!r}.")
    try:
        import transformers
    except ImportError as error:
        raise ZooError(f"{name}: needs transformers; pip install transformers.") from error
    advice = (
        f"Without a network: get all files of the hub's {identity!r} on another machine, and load "
        f"their folder as fata.zoo.load('hf:/path/to/folder')."
    )
    if local:
        advice = "The folder must hold a model and its processor, as save_pretrained writes them."
    with downloading(name, advice):
        if not local:
            check_hub(where, ("config.json",))
        model, report = transformers.AutoModelForImageClassification.from_pretrained(
            where, trust_remote_code=False, output_loading_info=True
        )
        processor = transformers.AutoImageProcessor.from_pretrained(where, trust_remote_code=False)
    if missing := sorted(report["missing_keys"]):
        raise ZooError(
            f"{name} is no trained classifier: its weights lack {listed(missing, 4)}, which would "
            f"be random."
        )
    network: nn.Module = model.float().eval()
    use = _preprocess(name, processor)
    revision = getattr(model.config, "_commit_hash", None)
    origin = f"{where} at {revision}" if revision else where
    weights = Weights.of(network, name, origin)
    return Loaded(name, network, use, model.config.num_labels, weights)


def _preprocess(name: str, processor: Any) -> Preprocess:
    """The preprocessing in a processor's settings, verified on an image: settings vary by model."""
    from PIL import Image

    try:
        use = _read(processor.to_dict())
        across, down = Image.linear_gradient("L").rotate(90), Image.linear_gradient("L")
        gradients = Image.merge("RGB", (across, down, Image.radial_gradient("L"))).resize(
            (640, 448)
        )
        theirs = processor(gradients, return_tensors="pt")["pixel_values"]
        ours = use.normalise(use.pixels(gradients)[None])
        same = theirs.shape == ours.shape and (theirs - ours).abs().mean() < 0.02
    except (KeyError, TypeError, ValueError):
        same = False
    if not same:
        raise ZooError(
            f"{name}: its {type(processor).__name__} does other things than a resize, a centre "
            f"crop and a normalisation, so it cannot be used here."
        )
    return use


def _read(settings: Mapping[str, Any]) -> Preprocess:
    from PIL.Image import Resampling

    size, percent = settings["size"], settings.get("crop_pct")
    resize = size.get("shortest_edge") or size["height"]
    squash = "shortest_edge" not in size
    side = settings["crop_size"]["height"] if settings.get("do_center_crop") else resize
    if percent and resize < 384:  # ConvNeXt: `size` is that of the crop
        resize = int(resize / percent)
    elif percent:
        squash = True
    normalises = settings.get("do_normalize", True)
    mean = tuple(settings["image_mean"]) if normalises else (0.0, 0.0, 0.0)
    std = tuple(settings["image_std"]) if normalises else (1.0, 1.0, 1.0)
    interpolation = Resampling(settings["resample"]).name.lower()
    return Preprocess(resize, side, interpolation, mean, std, squash)
