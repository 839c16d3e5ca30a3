"""The recipe behind `bitempered bench`: the cases to measure on a CPU and on a GPU."""

from dataclasses import replace
from pathlib import Path

from bitempered.experiments import bench_report
from bitempered.experiments.bench import Case, Suite
from bitempered.experiments.files import read_rows
from bitempered.experiments.report import Pages

__all__ = ["SUITES", "quick", "render"]

CLASSES = (10, 100, 1000, 10_000, 32_000, 100_000, 256_000)
CPU = (
    *(Case(*shape) for shape in ((128, 10), (128, 1000), (1024, 1000), (256, 32000))),
    Case(300, 1200),
    Case(512, 1000, "bfloat16"),
    Case(512, 1000, "float64"),
    Case(2 * 256 * 256, 19, kind="segmentation"),
    Case(512, 1000, kind="probabilities"),
    Case(65536, 1, kind="binary"),
    Case(256, 1000, kind="softmax"),
    *(Case(128, classes, sweep="classes") for classes in CLASSES),
    *(Case(4**k, 1000, sweep="rows") for k in range(2, 8)),
)
CUDA = (
    *(Case(*shape, dtype) for shape in ((8192, 32000), (4096, 128256)) for dtype in ("bfloat16", "float32")),
    Case(4096, 1000),
    Case(128, 10),
    *(Case(65536, 1000, dtype) for dtype in ("bfloat16", "float32")),
    Case(1_000_000, 10),
    *(Case(8 * 512 * 1024, 19, dtype, "segmentation") for dtype in ("bfloat16", "float32")),
    Case(4096, 1000, kind="probabilities"),
    Case(4096, 1000, kind="binary"),
    Case(8192, 128256, "bfloat16", "linear", features=4096),
    Case(8192, 32000, kind="softmax"),
    *(Case(4096, classes, sweep="classes") for classes in CLASSES),
    *(Case(4**k // 2, 32000, sweep="rows") for k in range(4, 9)),
)
QUICK = (
    *(Case(*shape) for shape in ((8, 10), (4, 300))),
    Case(300, 16, kind="linear", features=4),
    Case(8, 5, kind="segmentation"),
    Case(6, 4, kind="probabilities"),
    Case(32, 3, kind="binary"),
    Case(4, 16, kind="softmax"),
    *(Case(4, classes, sweep="classes") for classes in (16, 64)),
    *(Case(rows, 16, sweep="rows") for rows in (4, 16)),
)
SUITES = {"cpu": Suite(CPU, least=15, most=2000, seconds=5.0), "cuda": Suite(CUDA, least=25, most=200, seconds=1.0)}


def quick(suite: Suite) -> Suite:
    """Take tiny cases and three turns: this shows that everything except torch.compile runs, not how fast."""
    return replace(suite, cases=QUICK, least=3, most=3, compiled=False)


def render(path: Path) -> Pages:
    """Render the page and the figure of a file of rows again."""
    return bench_report.pages(read_rows(path), path.stem)
