// What a framework gives Horovod's core: tensors on the device, their events, memory that it asks for; and handles.

#ifndef HVDTRAIN_STANDIN_FRAMEWORK_H
#define HVDTRAIN_STANDIN_FRAMEWORK_H

#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "horovod/common/operations.h"
#include "runtime.h"

namespace standin {

using horovod::common::DataType;
using horovod::common::DataType_Size;
using horovod::common::Status;
using horovod::common::TensorShape;

constexpr int DEVICE = 0;

// As torch's, it throws where there is no memory.
struct Buffer {
  explicit Buffer(size_t bytes) : bytes(bytes) {
    if (cudaMalloc(&data, bytes) != cudaSuccess) {
      throw std::runtime_error("CUDA out of memory. Tried to allocate " + std::to_string(bytes) + " bytes.");
    }
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { cudaFree(data); }

  void* data = nullptr;
  const size_t bytes;
};

struct DeviceTensor : horovod::common::Tensor {
  DeviceTensor(DataType type, TensorShape shape)
      : type(type), dims(shape), buffer(shape.num_elements() * DataType_Size(type)) {}
  const DataType dtype() const override { return type; }
  const TensorShape shape() const override { return dims; }
  const void* data() const override { return buffer.data; }
  int64_t size() const override { return buffer.bytes; }

  const DataType type;
  const TensorShape dims;
  Buffer buffer;
};

struct HostTensor : horovod::common::Tensor {
  explicit HostTensor(std::vector<int32_t> numbers) : numbers(std::move(numbers)) {}
  const DataType dtype() const override { return horovod::common::HOROVOD_INT32; }
  const TensorShape shape() const override { return TensorShape({static_cast<int64_t>(numbers.size())}); }
  const void* data() const override { return numbers.data(); }
  int64_t size() const override { return numbers.size() * sizeof(int32_t); }

  std::vector<int32_t> numbers;
};

struct Persistent : horovod::common::PersistentBuffer {
  explicit Persistent(size_t bytes) : buffer(bytes) {}
  const void* AccessData(std::shared_ptr<horovod::common::OpContext>) const override { return buffer.data; }
  Buffer buffer;
};

struct Context : horovod::common::OpContext {
  explicit Context(DataType type) : type(type) {}

  Status AllocatePersistent(int64_t bytes, std::shared_ptr<horovod::common::PersistentBuffer>* buffer) override {
    *buffer = std::make_shared<Persistent>(bytes);
    return Status::OK();
  }

  Status AllocateOutput(TensorShape shape, std::shared_ptr<horovod::common::Tensor>* tensor,
                        std::shared_ptr<horovod::common::ReadyEvent>*) override {
    *tensor = output = std::make_shared<DeviceTensor>(type, shape);
    return Status::OK();
  }

  Status AllocateOutput(int index, TensorShape shape, std::shared_ptr<horovod::common::Tensor>* tensor,
                        std::shared_ptr<horovod::common::ReadyEvent>* event) override {
    if (index == 0) return AllocateOutput(shape, tensor, event);
    *tensor = std::make_shared<HostTensor>(std::vector<int32_t>(shape.num_elements()));
    return Status::OK();
  }

  Status AllocateZeros(int64_t count, DataType dtype, std::shared_ptr<horovod::common::Tensor>* tensor) override {
    auto zeros = std::make_shared<DeviceTensor>(dtype, TensorShape({count}));
    send(compute_stream(), "zeros", {writes(zeros->data(), zeros->size())},
         [zeros] { std::memset(zeros->buffer.data, 0, zeros->buffer.bytes); });
    cudaStreamSynchronize(compute_stream());
    *tensor = zeros;
    return Status::OK();
  }

  horovod::common::Framework framework() const override { return horovod::common::Framework::PYTORCH; }

  const DataType type;
  std::shared_ptr<DeviceTensor> output;
};

// Where the compute stream is when it is made: what was sent there before has to be over.
struct ComputeEvent : horovod::common::ReadyEvent {
  ComputeEvent() {
    cudaEventCreateWithFlags(&handle, cudaEventBlockingSync | cudaEventDisableTiming);
    cudaEventRecord(handle, compute_stream());
  }
  bool Ready() const override { return cudaEventSynchronize(handle) == cudaSuccess; }
  cudaEvent_t event() const override { return handle; }

  cudaEvent_t handle;
};

inline horovod::common::ReadyEventList ready() {
  horovod::common::ReadyEventList list;
  list.AddReadyEvent(std::make_shared<ComputeEvent>());
  return list;
}

// An operation under way. As in Horovod's torch library, whoever waits for it lets the compute stream wait for what
// Horovod put behind it on its own stream.
class Handle {
public:
  horovod::common::StatusCallback callback() {
    return [state = state_](const Status& status) {
      std::lock_guard<std::mutex> guard(state->mutex);
      state->status = status;
      state->is_done = true;
      state->changed.notify_all();
    };
  }

  // Returns how it ended.
  Status wait() {
    std::unique_lock<std::mutex> guard(state_->mutex);
    if (!state_->changed.wait_for(guard, std::chrono::seconds(40), [&] { return state_->is_done; })) {
      fail("an operation does not end");
    }
    if (state_->status.event.event) cudaStreamWaitEvent(compute_stream(), *state_->status.event.event, 0);
    return state_->status;
  }

private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    Status status;
    bool is_done = false;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

// Ends the process unless an operation could be sent, or ended well.
inline void check(const Status& status, const std::string& what) {
  if (!status.ok() && !status.in_progress()) fail(what + ": " + status.reason());
}

} // namespace standin

#endif
