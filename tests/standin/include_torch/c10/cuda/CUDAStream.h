// torch's current stream: what torch computes on the host is over when it returns, so this is the host's own.

#ifndef HVDTRAIN_STANDIN_CUDA_STREAM_H
#define HVDTRAIN_STANDIN_CUDA_STREAM_H

#include <cuda_runtime.h>

#include "runtime.h"

namespace c10 {
namespace cuda {

inline cudaStream_t getCurrentCUDAStream(int) { return standin::host_stream(); }

} // namespace cuda
} // namespace c10

#endif
