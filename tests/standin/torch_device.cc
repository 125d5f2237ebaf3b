// In place of Horovod's cuda_util.cc: the stand-in has one device, which is always the current one.

#include "horovod/common/common.h"
#include "horovod/torch/cuda_util.h"

namespace horovod {
namespace torch {

with_device::with_device(int) {}
with_device::~with_device() {}

} // namespace torch
} // namespace horovod
