// What shows that a request, an answer or a connection comes from the job: HMAC-SHA-256 with the job's key. The rules of
// requests and answers are those of horovod/runner/common/util/proof.py. Needs nothing but the standard library.

#ifndef HVDTRAIN_PROOF_H
#define HVDTRAIN_PROOF_H

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace hvdtrain {

// Bytes are kept in std::string, here and below: a digest holds 32 of them.
class Sha256 {
public:
  void Update(const std::string& bytes) {
    length_ += bytes.size();
    for (char byte : bytes) {
      Append(static_cast<uint8_t>(byte));
    }
  }

  // Ends the message: nothing may follow.
  std::string Digest() {
    const uint64_t bits = length_ * 8;
    Append(0x80);
    while (used_ != 56) {
      Append(0);
    }
    for (int shift = 56; shift >= 0; shift -= 8) {
      Append(static_cast<uint8_t>(bits >> shift));
    }
    std::string digest;
    for (uint32_t word : state_) {
      for (int shift = 24; shift >= 0; shift -= 8) {
        digest.push_back(static_cast<char>(static_cast<uint8_t>(word >> shift)));
      }
    }
    return digest;
  }

private:
  void Append(uint8_t byte) {
    block_[used_++] = byte;
    if (used_ == block_.size()) {
      Compress();
      used_ = 0;
    }
  }

  static uint32_t Rotate(uint32_t word, int by) {
    return (word >> by) | (word << (32 - by));
  }

  // FIPS 180-4, 6.2.2.
  void Compress() {
    static const uint32_t constants[64] = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
        0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
        0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
        0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
        0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
        0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
    uint32_t w[64];
    for (int i = 0; i < 16; ++i) {
      const uint8_t* at = &block_[static_cast<size_t>(4 * i)];
      w[i] = static_cast<uint32_t>(at[0]) << 24 | static_cast<uint32_t>(at[1]) << 16 |
             static_cast<uint32_t>(at[2]) << 8 | static_cast<uint32_t>(at[3]);
    }
    for (int i = 16; i < 64; ++i) {
      const uint32_t low = Rotate(w[i - 15], 7) ^ Rotate(w[i - 15], 18) ^ (w[i - 15] >> 3);
      const uint32_t high = Rotate(w[i - 2], 17) ^ Rotate(w[i - 2], 19) ^ (w[i - 2] >> 10);
      w[i] = w[i - 16] + low + w[i - 7] + high;
    }
    uint32_t a = state_[0], b = state_[1], c = state_[2], d = state_[3];
    uint32_t e = state_[4], f = state_[5], g = state_[6], h = state_[7];
    for (int i = 0; i < 64; ++i) {
      const uint32_t first =
          h + (Rotate(e, 6) ^ Rotate(e, 11) ^ Rotate(e, 25)) + ((e & f) ^ (~e & g)) + constants[i] + w[i];
      const uint32_t second = (Rotate(a, 2) ^ Rotate(a, 13) ^ Rotate(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g;
      g = f;
      f = e;
      e = d + first;
      d = c;
      c = b;
      b = a;
      a = first + second;
    }
    const uint32_t added[8] = {a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < 8; ++i) {
      state_[i] += added[i];
    }
  }

  std::array<uint32_t, 8> state_{{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab,
                                  0x5be0cd19}};
  std::array<uint8_t, 64> block_{};
  size_t used_ = 0;
  uint64_t length_ = 0;
};

inline std::string Sha256Of(const std::string& bytes) {
  Sha256 hash;
  hash.Update(bytes);
  return hash.Digest();
}

// RFC 2104.
inline std::string Hmac(const std::string& key, const std::string& message) {
  std::string block = key.size() > 64 ? Sha256Of(key) : key;
  block.resize(64, '\0');
  std::string inner_pad, outer_pad;
  for (char byte : block) {
    inner_pad.push_back(static_cast<char>(byte ^ 0x36));
    outer_pad.push_back(static_cast<char>(byte ^ 0x5c));
  }
  Sha256 inner;
  inner.Update(inner_pad);
  inner.Update(message);
  return Sha256Of(outer_pad + inner.Digest());
}

inline std::string Hex(const std::string& bytes) {
  static const char digits[] = "0123456789abcdef";
  std::string hex;
  for (char byte : bytes) {
    hex.push_back(digits[static_cast<uint8_t>(byte) >> 4]);
    hex.push_back(digits[byte & 15]);
  }
  return hex;
}

// How long it takes does not tell where two texts differ.
inline bool IsSame(const std::string& given, const std::string& expected) {
  if (given.size() != expected.size()) {
    return false;
  }
  volatile unsigned char different = 0;
  for (size_t i = 0; i < given.size(); ++i) {
    different = static_cast<unsigned char>(different | static_cast<unsigned char>(given[i] ^ expected[i]));
  }
  return different == 0;
}

// Bytes that nobody can guess.
inline std::string RandomBytes(size_t count) {
  std::ifstream device("/dev/urandom", std::ios::binary);
  std::string bytes(count, '\0');
  if (!device.read(&bytes[0], static_cast<std::streamsize>(count))) {
    throw std::runtime_error("/dev/urandom cannot be read");
  }
  return bytes;
}

// This job's key, 32 bytes; empty where HVDTRAIN_JOB_KEY is not set.
inline std::string JobKey() {
  const char* variable = std::getenv("HVDTRAIN_JOB_KEY");
  const std::string text = variable == nullptr ? "" : variable;
  const bool is_hex = text.find_first_not_of("0123456789abcdefABCDEF") == std::string::npos;
  if (text.empty()) {
    return text;
  }
  if (text.size() != 64 || !is_hex) {
    throw std::runtime_error("HVDTRAIN_JOB_KEY must be 64 hex digits, the same for every process of a job. Received: " +
                             std::to_string(text.size()) + " characters.");
  }
  std::string key;
  for (size_t i = 0; i < text.size(); i += 2) {
    key.push_back(static_cast<char>(std::stoi(text.substr(i, 2), nullptr, 16)));
  }
  return key;
}

// The headers that prove a request, as lines; `nonce` is 16 random bytes in hex, a new one for every request.
inline std::vector<std::string> RequestHeaders(const std::string& key, const std::string& nonce,
                                               const std::string& method, const std::string& path,
                                               const std::string& body) {
  const std::string digest = Hex(Sha256Of(body));
  const std::string proof = Hex(Hmac(key, "request\n" + method + "\n" + path + "\n" + nonce + "\n" + digest));
  return {"X-Horovod-Nonce: " + nonce, "X-Horovod-Body: " + digest, "X-Horovod-Proof: " + proof};
}

// The value of the header `name`, given in lower case, among the lines of an answer's head; empty if it is not there.
inline std::string HeaderValue(const std::vector<std::string>& lines, const std::string& name) {
  for (const std::string& line : lines) {
    const size_t colon = line.find(':');
    std::string found = line.substr(0, colon);
    std::transform(found.begin(), found.end(), found.begin(),
                   [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; });
    if (colon != std::string::npos && found == name) {
      const size_t begin = line.find_first_not_of(" \t", colon + 1);
      const size_t end = line.find_last_not_of(" \t");
      return begin == std::string::npos ? "" : line.substr(begin, end - begin + 1);
    }
  }
  return "";
}

// Whether an answer to the request with this nonce was made with `key`.
inline bool IsAnswer(const std::string& key, const std::string& nonce, int status,
                     const std::vector<std::string>& headers, const std::string& body) {
  const std::string proof =
      Hex(Hmac(key, "answer\n" + nonce + "\n" + std::to_string(status) + "\n" + Hex(Sha256Of(body))));
  return IsSame(HeaderValue(headers, "x-horovod-proof"), proof);
}

} // namespace hvdtrain

#endif // HVDTRAIN_PROOF_H
