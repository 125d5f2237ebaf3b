// CUDA's runtime on the host: a stream is a queue with a thread, an event a place in it. Each operation starts late.

#ifndef HVDTRAIN_STANDIN_RUNTIME_H
#define HVDTRAIN_STANDIN_RUNTIME_H

#include <cuda_runtime.h>

#include <functional>
#include <string>
#include <vector>

#include "checker.h"

namespace standin {

// Puts an operation behind the others of a stream. It runs after a random delay (HVDTRAIN_STANDIN_SEED).
void send(cudaStream_t stream, const std::string& what, const std::vector<Access>& accesses, std::function<void()> run);

// An access of the host to device memory, which a test says itself.
void host_accesses(const std::string& what, const std::vector<Access>& accesses);

// What a stream has to wait for before it goes on: a wait of a kernel, as NCCL's for its peers.
// Returns false once `is_over` does not hold for so long that a test must have hung.
bool wait_until(const std::function<bool()>& is_over);

// From now on, device memory beyond so many bytes is refused.
void limit_memory(size_t bytes);

// From now on the device has failed: each wait and query says so, for ever.
void break_device();

// How many waits of the host for an event had it spin on a core, and not sleep.
int spinning_waits();

// How many communicators of NCCL's this rank has made: each takes memory of the device.
int communicators();

// The stream of the thread that trains: that of torch.cuda.current_stream().
cudaStream_t compute_stream();

// A stream whose operations are those of the host: over when they return. What waits there for an event waits at once.
cudaStream_t host_stream();

} // namespace standin

#endif
