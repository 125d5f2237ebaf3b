"""What is changed in Horovod's C++ so that ranks talk to whoever has the job's key, and to nobody else."""

from __future__ import annotations

from hvdtrain.horovod_build.edit import Edit

_STORE = "horovod/common/gloo/http_store"
_PAIR = "third_party/gloo/gloo/transport/tcp/pair"
_HTTP = "third_party/HTTPRequest/include/HTTPRequest.hpp"

# A request to the rendezvous, and its answer, are proven with the job's key.
_RENDEZVOUS = (
    Edit(
        f"{_STORE}.h",
        "#define HTTP_NOT_FOUND 404\n",
        "#define HTTP_FORBIDDEN 403\n#define HTTP_NOT_FOUND 404\n#define HTTP_TIME_LIMIT_SECONDS 30\n",
        "for the edits after",
    ),
    Edit(
        f"{_STORE}.h",
        '        "http://" + server_ip + ":" + std::to_string(port) + "/" + scope + "/";\n  }\n',
        '        "http://" + server_ip + ":" + std::to_string(port) + "/" + scope + "/";\n'
        '    server_ = server_ip + ":" + std::to_string(port);\n'
        "    // The driver of an elastic job answers there when all ranks are ready, however long that takes.\n"
        '    time_limit_seconds_ = scope == "rank_and_size" ? 0 : HTTP_TIME_LIMIT_SECONDS;\n'
        "    job_key_ = hvdtrain::JobKey();\n"
        "  }\n",
        "for the edits after",
    ),
    Edit(
        f"{_STORE}.h",
        '#include "gloo_store.h"\n',
        '#include "../hvdtrain_proof.h"\n#include "gloo_store.h"\n',
        "for the edit before",
    ),
    Edit(
        f"{_STORE}.h",
        "  std::string url_prefix_;\n  int rank_;\n",
        "  // One try of PerformHTTP, proven with the job's key if there is one, as its answer must be.\n"
        "  http::Response Send(http::Request& request, const std::string& method,\n"
        "                      const std::string& body);\n\n"
        "  std::string url_prefix_;\n"
        "  std::string server_;\n"
        "  int time_limit_seconds_;\n"
        "  std::string job_key_;\n"
        "  int rank_;\n",
        "for the edits after",
    ),
    Edit(
        f"{_STORE}.cc",
        "// Perform http request to rendezvous server with retry logic\n",
        "http::Response HTTPStore::Send(http::Request& request,\n"
        "                               const std::string& method,\n"
        "                               const std::string& body) {\n"
        "  if (job_key_.empty()) {\n"
        "    return request.send(method, body, {}, time_limit_seconds_);\n"
        "  }\n"
        "  const auto nonce = hvdtrain::Hex(hvdtrain::RandomBytes(16));\n"
        "  auto response = request.send(\n"
        "      method, body,\n"
        "      hvdtrain::RequestHeaders(job_key_, nonce, method, request.getPath(), body),\n"
        "      time_limit_seconds_);\n"
        "  // Who refuses this key cannot answer with it.\n"
        "  if (response.status != HTTP_FORBIDDEN &&\n"
        "      !hvdtrain::IsAnswer(job_key_, nonce, response.status, response.headers,\n"
        "                          std::string(response.body.begin(), response.body.end()))) {\n"
        '    throw std::runtime_error("the answer of the rendezvous at " + server_ +\n'
        '                             " was not made with this job\'s key: another program listens there, or a "\n'
        '                             "rendezvous that does not know HVDTRAIN_JOB_KEY");\n'
        "  }\n"
        "  return response;\n"
        "}\n\n"
        "// Perform http request to rendezvous server with retry logic\n",
        "whoever listened at the rendezvous' address decided with whom a rank shares gradients and weights",
    ),
    Edit(
        f"{_STORE}.cc",
        "  for (int retry_cnt = 0; retry_cnt < MAX_RETRY_TIMES; ++retry_cnt) {\n"
        "    try {\n"
        "      http::Response response = request.send(method, body);\n"
        "      if (response.status != HTTP_OK && response.status != HTTP_NOT_FOUND) {\n"
        '        LOG(WARNING) << "HTTP response not OK, got " << response.status;\n'
        "      } else {\n"
        "        return response;\n"
        "      }\n"
        "    } catch (std::exception& e) {\n"
        '      LOG(DEBUG) << "Exception: " << e.what();\n'
        "    }\n",
        "  std::string problem;\n"
        "  for (int retry_cnt = 0; retry_cnt < MAX_RETRY_TIMES; ++retry_cnt) {\n"
        "    http::Response response;\n"
        "    try {\n"
        "      response = Send(request, method, body);\n"
        "      if (response.status == HTTP_OK || response.status == HTTP_NOT_FOUND) {\n"
        "        return response;\n"
        "      }\n"
        '      problem = "it answered with status " + std::to_string(response.status);\n'
        '      LOG(WARNING) << "HTTP response not OK, got " << response.status;\n'
        "    } catch (std::exception& e) {\n"
        "      problem = e.what();\n"
        '      LOG(DEBUG) << "Exception: " << e.what();\n'
        "    }\n"
        "    if (response.status == HTTP_FORBIDDEN) {\n"
        "      throw std::runtime_error(\n"
        '          "the rendezvous at " + server_ + " refused this process (403): " +\n'
        '          (job_key_.empty() ? "it has no HVDTRAIN_JOB_KEY"\n'
        '                            : "its HVDTRAIN_JOB_KEY is not this job\'s") +\n'
        '          ". Start all ranks with the same launcher, or give all of them the same key.");\n'
        "    }\n",
        "a rank without the job's key is refused: it is told so at once, not that something failed too many times",
    ),
    Edit(
        f"{_STORE}.cc",
        '  LOG(ERROR) << "HTTP GET request failed too many times, aborting. See "\n'
        '                "exception message above.";\n'
        '  throw std::runtime_error("HTTP request failed.");\n',
        '  throw std::runtime_error("request to the rendezvous at " + server_ + " failed " +\n'
        '                           std::to_string(MAX_RETRY_TIMES) + " times: " + problem);\n',
        "what had failed was written nowhere",
    ),
    Edit(
        _HTTP,
        '                      const std::string& body = "",\n'
        "                      const std::vector<std::string>& headers = {})\n",
        '                      const std::string& body = "",\n'
        "                      const std::vector<std::string>& headers = {},\n"
        "                      int timeLimitSeconds = 0)  // for the whole answer; 0: none while the host is alive\n",
        "for the edits after",
    ),
    Edit(
        _HTTP,
        "            Socket socket(internetProtocol);\n",
        "            Socket socket(internetProtocol);\n"
        "#ifndef _WIN32\n"
        "            const auto start = std::chrono::steady_clock::now();\n"
        "            const auto isLate = [&] {\n"
        "                return timeLimitSeconds > 0 &&\n"
        "                    std::chrono::steady_clock::now() - start >= std::chrono::seconds(timeLimitSeconds);\n"
        "            };\n"
        "            const auto set = [&](int level, int option, int value) {\n"
        "                setsockopt(socket, level, option, &value, sizeof(value));\n"
        "            };\n"
        "            timeval limit = {};\n"
        "            limit.tv_sec = timeLimitSeconds;\n"
        "            setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));\n"
        "            setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));\n"
        "            if (timeLimitSeconds == 0)\n"
        "            {\n"
        "                set(SOL_SOCKET, SO_KEEPALIVE, 1);\n"
        "#ifdef TCP_KEEPIDLE\n"
        "                set(IPPROTO_TCP, TCP_KEEPIDLE, 30);\n"
        "                set(IPPROTO_TCP, TCP_KEEPINTVL, 10);\n"
        "                set(IPPROTO_TCP, TCP_KEEPCNT, 3);\n"
        "#endif\n"
        "            }\n"
        "#endif\n",
        "a rank waited for ever for a rendezvous that did not answer, or whose host had gone",
    ),
    Edit(
        _HTTP,
        "static_cast<size_t>(remaining), flags);\n\n",
        "static_cast<size_t>(remaining), flags);\n"
        "#ifndef _WIN32\n"
        "                if (size < 0 && errno == EINTR && !isLate()) continue;\n"
        "#endif\n",
        "the system does not resume a call with a time limit that a signal has interrupted",
    ),
    Edit(
        _HTTP,
        "sizeof(TEMP_BUFFER), flags);\n\n",
        "sizeof(TEMP_BUFFER), flags);\n"
        "#ifndef _WIN32\n"
        "                if (size < 0 && errno == EINTR && !isLate()) continue;\n"
        "                if (isLate() || (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)))\n"
        '                    throw std::runtime_error("No answer from " + domain + ":" + port + " within " +\n'
        '                                             std::to_string(timeLimitSeconds) + " s");\n'
        "#endif\n"
        "                if (size > 0) received += static_cast<size_t>(size);\n"
        "                if (received > (parsedHeaders ? size_t{1} << 26 : size_t{1} << 16))\n"
        '                    throw std::runtime_error("The answer of " + domain + ":" + port + " is too long");\n\n',
        "whoever answered byte by byte, or without an end, held a rank or filled its memory",
    ),
    Edit(
        _HTTP,
        "            bool firstLine = true;\n",
        "            size_t received = 0;\n            bool firstLine = true;\n",
        "for the edit before",
    ),
    Edit(
        _HTTP,
        "    private:\n#ifdef _WIN32\n        WinSock winSock;\n",
        "        const std::string& getPath() const { return path; }\n\n"
        "    private:\n#ifdef _WIN32\n        WinSock winSock;\n",
        "the path is part of what is proven",
    ),
    Edit(
        _HTTP,
        "#  include <sys/socket.h>\n#  include <netinet/in.h>\n",
        "#  include <chrono>\n"
        "#  include <sys/socket.h>\n"
        "#  include <sys/time.h>\n"
        "#  include <netinet/in.h>\n"
        "#  include <netinet/tcp.h>\n",
        "for the edits before",
    ),
)

# A pair of ranks is connected when both sides have proven that they have the job's key.
_PAIRS = (
    Edit(
        "third_party/gloo/gloo/transport/tcp/CMakeLists.txt",
        '      "${CMAKE_CURRENT_SOURCE_DIR}/pair.cc"\n',
        '      "${CMAKE_CURRENT_SOURCE_DIR}/pair.cc"\n      "${CMAKE_CURRENT_SOURCE_DIR}/proof.cc"\n',
        "for the edits after",
    ),
    Edit(
        f"{_PAIR}.h",
        "  Address self_;\n  Address peer_;\n",
        "  // With a key, pairs are connected by Pair::connect alone: the device hears of them when they are.\n"
        "  const std::string jobKey_ = tcp::jobKey();\n\n"
        "  Address self_;\n  Address peer_;\n",
        "for the edits after",
    ),
    Edit(
        f"{_PAIR}.h",
        '#include "gloo/transport/tcp/device.h"\n',
        '#include "gloo/transport/tcp/device.h"\n#include "gloo/transport/tcp/proof.h"\n',
        "for the edit before",
    ),
    Edit(
        f"{_PAIR}.cc",
        "  changeState(LISTENING);\n  device_->registerDescriptor(fd_, EPOLLIN, this);\n",
        "  changeState(LISTENING);\n"
        "  if (jobKey_.empty()) {\n"
        "    device_->registerDescriptor(fd_, EPOLLIN, this);\n"
        "  }\n",
        "the first to connect was taken for the rank that was waited for, whoever it was",
    ),
    # The limit is Gloo's own (Pair::waitUntil): a rank waits here while the other one waits at the rendezvous for ranks
    # between them, for up to the timeout each. Once the timeout, jobs whose ranks come one by one would not start.
    Edit(
        f"{_PAIR}.cc",
        "  is_client_ = rv > 0;\n",
        "  is_client_ = rv > 0;\n\n"
        "  if (!jobKey_.empty()) {\n"
        "    const auto limit = timeout_ == kNoTimeout\n"
        "        ? timeout_\n"
        "        : std::min(timeout_ * 5, std::chrono::duration_cast<std::chrono::milliseconds>(kLargeTimeDuration));\n"
        "    try {\n"
        "      const int listener = fd_;\n"
        "      if (is_client_) {\n"
        "        fd_ = FD_INVALID;\n"
        "        ::close(listener);\n"
        "        fd_ = connectProven(peer_, jobKey_, limit);\n"
        "      } else {\n"
        "        fd_ = acceptProven(listener, self_, peer_, jobKey_, limit);\n"
        "        ::close(listener);\n"
        "      }\n"
        "    } catch (...) {\n"
        "      signalAndThrowException(std::current_exception());\n"
        "    }\n"
        "    handleConnected();\n"
        "    waitUntilConnected(lock, true);\n"
        "    return;\n"
        "  }\n",
        "for the edit before",
    ),
    Edit(
        f"{_PAIR}.cc",
        "        // The pair may be in the LISTENING state when it is destructed.\n"
        "        if (fd_ != FD_INVALID) {\n"
        "          device_->unregisterDescriptor(fd_, this);\n",
        "        // The pair may be in the LISTENING state when it is destructed.\n"
        "        if (fd_ != FD_INVALID) {\n"
        "          if (jobKey_.empty()) {\n"
        "            device_->unregisterDescriptor(fd_, this);\n"
        "          }\n",
        "for the edits before",
    ),
)

PROOF_NATIVE: tuple[Edit, ...] = (*_RENDEZVOUS, *_PAIRS)
