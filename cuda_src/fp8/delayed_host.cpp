// The ops of FP8 with delayed scaling, added to the schemas that Python registers.
#include "common/boxed.h"
#include "fp8/delayed_ops.h"
#include "fused/plain.h"

STABLE_TORCH_LIBRARY_IMPL(tejit, CPU, library) {
  using namespace tejit::fp8;
  library.impl("fp8_quantize_delayed", TORCH_BOX(&quantize_delayed_cpu));
  library.impl("fp8_quantize_delayed_out", TORCH_BOX(&quantize_delayed_out_cpu));
}

STABLE_TORCH_LIBRARY_IMPL(tejit, CUDA, library) {
  using namespace tejit::fp8;
  library.impl("fp8_quantize_delayed", tejit::on_cuda<&quantize_delayed_cuda, kDelayedOp>);
  library.impl("fp8_quantize_delayed_out", tejit::on_cuda<&quantize_delayed_out_cuda, kDelayedOutOp>);
}

namespace tejit {
namespace fused {

Four quantize_plain_delayed(const Tensor& y, const Cast& cast, bool cuda) {
  const auto run = cuda ? fp8::quantize_delayed_cuda : fp8::quantize_delayed_cpu;
  const fp8::Three three = run(y, cast.fp8, cast.rowwise, cast.columnwise, *cast.scale, *cast.amax);
  return in_order_of_fused(three, device_of(y));
}

}  // namespace fused
}  // namespace tejit
