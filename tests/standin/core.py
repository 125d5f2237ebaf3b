"""Compile Horovod's core against the stand-in."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hvdtrain.horovod_build import cache, changes, packages

HERE = Path(__file__).parent
CORE = (
    "common controller fusion_buffer_manager group_table half logging message operations parameter_manager process_set "
    "response_cache stall_inspector tensor_queue thread_pool timeline utils/env_parser optim/bayesian_optimization "
    "optim/gaussian_process gloo/gloo_context gloo/gloo_controller gloo/http_store gloo/memory_store "
    "ops/collective_operations ops/operation_manager ops/gloo_operations ops/cuda_operations ops/gpu_operations "
    "ops/nccl_operations"
)
GLOO = "*.cc common/linux.cc common/logging.cc transport/*.cc transport/tcp/*.cc rendezvous/*.cc"
NOT_OF_GLOO = re.compile(r"cuda|redis")
RUNTIME = ("runtime", "checker", "nccl", "kernels")
OPERATIONS = ("ALLREDUCE", "ALLGATHER", "BROADCAST", "ALLTOALL", "REDUCESCATTER")
FLAGS = [
    "-O0", "-std=c++17", "-pthread", "-fPIC", "-mf16c", "-mavx", "-DEIGEN_MPL2_ONLY=1",
    *(f"-DHAVE_{part}=1" for part in ("CUDA", "GPU", "NCCL", "GLOO")),
    *(f"-DHOROVOD_GPU_{operation}={ord('N')}" for operation in OPERATIONS),
    f"-DHOROVOD_CPU_OPERATIONS_DEFAULT={ord('G')}",
]  # fmt: skip


class Core:
    """Horovod's patched source, and objects that are compiled once for all programs that need them."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        """Unpack the source into `scratch`; `folder` keeps objects and the program, for other processes too."""
        assert shutil.which("g++"), "The stand-in is compiled: install g++"
        self._folder, self._scratch, self._source = folder, scratch, _patched(scratch)
        (folder / "objects").mkdir(parents=True, exist_ok=True)
        self._texts = {file: file.read_text() for file in _sources(self._source)}
        gloo, horovod = (_headers(self._source / each) for each in ("third_party/gloo", "horovod"))
        # Gloo includes one header of the others, and is compiled again only where that or its own have changed.
        gloo.append((self._source / "horovod/common/hvdtrain_proof.h").read_text())
        self._key_of_gloo = digest(packages.SHA256, *FLAGS, *gloo)
        self._key = digest(self._key_of_gloo, *_headers(HERE / "include"), *horovod)

    def program(self) -> Path:
        """Return the harness with the core, compiled by one process at a time."""
        with (self._folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return self._linked(self._core_objects(), self._folder)

    def defective(self, file: str, old: str, new: str) -> Path:
        """Return a program in whose core a text takes the place of another one, which is in `file` once."""
        source = self._source / file
        text = self._texts[source]
        assert text.count(old) == 1, f"{file} has {text.count(old)} times: {old}"
        changed = self._compiled(source, text.replace(old, new), self._key, self._scratch)
        return self._linked({**self._core_objects(), source: changed}, self._scratch)

    def _core_objects(self) -> dict[Path, Path]:
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            compile_one = functools.partial(self._compiled, folder=self._folder / "objects")
            keys = [self._key_of_gloo if "third_party" in file.parts else self._key for file in self._texts]
            objects = threads.map(compile_one, self._texts, self._texts.values(), keys)
            return dict(zip(self._texts, objects, strict=True))

    def _linked(self, core: dict[Path, Path], folder: Path) -> Path:
        objects = [*core.values(), *self._our_objects(*RUNTIME, "harness")]
        return self._link("harness", objects, folder, ["-lrt"])

    def _our_objects(self, *names: str, flags: Sequence[str] = ()) -> list[Path]:
        key = digest(self._key, *flags, *(file.read_text() for file in sorted(HERE.glob("*.h"))))
        files = [HERE / f"{name}.cc" for name in names]
        return [self._compiled(file, file.read_text(), key, self._folder / "objects", flags) for file in files]

    def _link(self, name: str, objects: Sequence[Path], folder: Path, flags: Sequence[str]) -> Path:
        target = folder / f"{name}-{digest(*map(str, objects))}"
        if not target.exists():
            new = f"{target}.{os.getpid()}"
            _run(["g++", "-pthread", *map(str, objects), *flags, "-o", new])
            os.replace(new, target)
        return target

    def _compiled(self, file: Path, text: str, key: str, folder: Path, flags: Sequence[str] = ()) -> Path:
        # Files of one name are in several folders of the source.
        name = f"{file.parent.name}-{file.stem}-{digest(key, text)}.o"
        target = folder / name
        if not target.exists():
            new = target.with_suffix(f".{os.getpid()}.o")
            # Horovod's timeline asserts an order that ranks at different steps do not keep; releases do not ask.
            flags = [*flags, "-DNDEBUG"] if file.stem == "timeline" else flags
            includes = ["-iquote", str(file.parent), *(f"-I{each}" for each in _includes(self._source))]
            # From a pipe: a defect is never in a file. Includes in quotes are looked for beside the file all the same.
            _run(["g++", *FLAGS, *flags, *includes, "-x", "c++", "-c", "-", "-o", str(new)], text)
            os.replace(new, target)
        return target


def _patched(scratch: Path) -> Path:
    home, _ = cache.cache_folder()
    source = packages.unpack(packages.fetch(home, tools=packages.fetch_tools(home)), scratch)
    changes.change(source)
    gloo = source / "third_party/gloo/gloo"
    config = (gloo / "config.h.in").read_text()
    for name, value in (("MAJOR", "0"), ("MINOR", "5"), ("PATCH", "0")):
        config = config.replace(f"@GLOO_VERSION_{name}@", value)
    config = re.sub(r"#cmakedefine01 (\w+)", lambda m: f"#define {m[1]} {int(m[1].endswith('TRANSPORT_TCP'))}", config)
    (gloo / "config.h").write_text(config)
    return source


def _sources(source: Path) -> list[Path]:
    gloo = source / "third_party/gloo/gloo"
    of_gloo = (file for pattern in GLOO.split() for file in gloo.glob(pattern))
    core = (source / "horovod/common" / f"{name}.cc" for name in CORE.split())
    return [*core, *(file for file in of_gloo if not NOT_OF_GLOO.search(file.name))]


def _headers(folder: Path) -> list[str]:
    return [file.read_text() for file in sorted(folder.rglob("*.h"))]


def _includes(source: Path) -> list[Path]:
    third = source / "third_party"
    with_include = (third / name / "include" for name in ("flatbuffers", "HTTPRequest", "lbfgs"))
    boost = sorted((third / "boost").glob("*/include"))
    return [HERE / "include", HERE, source, third / "eigen", third / "gloo", *with_include, *boost]


def digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def _run(command: list[str], text: str = "") -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-4000:]}"
