// Errors of the host part: text for the thread that asks through the C functions, exceptions everywhere else.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace tejit {

template <typename... Pieces>
std::string text(const Pieces&... pieces) {
  std::ostringstream out;
  (out << ... << pieces);
  return out.str();
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
