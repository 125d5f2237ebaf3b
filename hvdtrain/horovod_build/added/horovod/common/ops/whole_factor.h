// A factor for whole numbers, on the host and on devices.

#ifndef HOROVOD_WHOLE_FACTOR_H
#define HOROVOD_WHOLE_FACTOR_H

#include <cmath>
#include <cstdint>

#if defined(__CUDACC__) || defined(__HIPCC__)
#define HOROVOD_HOST_DEVICE __host__ __device__
#else
#define HOROVOD_HOST_DEVICE
#endif

namespace horovod {
namespace common {

// Products are cut towards zero, as a conversion from double cuts them. Above 2^53 they are exact, where a double does
// not hold all whole numbers. 1/n, as for a mean, divides by n: a rounded 1/49 times 49 is less than 1.
class WholeFactor {
public:
  explicit WholeFactor(double factor) : factor_(factor) {
    double inverse = std::round(1.0 / factor);
    if (std::abs(inverse) > 1.0 && std::abs(inverse) <= LARGEST && factor == 1.0 / inverse) {
      divisor_ = static_cast<int64_t>(inverse);
    } else if (std::abs(factor) <= LARGEST && factor == std::round(factor)) {
      is_whole_ = true;
      multiplier_ = static_cast<int64_t>(factor);
    } else if (std::abs(factor) <= LARGEST) {
      int exponent;
      mantissa_ = static_cast<uint64_t>(std::ldexp(std::frexp(std::abs(factor), &exponent), 53));
      shift_ = 53 - exponent; // |factor| is mantissa / 2^shift
    }
  }

  template <typename T> HOROVOD_HOST_DEVICE T operator*(T number) const {
    if (divisor_ != 0) return static_cast<T>(number / divisor_);
    if (is_whole_) return static_cast<T>(static_cast<uint64_t>(number) * static_cast<uint64_t>(multiplier_));
    if (sizeof(T) == 8 && mantissa_ != 0 && !(number >= -(int64_t(1) << 53) && number <= (int64_t(1) << 53))) {
      return static_cast<T>(exact(static_cast<int64_t>(number)));
    }
    return static_cast<T>(factor_ * number);
  }

private:
  static constexpr double LARGEST = 9007199254740992.0; // 2^53

  HOROVOD_HOST_DEVICE int64_t exact(int64_t number) const {
    auto size = number < 0 ? ~static_cast<uint64_t>(number) + 1 : static_cast<uint64_t>(number);
    auto product = shift_ < 128 ? static_cast<unsigned __int128>(size) * mantissa_ >> shift_ : 0;
    auto result = static_cast<uint64_t>(product);
    return static_cast<int64_t>((number < 0) != (factor_ < 0) ? ~result + 1 : result);
  }

  double factor_;
  int64_t divisor_ = 0, multiplier_ = 0;
  bool is_whole_ = false;
  uint64_t mantissa_ = 0; // 0: the factor is not finite, or too large
  int shift_ = 0;
};

template <typename T> HOROVOD_HOST_DEVICE T& operator*=(T& number, const WholeFactor& factor) {
  return number = factor * number;
}

} // namespace common
} // namespace horovod

#endif
