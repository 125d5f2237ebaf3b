// Horovod's three kernels of cuda_kernels.cu, on the host: the same arithmetic in the same types.

#include <immintrin.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "horovod/common/ops/cuda/cuda_kernels.h"
#include "horovod/common/ops/whole_factor.h"
#include "runtime.h"

namespace horovod {
namespace common {
namespace {

template <typename T, typename S> void scale(const void* in, void* out, size_t bytes, S factor) {
  for (size_t i = 0; i < bytes / sizeof(T); ++i) {
    static_cast<T*>(out)[i] = static_cast<T>(factor * static_cast<const T*>(in)[i]);
  }
}

void scale_half(const void* in, void* out, size_t bytes, float factor) {
  auto rounded = _cvtsh_ss(_cvtss_sh(factor, 0));
  for (size_t i = 0; i < bytes / 2; ++i) {
    auto number = _cvtsh_ss(static_cast<const uint16_t*>(in)[i]);
    static_cast<uint16_t*>(out)[i] = _cvtss_sh(number * rounded, 0);
  }
}

void scale(DataType type, const void* in, void* out, size_t bytes, double factor) {
  switch (type) {
  case HOROVOD_UINT8: return scale<uint8_t>(in, out, bytes, WholeFactor(factor));
  case HOROVOD_INT8: return scale<int8_t>(in, out, bytes, WholeFactor(factor));
  case HOROVOD_INT32: return scale<int32_t>(in, out, bytes, WholeFactor(factor));
  case HOROVOD_INT64: return scale<int64_t>(in, out, bytes, WholeFactor(factor));
  case HOROVOD_FLOAT16: return scale_half(in, out, bytes, static_cast<float>(factor));
  case HOROVOD_FLOAT32: return scale<float>(in, out, bytes, static_cast<float>(factor));
  case HOROVOD_FLOAT64: return scale<double>(in, out, bytes, factor);
  default: throw std::logic_error("Type " + DataType_Name(type) + " not supported by the kernels.");
  }
}

std::vector<standin::Access> accesses(const BatchedD2DParams& params, int copies) {
  std::vector<standin::Access> found;
  for (int i = 0; i < copies; ++i) {
    found.push_back(standin::reads(params.in[i], params.sizes[i]));
    found.push_back(standin::writes(params.out[i], params.sizes[i]));
  }
  return found;
}

} // namespace

void BatchedD2DMemcpyCudaImpl(BatchedD2DParams& params, int num_copies, cudaStream_t stream) {
  standin::send(stream, "copies of tensors", accesses(params, num_copies), [params, num_copies] {
    for (int i = 0; i < num_copies; ++i) std::memmove(params.out[i], params.in[i], params.sizes[i]);
  });
}

void BatchedScaledD2DMemcpyCudaImpl(BatchedD2DParams& params, int num_copies, double scale_factor, DataType dtype,
                                    cudaStream_t stream) {
  standin::send(stream, "scaled copies of tensors", accesses(params, num_copies), [=] {
    for (int i = 0; i < num_copies; ++i) scale(dtype, params.in[i], params.out[i], params.sizes[i], scale_factor);
  });
}

void ScaleBufferCudaImpl(const void* fused_input_data, void* buffer_data, const int64_t num_elements,
                         double scale_factor, DataType dtype, cudaStream_t stream) {
  size_t bytes = num_elements * DataType_Size(dtype);
  standin::send(stream, "a scaling", {standin::reads(fused_input_data, bytes), standin::writes(buffer_data, bytes)},
                [=] { scale(dtype, fused_input_data, buffer_data, bytes, scale_factor); });
}

} // namespace common
} // namespace horovod
