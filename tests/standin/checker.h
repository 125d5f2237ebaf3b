// Which accesses to device memory are ordered: vector clocks over the host and streams, and a map of the latest accesses.

#ifndef HVDTRAIN_STANDIN_CHECKER_H
#define HVDTRAIN_STANDIN_CHECKER_H

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace standin {

// Who acts: the host, whose threads order each other with mutexes and count as one, or a stream.
using Actor = int;
constexpr Actor HOST = 0;

// For each actor, up to which of its actions another one knows that they are over.
using Clock = std::map<Actor, uint64_t>;

void join(Clock& clock, const Clock& other);

struct Access {
  const void* memory;
  size_t bytes;
  bool writes;
};

inline Access reads(const void* memory, size_t bytes) { return {memory, bytes, false}; }
inline Access writes(const void* memory, size_t bytes) { return {memory, bytes, true}; }

// Not safe for threads: the runtime has one lock for all of it.
class Checker {
public:
  Actor new_actor() { return ++actors_; }

  // An action of an actor: it comes after all that its clock holds. Ends the process where an access does not come
  // after the latest ones of others to the same memory.
  void act(Actor actor, Clock& clock, const std::string& what, const std::vector<Access>& accesses);

  // Memory that is allocated has no earlier accesses.
  void forget(const void* memory, size_t bytes);

private:
  struct Action {
    Actor actor = HOST;
    uint64_t time = 0;
    std::string what;
  };
  // Of the bytes from its key in the map to the next key.
  struct Piece {
    Action write;
    std::vector<Action> reads;
  };
  using Pieces = std::map<const char*, Piece>;

  Pieces::iterator cut(const char* place);
  void check(const Action& before, const Action& now, const Clock& clock, const Access& access, const char* how);

  Actor actors_ = HOST;
  Pieces pieces_;
};

// Writes what went wrong on this rank, and ends the process with status 86.
[[noreturn]] void fail(const std::string& what);

} // namespace standin

#endif
