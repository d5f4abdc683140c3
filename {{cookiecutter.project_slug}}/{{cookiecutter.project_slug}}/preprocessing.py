"""YOURS: raw record -> tensor. The one module that training and serving both import.

Fixed order of operations, float32, constants fitted once on the training rows in float64. The state
is JSON. `augment` belongs to training alone and is never called by `Preprocessing`.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

SCHEMA = 1
RESIZE = "pillow-bilinear"  # named in the state: another resize gives other pixels


def decode(data: bytes) -> np.ndarray:
    """Bytes of an image file -> `(H, W)` or `(H, W, 3)`, decoded fully and turned upright (EXIF).

    uint8; deeper grey (16 bits, floats) stays as it is stored. Transparency is laid over white.
    Raises ValueError if the bytes are not a whole image.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        image.load()  # only a full decode sees a truncated file
        return np.asarray(_plain(image))
    except Exception as error:  # damaged bytes raise nearly anything in the decoders below Pillow
        unknown = isinstance(error, UnidentifiedImageError)  # its text holds a memory address
        why = "of no format that Pillow knows" if unknown else error
        raise ValueError(f"not a readable image: {why}") from error


def _plain(image):
    """A Pillow image of any mode -> grey, RGB, or deep grey."""
    from PIL import Image

    if image.mode.startswith(("I", "F")):
        return image
    kind = "L" if image.mode in ("1", "L", "LA", "La") else "RGB"
    if image.has_transparency_data:  # what lies below it is arbitrary, often black
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert(kind)


class Preprocessing:
    """`preprocessing(raw)` -> float32 `(C, H, W)`, normalised per channel."""

    def __init__(self, state: dict):
        if state.get("schema") != SCHEMA or state.get("resize") not in (None, RESIZE):
            raise ValueError(
                f"preprocessing state has schema {state.get('schema')!r} and resize "
                f"{state.get('resize')!r}; this code reads {SCHEMA} and {RESIZE!r}. "
                "Run: python run.py stage=data_audit"
            )
        self.state = state
        self.size = tuple(state["size"])
        self.channels = state["channels"]
        self.mean, self.std = state["mean"], state["std"]
        self._mean = np.asarray(self.mean, dtype=np.float32)
        self._std = np.asarray(self.std, dtype=np.float32)

    @classmethod
    def fit(cls, raws: list[np.ndarray], options: dict) -> Preprocessing:
        """Constants from the training rows only, in float64.

        `options.size` [H, W] resizes every image; without it all must have one size (ValueError).
        `options.value_range` [low, high] is what values may be, in training and when serving.
        """
        asked = _asked_size(options.get("size"))
        size = asked or _common_size(raws)
        channels = options.get("channels") or (3 if any(_depth(r) == 3 for r in raws) else 1)
        if channels not in (1, 3):
            raise ValueError(f"data.options.channels={channels} is neither 1 (grey) nor 3 (RGB).")
        shaped = [_shape(raw, tuple(size), channels) for raw in raws]
        count = len(shaped) * math.prod(size)
        mean = sum(image.sum(axis=(0, 1), dtype=np.float64) for image in shaped) / count
        square = sum(((image - mean) ** 2).sum(axis=(0, 1)) for image in shaped) / count
        std = np.sqrt(square)
        constant = np.flatnonzero(std <= 1e-9 * np.abs(mean))
        if len(constant):
            raise ValueError(
                f"channel {constant[0]} of {channels} has one value in all training images: there "
                "is nothing to learn from it. For grey in colour files: data.options.channels=1"
            )
        return cls(
            {
                "schema": SCHEMA,
                "resize": RESIZE if asked else None,
                "size": list(size),
                "channels": channels,
                "value_range": options.get("value_range"),
                "mean": mean.tolist(),
                "std": std.tolist(),
            }
        )

    def __call__(self, raw: np.ndarray) -> torch.Tensor:
        """Raises ValueError for what is no image of numbers, and for another size than fitted
        unless the project resizes its images."""
        if self.state["resize"] is None and np.shape(raw)[:2] != self.size:
            height, width = self.size
            raise ValueError(
                f"an image of shape {np.shape(raw)} among images of {height}x{width} (height x "
                f"width). To resize all: data.options.size=[{height},{width}]"
            )
        image = _shape(raw, self.size, self.channels).astype(np.float32)
        refuse_range(raw, self.state["value_range"])
        image = (image - self._mean) / self._std
        return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))

    def inverse(self, x: torch.Tensor) -> np.ndarray:
        """`(C, H, W)` -> `(H, W, C)` in raw units, for pictures."""
        return x.cpu().float().numpy().transpose(1, 2, 0) * self._std + self._mean

    @property
    def input_shape(self) -> tuple[int, int, int]:
        return (self.channels, *self.size)

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.state, sort_keys=True).encode()).hexdigest()

    def dumps(self) -> str:
        """The whole state as JSON; floats keep every bit."""
        return json.dumps(self.state, indent=2) + "\n"

    @classmethod
    def load(cls, path: Path) -> Preprocessing:
        return cls(json.loads(Path(path).read_text(encoding="utf-8")))


def refuse_range(raw: np.ndarray, value_range: list[float] | None) -> None:
    """ValueError for values that the data declares impossible: most often, another scale."""
    low, high = value_range or (-math.inf, math.inf)
    if raw.size and not (low <= raw.min() and raw.max() <= high):
        raise ValueError(
            f"values from {raw.min():g} to {raw.max():g}, but data.value_range is "
            f"[{low:g}, {high:g}]"
        )


def _depth(raw: np.ndarray) -> int:
    return 1 if raw.ndim == 2 else raw.shape[2]


def _asked_size(size) -> tuple[int, int] | None:
    if size is None:
        return None
    pair = isinstance(size, (list, tuple)) and len(size) == 2
    if pair and all(type(side) is int and side > 0 for side in size):
        return tuple(size)
    raise ValueError(f"data.options.size={size} is not [height,width] in pixels.")


def _common_size(raws: list[np.ndarray]) -> tuple[int, int]:
    sizes = Counter(raw.shape[:2] for raw in raws)
    if len(sizes) > 1:
        seen = ", ".join(f"{h}x{w} ({n} images)" for (h, w), n in sizes.most_common(4))
        raise ValueError(
            f"the images have {len(sizes)} sizes (height x width): {seen}. "
            "Name one to resize them to: data.options.size=[H,W]"
        )
    return next(iter(sizes))


def _shape(raw: np.ndarray, size: tuple[int, int], channels: int) -> np.ndarray:
    """`(H, W, channels)` of the asked size; grey is repeated, colour is averaged by luminance."""
    if not isinstance(raw, np.ndarray) or raw.ndim not in (2, 3) or _depth(raw) not in (1, 3):
        shape = getattr(raw, "shape", type(raw).__name__)
        raise ValueError(f"an image is (H, W) or (H, W, 3), not {shape}.")
    if raw.dtype.kind not in "uif" or not np.isfinite(raw).all():
        raise ValueError(f"an image holds finite numbers, not {raw.dtype} with gaps.")
    if raw.shape[:2] != size:
        raw = _resize(raw, size)
    image = raw[..., None] if raw.ndim == 2 else raw
    if image.shape[2] == channels:
        return image
    if channels == 3:
        return np.repeat(image, 3, axis=2)
    return image.astype(np.float32) @ np.float32([[0.299], [0.587], [0.114]])


def _resize(raw: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    from PIL import Image

    if raw.dtype != np.uint8:
        raise ValueError(
            f"an image of {raw.shape[:2]} {raw.dtype} is not {size}, and only uint8 is resized: "
            "bring it to 8 bits in data.read, or to one size."
        )
    image = raw[..., 0] if _depth(raw) == 1 and raw.ndim == 3 else raw
    image = Image.fromarray(image).resize(size[::-1], Image.Resampling.BILINEAR)
    return np.asarray(image)


def augment(x: torch.Tensor, options: dict, generator: torch.Generator) -> torch.Tensor:
    """A randomly moved copy of each image of the batch `(B, C, H, W)`; labels stay true.

    Options: max_shift_px, max_rotation_deg, max_scale (0.1 = 90 % to 110 %), flip (mirror half).
    Mirror only where a mirrored thing keeps its label: a mirrored 2 is no 2.
    """
    batch, _, height, width = x.shape
    draw = torch.rand((5, batch), generator=generator, device=x.device) * 2 - 1
    angle = draw[0] * math.radians(options.get("max_rotation_deg", 0.0))
    scale = 1 + draw[1] * options.get("max_scale", 0.0)
    shift = options.get("max_shift_px", 0.0)
    mirror = 1 - 2 * ((draw[4] > 0) & bool(options.get("flip", False))).float()
    cos, sin = scale * angle.cos(), scale * angle.sin()
    aspect = height / width  # a rotation in pixels, although grid units are relative to the sides
    top = torch.stack([cos * mirror, -sin * aspect, draw[2] * shift * 2 / width], dim=1)
    low = torch.stack([sin * mirror / aspect, cos, draw[3] * shift * 2 / height], dim=1)
    grid = F.affine_grid(torch.stack([top, low], dim=1), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid.to(x.dtype), padding_mode="border", align_corners=False)
