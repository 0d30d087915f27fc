// Errors of the host part: text for the thread that asks through the C functions, exceptions everywhere else.
#pragma once

#include <cstdio>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace tejit {

inline void append(std::string& out, const std::string& piece) {
  out += piece;
}
inline void append(std::string& out, const char* piece) {
  out += piece;
}

template <typename Number, typename = std::enable_if_t<std::is_arithmetic_v<Number>>>
void append(std::string& out, Number number) {
  if constexpr (std::is_floating_point_v<Number>) {
    char digits[32];
    std::snprintf(digits, sizeof digits, "%g", static_cast<double>(number));
    out += digits;
  } else {
    out += std::to_string(number);
  }
}

// No stream: their locale facets are looked up by addresses, which crash where a linker has put a second
// copy of the C++ library into this file beside the one that torch brought.
template <typename... Pieces>
std::string text(const Pieces&... pieces) {
  std::string out;
  (append(out, pieces), ...);
  return out;
}

// torch turns std::runtime_error into RuntimeError with the same text.
template <typename... Pieces>
[[noreturn]] void fail(const Pieces&... pieces) {
  throw std::runtime_error(text(pieces...));
}

inline std::string& last_error() {
  thread_local std::string message;
  return message;
}

}  // namespace tejit
