"""What building the package adds to Hatchling: a front page whose links work anywhere, and a wheel with the C kernels.

A wheel is pure Python unless BITEMPERED_WHEEL_KERNEL=1 is in the environment. Then a C compiler makes the libraries for
every instruction set, and the wheel is for Linux on x86-64. `make dist` builds both.
"""

import os
import platform
import re
import runpy
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[((?:[^\]\[]|\[[^\]]*\])*)\]\((?!https?:|#)([^)\s]+)\)")
# -march: the least x86-64 that there is, whatever this compiler takes for granted. -s: no symbols that nothing needs.
PORTABLE = ["-march=x86-64", "-s"]
GLIBC = (2, 17)  # the oldest that the wheel promises to run on


class FrontPage(MetadataHookInterface):
    """The README of the package, where links into the repository begin with the repository's address."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(text, metadata["urls"]["Repository"])}


def absolute(text: str, repository: str) -> str:
    """Replace links into a repository by links to it; pictures need the file itself.

    >>> absolute("[a](docs/a.md#b) ![c](c.png) [d](https://d)", "https://x")
    '[a](https://x/blob/main/docs/a.md#b) ![c](https://x/raw/main/c.png) [d](https://d)'
    """

    def link(found: re.Match[str]) -> str:
        folder = "raw" if found[1] else "blob"
        return f"{found[1]}[{found[2]}]({repository}/{folder}/main/{found[3]})"

    return LINK.sub(link, text)


class KernelWheel(BuildHookInterface):
    """The libraries of the C kernels in a wheel, and its tag."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or os.environ.get("BITEMPERED_WHEEL_KERNEL", "0") != "1":
            return
        if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
            raise SystemExit("BITEMPERED_WHEEL_KERNEL=1 needs Linux on x86-64")
        self.folder = tempfile.TemporaryDirectory()
        build_data["force_include"] |= {
            path: f"bitempered/kernels/shipped/{Path(path).name}"
            for path in compile_all(Path(self.root), Path(self.folder.name))
        }
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_{GLIBC[0]}_{GLIBC[1]}_x86_64"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()


def compile_all(root: Path, folder: Path) -> list[str]:
    """Compile the kernels for every instruction set that torch tells apart, into a folder."""
    sources = runpy.run_path(str(root / "src" / "bitempered" / "kernels" / "sources.py"))
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    made = []
    for capability in ("DEFAULT", *sources["VECTORS"]):
        path = folder / sources["shipped_name"](capability)
        flags = [*sources["FLAGS"], *PORTABLE, *sources["VECTORS"].get(capability, [])]
        subprocess.run([*compiler, *flags, str(sources["SOURCES"][0]), "-o", str(path)], check=True)
        needed = glibc_needed(path.read_bytes())
        if needed > GLIBC:
            raise SystemExit(f"{path.name} needs glibc {needed[0]}.{needed[1]}, the wheel's tag says {GLIBC}")
        made.append(str(path))
    return made


def glibc_needed(library: bytes) -> tuple[int, int]:
    """Return the newest version of glibc that a library names."""
    found = re.findall(rb"GLIBC_(\d+)\.(\d+)", library)
    return max((int(major), int(minor)) for major, minor in found)
