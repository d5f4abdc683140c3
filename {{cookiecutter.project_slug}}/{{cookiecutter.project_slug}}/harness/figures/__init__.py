"""Pictures for people. matplotlib is imported when something is drawn, never before."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from .. import files


def canvas(columns: int, rows: int, width: float = 2.6, height: float = 2.2) -> tuple[Any, Any]:
    """A figure and its axes `(rows, columns)`; drawn without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (columns * width, rows * height)
    return pyplot.subplots(rows, columns, figsize=size, squeeze=False)


def save(figure: Any, path: Path) -> None:
    """Atomic PNG, the same bytes for the same picture, and the figure closed."""
    from matplotlib import pyplot

    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=90, metadata={"Software": None})
    pyplot.close(figure)
    files.write_bytes(path, buffer.getvalue())
