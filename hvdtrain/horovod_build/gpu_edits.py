"""What is changed in Horovod's sdist so that no host waits for its GPU: who asks for a result lets its stream wait.

All of it acts under HOROVOD_ENABLE_ASYNC_COMPLETION alone. There Horovod calls an operation done once NCCL has it, with
an event that is behind it. As it comes, the thread that finishes operations lets *its own* stream wait for that event,
which is the device's default one: a caller on another stream reads gradients too early, and a backward pass on the
default one stops at each reduction, so that nothing overlaps.
"""

from __future__ import annotations

from hvdtrain.horovod_build.edit import Edit

_TORCH = "horovod/torch/mpi_ops_v2.cc"
_FINISH = "horovod/common/ops/gpu_operations.cc"

GPU: tuple[Edit, ...] = (
    Edit(
        _TORCH,
        "int DoAllreduce(::torch::Tensor tensor, ::torch::Tensor output, int divisor,\n",
        "#if HAVE_GPU\n"
        "// What is behind operations on their devices, until somebody asks for the results.\n"
        "struct DeviceWaits {\n"
        "  std::mutex mutex;\n"
        "  std::unordered_map<int, std::vector<std::pair<int, common::Event>>> of_handle;\n"
        "};\n\n"
        "static DeviceWaits device_waits;\n\n"
        "void WaitLater(int handle, int device, const common::Event& event) {\n"
        "  std::lock_guard<std::mutex> guard(device_waits.mutex);\n"
        "  device_waits.of_handle[handle].emplace_back(device, event);\n"
        "}\n\n"
        "// Lets the calling thread's streams wait, not its host.\n"
        "void LetStreamsWait(int handle) {\n"
        "  std::vector<std::pair<int, common::Event>> waits;\n"
        "  {\n"
        "    std::lock_guard<std::mutex> guard(device_waits.mutex);\n"
        "    auto found = device_waits.of_handle.find(handle);\n"
        "    if (found == device_waits.of_handle.end()) return;\n"
        "    waits.swap(found->second);\n"
        "    device_waits.of_handle.erase(found);\n"
        "  }\n"
        "  for (auto& wait : waits) {\n"
        "    with_device device_guard(wait.first);\n"
        "    HVD_GPU_CHECK(gpuStreamWaitEvent(GetGPUStream(wait.first), *(wait.second.event), 0));\n"
        "  }\n"
        "}\n"
        "#endif\n\n"
        "int DoAllreduce(::torch::Tensor tensor, ::torch::Tensor output, int divisor,\n",
        "for the next edits",
    ),
    Edit(
        _TORCH,
        "auto stream = GetGPUStream(device);",
        "// Not this thread's stream: that of whoever asks for the result.",
        "for the next edit",
        count=9,
    ),
    Edit(
        _TORCH,
        "HVD_GPU_CHECK(gpuStreamWaitEvent(stream, *(hvd_event.event), 0));",
        "WaitLater(handle, device, hvd_event);",
        "the default stream waited for each reduction as soon as that was sent, and no other stream ever did",
        count=9,
    ),
    Edit(
        _TORCH,
        "  auto status = handle_manager.ReleaseHandle(handle);\n  ThrowIfError(*status);\n",
        "  auto status = handle_manager.ReleaseHandle(handle);\n"
        "#if HAVE_GPU\n"
        "  LetStreamsWait(handle);\n"
        "#endif\n"
        "  ThrowIfError(*status);\n",
        "for the edits before",
    ),
    Edit(
        _TORCH,
        "void Reset() {\n  handle_manager.Reset();\n",
        "void Reset() {\n"
        "#if HAVE_GPU\n"
        "  {\n"
        "    std::lock_guard<std::mutex> guard(device_waits.mutex);\n"
        "    device_waits.of_handle.clear();\n"
        "  }\n"
        "#endif\n"
        "  handle_manager.Reset();\n",
        "handles begin at 1 again",
    ),
    # The event is recorded where the operation was sent. The thread that finishes comes later, and what was sent to the
    # stream in between would be waited for too.
    Edit(
        _FINISH,
        "  auto current_stream = *stream;\n",
        "  Event sent;\n"
        "  if (enable_async_completion && !global_state_->timeline.Initialized()) {\n"
        "    sent = gpu_context_->RecordEvent(*stream);\n"
        "  }\n",
        "for the next edits",
    ),
    Edit(
        _FINISH,
        "       enable_async_completion, current_stream, &global_state]() mutable {\n",
        "       enable_async_completion, sent, &global_state]() mutable {\n",
        "for the next edit",
    ),
    Edit(
        _FINISH,
        "        if (!enable_async_completion || timeline.Initialized()) {\n",
        "        if (!enable_async_completion || sent.event == nullptr) {\n",
        "a timeline may start between the two",
    ),
    Edit(
        _FINISH,
        "          event = gpu_context->RecordEvent(current_stream);\n",
        "          event = sent;\n",
        "a gradient was waited for together with those that were sent after it",
    ),
    Edit(
        _FINISH,
        "        if (enable_async_completion) {\n          gpu_context->ReleaseEvent(event);\n",
        "        if (event.event != nullptr) {\n          gpu_context->ReleaseEvent(event);\n",
        "under a timeline there is none, and nothing was put among those that are used again",
    ),
)
