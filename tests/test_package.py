"""The package as it is published: metadata, what errors say to install, workflows, and wheels."""

import logging
import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
import torch
import yaml

from bitempered import __version__, extras, kernels
from bitempered.kernels import cpu, library, sources
from bitempered.torch import bi_tempered_logistic_loss

tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")  # the latter is Hatchling's

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BUILD = runpy.run_path(str(ROOT / "hatch_build.py"))
LOGITS, TARGET = torch.tensor([[0.3, -0.2, 0.1], [2.0, 1.0, -3.0]]), torch.tensor([0, 2])


def requirements(extra):
    """What an extra of pyproject.toml needs, with what the extras that it names need."""
    for requirement in PROJECT["optional-dependencies"][extra]:
        inner = re.fullmatch(r"bitempered\[(.*)\]", requirement)
        if inner:
            for name in inner[1].split(","):
                yield from requirements(name)
        else:
            yield requirement


@pytest.mark.parametrize("extra", extras.EXTRAS)
def test_errors_name_what_the_extra_installs(extra):
    assert list(dict.fromkeys(requirements(extra))) == list(extras.EXTRAS[extra])


def test_no_error_names_a_release():
    """Before there is one, pip would not find it."""
    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]:
        assert not re.findall(r"pip install \S*bitempered", path.read_text(encoding="utf-8")), path


def test_the_address_is_the_same_everywhere():
    address = PROJECT["urls"]["Repository"]
    assert all(url.startswith(address) for url in PROJECT["urls"].values())
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["repository-code"] == address
    assert citation["authors"] == PROJECT["authors"] == [{"name": "bitempered contributors"}]
    assert citation["license"] == PROJECT["license"]
    for url in PROJECT["urls"].values():
        if "/blob/main/" in url:
            assert (ROOT / url.split("/blob/main/")[1]).is_file(), url


def test_the_version_is_written_once():
    """In __init__.py, from where the build takes it."""
    files = [
        path for pattern in ("*.toml", "*.cff", "Makefile", "README.md", "mkdocs.yml") for path in ROOT.glob(pattern)
    ]
    assert len(files) >= 5
    for path in [*files, *(ROOT / "src").rglob("*.py"), *(ROOT / "docs").glob("*.md")]:
        if path != ROOT / "src/bitempered/__init__.py":
            found = re.findall(rf"\b{re.escape(__version__)}\b(?!\.\d)", path.read_text(encoding="utf-8"))
            assert not found, path


def test_links_of_the_published_front_page_are_whole():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    address = PROJECT["urls"]["Repository"]
    published = BUILD["absolute"](text, address)
    relative = [link for link in re.findall(r"\]\(([^)\s]+)\)", published) if not re.match(r"https?://|#", link)]
    assert not relative
    inside = re.findall(rf"\]\({address}/(blob|raw)/main/([^)#\s]+)", published)
    assert inside
    for kind, path in inside:
        assert (ROOT / path).is_file(), path
        assert kind == "blob" or path.endswith(".png"), path


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_workflows_call_what_exists(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow[True]  # YAML reads the key `on` so
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set()
    for name, job in workflow["jobs"].items():
        assert job["runs-on"], name
        assert set(job.get("needs", "").split()) <= set(workflow["jobs"])
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), step
            assert re.fullmatch(r"[\w-]+/[\w-]+@[\w/.]+", step.get("uses", "a/b@v1"))
            targets |= set(re.findall(r"\bmake ([\w-]+)", step.get("run", "")))
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_workflows_run_all_of_the_check():
    said = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (wanted,) = re.findall(r"^make (.*)", said, re.MULTILINE)
    workflows = "".join(path.read_text(encoding="utf-8") for path in (ROOT / ".github" / "workflows").glob("*.yml"))
    assert set(wanted.split()) <= set(re.findall(r"\bmake ([\w-]+)", workflows))


def test_chosen_is_what_computes(monkeypatch):
    computed = []
    original = cpu.loss
    monkeypatch.setattr(cpu, "loss", lambda *a: computed.append("cpu") or original(*a))
    for logits in (LOGITS, LOGITS.clone().requires_grad_()):
        computed.clear()
        bi_tempered_logistic_loss(logits, TARGET, 0.8, 1.2)
        assert kernels.chosen(logits, TARGET) == (computed or ["core"])[0]
    with kernels.use("core"):
        assert kernels.chosen(LOGITS, TARGET) == kernels.chosen(LOGITS) == kernels.chosen(LOGITS, binary=True) == "core"
    assert kernels.chosen(LOGITS, torch.ones(2, 3).requires_grad_(), binary=True) == "core"
    assert kernels.chosen(LOGITS.to("meta"), TARGET.to("meta")) == "core"
    with kernels.use("triton"), pytest.raises(RuntimeError, match="needs logits on a CUDA device"):
        kernels.chosen(LOGITS, TARGET)


@pytest.fixture
def warned(caplog):
    kernels._warn.cache_clear()
    yield lambda: [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    kernels._warn.cache_clear()


class Elsewhere:
    """A tensor on another device, of which we only have what the choice asks for."""

    is_cpu = False
    requires_grad = False
    shape, dtype = (2, 3), torch.float32

    def __init__(self, device):
        self.device, self.is_cuda = torch.device(device), device == "cuda"

    def is_floating_point(self):
        return True


def test_a_device_without_a_kernel_is_said_once(warned):
    for _ in range(3):
        assert kernels.chosen(Elsewhere("mps"), Elsewhere("mps")) == "core"
    assert warned() == ["plain PyTorch, which is slower, computes the loss: there is no kernel for mps devices"]
    kernels.chosen(LOGITS.to("meta"))
    assert len(warned()) == 1


def test_a_gpu_without_triton_is_said_once(warned, monkeypatch):
    monkeypatch.setattr(kernels, "_HAS_TRITON", False)
    for _ in range(3):
        assert kernels.chosen(Elsewhere("cuda"), Elsewhere("cuda")) == "core"
    (said,) = warned()
    assert said.endswith("the kernel for CUDA devices needs Triton: pip install triton")


@pytest.fixture
def no_library():
    cpu.library.cache_clear()
    yield
    cpu.library.cache_clear()


def compiled(monkeypatch, folder):
    """The libraries of a wheel, in a folder, where they are looked for."""
    if shutil.which(cpu.compiler()[0]) is None:  # .ci/run installs one
        pytest.skip("there is no C compiler here")
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        pytest.skip("the wheel with the kernel is for Linux on x86-64")
    folder.mkdir()
    made = BUILD["compile_all"](ROOT, folder)
    monkeypatch.setattr(sources, "SHIPPED", folder)
    return [Path(path) for path in made]


@pytest.mark.slow
def test_the_shipped_library_is_preferred_and_agrees_with_core(monkeypatch, tmp_path, no_library, caplog):
    made = compiled(monkeypatch, tmp_path / "shipped")
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    best = torch.backends.cpu.get_cpu_capability()
    names = ["DEFAULT", "AVX2", "AVX512"]
    assert [path.name.split("-")[1].upper() for path in made] == names
    with kernels.use("core"):
        want = bi_tempered_logistic_loss(LOGITS.double(), TARGET, 0.8, 1.2).float()
    for capability in names[: names.index(best) + 1]:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        cpu.library.cache_clear()
        assert kernels.chosen(LOGITS, TARGET) == "cpu"
        assert Path(cpu.library()._name).name == sources.shipped_name(capability)
        assert library.is_shipped(cpu.library())
        torch.testing.assert_close(bi_tempered_logistic_loss(LOGITS, TARGET, 0.8, 1.2), want, rtol=1e-6, atol=0)
    assert not (tmp_path / "cache").exists()
    assert not caplog.records


def test_a_shipped_library_that_cannot_be_loaded_is_not_used(monkeypatch, tmp_path, no_library):
    monkeypatch.setattr(sources, "SHIPPED", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", "no-such-compiler")
    (tmp_path / sources.shipped_name(torch.backends.cpu.get_cpu_capability())).write_bytes(b"no library")
    assert "no-such-compiler" in str(cpu.library())  # so that it went on to compile


def test_a_library_of_other_sources_is_not_found(monkeypatch, tmp_path):
    names = {sources.shipped_name("AVX2"), sources.shipped_name("AVX512"), sources.shipped_name("DEFAULT")}
    changed = tmp_path / "library.c"
    changed.write_bytes(sources.SOURCES[0].read_bytes() + b"\n")
    monkeypatch.setattr(sources, "SOURCES", [changed, *sources.SOURCES[1:]])
    names |= {sources.shipped_name("AVX2"), sources.shipped_name("AVX512"), sources.shipped_name("DEFAULT")}
    assert len(names) == 6


@pytest.mark.parametrize(("named", "newest"), [(b"GLIBC_2.2.5\0GLIBC_2.16\0", (2, 16)), (b"GLIBC_2.29", (2, 29))])
def test_the_newest_glibc_is_found(named, newest):
    assert BUILD["glibc_needed"](named) == newest


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [False, True])
def test_the_wheel(tmp_path, kernel):
    """Built as `make dist` does; unpacked, it computes without a compiler if it carries the kernel."""
    if kernel and (shutil.which("cc") is None or sys.platform != "linux" or os.uname().machine != "x86_64"):
        pytest.skip("the wheel with the kernel needs a C compiler, and Linux on x86-64")
    environment = os.environ | {"BITEMPERED_WHEEL_KERNEL": str(int(kernel)), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    build = "from hatchling.build import build_wheel; import sys; print(build_wheel(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, env=environment, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("py3-none-manylinux_2_17_x86_64.whl" if kernel else "py3-none-any.whl")
    assert wheel.stat().st_size < 1_500_000
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        said = HeaderParser().parsestr(content.read(metadata).decode())
        content.extractall(tmp_path / "unpacked")
    libraries = {name for name in names if name.endswith(".so")}
    wanted = {f"bitempered/kernels/shipped/{sources.shipped_name(x)}" for x in ("DEFAULT", "AVX2", "AVX512")}
    assert libraries == (wanted if kernel else set())
    assert {"bitempered/py.typed", "bitempered/kernels/c/library.c", "bitempered/playground/page/index.html"} <= set(
        names
    )
    assert all(name.startswith("bitempered") for name in names)
    assert said["Version"] == __version__
    assert said["Author"] == "bitempered contributors"
    assert said.get_payload() == BUILD["absolute"]((ROOT / "README.md").read_text(), PROJECT["urls"]["Repository"])
    program = """
import torch
from bitempered import kernels
from bitempered.torch import bi_tempered_logistic_loss
loss = bi_tempered_logistic_loss(torch.eye(3), torch.arange(3), 1.0, 1.0)
torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(torch.eye(3), torch.arange(3)))
print(kernels.chosen(torch.eye(3), torch.arange(3)))
"""
    without_compiler = environment | {"CC": "", "PATH": "/nowhere", "PYTHONPATH": str(tmp_path / "unpacked")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=without_compiler, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == ("cpu\n" if kernel else "core\n")
    assert ("the C kernel is not available" in done.stderr) is not kernel
    assert not (tmp_path / "cache" / "bitempered").exists() or not kernel
