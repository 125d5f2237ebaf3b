#include "gloo/transport/tcp/proof.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <iostream>
#include <list>
#include <thread>
#include <vector>

#include "../../../../../horovod/common/hvdtrain_proof.h"
#include "gloo/common/error.h"

namespace gloo {
namespace transport {
namespace tcp {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr size_t kNonceBytes = 16;
constexpr size_t kHmacBytes = 32;
constexpr size_t kHelloBytes = kNonceBytes + kHmacBytes;

// A rank sends its hello with its first packet, or the next one.
constexpr auto kHelloTime = milliseconds(3000);
// Connections whose hello is awaited; of more the oldest one is closed.
constexpr size_t kMaxPending = 64;
// How often a listening side may hang up before that is taken for its answer. It may do so where it is flooded.
constexpr int kMaxAttempts = 20;
constexpr auto kElasticAnswerTime = milliseconds(600000);

class Fd {
 public:
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  ~Fd() {
    if (fd_ >= 0) {
      ::close(fd_);
    }
  }
  int get() const {
    return fd_;
  }
  int release() {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }

 private:
  int fd_;
};

class Deadline {
 public:
  explicit Deadline(milliseconds limit)
      : never_(limit <= milliseconds::zero()), at_(Clock::now() + limit) {}

  bool isOver() const {
    return !never_ && Clock::now() >= at_;
  }

  // For poll(2): no longer than `most`.
  int left(milliseconds most = milliseconds(60000)) const {
    auto left = most;
    if (!never_) {
      left = std::min(left, std::chrono::duration_cast<milliseconds>(at_ - Clock::now()) + milliseconds(1));
    }
    return static_cast<int>(std::max(left, milliseconds::zero()).count());
  }

 private:
  bool never_;
  Clock::time_point at_;
};

[[noreturn]] void fail(const std::string& what) {
  throw ::gloo::IoException(GLOO_ERROR_MSG(what));
}

// Family, port and address alone: what follows them in a sockaddr_storage may be anything.
std::string plain(const Address& address) {
  const auto& storage = address.getSockaddr();
  if (storage.ss_family == AF_INET6) {
    const auto* in = reinterpret_cast<const struct sockaddr_in6*>(&storage);
    return "6" + std::string(reinterpret_cast<const char*>(&in->sin6_port), sizeof(in->sin6_port)) +
        std::string(reinterpret_cast<const char*>(&in->sin6_addr), sizeof(in->sin6_addr));
  }
  const auto* in = reinterpret_cast<const struct sockaddr_in*>(&storage);
  return "4" + std::string(reinterpret_cast<const char*>(&in->sin_port), sizeof(in->sin_port)) +
      std::string(reinterpret_cast<const char*>(&in->sin_addr), sizeof(in->sin_addr));
}

std::string helloProof(const std::string& key, const Address& listener, const std::string& nonce) {
  return hvdtrain::Hmac(key, "gloo connect\n" + plain(listener) + nonce);
}

std::string answerProof(const std::string& key, const std::string& nonce) {
  return hvdtrain::Hmac(key, "gloo accept\n" + nonce);
}

// Receives what is there, up to `size` bytes in all. False: there will be no more.
bool receive(int fd, std::string& bytes, size_t size) {
  char buffer[kHelloBytes];
  const auto got = ::recv(fd, buffer, size - bytes.size(), MSG_DONTWAIT);
  if (got > 0) {
    bytes.append(buffer, static_cast<size_t>(got));
    return true;
  }
  return got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
}

// A new connection's buffer takes these few bytes at once.
bool sendAll(int fd, const std::string& bytes) {
  return ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) == static_cast<ssize_t>(bytes.size());
}

void setOption(int fd, int level, int option, int value) {
  ::setsockopt(fd, level, option, &value, sizeof(value));
}

void reportRefusal(const Address& stranger) {
  static std::atomic<bool> reported{false};
  if (!reported.exchange(true)) {
    const auto& storage = stranger.getSockaddr();
    const auto port = storage.ss_family == AF_INET6
        ? reinterpret_cast<const struct sockaddr_in6*>(&storage)->sin6_port
        : reinterpret_cast<const struct sockaddr_in*>(&storage)->sin_port;
    auto text = stranger.str();
    text = text.substr(0, text.find(']') + 1) + ":" + std::to_string(ntohs(port));
    std::cerr << "A connection from " + text + " to this rank did not prove to be from this job, and was refused. " +
            "More of them are not reported.\n";
  }
}

struct Pending {
  Fd fd;
  Address from;
  Clock::time_point since;
  std::string hello;
};

enum class Verdict { kWaiting, kProven, kRefused };

Verdict judge(Pending& pending, const Address& self, const std::string& key) {
  const bool open = receive(pending.fd.get(), pending.hello, kHelloBytes);
  if (pending.hello.size() < kHelloBytes) {
    const bool late = Clock::now() - pending.since >= kHelloTime;
    return open && !late ? Verdict::kWaiting : Verdict::kRefused;
  }
  const auto nonce = pending.hello.substr(0, kNonceBytes);
  if (!hvdtrain::IsSame(pending.hello.substr(kNonceBytes), helloProof(key, self, nonce))) {
    return Verdict::kRefused;
  }
  // Where it has hung up meanwhile it comes again.
  return sendAll(pending.fd.get(), answerProof(key, nonce)) ? Verdict::kProven : Verdict::kRefused;
}

// One try: returns the proven socket, or -1 where the listening side hung up without an answer.
int tryToConnect(
    const Address& peer,
    const std::string& key,
    const Deadline& deadline,
    const Deadline& answerDeadline) {
  const auto& storage = peer.getSockaddr();
  const socklen_t length = storage.ss_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
  Fd fd(::socket(storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK, 0));
  if (fd.get() < 0) {
    fail(std::string("socket: ") + strerror(errno));
  }
  // Reuse of the source port is OK.
  setOption(fd.get(), SOL_SOCKET, SO_REUSEADDR, 1);
  setOption(fd.get(), IPPROTO_TCP, TCP_NODELAY, 1);
  if (::connect(fd.get(), reinterpret_cast<const struct sockaddr*>(&storage), length) < 0 && errno != EINPROGRESS &&
      errno != EINTR) {
    fail("connect " + peer.str() + ": " + strerror(errno));
  }
  struct pollfd pfd = {fd.get(), POLLOUT, 0};
  while (::poll(&pfd, 1, deadline.left()) <= 0) {
    if (deadline.isOver()) {
      fail("Connect timeout " + peer.str());
    }
  }
  int error = 0;
  socklen_t errorLength = sizeof(error);
  ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &errorLength);
  if (error == ECONNRESET) {
    return -1;
  }
  if (error != 0) {
    fail("connect " + peer.str() + ": " + strerror(error));
  }

  // The listening side answers when it comes to this pair. If its host is gone, it never does.
  setOption(fd.get(), SOL_SOCKET, SO_KEEPALIVE, 1);
  setOption(fd.get(), IPPROTO_TCP, TCP_KEEPIDLE, 10);
  setOption(fd.get(), IPPROTO_TCP, TCP_KEEPINTVL, 5);
  setOption(fd.get(), IPPROTO_TCP, TCP_KEEPCNT, 4);
  setOption(fd.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, 30000);
  const auto nonce = hvdtrain::RandomBytes(kNonceBytes);
  if (!sendAll(fd.get(), nonce + helloProof(key, peer, nonce))) {
    return -1;
  }
  std::string answer;
  pfd.events = POLLIN;
  while (answer.size() < kHmacBytes) {
    if (answerDeadline.isOver()) {
      fail("Connect timeout " + peer.str());
    }
    if (::poll(&pfd, 1, answerDeadline.left()) > 0 && !receive(fd.get(), answer, kHmacBytes)) {
      return -1;
    }
  }
  if (!hvdtrain::IsSame(answer, answerProof(key, nonce))) {
    fail("connect " + peer.str() + ": what listens there is not of this job");
  }
  setOption(fd.get(), SOL_SOCKET, SO_KEEPALIVE, 0);
  setOption(fd.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, 0);
  return fd.release();
}

} // namespace

std::string jobKey() {
  return hvdtrain::JobKey();
}

int acceptProven(
    int listener,
    const Address& self,
    const Address& peer,
    const std::string& key,
    milliseconds limit) {
  const Deadline deadline(limit);
  std::list<Pending> all; // the oldest first
  size_t refused = 0;
  const auto refuse = [&](std::list<Pending>::iterator pending) {
    reportRefusal(pending->from);
    ++refused;
    return all.erase(pending);
  };
  ::fcntl(listener, F_SETFL, ::fcntl(listener, F_GETFL) | O_NONBLOCK);

  while (!deadline.isOver()) {
    std::vector<struct pollfd> fds{{listener, POLLIN, 0}};
    for (const auto& pending : all) {
      fds.push_back({pending.fd.get(), POLLIN, 0});
    }
    ::poll(fds.data(), fds.size(), deadline.left(all.empty() ? milliseconds(60000) : milliseconds(100)));

    // As many as wait now; each is looked at before the next, so that whoever has sent its hello is not pushed out.
    for (int i = 0; i < 1024; ++i) {
      struct sockaddr_storage from;
      memset(&from, 0, sizeof(from));
      socklen_t length = sizeof(from);
      const int fd = ::accept4(listener, reinterpret_cast<struct sockaddr*>(&from), &length, SOCK_NONBLOCK);
      if (fd < 0) {
        const bool full = errno == EMFILE || errno == ENFILE;
        if (full && !all.empty()) {
          refuse(all.begin());
          continue;
        }
        if (full || errno == EBADF || errno == EINVAL || errno == ENOTSOCK) {
          fail(std::string("accept: ") + strerror(errno));
        }
        break; // nobody, or one that has gone
      }
      all.push_back({Fd(fd), Address(from), Clock::now(), ""});
      auto next = std::prev(all.end());
      auto verdict = judge(*next, self, key);
      if (verdict == Verdict::kWaiting && all.size() > kMaxPending) {
        next = all.begin();
        verdict = judge(*next, self, key);
      }
      if (verdict == Verdict::kProven) {
        return next->fd.release();
      }
      if (verdict == Verdict::kRefused || all.size() > kMaxPending) {
        refuse(next);
      }
    }
    for (auto pending = all.begin(); pending != all.end();) {
      const auto verdict = judge(*pending, self, key);
      if (verdict == Verdict::kProven) {
        return pending->fd.release();
      }
      pending = verdict == Verdict::kRefused ? refuse(pending) : std::next(pending);
    }
  }
  fail(
      "Connect timeout " + peer.str() +
      (refused == 0 ? "" : " (" + std::to_string(refused) + " connections without this job's key were refused)"));
}

int connectProven(const Address& peer, const std::string& key, milliseconds limit) {
  const Deadline deadline(limit);
  const char* elastic = std::getenv("HOROVOD_ELASTIC");
  const bool patient = elastic != nullptr && std::string(elastic) == "1" && limit > milliseconds::zero();
  const Deadline answerDeadline(patient ? std::max(limit, kElasticAnswerTime) : limit);
  for (int attempt = 1; attempt <= kMaxAttempts; ++attempt) {
    const int fd = tryToConnect(peer, key, deadline, answerDeadline);
    if (fd >= 0) {
      return fd;
    }
    std::this_thread::sleep_for(milliseconds(std::min(50 * attempt, 500)));
  }
  fail(
      "connect " + peer.str() + ": it hung up " + std::to_string(kMaxAttempts) +
      " times. Is HVDTRAIN_JOB_KEY the same for every rank?");
}

} // namespace tcp
} // namespace transport
} // namespace gloo
