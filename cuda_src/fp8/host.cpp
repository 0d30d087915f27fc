// The ops of FP8 with one scale a tensor, added to the schemas that Python registers.
#include "common/boxed.h"
#include "fp8/delayed_ops.h"
#include "fp8/ops.h"
#include "fused/plain.h"

STABLE_TORCH_LIBRARY_IMPL(tejit, CPU, library) {
  using namespace tejit::fp8;
  library.impl("fp8_amax", TORCH_BOX(&amax_cpu));
  library.impl("fp8_scale", TORCH_BOX(&scale_cpu));
  library.impl("fp8_quantize_current", TORCH_BOX(&quantize_cpu));
  library.impl("fp8_quantize_current_out", TORCH_BOX(&quantize_out_cpu));
  library.impl("fp8_quantize_delayed", TORCH_BOX(&quantize_delayed_cpu));
  library.impl("fp8_quantize_delayed_out", TORCH_BOX(&quantize_delayed_out_cpu));
}

STABLE_TORCH_LIBRARY_IMPL(tejit, CUDA, library) {
  using namespace tejit::fp8;
  library.impl("fp8_amax", tejit::on_cuda<&amax_cuda, kAmaxOp>);
  library.impl("fp8_scale", tejit::on_cuda<&scale_cuda, kScaleOp>);
  library.impl("fp8_quantize_current", tejit::on_cuda<&quantize_cuda, kQuantizeOp>);
  library.impl("fp8_quantize_current_out", tejit::on_cuda<&quantize_out_cuda, kQuantizeOutOp>);
  library.impl("fp8_quantize_delayed", tejit::on_cuda<&quantize_delayed_cuda, kDelayedOp>);
  library.impl("fp8_quantize_delayed_out", tejit::on_cuda<&quantize_delayed_out_cuda, kDelayedOutOp>);
}

// No tensor among its arguments, so no device either that the dispatcher could see.
STABLE_TORCH_LIBRARY_IMPL(tejit, BackendSelect, library) {
  using namespace tejit::fp8;
  library.impl("fp8_make_empty", TORCH_BOX(&make_empty));
}

namespace tejit {
namespace fused {

Four quantize_plain_fp8(const Tensor& y, const Cast& cast, bool cuda) {
  const auto ordered = [](fp8::Three three, const Device& device) -> Four {
    return {std::get<0>(three), std::get<2>(three), std::get<1>(three), empty_floats(0, device)};
  };
  const Device device = device_of(y);
  if (cast.format == kCurrent) {
    const auto run = cuda ? fp8::quantize_cuda : fp8::quantize_cpu;
    return ordered(run(y, cast.fp8, cast.rowwise, cast.columnwise, cast.flag, cast.floor, {}), device);
  }
  const auto run = cuda ? fp8::quantize_delayed_cuda : fp8::quantize_delayed_cpu;
  return ordered(run(y, cast.fp8, cast.rowwise, cast.columnwise, *cast.scale, *cast.amax), device);
}

}  // namespace fused
}  // namespace tejit
