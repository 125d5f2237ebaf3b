# Two images of hvdtrain with Horovod built for the frameworks inside: `cpu` and `gpu`.
#
#   docker build --target cpu -t hvdtrain:cpu .      docker run --rm --shm-size=1g hvdtrain:cpu
#   docker build --target gpu -t hvdtrain:gpu .      docker run --rm --shm-size=1g --gpus all hvdtrain:gpu
#
# BuildKit is needed: with Debian 12's docker.io DOCKER_BUILDKIT=1, with Debian 13's the package docker-buildx.
# `make docker-test` builds the cpu image on Debian 12 and 13, and runs it; with TARGET=gpu the gpu image, on CPUs.

ARG DEBIAN_IMAGE=debian:bookworm-slim

# ---- cpu: compile -----------------------------------------------------------------------------------------------
FROM ${DEBIAN_IMAGE} AS cpu-builder
RUN apt-get update && apt-get install -y --no-install-recommends \
        ca-certificates g++ make python3-dev python3-venv openmpi-bin libopenmpi-dev \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/hvdtrain
ENV PATH=/opt/hvdtrain/bin:$PATH
WORKDIR /src
ARG EXTRAS=torch,tensorflow,jax,keras,examples
# The frameworks come first, in a layer that only new pins make stale: a placeholder has the version, which pyproject.toml
# asks for. bootstrap.py finds torch's CPU build, which the usual index lacks; uv, its helper in that, and its logs are
# not for the image.
COPY pyproject.toml README.md LICENSE ./
COPY scripts/bootstrap.py scripts/
COPY hvdtrain/system/toolchain.py hvdtrain/system/
RUN --mount=type=cache,target=/root/.cache/pip \
    echo '__version__ = "0"' > hvdtrain/__init__.py \
    && { HVDTRAIN_GPU=0 python -I scripts/bootstrap.py --venv /opt/hvdtrain --extras "${EXTRAS}" \
        || { cat /opt/hvdtrain/set-up-logs/*.log; exit 1; }; } \
    && pip uninstall --yes uv \
    && rm -r /opt/hvdtrain/set-up-logs
COPY hvdtrain hvdtrain
RUN pip install --no-deps --force-reinstall .
RUN --mount=type=cache,target=/root/.cache/hvdtrain hvdtrain build

# ---- cpu: run ---------------------------------------------------------------------------------------------------
# torch.compile compiles when a script runs: g++ and Python's headers, 280 MiB, are for it. The gpu image's Triton needs
# the same.
FROM ${DEBIAN_IMAGE} AS cpu
RUN apt-get update && apt-get install -y --no-install-recommends \
        ca-certificates g++ libpython3-dev openmpi-bin openssh-client openssh-server python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 --shell /bin/bash hvdtrain
COPY --from=cpu-builder /opt/hvdtrain /opt/hvdtrain
COPY docker/hvdtrain-sshd /usr/local/bin/
COPY examples /home/hvdtrain/examples
# Docker's default seccomp profile forbids the single-copy system call that Open MPI uses between local ranks: by 4's
# name and by 5's, which is Debian 13's.
ENV PATH=/opt/hvdtrain/bin:$PATH \
    OMPI_MCA_btl_vader_single_copy_mechanism=none \
    OMPI_MCA_smsc=^cma,knem,xpmem \
    OMPI_MCA_mpi_yield_when_idle=1 \
    PYTHONUNBUFFERED=1
USER hvdtrain
WORKDIR /home/hvdtrain
EXPOSE 2222
# Beside a training: it reads what is installed, and takes no GPU's memory.
HEALTHCHECK --interval=5m --timeout=1m CMD ["hvdtrain", "doctor", "--no-allreduce"]
CMD ["hvdtrain", "doctor"]

# ---- gpu: compile -----------------------------------------------------------------------------------------------
# The same base: nvcc, CUDA's libraries and NCCL come from wheels, and the driver from the host.
FROM ${DEBIAN_IMAGE} AS gpu-builder
RUN apt-get update && apt-get install -y --no-install-recommends \
        ca-certificates g++ make python3-dev python3-venv openmpi-bin libopenmpi-dev \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/hvdtrain
ENV PATH=/opt/hvdtrain/bin:$PATH
WORKDIR /src
# No TensorFlow here: its wheels are for CUDA 12. Keras runs on torch or JAX.
ARG EXTRAS=torch,jax-cuda,keras,examples,gpu-build
ARG CUDA_ARCH=80,90
COPY pyproject.toml README.md LICENSE ./
COPY scripts/bootstrap.py scripts/
COPY hvdtrain/system/toolchain.py hvdtrain/system/
RUN --mount=type=cache,target=/root/.cache/pip \
    echo '__version__ = "0"' > hvdtrain/__init__.py \
    && { HVDTRAIN_GPU=1 python -I scripts/bootstrap.py --venv /opt/hvdtrain --extras "${EXTRAS}" \
        || { cat /opt/hvdtrain/set-up-logs/*.log; exit 1; }; } \
    && rm -r /opt/hvdtrain/set-up-logs
COPY hvdtrain hvdtrain
RUN pip install --no-deps --force-reinstall .
# An image build has no GPU, so the NCCL plane is proven by the image's default command, `hvdtrain doctor`, on a host.
RUN --mount=type=cache,target=/root/.cache/hvdtrain hvdtrain build --cuda-arch "${CUDA_ARCH}"

# ---- gpu: run ---------------------------------------------------------------------------------------------------
FROM ${DEBIAN_IMAGE} AS gpu
RUN apt-get update && apt-get install -y --no-install-recommends \
        ca-certificates g++ libpython3-dev openmpi-bin openssh-client openssh-server python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 --shell /bin/bash hvdtrain
COPY --from=gpu-builder /opt/hvdtrain /opt/hvdtrain
COPY docker/hvdtrain-sshd /usr/local/bin/
COPY examples /home/hvdtrain/examples
# What NVIDIA's container toolkit shows the container: all GPUs, the driver's CUDA library and nvidia-smi.
ENV PATH=/opt/hvdtrain/bin:$PATH \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    KERAS_BACKEND=torch \
    OMPI_MCA_btl_vader_single_copy_mechanism=none \
    OMPI_MCA_smsc=^cma,knem,xpmem \
    OMPI_MCA_mpi_yield_when_idle=1 \
    PYTHONUNBUFFERED=1
USER hvdtrain
WORKDIR /home/hvdtrain
EXPOSE 2222
HEALTHCHECK --interval=5m --timeout=1m CMD ["hvdtrain", "doctor", "--no-allreduce"]
CMD ["hvdtrain", "doctor"]
