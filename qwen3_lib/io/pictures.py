"""Pictures in files and in data: URLs."""
from __future__ import annotations

import base64
import io
import math
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from qwen3_vision import rgb, smart_resize
from tokenizer_utils import InputError, brief, library_errors

PICTURE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # other ones of Pillow start programs, or write to stderr
MOST_PIXELS = 2**26  # of a picture before it is decoded: 8192 x 8192, 200 MB
URL_BYTES, URL_PIXELS = 2**23, 2**24  # most of a picture in a data: URL: as photos of phones have
MOST_READS = 2**16  # of a picture's bytes: a photo takes a hundred


class PictureFile(io.BytesIO):
    """The bytes of a file, which may be read MOST_READS times: 600,000 empty parts would take Pillow seconds."""
    n_reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.n_reads += 1
        if self.n_reads > MOST_READS:
            raise InputError("the file has too many parts")
        return super().read(size)


def picture_of(source: Any, most_pixels: int = MOST_PIXELS, decoded: bool = True) -> Any:
    """A PIL image in RGB, upright and on white, of a file's path, its bytes, a PIL image or an array.

    With decoded=False as it is opened: format and size are checked, pixels aren't read.

    An array is uint8 [height, width], [height, width, 3] or [height, width, 4]. Of an animation, the first frame.
    Raises InputError for anything that can't be read so.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise InputError("pictures need Pillow: pip install pillow") from error
    where = brief(source) if isinstance(source, str | Path) else "a picture"
    if isinstance(source, str | Path) and not os.path.isfile(source):
        raise InputError(f"{where or repr('')}: {'is a folder' if os.path.isdir(source) else 'no such file'}"
                         + "; download it first" * where.startswith("http"))
    if not (isinstance(source, str | Path | bytes | np.ndarray | Image.Image) or hasattr(source, "read")):
        raise InputError(f"a picture must be a path, bytes, a PIL image or an array, not {brief(repr(source), 80)}")
    if isinstance(source, np.ndarray) and source.dtype != np.uint8:
        raise InputError(f"a picture's array must be uint8, not {source.dtype}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of damaged files
        with library_errors(f"{where}: cannot be read"):
            try:
                image = source if isinstance(source, Image.Image) else \
                    Image.fromarray(source) if isinstance(source, np.ndarray) else \
                    Image.open(PictureFile(source) if isinstance(source, bytes) else source, formats=PICTURE_FORMATS)
            except UnidentifiedImageError:
                image = None
        if image is None:
            raise InputError(f"{where}: cannot be read: none of the formats {', '.join(PICTURE_FORMATS)}")
        if not 0 < image.width * image.height <= most_pixels:
            raise InputError(f"{where}: {image.width} x {image.height} pixels; 1 to {most_pixels:,} can be read")
        with library_errors(f"{where}: cannot be read"):
            smart_resize(image.height, image.width, 1, 0, math.inf)  # raises InputError if it is too narrow
        return rgb(image, where) if decoded else image


def is_data_url(source: Any) -> bool:
    return isinstance(source, str) and source.startswith("data:")


def picture_at(url: Any) -> Any:
    """The picture in a data: URL, as picture_of gives it. Raises InputError: addresses and files are not opened."""
    head, comma, data = url.partition(",") if is_data_url(url) else ("", "", "")
    if not head.endswith(";base64") or not comma:
        raise InputError("a picture must come as a data: URL, data:image/png;base64,...; addresses and files are not "
                         f"opened: {brief(repr(url), 80)}")
    if len(data) // 4 * 3 > URL_BYTES:
        raise InputError(f"a picture of more than {URL_BYTES:,} bytes")
    try:
        source = base64.b64decode(data, validate=True)
    except ValueError as error:
        raise InputError(f"the data: URL of a picture is not base64: {error}") from error
    return picture_of(source, URL_PIXELS)
