"""The corruptions: independent of the batch, and like those that made ImageNet-C."""

from contextlib import contextmanager
from functools import cache

import imagecorruptions
import numpy as np
import pytest
import skimage
import torch
from PIL import Image

import fata
from fata.corruptions import BY_NAME, EXTRA, NAMES, digital, filters, weather
from fata.corruptions.constants import CONSTANTS, constants
from fata.corruptions.rng import ImageRng
from reference_corruptions import reference_corrupt

DETERMINISTIC = (
    "defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression",
    "gaussian_blur", "saturate",
)  # fmt: skip


SIDES = [32, pytest.param(224, marks=pytest.mark.slow)]


@cache
def pictures(side):
    """Four of scikit-image's, so many pixels a side, as bytes."""
    given = (getattr(skimage.data, name)() for name in ("astronaut", "cat", "coffee", "rocket"))
    sized = (Image.fromarray(picture).resize((side, side), Image.BICUBIC) for picture in given)
    return np.stack([np.array(picture) for picture in sized])


@pytest.fixture
def photographs():
    return pictures(224)


def tensor(pixels):
    return torch.from_numpy(np.ascontiguousarray(pixels)).permute(0, 3, 1, 2).float() / 255


def reference(photographs, name, severity):
    np.random.seed(0)
    return tensor(reference_corrupt(photographs, name, severity, photographs.shape[1]))


def as_bytes(images):
    """What a file would hold: the reference cuts off, it does not round."""
    return (images * 255).floor() / 255


def psnr(one, two):
    return -10 * torch.log10((one - two).square().mean()).item()


def test_all_nineteen_are_here():
    assert len(NAMES) == 15
    assert EXTRA == ("speckle_noise", "gaussian_blur", "spatter", "saturate")
    assert set(CONSTANTS) == set(BY_NAME) == {*NAMES, *EXTRA}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(BY_NAME) - {"elastic_transform", "frost", "snow"}))
def test_the_reference_is_the_package(photographs, name):
    """But for what docs/lab/corruptions.md says it does otherwise than the published scripts."""
    for severity in (1, 5):
        np.random.seed(0)
        more = (
            {"seed": np.random.randint(1 << 31)} if name in ("glass_blur", "impulse_noise") else {}
        )
        package = imagecorruptions.corrupt(photographs[0], severity, name, **more)
        assert torch.equal(reference(photographs[:1], name, severity), tensor(np.stack([package])))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_deterministic_ones_are_the_references(name, side):
    photographs = pictures(side)
    for severity in range(1, 6):
        ours = as_bytes(fata.corrupt(tensor(photographs), name, severity))
        assert psnr(ours, reference(photographs, name, severity)) >= 40, severity


def spectrum(difference):
    """Power by frequency in eight rings, as shares."""
    power = torch.fft.fft2(difference.mean(1)).abs().square().mean(0)
    frequency = torch.fft.fftfreq(difference.shape[-1])
    ring = (16 * (frequency[:, None].square() + frequency.square()).sqrt()).long().clamp(max=7)
    rings = torch.zeros(8).scatter_add_(0, ring.flatten(), power.flatten())
    return rings / rings.sum()


RANDOM = {  # tolerances: of the mean, of the deviation of the change, of its spectrum; draws
    "gaussian_noise": (0.003, 0.01, 0.02, 3),
    "shot_noise": (0.003, 0.02, 0.02, 3),
    "impulse_noise": (0.003, 0.02, 0.02, 3),
    "speckle_noise": (0.003, 0.01, 0.02, 3),
    "glass_blur": (0.003, 0.05, 0.05, 3),
    "motion_blur": (0.02, 0.1, 0.1, 3),
    "snow": (0.02, 0.06, 0.06, 3),
    "fog": (0.06, 0.25, 0.15, 3),
    "elastic_transform": (0.005, 0.08, 0.06, 4),
    "spatter": (0.003, 0.08, 0.05, 3),
}


def assert_alike(ours, theirs, mean, deviation, rings):
    assert abs(ours.mean() - theirs.mean()) <= mean + 0.002  # files cut off, ours do not
    assert ours.std() / theirs.std() == pytest.approx(1, abs=deviation)
    assert (spectrum(ours) - spectrum(theirs)).abs().max() <= rings


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", RANDOM)
def test_random_ones_change_images_as_the_reference_does(name, side):
    *tolerances, repeats = RANDOM[name]
    photographs = np.concatenate([pictures(side)] * (repeats if side == 224 else 30))
    images = tensor(photographs)
    for severity in range(1, 6):
        ours = fata.corrupt(images, name, severity) - images
        theirs = reference(photographs, name, severity) - images
        assert_alike(ours, theirs, *tolerances)


@pytest.mark.parametrize("side", SIDES)
def test_frost_changes_images_as_the_reference_does(monkeypatch, side):
    """Each image as often: which one is laid over an image decides most."""
    photographs = np.concatenate([pictures(side)] * 4)
    images = tensor(photographs)
    folder, randint = weather._frost_folder(), np.random.randint
    laid = weather.frost_textures(folder, side, side, "cpu")
    for severity in range(1, 6):
        ours, theirs = [], []
        for k, picture in enumerate(laid):
            with monkeypatch.context() as patch:
                patch.setattr(weather, "frost_textures", lambda *size, p=picture: [p])
                patch.setattr(
                    np.random, "randint", lambda *ends, k=k: randint(*ends) if ends[1:] else k
                )
                ours.append(fata.corrupt(images, "frost", severity) - images)
                theirs.append(reference(photographs, "frost", severity) - images)
        assert_alike(torch.cat(ours), torch.cat(theirs), 0.01, 0.05, 0.02)


@pytest.mark.parametrize("side", SIDES)
def test_spatter_of_the_same_noise_is_the_references(monkeypatch, side):
    photographs = pictures(side)
    noise = torch.randn(side, side, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(ImageRng, "normal", lambda self, *shape: noise.expand(1, 1, -1, -1))
    monkeypatch.setattr(np.random, "normal", lambda size, loc, scale: loc + scale * noise.numpy())
    for severity in range(1, 6):
        ours = as_bytes(fata.corrupt(tensor(photographs), "spatter", severity))
        assert psnr(ours, reference(photographs, "spatter", severity)) >= 40, severity


@pytest.mark.parametrize("name", BY_NAME)
def test_an_image_does_not_see_its_batch(name):
    images = torch.rand(5, 3, 40, 40, generator=torch.Generator().manual_seed(0))
    whole = fata.corrupt(images, name, 4, seed=3, ids=range(10, 15))
    alone = torch.cat(
        [fata.corrupt(images[i : i + 1], name, 4, seed=3, ids=[10 + i]) for i in range(5)]
    )
    order = [3, 0, 4]
    some = fata.corrupt(images[order], name, 4, seed=3, ids=[10 + i for i in order])
    torch.testing.assert_close(alone, whole, atol=1e-5, rtol=0)
    torch.testing.assert_close(some, whole[order], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("size", [(32, 32), (64, 64), (48, 100)])
def test_any_size(name, size):
    images = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(0))
    for severity in (1, 5):
        corrupted = fata.corrupt(images, name, severity)
        assert corrupted.shape == images.shape
        assert corrupted.dtype == torch.float32
        assert 0 <= corrupted.min() <= corrupted.max() <= 1
        assert not torch.equal(corrupted, images)


@pytest.mark.parametrize("name", sorted(set(BY_NAME) - set(DETERMINISTIC)))
def test_seeds_ids_and_severities_draw_apart(name):
    images = torch.full((2, 3, 64, 64), 0.5) + 0.2 * torch.linspace(-1, 1, 64)
    one = fata.corrupt(images, name, 5)
    assert not torch.equal(one[0], one[1])
    assert not torch.equal(one, fata.corrupt(images, name, 5, seed=1))
    assert torch.equal(one, fata.corrupt(images, name, 5))


def test_a_generator_gives_the_seed():
    images = torch.full((1, 3, 32, 32), 0.5)
    one, two = (
        fata.corrupt(images, "gaussian_noise", 3, generator=torch.Generator().manual_seed(0))
        for _ in range(2)
    )
    generator = torch.Generator().manual_seed(0)
    again = [fata.corrupt(images, "gaussian_noise", 3, generator=generator) for _ in range(2)]
    assert torch.equal(one, two)
    assert torch.equal(again[0], one)
    assert not torch.equal(again[1], one)


def test_constants_by_the_nearest_published_size():
    assert constants("gaussian_noise", 5, 224) == constants("gaussian_noise", 5, 384) == 0.38
    assert constants("gaussian_noise", 5, 96) == 0.18
    assert constants("gaussian_noise", 5, 28) == 0.10


def test_jpeg_off_the_cpu_is_the_files_loss(photographs):
    """The arithmetic for other devices against libjpeg, at odd sizes too."""
    for images in (tensor(photographs), tensor(photographs[:, :101, :77])):
        for quality in (7, 25, 85):
            assert psnr(digital._jpeg(images, quality), digital.jpeg(images, quality)) > 40


def test_the_released_files_jpeg_round_trip(photographs):
    images = tensor(photographs)
    plain = fata.corrupt(images, "contrast", 3)
    stored = fata.corrupt(images, "contrast", 3, jpeg=True)
    assert torch.equal(stored, digital.jpeg(plain, 85))
    assert 30 < psnr(plain, stored) < 60


@contextmanager
def without_the_package():
    """As if the images of frost were not installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weather, "find_spec", lambda name: None)
        patch.setattr(weather, "_frost_folder", weather._frost_folder.__wrapped__)
        yield


def test_frost_says_where_its_images_are_from():
    assert weather.frost_source() == "imagecorruptions-imaug"
    with without_the_package():
        assert weather.frost_source() == "procedural"
    assert weather.frost_source() == "imagecorruptions-imaug"


@pytest.mark.parametrize("side", [*SIDES, 64])
def test_procedural_frost_is_as_strong_as_the_images(side):
    images = tensor(pictures(side)).repeat(20, 1, 1, 1)
    laid = [fata.corrupt(images, "frost", severity) for severity in range(1, 6)]
    with without_the_package():
        grown = [fata.corrupt(images, "frost", severity) for severity in range(1, 6)]
    for one, two in zip(grown, laid, strict=True):
        assert not torch.equal(one, two)
        assert abs(one.mean() - two.mean()) < 0.02
        assert (one - images).std() / (two - images).std() == pytest.approx(1, abs=0.15)
        contrast = [(x.std((2, 3)) / images.std((2, 3))).mean() for x in (one, two)]
        assert abs(contrast[0] - contrast[1]) < 0.04


def test_draws_are_uniform_normal_and_apart():
    rng = ImageRng.of(0, range(4), "test", 1, torch.device("cpu"))
    uniform, normal = rng.uniform(-1, 3, 40_000), rng.normal(40_001)
    assert uniform.min() >= -1
    assert uniform.max() < 3
    assert uniform.mean().item() == pytest.approx(1, abs=0.02)
    assert normal.mean().item() == pytest.approx(0, abs=0.01)
    assert normal.std().item() == pytest.approx(1, abs=0.01)
    assert normal.pow(4).mean().item() == pytest.approx(3, abs=0.1)
    correlation = torch.corrcoef(torch.cat((uniform, normal[:, :40_000])))
    assert (correlation - torch.eye(8)).abs().max() < 0.02
    whole = rng.integer(-2, 2, 10_000)
    assert sorted(whole.unique().tolist()) == [-2, -1, 0, 1]


def test_borders():
    x = torch.arange(4.0).view(1, 1, 1, 4)
    for mode, expected in (
        ("replicate", [0, 0, 0, 1, 2, 3, 3, 3]),
        ("reflect", [2, 1, 0, 1, 2, 3, 2, 1]),
        ("symmetric", [1, 0, 0, 1, 2, 3, 3, 2]),
    ):
        assert filters.pad(x, (0, 2), mode).flatten().tolist() == expected


@pytest.mark.parametrize(
    ("images", "name", "severity", "fields", "message"),
    [
        (torch.zeros(1, 3, 32, 32), "gausian_noise", 1, {}, "Did you mean 'gaussian_noise'"),
        (torch.zeros(1, 3, 32, 32), "fog", 6, {}, "must be 1, 2, 3, 4 or 5"),
        (torch.zeros(1, 3, 32, 32, dtype=torch.uint8), "fog", 1, {}, "bytes are images / 255"),
        (torch.zeros(3, 32, 32), "fog", 1, {}, r"must be \(B, 3, H, W\)"),
        (torch.zeros(1, 3, 8, 32), "fog", 1, {}, "16 pixels at least"),
        (torch.zeros(1, 3, 32, 32), "fog", 1, {"ids": [1, 2]}, "2 ids for 1 images"),
        (np.zeros((1, 3, 32, 32)), "fog", 1, {}, "must be a float32 tensor"),
        (torch.full((1, 3, 32, 32), 255.0), "fog", 1, {}, "found 255 to 255: divide bytes by 255"),
        (torch.full((1, 3, 32, 32), -0.01), "fog", 1, {}, "found -0.01 to -0.01"),
        (torch.full((1, 3, 32, 32), torch.nan), "fog", 1, {}, "found nan"),
    ],
)
def test_wrong_input(images, name, severity, fields, message):
    with pytest.raises((ValueError, TypeError), match=message):
        fata.corrupt(images, name, severity, **fields)


def test_what_rounding_leaves_beside_the_range_is_taken():
    images = torch.tensor([-1e-4, 1 + 1e-4]).repeat(1, 3, 32, 16)
    corrupted = fata.corrupt(images, "contrast", 1)
    assert torch.isfinite(corrupted).all()
    assert len(fata.corrupt(images[:0], "contrast", 1)) == 0
