// Keeps what Open MPI listens at to the network interfaces of a job. Preloaded into mpirun and, where a job has several
// hosts, into its daemons and its ranks: Open MPI binds to every interface, whatever oob_tcp_if_include,
// btl_tcp_if_include or, in 5, prte_if_include says.
//
// It also refuses connections of this host's other users: Open MPI would do what its mpirun is asked by anybody who
// connects, without a look at who that is.
//
// HVDTRAIN_LISTEN_ON holds the interfaces: names, or networks as 10.1.2.0/24, with commas between them. Without it
// mpirun alone is kept, to loopback.
//
// No C++ library: a rank may bring along a newer one, which a preloaded library must not load an older one before.

#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

namespace {

bool in_mpirun = false;
char chosen[1024] = ""; // as HVDTRAIN_LISTEN_ON was when the program began

bool IsOneHost() { return chosen[0] == '\0'; }

bool IsInNetwork(in_addr_t address, char* word) {
  char* slash = strchr(word, '/');
  in_addr network;
  if (slash == nullptr) {
    return false;
  }
  *slash = '\0';
  bool is_known = inet_pton(AF_INET, word, &network) == 1;
  *slash = '/';
  int bits = atoi(slash + 1);
  in_addr_t mask = bits <= 0 || bits > 32 ? 0 : htonl(~in_addr_t{0} << (32 - bits));
  return is_known && (address & mask) == (network.s_addr & mask);
}

bool IsChosen(const ifaddrs& each) {
  char words[sizeof chosen];
  char* rest = strcpy(words, chosen);
  while (char* word = strsep(&rest, ",")) {
    auto address = reinterpret_cast<const sockaddr_in*>(each.ifa_addr);
    if (strcmp(word, each.ifa_name) == 0 ||
        (address->sin_family == AF_INET && IsInNetwork(address->sin_addr.s_addr, word))) {
      return true;
    }
  }
  return false;
}

// An address in IPv6's form: a socket of IPv6 takes connections of IPv4, too.
in6_addr InIpv6(const sockaddr* address) {
  in6_addr found = IN6ADDR_ANY_INIT;
  if (address->sa_family == AF_INET6) {
    found = reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr;
  } else if (address->sa_family == AF_INET) {
    found.s6_addr[10] = found.s6_addr[11] = 0xff;
    memcpy(found.s6_addr + 12, &reinterpret_cast<const sockaddr_in*>(address)->sin_addr, sizeof(in_addr));
  }
  return found;
}

bool IsLoopback(const in6_addr& address) {
  return IN6_IS_ADDR_LOOPBACK(&address) || (IN6_IS_ADDR_V4MAPPED(&address) && address.s6_addr[12] == 127);
}

// This host's addresses on the chosen interfaces.
struct Own {
  int count = 0; // of IPv4
  in_addr_t first = 0;
  bool has_asked = false; // for `asked`, which is among them
  in6_addr v6 = IN6ADDR_LOOPBACK_INIT; // loopback where they have none that leads further than one link

  explicit Own(const in6_addr& asked = in6addr_any) {
    ifaddrs* all = nullptr;
    if (getifaddrs(&all) != 0) {
      return;
    }
    for (ifaddrs* each = all; each != nullptr; each = each->ifa_next) {
      if (each->ifa_addr == nullptr || (each->ifa_flags & IFF_UP) == 0 || !IsChosen(*each)) {
        continue;
      }
      in6_addr own = InIpv6(each->ifa_addr);
      has_asked = has_asked || IN6_ARE_ADDR_EQUAL(&own, &asked);
      if (each->ifa_addr->sa_family == AF_INET) {
        auto address = reinterpret_cast<sockaddr_in*>(each->ifa_addr)->sin_addr.s_addr;
        first = count++ == 0 ? address : first;
      } else if (each->ifa_addr->sa_family == AF_INET6) {
        v6 = IN6_IS_ADDR_LINKLOCAL(&own) ? v6 : own;
      }
    }
    freeifaddrs(all);
  }
};

// Whether `peer` is on a network that this host has on other interfaces only. Linux takes what comes by them, too, for an
// address of a chosen one.
bool IsFromElsewhere(const in6_addr& peer) {
  ifaddrs* all = nullptr;
  if (!IN6_IS_ADDR_V4MAPPED(&peer) || getifaddrs(&all) != 0) {
    return false;
  }
  in_addr_t address;
  memcpy(&address, peer.s6_addr + 12, sizeof address);
  bool is_near = false, is_elsewhere = false;
  for (ifaddrs* each = all; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr || each->ifa_netmask == nullptr || each->ifa_addr->sa_family != AF_INET) {
      continue;
    }
    auto own = reinterpret_cast<sockaddr_in*>(each->ifa_addr)->sin_addr.s_addr;
    auto mask = reinterpret_cast<sockaddr_in*>(each->ifa_netmask)->sin_addr.s_addr;
    if ((own & mask) == (address & mask)) {
      (IsChosen(*each) ? is_near : is_elsewhere) = true;
    }
  }
  freeifaddrs(all);
  return is_elsewhere && !is_near;
}

bool IsHere(const in6_addr& address) {
  ifaddrs* all = nullptr;
  bool is_here = IsLoopback(address);
  if (is_here || getifaddrs(&all) != 0) {
    return is_here;
  }
  for (ifaddrs* each = all; each != nullptr && !is_here; each = each->ifa_next) {
    if (each->ifa_addr != nullptr) {
      in6_addr own = InIpv6(each->ifa_addr);
      is_here = !IN6_IS_ADDR_UNSPECIFIED(&own) && IN6_ARE_ADDR_EQUAL(&own, &address);
    }
  }
  freeifaddrs(all);
  return is_here;
}

in_port_t Port(const sockaddr* address) {
  // At the same place in both forms of an address.
  return ntohs(reinterpret_cast<const sockaddr_in*>(address)->sin_port);
}

// What the kernel's tables of connections write for an address: its words as this host's processor reads them.
void InTable(const in6_addr& address, bool is_v4, char (&text)[33]) {
  for (int i = is_v4 ? 3 : 0, at = 0; i < 4; ++i, at += 8) {
    uint32_t word;
    memcpy(&word, address.s6_addr + 4 * i, sizeof word);
    snprintf(text + at, 9, "%08X", word);
  }
}

constexpr long NOBODY = -1, UNKNOWN = -2;

// Return which user of this host has the socket at the other end of a connection: NOBODY where it was closed already,
// UNKNOWN where the kernel's tables cannot be read.
long Owner(const sockaddr* peer, const sockaddr* local) {
  static const char* const tables[] = {"/proc/self/net/tcp", "/proc/self/net/tcp6"};
  long found = UNKNOWN;
  for (const char* name : tables) {
    bool is_v4 = name == tables[0];
    FILE* table = fopen(name, "re");
    if (table == nullptr) {
      continue;
    }
    found = found == UNKNOWN ? NOBODY : found;
    char theirs[33], ours[33], from[33], to[33], line[512];
    InTable(InIpv6(peer), is_v4, theirs);
    InTable(InIpv6(local), is_v4, ours);
    while (found == NOBODY && fgets(line, sizeof line, table) != nullptr) {
      unsigned from_port, to_port;
      long user;
      unsigned long inode; // 0 for a socket that its process has closed; its user is then said to be root
      if (sscanf(line, " %*d: %32[0-9A-F]:%x %32[0-9A-F]:%x %*x %*x:%*x %*x:%*x %*x %ld %*d %lu", from, &from_port, to,
                 &to_port, &user, &inode) == 6 &&
          from_port == Port(peer) && to_port == Port(local) && strcmp(from, theirs) == 0 && strcmp(to, ours) == 0 &&
          inode != 0) {
        found = user;
      }
    }
    fclose(table);
  }
  return found;
}

// Whether another user of this host has connected; says so of the first.
bool IsOfOtherUser(const sockaddr* peer, const sockaddr* local) {
  static bool has_told = false;
  if (!IsHere(InIpv6(peer))) {
    return false;
  }
  long user = Owner(peer, local);
  for (int tries = 1; user == NOBODY && tries < 3; ++tries) {
    user = Owner(peer, local); // the tables change while they are read
  }
  if (user == UNKNOWN || user == static_cast<long>(geteuid())) {
    return false;
  }
  if (!has_told) {
    has_told = true;
    if (user == NOBODY) {
      fprintf(stderr, "hvdtrain: refused a connection to Open MPI by a program of this host that has closed it; the job "
                      "is not affected\n");
    } else {
      fprintf(stderr, "hvdtrain: refused a connection to Open MPI by user %ld of this host; the job is not affected\n",
              user);
    }
  }
  return true;
}

// Whether the code at `address` is Open MPI's: a rank's own servers, such as TensorBoard's, are its user's concern.
bool IsOpenMpis(void* address) {
  static const char* const own[] = {"libopen-rte", "libopen-pal", "libmpi",   "libpmix", "libprrte", "mca_",
                                    "mpirun",      "mpiexec",     "orterun", "orted",   "prte"};
  if (IsOneHost()) {
    return in_mpirun;
  }
  Dl_info where;
  if (dladdr(address, &where) == 0 || where.dli_fname == nullptr) {
    return false;
  }
  const char* slash = strrchr(where.dli_fname, '/');
  const char* name = slash == nullptr ? where.dli_fname : slash + 1;
  for (const char* each : own) {
    if (strncmp(name, each, strlen(each)) == 0) {
      return true;
    }
  }
  return false;
}

// Take this library, which stands first, out of what is preloaded into the programs that this one starts.
void StayAlone() {
  const char* rest = getenv("LD_PRELOAD") ? strchr(getenv("LD_PRELOAD"), ':') : nullptr;
  if (rest != nullptr) {
    char* kept = strdup(rest + 1);
    setenv("LD_PRELOAD", kept, 1);
    free(kept);
  } else {
    unsetenv("LD_PRELOAD");
  }
}

__attribute__((constructor)) void Begin() {
  const char* given = getenv("HVDTRAIN_LISTEN_ON");
  strncpy(chosen, given != nullptr ? given : "", sizeof chosen - 1);
  // Open MPI 4's mpirun and daemons, and the programs that 5's become: those that have its launcher's library.
  in_mpirun = dlsym(RTLD_DEFAULT, "orte_init") != nullptr || dlsym(RTLD_DEFAULT, "prte_init") != nullptr;
  if (!in_mpirun) {
    return;
  }
  // What 5's ranks ask its launcher by, OpenPMIx, listens on the first other interface before it takes loopback.
  setenv("PMIX_MCA_ptl_base_if_include", "127.0.0.0/8", 0);
  if (IsOneHost()) {
    StayAlone(); // its ranks need not listen
  } else if (Own().count == 0) {
    char host[256] = "";
    gethostname(host, sizeof host - 1);
    fprintf(stderr, "hvdtrain: host %s has no network interface %s: Open MPI listens on every one that it has\n", host,
            chosen);
  }
}

} // namespace

extern "C" int bind(int fd, const struct sockaddr* address, socklen_t length) noexcept {
  using Bind = int (*)(int, const struct sockaddr*, socklen_t);
  static Bind next = reinterpret_cast<Bind>(dlsym(RTLD_NEXT, "bind"));
  if (address == nullptr || !IsOpenMpis(__builtin_return_address(0))) {
    return next(fd, address, length);
  }
  if (address->sa_family == AF_INET && length >= sizeof(sockaddr_in)) {
    sockaddr_in local;
    memcpy(&local, address, sizeof local);
    if (local.sin_addr.s_addr == htonl(INADDR_ANY)) {
      Own own;
      local.sin_addr.s_addr = IsOneHost() ? htonl(INADDR_LOOPBACK) : own.count == 1 ? own.first : INADDR_ANY;
    }
    return next(fd, reinterpret_cast<sockaddr*>(&local), sizeof local);
  }
  if (address->sa_family == AF_INET6 && length >= sizeof(sockaddr_in6)) {
    sockaddr_in6 local;
    memcpy(&local, address, sizeof local);
    Own own;
    bool is_moved = IN6_IS_ADDR_UNSPECIFIED(&local.sin6_addr) && (IsOneHost() || own.count == 1);
    if (is_moved) {
      local.sin6_addr = IsOneHost() ? in6addr_loopback : own.v6;
    }
    int status = next(fd, reinterpret_cast<sockaddr*>(&local), sizeof local);
    if (status != 0 && is_moved && errno == EADDRNOTAVAIL) {
      // Most containers have IPv6 without an address of it, and Open MPI gives up its ranks' transport where it cannot
      // bind. IPv6 alone, so that this socket does not listen for IPv4 everywhere; `accept` looks at who comes.
      int on = 1;
      if (setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on) == 0) {
        return next(fd, address, length);
      }
      errno = EADDRNOTAVAIL;
    }
    return status;
  }
  return next(fd, address, length);
}

// Whether a connection is by an interface that was not chosen: where several are, one socket listens on all.
bool IsByOtherInterface(const sockaddr* peer, const sockaddr* local) {
  in6_addr at = InIpv6(local);
  if (IsOneHost() || IsLoopback(at)) {
    return !IsLoopback(at);
  }
  Own own(at);
  return own.count != 0 && (!own.has_asked || IsFromElsewhere(InIpv6(peer)));
}

extern "C" int accept(int fd, struct sockaddr* address, socklen_t* length) {
  using Accept = int (*)(int, struct sockaddr*, socklen_t*);
  static Accept next = reinterpret_cast<Accept>(dlsym(RTLD_NEXT, "accept"));
  int connection = next(fd, address, length);
  if (connection < 0 || !IsOpenMpis(__builtin_return_address(0))) {
    return connection;
  }
  sockaddr_storage ends[2] = {};
  socklen_t room[2] = {sizeof ends[0], sizeof ends[1]};
  auto local = reinterpret_cast<sockaddr*>(&ends[0]), peer = reinterpret_cast<sockaddr*>(&ends[1]);
  bool is_known = getsockname(connection, local, &room[0]) == 0 && getpeername(connection, peer, &room[1]) == 0;
  bool is_internet = local->sa_family == AF_INET || local->sa_family == AF_INET6;
  // One that was broken off has no peer any more, and may have sent something.
  if (is_known && (!is_internet || (!IsByOtherInterface(peer, local) && !IsOfOtherUser(peer, local)))) {
    return connection;
  }
  close(connection);
  errno = EAGAIN;
  return -1;
}
