// What Horovod's torch library takes from torch for CUDA, on a torch for CPUs. See ../../../README.md.

#ifndef HVDTRAIN_STANDIN_CUDA_EXCEPTION_H
#define HVDTRAIN_STANDIN_CUDA_EXCEPTION_H

#include <cuda_runtime.h>

#include <stdexcept>

#define C10_CUDA_CHECK(call)                                                                       \
  do {                                                                                             \
    cudaError_t found = call;                                                                      \
    if (found != cudaSuccess) throw std::runtime_error(std::string("CUDA error: ") + cudaGetErrorString(found)); \
  } while (0)

#endif
