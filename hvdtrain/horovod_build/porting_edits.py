"""What Horovod's sdist needs changed to compile for today's frameworks and Pythons."""

from __future__ import annotations

from hvdtrain.horovod_build.edit import Edit

PORTING: tuple[Edit, ...] = (
    Edit(
        "CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD $ENV{HVDTRAIN_CXX_STANDARD})",
        "the frameworks' headers ask for C++17 or 20: frameworks.py reads which, and there is one for everything",
    ),
    Edit(
        "horovod/torch/CMakeLists.txt",
        'if(NOT Pytorch_VERSION VERSION_LESS "1.5.0")\n    set(CMAKE_CXX_STANDARD 14)\nendif()\n',
        "",
        "the standard of the edit before",
    ),
    Edit(
        "horovod/tensorflow/CMakeLists.txt",
        "    set(CMAKE_CXX_STANDARD 17)\n",
        "",
        "likewise: beside a torch that asks for C++20, TensorFlow's part is compiled as C++20 too",
    ),
    Edit(
        "third_party/gloo/CMakeLists.txt",
        "-std=c++11 -fPIC",
        "-std=c++$ENV{HVDTRAIN_CXX_STANDARD} -fPIC",
        "likewise, so that Gloo is compiled once for both frameworks",
    ),
    Edit(
        "horovod/common/ops/cuda/CMakeLists.txt",
        "set(CMAKE_CUDA_STANDARD 11)",
        "set(CMAKE_CUDA_STANDARD $ENV{HVDTRAIN_CXX_STANDARD})",
        "likewise: CUDA 13's own headers need C++17",
    ),
    Edit(
        "horovod/common/common.h",
        "#include <memory>\n#include <string>\n",
        "#include <memory>\n#include <stdexcept>\n#include <string>\n",
        "gcc 13's headers no longer bring std::logic_error along (Horovod's own commit ff4ca09d, after 0.28.1)",
    ),
    Edit(
        "horovod/common/group_table.h",
        "#include <queue>\n#include <unordered_map>\n",
        "#include <queue>\n#include <string>\n#include <unordered_map>\n",
        "likewise std::string (ff4ca09d)",
    ),
    Edit(
        "third_party/flatbuffers/include/flatbuffers/stl_emulation.h",
        "  const size_type count_;\n",
        "  size_type count_;\n",
        "gcc 14 refuses the operator= that assigns to it (flatbuffers' own commit 20aad0c4)",
    ),
    Edit(
        "horovod/tensorflow/CMakeLists.txt",
        "    if (Tensorflow_CXX17)\n"
        "       list(APPEND TF_LINKER_LIBS compatible17_gloo)\n"
        "    elseif (Tensorflow_CXX11)\n",
        "    if (Tensorflow_CXX11)\n",
        "Gloo is C++17 already: TensorFlow shares it with torch",
    ),
    Edit(
        "CMakeLists.txt",
        "if(HAVE_GLOO AND (DEFINED Tensorflow_CXX17 AND Tensorflow_CXX17))",
        "if(FALSE)",
        "the second copy of Gloo, which only cost compile time",
    ),
    Edit(
        "horovod/torch/CMakeLists.txt",
        "add_library(${PYTORCH_TARGET_LIB} SHARED ${SOURCES} ${PYTORCH_SOURCES})",
        "add_library(${PYTORCH_TARGET_LIB} SHARED $<TARGET_OBJECTS:horovod_common> ${PYTORCH_SOURCES})",
        "takes the shared objects of the edit after next",
    ),
    Edit(
        "horovod/tensorflow/CMakeLists.txt",
        "add_library(${TF_TARGET_LIB} SHARED ${SOURCES} ${TF_SOURCES})",
        "add_library(${TF_TARGET_LIB} SHARED $<TARGET_OBJECTS:horovod_common> ${TF_SOURCES})",
        "takes the shared objects of the next edit",
    ),
    Edit(
        "CMakeLists.txt",
        "# Correctly wrap up json format\n",
        "if((DEFINED Tensorflow_CXX11 AND NOT Tensorflow_CXX11) OR (DEFINED Pytorch_CXX11 AND NOT Pytorch_CXX11))\n"
        '    message(FATAL_ERROR "A framework with the C++ ABI from before GCC 5 is installed: take a newer one.")\n'
        "endif()\n"
        "# What knows no framework is compiled once for both.\n"
        "add_library(horovod_common OBJECT ${SOURCES})\n"
        'target_include_directories(horovod_common PRIVATE "${EIGEN_INCLUDE_PATH}" "${FLATBUFFERS_INCLUDE_PATH}")\n'
        "target_compile_definitions(horovod_common PRIVATE _GLIBCXX_USE_CXX11_ABI=1)\n"
        "if(Tensorflow_CXX17)\n"
        "    # As TensorFlow's own flags say: one alignment for all Eigen objects of a library.\n"
        "    target_compile_definitions(horovod_common PRIVATE EIGEN_MAX_ALIGN_BYTES=64)\n"
        "endif()\n"
        "# Correctly wrap up json format\n",
        "thirty files were compiled once for each framework, a third of the whole build",
    ),
    Edit(
        "horovod/common/ops/cuda/CMakeLists.txt",
        "add_library(compatible_horovod_cuda_kernels cuda_kernels.cu)",
        "add_library(compatible_horovod_cuda_kernels EXCLUDE_FROM_ALL cuda_kernels.cu)",
        "CUDA kernels for the C++ ABI that no framework uses any more",
    ),
    Edit(
        "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        "",
        "TensorFlow no longer ships the headers of this optional part (collectives inside XLA)",
    ),
    Edit(
        "horovod/tensorflow/mpi_ops.cc",
        "GpuStreamHandle AsGpuStreamValue(Stream* stream);\n",
        "inline GpuStreamHandle AsGpuStreamValue(Stream* stream);\n",
        "TensorFlow dropped this function; the next edit defines it",
    ),
    Edit(
        "horovod/tensorflow/mpi_ops.cc",
        '#if TENSORFLOW_VERSION >= 2011000000\n#include "tensorflow/compiler/xla/stream_executor/stream.h"\n',
        "#if TENSORFLOW_VERSION >= 2011000000\n"
        '#include "xla/stream_executor/stream.h"\n'
        "namespace stream_executor {\n"
        "namespace gpu {\n"
        "inline GpuStreamHandle AsGpuStreamValue(Stream* stream) {\n"
        "  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);\n"
        "}\n"
        "} // namespace gpu\n"
        "} // namespace stream_executor\n",
        "TensorFlow moved the header, and a stream now hands out its CUDA handle itself",
    ),
    Edit(
        "CMakeLists.txt",
        "project(horovod CXX)\n",
        "project(horovod CXX)\nset(CMAKE_SKIP_RPATH TRUE)\n",
        "the libraries looked for others in the builder's environment and in a deleted folder under /tmp",
    ),
    Edit(
        "CMakeLists.txt",
        "find_program(CCACHE_PROGRAM ccache)\n",
        "if(NOT DEFINED ENV{CMAKE_CXX_COMPILER_LAUNCHER})\n    find_program(CCACHE_PROGRAM ccache)\nendif()\n",
        "a compiler launcher that the user chose was overridden whenever ccache was on PATH",
    ),
    Edit(
        "CMakeLists.txt",
        "include(CheckLanguage)\ncheck_language(CUDA)\nif(NOT CMAKE_CUDA_COMPILER)\n",
        "include(CheckLanguage)\n"
        "if(DEFINED HOROVOD_GPU)\n"
        "    check_language(CUDA)\n"
        "endif()\n"
        "if(DEFINED HOROVOD_GPU AND NOT CMAKE_CUDA_COMPILER)\n",
        "a CPU build must not fail on a CUDA toolkit that it does not use",
    ),
    Edit(
        "cmake/Modules/FindPytorch.cmake",
        'string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)\n',
        'string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)\n'
        "if(NOT DEFINED HOROVOD_GPU)\n"
        "    set(Pytorch_CUDA FALSE)\n"
        "endif()\n",
        "a CUDA torch may be given a Horovod without GPU operations; with any nvcc on PATH it was linked with cudart",
    ),
    Edit(
        "CMakeLists.txt",
        "if(DEFINED HOROVOD_GPU_ALLREDUCE OR DEFINED HOROVOD_GPU_ALLGATHER",
        "if(DEFINED HOROVOD_GPU OR DEFINED HOROVOD_GPU_ALLGATHER",
        "--through-host: CUDA without GPU operations was known to torch's part alone, not to what all parts share",
    ),
    Edit(
        "horovod/torch/CMakeLists.txt",
        '-c "from distutils.sysconfig import get_python_inc; print(get_python_inc())"',
        "-c \"import sysconfig; print(sysconfig.get_paths()['include'])\"",
        "Python 3.12 has no distutils",
    ),
    Edit(
        "horovod/runner/js_run.py",
        "from distutils.spawn import find_executable",
        "from shutil import which as find_executable",
        "Python 3.12 has no distutils, and horovodrun imports this file",
    ),
    Edit(
        "horovod/runner/launch.py",
        "hashlib.md5(params.encode('utf-8'))",
        "hashlib.md5(params.encode('utf-8'), usedforsecurity=False)",
        "machines in FIPS mode refuse MD5 that is not said to be a mere name",
    ),
    Edit(
        "horovod/runner/launch.py",
        "CACHE_FOLDER = os.path",
        "if not os.path.isabs(os.path.expanduser('~')):\n    os.environ['HOME'] = '/'\nCACHE_FOLDER = os.path",
        "where nobody knows the user's home, as in containers, mpirun crashed, and horovodrun made a folder named ~",
    ),
    Edit(
        "horovod/runner/common/util/host_hash.py",
        "hashlib.md5(string.encode('ascii'))",
        "hashlib.md5(string.encode('ascii'), usedforsecurity=False)",
        "likewise: ranks of several hosts are told apart by it",
    ),
    Edit(
        "setup.py",
        "setup_requires=require_list if is_build_action() else [],",
        "setup_requires=[],",
        "run-time needs, which setuptools would fetch once more by a way of its own",
    ),
    Edit(
        "setup.py",
        "    require_list.append('cffi>=1.4.0')\n",
        "    pass\n",
        "nothing in Horovod imports cffi any more",
    ),
    Edit(
        "setup.py",
        "else 'RelWithDebInfo'",
        "else 'Release'",
        "debug information made the compile longer and the wheel 35 MB; both build types optimise with -O3",
    ),
    Edit(
        "CMakeLists.txt",
        '"\\"dummy\\": \\"none\\"\\n}")',
        '"\\"hvdtrain\\": $ENV{HVDTRAIN_BUILD_RECORD}\\n}")',
        "the wheel itself says what it was built for",
    ),
)
