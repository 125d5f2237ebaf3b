// harness SCENARIO: what one rank of a test does with Horovod's core on the stand-in, as a framework would.
//
// It prints "ok" at its end. A wrong number, a race or a wait that hangs ends it with status 86 and a line of
// "standin: rank R: ...".

#include <immintrin.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <numeric>
#include <thread>

#include "framework.h"

using namespace horovod::common;
using standin::check;
using standin::compute_stream;
using standin::Context;
using standin::DEVICE;
using standin::DeviceTensor;
using standin::fail;
using standin::Handle;
using standin::HostTensor;
using standin::ready;

namespace {

using Numbers = std::function<double(int64_t)>;
using TensorPointer = std::shared_ptr<DeviceTensor>;

constexpr int PAIR[] = {0, 1}, PAIR_SIZE = 2, PAIR_SET = 1; // a process set

int rank() { return horovod_rank(); }
int size() { return horovod_size(); }

double number(const DeviceTensor& tensor, int64_t i) {
  auto data = tensor.data();
  switch (tensor.type) {
  case HOROVOD_INT64: return static_cast<const int64_t*>(data)[i];
  case HOROVOD_INT32: return static_cast<const int32_t*>(data)[i];
  case HOROVOD_FLOAT16: return _cvtsh_ss(static_cast<const uint16_t*>(data)[i]);
  case HOROVOD_FLOAT64: return static_cast<const double*>(data)[i];
  default: return static_cast<const float*>(data)[i];
  }
}

void put(DeviceTensor& tensor, int64_t i, double value) {
  auto data = tensor.buffer.data;
  switch (tensor.type) {
  case HOROVOD_INT64: static_cast<int64_t*>(data)[i] = static_cast<int64_t>(value); return;
  case HOROVOD_INT32: static_cast<int32_t*>(data)[i] = static_cast<int32_t>(value); return;
  case HOROVOD_FLOAT16: static_cast<uint16_t*>(data)[i] = _cvtss_sh(static_cast<float>(value), 0); return;
  case HOROVOD_FLOAT64: static_cast<double*>(data)[i] = value; return;
  default: static_cast<float*>(data)[i] = static_cast<float>(value);
  }
}

// On the compute stream, as a backward pass would.
void fill(TensorPointer tensor, Numbers value) {
  standin::send(compute_stream(), "a backward pass", {standin::writes(tensor->data(), tensor->size())}, [=] {
    for (int64_t i = 0; i < tensor->dims.num_elements(); ++i) put(*tensor, i, value(i));
  });
}

// On the compute stream, as an update would.
void expect(TensorPointer tensor, Numbers value, const std::string& what) {
  standin::send(compute_stream(), "an update", {standin::reads(tensor->data(), tensor->size())}, [=] {
    double precision = tensor->type == HOROVOD_FLOAT16 ? 1e-3 : 1e-6;
    for (int64_t i = 0; i < tensor->dims.num_elements(); ++i) {
      double found = number(*tensor, i), wanted = value(i);
      if (!(std::abs(found - wanted) <= precision * std::abs(wanted))) {
        fail(what + ": number " + std::to_string(i) + " is " + std::to_string(found) + ", not " + std::to_string(wanted));
      }
    }
  });
}

TensorPointer tensor_of(int64_t rows, DataType type = HOROVOD_FLOAT32, int64_t columns = 1) {
  return std::make_shared<DeviceTensor>(type, columns == 1 ? TensorShape({rows}) : TensorShape({rows, columns}));
}

// Small integers, whose sums over ranks each type holds.
Numbers pattern(int step, int tensor, int of_rank) {
  return [=](int64_t i) { return (of_rank + 1.0) * ((step * 31 + tensor * 7 + i) % 16); };
}

Numbers over_ranks(int step, int tensor, double factor, int ranks = size()) {
  return [=](int64_t i) { return factor * ranks * (ranks + 1) / 2 * ((step * 31 + tensor * 7 + i) % 16); };
}

struct Reduction {
  DataType type = HOROVOD_FLOAT32;
  ReduceOp op = ReduceOp::AVERAGE;
  double before = 1.0, after = 1.0;
  int process_set = 0;

  double factor() const { return before * after / (op == ReduceOp::AVERAGE ? size() : 1); }
};

Handle allreduce(TensorPointer from, TensorPointer to, const std::string& name, const Reduction& how = {}) {
  Handle handle;
  check(EnqueueTensorAllreduce(std::make_shared<Context>(how.type), from, to, ready(), name, DEVICE, handle.callback(),
                               how.op, how.before, how.after, how.process_set),
        name);
  return handle;
}

// Steps of a training run: each rank sends its gradients in an order of its own, which Horovod fuses as they come.
void steps(int count, const Reduction& how, int64_t unit = 1) {
  const std::vector<int64_t> sizes{3, 1000, 17, 4096, 1, 20000, 255};
  int tensors = static_cast<int>(sizes.size());
  for (int step = 0; step < count; ++step) {
    std::vector<TensorPointer> gradients(tensors);
    std::vector<Handle> handles(tensors);
    for (int i = 0; i < tensors; ++i) {
      int t = (i + rank() + step) % tensors;
      gradients[t] = tensor_of(sizes[t] * unit, how.type);
      fill(gradients[t], pattern(step, t, rank()));
      handles[t] = allreduce(gradients[t], gradients[t], "gradient." + std::to_string(t), how);
    }
    for (int t = 0; t < tensors; ++t) {
      check(handles[t].wait(), "a gradient");
      expect(gradients[t], over_ranks(step, t, how.factor()), "gradient " + std::to_string(t));
    }
    cudaStreamSynchronize(compute_stream());
  }
}

// In no buffer with others: the factor is the last thing that happens to it.
void scaled_alone() {
  for (int step = 0; step < 5; ++step) {
    Reduction how{HOROVOD_FLOAT32, ReduceOp::SUM, 1.0, 0.25};
    auto gradient = tensor_of(1000);
    fill(gradient, pattern(step, 0, rank()));
    check(allreduce(gradient, gradient, "alone", how).wait(), "a gradient");
    expect(gradient, over_ranks(step, 0, how.factor()), "a gradient alone");
    cudaStreamSynchronize(compute_stream());
  }
}

void reduces() {
  steps(12, {});
  scaled_alone();
  steps(3, {HOROVOD_FLOAT32, ReduceOp::SUM, 0.5, 4.0});
  steps(3, {HOROVOD_FLOAT16, ReduceOp::AVERAGE});
  steps(3, {HOROVOD_FLOAT16, ReduceOp::SUM, 0.5, 2.0});
  steps(3, {HOROVOD_FLOAT64, ReduceOp::AVERAGE});
  steps(3, {HOROVOD_INT32, ReduceOp::SUM});
}

int64_t product(int64_t number, const std::pair<int64_t, int64_t>& ratio) {
  return static_cast<int64_t>(static_cast<__int128>(number) * ratio.first / ratio.second);
}

// What a double does not hold, in one buffer or each alone, on the device or on the host.
void large_integers(int count, int device, const Reduction& how, const std::pair<int64_t, int64_t>& ratio) {
  constexpr int NUMBERS = 6;
  const int64_t large = (int64_t(1) << 53) + 1;
  std::vector<int64_t> numbers{large, large + 2, -large, 49 * size(), 7, -7};
  std::vector<TensorPointer> tensors;
  std::vector<Handle> handles(count);
  for (int t = 0; t < count; ++t) {
    auto tensor = tensor_of(NUMBERS, HOROVOD_INT64);
    standin::send(compute_stream(), "a fill", {standin::writes(tensor->data(), tensor->size())}, [=] {
      auto data = static_cast<int64_t*>(tensor->buffer.data);
      for (int i = 0; i < NUMBERS; ++i) data[i] = rank() == 0 ? numbers[i] + t : 0;
    });
    if (device == CPU_DEVICE_ID) cudaStreamSynchronize(compute_stream());
    tensors.push_back(tensor);
  }
  for (int t = 0; t < count; ++t) {
    auto name = "integers." + std::to_string(t);
    auto events = device == CPU_DEVICE_ID ? ReadyEventList() : ready();
    check(EnqueueTensorAllreduce(std::make_shared<Context>(HOROVOD_INT64), tensors[t], tensors[t], events, name, device,
                                 handles[t].callback(), how.op, how.before, how.after),
          name);
  }
  for (int t = 0; t < count; ++t) {
    check(handles[t].wait(), "integers");
    auto tensor = tensors[t];
    standin::send(compute_stream(), "a check", {standin::reads(tensor->data(), tensor->size())}, [=] {
      for (int i = 0; i < NUMBERS; ++i) {
        auto found = static_cast<const int64_t*>(tensor->data())[i];
        auto wanted = product(numbers[i] + t, ratio);
        if (found != wanted) {
          fail("on device " + std::to_string(device) + " " + std::to_string(numbers[i] + t) + " times " +
               std::to_string(ratio.first) + "/" + std::to_string(ratio.second) + " is " + std::to_string(found) +
               ", not " + std::to_string(wanted));
        }
      }
    });
  }
  cudaStreamSynchronize(compute_stream());
}

void large_integers() {
  for (int device : {DEVICE, CPU_DEVICE_ID}) {
    for (int count : {4, 1}) {
      large_integers(count, device, {HOROVOD_INT64, ReduceOp::SUM}, {1, 1});
      large_integers(count, device, {HOROVOD_INT64, ReduceOp::AVERAGE}, {1, size()});
      large_integers(count, device, {HOROVOD_INT64, ReduceOp::SUM, 3.0}, {3, 1});
      large_integers(count, device, {HOROVOD_INT64, ReduceOp::SUM, 1.0, 1.0 / 49}, {1, 49});
      large_integers(count, device, {HOROVOD_INT64, ReduceOp::SUM, 1.0, 0.75}, {3, 4});
    }
  }
}

int64_t rows_of(int of_rank, int tensor) { return 3 + tensor + of_rank % 2; }

void gathers() {
  for (int step = 0; step < 4; ++step) {
    bool is_even = step % 2 == 0;
    std::vector<std::shared_ptr<Context>> contexts;
    std::vector<TensorPointer> parts;
    std::vector<Handle> handles(5);
    for (int t = 0; t < 5; ++t) {
      contexts.push_back(std::make_shared<Context>(HOROVOD_FLOAT32));
      parts.push_back(tensor_of(rows_of(is_even ? 0 : rank(), t), HOROVOD_FLOAT32, 7));
      fill(parts[t], pattern(step, t, rank()));
      check(EnqueueTensorAllgather(contexts[t], parts[t], ready(), "part." + std::to_string(t), DEVICE,
                                   handles[t].callback()),
            "allgather");
    }
    for (int t = 0; t < 5; ++t) {
      check(handles[t].wait(), "allgather");
      std::vector<double> wanted;
      for (int r = 0; r < size(); ++r) {
        for (int64_t i = 0; i < rows_of(is_even ? 0 : r, t) * 7; ++i) wanted.push_back(pattern(step, t, r)(i));
      }
      auto output = contexts[t]->output;
      if (output->dims.num_elements() != static_cast<int64_t>(wanted.size())) fail("allgather: another size");
      expect(output, [wanted](int64_t i) { return wanted[i]; }, "allgather");
    }
    cudaStreamSynchronize(compute_stream());
  }
}

void scatters() {
  for (int64_t rows : {4 * size(), 7, 2 * size() + 1}) {
    for (double before : {1.0, 0.5}) {
      std::vector<TensorPointer> tensors, outputs;
      std::vector<Handle> handles(3);
      int64_t mine = rows / size() + (rank() < rows % size());
      int64_t first = rank() * (rows / size()) + std::min<int64_t>(rank(), rows % size());
      for (int t = 0; t < 3; ++t) {
        tensors.push_back(tensor_of(rows, HOROVOD_FLOAT32, 5));
        fill(tensors[t], pattern(0, t, rank()));
        outputs.push_back(std::make_shared<DeviceTensor>(HOROVOD_FLOAT32, TensorShape({mine, 5})));
        check(EnqueueTensorReducescatter(std::make_shared<Context>(HOROVOD_FLOAT32), tensors[t], outputs[t], ready(),
                                         "scattered." + std::to_string(t), DEVICE, handles[t].callback(),
                                         ReduceOp::SUM, 0, before, 1.0),
              "reducescatter");
      }
      for (int t = 0; t < 3; ++t) {
        check(handles[t].wait(), "reducescatter");
        auto whole = over_ranks(0, t, before);
        expect(outputs[t], [=](int64_t i) { return whole(first * 5 + i); }, "reducescatter");
      }
      cudaStreamSynchronize(compute_stream());
    }
  }
}

void exchanges() {
  for (int root = 0; root < size(); ++root) {
    auto tensor = tensor_of(1000);
    fill(tensor, pattern(root, 0, rank()));
    Handle handle;
    check(EnqueueTensorBroadcast(std::make_shared<Context>(HOROVOD_FLOAT32), tensor, tensor, root, ready(), "weights",
                                 DEVICE, handle.callback()),
          "broadcast");
    check(handle.wait(), "broadcast");
    expect(tensor, pattern(root, 0, root), "broadcast");
    cudaStreamSynchronize(compute_stream());
  }
  // Each rank sends r + 1 numbers to rank r; the first one sends none to itself.
  auto count = [](int from, int to) { return from == 0 && to == 0 ? 0 : to + 1; };
  std::vector<int32_t> splits;
  for (int r = 0; r < size(); ++r) splits.push_back(count(rank(), r));
  auto tensor = tensor_of(std::accumulate(splits.begin(), splits.end(), 0));
  fill(tensor, [](int64_t) { return rank() + 1.0; });
  auto context = std::make_shared<Context>(HOROVOD_FLOAT32);
  Handle handle;
  check(EnqueueTensorAlltoall(context, tensor, std::make_shared<HostTensor>(splits), ready(), "exchange", DEVICE,
                              handle.callback()),
        "alltoall");
  check(handle.wait(), "alltoall");
  std::vector<double> wanted;
  for (int r = 0; r < size(); ++r) wanted.insert(wanted.end(), count(r, rank()), r + 1.0);
  expect(context->output, [wanted](int64_t i) { return wanted[i]; }, "alltoall");
  cudaStreamSynchronize(compute_stream());
}

// The last rank has no more data; the others go on, with zeros of its, over the same communicator.
void joins() {
  steps(2, {});
  int communicators = standin::communicators();
  bool is_last = rank() == size() - 1;
  double others = size() * (size() - 1) / 2;
  for (int step = 0; step < 3 && !is_last; ++step) {
    std::vector<TensorPointer> tensors;
    std::vector<Handle> handles;
    for (int t = 0; t < 4; ++t) {
      tensors.push_back(tensor_of(100 * (t + 1)));
      fill(tensors[t], pattern(step, t, rank()));
      handles.push_back(allreduce(tensors[t], tensors[t], "late." + std::to_string(t), {HOROVOD_FLOAT32, ReduceOp::SUM}));
    }
    for (int t = 0; t < 4; ++t) {
      check(handles[t].wait(), "a gradient beside a joined rank");
      expect(tensors[t], [=](int64_t i) { return others * ((step * 31 + t * 7 + i) % 16); }, "a joined rank's");
    }
    cudaStreamSynchronize(compute_stream());
  }
  Handle handle;
  auto last = std::make_shared<HostTensor>(std::vector<int32_t>{-1});
  check(EnqueueJoin(std::make_shared<Context>(HOROVOD_FLOAT32), last, ready(), JOIN_TENSOR_NAME, DEVICE, handle.callback()), "join");
  check(handle.wait(), "join");
  if (standin::communicators() != communicators) fail("joined ranks need another communicator");
}

// Ranks 0 and 1 reduce more often than the others, in a set of their own.
void process_sets() {
  for (int step = 0; step < 6; ++step) {
    auto tensor = tensor_of(1000);
    if (rank() < 2) {
      fill(tensor, pattern(step, 0, rank()));
      Reduction how{HOROVOD_FLOAT32, ReduceOp::SUM};
      how.process_set = PAIR_SET;
      check(allreduce(tensor, tensor, "pair", how).wait(), "a set's gradient");
      expect(tensor, over_ranks(step, 0, 1.0, 2), "a set's gradient");
    }
    steps(1, {});
    cudaStreamSynchronize(compute_stream());
  }
}

// More bytes than an int holds; nobody writes them, and only what ranks call is compared.
void large_gather() {
  auto tensor = std::make_shared<DeviceTensor>(HOROVOD_FLOAT32, TensorShape({(int64_t(1) << 29) + 1024}));
  auto context = std::make_shared<Context>(HOROVOD_FLOAT32);
  Handle handle;
  check(EnqueueTensorAllgather(context, tensor, ready(), "large", DEVICE, handle.callback()), "allgather");
  check(handle.wait(), "a large allgather");
}

// Ends with an error that names the cause, on each rank; and the next one is right.
void expect_refusal(Handle handle, const std::string& said) {
  auto status = handle.wait();
  if (status.ok()) fail("an operation that could not be done ended well");
  if (status.reason().find(said) == std::string::npos) fail("the error does not say '" + said + "': " + status.reason());
}

// There is no memory for the buffer of fused tensors on one rank, and later there is. A group is always fused.
void no_memory() {
  std::vector<TensorPointer> tensors{tensor_of(100), tensor_of(200)};
  if (rank() == size() - 1) standin::limit_memory(64 << 10);
  for (int attempt = 0; attempt < 2; ++attempt) {
    std::vector<std::shared_ptr<OpContext>> contexts(2, std::make_shared<Context>(HOROVOD_FLOAT32));
    std::vector<std::shared_ptr<Tensor>> group(tensors.begin(), tensors.end());
    for (int t = 0; t < 2; ++t) fill(tensors[t], pattern(0, t, rank()));
    std::vector<ReadyEventList> events{ready(), ready()};
    std::vector<std::string> names{"fused.0", "fused.1"};
    std::vector<Handle> handles(2);
    std::vector<StatusCallback> callbacks{handles[0].callback(), handles[1].callback()};
    check(EnqueueTensorAllreduces(contexts, group, group, events, names, DEVICE, callbacks), "a group");
    for (auto& handle : handles) expect_refusal(handle, "out of memory");
  }
  cudaStreamSynchronize(compute_stream());
  standin::limit_memory(SIZE_MAX);
  steps(2, {});
}

[[noreturn]] void end() {
  std::puts("ok");
  std::fflush(stdout);
  std::_Exit(0);
}

// One rank cannot make the output of a gather or of an alltoall; the others have sent theirs.
void no_output_memory(const std::function<Handle(std::shared_ptr<Context>, TensorPointer)>& send) {
  steps(2, {});
  auto tensor = tensor_of(1 << 20);
  fill(tensor, pattern(0, 0, rank()));
  auto context = std::make_shared<Context>(HOROVOD_FLOAT32);
  bool is_full = rank() == size() - 1;
  if (is_full) standin::limit_memory(1 << 20);
  expect_refusal(send(context, tensor), is_full ? "rank " + std::to_string(rank()) + ": no memory for what" : "");
  if (is_full) {
    // Not before Horovod has ended: the others would hear of it from the end of this process.
    Handle next;
    auto status = EnqueueTensorAllreduce(context, tensor, tensor, ready(), "next", DEVICE, next.callback());
    if (status.ok() || status.in_progress()) expect_refusal(next, "shut down");
  }
  end();
}

void no_memory_to_gather() {
  no_output_memory([](std::shared_ptr<Context> context, TensorPointer tensor) {
    Handle handle;
    check(EnqueueTensorAllgather(context, tensor, ready(), "gathered", DEVICE, handle.callback()), "allgather");
    return handle;
  });
}

void no_memory_to_exchange() {
  no_output_memory([](std::shared_ptr<Context> context, TensorPointer tensor) {
    Handle handle;
    std::vector<int32_t> splits(size(), 1000);
    splits[0] = static_cast<int32_t>(tensor->dims.num_elements()) - 1000 * (size() - 1);
    check(EnqueueTensorAlltoall(context, tensor, std::make_shared<HostTensor>(splits), ready(), "exchanged", DEVICE,
                                handle.callback()),
          "alltoall");
    return handle;
  });
}

// The device of one rank fails: whoever waits hears of it on each rank, and no process ends without a word.
void broken_device() {
  steps(2, {});
  bool is_broken = rank() == size() - 1;
  auto tensor = tensor_of(1000);
  fill(tensor, pattern(0, 0, rank()));
  if (is_broken) {
    // Over on the host, and under way on the device.
    standin::send(compute_stream(), "a long computation", {standin::writes(tensor->data(), tensor->size())},
                  [] { std::this_thread::sleep_for(std::chrono::seconds(2)); });
  }
  auto handle = allreduce(tensor, tensor, "broken");
  if (is_broken) {
    std::this_thread::sleep_for(std::chrono::seconds(1));
    standin::break_device();
    expect_refusal(handle, "CUDA_LAUNCH_BLOCKING=1");
  } else {
    expect_refusal(handle, "");
  }
  end();
}

// A rank dies within reductions: no other rank takes what is in its memory for a mean.
void dead_peer() {
  steps(2, {});
  constexpr int COUNT = 40;
  signal(SIGTERM, SIG_IGN); // the launcher's, once one rank is dead
  std::vector<TensorPointer> tensors;
  std::vector<Handle> handles;
  for (int t = 0; t < COUNT; ++t) {
    tensors.push_back(tensor_of(1000));
    fill(tensors[t], pattern(0, t, rank()));
  }
  if (rank() == size() - 1) {
    // So that the others' reductions are on their devices, and wait there for this rank's.
    standin::send(compute_stream(), "a long computation", {standin::writes(tensors[0]->data(), tensors[0]->size())}, [] {
      std::this_thread::sleep_for(std::chrono::seconds(1));
      kill(getpid(), SIGKILL);
    });
  }
  for (int t = 0; t < COUNT; ++t) {
    // With factors of their own, so that none is reduced together with others.
    Reduction how{HOROVOD_FLOAT32, ReduceOp::SUM, t + 1.0};
    handles.push_back(allreduce(tensors[t], tensors[t], "last." + std::to_string(t), how));
  }
  for (auto& handle : handles) expect_refusal(handle, "");
  end();
}

const std::map<std::string, void (*)()> SCENARIOS{
    {"reduces", reduces}, {"large-integers", large_integers}, {"gathers", gathers},
    {"scatters", scatters}, {"exchanges", exchanges}, {"joins", joins},
    {"process-sets", process_sets}, {"large-gather", large_gather}, {"no-memory", no_memory},
    {"no-memory-to-gather", no_memory_to_gather}, {"no-memory-to-exchange", no_memory_to_exchange},
    {"broken-device", broken_device}, {"dead-peer", dead_peer},
};

} // namespace

int main(int argc, char** argv) {
  if (argc != 2 || !SCENARIOS.count(argv[1])) fail("which scenario?");
  if (!horovod_init(nullptr, 0, PAIR, &PAIR_SIZE, argv[1] == std::string("process-sets"))) {
    fail("Horovod cannot be initialized");
  }
  if (std::getenv("HVDTRAIN_STANDIN_ASYNC_LATER")) horovod_set_async_completion(true);
  SCENARIOS.at(argv[1])();
  if (standin::spinning_waits() > 0) fail("a wait for the device keeps a core busy");
  horovod_shutdown();
  std::puts("ok");
}
