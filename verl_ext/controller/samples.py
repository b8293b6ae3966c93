"""Questions about images, as the controller and what it controls see them."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from verl_ext.errors import UserError


@dataclass(frozen=True)
class ImageQuestion:
    """One sample.

    Attributes:
        sample_id: names it in every run with this data.
        image: encoded, or the path of a file.
        question: as the model is asked.
        references: right answers, or captions.
    """

    sample_id: str
    image: bytes | Path
    question: str
    references: tuple[str, ...]

    def opened(self) -> Image.Image:
        """The image in RGB.

        Raises:
            UserError: it cannot be read.
        """
        try:
            source: Any = io.BytesIO(self.image) if isinstance(self.image, bytes) else self.image
            with Image.open(source) as image:
                return image.convert("RGB")
        except (OSError, UnidentifiedImageError, ValueError, Image.DecompressionBombError) as error:
            raise UserError(f"the image of {self.sample_id} cannot be read: {error}") from error
