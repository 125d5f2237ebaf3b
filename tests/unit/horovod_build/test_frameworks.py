from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdtrain.horovod_build import find
from hvdtrain.horovod_build.errors import BuildError
from hvdtrain.horovod_build.find import Framework

TORCH_CPU = Framework("torch", "2.13.0+cpu")
TORCH_CUDA = Framework("torch", "2.13.0+cu130", "13.0")
TENSORFLOW = Framework("tensorflow", "2.21.0")


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def install(*those: Framework) -> None:
        for name in ("torch", "tensorflow"):
            found = next((f for f in those if f.name == name), None)
            monkeypatch.setattr(find, f"find_{name}", lambda found=found: found)

    install()
    return install


def test_no_framework_is_an_error(there: Callable[..., None]) -> None:
    said = "JAX trains through either. Install one (pip install 'torch>="
    with pytest.raises(BuildError, match=re.escape(said)) as info:
        find.find_frameworks()
    assert "\n" not in str(info.value)


def test_leaving_out_the_only_framework_is_an_error(there: Callable[..., None]) -> None:
    there(TORCH_CPU)
    with pytest.raises(BuildError, match="left out: torch"):
        find.find_frameworks(without=frozenset({"torch"}))


def test_both_frameworks_go_into_one_build(there: Callable[..., None]) -> None:
    there(TORCH_CPU, TENSORFLOW)
    assert find.find_frameworks() == (TORCH_CPU, TENSORFLOW)


@pytest.mark.parametrize("version", ["2.10.1", "2.10.0+cpu", "1.13"])
def test_a_version_older_than_the_tests_is_refused_by_name_and_taken_by_force(
    there: Callable[..., None], version: str
) -> None:
    framework = Framework("torch", version)
    there(framework)
    with pytest.raises(BuildError) as info:
        find.find_frameworks()
    for said in (f"torch {version}", "pip install 'torch>=2.11,<", "--force"):
        assert said in str(info.value)
    assert find.find_frameworks(force=True) == (framework,)


@pytest.mark.parametrize("version", ["2.13.0a0+git1234", "3.0", "unknown"])
def test_a_version_newer_than_the_tests_is_taken_and_known_as_untested(
    there: Callable[..., None], version: str
) -> None:
    framework = Framework("torch", version)
    there(framework, TENSORFLOW)
    found = find.Found(find.find_frameworks(), "g++ 12", None, None, None, ())
    assert found.untested == (framework,)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", TORCH_CPU),
        ("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\n", TORCH_CUDA),
        (
            "__version__ = '2.13.0+rocm7.0'\ncuda: Optional[str] = None\nhip: Optional[str] = '7.0.51831'\n",
            Framework("torch", "2.13.0+rocm7.0", rocm="7.0.51831"),
        ),
        ("nothing here", None),
    ],
)
def test_torch_is_known_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: Framework | None
) -> None:
    (tmp_path / "version.py").write_text(text)
    monkeypatch.setattr(find, "package_folder", lambda name: tmp_path)
    assert find.find_torch() == expected


def headers(folder: Path, framework: str, first_line: str) -> None:
    """Lay out the header of an installed framework that says which C++ standard it needs."""
    header = folder / framework / "include" / find._ASKS_FOR_A_STANDARD[framework]
    header.parent.mkdir(parents=True)
    header.write_text(f"{first_line}\n#error a newer C++ is needed\n#endif\n")


@pytest.mark.parametrize(
    ("torch", "standard"),
    [
        ("#if !defined(_MSC_VER) && __cplusplus < 201703L", 17),
        ("#if !defined(_MSC_VER) && __cplusplus < 202002L", 20),
        ("#if !defined(_MSC_VER) && __cplusplus < 202302L", 23),
        ("// asks for nothing", 17),
    ],
)
def test_the_cpp_standard_is_the_newest_that_a_framework_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: str, standard: int
) -> None:
    monkeypatch.setattr(find, "package_folder", lambda name: tmp_path / name)
    headers(tmp_path, "torch", torch)
    headers(tmp_path, "tensorflow", "#if __cplusplus < 201703L")
    assert find.find_cxx_standard((TORCH_CPU, TENSORFLOW)) == standard
    assert find.find_cxx_standard((TENSORFLOW,)) == 17


def test_the_cpp_standard_of_the_installed_frameworks_is_in_their_headers() -> None:
    folder = find.package_folder("torch")
    if folder is None:
        pytest.skip("needs torch")
    asks = (folder / "include" / find._ASKS_FOR_A_STANDARD["torch"]).read_text()
    assert re.search(r"__cplusplus\s*<\s*20\d{4}L", asks)


@pytest.mark.parametrize(
    ("framework", "installed", "pinned"),
    [
        (TORCH_CPU, {"torch": "2.13.0+cpu"}, "torch==2.13.0+cpu"),
        (TORCH_CUDA, {"torch": "2.13.0"}, "torch==2.13.0"),
        (TENSORFLOW, {"tensorflow-cpu": "2.21.0"}, "tensorflow-cpu==2.21.0"),
        (TORCH_CPU, {}, "torch==2.13.0+cpu"),
    ],
)
def test_a_framework_without_headers_is_told_with_the_command_that_brings_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, framework: Framework, installed: dict[str, str], pinned: str
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr("importlib.metadata.version", version)
    monkeypatch.setattr(find, "package_folder", lambda name: tmp_path / name)
    with pytest.raises(BuildError) as info:
        find.find_cxx_standard((framework,))
    assert str(info.value).endswith(f"pip install --force-reinstall --no-deps {pinned}")
    assert "\n" not in str(info.value)


def test_torch_for_amd_gpus_is_refused_whatever_is_forced(there: Callable[..., None]) -> None:
    there(Framework("torch", "2.13.0+rocm7.0", rocm="7.0.51831"))
    with pytest.raises(BuildError, match=r"torch 2\.13\.0\+rocm7\.0 is built for AMD GPUs.*--without torch"):
        find.find_frameworks(force=True)


@pytest.mark.parametrize(
    ("build_info", "cuda"),
    [
        ("OrderedDict([('cpu_compiler', 'clang'), ('cuda_version', '12.5.1'), ('is_cuda_build', True)])", "12.5.1"),
        ('{"cuda_version": "12.2"}', "12.2"),
        ("OrderedDict([('cpu_compiler', 'clang'), ('is_cuda_build', False)])", ""),
    ],
)
def test_a_tensorflow_for_gpus_is_known_by_its_build_info(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build_info: str, cuda: str
) -> None:
    """As TensorFlow 2.21 and, in braces, older ones write it."""
    (tmp_path / "python" / "platform").mkdir(parents=True)
    (tmp_path / "python" / "platform" / "build_info.py").write_text(f"build_info = {build_info}\n")
    monkeypatch.setattr(find, "package_folder", lambda name: tmp_path)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.21.0")
    assert find.find_tensorflow() == Framework("tensorflow", "2.21.0", cuda)
