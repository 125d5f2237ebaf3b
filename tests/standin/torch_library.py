"""Horovod's torch library over the stand-in, for a torch for CPUs.

With the folder that `site` makes in PYTHONPATH, tensors on the host are on the stand-in's device for Horovod, and
torch's own work is that of the host.
"""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import horovod
import torch
from core import HERE, RUNTIME, Core, digest
from torch.utils import cpp_extension

# In Horovod's files: a tensor on the host is one on the stand-in's device, and torch has memory of the host only.
CHANGES: dict[str, dict[str, str]] = {
    "mpi_ops_v2": {
        "tensor.device().is_cuda()": "true",
        "return tensor.device().index();": "return 0;",
        "int DoJoin(::torch::Tensor output_last_joined_rank, int device) {": (
            "int DoJoin(::torch::Tensor output_last_joined_rank, int device) {\n  device = 0;"
        ),
    },
    "adapter_v2": {"::torch::kCUDA": "::torch::kCPU"},
    "ready_event": {},
    "handle_manager": {},
}


class TorchLibrary(Core):
    """Horovod's torch library."""

    def site(self, target: Path, defect: Mapping[str, str] | None = None) -> Path:
        """Make `target`, a folder whose horovod is the installed one with this library.

        `defect` has texts of mpi_ops_v2.cc, each of them there once, and those in their places.
        """
        flags = _flags()
        objects = [*self._core_objects().values(), *self._our_objects(*RUNTIME)]
        objects += [*self._our_objects("torch_device", flags=flags), *self._torch_objects(flags, defect or {})]
        libraries = [f"-L{each}" for each in cpp_extension.library_paths()]
        names = ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lrt"]
        exports = f"-Wl,--version-script={self._source / 'horovod.lds'}"
        library = self._link("mpi_lib_v2", objects, self._scratch, ["-shared", exports, *libraries, *names])
        installed = Path(horovod.__file__).parent
        shutil.copytree(installed, target / "horovod", ignore=shutil.ignore_patterns("tensorflow", "mpi_lib_v2*"))
        shutil.copy(library, target / "horovod/torch" / f"mpi_lib_v2{sysconfig.get_config_var('EXT_SUFFIX')}")
        return target

    def _torch_objects(self, flags: list[str], defect: Mapping[str, str]) -> list[Path]:
        objects, key = [], digest(self._key, torch.__version__, *flags)
        for name, changes in CHANGES.items():
            file = self._source / "horovod/torch" / f"{name}.cc"
            text = file.read_text()
            for old, new in changes.items():
                assert old in text, f"{name}.cc has no {old}"
                text = text.replace(old, new)
            for old, new in defect.items() if name == "mpi_ops_v2" else ():
                assert text.count(old) == 1, f"{name}.cc has {text.count(old)} times: {old}"
                text = text.replace(old, new)
            objects.append(self._compiled(file, text, key, self._folder / "objects", flags))
        return objects


def _flags() -> list[str]:
    version = "".join(f"{int(part):03d}" for part in torch.__version__.partition("+")[0].split("."))
    includes = [HERE / "include_torch", *cpp_extension.include_paths(), sysconfig.get_path("include")]
    flags = [f"-DPYTORCH_VERSION={int(version)}000", "-DTORCH_API_INCLUDE_EXTENSION_H=1"]
    flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
    return flags + [f"-I{each}" for each in includes]
