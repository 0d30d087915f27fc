// Quantizing what was written to memory by the format's own op, for an op that computes a tensor and
// quantizes it. Each format defines its own beside its ops, so that those who call them do not compile them
// again.
#pragma once

#include <tuple>

#include "common/tensor.h"

// Tensors of the stable ABI are hidden, so what holds them must be.
#pragma GCC visibility push(hidden)

namespace tejit {
namespace fused {

using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// What comes out of a fused op; the numbers are those of FORMATS in Python.
enum Format { kCurrent = 0, kDelayed = 1, kBlocks = 2, kMxfp8 = 3 };

// How the output is to be quantized.
struct Cast {
  const char* op;
  std::int64_t format, fp8;
  bool rowwise, columnwise;
  bool flag;  // FP8: scales are powers of two; MXFP8: scales in the order of the GEMM
  double floor;
  const MaybeTensor& scale;  // of delayed scaling, else none
  const MaybeTensor& amax;
};

inline void check_cast(const Cast& cast) {
  if (cast.format < kCurrent || cast.format > kMxfp8)
    fail(cast.op, ": format is ", cast.format,
         ", but 0 (current), 1 (delayed), 2 (blocks) or 3 (MXFP8) is needed");
  if ((cast.format == kDelayed) != (cast.scale && cast.amax))
    fail(cast.op, ": format ", cast.format, " needs scale and amax ",
         cast.format == kDelayed ? "both" : "not to be given", "; they belong to delayed scaling (1)");
}

Four quantize_plain_current(const Tensor& y, const Cast& cast, bool cuda);
Four quantize_plain_delayed(const Tensor& y, const Cast& cast, bool cuda);
Four quantize_plain_blocks(const Tensor& y, const Cast& cast, bool cuda);
Four quantize_plain_mxfp8(const Tensor& y, const Cast& cast, bool cuda);

// FP8's buffers as a fused op returns them, of what FP8's own ops return: codes, transposed codes, scale_inv.
inline Four in_order_of_fused(const std::tuple<Tensor, Tensor, Tensor>& of_fp8, const Device& device) {
  return {std::get<0>(of_fp8), std::get<2>(of_fp8), std::get<1>(of_fp8), empty_floats(0, device)};
}

template <bool kCuda>
Four quantize_plain(const Tensor& y, const Cast& cast) {
  if (cast.format == kBlocks) return quantize_plain_blocks(y, cast, kCuda);
  if (cast.format == kMxfp8) return quantize_plain_mxfp8(y, cast, kCuda);
  if (cast.format == kDelayed) return quantize_plain_delayed(y, cast, kCuda);
  return quantize_plain_current(y, cast, kCuda);
}

}  // namespace fused
}  // namespace tejit

#pragma GCC visibility pop
