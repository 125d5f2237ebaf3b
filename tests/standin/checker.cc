#include "checker.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace standin {

void fail(const std::string& what) {
  const char* rank = std::getenv("HOROVOD_RANK");
  auto line = std::string("standin: rank ") + (rank ? rank : "?") + ": " + what + "\n";
  std::fputs(line.c_str(), stderr);
  std::fflush(stderr);
  // pytest holds back what its tests write there, and this ends it.
  if (const char* report = std::getenv("HVDTRAIN_STANDIN_REPORT")) {
    if (auto file = std::fopen(report, "a")) {
      std::fputs(line.c_str(), file);
      std::fclose(file);
    }
  }
  std::_Exit(86);
}

void join(Clock& clock, const Clock& other) {
  for (auto& [actor, time] : other) {
    clock[actor] = std::max(clock[actor], time);
  }
}

void Checker::act(Actor actor, Clock& clock, const std::string& what, const std::vector<Access>& accesses) {
  Action now{actor, ++clock[actor], what};
  for (auto& access : accesses) {
    if (access.bytes == 0) continue;
    auto begin = static_cast<const char*>(access.memory);
    auto first = cut(begin), last = cut(begin + access.bytes);
    for (auto piece = first; piece != last; ++piece) {
      check(piece->second.write, now, clock, access, access.writes ? "writes over" : "reads");
      if (access.writes) {
        for (auto& read : piece->second.reads) check(read, now, clock, access, "writes over what is read by");
        piece->second = {now, {}};
      } else {
        auto& reads = piece->second.reads;
        auto mine = std::find_if(reads.begin(), reads.end(), [&](auto& read) { return read.actor == actor; });
        if (mine == reads.end()) reads.push_back(now);
        else *mine = now;
      }
    }
  }
}

void Checker::forget(const void* memory, size_t bytes) {
  auto begin = static_cast<const char*>(memory);
  auto first = cut(begin), last = cut(begin + bytes);
  for (auto piece = first; piece != last; ++piece) piece->second = {};
}

Checker::Pieces::iterator Checker::cut(const char* place) {
  auto next = pieces_.lower_bound(place);
  if (next != pieces_.end() && next->first == place) return next;
  Piece before = next == pieces_.begin() ? Piece{} : std::prev(next)->second;
  return pieces_.emplace_hint(next, place, std::move(before));
}

void Checker::check(const Action& before, const Action& now, const Clock& clock, const Access& access, const char* how) {
  if (before.time == 0 || before.actor == now.actor) return;
  auto known = clock.find(before.actor);
  if (known != clock.end() && known->second >= before.time) return;
  auto name = [](Actor actor) { return actor == HOST ? std::string("the host") : "stream " + std::to_string(actor); };
  fail("race: " + now.what + " on " + name(now.actor) + " " + how + " " + before.what + " on " + name(before.actor) +
       ", and no wait orders them (" + std::to_string(access.bytes) + " bytes)");
}

} // namespace standin
