// The ops of FP8 with current scaling and of its parts, added to the schemas that Python registers.
#include "common/boxed.h"
#include "fp8/ops.h"
#include "fused/plain.h"

STABLE_TORCH_LIBRARY_IMPL(tejit, CPU, library) {
  using namespace tejit::fp8;
  library.impl("fp8_amax", TORCH_BOX(&amax_cpu));
  library.impl("fp8_scale", TORCH_BOX(&scale_cpu));
  library.impl("fp8_quantize_current", TORCH_BOX(&quantize_cpu));
  library.impl("fp8_quantize_current_out", TORCH_BOX(&quantize_out_cpu));
}

STABLE_TORCH_LIBRARY_IMPL(tejit, CUDA, library) {
  using namespace tejit::fp8;
  library.impl("fp8_amax", tejit::on_cuda<&amax_cuda, kAmaxOp>);
  library.impl("fp8_scale", tejit::on_cuda<&scale_cuda, kScaleOp>);
  library.impl("fp8_quantize_current", tejit::on_cuda<&quantize_cuda, kQuantizeOp>);
  library.impl("fp8_quantize_current_out", tejit::on_cuda<&quantize_out_cuda, kQuantizeOutOp>);
}

// No tensor among its arguments, so no device either that the dispatcher could see.
STABLE_TORCH_LIBRARY_IMPL(tejit, BackendSelect, library) {
  using namespace tejit::fp8;
  library.impl("fp8_make_empty", TORCH_BOX(&make_empty));
}

namespace tejit {
namespace fused {

Four quantize_plain_current(const Tensor& y, const Cast& cast, bool cuda) {
  const auto run = cuda ? fp8::quantize_cuda : fp8::quantize_cpu;
  const fp8::Three three = run(y, cast.fp8, cast.rowwise, cast.columnwise, cast.flag, cast.floor, {});
  return in_order_of_fused(three, device_of(y));
}

}  // namespace fused
}  // namespace tejit
