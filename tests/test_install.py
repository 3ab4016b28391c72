"""Installation as a user meets it: the sdist, pip with and without build isolation, C++ through CMake, and the sentences
that say what is wrong. B2..B6 are blocks of public failure reports: a torch replaced while installing, boxes without nvcc,
mismatched CUDA, memory and stale locks, incomplete source packages."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
SITE = Path(torch.__file__).parent.parent
HIDE_TORCH = "import sys; sys.modules['torch'] = None"
HIDE_CUDA = "import pathlib; real = pathlib.Path.is_file; pathlib.Path.is_file = lambda p: 'cuda' not in str(p) and real(p)"
QUANTIZE = """
import torch, mori_ops
w = torch.arange(64.).view(1, 64)
assert (mori_ops.q8_0_dequantize(mori_ops.q8_0_quantize(w)) - w).abs().max() < 0.5
print(mori_ops.__file__, torch.__version__, mori_ops.build_info)
"""


def run(*command, cwd=ROOT, check=True, **env) -> subprocess.CompletedProcess:
    """stdout and stderr together; a value of None removes the variable."""
    settings = {**os.environ, "MAX_JOBS": "2", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **env}
    settings = {name: value for name, value in settings.items() if value is not None}
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=settings, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert not check or done.returncode == 0, f"{command}:\n{done.stdout[-6000:]}"
    return done


def setup_py(prelude="", **env) -> subprocess.CompletedProcess:
    """Runs setup.py as far as every command takes it: the choice of backends, sources and flags."""
    code = f"{prelude}\nimport runpy, sys; sys.argv = ['setup.py', '--name']; runpy.run_path('setup.py', run_name='__main__')"
    return run(sys.executable, "-c", code, check=False, **env)


def cuda_sources_can_be_compiled() -> bool:
    nvcc = shutil.which("nvcc") or os.path.exists("/usr/local/cuda/bin/nvcc")
    return bool(nvcc) and any((ROOT / "csrc").rglob("*_sm90.cu"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """The source package, built where there is no torch."""
    target = tmp_path_factory.mktemp("sdist")
    code = f"{HIDE_TORCH}; sys.path.insert(0, 'build_backend'); import mori_build; mori_build.build_sdist({str(target)!r})"
    run(sys.executable, "-c", code)
    return next(target.glob("mori_ops-*.tar.gz"))


@pytest.fixture(scope="module")
def sources(sdist, tmp_path_factory) -> Path:
    """The source package, unpacked outside git."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder)
    return next(folder.iterdir())


@pytest.fixture(scope="module")
def installed(sources, tmp_path_factory) -> Path:
    """The Python of a fresh environment that sees this one's torch, with mori_ops installed by an isolated `pip install`."""
    folder = tmp_path_factory.mktemp("env")
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (site / "this_torch.pth").write_text(f"{SITE}\n")
    backends = "cuda" if cuda_sources_can_be_compiled() else "auto"
    log = run(python, "-m", "pip", "install", "-v", sources, cwd=folder, MORI_BACKENDS=backends).stdout
    assert "2 files at a time" in log
    assert not (site / "torch").exists(), "pip installed another torch"
    assert "Tag: cp310-abi3-" in next(site.glob("mori_ops-*.dist-info/WHEEL")).read_text()
    return python


def test_sdist_holds_every_source(sdist):
    with tarfile.open(sdist) as archive:
        packed = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    for folder in ("csrc", "mori_ops", "cmake", "build_backend", "tests"):
        files = {str(p.relative_to(ROOT)) for p in (ROOT / folder).rglob("*") if p.is_file() and p.suffix not in (".so", ".pyc")}
        assert files <= packed, files - packed
    assert {"setup.py", "pyproject.toml", "CMakeLists.txt", "LICENSE"} <= packed
    assert not [name for name in packed if name.endswith(".so")]


def test_metadata_needs_no_torch_and_the_build_asks_for_one(tmp_path):
    code = f"""
{HIDE_TORCH}; sys.path.insert(0, 'build_backend'); import mori_build
print(mori_build.get_requires_for_build_wheel(), mori_build.get_requires_for_build_sdist())
print(mori_build.prepare_metadata_for_build_wheel({str(tmp_path)!r}))
"""
    assert "['torch>=2.11'] []" in run(sys.executable, "-c", code).stdout
    assert "Requires-Dist: torch>=2.11" in next(tmp_path.glob("*/METADATA")).read_text()
    refused = run(sys.executable, "-c", f"{HIDE_TORCH}; sys.path.insert(0, 'build_backend'); import mori_build; mori_build.build_wheel('.')", check=False)
    assert refused.returncode != 0 and "install torch >= 2.11 first" in refused.stdout


def test_b2_isolated_install_from_outside_git_uses_the_installed_torch(installed, tmp_path):
    answer = run(installed, "-c", QUANTIZE, cwd=tmp_path).stdout
    assert str(installed.parent.parent) in answer and f" {torch.__version__} " in answer
    assert f"'torch': '{torch.__version__}'" in answer
    assert ("'backends': 'cpu,cuda'" in answer) == cuda_sources_can_be_compiled()


def test_metal_sources_are_installed(installed, sources):
    package = Path(sysconfig.get_path("purelib", vars={"base": str(installed.parent.parent)}), "mori_ops", "metal")
    shipped = {p.relative_to(sources / "csrc"): p.read_text() for p in (sources / "csrc").rglob("*.metal")}
    assert shipped and {p.relative_to(package): p.read_text() for p in package.rglob("*.metal")} == shipped


def test_library_uses_the_stable_abi_only(installed, tmp_path):
    library = next(Path(sysconfig.get_path("purelib", vars={"base": str(installed.parent.parent)})).glob("mori_ops/_C*.so"))
    assert library.name == "_C.abi3.so"
    undefined = run("nm", "-D", "-C", "--undefined-only", library).stdout
    assert not re.findall(r"\b(?:c10|at|torch)::.*", undefined)


def test_b2_b5_editable_install_and_rebuilds_compile_only_what_changed(installed, sources, tmp_path):
    backends = {"MORI_BACKENDS": "cuda"} if cuda_sources_can_be_compiled() else {}
    editable = (installed, "-m", "pip", "install", "-v", "--no-build-isolation", "-e", ".")
    run(*editable, cwd=sources, **backends)  # an isolated build before it may have had other compiler commands
    assert "ninja: no work to do" in run(*editable, cwd=sources, **backends).stdout
    assert str(sources) in run(installed, "-c", QUANTIZE, cwd=tmp_path).stdout

    build = (installed, "setup.py", "build_ext", "--inplace")
    (sources / "csrc" / "schemas.cpp").touch()
    killed = subprocess.Popen(build, cwd=sources, env={**os.environ, **backends}, start_new_session=True, text=True, stdout=subprocess.PIPE)
    while "building" not in killed.stdout.readline():
        pass
    os.killpg(killed.pid, 9)
    killed.communicate()
    rebuilt = run(*build, cwd=sources, MAX_JOBS="1", **backends).stdout
    assert "1 files at a time" in rebuilt and re.findall(r"^\[\d+/(\d+)\]", rebuilt, re.M) == ["1"]
    run(installed, "-c", QUANTIZE, cwd=tmp_path)


@pytest.mark.parametrize("cuda_home", [None, "", "/nowhere/cuda"])
def test_b3_without_nvcc_the_cpu_build_is_configured_and_cuda_is_refused_in_a_sentence(cuda_home):
    hidden = {"CUDA_HOME": cuda_home, "PATH": f"{Path(sys.executable).parent}"}
    assert setup_py(HIDE_CUDA, **hidden).stdout.strip().endswith("mori_ops")
    refused = setup_py(HIDE_CUDA, MORI_BACKENDS="cuda", **hidden)
    assert refused.returncode != 0
    assert refused.stdout.strip().splitlines()[-1].startswith("mori_ops: MORI_BACKENDS=cuda needs a CUDA toolkit")


def test_b4_a_toolkit_of_another_major_version_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_runtime.h").touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.61'\n")
    (tmp_path / "bin" / "nvcc").chmod(0o755)
    refused = setup_py("import torch; torch.version.cuda = '13.0'", CUDA_HOME=str(tmp_path))
    assert refused.returncode != 0
    assert f"mori_ops: nvcc in {tmp_path} is CUDA 12.8, torch {torch.__version__} was built with CUDA 13.0" in refused.stdout


@pytest.mark.parametrize(
    "prelude, backends, sentence",
    [
        ("", "tpu", "MORI_BACKENDS must be one or more of auto, cpu, cuda, hip, got 'tpu'"),
        ("", "cuda,hip", "one torch serves one of them, choose one"),
        ("import torch; torch.version.hip = None", "hip", "MORI_BACKENDS=hip needs hipcc"),
        ("import torch; torch.__version__ = '2.10.0'", "cpu", "needs torch >= 2.11 (float8_e8m0fnu in the stable ABI), found torch 2.10.0"),
    ],
)
def test_a_build_that_cannot_work_is_refused_in_a_sentence(prelude, backends, sentence):
    refused = setup_py(prelude, MORI_BACKENDS=backends)
    assert refused.returncode != 0 and sentence in refused.stdout.strip().splitlines()[-1]


def import_error(folder: Path, prelude="") -> str:
    # An editable install of this checkout would find the library for the bare package.
    bare = "import sys; sys.meta_path = [finder for finder in sys.meta_path if 'editable' not in str(finder)]"
    failed = run(sys.executable, "-c", f"{bare}\n{prelude}\nimport mori_ops", cwd=folder, check=False)
    assert failed.returncode != 0
    return failed.stdout.strip().splitlines()[-1]


@pytest.fixture
def bare_package(tmp_path) -> Path:
    shutil.copytree(ROOT / "mori_ops", tmp_path / "mori_ops", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path


def test_import_without_the_library_says_how_to_build_it(bare_package):
    message = import_error(bare_package)
    assert message.startswith("ImportError: mori_ops: the compiled library is missing") and "pip install ." in message


def test_import_beside_an_old_torch_names_both_versions():
    message = import_error(ROOT, "import torch; torch.__version__ = '2.9.1+cu128'")
    assert message.startswith("ImportError: mori_ops needs torch >= 2.11, found torch 2.9.1+cu128")


def test_import_beside_a_swapped_torch_names_both_versions(bare_package):
    source = bare_package / "library.c"
    source.write_text('const char built[] = "mori_build:backends=cpu;torch=2.99.0;"; int gone(void); void* PyInit__C(void) { gone(); return 0; }')
    run("cc", "-shared", "-fPIC", "-Wl,-z,now", source, "-o", bare_package / "mori_ops" / "_C.abi3.so")
    message = import_error(bare_package)
    assert f"was built with torch 2.99.0 and cannot be loaded beside torch {torch.__version__}" in message
    assert "undefined symbol: gone" in message and "pip install --force-reinstall --no-deps ." in message


def test_import_of_a_damaged_library_says_how_to_build_it_again(bare_package):
    (bare_package / "mori_ops" / "_C.abi3.so").write_bytes(b"not a library")
    message = import_error(bare_package)
    assert "was built with torch an unknown version" in message and "pip install --force-reinstall --no-deps ." in message


def test_cmake_builds_the_library_and_cpp_programs_call_it(tmp_path):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    settings = {"PATH": path, "CMAKE_BUILD_PARALLEL_LEVEL": "2"}

    def build(source: Path, folder: Path, *options: str) -> None:
        run("cmake", "-G", "Ninja", "-S", source, "-B", folder, f"-DPython3_EXECUTABLE={sys.executable}", *options, **settings)
        run("cmake", "--build", folder, **settings)
        assert "100% tests passed" in run("ctest", "--test-dir", folder, "--output-on-failure", "--no-tests=error", **settings).stdout

    library, prefix = ROOT / "build" / "cmake-debug", tmp_path / "prefix"  # kept: the next run compiles what has changed
    build(ROOT, library, "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0")
    run("cmake", "--install", library, "--prefix", prefix, **settings)
    build(ROOT / "tests" / "cmake_consumer", tmp_path / "consumer", f"-DCMAKE_PREFIX_PATH={prefix}")
