#include "runtime.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <random>
#include <thread>

using standin::Access;
using standin::Actor;
using standin::Checker;
using standin::Clock;

namespace {

constexpr size_t LARGE = 1 << 30; // memory that nobody touches does not exist
constexpr auto LIMIT = std::chrono::seconds(60); // for one wait: a test that waits longer hangs

// Never destroyed: what others keep is freed at the very end of the process.
std::mutex& lock_ = *new std::mutex; // of the checker and of all clocks
Checker& checker_ = *new Checker;
Clock& host_ = *new Clock;
std::atomic<bool> is_broken_{false};
std::atomic<int> spinning_waits_{0};

int environment(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value ? std::atoi(value) : otherwise;
}

} // namespace

struct CUstream_st {
  explicit CUstream_st(bool is_host = false) : is_host(is_host), actor(is_host ? standin::HOST : checker_.new_actor()) {
    if (!is_host) std::thread(&CUstream_st::loop, this).detach();
  }

  void push(std::function<void()> run) {
    std::lock_guard<std::mutex> guard(mutex);
    queue.push_back(std::move(run));
    ++sent;
    changed.notify_all();
  }

  bool is_past(uint64_t place) {
    std::lock_guard<std::mutex> guard(mutex);
    return done >= place;
  }

  void wait_for(uint64_t place) {
    std::unique_lock<std::mutex> guard(mutex);
    if (!changed.wait_for(guard, LIMIT, [&] { return done >= place || is_broken_; })) {
      standin::fail("stream " + std::to_string(actor) + " hangs at operation " + std::to_string(done + 1) + " of " +
                    std::to_string(place));
    }
  }

  uint64_t place() {
    std::lock_guard<std::mutex> guard(mutex);
    return sent;
  }

  const bool is_host;
  const Actor actor;
  Clock clock;

private:
  void loop() {
    std::minstd_rand random(environment("HVDTRAIN_STANDIN_SEED", 0) * 1000 + environment("HOROVOD_RANK", 0) * 100 + actor);
    for (;;) {
      std::function<void()> run;
      {
        std::unique_lock<std::mutex> guard(mutex);
        changed.wait(guard, [&] { return !queue.empty(); });
        run = std::move(queue.front());
        queue.pop_front();
      }
      // Mostly short, now and then longer than what the host does meanwhile.
      int most_us = random() % 8 == 0 ? 5000 : 300;
      std::this_thread::sleep_for(std::chrono::microseconds(random() % most_us));
      if (!is_broken_) run(); // a device that has failed does nothing more
      std::lock_guard<std::mutex> guard(mutex);
      ++done;
      changed.notify_all();
    }
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  uint64_t sent = 0, done = 0;
};

struct CUevent_st {
  unsigned flags = 0;
  // What was recorded last.
  CUstream_st* stream = nullptr;
  uint64_t place = 0;
  Clock clock;
};

namespace {

thread_local int device_ = 0;

CUstream_st& of(cudaStream_t stream) {
  static CUstream_st* default_stream = new CUstream_st;
  return stream ? *stream : *default_stream;
}

// While HVDTRAIN_STANDIN_OVERLAPS=1, the main thread alone may wait for what is on the stream of what it computes. By
// the time that another thread does, all that the main thread has sent meanwhile would be there.
void check_overlap(const CUstream_st& stream) {
  if (stream.is_host && syscall(SYS_gettid) != getpid() && environment("HVDTRAIN_STANDIN_OVERLAPS", 0) == 1) {
    standin::fail("a thread of Horovod's waits for what the main thread has sent to its stream meanwhile");
  }
}

// Memory between two pages that nobody may touch, of bytes that are NaN in each type of floats.
class Memory {
public:
  void* allocate(size_t bytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (used_ + bytes > limit_) return nullptr;
    size_t page = sysconf(_SC_PAGESIZE), whole = (bytes + page - 1) / page * page;
    auto base = static_cast<char*>(mmap(nullptr, whole + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (base == MAP_FAILED || mprotect(base + page, whole, PROT_READ | PROT_WRITE) != 0) return nullptr;
    if (bytes < LARGE) std::memset(base + page, 0xff, whole);
    // Its end is at the guard, as near as the alignment of CUDA's allocations lets it be.
    auto memory = base + page + (whole - bytes) / 256 * 256;
    blocks_[memory] = {base, whole + 2 * page, bytes};
    used_ += bytes;
    return memory;
  }

  // A later access is an invalid one, since no other memory gets these addresses.
  void release(void* memory) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = blocks_.find(memory);
    if (found == blocks_.end()) standin::fail("cudaFree of what cudaMalloc did not return");
    auto block = found->second;
    mprotect(block.base, block.whole, PROT_NONE);
    madvise(block.base, block.whole, MADV_DONTNEED);
    used_ -= block.bytes;
    blocks_.erase(found);
  }

  void limit(size_t bytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    limit_ = bytes;
  }

private:
  struct Block {
    char* base;
    size_t whole, bytes;
  };
  std::mutex mutex_;
  std::map<void*, Block> blocks_;
  size_t used_ = 0, limit_ = SIZE_MAX;
};

Memory& memory_ = *new Memory;

} // namespace

namespace standin {

void send(cudaStream_t handle, const std::string& what, const std::vector<Access>& accesses, std::function<void()> run) {
  auto& stream = of(handle);
  // The order of the queue is that of the checks.
  std::lock_guard<std::mutex> guard(lock_);
  ++host_[HOST];
  join(stream.clock, host_);
  checker_.act(stream.actor, stream.clock, what, accesses);
  stream.push(std::move(run));
}

void host_accesses(const std::string& what, const std::vector<Access>& accesses) {
  std::lock_guard<std::mutex> guard(lock_);
  checker_.act(HOST, host_, what, accesses);
}

bool wait_until(const std::function<bool()>& is_over) {
  auto end = std::chrono::steady_clock::now() + LIMIT;
  while (!is_over()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

void limit_memory(size_t bytes) { memory_.limit(bytes); }

void break_device() { is_broken_ = true; }

int spinning_waits() { return spinning_waits_; }

cudaStream_t compute_stream() {
  static CUstream_st* stream = new CUstream_st;
  return stream;
}

cudaStream_t host_stream() {
  static CUstream_st* stream = new CUstream_st(true);
  return stream;
}

} // namespace standin

extern "C" {

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
  case cudaSuccess: return "no error";
  case cudaErrorMemoryAllocation: return "out of memory";
  case cudaErrorNotReady: return "device not ready";
  case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
  default: return "invalid argument";
  }
}

cudaError_t cudaGetLastError() { return is_broken_ ? cudaErrorIllegalAddress : cudaSuccess; }

cudaError_t cudaGetDevice(int* device) {
  *device = device_;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  device_ = device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  *stream = new CUstream_st;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  auto& stream = of(handle);
  check_overlap(stream);
  if (stream.is_host) return cudaGetLastError();
  stream.wait_for(stream.place());
  std::lock_guard<std::mutex> guard(lock_);
  standin::join(host_, stream.clock);
  return cudaGetLastError();
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  *event = new CUevent_st;
  (*event)->flags = flags;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  auto& stream = of(handle);
  check_overlap(stream);
  std::lock_guard<std::mutex> guard(lock_);
  if (stream.is_host) {
    *event = {event->flags, nullptr, 0, host_};
  } else {
    *event = {event->flags, &stream, stream.place(), stream.clock};
  }
  return cudaGetLastError();
}

// As on the device, what was recorded when this is called: the event may be recorded again.
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  auto& stream = of(handle);
  if (stream.is_host) return cudaEventSynchronize(event);
  std::lock_guard<std::mutex> guard(lock_);
  if (event->stream == nullptr) {
    standin::join(stream.clock, event->clock);
    return cudaSuccess;
  }
  standin::join(stream.clock, event->clock);
  stream.push([from = event->stream, place = event->place] { from->wait_for(place); });
  return cudaGetLastError();
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  CUevent_st now;
  {
    std::lock_guard<std::mutex> guard(lock_);
    now = *event;
  }
  if (is_broken_) return cudaErrorIllegalAddress;
  if (now.stream && !now.stream->is_past(now.place)) return cudaErrorNotReady;
  std::lock_guard<std::mutex> guard(lock_);
  standin::join(host_, now.clock);
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  CUevent_st now;
  {
    std::lock_guard<std::mutex> guard(lock_);
    now = *event;
  }
  spinning_waits_ += !(now.flags & cudaEventBlockingSync);
  if (now.stream) now.stream->wait_for(now.place);
  if (is_broken_) return cudaErrorIllegalAddress;
  std::lock_guard<std::mutex> guard(lock_);
  standin::join(host_, now.clock);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  standin::send(stream, "a copy", {standin::reads(source, bytes), standin::writes(target, bytes)},
                [=] { std::memmove(target, source, bytes); });
  return cudaGetLastError();
}

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  *memory = memory_.allocate(bytes);
  if (*memory == nullptr) return cudaErrorMemoryAllocation;
  std::lock_guard<std::mutex> guard(lock_);
  checker_.forget(*memory, bytes);
  return cudaSuccess;
}

cudaError_t cudaFree(void* memory) {
  memory_.release(memory);
  return cudaSuccess;
}
}
