"""The reference's corruptions under our constants, for sizes the package has none of.

The package `imagecorruptions-imaug` writes the constants of 224 pixels into its functions; here
they run with those of another size in their place, and where the package departs from the scripts
that made the released files (docs/lab/corruptions.md), as those scripts did.
"""

import inspect
import re

import cv2
import numpy as np
from imagecorruptions import corruptions
from PIL import Image
from scipy.ndimage import gaussian_filter, map_coordinates

from fata.corruptions.constants import constants


def reference_corrupt(images, name, severity, size_constants):
    """Corrupt bytes (B, H, W, 3), with the constants of 224, 64 or 32 pixels.

    ImageRng are numpy's global ones: call `np.random.seed` before.
    """
    settings = constants(name, severity, size_constants)
    if name == "elastic_transform":
        corrupted = [elastic_transform(image, *settings) for image in images]
    else:
        function = _with_constants(name, settings, size_constants)
        seeded = "seed" in inspect.signature(function).parameters  # apart from the global generator
        corrupted = [
            function(
                Image.fromarray(image),
                severity,
                **({"seed": np.random.randint(1 << 31)} if seeded else {}),
            )
            for image in images
        ]
    return np.stack([np.uint8(image) for image in corrupted])


def _with_constants(name, settings, size):
    """The package's function, its table replaced by the constants of one severity."""
    source = inspect.getsource(getattr(corruptions, name))
    if name == "zoom_blur":
        settings = np.arange(1, *settings)
    source = _replaced(source, r"\bc = \[.*?\]\[\s*severity - 1\]", "c = CONSTANTS")
    if name == "frost" and size < 224:  # pictures are shrunk to the size of the images
        source = _replaced(source, r"\*= 1\.1", f"*= {0.2 if size == 32 else 0.3}")
        source = _replaced(source, "INTER_CUBIC", "INTER_LINEAR")
    if name == "frost":  # five of the six
        source = _replaced(source, r"randint\(6\)", "randint(5)")
    namespace = {**vars(corruptions), "CONSTANTS": settings, "clipped_zoom": _zoomed}
    exec(source, namespace)
    return namespace[name]


def _zoomed(image, factor):
    """The package's enlargement, cut in the middle rather than at the upper left."""
    large = corruptions.clipped_zoom(image, factor)
    top, left = ((a - b) // 2 for a, b in zip(large.shape[:2], image.shape[:2], strict=True))
    return large[top : top + image.shape[0], left : left + image.shape[1]]


def _replaced(source, pattern, by):
    source, count = re.subn(pattern, by, source, flags=re.DOTALL)
    assert count == 1, pattern
    return source


def elastic_transform(image, alpha, sigma, jitter):
    """An affine map of three points of a square, then a blurred field."""
    image = image / np.float32(255)
    height, width = image.shape[:2]
    middle, reach = np.float32([height // 2, width // 2]), min(height, width) // 3
    before = middle + reach * np.float32([[1, 1], [1, -1], [-1, -1]])
    after = before + np.random.uniform(-jitter, jitter, (3, 2)).astype(np.float32)
    affine = cv2.getAffineTransform(before, after)
    image = cv2.warpAffine(image, affine, (width, height), borderMode=cv2.BORDER_REFLECT_101)
    dy, dx = (
        alpha * gaussian_filter(noise, sigma, mode="reflect", truncate=3)
        for noise in np.random.uniform(-1, 1, (2, height, width))
    )
    y, x = np.mgrid[:height, :width]
    planes = [
        map_coordinates(image[..., c], (y + dy, x + dx), order=1, mode="reflect") for c in range(3)
    ]
    return 255 * np.clip(np.stack(planes, 2), 0, 1)
