// The alignment that formats ask of a shape; rule and words are those of checked_alignment in Python.
#pragma once

#include <cstdint>
#include <vector>

#include "common/tensor.h"

namespace tejit {

inline void require_alignment(const char* format, const std::vector<std::int64_t>& shape,
                              std::int64_t multiple, bool rowwise, bool columnwise) {
  const Matrix m = matrix_of(shape);
  const auto require = [&](bool wanted, const char* name, const char* which, std::int64_t size) {
    if (!wanted || size % multiple == 0) return;
    fail(format, " needs ", name, " (", which, ") to be a multiple of ", multiple, ", but ", name, " = ", size,
         " in shape ", shape_name(shape), "; pad it to ", (size / multiple + 1) * multiple);
  };
  require(rowwise, "K", "the last dimension", m.cols);
  require(columnwise, "M", "all dimensions but the last together", m.rows);
}

}  // namespace tejit
