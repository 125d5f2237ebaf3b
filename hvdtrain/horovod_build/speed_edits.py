"""What is changed in Horovod's sdist so that nobody waits for a clock, and no memory is read twice."""

from __future__ import annotations

from hvdtrain.horovod_build.edit import Edit
from hvdtrain.horovod_build.round_edits import ROUNDS

# Whoever waits for a result: on a condition, not by asking again and again.
_WAIT = (
    Edit(
        "horovod/torch/handle_manager.h",
        "#include <memory>\n#include <mutex>\n",
        "#include <chrono>\n#include <condition_variable>\n#include <memory>\n#include <mutex>\n",
        "for the next edit",
    ),
    Edit(
        "horovod/torch/handle_manager.h",
        "  bool PollHandle(int handle);\n",
        "  bool PollHandle(int handle);\n"
        "  // Blocks until the operation is done, or for as long as `limit`; says whether it is done.\n"
        "  bool WaitFor(int handle, std::chrono::milliseconds limit);\n",
        "a waiting rank asked in a loop, on the cores that the others computed on",
    ),
    Edit(
        "horovod/torch/handle_manager.h",
        "  std::mutex mutex_;\n",
        "  std::mutex mutex_;\n  std::condition_variable done_;\n",
        "for the edit before",
    ),
    Edit(
        "horovod/torch/handle_manager.cc",
        "  results_[handle] = std::make_shared<Status>(status);\n}\n",
        "  results_[handle] = std::make_shared<Status>(status);\n"
        "  done_.notify_all();\n"
        "}\n\n"
        "bool HandleManager::WaitFor(int handle, std::chrono::milliseconds limit) {\n"
        "  std::unique_lock<std::mutex> lock(mutex_);\n"
        "  return done_.wait_for(lock, limit, [&] {\n"
        "    auto result = results_.find(handle);\n"
        "    if (result == results_.end()) {\n"
        '      throw std::invalid_argument("Handle " + std::to_string(handle) +\n'
        '                                  " was not created or has been cleared.");\n'
        "    }\n"
        "    return result->second != nullptr;\n"
        "  });\n"
        "}\n",
        "for the edits before",
    ),
    Edit(
        "horovod/torch/mpi_ops_v2.cc",
        "  while (true) {\n"
        "    if (handle_manager.PollHandle(handle)) break;\n"
        "    {\n"
        "      py::gil_scoped_release release_python_gil;\n"
        "      std::this_thread::yield();\n"
        "    }\n"
        "  }\n",
        "  if (!handle_manager.PollHandle(handle)) {\n"
        "    common::Waiting waiting;\n"
        "    bool done = false;\n"
        "    while (!done) {\n"
        "      {\n"
        "        py::gil_scoped_release release_python_gil;\n"
        "        done = handle_manager.WaitFor(handle, std::chrono::milliseconds(100));\n"
        "      }\n"
        "      // A signal must reach Python while its main thread waits here.\n"
        "      if (!done && PyErr_CheckSignals() != 0) {\n"
        "        throw py::error_already_set();\n"
        "      }\n"
        "    }\n"
        "  }\n",
        "a waiting rank took processor time from those that computed, and could not be interrupted",
    ),
)

# The background thread: it starts when there is something to do, not when its cycle is over.
_WAKE = (
    Edit(
        "horovod/common/global_state.h",
        "#include <queue>\n#include <thread>\n",
        "#include <condition_variable>\n#include <mutex>\n#include <queue>\n#include <thread>\n",
        "for the next edit",
    ),
    Edit(
        "horovod/common/global_state.h",
        "  // Time point when last cycle started.\n",
        "  // Ends the background thread's sleep before its cycle is over.\n"
        "  std::mutex wake_mutex;\n"
        "  std::condition_variable wake_up;\n"
        "  bool wake = false;\n\n"
        "  // Number of threads that wait for a result: as long as there are any, cycles are a twentieth as long.\n"
        "  std::atomic_int waiting{0};\n\n"
        "  // Time point when last cycle started.\n",
        "for the edits after",
    ),
    Edit(
        "horovod/common/operations.h",
        "// Check that Horovod is initialized.\nStatus CheckInitialized();\n",
        "// Check that Horovod is initialized.\nStatus CheckInitialized();\n\n"
        "// Held by a thread while it waits for a result.\n"
        "class Waiting {\n"
        "public:\n"
        "  Waiting();\n"
        "  ~Waiting();\n"
        "  Waiting(const Waiting&) = delete;\n"
        "};\n\n"
        "// Held by an operation of a graph until it is done. On a GPU by none: the host runs ahead of it, and what\n"
        "// was sent in a whole cycle is fused.\n"
        "inline std::shared_ptr<Waiting> InFlight(int device) {\n"
        "  return device == CPU_DEVICE_ID ? std::make_shared<Waiting>() : nullptr;\n"
        "}\n",
        "for the edits after",
    ),
    Edit(
        "horovod/common/operations.cc",
        "bool RunLoopOnce(HorovodGlobalState& state) {\n",
        "void WakeBackgroundThread() {\n"
        "  {\n"
        "    std::lock_guard<std::mutex> guard(horovod_global.wake_mutex);\n"
        "    horovod_global.wake = true;\n"
        "  }\n"
        "  horovod_global.wake_up.notify_one();\n"
        "}\n\n"
        "bool RunLoopOnce(HorovodGlobalState& state) {\n",
        "for the next edits",
    ),
    Edit(
        "horovod/common/operations.cc",
        "Status CheckInitialized() {\n",
        "Waiting::Waiting() {\n"
        "  horovod_global.waiting++;\n"
        "  WakeBackgroundThread();\n"
        "}\n\n"
        "Waiting::~Waiting() { horovod_global.waiting--; }\n\n"
        "Status CheckInitialized() {\n",
        "a wait begins by waking the background thread",
    ),
    Edit(
        "horovod/common/operations.cc",
        "  auto sleep_duration = state.last_cycle_start +\n"
        "                        std::chrono::microseconds(long(\n"
        "                            state.parameter_manager.CycleTimeMs() * 1000.)) -\n"
        "                        start_time;\n"
        "  if (sleep_duration > std::chrono::steady_clock::duration::zero()) {\n"
        "    std::this_thread::sleep_for(sleep_duration);\n"
        "  }\n",
        "  auto cycle = std::chrono::microseconds(\n"
        "      long(state.parameter_manager.CycleTimeMs() * (state.waiting > 0 ? 50. : 1000.)));\n"
        "  auto sleep_duration = state.last_cycle_start + cycle - start_time;\n"
        "  {\n"
        "    std::unique_lock<std::mutex> lock(state.wake_mutex);\n"
        "    if (sleep_duration > std::chrono::steady_clock::duration::zero()) {\n"
        "      state.wake_up.wait_for(lock, sleep_duration, [&] { return state.wake; });\n"
        "    }\n"
        "    state.wake = false;\n"
        "  }\n",
        "a tensor waited for the end of the cycle, though somebody was waiting for it",
    ),
    Edit(
        "horovod/common/operations.cc",
        "  status = process_set.tensor_queue.AddToTensorQueueMulti(entries, messages);\n",
        "  int64_t bytes = 0;\n"
        "  for (const auto& e : entries) {\n"
        "    bytes += e.tensor == nullptr ? 0 : e.tensor->size();\n"
        "  }\n"
        "  status = process_set.tensor_queue.AddToTensorQueueMulti(entries, messages);\n"
        "  // What is too large to be fused gains nothing by waiting for company.\n"
        "  if (bytes >= horovod_global.parameter_manager.TensorFusionThresholdBytes()) {\n"
        "    WakeBackgroundThread();\n"
        "  }\n",
        "a large gradient waited for the end of the cycle, though nothing could join it",
    ),
)

# MPI sums a large tensor in pieces that stay in the processor's cache.
_PIECES = (
    Edit(
        "horovod/common/ops/mpi_operations.h",
        "               const std::vector<TensorTableEntry>& entries,\n"
        "               const Response& response) const override;\n"
        "};\n\n"
        "class MPIAllgather : public AllgatherOp {\n",
        "               const std::vector<TensorTableEntry>& entries,\n"
        "               const Response& response) const override;\n\n"
        "private:\n"
        "  // Bytes that are summed at a time, equal on all ranks; 0 is all.\n"
        "  long long piece_bytes_ = 0;\n"
        "};\n\n"
        "class MPIAllgather : public AllgatherOp {\n",
        "for the next edits",
    ),
    Edit(
        "horovod/common/ops/mpi_operations.cc",
        "MPIAllreduce::MPIAllreduce(HorovodGlobalState* global_state)\n    : AllreduceOp(global_state) {}\n",
        "MPIAllreduce::MPIAllreduce(HorovodGlobalState* global_state)\n"
        "    : AllreduceOp(global_state) {\n"
        '  auto setting = std::getenv("HVDTRAIN_MPI_PIECE_BYTES");\n'
        "  long long wanted = setting == nullptr ? 0 : std::strtoll(setting, nullptr, 10);\n"
        "  wanted = wanted > 0 ? wanted : 0;\n"
        "  // Ranks that cut differently would wait for each other for ever: the smallest holds, and 0 cuts nothing.\n"
        "  auto& mpi_context = global_state->process_set_table.Get(0).mpi_context;\n"
        "  if (MPI_Allreduce(&wanted, &piece_bytes_, 1, MPI_LONG_LONG, MPI_MIN,\n"
        "                    mpi_context.GetMPICommunicator(Communicator::GLOBAL)) != MPI_SUCCESS) {\n"
        '    throw std::runtime_error("MPI_Allreduce failed, see MPI output for details.");\n'
        "  }\n"
        "}\n",
        "how large the pieces are",
    ),
    Edit(
        "horovod/common/ops/mpi_operations.cc",
        "  if (prescale_factor != 1.0) {\n"
        "    // Execute prescaling op\n"
        "    ScaleBuffer(prescale_factor, entries, fused_input_data, buffer_data, num_elements);\n"
        "    fused_input_data = buffer_data; // for unfused, scale is done out of place\n"
        "  }\n\n"
        "  // Do allreduce.\n"
        "  timeline.ActivityStartAll(entries, MPI_ALLREDUCE);\n"
        "  const void* sendbuf = entries.size() > 1 || fused_input_data == buffer_data\n"
        "                        ? MPI_IN_PLACE : fused_input_data;\n"
        "  int op =\n"
        "      MPI_Allreduce(sendbuf, buffer_data, (int)num_elements,\n"
        "                    mpi_context.GetMPIDataType(first_entry.tensor),\n"
        "                    mpiOp,\n"
        "                    mpi_context.GetMPICommunicator(Communicator::GLOBAL));\n"
        "  if (op != MPI_SUCCESS) {\n"
        '    throw std::runtime_error("MPI_Allreduce failed, see MPI output for details.");\n'
        "  }\n"
        "  timeline.ActivityEndAll(entries);\n\n"
        "  if (postscale_factor != 1.0) {\n"
        "    // Execute postscaling op\n"
        "    ScaleBuffer(postscale_factor, entries, buffer_data, buffer_data, num_elements);\n"
        "  }\n",
        "  // Do allreduce, piece by piece: a piece is scaled while it is still in the cache,\n"
        "  // and MPI's own copies of it never reach main memory.\n"
        "  timeline.ActivityStartAll(entries, MPI_ALLREDUCE);\n"
        "  const int64_t element_bytes = mpi_context.GetMPITypeSize(first_entry.tensor->dtype());\n"
        "  const int64_t piece = piece_bytes_ > 0 ? std::max<int64_t>(1, piece_bytes_ / element_bytes)\n"
        "                                         : std::max<int64_t>(1, num_elements);\n"
        "  for (int64_t begin = 0; begin < num_elements; begin += piece) {\n"
        "    const int64_t count = std::min(piece, num_elements - begin);\n"
        "    const void* input = (const uint8_t*)fused_input_data + begin * element_bytes;\n"
        "    void* output = (uint8_t*)buffer_data + begin * element_bytes;\n"
        "    if (prescale_factor != 1.0) {\n"
        "      ScaleBuffer(prescale_factor, entries, input, output, count);\n"
        "      input = output; // for unfused, scale is done out of place\n"
        "    }\n"
        "    const void* sendbuf = entries.size() > 1 || input == output ? MPI_IN_PLACE : input;\n"
        "    int op = MPI_Allreduce(sendbuf, output, (int)count,\n"
        "                           mpi_context.GetMPIDataType(first_entry.tensor), mpiOp,\n"
        "                           mpi_context.GetMPICommunicator(Communicator::GLOBAL));\n"
        "    if (op != MPI_SUCCESS) {\n"
        '      throw std::runtime_error("MPI_Allreduce failed, see MPI output for details.");\n'
        "    }\n"
        "    if (postscale_factor != 1.0) {\n"
        "      ScaleBuffer(postscale_factor, entries, output, output, count);\n"
        "    }\n"
        "  }\n"
        "  timeline.ActivityEndAll(entries);\n",
        "64 MB took 29 ms on one host: three quarters were page faults in MPI's scratch memory and passes for the mean",
    ),
)

# TensorFlow's reductions write over their input where nobody else reads it.
_IN_PLACE = (
    Edit(
        "horovod/tensorflow/mpi_ops.cc",
        "    auto device = GetDeviceID(context);\n"
        "    auto tensor = context->input(0);\n"
        "    horovod::common::ReduceOp reduce_op = static_cast<horovod::common::ReduceOp>(reduce_op_);\n"
        "    Tensor* output;\n"
        "    OP_REQUIRES_OK_ASYNC(\n"
        "        context, context->allocate_output(0, tensor.shape(), &output), done);\n"
        "    // ReadyEvent makes sure input tensor is ready, and output is allocated.\n"
        "    common::ReadyEventList ready_event_list;\n"
        "#if HAVE_GPU\n"
        "    ready_event_list.AddReadyEvent(std::shared_ptr<common::ReadyEvent>(RecordReadyEvent(context)));\n"
        "#endif\n"
        "    auto hvd_context = std::make_shared<TFOpContext>(context);\n"
        "    auto hvd_tensor = std::make_shared<TFTensor>(tensor);\n"
        "    auto hvd_output = std::make_shared<TFTensor>(*output);\n"
        "    auto enqueue_result = EnqueueTensorAllreduce(\n",
        "    auto device = GetDeviceID(context);\n"
        "    horovod::common::ReduceOp reduce_op = static_cast<horovod::common::ReduceOp>(reduce_op_);\n"
        "    Tensor* output;\n"
        "    // Before a second reference to the input is taken, which would make it look shared.\n"
        "    OP_REQUIRES_OK_ASYNC(\n"
        "        context,\n"
        "        context->forward_input_or_allocate_output({0}, 0, context->input(0).shape(), &output), done);\n"
        "    auto tensor = context->input(0);\n"
        "    // ReadyEvent makes sure input tensor is ready, and output is allocated.\n"
        "    common::ReadyEventList ready_event_list;\n"
        "#if HAVE_GPU\n"
        "    ready_event_list.AddReadyEvent(std::shared_ptr<common::ReadyEvent>(RecordReadyEvent(context)));\n"
        "#endif\n"
        "    auto hvd_context = std::make_shared<TFOpContext>(context);\n"
        "    auto hvd_tensor = std::make_shared<TFTensor>(tensor);\n"
        "    auto hvd_output = std::make_shared<TFTensor>(*output);\n"
        "    auto enqueue_result = EnqueueTensorAllreduce(\n",
        "every reduction allocated, faulted in and filled as much memory again as the gradient has",
    ),
    Edit(
        "horovod/tensorflow/mpi_ops.cc",
        "      auto tensor = context->input(i);\n"
        "      OP_REQUIRES_OK_ASYNC(\n"
        "          context, context->allocate_output(i, tensor.shape(), &outputs[i]),\n"
        "          done);\n"
        "    }\n\n"
        "    // ReadyEvent makes sure input tensors are ready, and outputs are allocated.\n"
        "    common::ReadyEventList ready_event_list;\n"
        "#if HAVE_GPU\n"
        "    ready_event_list.AddReadyEvent(std::shared_ptr<common::ReadyEvent>(RecordReadyEvent(context)));\n"
        "#endif\n\n"
        "    for (int i = 0; i < num_tensors_; ++i) {\n"
        "      auto tensor = context->input(i);\n"
        "      ready_event_lists.emplace_back(ready_event_list); // Same for all tensors in group\n",
        "      OP_REQUIRES_OK_ASYNC(\n"
        "          context,\n"
        "          context->forward_input_or_allocate_output({i}, i, context->input(i).shape(), &outputs[i]),\n"
        "          done);\n"
        "    }\n\n"
        "    // ReadyEvent makes sure input tensors are ready, and outputs are allocated.\n"
        "    common::ReadyEventList ready_event_list;\n"
        "#if HAVE_GPU\n"
        "    ready_event_list.AddReadyEvent(std::shared_ptr<common::ReadyEvent>(RecordReadyEvent(context)));\n"
        "#endif\n\n"
        "    for (int i = 0; i < num_tensors_; ++i) {\n"
        "      auto tensor = context->input(i);\n"
        "      ready_event_lists.emplace_back(ready_event_list); // Same for all tensors in group\n",
        "likewise, for a group",
    ),
)

# A TensorFlow graph on the CPU waits for what it has sent, though no thread does.
_IN_FLIGHT = (
    Edit(
        "horovod/tensorflow/mpi_ops.cc",
        "[context, done](const common::Status& status)",
        "[context, done, waiting = common::InFlight(device)](const common::Status& status)",
        "a small tensor of TensorFlow's took a cycle or two, 1 to 2 ms, where torch's takes 0.2 ms",
        count=6,
    ),
    Edit(
        "horovod/tensorflow/mpi_ops.cc",
        "[context, done, callback_mutex, callback_count, num_tensors]",
        "[context, done, callback_mutex, callback_count, num_tensors, waiting = common::InFlight(device)]",
        "likewise, for a group of reductions",
    ),
)

# horovodrun: what the build was made with is written in the wheel.
_START = (
    Edit(
        "horovod/common/util.py",
        "@_cache\ndef mpi_built(verbose=False):\n",
        "@_cache\n"
        "def _data_planes():\n"
        '    """Return the data planes that the build recorded in the wheel."""\n'
        "    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, 'metadata.json')\n"
        "    with open(path) as record:\n"
        "        return json.load(record)['hvdtrain']['data_planes'].split(',')\n\n\n"
        "@_cache\n"
        "def mpi_built(verbose=False):\n"
        "    if not verbose:\n"
        "        return 'mpi' in _data_planes()\n",
        "horovodrun imported a whole framework in a process of its own, twice, before it started a rank: 2.4 s",
    ),
    Edit(
        "horovod/common/util.py",
        "@_cache\ndef gloo_built(verbose=False):\n",
        "@_cache\ndef gloo_built(verbose=False):\n    if not verbose:\n        return 'gloo' in _data_planes()\n",
        "likewise, for Gloo",
    ),
)

SPEED: tuple[Edit, ...] = (*_WAIT, *_WAKE, *ROUNDS, *_PIECES, *_IN_PLACE, *_IN_FLIGHT, *_START)
