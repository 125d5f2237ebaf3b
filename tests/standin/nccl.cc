// NCCL on one host: ranks exchange over shared memory, and end where they do not call the same operations.
//
// All ranks take part in a group of collective calls. In a group of sends and receives a rank waits for its partners
// alone, and one that has nothing to send or receive calls nothing.

#include <nccl.h>

#include <fcntl.h>
#include <immintrin.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "runtime.h"

using standin::fail;

namespace {

constexpr int MOST_RANKS = 16, MOST_CALLS = 64;
constexpr size_t ROOM = 64 << 20; // of a rank in shared memory: pages that nobody writes do not exist

enum Kind { ALLREDUCE, REDUCE, BROADCAST, REDUCE_SCATTER, ALLGATHER, SEND, RECEIVE };
const char* const NAMES[] = {"allreduce", "reduce", "broadcast", "reduce-scatter", "allgather", "send", "receive"};

// What a rank tells the others of one call.
struct Call {
  Kind kind;
  uint64_t count;
  ncclDataType_t type;
  ncclRedOp_t op;
  int root; // the other rank, of send and receive
  uint64_t offset; // of what is sent, in the rank's room
};

struct Rank {
  std::atomic<uint64_t> arrived, left; // numbers of groups of calls, from 1
  std::atomic<bool> is_there;
  int calls;
  Call call[MOST_CALLS];
};

// What one rank sends another one: the numbers of sends and of receives so far, and what was sent last.
struct Channel {
  std::atomic<uint64_t> sent, received;
  Call call;
};

struct Board {
  std::atomic<int> is_aborted;
  Rank rank[MOST_RANKS];
  Channel channel[MOST_RANKS][MOST_RANKS]; // [from][to]
};

size_t size_of(ncclDataType_t type) {
  switch (type) {
  case ncclInt8: case ncclUint8: return 1;
  case ncclFloat16: return 2;
  case ncclInt32: case ncclFloat32: return 4;
  default: return 8;
  }
}

struct Local {
  Call call;
  const void* in;
  void* out;
};

template <typename T> T combined(T a, T b, ncclRedOp_t op) {
  switch (op) {
  case ncclProd: return a * b;
  case ncclMax: return std::max(a, b);
  case ncclMin: return std::min(a, b);
  default: return a + b;
  }
}

template <typename T>
void reduce(const std::vector<const char*>& in, void* out, size_t count, ncclRedOp_t op) {
  auto result = static_cast<T*>(out);
  for (size_t i = 0; i < count; ++i) {
    T value = reinterpret_cast<const T*>(in[0])[i];
    for (size_t r = 1; r < in.size(); ++r) value = combined(value, reinterpret_cast<const T*>(in[r])[i], op);
    result[i] = op == ncclAvg ? value / T(in.size()) : value;
  }
}

void reduce_half(const std::vector<const char*>& in, void* out, size_t count, ncclRedOp_t op) {
  auto number = [](const char* from, size_t i) { return _cvtsh_ss(reinterpret_cast<const uint16_t*>(from)[i]); };
  for (size_t i = 0; i < count; ++i) {
    float value = number(in[0], i);
    for (size_t r = 1; r < in.size(); ++r) value = _cvtsh_ss(_cvtss_sh(combined(value, number(in[r], i), op), 0));
    static_cast<uint16_t*>(out)[i] = _cvtss_sh(op == ncclAvg ? value / in.size() : value, 0);
  }
}

void reduce(ncclDataType_t type, const std::vector<const char*>& in, void* out, size_t count, ncclRedOp_t op) {
  switch (type) {
  case ncclInt8: return reduce<int8_t>(in, out, count, op);
  case ncclUint8: return reduce<uint8_t>(in, out, count, op);
  case ncclInt32: return reduce<int32_t>(in, out, count, op);
  case ncclInt64: return reduce<int64_t>(in, out, count, op);
  case ncclFloat16: return reduce_half(in, out, count, op);
  case ncclFloat32: return reduce<float>(in, out, count, op);
  case ncclFloat64: return reduce<double>(in, out, count, op);
  }
}

} // namespace

struct ncclComm {
  int rank, size;
  Board* board;
  char* rooms;
  uint64_t groups = 0; // of collective calls, that this rank has sent
  std::atomic<int> exchanges{0}; // groups of sends and receives that are under way
  std::atomic<bool> is_aborted{false}, is_gone{false};
  std::atomic<ncclResult_t> error{ncclSuccess};

  char* room(int of) { return rooms + ROOM * of; }
  char* room(int from, int to) { return rooms + ROOM * (size + from * size + to); }

  // Whether others are there; not once this rank has given up. Like NCCL within a host, it does not notice that a
  // process is gone.
  template <typename Condition> bool wait(Condition are_there) {
    auto is_over = [&] {
      if (are_there()) return true;
      if (board->is_aborted) error = ncclRemoteError;
      return is_aborted.load();
    };
    if (!standin::wait_until(is_over)) fail("NCCL hangs: a rank did not call what others have called");
    return !is_aborted;
  }

  bool meet(std::atomic<uint64_t> Rank::*what, uint64_t number) {
    return wait([&] {
      return std::all_of(board->rank, board->rank + size, [&](Rank& each) { return (each.*what).load() >= number; });
    });
  }
};

namespace {

ncclComm& checked(ncclComm_t comm) {
  if (comm == nullptr) fail("NCCL is called without a communicator");
  if (comm->is_gone) fail("NCCL is called with a communicator that was destroyed or aborted");
  return *comm;
}

std::string described(const Call& call) {
  return std::string(NAMES[call.kind]) + " of " + std::to_string(call.count) + " numbers of type " +
         std::to_string(call.type) + ", operation " + std::to_string(call.op) + ", root " + std::to_string(call.root);
}

bool is_exchange(const Call& call) { return call.kind == SEND || call.kind == RECEIVE; }

// Ends the process where another rank's group of calls is not this one's.
void compare(ncclComm& comm) {
  auto& mine = comm.board->rank[comm.rank];
  for (int r = 0; r < comm.size; ++r) {
    auto& other = comm.board->rank[r];
    for (int i = 0; i < std::max(mine.calls, other.calls); ++i) {
      auto a = i < mine.calls ? described(mine.call[i]) : "nothing";
      auto b = i < other.calls ? described(other.call[i]) : "nothing";
      if (a != b) fail("NCCL: this rank calls " + a + ", rank " + std::to_string(r) + " " + b);
    }
  }
}

void finish(ncclComm& comm, const Local& local, int i) {
  auto& call = local.call;
  size_t bytes = call.count * size_of(call.type);
  std::vector<const char*> all;
  for (int r = 0; r < comm.size; ++r) all.push_back(comm.room(r) + comm.board->rank[r].call[i].offset);
  switch (call.kind) {
  case ALLREDUCE: return reduce(call.type, all, local.out, call.count, call.op);
  case REDUCE:
    if (call.root == comm.rank) reduce(call.type, all, local.out, call.count, call.op);
    return;
  case BROADCAST: std::memcpy(local.out, all[call.root], bytes); return;
  case REDUCE_SCATTER:
    for (auto& from : all) from += bytes * comm.rank;
    return reduce(call.type, all, local.out, call.count, call.op);
  case ALLGATHER:
    for (int r = 0; r < comm.size; ++r) std::memcpy(static_cast<char*>(local.out) + bytes * r, all[r], bytes);
    return;
  default: return;
  }
}

size_t bytes_in(const ncclComm& comm, const Call& call) {
  if (call.kind == RECEIVE || (call.kind == BROADCAST && call.root != comm.rank)) return 0;
  return call.count * size_of(call.type) * (call.kind == REDUCE_SCATTER ? comm.size : 1);
}

size_t bytes_out(const ncclComm& comm, const Call& call) {
  if (call.kind == SEND || (call.kind == REDUCE && call.root != comm.rank)) return 0;
  return call.count * size_of(call.type) * (call.kind == ALLGATHER ? comm.size : 1);
}

bool send(ncclComm& comm, const Local& local) {
  auto& channel = comm.board->channel[comm.rank][local.call.root];
  if (!comm.wait([&] { return channel.received == channel.sent; })) return false;
  channel.call = local.call;
  auto bytes = bytes_in(comm, local.call);
  // Of what is too large for the room, ranks compare their calls alone.
  if (bytes <= ROOM) std::memcpy(comm.room(comm.rank, local.call.root), local.in, bytes);
  ++channel.sent;
  return true;
}

bool receive(ncclComm& comm, const Local& local) {
  auto& call = local.call;
  auto& channel = comm.board->channel[call.root][comm.rank];
  if (!comm.wait([&] { return channel.sent > channel.received; })) return false;
  auto& theirs = channel.call;
  if (theirs.count != call.count || theirs.type != call.type) {
    fail("NCCL: this rank calls " + described(call) + ", rank " + std::to_string(call.root) + " " + described(theirs));
  }
  auto bytes = bytes_out(comm, call);
  if (bytes <= ROOM) std::memcpy(local.out, comm.room(call.root, comm.rank), bytes);
  ++channel.received;
  return true;
}

// A group of sends and receives, on the stream's thread.
void exchange(ncclComm& comm, const std::vector<Local>& group) {
  // All sends first, so that no rank waits for another one that waits for it.
  for (auto kind : {SEND, RECEIVE}) {
    for (auto& local : group) {
      if (local.call.kind == kind && !(kind == SEND ? send(comm, local) : receive(comm, local))) return;
    }
  }
  --comm.exchanges;
}

// A group of calls, on the stream's thread. A rank that is aborted leaves what it should have received as it is.
void run(ncclComm& comm, uint64_t number, const std::vector<Local>& group) {
  auto& mine = comm.board->rank[comm.rank];
  if (!comm.meet(&Rank::left, number - 1)) return;
  mine.calls = static_cast<int>(group.size());
  size_t used = 0;
  bool is_large = false;
  for (size_t i = 0; i < group.size(); ++i) {
    mine.call[i] = group[i].call;
    mine.call[i].offset = used;
    auto bytes = bytes_in(comm, group[i].call);
    is_large |= used + bytes > ROOM;
    if (!is_large) std::memcpy(comm.room(comm.rank) + used, group[i].in, bytes);
    used += (bytes + 63) / 64 * 64;
  }
  mine.arrived = number;
  if (!comm.meet(&Rank::arrived, number)) return;
  compare(comm);
  for (size_t i = 0; i < group.size() && !is_large; ++i) finish(comm, group[i], static_cast<int>(i));
  mine.left = number;
}

// NCCL's documentation allows what is received in the place of what is sent, and no other overlap.
void check_overlap(const ncclComm& comm, const Local& local) {
  size_t in = bytes_in(comm, local.call), out = bytes_out(comm, local.call);
  auto from = static_cast<const char*>(local.in);
  auto to = static_cast<const char*>(local.out);
  if (in == 0 || out == 0 || from + in <= to || to + out <= from) return;
  size_t part = local.call.count * size_of(local.call.type) * comm.rank;
  auto place = local.call.kind == REDUCE_SCATTER ? from + part : from;
  auto other = local.call.kind == ALLGATHER ? to + part : to;
  if (place != other) fail("NCCL: " + described(local.call) + " receives over a part of what it sends");
}

std::atomic<int> communicators_{0};

thread_local int depth_ = 0;
thread_local std::vector<Local> group_;
thread_local ncclComm* comm_ = nullptr;
thread_local cudaStream_t stream_ = nullptr;

ncclResult_t flush() {
  if (group_.empty()) return ncclSuccess;
  auto& comm = *comm_;
  std::vector<standin::Access> accesses;
  for (auto& local : group_) accesses.push_back(standin::reads(local.in, bytes_in(comm, local.call)));
  for (auto& local : group_) accesses.push_back(standin::writes(local.out, bytes_out(comm, local.call)));
  auto what = std::string("NCCL's ") + NAMES[group_[0].call.kind];
  std::function<void()> work;
  if (is_exchange(group_[0].call)) {
    ++comm.exchanges;
    work = [&comm, group = group_] { exchange(comm, group); };
  } else {
    work = [&comm, number = ++comm.groups, group = group_] { run(comm, number, group); };
  }
  standin::send(stream_, what, accesses, work);
  group_.clear();
  return ncclSuccess;
}

ncclResult_t add(Call call, const void* in, void* out, ncclComm_t handle, cudaStream_t stream) {
  auto& comm = checked(handle);
  if (call.root < 0 || call.root >= comm.size || call.count > uint64_t(1) << 40) return ncclInvalidArgument;
  if (!group_.empty() && (comm_ != handle || stream_ != stream)) fail("a group of NCCL's over two communicators");
  if (!group_.empty() && is_exchange(group_[0].call) != is_exchange(call)) fail("a group of NCCL's of both kinds");
  Local local{call, in, out};
  check_overlap(comm, local);
  comm_ = handle;
  stream_ = stream;
  group_.push_back(local);
  return depth_ > 0 ? ncclSuccess : flush();
}

} // namespace

int standin::communicators() { return communicators_; }

extern "C" {

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
  case ncclSuccess: return "no error";
  case ncclUnhandledCudaError: return "unhandled cuda error";
  case ncclRemoteError: return "remote process exited or there was a network error";
  default: return "invalid argument";
  }
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::random_device random;
  std::memset(id->internal, 0, sizeof id->internal);
  std::snprintf(id->internal, sizeof id->internal, "/hvdtrain-standin-%d-%08x%08x", getpid(), random(), random());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* handle, int size, ncclUniqueId id, int rank) {
  if (size > MOST_RANKS || rank < 0 || rank >= size) return ncclInvalidArgument;
  size_t bytes = sizeof(Board) + ROOM * size * (1 + size);
  int file = shm_open(id.internal, O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, bytes) != 0) return ncclSystemError;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return ncclSystemError;
  auto board = static_cast<Board*>(memory);
  board->rank[rank].is_there = true;
  auto all_there = [&] {
    return std::all_of(board->rank, board->rank + size, [](Rank& each) { return each.is_there.load(); });
  };
  if (!standin::wait_until(all_there)) fail("NCCL hangs: not all ranks make the communicator");
  shm_unlink(id.internal); // each rank has it by now: nothing is left behind, whoever dies
  auto comm = new ncclComm;
  comm->rank = rank;
  comm->size = size;
  comm->board = board;
  comm->rooms = static_cast<char*>(memory) + sizeof(Board);
  *handle = comm;
  ++communicators_;
  return ncclSuccess;
}

// As NCCL's, it waits for what was called before. What was sent has to be received by then.
ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  auto& comm = checked(handle);
  auto is_over = [&] {
    auto channels = comm.board->channel[comm.rank];
    return comm.board->rank[comm.rank].left >= comm.groups && comm.exchanges == 0 &&
           std::all_of(channels, channels + comm.size, [](Channel& each) { return each.received == each.sent; });
  };
  if (!standin::wait_until(is_over)) {
    fail("NCCL hangs: a communicator is destroyed while its operations wait for other ranks");
  }
  comm.is_gone = true;
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t handle) {
  auto& comm = checked(handle);
  comm.board->is_aborted = 1;
  comm.is_aborted = true;
  comm.is_gone = true;
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* error) {
  *error = checked(handle).error;
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  ++depth_;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() { return --depth_ > 0 ? ncclSuccess : flush(); }

ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return add({ALLREDUCE, count, type, op, 0, 0}, send, receive, comm, stream);
}

ncclResult_t ncclReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return add({REDUCE, count, type, op, root, 0}, send, receive, comm, stream);
}

ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return add({BROADCAST, count, type, ncclSum, root, 0}, send, receive, comm, stream);
}

ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  return add({REDUCE_SCATTER, count, type, op, 0, 0}, send, receive, comm, stream);
}

ncclResult_t ncclAllGather(const void* send, void* receive, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return add({ALLGATHER, count, type, ncclSum, 0, 0}, send, receive, comm, stream);
}

ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return add({SEND, count, type, ncclSum, peer, 0}, send, nullptr, comm, stream);
}

ncclResult_t ncclRecv(void* receive, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return add({RECEIVE, count, type, ncclSum, peer, 0}, nullptr, receive, comm, stream);
}
}
