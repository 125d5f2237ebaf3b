// NCCL on one host: ranks exchange over shared memory, and end where they do not call the same operations.

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

struct Board {
  std::atomic<int> is_aborted;
  Rank rank[MOST_RANKS];
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
  uint64_t groups = 0; // that this rank has sent
  std::atomic<bool> is_aborted{false}, is_gone{false};
  std::atomic<ncclResult_t> error{ncclSuccess};

  char* room(int of) { return rooms + ROOM * of; }

  // Whether all ranks are there; not once this rank has given up. Like NCCL within a host, it does not notice that a
  // process is gone.
  bool meet(std::atomic<uint64_t> Rank::*what, uint64_t number) {
    auto is_over = [&] {
      bool all = true;
      for (int r = 0; r < size; ++r) {
        if ((board->rank[r].*what).load() >= number) continue;
        all = false;
        if (board->is_aborted) error = ncclRemoteError;
      }
      return all || is_aborted;
    };
    if (!standin::wait_until(is_over)) fail("NCCL hangs: a rank did not call what others have called");
    return !is_aborted;
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
    if (mine.calls > 0 && is_exchange(mine.call[0])) continue; // `received` compares these
    for (int i = 0; i < std::max(mine.calls, other.calls); ++i) {
      auto a = i < mine.calls ? described(mine.call[i]) : "nothing";
      auto b = i < other.calls ? described(other.call[i]) : "nothing";
      if (a != b) fail("NCCL: this rank calls " + a + ", rank " + std::to_string(r) + " " + b);
    }
  }
}

const char* sent(ncclComm& comm, int rank, int call) {
  return comm.room(rank) + comm.board->rank[rank].call[call].offset;
}

// What rank `call.root` sends to this one with its send number `index`.
const char* received(ncclComm& comm, const Call& call, int index) {
  auto& peer = comm.board->rank[call.root];
  for (int i = 0; i < peer.calls; ++i) {
    auto& theirs = peer.call[i];
    if (theirs.kind != SEND || theirs.root != comm.rank || index-- > 0) continue;
    if (theirs.count != call.count || theirs.type != call.type) {
      fail("NCCL: this rank calls " + described(call) + ", rank " + std::to_string(call.root) + " " + described(theirs));
    }
    return sent(comm, call.root, i);
  }
  fail("NCCL: this rank calls " + described(call) + ", and nobody sends that");
}

void finish(ncclComm& comm, const Local& local, int i, int index) {
  auto& call = local.call;
  size_t bytes = call.count * size_of(call.type);
  std::vector<const char*> all;
  for (int r = 0; r < comm.size && !is_exchange(call); ++r) all.push_back(sent(comm, r, i));
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
  case RECEIVE: std::memcpy(local.out, received(comm, call, index), bytes); return;
  case SEND: return;
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
  std::vector<int> receives(comm.size, 0);
  // Of what is too large for the room, ranks compare their calls alone.
  for (size_t i = 0; i < group.size() && !is_large; ++i) {
    auto& call = group[i].call;
    finish(comm, group[i], static_cast<int>(i), call.kind == RECEIVE ? receives[call.root]++ : 0);
  }
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
  auto number = ++comm.groups;
  auto what = std::string("NCCL's ") + NAMES[group_[0].call.kind];
  standin::send(stream_, what, accesses,
                [&comm, number, group = std::move(group_)] { run(comm, number, group); });
  group_.clear();
  return ncclSuccess;
}

ncclResult_t add(Call call, const void* in, void* out, ncclComm_t handle, cudaStream_t stream) {
  auto& comm = checked(handle);
  if (call.root < 0 || call.root >= comm.size || call.count > uint64_t(1) << 40) return ncclInvalidArgument;
  if (!group_.empty() && (comm_ != handle || stream_ != stream)) fail("a group of NCCL's over two communicators");
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
  size_t bytes = sizeof(Board) + ROOM * size;
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

// As NCCL's, it waits for what was called before.
ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  auto& comm = checked(handle);
  auto number = comm.groups;
  if (!standin::wait_until([&] { return comm.board->rank[comm.rank].left >= number; })) {
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
