"""What is changed in Horovod's sdist so that ranks negotiate where there is something to send, and not all the time."""

from __future__ import annotations

from hvdtrain.horovod_build.edit import Edit

ROUNDS: tuple[Edit, ...] = (
    Edit(
        "horovod/common/tensor_queue.h",
        "  void RemoveJoinTensor();\n",
        "  void RemoveJoinTensor();\n\n"
        "  // Nothing waits to be sent, and nothing is under way.\n"
        "  bool IsEmpty() const {\n"
        "    std::lock_guard<std::mutex> guard(mutex_);\n"
        "    return tensor_table_.empty();\n"
        "  }\n",
        "for the edits after",
    ),
    Edit(
        "horovod/common/global_state.h",
        "  // Whether collective context has been completed on the background thread.\n",
        "  // Time point when this process last took part in a round of negotiation.\n"
        "  std::chrono::steady_clock::time_point last_round;\n\n"
        "  // Whether collective context has been completed on the background thread.\n",
        "for the next edit",
    ),
    Edit(
        "horovod/common/operations.cc",
        "bool RunLoopOnce(HorovodGlobalState& state);\n",
        "bool RunLoopOnce(HorovodGlobalState& state);\n\n"
        "// Without this rank no tensor goes anywhere; but where there are several process sets, others may not\n"
        "// need it for theirs, and still wait for it in the round of all.\n"
        "bool HasNothingToSay(HorovodGlobalState& state) {\n"
        "  if (state.shut_down || state.dynamic_process_sets || state.parameter_manager.IsAutoTuning() ||\n"
        "      state.process_set_table.Ids().size() != 1) {\n"
        "    return false;\n"
        "  }\n"
        "  auto& everybody = state.process_set_table.Get(0);\n"
        "  return !everybody.joined && everybody.tensor_queue.IsEmpty();\n"
        "}\n",
        "for the next edit",
    ),
    Edit(
        "horovod/common/operations.cc",
        "  if (state.mark_cycles_in_timeline) {\n    // Mark start of the new cycle.\n",
        "  // Now and then all the same: for shutdowns, stalls, and what else ranks hear of in a round.\n"
        "  auto silence = std::chrono::microseconds(long(state.parameter_manager.CycleTimeMs() * 20000.));\n"
        "  if (HasNothingToSay(state) && state.last_cycle_start - state.last_round < silence) {\n"
        "    return true;\n"
        "  }\n"
        "  state.last_round = state.last_cycle_start;\n\n"
        "  if (state.mark_cycles_in_timeline) {\n    // Mark start of the new cycle.\n",
        "a rank without tensors waited in a round for the others', who then had to take another: 70 us of LeNet's step",
    ),
)
