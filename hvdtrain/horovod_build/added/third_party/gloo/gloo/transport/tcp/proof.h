// Connections between ranks of a job that has a key: both sides prove it before a byte of Gloo's is read.
//
// The connecting side sends a hello of 48 bytes, and the listening side answers with 32:
//
//   hello:  nonce (16 random bytes), hmac(key, "gloo connect\n" + listening address + nonce)
//   answer: hmac(key, "gloo accept\n" + nonce)
//
// Pairs of a mesh are connected in the order of ranks, on every rank: they are completed in the order of (lower rank,
// higher rank), so each side finds the other one waiting, or soon will.

#pragma once

#include <chrono>
#include <string>

#include "gloo/transport/tcp/address.h"

namespace gloo {
namespace transport {
namespace tcp {

// This job's key, empty where HVDTRAIN_JOB_KEY is not set.
std::string jobKey();

// Accepts connections at `listener`, whose address is `self`, until one has proven itself; returns that one. All others
// are closed. Throws IoException after `limit`, unless it is 0. `peer` is whom the error names.
int acceptProven(
    int listener,
    const Address& self,
    const Address& peer,
    const std::string& key,
    std::chrono::milliseconds limit);

// Connects to `peer` and returns the socket when both sides have proven themselves. Throws IoException after `limit`,
// unless it is 0. Ranks of an elastic job may wait longer for an answer: whom they wait for may wait for a new host.
int connectProven(
    const Address& peer,
    const std::string& key,
    std::chrono::milliseconds limit);

} // namespace tcp
} // namespace transport
} // namespace gloo
